"""The tests marked gpu, as a run of the study `gpu`: the end of its log counts them."""

import sys
from pathlib import Path

import pytest


def main(arguments: list[str]) -> None:
    """Of the options of train.py only --out, the folder of the run, is used."""
    Path(arguments[arguments.index("--out") + 1]).mkdir(parents=True)
    status = pytest.main(["-q", "-m", "gpu", "tests"])
    if status:
        sys.exit(int(status))
