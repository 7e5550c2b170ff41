"""Python runs this at the start of a process with this folder in PYTHONPATH."""

import triton_numpy  # noqa: F401
