"""Pictures of the pages, drawn from records: a record's name decides which.

    python -m lab.pictures docs/records/dose.json docs/dose.png            # and the table
    python -m lab.pictures docs/records/staleness.json docs/staleness.png
    python -m lab.pictures docs/records/transfer.json docs/transfer.png
    python -m lab.pictures runs/DATE-TIME/metrics.jsonl docs/step.png      # of one step of a run
"""

import json
import sys
from pathlib import Path
from statistics import fmean as mean
from statistics import median

import numpy
from matplotlib.figure import Figure

from lab.cells import LATE_FORMS, SERVED
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


def draw_staleness(cells: Cells) -> Figure:
    """The trainer alone after 60 updates against the batches in flight, a line for each form."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    batches = 1, 4, 8, 16
    for axis, load in zip(figure.subplots(1, 3, sharey=True), ("keep", "recompute", "abort"),
                          strict=True):
        for form in LATE_FORMS:
            rewards = [cells[f"{late}.{load}.{form}"]["alone_60"] for late in batches]
            middle = [mean(each) for each in rewards]
            spread = [middle[at] - min(each) for at, each in enumerate(rewards)], [
                max(each) - middle[at] for at, each in enumerate(rewards)]
            label, color, _ = LINES.get(form, ("REINFORCE, ratio not clipped", "tab:purple", "-"))
            axis.errorbar(batches, middle, spread, color=color, label=label, capsize=2)
        axis.set(xscale="log", xticks=batches, xticklabels=batches, ylim=(0, 1.02),
                 xlabel="batches in flight", title=f"unfinished requests at a load: {load}")
    axis.legend(fontsize=8, loc="lower left")
    figure.supylabel("held out after 60 updates, the trainer alone samples", fontsize=9)
    return figure


def draw_transfer(cells: Cells) -> Figure:
    """Held-out reward of each policy (rows: trained under) by server (columns)."""
    trained = [name for name in cells if "." not in name.replace("2.4", "")]
    rewards = [[mean(cells[f"{name}.{server}"]["eval_reward"]) for server in SERVED]
               for name in trained]
    figure = Figure(figsize=(9, 7), layout="constrained")
    axis = figure.subplots()
    axis.imshow(rewards, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(rewards):
        for column, value in enumerate(values):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(SERVED)), SERVED, rotation=45)
    axis.set_yticks(range(len(trained)), trained)
    axis.set(xlabel="served under", ylabel="trained under", title="held-out reward, sampled")
    return figure


PHASES = {  # of a step: who works, with which color
    "generate": ("engine", "tab:blue"), "sleep": ("engine", "tab:gray"),
    "reward": ("trainer", "tab:olive"), "old_logprobs": ("trainer", "tab:green"),
    "update": ("trainer", "tab:orange"), "load": ("engine", "tab:purple"),
    "proof": ("engine", "tab:brown"), "canary": ("engine", "tab:red"),
}  # fmt: skip


def draw_step(rows: list[dict]) -> Figure:
    """The medians of the steps: seconds of each phase, and the peak memory of the process."""
    figure, begun = Figure(figsize=(11, 3.6), layout="constrained"), 0.0
    who, memory = figure.subplots(2, 1, sharex=True)
    steps = [row for row in rows if row["step"]]
    for phase, (worker, color) in PHASES.items():
        seconds = median(row[f"{phase}_s"] for row in steps)
        who.barh(worker, seconds, left=begun, color=color, label=f"{phase} {seconds:.2f} s")
        peak = f"{phase}_gib" if f"{phase}_gib" in steps[0] else "sync_gib"
        gib = median(row[peak] for row in steps)
        memory.bar(begun, gib, width=seconds, align="edge", color=color)
        begun += seconds
    who.legend(fontsize=8, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, 1.35))
    memory.set(xlabel="seconds", ylabel="peak GiB")
    return figure


def main(record: Path, picture: Path) -> None:
    if record.suffix == ".jsonl":
        figure = draw_step([json.loads(line) for line in record.open()])
    else:
        cells = read_cells(record)
        if record.stem == "dose":
            print(dose_table(cells))
        figure = {"dose": draw_doses, "staleness": draw_staleness,
                  "transfer": draw_transfer}[record.stem](cells)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
