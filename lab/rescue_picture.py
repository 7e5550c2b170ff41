"""The picture of the study `rescue`: python -m lab.rescue_picture RECORD PICTURE"""

import json
import sys
from statistics import fmean as mean

from matplotlib.figure import Figure

BINS = "below 0.1", "0.1 to 0.5", "0.5 to 0.9", "above 0.9"
FIRST = {"reward": "reward", "entropy": "entropy, nats",
         "clip_up": "share of clipped tokens, A > 0", "clip_down": "share of clipped tokens, A < 0"}


def averaged(curves: dict, field: str) -> tuple[list[int], list[float]]:
    """Steps and the mean over the seeds that have a value there."""
    columns = [[value for value in column if value is not None] for column in zip(*curves[field])]
    steps = [step for step, column in enumerate(columns, 1) if column]
    return steps, [mean(column) for column in columns if column]


def main(record: str, picture: str) -> None:
    cells = json.loads(open(record).read())["cells"]
    figure = Figure(figsize=(19, 9), layout="constrained")
    axes = figure.subplots(2, 4)
    for axis, (field, title) in zip(axes[0], FIRST.items(), strict=True):
        for name, cell in cells.items():
            style = "--" if name.startswith("raw+cache-") else "-"
            axis.plot(*averaged(cell["curves"], field), style, label=name)
        axis.set(title=title, xlabel="step")
    axes[0][0].legend(fontsize=8)
    for axis, name in zip(axes[1], ("parity", "raw", "cache", "raw+cache"), strict=True):
        for index, label in enumerate(BINS):
            axis.plot(*averaged(cells[name]["curves"], f"log_ratio_{index}"), label=label)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_yscale("symlog", linthresh=0.02)
        axis.set(title=f"{name}: mean log(old / behavior) by the engine's probability",
                 xlabel="step")
    axes[1][0].legend(fontsize=8)
    figure.savefig(picture, dpi=100)


main(*sys.argv[1:])
