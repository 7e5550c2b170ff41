"""A study: named cells of options of train.py, run with the same seeds and compared with one cell.

    python -m lab.study ladder --cells parity 'v1-*' --seeds 0 1 2 --out runs/ladder
    python -m lab.study ladder --print

The first command runs each cell with each seed and writes a record (JSON) and a picture. The second
prints the table of the record in docs/records and runs nothing. lab/cells.py lists the cells.

Seeds are the outer loop, so the cells of a benchmark alternate. Each run is a process of its own,
forked from one that has imported everything; on a GPU, whose state cannot be forked, it is a fresh
process. A second call repeats what has not finished. All finished runs in OUT belong to the record:
the call is refused if one of them has other options than this call would give it.
"""

import gc
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from threading import Thread
from typing import Any, Literal

import numpy
import torch
import tyro

from config import MANY, Config, within
from engine_adapter import prepare_environment
from lab.cells import METRICS, PANELS, STUDIES, Cell, Metric
from lab.models import write_model
from lab.products import widen_if_slow
from records import end_of_process, locked, one_sentence, provenance, replace_file, stage

GPU = torch.cuda.is_available()
RECORDS = Path(__file__).parents[1] / "docs" / "records"
MARK = "finished.json"  # in the folder of a run: its origin and options, written after its end
# What the process imports that runs are forked from.
IMPORTED = ["lab.bench", "vllm.v1.engine.llm_engine", "matplotlib.figure",
            "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"]
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. The last one is also taken for
# more: it is larger than theirs.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


@dataclass(frozen=True)
class Options:
    """What to run, or what to print."""

    study: tyro.conf.Positional[Literal[tuple(STUDIES)]]
    out: str | None = None  # Folder of runs, record and picture; if not given, runs/STUDY.
    # Names of cells, or patterns such as 'long.*.none'. Their baselines run only if named too.
    cells: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()  # If not given, 0, 1, ...: as many as the study has.
    # Steps of a run; if not given, those of the study. Some cells have a number of their own.
    steps: int | None = None
    jobs: int | None = None  # Runs at the same time; they share the CPU threads. 1 on a GPU.
    # More options of train.py, with an equals sign: --train-args="--model PATH". They override the
    # study's workload; the options of a cell override them. The study sets --out and --seed.
    train_args: str = ""
    # Print the table of a record and run nothing; without a name, of docs/records/STUDY.json.
    print: tuple[str, ...] | None = None
    metrics: tuple[Literal[tuple(METRICS)], ...] = ()  # Of the table; if not given, the study's.

    def __post_init__(self):
        within(self, 1, MANY, "steps", "jobs")

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names that `cells` selects. Raises: ValueError for a cell that is none of them."""
        for pattern in self.cells:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"cells must be names of cells or patterns, got {pattern}; there"
                                 f" are {', '.join(names)}")
        return [name for name in names
                if any(fnmatchcase(name, pattern) for pattern in self.cells)]


# ---------------------------------------------------------------------------------- runs
@dataclass(frozen=True)
class Run:
    """A cell with a seed."""

    folder: Path
    cell: Cell
    words: list[str]  # options of train.py
    config: Config

    @property
    def options(self) -> dict[str, Any]:
        """What makes it this run and no other, as JSON has it."""
        return json.loads(json.dumps(self.config.experiment))


class Plan:
    """The runs of a study under the options of one call."""

    def __init__(self, options: Options):
        self.options = options
        self.study = STUDIES[options.study]
        self.out = Path(options.out or f"runs/{options.study}").resolve()
        self.models = self.out / "models"
        self.cells = options.chosen(self.study.cells)

    def folder(self, name: str, seed: int) -> Path:
        return self.out / "runs" / f"{name}-seed{seed}"

    def run(self, name: str, seed: int) -> Run:
        cell = self.study.cells[name]
        folder = self.folder(name, seed)
        steps = self.options.steps or self.study.steps
        words = shlex.split(f"{self.study.workload} --steps {steps}")
        if cell.model:
            words += ["--model", str(self.models / f"{cell.model}-seed{seed}")]
        if cell.policy_of:
            words += ["--model", str(self.folder(cell.policy_of, seed) / "policy")]
        words += shlex.split(f"{self.options.train_args} {cell.options}")
        words += ["--out", str(folder), "--seed", str(seed)]
        return Run(folder, cell, words, tyro.cli(Config, args=words))

    def finished(self) -> dict[str, list[int]]:
        """Seeds of the finished runs in OUT, by cell.

        Raises: ValueError if one of them has other options than this call would give it.
        """
        seeds = {}
        for name in self.study.cells:
            for mark in self.out.glob(f"runs/{name}-seed*/{MARK}"):
                folder = mark.parent
                seed = int(folder.name.rpartition("-seed")[2])
                with stage(f"reading {mark}"):
                    stored = read_json(mark)["options"]
                wanted = self.run(name, seed).options
                changed = [f"{key} {stored.get(key)} instead of {wanted.get(key)}"
                           for key in sorted(stored.keys() | wanted.keys())
                           if stored.get(key) != wanted.get(key)]
                if changed:
                    raise ValueError(f"runs in out must have the options of this call, {folder} has"
                                     f" {'; '.join(changed)}; choose another --out")
                seeds.setdefault(name, []).append(seed)
        return {name: sorted(found) for name, found in seeds.items()}


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def execute(folder: Path, run: Run, origin: dict[str, Any]) -> None:
    """The run from its beginning, then its mark."""
    shutil.rmtree(folder, ignore_errors=True)  # not finished
    wide = widen_if_slow(run.config.run.dtype)
    with end_of_process():
        import_module(run.cell.program).main(run.words)
        mark = origin | {"wide_products": wide, "options": run.options}
        replace_file(folder / MARK, json.dumps(mark))


def logged(function: Callable, folder: Path, *arguments: Any) -> None:
    """In a process of its own, which ends with the study: a call whose output goes to a log."""
    Thread(target=_end_with_the_study, daemon=True).start()
    if not GPU:  # vLLM collects garbage eight times, in all imported modules if they are not frozen
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None  # vLLM calls both
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    function(folder, *arguments)


def _end_with_the_study() -> None:
    """A killed study must not leave a run that writes into the folder which the next call uses."""
    parent_process().join()
    os._exit(1)


def in_processes(tasks: list[tuple], jobs: int) -> dict[str, str]:
    """Call each (function, folder, more arguments) in a process of its own, `jobs` at a time.

    Returns the errors of those that failed.
    """
    context = get_context("spawn" if GPU else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    waiting, running, failed = list(tasks), {}, {}
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            process = context.Process(target=logged, args=task)
            process.start()
            running[process.sentinel] = process, task[1]
        ended = wait(list(running))[0]
        process, folder = running.pop(ended)
        process.join()
        outcome = "finished"
        if process.exitcode:
            log = Path(f"{folder}.log").read_text(errors="replace")
            last_line = log.strip().rpartition("\n")[2]
            failed[folder.name] = f"exit status {process.exitcode}: {last_line[:200]}"
            outcome = f"CRASHED, {failed[folder.name]}"
        done = len(tasks) - len(waiting) - len(running)
        minutes = (time.monotonic() - started) / 60
        print(f"[{done}/{len(tasks)}] {folder.name}: {outcome} | {minutes:.1f} min", flush=True)
    return failed


def run_all(plan: Plan, command: str) -> dict[str, str]:
    """Run what has not finished. Returns the errors of the runs that crashed."""
    finished = plan.finished()
    seeds = dict.fromkeys(plan.options.seeds or range(plan.study.seeds))
    runs = [plan.run(name, seed) for seed in seeds for name in plan.cells
            if seed not in finished.get(name, ())]
    models = {}
    for run in runs:
        folder = Path(run.config.run.model)
        if folder.parent == plan.models and not folder.exists():
            models[folder] = write_model, folder, run.cell.model, run.config.run.seed
    jobs = plan.options.jobs or (1 if GPU else plan.study.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    prepare_environment()
    origin = {"command": command}
    if not GPU:  # forked runs have the code of now, fresh ones that of then
        now = provenance(torch.device("cpu"))
        origin |= {"commit": now["commit"], "dirty": now["dirty"]}
    crashed = in_processes(list(models.values()), jobs)
    for served in (False, True):  # a policy is served after it has been trained
        crashed |= in_processes([(execute, run.folder, run, origin) for run in runs
                                 if bool(run.cell.policy_of) == served], jobs)
    return crashed


# ---------------------------------------------------------------------------------- the record
def make_record(plan: Plan, crashed: dict[str, str]) -> dict[str, Any]:
    """All finished runs in OUT: options, seeds, the metrics of each run, and where they ran."""
    cells, origins = {}, []
    for name, seeds in plan.finished().items():
        cell = plan.study.cells[name]
        folders = [plan.folder(name, seed) for seed in seeds]
        runs = [[json.loads(line) for line in (folder / "metrics.jsonl").open()]
                for folder in folders]
        found = [read_json(folder / "config.json") | read_json(folder / MARK)
                 for folder in folders]
        origins += found
        cells[name] = {
            "options": cell.options, "baseline": cell.baseline, "engine": found[0]["audit"],
            "seeds": seeds,
            "metrics": {each: [METRICS[each].measure(rows) for rows in runs]
                        for each in dict.fromkeys((*plan.study.metrics, *plan.options.metrics))},
        }
        if name in plan.study.drawn:
            cells[name]["curves"] = {
                each: [[row.get(each) for row in rows if row["step"]] for rows in runs]
                for each in PANELS}
    if not cells:
        sys.exit(f"error: no run has finished; the logs are in {plan.out / 'runs'}")
    record = {"study": plan.options.study}
    for name in ("command", "device", "commit", "wide_products"):
        record[name] = distinct(origin.get(name) for origin in origins)
    record["dirty"] = any(origin["dirty"] for origin in origins)
    record["versions"] = {name: distinct(origin["versions"][name] for origin in origins)
                          for name in origins[0]["versions"]}
    return record | {"workload": plan.study.workload, "cells": cells, "crashed": crashed}


def distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


# ---------------------------------------------------------------------------------- the table
def paired(
    ours: dict[int, float], theirs: dict[int, float]
) -> tuple[float | None, float | None]:
    """Mean of the differences at equal seeds, and half of its 95 % interval: t s / sqrt(n).

    Without a common seed there is no difference, with one there is no interval.
    """
    differences = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
    count = len(differences)
    if count < 2:
        return (differences or [None])[0], None
    quantile = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return mean(differences), quantile * stdev(differences) / count**0.5


def by_seed(cell: dict[str, Any], name: str) -> dict[int, Any]:
    """The values that were measured."""
    values = zip(cell["seeds"], cell["metrics"].get(name, []), strict=False)
    return {seed: value for seed, value in values if value is not None}


def text_of(metric: Metric, ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    """`mean (smallest to largest); difference ± half of its interval`, empty if not measured."""
    if not ours:
        return ""
    values, form = list(ours.values()), metric.form
    if isinstance(values[0], str):
        return " / ".join(dict.fromkeys(values))
    text = f"{mean(values):{form}}"
    if len(values) > 1:
        text += f" ({min(values):{form}} to {max(values):{form}})"
    difference, half = paired(ours, theirs)
    if difference is not None:
        text += f"; {difference:+{form}}"
    if half is not None:
        text += f" ± {half:{form}}"
    return text


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def report(record: dict[str, Any], options: Options, chosen: list[str]) -> str:
    """Where the figures come from, and the table of the chosen cells."""
    cells = record["cells"]
    measured = [each for each in options.metrics or STUDIES[options.study].metrics
                if any(by_seed(cells[name], each) for name in chosen)]
    rows = [["cell", "seeds", "baseline", *(METRICS[each].title for each in measured)]]
    for name in chosen:
        cell = cells[name]
        base = cell["baseline"]
        if base == name or base not in cells:
            base = ""
        theirs = cells.get(base, {"seeds": [], "metrics": {}})
        texts = [text_of(METRICS[each], by_seed(cell, each), by_seed(theirs, each))
                 for each in measured]
        rows.append([name, str(len(cell["seeds"])), base, *texts])
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items() if each)
    changed = " with changes" if record["dirty"] else ""
    wide = record.get("wide_products")  # of lab.products
    products = f" (products of {wide} in float32, rounded)" if wide else ""
    text = (
        f"`{record['command']}` on {record['device']}{products}; {versions}; commit"
        f" {record['commit']}{changed}.\n\n"
        "Mean (smallest to largest) over the seeds; the mean difference to the baseline at equal"
        f" seeds ± half of its 95 % interval.\n\n{markdown(rows)}"
    )
    crashed = "".join(f"\n- {run}: {error}" for run, error in record["crashed"].items())
    return f"{text}\n\n**Crashed**\n{crashed}" if crashed else text


# ---------------------------------------------------------------------------------- the picture
def draw(curves: dict[str, dict[str, Any]], path: Path) -> Any:
    """The curves of each cell by field: mean and range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 8), layout="constrained")
    for axis, (field, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        for name, fields in curves.items():
            values = numpy.array(fields[field], dtype=float)  # (seeds, steps), NaN for None
            measured = numpy.flatnonzero(~numpy.isnan(values).any(axis=0))  # steps, from 0
            values = values[:, measured]
            axis.plot(measured + 1, values.mean(axis=0), label=name)
            axis.fill_between(measured + 1, values.min(axis=0), values.max(axis=0), alpha=0.2)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=8)
        if title.endswith("(log)"):
            axis.set_yscale("symlog", linthresh=1e-9)  # linear below, so that 0 is on the axis
    figure.savefig(path, dpi=110)
    return figure


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run crashed, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    with one_sentence(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        if options.print is not None:
            path = Path(*options.print) if options.print else RECORDS / f"{options.study}.json"
            with stage(f"reading the record {path}"):
                record = read_json(path)
                cells = record["cells"]
            print(report(record, options, options.chosen(cells)))
            return 0
        plan = Plan(options)
        with locked(str(plan.out)):
            crashed = run_all(plan, shlex.join(["python", "-m", "lab.study", *words]))
            record = make_record(plan, crashed)
            path = plan.out / f"{options.study}.json"
            path.write_text(json.dumps(record, indent=1))
            curves = {name: cell["curves"] for name, cell in record["cells"].items()
                      if "curves" in cell}
            if curves:
                draw(curves, path.with_suffix(".png"))
    chosen = [name for name in plan.cells if name in record["cells"]]
    print(f"\n{report(record, options, chosen)}\n\nwritten to {path}")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
