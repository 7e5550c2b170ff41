"""Which layer is to blame for a mismatch: `python -m probe record` and `python -m probe diagnose`."""
