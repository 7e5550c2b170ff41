"""What makes a CPU take the path of a GPU, where it can. RUNNER=v2 in the environment: engines have model runner V2."""

import os
from pathlib import Path

RUNNER = os.environ.get("RUNNER", "v1")
assert RUNNER in ("v1", "v2"), f"{RUNNER=}"
if RUNNER == "v2":
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # children import sitecustomize.py
    from gpu_path import triton_numpy
else:
    triton_numpy = None
