"""A study: named cells of options of train.py, run with the same seeds and compared with one cell.

    python -m lab.study ladder --cells parity 'v1-*' --seeds 0 1 2 --out runs/ladder
    python -m lab.study ladder --print

The first command runs each cell with each seed and writes a record (JSON) and a picture. The second
prints the table of a record in docs/records and runs nothing; the study of the record may be gone
from lab/cells.py, which lists the cells.

Seeds are the outer loop, so the cells of a benchmark alternate. Each run is a process of its own,
forked from one that has imported everything; on a GPU, whose state cannot be forked, it is a fresh
process. A second call repeats what has not finished. All finished runs in OUT belong to the record:
the call is refused if one of them has other options than this call would give it.

With --minutes the call ends in time, its imports included. A run that exceeds the limit of its cell
is killed with the processes that it has started. The record of the study `gpu` is written after
each run. Its runs that were killed or crashed count with the steps they have, and the table names
them. Without a GPU it is a rehearsal, with tiny shapes.
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
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from io import StringIO
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from threading import Thread
from typing import Any, Literal

import numpy
import psutil
import torch
import tyro

import lab
from lab.cells import METRICS, PANELS, SMOLLM2, STUDIES, Cell, Metric
from lab.models import write_model
from lab.products import widen_if_slow
from report.curves import over_steps
from report.errors import (
    MANY,
    end_of_process,
    exit_with_message,
    locked,
    one_line,
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
from train import Config, prepare
from verify.start import prepare_environment

Record = dict[str, Any]  # as JSON has it
Errors = dict[str, str]  # of runs, by the name of their folder
Values = dict[int, Any]  # of a metric, by seed
GPU = torch.cuda.is_available()
# Memory figures that hold what all runs on the card use.
OF_THE_CARD = {"freed", "generate_gib", "update_gib"}
RECORDS = Path(__file__).parents[1] / "docs" / "records"
RESERVE = 5.0  # seconds of --minutes for killing the last run and printing the table
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

    study: tyro.conf.Positional[str]  # ladder, real, own, bench or gpu; with --print, a record.
    out: str | None = None  # Folder of runs, record and picture; if not given, runs/STUDY.
    # Names of cells, or patterns such as 'v1-*'. Their baselines run only if named too.
    cells: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()  # If not given, 0, 1, ...: as many as the study has.
    # Steps of a run; if not given, those of the study. Some cells have a number of their own.
    steps: int | None = None
    # Runs at the same time; they share the CPU threads. On a GPU a cell decides, because vLLM's
    # sleep asserts that the memory in use falls.
    jobs: int | None = None
    # After so many the call ends, even if a run hangs. A week.
    minutes: float = 10_000.0
    # More options of train.py, with an equals sign: --train-args="--model PATH". They override the
    # study's workload; the options of a cell override them. The study sets --out and --seed.
    train_args: str = ""
    # Print the table of a record and run nothing; without a path, of docs/records/STUDY.json.
    print: tuple[str, ...] | None = None
    metrics: tuple[Literal[tuple(METRICS)], ...] = ()  # Of the table; if not given, the study's.
    narrow: bool = False  # Means alone, for a terminal; their picture is OUT/STUDY-means.png.

    def __post_init__(self):
        if self.print is None and self.study not in STUDIES:
            raise ValueError(f"study must be one of {', '.join(STUDIES)} (a record can only be"
                             f" printed), got {self.study}; try --print")
        within(self, 1, MANY, "steps", "jobs")
        within(self, 0.1, 10_000, "minutes")

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
        run, again = prepare(config), prepare(config)
    return run.files, run.task.prompts_record, run.task.fingerprint == again.task.fingerprint


@dataclass(frozen=True)
class Run:
    """A cell with a seed."""

    folder: Path
    cell: Cell
    words: list[str]  # options of train.py
    config: Config

    @property
    def options(self) -> Record:
        """What makes it this run and no other."""
        return self.config.experiment | {"steps": self.config.steps}

    @property
    def finished(self) -> bool:
        return (self.folder / MARK).exists()

    @property
    def begun(self) -> bool:
        return (self.folder / "config.json").exists()

    @property
    def skipped(self) -> bool:
        """Its model has to be made by a command of its own."""
        return self.config.model == SMOLLM2 and not Path(SMOLLM2).exists()

    def outcome(self, crashed: Errors) -> str:
        """What has become of it; `crashed` has the errors of this call."""
        if self.finished:  # the tests marked gpu have no figures, but their log ends with numbers
            return "finished" if self.begun else f"finished: {last_line(self.folder)}"
        if self.skipped:
            return "skipped: `python -m examples.smollm2` makes its model"
        earlier = "unfinished in an earlier call" if self.begun else "not started"
        return crashed.get(self.folder.name, earlier)

    def origin(self, command: str) -> Record:
        """Its config.json, with its mark if it has finished."""
        mark = read_json(self.folder / MARK) if self.finished else {"command": command}
        return read_json(self.folder / "config.json") | mark

    def check_options(self) -> None:
        """Of a finished run. Raises: ValueError if one of this call would be another one."""
        whose, record = f"the finished run {self.folder}", self.origin("")
        defaults = self.config.defaults()
        refuse_changes("options", defaults | self.options, defaults | record["options"], whose)
        if self.cell.program != "train":
            return
        steps = [row["step"] for row in read_rows(self.folder / "metrics.jsonl")]
        if steps != [*range(self.config.steps + 1)]:
            raise ValueError(f"{whose} must have the steps 0 to {self.config.steps} in"
                             f" metrics.jsonl, it has {len(steps)}; delete it to repeat it")
        files, prompts, is_decided = self.job
        if is_decided:
            refuse_changes("model and its task", record["files"] | files, record["files"], whose)
            refuse_other_prompts(prompts, record["prompts"], whose)

    @property
    def job(self) -> tuple[Record, Record, bool]:
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
        self.models = self.out / "models"
        self.cells = options.chosen(self.study.cells)
        self.rehearsal = "" if GPU else self.study.rehearsal
        self.run = cache(self._make_run)

    def _make_run(self, name: str, seed: int) -> Run:
        """The run of a cell with a seed, its options checked."""
        cell = self.study.cells[name]
        folder = self.out / "runs" / f"{name}-seed{seed}"
        steps = self.options.steps or self.study.steps
        words = shlex.split(f"{self.study.workload} --steps {steps}")
        if cell.model:
            words += ["--model", str(self.models / f"{cell.model}-seed{seed}")]
        words += shlex.split(f"{self.options.train_args} {cell.options} {self.rehearsal}")
        words += ["--out", str(folder), "--seed", str(seed)]
        return Run(folder, cell, words, tyro.cli(Config, args=words))

    def chosen(self) -> list[Run]:
        """The runs that this call asks for; those of a piecewise study cell by cell."""
        given, usual = self.options.seeds, range(self.study.seeds)
        runs = [self.run(name, seed) for name in self.cells
                for seed in given or self.study.cells[name].seeds or usual]
        return runs if self.study.piecewise else sorted(runs, key=lambda run: run.config.seed)

    def counted(self) -> dict[str, list[Run]]:
        """The runs in OUT that belong to the record, by cell: all that have finished.

        Of a piecewise study also those that have begun. The tests marked gpu have no figures.
        Raises: ValueError if a finished run has other options than this call would give it.
        """
        counted = {}
        for name in self.study.cells:
            folders = [each.parent.name
                       for each in self.out.glob(f"runs/{name}-seed*[0-9]/config.json")]
            for seed in sorted(int(folder.rpartition("-seed")[2]) for folder in folders):
                run = self.run(name, seed)
                if run.finished:
                    run.check_options()
                if run.finished or self.study.piecewise:
                    counted.setdefault(name, []).append(run)
        return counted


def execute(folder: Path, run: Run, origin: Record) -> None:
    """The run from its beginning, then its mark."""
    shutil.rmtree(folder, ignore_errors=True)  # not finished
    wide = widen_if_slow(run.config.dtype)
    with end_of_process():
        import_module(run.cell.program).main(run.words)
        mark = origin | {"wide_products": wide, "options": run.options}
        replace_file(folder / MARK, json.dumps(mark))


def logged(function: Callable, folder: Path, *arguments: Any) -> None:
    """In a process of its own, which ends with the study: a call whose output goes to a log."""
    Thread(target=_end_with_the_study, daemon=True).start()
    gc.freeze()  # vLLM collects garbage five times while it starts, else in all imported modules
    with open(f"{folder}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print_each_line_at_once()
    function(folder, *arguments)


def _end_with_the_study() -> None:
    """A killed study must not leave a run that writes into the folder which the next call uses."""
    parent_process().join()
    os._exit(1)


def kill(pid: int) -> None:
    """End a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def last_line(folder: Path) -> str:
    """The last line of the log of a run."""
    log = Path(f"{folder}.log").read_text(errors="replace")
    return log.strip().rpartition("\n")[2][:200]


def in_processes(
    tasks: list[tuple], end: float, after: Callable[[str, Errors], None]
) -> Errors:
    """Call each (jobs, limit, function, folder, more arguments) in a process of its own.

    As many run at a time as all of them allow by their `jobs`. A process is killed after its limit
    (seconds) and at the time `end`; from then on none is started. `after` is called with the name
    of each folder and the errors so far. Returns the errors of those that failed.
    """
    context = get_context("spawn" if GPU else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    waiting, running, failed = deque(tasks), {}, {}
    started = time.monotonic()
    while True:
        while waiting and time.monotonic() < end and len(running) < min(
                others[0] for others in [waiting[0], *running.values()]):
            jobs, limit, *call = waiting.popleft()
            folder = call[1]
            folder.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{folder}.log").touch()
            print(f"{folder.name} starts; its lines go to {folder}.log")
            process = context.Process(target=logged, args=call)
            process.start()
            deadline = min(end, time.monotonic() + limit)
            running[process.sentinel] = jobs, deadline, folder, process
        if not running:
            return failed
        first = min(running, key=lambda sentinel: running[sentinel][1])
        ended = wait(running, running[first][1] - time.monotonic())
        *_, folder, process = running.pop(ended[0] if ended else first)
        cut = ""
        if not ended:
            kill(process.pid)
            cut = " at the time limit"
        process.join(RESERVE / 2)  # a call of a driver may block its end
        outcome = "finished"
        if process.exitcode != 0:
            failed[folder.name] = f"exit status {process.exitcode}{cut}: {last_line(folder)}"
            outcome = f"CRASHED, {failed[folder.name]}"
        done = len(tasks) - len(waiting) - len(running)
        minutes = (time.monotonic() - started) / 60
        left = min(minutes / done * (len(tasks) - done), (end - time.monotonic()) / 60)
        print(f"[{done}/{len(tasks)}] {folder.name}: {outcome} | {minutes:.1f} min, about"
              f" {left:.1f} left")
        for line in Path(f"{folder}.log").read_text(errors="replace").splitlines():
            if "WITHOUT EFFECT" in line:
                print(f"    {line}")
        after(folder.name, failed)


def run_all(plan: Plan) -> Errors:
    """Run what has not finished. Returns the errors of the runs that crashed."""
    plan.counted()  # refuses other options
    origin = {"command": plan.command}
    if not GPU:  # forked runs have the code of now, fresh ones that of then
        now = provenance()
        origin |= {"commit": now["commit"], "dirty": now["dirty"]}
    pending = [run for run in plan.chosen()
               if not run.finished and not (plan.study.piecewise and run.skipped)]
    pending.sort(key=lambda run: run.begun)  # those that a limit has cut already come last
    seconds = 60 * plan.options.minutes
    tasks = {}
    for run in pending:
        config, limit = run.config, run.cell.limit_s
        model = Path(config.model)
        if model.parent == plan.models and not model.exists():
            tasks.setdefault(model, (1, limit, write_model, model, run.cell.model, config.seed))
        jobs = run.cell.jobs if GPU else plan.options.jobs or plan.study.jobs
        tasks[run.folder] = jobs, limit, execute, run.folder, run, origin
    jobs = max((task[0] for task in tasks.values()), default=1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    prepare_environment()
    end = lab.STARTED + seconds - RESERVE
    return in_processes([*tasks.values()], end, partial(note, plan))


def note(plan: Plan, run: str, crashed: Errors) -> None:
    """After each run of a piecewise study: the record so far, and the run's figures.

    The disk must have room for the next run: a checkpoint of 0.5B has 8 GB.
    """
    if not plan.study.piecewise:
        return
    shutil.rmtree(plan.out / "runs" / run / "checkpoints", ignore_errors=True)
    name = run.rpartition("-seed")[0]
    try:
        cell = write_record(plan, crashed)["cells"].get(name)
    except OSError as error:
        print(f"    the record was NOT WRITTEN: {one_line(error)}")
        return
    if cell:
        steps = len(read_rows(plan.out / "runs" / run / "metrics.jsonl"))
        figures = [f"{METRICS[each].title} {text_of(METRICS[each], by_seed(cell, each), {})}"
                   for each in cell["metrics"] if by_seed(cell, each)]
        expected = f"expected: {plan.study.cells[name].expected}"
        print("   ", "; ".join([*figures, f"{steps} rows", expected]))


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
                        for each in dict.fromkeys((*plan.study.metrics, *plan.options.metrics))
                        if not (GPU and cell.jobs > 1 and each in OF_THE_CARD)},
        }
        # All that the user has chosen, else the study's own choice of many.
        if name in plan.study.drawn or (plan.study.drawn and plan.options.cells != ("*",)):
            curves = {each: [[row.get(each) for row in rows if row["step"]] for rows in tables]
                      for each in PANELS}
            cells[name]["curves"] = {each: values for each, values in curves.items()
                                     if {*chain(*values)} != {None}}
    if not cells and not plan.study.piecewise:
        sys.exit(f"error: no run has finished; the logs are in {plan.out / 'runs'}")
    record = {"study": plan.options.study}
    for name in ("command", "device", "commit", "wide_products"):
        record[name] = distinct(origin.get(name) for origin in origins)
    record["dirty"] = any(origin["dirty"] for origin in origins)
    names = origins[0]["versions"] if origins else ()
    record["versions"] = {name: distinct(origin["versions"][name] for origin in origins)
                          for name in names}
    if plan.study.piecewise:
        record["outcomes"] = {
            run.folder.name: f"{run.outcome(crashed)}; expected: {run.cell.expected}"
            for run in plan.chosen()}
    workload = f"{plan.study.workload} {plan.rehearsal}".strip()
    record |= {"workload": workload, "cells": cells, "crashed": crashed}
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
    return dict.fromkeys(each for cell in record["cells"].values() for each in cell["metrics"])


def described(name: str) -> Metric:
    """A column; one that no study has any more has the name under which it is stored."""
    return METRICS.get(name) or Metric(name, ".3g")


def report(record: Record, metrics: tuple[str, ...], chosen: list[str]) -> str:
    """Where the figures come from, and the table of the chosen cells.

    `metrics`: its columns, if given; those without a figure are left out.
    """
    cells = record["cells"]
    measured = [each for each in metrics or usual_columns(record)
                if any(by_seed(cells[name], each) for name in chosen)]
    titles = ["cell", "seeds", "baseline", *(described(each).title for each in measured)]
    rows = [titles, ["---"] * len(titles)]
    for name in chosen:
        cell = cells[name]
        base = cell["baseline"]
        if base == name or base not in cells:
            base = ""
        theirs = cells.get(base, {"seeds": [], "metrics": {}})
        texts = [text_of(described(each), by_seed(cell, each), by_seed(theirs, each))
                 for each in measured]
        rows.append([name, str(len(cell["seeds"])), base, *texts])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items() if each)
    changed = " with changes" if record["dirty"] else ""
    wide = record.get("wide_products")  # of lab.products
    products = f" (products of {wide} in float32, rounded)" if wide else ""
    text = (
        f"`{record['command']}` on {record['device']}{products}; {versions}; commit"
        f" {record['commit']}{changed}.\n\n"
        "Mean (smallest to largest) over the seeds; the mean difference to the baseline at equal"
        f" seeds ± half of its 95 % interval.{record.get('note', '')}\n\n{table}"
    )
    title = "outcomes" if "outcomes" in record else "crashed"
    listed = "".join(f"\n- {run}: {outcome}" for run, outcome in record[title].items())
    return f"{text}\n\n**{title.capitalize()}**\n{listed}" if listed else text


def means(record: Record, metrics: tuple[str, ...], chosen: list[str]) -> str:
    """The means over the seeds, by the names of the metrics, in aligned columns."""
    metrics = metrics or tuple(usual_columns(record))
    rows = [["", *metrics]]
    for name in chosen:
        found = [[*by_seed(record["cells"][name], each).values()] for each in metrics]
        rows.append([name, *map(mean_of, map(described, metrics), found)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
             for first, *others in rows]
    lines += ["", *(f"{each}: {described(each).title}" for each in metrics)]
    return "\n".join([*lines, *(f"{run} CRASHED: {why}" for run, why in record["crashed"].items())])


# ---------------------------------------------------------------------------------- the picture
def draw_means(record: Record, metrics: tuple[str, ...], chosen: list[str], path: Path) -> None:
    """A bar for each cell: mean and range over the seeds of each metric that is a number."""
    from matplotlib.figure import Figure

    numbers = [each for each in metrics if METRICS[each].form]
    if not numbers:
        return
    figure = Figure(figsize=(4 * len(numbers) + 2, 0.4 * len(chosen) + 1), layout="constrained")
    axes = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axis, name in zip(axes, numbers, strict=True):
        found = [by_seed(record["cells"][cell], name).values() or [math.nan] for cell in chosen]
        axis.barh(chosen, [*map(mean, found)])
        axis.hlines(chosen, [*map(min, found)], [*map(max, found)], "black")
        axis.set(title=METRICS[name].title)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


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
    """Exit status: 0 no run failed (with --minutes some may not have started), 1 a run crashed or
    reached its limit, 2 bad input.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with exit_with_message(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        shown = means if options.narrow else report
        if options.print is not None:
            path = Path(*options.print or [RECORDS / f"{options.study}.json"])
            with stage(f"reading the record {path}"):
                record = read_json(path)
                print(shown(record, options.metrics, options.chosen(record["cells"])))
            return 0
        plan = Plan(options, shlex.join(["python", "-m", "lab.study", *words]))
        if plan.rehearsal:
            print("no GPU: a rehearsal on a CPU, with tiny shapes")
        with locked(str(plan.out)):
            record = write_record(plan, run_all(plan))
            curves = {name: cell["curves"] for name, cell in record["cells"].items()
                      if "curves" in cell}
            if curves:
                draw(curves, plan.record.with_suffix(".png"))
    chosen = [name for name in plan.cells if name in record["cells"]]
    if options.narrow:
        draw_means(record, options.metrics or plan.study.metrics, chosen,
                   plan.out / f"{options.study}-means.png")
    print(f"\n{shown(record, options.metrics, chosen)}\n\nwritten to {plan.record}")
    return 1 if record["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
