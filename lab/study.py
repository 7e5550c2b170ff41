"""A study: named cells of options of train.py, run with the same seeds and compared with one cell.

    python -m lab.study ladder --cells parity 'v1-*' --seeds 0 1 2 --out runs/ladder
    python -m lab.study ladder --print

The first command runs each cell with each seed and writes a record (JSON) and a picture. The second
prints the table of the record in docs/records and runs nothing. lab/cells.py lists the cells.

Seeds are the outer loop, so the cells of a benchmark alternate. Each run is a process of its own,
forked from one that has imported everything; on a GPU, whose state cannot be forked, it is a fresh
process. A second call repeats what has not finished. All runs in OUT belong to the record: the call
is refused if one of them has other options than this call would give it. No run that has finished
is deleted.
"""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean as mean
from statistics import stdev
from threading import Thread
from typing import Any, Literal

import torch
import tyro

from config import MANY, MAX_SEED, Config, within
from lab.cells import METRICS, PANELS, STUDIES, Metric, Rows
from lab.models import MODELS
from lab.products import are_slow, widen
from records import digest_of, end_process, locked, one_sentence, stage

RECORDS = Path(__file__).parents[1] / "docs" / "records"
MARK = "finished.json"  # in the folder of a run: its options and origin, written after its end
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. The last one is also taken for
# more: it is larger than theirs.
STUDENT = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


@dataclass(frozen=True)
class Options:
    """What to run, or what to print."""

    study: tyro.conf.Positional[Literal[tuple(STUDIES)]]
    out: str | None = None  # Folder of runs, record and picture; if not given, runs/STUDY.
    # Names of cells, or patterns such as 'long.*.none'. Their references run only if named too.
    cells: tuple[str, ...] = ("*",)
    seeds: tuple[int, ...] = ()  # If not given, 0, 1, ...: as many as the study has.
    steps: int | None = None  # Steps of a run; if not given, those of the study.
    jobs: int | None = None  # Runs at the same time; they share the CPU threads. 1 on a GPU.
    # More options of train.py, with an equals sign: --train-args="--model PATH". They override the
    # study's workload; the options of a cell override them.
    train_args: str = ""
    # Print the table of a record and run nothing; without a name, of docs/records/STUDY.json.
    print: tuple[str, ...] | None = None
    metrics: tuple[Literal[tuple(METRICS)], ...] = ()  # Of the table; if not given, the study's.
    reference: str | None = None  # Compare with this cell; if not given, each with its own.

    def __post_init__(self):
        within(self, 1, MANY, "steps", "jobs")
        for seed in self.seeds:
            if not 0 <= seed <= MAX_SEED:
                raise ValueError(f"seeds must be in [0, {MAX_SEED}], got {seed}")
        given = {word.partition("=")[0].replace("_", "-") for word in shlex.split(self.train_args)}
        taken = sorted(given & {"--out", "--seed", "--steps", "--resume"})
        if taken:
            raise ValueError(f"train_args must not contain {', '.join(taken)} (this command sets"
                             f" them), got {self.train_args}")


# ---------------------------------------------------------------------------------- runs
@dataclass(frozen=True)
class Run:
    """A cell with a seed."""

    folder: Path
    program: str  # a module
    words: tuple[str, ...]  # options of train.py
    config: Config
    model: str | None  # to be written at config.run.model

    @property
    def options(self) -> dict[str, Any]:
        """What makes it this run and no other, as JSON has it."""
        return json.loads(json.dumps(self.config.experiment | {"program": self.program}))


class Plan:
    """The runs of a study under the options of one call."""

    def __init__(self, options: Options):
        self.options, self.study = options, STUDIES[options.study]
        self.out = Path(options.out or f"runs/{options.study}").resolve()
        self.seeds = options.seeds or tuple(range(self.study.seeds))
        cells = self.study.cells
        for pattern in options.cells:
            if not any(fnmatchcase(name, pattern) for name in cells):
                raise ValueError(f"cells must be names of cells or patterns, got {pattern};"
                                 f" {options.study} has {', '.join(islice(cells, 60))}")
        self.chosen = [name for name in cells
                       if any(fnmatchcase(name, pattern) for pattern in options.cells)]
        self._config = cache(lambda words: tyro.cli(Config, args=list(words)))

    def run(self, name: str, seed: int) -> Run:
        cell = self.study.cells[name]
        folder = self.out / "runs" / f"{name}-seed{seed}"
        steps = self.options.steps or self.study.steps
        model = self.out / "models" / f"{cell.model}-seed{seed}"
        own = ("--model", str(model)) if cell.model else ()
        words = (*shlex.split(self.study.workload), *own, "--steps", str(steps),
                 *shlex.split(self.options.train_args), *shlex.split(cell.options))  # fmt: skip
        config = self._config(words)
        needed = cell.model if config.run.model == str(model) else None
        words = ("--out", str(folder), "--seed", str(seed), *words)
        return Run(folder, cell.program, words, config.changed(seed=seed), needed)

    def stored_seeds(self) -> dict[str, list[int]]:
        """Seeds of the finished runs in OUT, by cell.

        Raises: ValueError if a run in OUT, finished or not, has other options than this call's, or
        weights that have been replaced since.
        """
        seeds = {}
        for folder in sorted((self.out / "runs").glob("*-seed*")):
            name, _, seed = folder.name.rpartition("-seed")
            finished = read_json(folder / MARK)
            origin = read_json(folder / "config.json")
            stored = finished or origin.get("config")
            if not isinstance(stored, dict) or not stored:
                # A run that fails at its start leaves its error alone.
                if {each.name for each in folder.glob("*")} - {"error.txt"}:
                    raise ValueError(f"out must hold runs of this study, {folder} has files and no"
                                     " readable config.json; move it away")
                continue
            if name not in self.study.cells or not re.fullmatch("0|[1-9][0-9]*", seed):
                raise ValueError(f"out must hold runs of this study, {folder} is no cell of"
                                 f" {self.options.study}; choose another --out")
            wanted = self.run(name, int(seed)).options
            changed = [f"{key} {stored.get(key)} instead of {wanted[key]}" for key in wanted
                       if stored.get(key) != wanted[key] and (finished or key != "program")]
            changed += [f"another {file}" for file, digest in origin.get("files", {}).items()
                        if file.startswith(f"{wanted['model']}/") and Path(file).is_file()
                        and digest_of(Path(file)) != digest]
            if changed:
                raise ValueError(f"runs in out must have the options of this call, {folder} has"
                                 f" {'; '.join(changed)}; choose another --out")
            if finished:
                seeds.setdefault(name, []).append(int(seed))
        return {name: sorted(found) for name, found in seeds.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is absent, damaged or holds no object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def execute(run: Run, command: str) -> None:
    """In a process of its own: the run from its beginning, then its mark."""
    _begin(run.folder.with_name(f"{run.folder.name}.log"))
    shutil.rmtree(run.folder, ignore_errors=True)  # not finished
    dtype = run.config.run.dtype
    wide = are_slow(dtype)
    if wide:
        widen(dtype)
    import_module(run.program).main(list(run.words))
    origin = {"command": command, "wide_products": dtype if wide else None}
    (run.folder / MARK).write_text(json.dumps(run.options | origin))
    end_process()


def write_model(model: str, folder: Path, seed: int) -> None:
    _begin(folder.with_name(f"{folder.name}.log"))
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    MODELS[model](unfinished, seed)
    unfinished.rename(folder)


def _begin(log: Path) -> None:
    """End with the study, if that is killed; all output goes to the log."""
    Thread(target=_end_with_the_study, daemon=True).start()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _end_with_the_study() -> None:
    parent_process().join()
    os._exit(1)


def in_processes(
    tasks: dict[Path, tuple[Callable, tuple]], jobs: int
) -> Iterator[tuple[Path, str | None]]:
    """Run the tasks, `jobs` at a time. Yields the folder of each and its error, if it failed."""
    context = get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["lab.warm"])
    waiting, running = list(tasks), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            folder = waiting.pop(0)
            function, arguments = tasks[folder]
            process = context.Process(target=function, args=arguments)
            process.start()
            running[process.sentinel] = folder, process
        for sentinel in wait(list(running)):
            folder, process = running.pop(sentinel)
            process.join()
            log = folder.with_name(f"{folder.name}.log")
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            failed = f"exit status {process.exitcode}: {last_line[:200]}"
            yield folder, failed if process.exitcode else None


def run_all(plan: Plan, command: str) -> dict[str, str]:
    """Run what has not finished. Returns the errors of the runs that crashed."""
    finished = plan.stored_seeds()
    runs = {}
    for seed in plan.seeds:
        for name in plan.chosen:
            if seed not in finished.get(name, ()):
                run = plan.run(name, seed)
                runs[run.folder] = run
    needed = {Path(run.config.run.model): run for run in runs.values() if run.model}
    models = {folder: (write_model, (run.model, folder, run.config.run.seed))
              for folder, run in needed.items() if not folder.exists()}
    jobs = plan.options.jobs or (1 if torch.cuda.is_available() else plan.study.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    crashed, started = {}, time.monotonic()
    tasks = {folder: (execute, (run, command)) for folder, run in runs.items()}
    for part in (models, tasks):
        for done, (folder, error) in enumerate(in_processes(part, jobs), 1):
            if error:
                crashed[folder.name] = error
            outcome = f"CRASHED, {error}" if error else "finished"
            minutes = (time.monotonic() - started) / 60
            print(f"[{done}/{len(part)}] {folder.name}: {outcome} | {minutes:.1f} min", flush=True)
    return crashed


# ---------------------------------------------------------------------------------- the record
def make_record(plan: Plan, crashed: dict[str, str]) -> dict[str, Any]:
    """All finished runs in OUT: options, seeds, the metrics of each run, and where they ran."""
    finished, cells, configs = plan.stored_seeds(), {}, []
    for name, cell in plan.study.cells.items():
        seeds = finished.get(name, [])
        if not seeds:
            continue
        folders = [plan.run(name, seed).folder for seed in seeds]
        with stage(f"reading the runs of {name}"):
            runs = [steps_of(folder) for folder in folders]
            found = [json.loads((folder / "config.json").read_text()) | read_json(folder / MARK)
                     for folder in folders]
        configs += found
        cells[name] = {
            "options": cell.options, "reference": cell.reference, "engine": found[0]["audit"],
            "seeds": seeds,
            "metrics": {each: [METRICS[each].measure(rows) for rows in runs]
                        for each in plan.study.metrics},
        }
        if name in plan.study.drawn:
            cells[name]["curves"] = {each: [[row.get(each) for row in rows] for rows in runs]
                                     for each in PANELS}
    if not cells:
        sys.exit(f"error: no run has finished; the logs are in {plan.out / 'runs'}")
    record = {"study": plan.options.study}
    record |= {name: distinct(config.get(name) for config in configs)
               for name in ("command", "device", "commit", "wide_products")}
    record["dirty"] = any(config["dirty"] for config in configs)
    names = dict.fromkeys(name for config in configs for name in config["versions"])
    record["versions"] = {
        name: distinct(config["versions"].get(name) for config in configs) for name in names}
    return record | {"workload": plan.study.workload, "cells": cells, "crashed": crashed}


def steps_of(folder: Path) -> Rows:
    """The rows of metrics.jsonl from step 1 on, each with the greedy evaluation before it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = next((row for row in rows if not row["step"]), {})
    before = {"eval_reward_greedy_before": start.get("eval_reward_greedy")}
    return [row | before for row in rows if row["step"]]


def distinct(values: Iterator[Any]) -> str:
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


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def report(record: dict[str, Any], options: Options) -> str:
    """Where the figures come from, and the table of the chosen cells."""
    cells = record["cells"]
    chosen = {name: cell for name, cell in cells.items()
              if any(fnmatchcase(name, pattern) for pattern in options.cells)}
    measured = [name for name in options.metrics or STUDIES[options.study].metrics
                if any(by_seed(cell, name) for cell in chosen.values())]
    rows = []
    for name, cell in chosen.items():
        base = options.reference or cell["reference"]
        reference = cells[base] if base in cells and base != name else {"seeds": [], "metrics": {}}
        texts = [text_of(METRICS[each], by_seed(cell, each), by_seed(reference, each))
                 for each in measured]
        rows.append([name, str(len(cell["seeds"])), base if reference["seeds"] else "", *texts])
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items() if each)
    changed = " with changes" if record["dirty"] else ""
    wide = record.get("wide_products")  # of lab.products
    products = f" (products of {wide} in float32, rounded)" if wide else ""
    parts = [
        f"`{record['command']}` on {record['device']}{products}; {versions}; commit"
        f" {record['commit']}{changed}.",
        "Mean (smallest to largest) over the seeds; the mean difference to the reference at equal"
        " seeds ± half of its 95 % interval.",
        table(["cell", "seeds", "reference", *(METRICS[each].title for each in measured)], rows),
    ]
    crashed = [f"- {run}: {error}" for run, error in record["crashed"].items()]
    if crashed:
        parts.append("\n".join(["**Crashed**", "", *crashed]))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------- the picture
def draw(record: dict[str, Any], path: Path) -> Any:
    """Curves of the cells that have some, mean and range over the seeds; else a map of losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 8), layout="constrained")
    drawn = {name: cell["curves"] for name, cell in record["cells"].items() if "curves" in cell}
    if drawn:
        for axis, field_title in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            _draw_curves(axis, drawn, *field_title)
    elif record["study"] == "corrections" and any(
            cell["reference"] in record["cells"] for cell in record["cells"].values()):
        _draw_losses(figure, record["cells"])
    else:  # a benchmark, or no cell with its reference
        return None
    figure.savefig(path, dpi=110)
    return figure


def _draw_curves(axis: Any, drawn: dict[str, Any], field: str, title: str) -> None:
    positive = []
    for name, curves in drawn.items():
        columns = enumerate(zip(*curves[field], strict=False), 1)
        measured = {step: column for step, column in columns if None not in column}
        lines = [[reduce(column) for column in measured.values()] for reduce in (mean, min, max)]
        axis.plot(list(measured), lines[0], label=name, marker="o" if len(measured) == 1 else "")
        axis.fill_between(list(measured), *lines[1:], alpha=0.2)
        positive += [value for value in lines[0] if value > 0]
    axis.set(title=title, xlabel="step")
    axis.legend(fontsize=8)
    if title.endswith("(log)") and positive:  # linear below these values: 0 is on the axis
        axis.set_yscale("symlog", linthresh=min(positive))


def _draw_losses(figure: Any, cells: dict[str, Any]) -> None:
    """Backends by corrections: the trainer alone minus the reference, and in how many seeds less.

    Cells are named WORKLOAD.BACKEND.CORRECTION.
    """
    found = {}
    for name, cell in cells.items():
        workload, backend, correction = name.split(".")
        if cell["reference"] in cells:
            ours, theirs = (by_seed(each, "eval_trainer_alone")
                            for each in (cell, cells[cell["reference"]]))
            losses = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            found.setdefault(workload, {})[backend, correction] = losses
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (workload, losses) in zip(axes, found.items(), strict=True):
        backends, corrections = (list(dict.fromkeys(each)) for each in zip(*losses, strict=True))
        means = torch.full((len(backends), len(corrections)), torch.nan)
        for (backend, correction), seen in losses.items():
            row, column = backends.index(backend), corrections.index(correction)
            means[row, column] = mean(seen)
            text = f"{mean(seen):+.2f}\n{sum(loss < 0 for loss in seen)}/{len(seen)}"
            axis.text(column, row, text, ha="center", va="center")
        axis.imshow(means.numpy(), cmap="RdYlGn", vmin=-0.6, vmax=0.6, aspect="auto")
        axis.set_xticks(range(len(corrections)), corrections, rotation=45, ha="right")
        axis.set_yticks(range(len(backends)), backends)
        axis.set_title(f"{workload}: held out by the trainer alone, minus the reference")


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run crashed, 2 bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    with one_sentence(2):
        options = tyro.cli(Options, args=words, description=__doc__)
        if options.print is not None:
            path = Path(*options.print) if options.print else RECORDS / f"{options.study}.json"
            with stage(f"reading the record {path}"):
                record = json.loads(path.read_text())
                for name in (*options.cells, options.reference or "*"):
                    if not any(fnmatchcase(cell, name) for cell in record["cells"]):
                        raise ValueError(f"it has no cell {name}")
                print(report(record, options))
            return 0
        plan = Plan(options)
    with one_sentence(2), locked(str(plan.out)):
        crashed = run_all(plan, shlex.join(["python", "-m", "lab.study", *words]))
        record = make_record(plan, crashed)
        path = plan.out / f"{options.study}.json"
        path.write_text(json.dumps(record, indent=1))
        picture = draw(record, path.with_suffix(".png"))
    written = f"{path.name}, {path.stem}.png" if picture else path.name
    print(f"\n{report(record, options)}\n\nwritten to {plan.out}: {written}")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
