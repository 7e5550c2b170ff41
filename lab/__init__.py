"""Studies: `python -m lab.study NAME` runs the cells that lab/cells.py lists."""
