"""A study: named cells of options of train.py, run with the same seeds and compared with one cell.

    python -m lab.study ladder --cells parity 'v1-*' --seeds 0 1 2 --out runs/ladder
    python -m lab.study ladder --print

The first command runs each cell with each seed and writes a record (JSON) and a picture. The second
prints the table of a record in docs/records and runs nothing; the study of the record may be gone
from lab/cells.py, which lists the cells.

Seeds are the outer loop. Each run is a process of its own, forked from one that has imported
everything; on a GPU, whose state cannot be forked, it is a fresh process. A second call repeats
what has not finished. The record has the runs that the call names. The call is refused if a
finished one has other options, model, task or prompts than this call would give it, or not a row
for each step.
"""

import fnmatch
import gc
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from threading import Thread
from typing import Any, NamedTuple

import torch
import tyro

import train
from lab.cells import METRICS, PANELS, SHOWN, STUDIES, Rows
from report.curves import draw_figure, over_steps
from report.errors import (
    end_of_process,
    exit_with_message,
    locked,
    replace_file,
    stage,
)
from report.files import read_json, read_rows, refuse_another_run
from report.ranges import Count, check_ranges
from tasks.job import teach_toy
from tasks.problem_files import load_task
from train import Config, new_run
from vllm_cases import prepare_environment

Record = dict[str, Any]  # as JSON has it
Errors = dict[str, str]  # of runs, by the name of their folder
Values = dict[int, Any]  # of a metric, by seed
GPU = torch.cuda.is_available()
RECORDS = Path(__file__).parents[1] / "docs" / "records"
MARK = "finished.json"  # in the folder of a run, made after its end
# What the process imports that runs are forked from.
IMPORTED = ["train", "vllm.v1.engine.llm_engine", "matplotlib.figure",
            "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"]
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. The last one is also taken for
# more: it is larger than theirs.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


@dataclass(frozen=True)
class Options:
    """What to run, or what to print."""

    study: tyro.conf.Positional[str]  # ladder or own; with --print, a record.
    out: str | None = None  # Folder of runs, record and picture; if not given, runs/STUDY.
    # Names of cells, or patterns such as 'v1-*'. Their baselines run only if named too.
    cells: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = (0,)
    steps: Count | None = None  # Of a run; if not given, those of the study.
    # Runs at the same time; they share the CPU threads. If not given, one; two of the ladder on a
    # CPU. On a GPU vLLM's sleep asserts that the memory in use falls.
    jobs: Count | None = None
    # More options of train.py, with an equals sign: --train-args="--model PATH". They override the
    # study's workload; the options of a cell override them. The study sets --out and --seed.
    train_args: str = ""
    # Print the table of a record and run nothing; without a path, of docs/records/STUDY.json.
    print: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()  # Columns; if not given, four of a run's, all of a record's.
    narrow: bool = False  # Means alone, in aligned columns, for a terminal.

    def __post_init__(self):
        check_ranges(self)
        if self.print is None and self.study not in STUDIES:
            raise ValueError(f"study must be one of {', '.join(STUDIES)} (others are in the commit"
                             " of their record, gpu and bench in 4d0d4e9), got"
                             f" {self.study}; try --print")


def chosen(option: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that match, pattern by pattern. Raises: ValueError for a pattern without one."""
    matching = {}
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ValueError(f"{option} must be names or patterns of {', '.join(names)}, got"
                             f" {pattern}")
        matching |= dict.fromkeys(found)
    return [*matching]


# ---------------------------------------------------------------------------------- runs
class Run(NamedTuple):
    """A cell with a seed."""

    cell: str
    folder: Path
    words: list[str]  # options of train.py
    config: Config

    @property
    def finished(self) -> bool:
        return (self.folder / MARK).exists()

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def record(self) -> Record:
        return read_json(self.folder / "config.json")

    @property
    def rows(self) -> Rows:
        return read_rows(self.folder / "metrics.jsonl")


def runs_of(options: Options, out: Path) -> list[Run]:
    """The runs that a call names, seed by seed."""
    runs, (workload, cells) = [], STUDIES[options.study]
    steps = f"--steps {options.steps}" if options.steps else ""
    for seed in dict.fromkeys(options.seeds):
        for cell in chosen("cells", options.cells, cells):
            folder = out / "runs" / f"{cell}-seed{seed}"
            words = shlex.split(f"{workload} {steps} {options.train_args} {cells[cell].options}")
            words += ["--out", str(folder), "--seed", str(seed)]
            runs.append(Run(cell, folder, words, tyro.cli(Config, args=words)))
    return runs


def check_task(config: Config) -> None:
    """Raises: ValueError if the seed does not decide the problems: nothing would be paired."""
    with redirect_stdout(StringIO()):
        fingerprints = {load_task(config.task, config.seed, config.data).fingerprint
                        for _ in range(2)}
    if len(fingerprints) > 1:
        raise ValueError(f"task must give a study the same problems in each run, {config.task}"
                         " draws others; try the generator that `sample` gets")


def check_finished(runs: list[Run]) -> None:
    """Raises: ValueError if one is not what this call would make, or has not all of its rows."""
    identity_now = cache(identity_of)
    for run in runs:
        if not run.finished:
            continue
        steps = [row["step"] for row in run.rows]
        if steps != [*range(run.config.steps + 1)]:
            raise ValueError(f"the finished run {run.folder} must have the steps 0 to"
                             f" {run.config.steps} in metrics.jsonl, it has {len(steps)}; delete it"
                             " to repeat it")
        names = "seed", "model", "task", "max_new_tokens", "data"
        job = {name: getattr(run.config, name) for name in names}
        with stage(f"comparing the finished run {run.folder} with this call"):
            now = identity_now(Config(steps=0, **job))
            refuse_another_run(run.config, now, run.record)


def identity_of(config: Config) -> Record:
    """What says whether another run had the same model, task and prompts."""
    with redirect_stdout(StringIO()):
        run = new_run(config)
        teach_toy(config)
        return run.identity


def execute(run: Run) -> None:
    """In a process of its own, which ends with the study: the run from its beginning, and its mark.

    Its output goes to a log.
    """
    Thread(target=_end_with_the_study, daemon=True).start()
    gc.freeze()  # vLLM collects garbage five times while it starts, else in all imported modules
    with run.log.open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    shutil.rmtree(run.folder, ignore_errors=True)  # not finished
    with end_of_process():
        train.main(run.words)
        (run.folder / MARK).touch()


def _end_with_the_study() -> None:
    """A killed study must not leave a run that writes into the folder which the next call uses."""
    parent_process().join()
    os._exit(1)


def run_all(runs: list[Run], jobs: int) -> Errors:
    """Run what has not finished, `jobs` at a time, each in a process of its own.

    Returns the errors of the runs that crashed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    prepare_environment()
    context = get_context("spawn" if GPU else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    pending = [run for run in runs if not run.finished]
    total, running, crashed = len(pending), {}, {}
    started = time.monotonic()
    while pending or running:
        while pending and len(running) < jobs:
            run = pending.pop(0)
            run.log.parent.mkdir(parents=True, exist_ok=True)
            run.log.touch()
            print(f"{run.folder.name} starts; its lines go to {run.log}")
            process = context.Process(target=execute, args=(run,))
            process.start()
            running[process.sentinel] = run, process
        run, process = running.pop(wait(running)[0])
        process.join()
        lines = run.log.read_text(errors="replace").strip().split("\n")
        name, outcome = run.folder.name, "finished"
        if process.exitcode:
            crashed[name] = f"exit status {process.exitcode}: {lines[-1][:200]}"
            outcome = f"CRASHED, {crashed[name]}"
        left = len(pending) + len(running)
        minutes = (time.monotonic() - started) / 60
        print(f"[{total - left}/{total}] {name}: {outcome} | {minutes:.1f} min,"
              f" about {minutes / (total - left) * left:.1f} left")
        for line in lines:
            if "WITHOUT EFFECT" in line:
                print(f"    {line}")
    return crashed


def run_study(options: Options, command: str) -> tuple[Path, Errors]:
    """The path of the record, and the errors of the runs that crashed."""
    out = Path(options.out or f"runs/{options.study}").resolve()
    path = out / f"{options.study}.json"
    chosen("metrics", options.metrics, METRICS)
    runs = runs_of(options, out)
    jobs = options.jobs or (2 if options.study == "ladder" and not GPU else 1)
    with locked(str(out)):
        for run in runs[:1]:
            check_task(run.config)
        check_finished(runs)
        crashed = run_all(runs, jobs)
        check_finished(runs)  # what is compared may have changed
        finished = [run for run in runs if run.finished]
        if not finished:
            sys.exit(f"error: no run has finished; the logs are in {out / 'runs'}")
        record = {"study": options.study, "command": command, "crashed": crashed}
        record |= study_record(options.study, finished)
        replace_file(path, json.dumps(record, indent=1))
        draw(finished, path.with_suffix(".png"))
    return path, crashed


# ---------------------------------------------------------------------------------- the record
def study_record(study: str, runs: list[Run]) -> Record:
    """Where finished runs come from, and by cell their options, seeds and metrics."""
    workload, studied = STUDIES[study]
    records, cells = [run.record for run in runs], {}
    for run, record in zip(runs, records, strict=True):
        new = {"engine": record["audit"], "seeds": [], "metrics": {name: [] for name in METRICS}}
        cell = cells.setdefault(run.cell, studied[run.cell]._asdict() | new)
        cell["seeds"].append(run.config.seed)
        rows = run.rows
        for name, values in cell["metrics"].items():
            values.append(METRICS[name].measure(rows))
    versions = {name: distinct(record["versions"][name] for record in records)
                for name in records[0]["versions"]}
    return {
        "device": distinct(record["device"] for record in records),
        "commit": distinct(record["commit"] for record in records),
        "versions": versions,
        "dirty": any(record["dirty"] for record in records),
        "workload": workload,
        "columns": {name: (metric.title, metric.form) for name, metric in METRICS.items()},
        "cells": cells,
    }


def distinct(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


# ---------------------------------------------------------------------------------- the table
def paired(ours: Values, theirs: Values) -> tuple[float | None, float | None]:
    """Mean of the differences at equal seeds, and half of its 95 % interval: t s / sqrt(n).

    Without a common seed there is no difference, with one there is no interval.
    """
    differences = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
    count = len(differences)
    if count < 2:
        return (differences or [None])[0], None
    quantile = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return mean(differences), quantile * stdev(differences) / count**0.5


def by_seed(cell: Record, name: str) -> Values:
    """The values that were measured."""
    values = zip(cell["seeds"], cell["metrics"].get(name, []), strict=False)
    return {seed: value for seed, value in values if value is not None}


def text_of(form: str, ours: Values, theirs: Values, narrow: bool = False) -> str:
    """`mean (smallest to largest); difference ± half of its interval`, or the mean alone.

    Of texts, each different one; empty if nothing was measured.
    """
    values = [*ours.values()]
    if not values or isinstance(values[0], str):
        return " / ".join(dict.fromkeys(values))
    text = f"{mean(values):{form}}"
    if narrow:
        return text
    if len(values) > 1:
        text += f" ({min(values):{form}} to {max(values):{form}})"
    difference, half = paired(ours, theirs)
    if difference is not None:
        text += f"; {difference:+{form}}"
    if half is not None:
        text += f" ± {half:{form}}"
    return text


def report(record: Record, names: list[str], metrics: list[str], narrow: bool) -> str:
    """Where the figures come from, and the table of these cells: metrics that were measured.

    `narrow`: means under the names of the metrics.
    """
    cells = record["cells"]
    columns = {metric: record["columns"][metric] for metric in metrics
               if any(by_seed(cells[name], metric) for name in names)}
    heads = columns if narrow else [title for title, _ in columns.values()]
    rows = [["cell", "seeds", "baseline", *heads]]
    rows.append(["---"] * len(rows[0]))
    for name in names:
        cell, base = cells[name], cells[name]["baseline"]
        if base not in cells.keys() - {name}:
            base = ""
        row = [name, str(len(cell["seeds"])), base]
        for metric, (_, form) in columns.items():
            theirs = by_seed(cells[base], metric) if base else {}
            row.append(text_of(form, by_seed(cell, metric), theirs, narrow))
        rows.append(row)
    how = ("Mean (smallest to largest) over the seeds; the mean difference to the baseline at equal"
           " seeds ± half of its 95 % interval.")
    if narrow:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows = [map(str.ljust, row, widths) for row in rows]
        how = "\n".join(f"{metric}: {title}" for metric, (title, _) in columns.items())
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items() if each)
    changed = " with changes" if record["dirty"] else ""
    origin = (f"`{record['command']}` on {record['device']}; {versions}; commit"
              f" {record['commit']}{changed}.")
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    crashed = "".join(f"\n- {run}: {error}" for run, error in record["crashed"].items())
    note = record.get("note") or (crashed and f"**Crashed**\n{crashed}")
    return "\n\n".join(filter(None, [origin, how, table, note]))


# ---------------------------------------------------------------------------------- the picture
def draw(runs: list[Run], path: Path) -> None:
    """A line for each run, in the colour of its cell."""
    figure = over_steps(PANELS.values(), (16, 9))
    colours = {}
    for run in runs:
        label = run.cell if run.cell not in colours else None
        colour = colours.setdefault(run.cell, f"C{len(colours)}")
        for axis, name in zip(figure.axes, PANELS, strict=True):
            draw_figure(axis, run.rows[1:], name, marker=".", color=colour, label=label)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 no run failed, 1 a run crashed, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    with exit_with_message(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        crashed = {}
        if options.print is None:
            path, crashed = run_study(options, shlex.join(["python", "-m", "lab.study", *words]))
            print(f"\nwritten to {path}:\n")
            options = replace(options, cells=("*",), metrics=options.metrics or SHOWN)
        else:
            path = Path(*options.print or [RECORDS / f"{options.study}.json"])
        with stage(f"reading the record {path}"):
            record = read_json(path)
            names = chosen("cells", options.cells, record["cells"])
            metrics = chosen("metrics", options.metrics or ["*"], record["columns"])
            print(report(record, names, metrics, options.narrow))
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
