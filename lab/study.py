"""A study: named cells of options of train.py, run with the same seeds and compared with one cell.

    python -m lab.study ladder --cells parity 'v1-*' --seeds 0 1 2 --out runs/ladder
    python -m lab.study ladder --print

The first command runs each cell with each seed and writes a record (JSON) and a picture. The second
prints the table of a record in docs/records and runs nothing; the study of the record may be gone
from lab/cells.py, which lists the cells.

Seeds are the outer loop. Each run is a process of its own, forked from one that has imported
everything; on a GPU, whose state cannot be forked, it is a fresh process. A second call repeats
what has not finished. All finished runs in OUT belong to the record: the call is refused if one of
them has other options, model, task or prompts than this call would give it, or not a row for each
step.
"""

import fnmatch
import gc
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from threading import Thread
from typing import Any, Literal

import numpy
import torch
import tyro

import train
from lab.cells import METRICS, PANELS, STUDIES, Metric
from report.curves import over_steps
from report.errors import (
    MANY,
    end_of_process,
    exit_with_message,
    locked,
    print_each_line_at_once,
    replace_file,
    stage,
    within,
)
from report.files import (
    provenance,
    read_json,
    read_rows,
    refuse_changes,
    refuse_other_prompts,
)
from tasks.job import teach_toy
from train import Config, find_run
from verify.start import prepare_environment

Record = dict[str, Any]  # as JSON has it
Errors = dict[str, str]  # of runs, by the name of their folder
Values = dict[int, Any]  # of a metric, by seed
GPU = torch.cuda.is_available()
RECORDS = Path(__file__).parents[1] / "docs" / "records"
MARK = "finished.json"  # in the folder of a run: its origin and options, written after its end
# What the process imports that runs are forked from.
IMPORTED = ["train", "vllm.v1.engine.llm_engine", "matplotlib.figure",
            "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"]
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. The last one is also taken for
# more: it is larger than theirs.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


@dataclass(frozen=True)
class Options:
    """What to run, or what to print."""

    study: tyro.conf.Positional[str]  # ladder, real or own; with --print, a record.
    out: str | None = None  # Folder of runs, record and picture; if not given, runs/STUDY.
    # Names of cells, or patterns such as 'v1-*'. Their baselines run only if named too.
    cells: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()  # If not given, 0, 1, ...: as many as the study has.
    steps: int | None = None  # Of a run; if not given, those of the study.
    # Runs at the same time; they share the CPU threads. If not given, on a CPU those of the study
    # and on a GPU one, because vLLM's sleep asserts that the memory in use falls.
    jobs: int | None = None
    # More options of train.py, with an equals sign: --train-args="--model PATH". They override the
    # study's workload; the options of a cell override them. The study sets --out and --seed.
    train_args: str = ""
    # Print the table of a record and run nothing; without a path, of docs/records/STUDY.json.
    print: tuple[str, ...] | None = None
    metrics: tuple[Literal[tuple(METRICS)], ...] = ()  # Of the table; if not given, the study's.
    narrow: bool = False  # Means alone, in aligned columns, for a terminal.

    def __post_init__(self):
        if self.print is None and self.study not in STUDIES:
            raise ValueError(f"study must be one of {', '.join(STUDIES)} (others are in the commit"
                             " of their record, gpu and bench in 4d0d4e9), got"
                             f" {self.study}; try --print")
        within(self, 1, MANY, "steps", "jobs")

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names that `cells` selects. Raises: ValueError for a cell that is none of them."""
        found = set()
        for pattern in self.cells:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise ValueError(f"cells must be names of cells or patterns, got {pattern}; there"
                                 f" are {', '.join(names)}")
            found.update(matching)
        return [name for name in names if name in found]


# ---------------------------------------------------------------------------------- runs
@cache
def job_of(config: Config) -> tuple[Record, Record, bool]:
    """`files` and `prompts` of a run that begins now, and whether its seed decides the problems."""
    with redirect_stdout(StringIO()):
        run, again = find_run(config), find_run(config)
        teach_toy(config)
    is_decided = run.task.fingerprint == again.task.fingerprint
    return run.identity["files"], run.task.prompts_record, is_decided


@dataclass(frozen=True)
class Run:
    """A cell with a seed."""

    folder: Path
    words: list[str]  # options of train.py
    config: Config

    @property
    def options(self) -> Record:
        """What makes it this run and no other."""
        return self.config.experiment | {"steps": self.config.steps}

    @property
    def finished(self) -> bool:
        return (self.folder / MARK).exists()

    def origin(self, command: str) -> Record:
        """Its config.json, with its mark if it has finished."""
        mark = read_json(self.folder / MARK) if self.finished else {"command": command}
        return read_json(self.folder / "config.json") | mark

    def check_options(self) -> None:
        """Of a finished run. Raises: ValueError if one of this call would be another one."""
        whose, record = f"the finished run {self.folder}", self.origin("")
        defaults = self.config.defaults()
        refuse_changes("options", defaults | self.options, defaults | record["options"], whose)
        steps = [row["step"] for row in read_rows(self.folder / "metrics.jsonl")]
        if steps != [*range(self.config.steps + 1)]:
            raise ValueError(f"{whose} must have the steps 0 to {self.config.steps} in"
                             f" metrics.jsonl, it has {len(steps)}; delete it to repeat it")
        files, prompts, is_decided = self.job
        if not is_decided:  # by the seed: another task each time
            files = {name: digest for name, digest in files.items()
                     if name.startswith(f"{self.config.model}/")}
        refuse_changes("model and its task", record["files"] | files, record["files"], whose)
        if is_decided:
            refuse_other_prompts(prompts, record["prompts"], whose)

    @property
    def job(self) -> tuple:
        config = self.config
        return job_of(Config(
            out=os.devnull, steps=0, seed=config.seed, model=config.model, task=config.task,
            max_new_tokens=config.max_new_tokens, data=config.data))


class Plan:
    """The runs of a study under the options of one call."""

    def __init__(self, options: Options, command: str = ""):
        self.options, self.command = options, command
        self.study = STUDIES[options.study]
        self.out = Path(options.out or f"runs/{options.study}").resolve()
        self.record = self.out / f"{options.study}.json"
        self.cells = options.chosen(self.study.cells)
        self.jobs = options.jobs or (1 if GPU else self.study.jobs)
        self.run = cache(self._make_run)

    def _make_run(self, name: str, seed: int) -> Run:
        """The run of a cell with a seed, its options checked."""
        cell = self.study.cells[name]
        folder = self.out / "runs" / f"{name}-seed{seed}"
        steps = self.options.steps or self.study.steps
        options = f"--steps {steps} {self.options.train_args} {cell.options}"
        words = shlex.split(f"{self.study.workload} {options}")
        words += ["--out", str(folder), "--seed", str(seed)]
        return Run(folder, words, tyro.cli(Config, args=words))

    def chosen(self) -> list[Run]:
        """The runs that this call asks for, seed by seed."""
        seeds = sorted({*self.options.seeds}) or range(self.study.seeds)
        return [self.run(name, seed) for seed in seeds for name in self.cells]

    def counted(self) -> dict[str, list[Run]]:
        """The runs in OUT that belong to the record, by cell: all that have finished.

        Raises: ValueError if a finished run is not what this call would make.
        """
        counted = {}
        for name in self.study.cells:
            folders = [each.parent.name for each in self.out.glob(f"runs/{name}-seed*[0-9]/{MARK}")]
            for seed in sorted(int(folder.rpartition("-seed")[2]) for folder in folders):
                run = self.run(name, seed)
                run.check_options()
                counted.setdefault(name, []).append(run)
        return counted


def execute(run: Run, origin: Record) -> None:
    """In a process of its own, which ends with the study: the run from its beginning, and its mark.

    Its output goes to a log.
    """
    Thread(target=_end_with_the_study, daemon=True).start()
    gc.freeze()  # vLLM collects garbage five times while it starts, else in all imported modules
    with open(f"{run.folder}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print_each_line_at_once()
    shutil.rmtree(run.folder, ignore_errors=True)  # not finished
    with end_of_process():
        train.main(run.words)
        replace_file(run.folder / MARK, json.dumps(origin | {"options": run.options}))


def _end_with_the_study() -> None:
    """A killed study must not leave a run that writes into the folder which the next call uses."""
    parent_process().join()
    os._exit(1)


def start(run: Run, origin: Record) -> BaseProcess:
    """Start the run in a process of its own."""
    context = get_context("spawn" if GPU else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{run.folder}.log").touch()
    print(f"{run.folder.name} starts; its lines go to {run.folder}.log")
    process = context.Process(target=execute, args=(run, origin))
    process.start()
    return process


def run_all(plan: Plan) -> Errors:
    """Run what has not finished, `jobs` at a time. Returns the errors of the runs that crashed."""
    plan.counted()  # refuses other options
    origin = {"command": plan.command}
    if not GPU:  # forked runs have the code of now, fresh ones that of then
        now = provenance()
        origin |= {"commit": now["commit"], "dirty": now["dirty"]}
    threads = max(1, len(os.sched_getaffinity(0)) // plan.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    prepare_environment()
    pending = deque(run for run in plan.chosen() if not run.finished)
    total, running, crashed = len(pending), {}, {}
    started = time.monotonic()
    while pending or running:
        while pending and len(running) < plan.jobs:
            run = pending.popleft()
            process = start(run, origin)
            running[process.sentinel] = run.folder, process
        ended = wait(running)[0]
        folder, process = running.pop(ended)
        process.join()
        lines = Path(f"{folder}.log").read_text(errors="replace").strip().split("\n")
        outcome = "finished"
        if process.exitcode != 0:
            crashed[folder.name] = f"exit status {process.exitcode}: {lines[-1][:200]}"
            outcome = f"CRASHED, {crashed[folder.name]}"
        done = total - len(pending) - len(running)
        minutes = (time.monotonic() - started) / 60
        left = minutes / done * (total - done)
        print(f"[{done}/{total}] {folder.name}: {outcome} | {minutes:.1f} min,"
              f" about {left:.1f} left")
        for line in lines:
            if "WITHOUT EFFECT" in line:
                print(f"    {line}")
    return crashed


# ---------------------------------------------------------------------------------- the record
def write_record(plan: Plan, crashed: Errors) -> Record:
    """Write and return: of all runs that count options, seeds, metrics, and where they ran."""
    cells, origins = {}, []
    for name, runs in plan.counted().items():
        cell = plan.study.cells[name]
        tables = [read_rows(run.folder / "metrics.jsonl") for run in runs]
        found = [run.origin(plan.command) for run in runs]
        origins += found
        cells[name] = {
            "options": cell.options, "baseline": cell.baseline, "engine": found[0]["audit"],
            "seeds": [run.config.seed for run in runs],
            "metrics": {each: [METRICS[each].measure(rows) for rows in tables]
                        for each in dict.fromkeys((*plan.study.metrics, *plan.options.metrics))},
        }
        # All that the user has chosen, else the study's own choice of many.
        if name in plan.study.drawn or plan.options.cells != ("*",):
            curves = {each: [[row.get(each) for row in rows if row["step"]] for rows in tables]
                      for each in PANELS}
            cells[name]["curves"] = {each: values for each, values in curves.items()
                                     if {*chain(*values)} != {None}}
    if not cells:
        sys.exit(f"error: no run has finished; the logs are in {plan.out / 'runs'}")
    record = {"study": plan.options.study}
    for name in ("command", "device", "commit"):
        record[name] = distinct(origin.get(name) for origin in origins)
    record["dirty"] = any(origin["dirty"] for origin in origins)
    record["versions"] = {name: distinct(origin["versions"][name] for origin in origins)
                          for name in origins[0]["versions"]}
    record |= {"workload": plan.study.workload, "cells": cells, "crashed": crashed}
    if not all(run.job[2] for runs in plan.counted().values() for run in runs):
        record["note"] = " The task draws other problems in each run, so nothing is paired."
    replace_file(plan.record, one_line_a_cell(record))
    return record


def one_line_a_cell(record: Record) -> str:
    """JSON with a line for each field and each cell, and numbers of eight digits."""
    short = json.loads(json.dumps(record), parse_float=lambda digits: float(f"{float(digits):.8g}"))
    cells = [f"{json.dumps(name)}: {json.dumps(cell)}" for name, cell in short.pop("cells").items()]
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in short.items()]
    fields.append('"cells": {\n' + ",\n".join(cells) + "}")
    return "{" + ",\n".join(fields) + "}\n"


def distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


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


def mean_of(metric: Metric, values: list) -> str:
    """The mean, or each different text; empty if nothing was measured."""
    if not values or isinstance(values[0], str):
        return " / ".join(dict.fromkeys(values))
    return f"{mean(values):{metric.form}}"


def text_of(metric: Metric, ours: Values, theirs: Values) -> str:
    """`mean (smallest to largest); difference ± half of its interval`, as `mean_of`."""
    values, form = list(ours.values()), metric.form
    text = mean_of(metric, values)
    if not values or isinstance(values[0], str):
        return text
    if len(values) > 1:
        text += f" ({min(values):{form}} to {max(values):{form}})"
    difference, half = paired(ours, theirs)
    if difference is not None:
        text += f"; {difference:+{form}}"
    if half is not None:
        text += f" ± {half:{form}}"
    return text


def usual_columns(record: Record) -> Iterable[str]:
    """Those of the record's study. If it is gone from lab/cells.py, those that are stored."""
    if record["study"] in STUDIES:
        return STUDIES[record["study"]].metrics
    stored = (each for cell in record["cells"].values() for each in cell["metrics"])
    return record.get("columns") or dict.fromkeys(stored)


def described(record: Record, name: str) -> Metric:
    """A column. One that no study has any more has its title and form in the record, or its name
    alone.
    """
    title, form = record.get("columns", {}).get(name, (name, ".3g"))
    return METRICS.get(name) or Metric(title, form)


def report(record: Record, metrics: tuple[str, ...], chosen: list[str], narrow: bool) -> str:
    """Where the figures come from, and the table of the chosen cells.

    `metrics`: its columns, if given; those without a figure are left out. `narrow`: means under
    the names of the metrics.
    """
    cells = record["cells"]
    columns = {each: described(record, each) for each in metrics or usual_columns(record)
               if any(by_seed(cells[name], each) for name in chosen)}
    titles = [metric.title for metric in columns.values()]
    rows = [["cell", "seeds", "baseline", *(columns if narrow else titles)]]
    rows.append(["---"] * len(rows[0]))
    for name in chosen:
        cell = cells[name]
        base = cell["baseline"]
        if base == name or base not in cells:
            base = ""
        theirs = cells.get(base, {"seeds": [], "metrics": {}})
        row = [name, str(len(cell["seeds"])), base]
        for each, metric in columns.items():
            ours = by_seed(cell, each)
            text = mean_of(metric, [*ours.values()])
            if not narrow:
                text = text_of(metric, ours, by_seed(theirs, each))
            row.append(text)
        rows.append(row)
    how = ("Mean (smallest to largest) over the seeds; the mean difference to the baseline at equal"
           " seeds ± half of its 95 % interval.")
    if narrow:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows = [map(str.ljust, row, widths) for row in rows]
        how = "\n".join(f"{each}: {metric.title}" for each, metric in columns.items())
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items() if each)
    changed = " with changes" if record["dirty"] else ""
    wide = record.get("wide_products")  # of lab/products.py, in commit 4d0d4e9
    products = f" (products of {wide} in float32, rounded)" if wide else ""
    text = (f"`{record['command']}` on {record['device']}{products}; {versions}; commit"
            f" {record['commit']}{changed}.\n\n{how}{record.get('note', '')}\n\n{table}")
    title = "outcomes" if "outcomes" in record else "crashed"
    listed = "".join(f"\n- {run}: {outcome}" for run, outcome in record[title].items())
    return f"{text}\n\n**{title.capitalize()}**\n{listed}" if listed else text


# ---------------------------------------------------------------------------------- the picture
def draw(curves: Record, path: Path) -> None:
    """The curves of each cell by field: mean and range over the seeds."""
    titles = {field: title for field, title in PANELS.items()
              if any(field in fields for fields in curves.values())}
    figure = over_steps(titles.values(), 3, (16, 4 * math.ceil(len(titles) / 3) + 1))
    for axis, field in zip(figure.axes, titles, strict=True):
        for name, fields in curves.items():
            values = numpy.array(fields.get(field, [[]]), dtype=float)  # (seeds, steps), NaN: None
            measured = numpy.flatnonzero(~numpy.isnan(values).any(axis=0))  # steps, from 0
            values = values[:, measured]
            axis.plot(measured + 1, values.mean(axis=0), ".-", label=name)
            axis.fill_between(measured + 1, values.min(axis=0), values.max(axis=0), alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 no run failed, 1 a run crashed, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    with exit_with_message(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        if options.print is not None:
            path = Path(*options.print or [RECORDS / f"{options.study}.json"])
            with stage(f"reading the record {path}"):
                record = read_json(path)
                chosen = options.chosen(record["cells"])
                print(report(record, options.metrics, chosen, options.narrow))
            return 0
        plan = Plan(options, shlex.join(["python", "-m", "lab.study", *words]))
        with locked(str(plan.out)):
            record = write_record(plan, run_all(plan))
            curves = {name: cell["curves"] for name, cell in record["cells"].items()
                      if "curves" in cell}
            if curves:
                draw(curves, plan.record.with_suffix(".png"))
    chosen = [name for name in plan.cells if name in record["cells"]]
    table = report(record, options.metrics, chosen, options.narrow)
    print(f"\n{table}\n\nwritten to {plan.record}")
    return 1 if record["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
