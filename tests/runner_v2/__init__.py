"""RUNNER=v2: vLLM's engines have model runner V2, which is a GPU's, in this process and in its children."""

import os
from pathlib import Path

RUNNER = os.environ.get("RUNNER")
if RUNNER == "v2":
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # children import sitecustomize.py
    from runner_v2 import triton_numpy  # noqa: F401
