"""The probe names the layer that causes a mismatch: `python -m probe`."""
