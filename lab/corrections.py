"""The factorial of backends and corrections: which correction hides which fault, and at what cost.

Each cell and seed is one run of train.py in a fresh process, with three policies. A second call
repeats only the runs that did not finish, so the factorial can be run in parts (`--workloads`,
`--backends`, `--corrections`, `--seeds`). Record, tables and picture hold all finished runs.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal, NamedTuple

import tyro

from config import COUNT, SEED
from examples.long_digits import write_model
from lab import ablate, origin, table
from lab.ablate import Metric, first_outside, seed_range
from records import one_sentence, steps_of

LADDER = {name: value for name, (value, _) in ablate.WORKLOAD.items()} | {"--inflight-groups": "0"}
# Answers of 64 tokens and more: the ratio of a response is the product of as many.
LONG = {
    "--task": str(ablate.ROOT / "examples" / "long_digits.py"), "--max-new-tokens": "84",
    "--num-prompts": "8", "--group-size": "8", "--reward-limit-s": "60", "--eval-samples": "8",
}
WORKLOADS = {"ladder": LADDER | {"--steps": "40"}, "long": LADDER | LONG | {"--steps": "20"}}
# Prompts and group size with stale groups: nine batches of prompts must be different problems.
STALE_SHAPE = {"ladder": (7, 28), "long": (8, 8)}
# Groups in flight, in batches: so many updates, on average, from a group's start to its use.
STALE = {"reference-stale": 0, "stale-1": 1, "stale-4": 4, "stale-8": 8}
UNFINISHED = ("--inflight-groups", "16")  # else no load meets an unfinished request
REFERENCE = ("--engine", "transformers")
BACKENDS: dict[str, tuple[str, ...]] = {
    "reference": REFERENCE,
    "parity-fp32": ("--dtype", "float32"),
    "parity-bf16": (),
    "parity-fp16": ("--dtype", "float16"),
    "exact": ablate.EXACT,
    "v1-defaults": (*ablate.V1, *UNFINISHED),
    "minus-processed": (ablate.RAW,),
    "minus-runtime": (ablate.RUNTIME,),
    "minus-inflight": (ablate.PAUSE, *UNFINISHED),
    "minus-fp32-head": (ablate.HEAD,),
} | dict(zip(STALE, (REFERENCE, (), (), ()), strict=True))
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "tis-token": ("--tis", "token"),
    "tis-sequence": ("--tis", "sequence"),
    "icepop": ("--tis", "token", "--tis-cap", "5", "--reject", "token", "--reject-high", "5"),
    "mis": ("--tis", "sequence", "--reject", "sequence"),
    "geometric": ("--reject", "geometric"),
    "tis-geometric": ("--tis", "token", "--reject", "geometric"),
    "worst": ("--reject", "worst"),
    "trm": ("--reject", "trm"),
    "binary-tv": ("--reject", "binary_tv"),
}
METRICS = {
    "reward": Metric("reward, last 5 steps", ".2f", "reward", window=ablate.FINAL),
    "held_out": Metric("held out, trainer alone", ".2f", "eval_reward_trainer", window=ablate.LAST),
    "rejected": Metric("rejected tokens", ".1%", "rejected_frac"),
    "ess": Metric("ESS of the weights", ".2f", "weights_ess"),
    "mismatch": Metric("mean mismatch", ".1e", "mismatch_abs_mean"),
    "staleness": Metric("mean staleness", ".1f", "staleness_mean"),
}


@dataclass(frozen=True)
class Options:
    """A part of the factorial, or all of it."""

    out: str = "runs/corrections"  # Folder for corrections.json, .md, .png and one folder per run.
    workloads: tuple[Literal[tuple(WORKLOADS)], ...] = tuple(WORKLOADS)
    backends: tuple[Literal[tuple(BACKENDS)], ...] = tuple(BACKENDS)
    # The references, which have no mismatch, run without a correction only.
    corrections: tuple[Literal[tuple(CORRECTIONS)], ...] = tuple(CORRECTIONS)
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 2  # Runs at the same time; they share the CPU threads. Use 1 on a GPU.
    train_args: str = ""  # More options for train.py. They override the workload.

    def __post_init__(self):
        COUNT.check(self, "jobs")
        for seed in self.seeds:
            if not SEED.holds(seed):
                raise ValueError(f"seeds must be {SEED.words}, got {seed}")
        ablate.check_train_args(self.train_args)


# ---------------------------------------------------------------------------------- running
class Cell(NamedTuple):
    """A place in the factorial. Its runs differ in the seed."""

    workload: str
    backend: str
    correction: str

    def folder(self, out: Path, seed: int) -> Path:
        return out / "runs" / f"{'.'.join(self)}-seed{seed}"

    def finished(self, out: Path) -> list[Path]:
        """The folders of its runs that have finished."""
        marks = (out / "runs").glob(f"{'.'.join(self)}-seed*.json")
        return [path.with_suffix("") for path in sorted(marks)]

    @property
    def reference(self) -> "Cell":
        return self._replace(backend="reference-stale" if self.backend in STALE else "reference",
                             correction="none")  # fmt: skip


def cells(options: Options) -> list[Cell]:
    every = product(options.workloads, options.backends, options.corrections)
    return [Cell(*names) for names in every
            if BACKENDS[names[1]] != REFERENCE or names[2] == "none"]  # fmt: skip


def command_of(cell: Cell, seed: int, options: Options) -> list[str]:
    out = Path(options.out).resolve()
    words = ["--out", str(cell.folder(out, seed)), "--seed", str(seed)]
    for option in WORKLOADS[cell.workload].items():
        words += option
    if cell.workload == "long":
        words += ["--model", str(long_model(out, seed))]
    if cell.backend in STALE:
        num_prompts, group_size = STALE_SHAPE[cell.workload]
        waiting = STALE[cell.backend] * num_prompts
        words += ["--num-prompts", str(num_prompts), "--group-size", str(group_size)]
        words += ["--inflight-groups", str(waiting), "--max-staleness", "100"]
        words += ["--max-num-seqs", str((num_prompts + waiting) * group_size)]
    words += shlex.split(options.train_args)
    words += [*ablate.THREE, *BACKENDS[cell.backend], *CORRECTIONS[cell.correction]]
    if cell.correction != "none":
        words.append("--tis-over-a-broken-backend")  # without effect while all fixes are on
    return [sys.executable, str(ablate.ROOT / "train.py"), *words]


def long_model(out: Path, seed: int) -> Path:
    return out / "models" / f"long-seed{seed}"


def execute(options: Options) -> dict[Path, str]:
    """Run the part, the seeds of a cell one after the other. Returns the errors."""
    out = Path(options.out).resolve()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    own_model = "--model" in shlex.split(options.train_args)
    for seed in options.seeds if "long" in options.workloads and not own_model else ():
        if not (long_model(out, seed) / "tokenizer.json").exists():  # it is written last
            write_model(str(long_model(out, seed)), seed)
    commands = {cell.folder(out, seed): command_of(cell, seed, options)
                for cell, seed in product(cells(options), options.seeds)}
    return ablate.execute_all(commands, options.jobs)


# ---------------------------------------------------------------------------------- measuring
def measure(cell: Cell, out: Path) -> dict[str, Any]:
    """METRICS of each finished run, the gap to the reference, and when the reward curve shows it.

    `gap` is the difference of the mean `held_out` to the reference's. `noticed` is the first of
    three steps in a row at which the training rewards of all seeds are apart from those of the
    reference by more than the larger seed range: a reader of the reward curve alone would notice
    the fault there. None: he would not, or there are fewer than two seeds.
    """
    folders, reference = cell.finished(out), cell.reference.finished(out)
    runs, theirs = ([steps_of(folder)[1:] for folder in each] for each in (folders, reference))
    entry = {name: [metric.measure(steps) for steps in runs] for name, metric in METRICS.items()}
    entry |= {"seeds": [int(folder.name.rpartition("seed")[2]) for folder in folders]}
    entry |= {"gap": None, "noticed": None}
    if theirs:
        usual = [METRICS["held_out"].measure(steps) for steps in theirs]
        entry["gap"] = mean(entry["held_out"]) - mean(usual)
    if min(len(runs), len(theirs)) > 1:
        entry["noticed"] = first_outside(folders, reference, "reward")
    return cell._asdict() | entry


# ---------------------------------------------------------------------------------- reporting
def report(record: dict[str, Any]) -> str:
    """corrections.md: for each workload and figure a table, backends by corrections."""
    parts = [f"{origin(record['command'], record)}. Means over the seeds ± half the seed range. In"
             " brackets: minus the reference; a star where the reward curve shows the fault."]
    for workload in WORKLOADS:
        found = {(entry["backend"], entry["correction"]): entry
                 for entry in record["cells"] if entry["workload"] == workload}
        backends = dict.fromkeys(backend for backend, _ in found)
        for name, metric in METRICS.items() if found else ():
            rows = [[backend, *(text_of(found.get((backend, correction)), name)
                                for correction in CORRECTIONS)] for backend in backends]
            parts += [f"**{workload}: {metric.title}**", table(["backend", *CORRECTIONS], rows)]
    crashed = [f"- {run}: {error}" for run, error in record["crashed"].items()]
    return "\n\n".join(parts + ["**Crashed**", *crashed] * bool(crashed)) + "\n"


def text_of(entry: dict[str, Any] | None, name: str) -> str:
    """A figure of a cell; "" if none of its runs has finished."""
    if entry is None:
        return ""
    values, form = entry[name], METRICS[name].form
    spread = f" ± {seed_range(values) / 2:{form}}" if len(values) > 1 else ", one seed"
    gap = ""
    if name == "held_out" and entry["gap"] is not None:
        gap = f" ({entry['gap']:+z.2f}{'*' * bool(entry['noticed'])})"
    return f"{mean(values):{form}}{spread}{gap}"


def draw(entries: list[dict[str, Any]], path: Path) -> Any:
    """Heat maps of `gap`, one for each workload; a star where the reward curve shows the fault."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 7), layout="constrained")
    for axis, workload in zip(figure.subplots(1, len(WORKLOADS)), WORKLOADS, strict=True):
        gaps = [[float("nan")] * len(CORRECTIONS) for _ in BACKENDS]
        for entry in entries:
            if entry["workload"] == workload and entry["gap"] is not None:
                row = list(BACKENDS).index(entry["backend"])
                column = list(CORRECTIONS).index(entry["correction"])
                gaps[row][column] = entry["gap"]
                star = "*" if entry["noticed"] else ""
                axis.text(column, row, f"{entry['gap']:+z.2f}{star}", ha="center", va="center")
        image = axis.imshow(gaps, cmap="RdYlGn", vmin=-0.6, vmax=0.6, aspect="auto")
        axis.set_xticks(range(len(CORRECTIONS)), CORRECTIONS, rotation=45, ha="right")
        axis.set_yticks(range(len(BACKENDS)), BACKENDS)
        axis.set_title(f"{workload}: held out by the trainer alone, minus the reference")
    figure.colorbar(image, ax=figure.axes)
    figure.savefig(path, dpi=110)
    return figure


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run crashed, 2 bad input."""
    with one_sentence(2):
        options = tyro.cli(Options, args=arguments, description=__doc__)
    out = Path(options.out).resolve()
    crashed = execute(options)
    done = [cell for cell in cells(Options(out=options.out)) if cell.finished(out)]
    if not done:
        sys.exit(f"error: no run has finished; the logs are in {out / 'runs'}")
    config = json.loads((done[0].finished(out)[0] / "config.json").read_text())
    command = shlex.join(["python", "-m", "lab.corrections", *(arguments or sys.argv[1:])])
    record = {name: config[name] for name in ("device", "versions", "commit", "dirty")}
    record |= {"command": command, "cells": [measure(cell, out) for cell in done],
               "crashed": {folder.name: error for folder, error in crashed.items()}}
    (out / "corrections.json").write_text(json.dumps(record, indent=1))
    draw(record["cells"], out / "corrections.png")
    text = report(record)
    (out / "corrections.md").write_text(text)
    print(f"\n{text}\nwritten to {out}: corrections.json, corrections.md, corrections.png")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
