"""The law of docs/dose.md, table and picture: reward against mismatch, faults as points.

    python -m lab.dose docs/records/dose.json docs/dose.png
"""

import sys
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any

from lab.study import read_json

LINES = {
    "two": ("two policies", "tab:red", "-"),
    "two-wide": ("two policies, no clip", "tab:red", ":"),
    "two-upper": ("two, upper bound", "tab:red", "--"),
    "two-lower": ("two, lower bound", "tab:red", "-."),
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


def table(record: dict[str, Any]) -> str:
    """Training reward / held out by the trainer alone, of each dose and each fault by form."""
    cells = {name: cell["metrics"] for name, cell in record["cells"].items()}
    rows = ["| engine | nats, step 1 | " + " | ".join(LINES[form][0] for form in LINES) + " |",
            "| --- " * (len(LINES) + 2) + "|"]
    for kind in [name.partition(".")[2] for name in cells if name.startswith("two.")]:
        found = [cells.get(f"{form}.{kind}") for form in LINES]
        shown = ["/".join(f"{mean(cell[metric]):.2f}" for metric in PANELS) if cell else ""
                 for cell in found]
        nats = f"{median(cells[f'two.{kind}']['mismatch_first']):.2g}"
        rows.append(f"| {kind} | {nats} | {' | '.join(shown)} |")
    return "\n".join(rows)


def draw(record: dict[str, Any], path: Path) -> Any:
    """Means over the seeds (of the mismatch, medians); the bands are ranges of two of the forms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    cells = {name: cell["metrics"] for name, cell in record["cells"].items()}
    for axis, (metric, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for form, (label, color, style) in LINES.items():
            doses = sorted((median(cell["mismatch_first"]), cell[metric])
                           for name, cell in cells.items()
                           if name.startswith((f"{form}.int", f"{form}.fp")))
            nats, rewards = zip(*doses, strict=True)
            if len(doses) > 1:
                axis.plot(nats, list(map(mean, rewards)), style, color=color, label=label)
            if form in ("two", "three"):
                axis.fill_between(nats, list(map(min, rewards)), list(map(max, rewards)),
                                  color=color, alpha=0.12)
                for fault, marker in FAULTS.items():
                    if cell := cells.get(f"{form}.{fault}"):
                        # A cache is not yet stale at the first step: where it is over the run.
                        size = mean(cell["mismatch" if "stale" in fault else "mismatch_first"])
                        axis.plot(size, mean(cell[metric]), marker, color=color, mec="white",
                                  ms=9, label=f"{fault}, {label}")
        axis.set(xscale="log", title=title, xlabel="mismatch at step 1 (stale cache: of the run),"
                 " nats a token", ylim=(0, 1.02))
    axis.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)
    return figure


if __name__ == "__main__":
    results = read_json(Path(sys.argv[1]))
    print(table(results))
    draw(results, Path(sys.argv[2]))
