"""Studies: `python -m lab.study NAME` runs the cells that lab/cells.py lists."""

from time import monotonic

STARTED = monotonic()  # before the imports of a study, which belong to its --minutes
