"""What makes a CPU take the path of a GPU, where it can. RUNNER=v2 in the environment: engines have model runner V2."""

import os
from pathlib import Path

RUNNER = os.environ.get("RUNNER")
if RUNNER == "v2":
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # children import sitecustomize.py
    from gpu_path import triton_numpy  # noqa: F401
