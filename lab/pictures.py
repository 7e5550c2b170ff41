"""The pictures of the pages, drawn from docs/records: `python -m lab.pictures [NAME ...]`.

Each function draws docs/NAME.png. Bands and bars are the range of the seeds. Blue is the run as it
should be, red is the fault.
"""

import sys
from statistics import fmean as mean
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lab.study import RECORDS
from report.files import read_json

BLUE, RED = "tab:blue", "tab:red"
TRAINED, HELD_OUT = "reward", "eval_trainer_alone"
TITLES = {TRAINED: "training reward (the engine samples)",
          HELD_OUT: "held-out reward (the trainer alone samples)"}  # fmt: skip
Cells = dict[str, Any]
Looks = dict[str, tuple[str, str]]  # of cells: color and style of the line, and label


def cells_of(record: str) -> Cells:
    return read_json(RECORDS / f"{record}.json")["cells"]


def panels(width: float, height: float, columns: int, **shared: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **shared)[0])


def line(axis: Axes, at: Any, seeds: Any, look: str, label: str, band: bool = True) -> None:
    """Mean and range of `seeds` (points, seeds). `look`: a color and the style of the line."""
    color, style = look.split()
    values = numpy.array(seeds)
    axis.plot(at, values.mean(axis=1), style, color=color, label=label)
    if band:
        axis.fill_between(at, values.min(axis=1), values.max(axis=1), color=color, alpha=0.12, lw=0)


def curves(axis: Axes, cells: Cells, looks: Looks, band: bool = True,
           **texts: Any) -> None:  # fmt: skip
    """The reward by step of some cells."""
    for name, (look, label) in looks.items():
        rewards = numpy.array(cells[name]["curves"]["reward"]).T  # (steps, seeds)
        line(axis, range(1, len(rewards) + 1), rewards, look, label, band)
    axis.set(xlabel="step", xlim=(0, len(rewards) + 0.5), ylim=(0, 1.02), **texts)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def ranges(axis: Axes, cells: Cells, looks: Looks, metric: str) -> None:
    """A row for each cell: mean and range of a metric."""
    for row, (name, (look, _)) in enumerate(looks.items()):
        values, color = cells[name]["metrics"][metric], look.split()[0]
        axis.plot([min(values), max(values)], [row, row], color=color, lw=4, alpha=0.4)
        axis.plot(mean(values), row, "o", color=color)
    axis.set_yticks(range(len(looks)), [label for _, label in looks.values()])
    axis.set_ylim(len(looks) - 0.5, -0.5)
    axis.grid(axis="y", alpha=0.3)


# ---------------------------------------------------------------------------------- findings.md
def migration() -> Figure:
    figure, axes = panels(8.4, 2.5, 4, sharey=True)
    looks = {
        "transformers": ("black -", "reference (the trainer)"), "v0": (f"{BLUE} -", "V0 0.8.5"),
        "v1-0.18-repaired": (f"{BLUE} -", "V1 0.18.1, repaired"),
        "parity": (f"{BLUE} -", "V1 0.32.0, repaired"),
        "v1-0.18-defaults": (f"{RED} -", "V1 0.18.1, all four off"),
        "v1-defaults": (f"{RED} -", "V1 0.32.0, all four off"),
    }  # fmt: skip
    metrics = {"reward": "reward, last 5 steps", "clip_rate": "clip rate, all steps",
               "kl_old_new": "KL(old, new), nats, all steps",
               "entropy": "entropy, nats, last 5 steps"}  # fmt: skip
    for axis, (metric, label) in zip(axes, metrics.items(), strict=True):
        ranges(axis, cells_of("migration"), looks, metric)
        axis.set(xlabel=label, xlim=(0, 1.05) if metric == "reward" else (0, None))
    figure.suptitle("V1 with all four fixes off (red) leaves the reference (black); V0 and repaired V1"
                    " (blue) follow it\n(two policies, temperature 0.7, 0.1 million parameters, three seeds)")
    return figure


def rescue() -> Figure:
    figure, axes = panels(8.4, 3.6, 2, sharey=True)
    cells = cells_of("rescue")
    curves(axes[0], cells, {
        "parity": (f"{BLUE} -", "parity"), "cache": ("black -", "stale cache"),
        "raw+cache": ("tab:orange -", "both"), "raw": (f"{RED} -", "raw values"),
    }, title="one fault or both, from step 1 on", ylabel="training reward")  # fmt: skip
    curves(axes[1], cells, {
        "raw+cache-stale10": ("tab:purple --", "raw, cache stale from step 10"),
        "raw+cache-stale20": ("tab:purple :", "raw, cache stale from step 20"),
        "raw+cache-fresh20": ("tab:orange --", "both, cache renewed from step 20"),
        "raw+cache-fresh0": ("tab:brown -", "both, cache renewed at each load"),
    }, band=False, title="both faults, the cache changed in mid-run (means)")  # fmt: skip
    figure.suptitle("A stale cache protects a run from raw log-probabilities until it is renewed\n"
                    "(two policies, temperature 0.7, 0.1 million parameters, five seeds)")
    return figure


def corrections() -> Figure:
    cells = cells_of("corrections")
    backends = {
        "parity-fp32": "parity, float32", "parity-bf16": "parity, bfloat16",
        "parity-fp16": "parity, float16", "v1-defaults": "all four off",
        "minus-processed": "raw values", "minus-runtime": "runtime",
        "minus-inflight": "pause", "minus-fp32-head": "head",
        "stale-1": "1 batch in flight", "stale-4": "4 batches", "stale-8": "8 batches",
    }  # fmt: skip
    columns = [name.rpartition(".")[2] for name in cells if name.startswith("long.parity-bf16.")]
    figure, axes = panels(10, 4, 2, sharey=True)
    jobs = {"ladder": "the ladder's job", "long": "long answers"}
    for axis, (job, title) in zip(axes, jobs.items(), strict=True):
        found = [[cells[f"{job}.{backend}.{column}"] for column in columns] for backend in backends]
        gains = numpy.array([
            [numpy.subtract(cell["metrics"][HELD_OUT], cells[cell["baseline"]]["metrics"][HELD_OUT])
             for cell in row] for row in found])  # (backends, corrections, seeds)  # fmt: skip
        axis.imshow(-gains.mean(axis=2), cmap="Oranges", vmin=0, vmax=0.8, aspect="auto")
        for y, x in numpy.ndindex(gains.shape[:2]):
            all_lose = (gains[y, x] < 0).all()
            gain = f"{gains[y, x].mean():+.2f}".replace("-", "\N{MINUS SIGN}")
            axis.text(x, y, "0" if gain[1:] == "0.00" else gain, ha="center", va="center",
                      weight="bold" if all_lose and gain[1:] != "0.00" else "normal")  # fmt: skip
        axis.set_xticks(range(len(columns)), [name.replace("tis-geometric", "tis + geometric") for name in columns],
                        rotation=40, ha="right")
        axis.set(title=title, yticks=range(len(backends)), yticklabels=backends.values())
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.suptitle("At parity no correction changes the reward; with a fault or stale batches some cost"
                    " half of it\nHeld-out reward (trainer alone, three policies) minus the"
                    " reference's: mean of three seeds, bold where all three are lower")
    return figure


def real() -> Figure:
    figure, axes = panels(8.4, 3.2, 2, width_ratios=(3, 2))
    cells = cells_of("real")
    looks = {"parity": (f"{BLUE} -", "parity"),
             "parity-minus-runtime": (f"{BLUE} --", "runtime"),
             "v1-defaults": (f"{RED} --", "all four off"),
             "parity-minus-processed": (f"{RED} -", "raw values")}  # fmt: skip
    curves(axes[0], cells, looks, ylabel="training reward")
    ranges(axes[1], cells, looks, HELD_OUT)
    axes[1].set(xlabel="held-out reward after step 20, the trainer alone", xlim=(0, 1))
    figure.suptitle("SmolLM2-135M (rounded to 4 bits): the runtime loses little, raw values most"
                    " (two policies, three seeds)")
    return figure



def page() -> Figure:
    figure, (axis,) = panels(6, 3.2, 1)
    curves(axis, cells_of("page"), {
        "parity": (f"{BLUE} -", "all fixes"),
        "parity-minus-processed": (f"{RED} -", "raw log-probabilities"),
    }, ylabel="training reward")  # fmt: skip
    figure.suptitle("Raw log-probabilities destroy a run with two policies\n(0.1 million"
                    " parameters, float32, temperature 0.7;\nmean and range of three seeds)")
    return figure


def ablation() -> Figure:
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots(2, 3).flat
    cells = cells_of("ladder")
    looks = {"transformers": ("black -", "reference: the trainer samples"),
             "parity": (f"{BLUE} -", "parity: all fixes"),
             "v1-defaults": (f"{RED} -", "all four fixes off")}  # fmt: skip
    metrics = {"reward": "training reward", "entropy": "entropy, nats", "clip_rate": "clip rate",
               "kl_old_new": "KL(old, new), nats", "current_mismatch_abs_mean": "mismatch, nats",
               "eval_reward_trainer_alone": "held-out reward, trainer alone"}  # fmt: skip
    for axis, (metric, title) in zip(axes, metrics.items(), strict=True):
        for name, (look, label) in looks.items():
            rows = [[value for value in seed if value is not None]
                    for seed in cells[name]["curves"][metric]]  # fmt: skip
            values = numpy.array(rows, dtype=float).T  # (steps, seeds)
            every = 40 // len(values)
            line(axis, range(every, 41, every), values, look, label)
        axis.set(title=title, xlabel="step")
        if metric in ("kl_old_new", "current_mismatch_abs_mean"):
            axis.set_yscale("symlog", linthresh=1e-6)
            axis.set_ylim(0)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Parity follows the reference, all four fixes off do not\n(two policies,"
                    " temperature 0.7, 0.1 million parameters in bfloat16; mean and range of ten"
                    " seeds)")
    return figure


def rates() -> Figure:
    figure, axes = panels(8.4, 3.4, 2, sharex=True)
    cells = cells_of("rates")
    names = {TRAINED: "training reward, last 5 steps", "entropy": "entropy, nats, last 5 steps"}
    reds = matplotlib.colormaps["Reds"](numpy.linspace(0.35, 1, 5))
    blues = matplotlib.colormaps["Blues"](numpy.linspace(0.35, 1, 5))
    for axis, (metric, label) in zip(axes, names.items(), strict=True):
        for side, colors in ("parity", blues), ("raw", reds):
            for rate, color in zip(("1e-4", "3e-4", "6e-4", "1e-3", "2e-3"), colors, strict=True):
                ends = [mean(cells[f"{rate}.{side}{rest}"]["metrics"][metric])
                        for rest in ("", "-160")]  # fmt: skip
                title = f"{rate}, {'all fixes' if side == 'parity' else 'raw'}"
                axis.plot([40, 160], ends, "o-", color=color, label=title)
        axis.set(xlabel="steps of the run", ylabel=label, ylim=0, xticks=[40, 160], xlim=(25, 175))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center",
                  title="learning rate")
    figure.suptitle("A lower learning rate only delays what raw log-probabilities cost\n(two"
                    " policies, temperature 0.7, 0.1 million parameters, ten seeds; each run's rate"
                    " falls to zero)")
    return figure


def staleness() -> Figure:
    figure, axes = panels(9, 3.4, 3, sharey=True)
    cells = cells_of("staleness")
    looks = {"three": "black", "tis-token": BLUE, "mis": RED, "two": "tab:gray",
             "reinforce": "tab:orange"}  # fmt: skip
    labels = {"three": "three policies", "tis-token": "three, TIS", "mis": "three, MIS",
              "two": "two policies", "reinforce": "two, no clip"}  # fmt: skip
    for axis, load in zip(axes, ("keep", "recompute", "abort"), strict=True):
        for form, color in looks.items():
            found = [cells[f"{batches}.{load}.{form}"]["metrics"]["alone_60"]
                     for batches in (1, 4, 8, 16)]  # fmt: skip
            ends = [mean(value for value in values if value is not None) for values in found]
            axis.plot(range(4), ends, "o-", color=color, label=labels[form])
        axis.set(title=f"unfinished requests: {load}", xlabel="batches in flight", ylim=(0, 1.02),
                 xticks=range(4), xticklabels=(1, 4, 8, 16))  # fmt: skip
    axes[0].set_ylabel("held-out reward, trainer alone")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle("TIS (blue) helps against staleness, MIS and a missing clip hurt; young tokens"
                    " (abort) help most\n(0.1 million parameters in float32, after 60 updates;"
                    " means of ten seeds, whose ranges are wide: the table has them)")
    return figure


def transfer() -> Figure:
    cells = cells_of("transfer")
    rows = {name: name for name in cells if "." not in name.replace("int2.4", "")}
    servers = [name.removeprefix("parity.") for name in cells if name.startswith("parity.")]
    labels = {"stale-cache": "stale cache", "v1-defaults": "all four off", "raw": "raw values"}
    values = numpy.array([[mean(cells[f"{row}.{server}"]["metrics"]["eval_reward"])
                           for server in servers] for row in rows])  # fmt: skip
    figure, (axis,) = panels(8, 5.2, 1)
    axis.imshow(values, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for y, x in numpy.ndindex(values.shape):
        axis.text(x, y, f"{values[y, x]:.2f}", ha="center", va="center",
                  weight="bold" if values[y, x] < 0.8 else "normal")  # fmt: skip
    axis.set_xticks(range(len(servers)), servers, rotation=40, ha="right")
    axis.set_yticks(range(len(rows)), [labels.get(row, row) for row in rows])
    axis.set(xlabel="served by", ylabel="trained under")
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    figure.suptitle("Who trained under a stale cache loses with every server; down to int4 the"
                    " server hardly matters\n(held-out reward, bold below 0.8; three policies, 0.1"
                    " million parameters, means of ten seeds)")
    return figure


def main(names: list[str]) -> None:
    matplotlib.rcParams.update({
        "font.size": 8, "axes.titlesize": 9, "figure.titlesize": 10, "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    drawn = [page, ablation, rates, staleness, transfer, migration, rescue, corrections, real]
    for draw in drawn:
        name = draw.__name__.replace("_", "-")
        if not names or name in names:
            path = RECORDS.parent / f"{name}.png"
            draw().savefig(path, dpi=100)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
