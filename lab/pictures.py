"""Table and picture of docs/dose.md, from a record of the study `dose`.

    python -m lab.pictures docs/records/dose.json docs/dose.png
"""

import sys
from pathlib import Path
from statistics import fmean as mean
from statistics import median

import numpy
from matplotlib.figure import Figure

from lab.study import markdown, read_json

LINES = {
    "two": ("two policies", "tab:red", "-"),
    "two-wide": ("two policies, no clip", "tab:red", ":"),
    "three": ("three policies", "black", "-"),
    "tis-token": ("with TIS", "tab:blue", "-"),
    "icepop": ("IcePop", "tab:cyan", "-"),
    "tis-sequence": ("sequence weights", "tab:green", "-"),
    "mis": ("MIS", "tab:olive", "-"),
    "geometric": ("geometric rejection", "tab:orange", "-"),
}
FAULTS = {"raw": "o", "stale-cache": "s", "raw-stale-cache": "D"}
PANELS = {"reward": "training reward, last 5 steps (the engine samples)",
          "eval_trainer_alone": "held out, the trainer alone samples"}  # fmt: skip
Cells = dict[str, dict[str, list[float]]]  # the metrics of each cell, by seed


def read_cells(path: Path) -> Cells:
    return {name: cell["metrics"] for name, cell in read_json(path)["cells"].items()}


def dose_table(cells: Cells) -> str:
    """Training reward / held out by the trainer alone, of each dose and each fault by form."""
    rows = [["engine", "nats, step 1", *(label for label, _, _ in LINES.values())]]
    for kind in [name.partition(".")[2] for name in cells if name.startswith("two.")]:
        rows.append([kind, f"{median(cells[f'two.{kind}']['mismatch_first']):.2g}"])
        for form in LINES:
            cell = cells.get(f"{form}.{kind}", {})
            means = [f"{mean(cell[metric]):.2f}" for metric in PANELS if cell]
            rows[-1].append("/".join(means))
    return markdown(rows)


def draw_doses(cells: Cells) -> Figure:
    """Means over the seeds (of the mismatch, medians); the bands are ranges of two of the forms."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for form, (label, color, style) in LINES.items():
            doses = sorted((median(cell["mismatch_first"]), cell[metric])
                           for name, cell in cells.items()
                           if name.startswith((f"{form}.int", f"{form}.fp")))
            nats = [size for size, _ in doses]
            rewards = numpy.array([values for _, values in doses])  # (doses, seeds)
            if len(doses) > 1:
                axis.plot(nats, rewards.mean(axis=1), style, color=color, label=label)
            if form not in ("two", "three"):
                continue
            axis.fill_between(nats, rewards.min(axis=1), rewards.max(axis=1), color=color,
                              alpha=0.12)
            for fault, marker in FAULTS.items():
                if cell := cells.get(f"{form}.{fault}"):
                    # A cache is not yet stale at the first step: where it is over the run.
                    size = mean(cell["mismatch" if "stale" in fault else "mismatch_first"])
                    axis.plot(size, mean(cell[metric]), marker, color=color, mec="white",
                              ms=9, label=f"{fault}, {label}")
        axis.set(xscale="log", title=title, xlabel="mismatch at step 1 (stale cache: of the run),"
                 " nats a token", ylim=(0, 1.02))
    axis.legend(fontsize=8, loc="lower left")
    return figure


def main(record: Path, picture: Path) -> None:
    cells = read_cells(record)
    print(dose_table(cells))
    draw_doses(cells).savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
