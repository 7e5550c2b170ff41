"""The pictures of the pages, drawn from docs/records: `python -m lab.pictures [NAME ...]`.

Each function draws docs/NAME.png. Bands and bars are the range of the seeds. Blue is the run as it
should be, red is the fault.
"""

import sys
from statistics import fmean as mean
from statistics import median
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lab.study import RECORDS, read_json

BLUE, RED = "tab:blue", "tab:red"
TRAINED, HELD_OUT = "reward", "eval_trainer_alone"
TITLES = {TRAINED: "training reward (the engine samples)",
          HELD_OUT: "held-out reward (the trainer alone samples)"}  # fmt: skip
TICKS = "fp8", "int5", "int4", "int3", "int2.4", "int2"  # of the axis of the mismatch
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


# ---------------------------------------------------------------------------------- dose.md
def doses(looks: Looks, band: bool) -> tuple[Figure, list[Axes], Cells]:
    cells = {name: cell["metrics"] for name, cell in cells_of("dose").items()}
    nats = {name: median(cell["mismatch_first"]) for name, cell in cells.items()}
    figure, axes = panels(8.4, 3.6, 2, sharey=True)
    for axis, metric in zip(axes, TITLES, strict=True):
        for form, (look, label) in looks.items():
            formats = f"{form}.int", f"{form}.fp"
            names = sorted((name for name in cells if name.startswith(formats)), key=nats.get)
            line(axis, [nats[name] for name in names], [cells[name][metric] for name in names],
                 look, label, band)
        axis.set(title=TITLES[metric], xscale="log", xlim=(0.01, 5), ylim=(0, 1.02),
                 xlabel="mismatch at step 1, nats a token (median), and the engine's weights")
        axis.set_xticks([nats[f"two.{kind}"] for kind in TICKS],
                        [f"{nats[f'two.{kind}']:.2g}\n{kind}" for kind in TICKS])
        axis.minorticks_off()
    axes[0].set_ylabel("reward")
    return figure, axes, cells


def dose() -> Figure:
    looks = {"three": (f"{BLUE} -", "three policies"), "two": (f"{RED} -", "two policies"),
             "two-wide": ("black :", "two policies, no clip")}  # fmt: skip
    figure, axes, cells = doses(looks, band=True)
    # A cache is not yet stale at step 1: its mismatch is that of the run.
    faults = {"raw": ("o", "mismatch_first", "raw values"),
              "stale-cache": ("s", "mismatch", "stale cache (mismatch of the run)")}  # fmt: skip
    for axis, metric in zip(axes, TITLES, strict=True):
        for fault, (marker, size, label) in faults.items():
            axis.plot([], [], marker, color="gray", label=label)
            for form, (look, _) in looks.items():
                if cell := cells.get(f"{form}.{fault}"):
                    axis.plot(mean(cell[size]), mean(cell[metric]), marker, ms=8,
                              color=look.split()[0], mec="white")  # fmt: skip
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle("Two policies have a cliff, and the clip makes it (ten seeds)")
    return figure


def dose_corrections() -> Figure:
    figure, axes, _ = doses({
        "three": ("black -", "no correction"), "tis-token": (f"{BLUE} -", "TIS"),
        "icepop": (f"{BLUE} --", "IcePop"), "tis-sequence": (f"{RED} -", "sequence weights"),
        "mis": (f"{RED} --", "MIS"), "geometric": (f"{RED} :", "geometric rejection"),
    }, band=False)  # fmt: skip
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle("Three policies: corrections of responses (red) lose more than those of"
                    " tokens (blue) (means of ten seeds)")
    return figure


# ---------------------------------------------------------------------------------- findings.md
def migration() -> Figure:
    figure, axes = panels(8.4, 2.5, 4, sharey=True)
    looks = {
        "transformers": ("black -", "reference (the trainer)"), "v0": (f"{BLUE} -", "V0 0.8.5"),
        "v1-0.18-repaired": (f"{BLUE} -", "V1 0.18.1, repaired"),
        "parity": (f"{BLUE} -", "V1 0.32.0, repaired"),
        "v1-0.18-defaults": (f"{RED} -", "V1 0.18.1, defaults"),
        "v1-defaults": (f"{RED} -", "V1 0.32.0, defaults"),
    }  # fmt: skip
    metrics = {"reward": "reward, last 5 steps", "clip_rate": "clip rate, all steps",
               "kl_old_new": "KL(old, new), nats, all steps",
               "entropy": "entropy, nats, last 5 steps"}  # fmt: skip
    for axis, (metric, label) in zip(axes, metrics.items(), strict=True):
        ranges(axis, cells_of("migration"), looks, metric)
        axis.set(xlabel=label, xlim=(0, 1.05) if metric == "reward" else (0, None))
    figure.suptitle("V1's defaults (red) leave the reference (black); V0 and repaired V1 (blue)"
                    " follow it (three seeds)")
    return figure


def rescue() -> Figure:
    figure, axes = panels(8.4, 3.6, 2, sharey=True)
    cells = cells_of("rescue")
    curves(axes[0], cells, {
        "parity": (f"{BLUE} -", "parity"), "cache": ("black -", "stale cache"),
        "raw+cache": ("tab:orange -", "both"), "raw": (f"{RED} -", "raw values"),
    }, title="one fault or both, from step 1 on", ylabel="training reward")  # fmt: skip
    curves(axes[1], cells, {
        "raw+cache-stale10": (f"{RED} --", "raw, stale from step 10"),
        "raw+cache-stale20": (f"{RED} :", "raw, stale from step 20"),
        "raw+cache-fresh20": ("tab:orange --", "both, renewed from step 20"),
        "raw+cache-fresh0": (f"{RED} -", "both, renewed at each load"),
    }, band=False, title="the cache changed in mid-run (means)")  # fmt: skip
    figure.suptitle("Raw values destroy a run, but not while the cache is stale"
                    " (two policies, five seeds)")
    return figure


def corrections() -> Figure:
    cells = cells_of("corrections")
    backends = {
        "parity-fp32": "parity, float32", "parity-bf16": "parity, bfloat16",
        "parity-fp16": "parity, float16", "v1-defaults": "V1's defaults",
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
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set(title=title, yticks=range(len(backends)), yticklabels=backends.values())
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.suptitle("At parity corrections change nothing; with a fault some cost half of the"
                    " reward.\nHeld-out reward (the trainer alone) minus the reference's: mean of"
                    " three seeds, bold where all three are lower")
    return figure


def real() -> Figure:
    figure, axes = panels(8.4, 3.2, 2, width_ratios=(3, 2))
    cells = cells_of("real")
    looks = {"parity": (f"{BLUE} -", "parity"),
             "parity-minus-runtime": (f"{BLUE} --", "V1's runtime"),
             "v1-defaults": (f"{RED} --", "V1's defaults"),
             "parity-minus-processed": (f"{RED} -", "raw values")}  # fmt: skip
    curves(axes[0], cells, looks, ylabel="training reward")
    ranges(axes[1], cells, looks, HELD_OUT)
    axes[1].set(xlabel="held-out reward after step 20, the trainer alone", xlim=(0, 1))
    figure.suptitle("SmolLM2-135M: V1's runtime loses little, raw values most (two policies,"
                    " three seeds)")
    return figure


# ---------------------------------------------------------------------------------- other pages
def step() -> Figure:
    """Seconds and memory of the phases; the peak of the old log-probabilities is not measured."""
    values = cells_of("gpu-h100")["parity"]["metrics"]
    metrics = {name: value for name, (value,) in values.items()}
    awake, freed, peak = metrics["generate_gib"], metrics["freed"], metrics["update_gib"]
    figure, (axis,) = panels(8.4, 3, 1)
    generated = metrics["generate_s"] + metrics["sleep_s"]
    scored = generated + metrics["old_logprobs_s"]
    update, asleep = metrics["update_s"], awake - freed
    axis.bar(0, awake, metrics["generate_s"], align="edge", color=BLUE)
    axis.bar(generated, asleep, metrics["old_logprobs_s"], align="edge", color="silver")
    axis.bar(scored, peak, update, align="edge", color="tab:orange")
    axis.bar(scored, freed, update, peak, align="edge", fill=False, ls="--", hatch="//", ec="gray")
    texts = [
        (metrics["generate_s"] / 2, awake / 2, "white",
         f"engine (vLLM) generates\n{metrics['generate_s']:.1f} s, {awake:.1f} GiB"),
        ((generated + scored) / 2, asleep / 2, "black",
         f"{asleep:.1f} GiB\nafter sleep"),
        ((generated + scored) / 2, asleep + 7, "black",
         f"trainer scores\n{metrics['old_logprobs_s']:.1f} s, peak\nnot measured"),
        (scored + update / 2, peak / 2, "black",
         f"trainer updates\n{update:.1f} s, peak {peak:.1f} GiB"),
        (scored + update / 2, peak + freed / 2, "black",
         f"sleep frees {awake:.1f} \N{MINUS SIGN} {asleep:.1f} = {freed:.1f} GiB"),
        (scored + update / 2, peak + freed + 3, "black",
         f"without sleep: {peak:.1f} + {freed:.1f} = {peak + freed:.1f} GiB"),
    ]  # fmt: skip
    for x, y, color, text in texts:
        box = {"fc": "white", "ec": "none", "pad": 1} if y > peak else None
        axis.text(x, y, text, color=color, ha="center", va="center", bbox=box)
    loaded = sum(metrics[f"{phase}_s"] for phase in ("wake", "load", "proof", "canary"))
    axis.set(xlabel=f"seconds (then {loaded:.1f} to wake the engine and to load and check weights)",
             ylabel="memory, GiB", xlim=0, ylim=(0, 64),
             title="One step: the engine sleeps while the trainer works")
    return figure


def lora() -> Figure:
    rows = read_json(RECORDS / "lora-real.json")["rows"]
    figure, axes = panels(8.4, 3, 2, width_ratios=(3, 2))
    looks = {"full": (BLUE, "full training"), "adapters": ("tab:orange", "adapters, rank 16")}
    phases = {"update_s": "update", "old_logprobs_s": "old log-probabilities", "sync_s": "load"}
    for place, (name, (color, label)) in enumerate(looks.items()):
        before, *steps = rows[name]
        greedily = [row["eval_reward_greedy"] for row in (before, steps[-1])]
        gain = "{:.2f} \N{RIGHTWARDS ARROW} {:.2f}".format(*greedily)
        axes[0].plot([row["step"] for row in steps], [row["reward"] for row in steps], color=color,
                     label=f"{label} (greedily, held out: {gain})")
        axes[1].barh([row + 0.4 * place for row in range(len(phases))],
                     [mean(row[phase] for row in steps) for phase in phases], 0.4, color=color)
    axes[0].set(xlabel="step", ylabel="training reward", ylim=(0, 1.02))
    axes[0].legend(loc="upper left")
    axes[1].set_yticks([row + 0.2 for row in range(len(phases))], phases.values())
    axes[1].invert_yaxis()
    axes[1].set(xlabel="seconds of a step, mean")
    figure.suptitle("Adapters learn as full training does, in about the same time (SmolLM2-135M"
                    " on a CPU, one seed)")
    return figure


def main(names: list[str]) -> None:
    matplotlib.rcParams.update({
        "font.size": 8, "axes.titlesize": 9, "figure.titlesize": 10, "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip
    drawn = [dose, dose_corrections, migration, rescue, corrections, real, step, lora]
    for draw in drawn:
        name = draw.__name__.replace("_", "-")
        if not names or name in names:
            path = RECORDS.parent / f"{name}.png"
            draw().savefig(path, dpi=100)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
