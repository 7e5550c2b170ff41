"""Compare runs with the stored runs of the same job.

docs/reference/ has the metrics of the default job (seeds 0 to 4) and of two arms of the ladder,
`parity` and `reference` (seeds 0 to 2). A run is within their spread if no metric is further
outside the stored values than their seed range. A seed range below 1 % of the value counts as 1 %.
A fork that does not change the arithmetic is expected to be within.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from config import NOT_OF_THE_EXPERIMENT
from lab.ablate import METRICS
from records import one_sentence, stage, steps_of

# JOB.json: options, versions, metrics of each run
STORED = Path(__file__).parents[1] / "docs" / "reference"
COMPARED = ("reward", "eval_reward", "eval_true", "entropy", "clip_rate", "kl_old_new", "mismatch",
            "ess")
# Options in which runs of one job may differ.
FREE = NOT_OF_THE_EXPERIMENT | {"seed"}


@dataclass(frozen=True)
class Options:
    """Folders of runs."""

    runs: tyro.conf.Positional[tuple[str, ...]]  # Folders with config.json and metrics.jsonl.
    stored: str = str(STORED)  # Folder of the stored runs.
    store: str | None = None  # Store the runs as STORE.json in that folder; compare nothing.

    def __post_init__(self):
        if not self.runs:
            raise ValueError("runs must be at least one folder, got none")


def options_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())["config"]
    return {name: value for name, value in config.items() if name not in FREE}


def store(folders: list[Path], path: Path) -> None:
    """Write options and metrics of the runs; seconds and memory are the machine's, not theirs."""
    record = json.loads((folders[0] / "config.json").read_text())
    if any(options_of(folder) != options_of(folders[0]) for folder in folders):
        raise ValueError("runs must be of one job, the options of"
                         f" {', '.join(map(str, folders))} differ")
    runs = [[{name: value for name, value in row.items() if not name.endswith(("_s", "_gib"))}
             for row in steps_of(folder)] for folder in folders]  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    stored = {name: record[name] for name in ("versions", "commit", "device")}
    path.write_text(json.dumps(stored | {"options": options_of(folders[0]), "runs": runs}) + "\n")


def compare(folder: Path, stored_in: Path) -> bool:
    """Print the metrics of a run beside those of the stored job with the most equal options.

    Returns whether all are within.
    """
    with stage(f"reading the run in {folder}"):
        options = options_of(folder)
        steps = steps_of(folder)[1:]  # without the evaluation before the first step
        if len(steps) != options["steps"]:
            raise ValueError(f"it must have finished, it has {len(steps)} of {options['steps']}"
                             " steps")
    jobs = {path.stem: json.loads(path.read_text()) for path in sorted(stored_in.glob("*.json"))}
    if not jobs:
        raise ValueError(f"stored must be a folder with stored runs, {stored_in} has none;"
                         " try --store NAME")
    changed = {job: sorted(name for name in options if options[name] != stored["options"].get(name))
               for job, stored in jobs.items()}  # fmt: skip
    job = min(jobs, key=lambda name: len(changed[name]))
    others = f"; other options: {', '.join(changed[job])}" if changed[job] else ""
    print(f"{folder}, compared with {len(jobs[job]['runs'])} runs of {job}{others}")
    outside = {}  # by metric, in seed ranges
    for name in COMPARED:
        metric = METRICS[name]
        ours = metric.measure(steps)
        theirs = [metric.measure(run[1:]) for run in jobs[job]["runs"]]
        if ours is None or None in theirs:
            continue
        low, high = min(theirs), max(theirs)
        outside[name] = max(low - ours, ours - high, 0.0) / max(high - low, 0.01 * abs(high), 1e-12)
        words = "inside"
        if outside[name] >= 0.005:
            words = f"outside by {outside[name]:.2f} seed ranges"
        print(f"  {metric.title}: {ours:{metric.form}}, {words} ({low:{metric.form}} to"
              f" {high:{metric.form}})")
    worst = max(outside, key=outside.get)
    verdict = f"{'within' if outside[worst] <= 1 else 'NOT within'} the spread of the stored runs"
    print(f"{verdict}; furthest: {METRICS[worst].title}, {outside[worst]:.2f} seed ranges")
    return outside[worst] <= 1


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 within the spread, 1 outside, 2 bad input."""
    with one_sentence(2):
        options = tyro.cli(Options, args=arguments, description=__doc__)
        folders, stored_in = [*map(Path, options.runs)], Path(options.stored)
        if options.store:
            store(folders, stored_in / f"{options.store}.json")
            return 0
        within = [compare(folder, stored_in) for folder in folders]
        return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
