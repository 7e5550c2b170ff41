"""Python runs this at the start of a process with this folder in PYTHONPATH.

    PYTHONPATH=tests/gpu_path RUNNER=v2 SLEEP=loses .venv/bin/python train.py ...
"""

import os
import sys
from pathlib import Path

if os.environ.get("RUNNER") == "v2":
    import triton_numpy  # noqa: F401
if os.environ.get("SLEEP") == "loses":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import lossy_sleep

    lossy_sleep.install()
