"""`--keep-best`: OUT/best is the policy of the evaluation with the largest value of a metric.

best.json in the folder has the step, the metric and its value. A resumed run must exceed this value
too, although it may come from a step after the checkpoint: the policy is there, its row is not.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report.errors import stage
from report.files import save_policy

NOT_OF_THE_EXPERIMENT = {"keep_best"}


@dataclass(frozen=True)
class Options:
    """The best policy of a run."""

    # Metric of evaluations, such as eval_reward_greedy. After each with a larger value than all
    # before, OUT/best is written: a folder as policy/ is. Adapters are merged in host memory.
    keep_best: str | None = None

    def __post_init__(self):
        name = self.keep_best
        if name is not None and not name.startswith("eval_"):
            raise ValueError("keep_best must be a metric of evaluations (a step's are of the policy"
                             f" before its update), got {name}; try eval_reward_greedy")


def install(run: Any, options: Options, parts: Any) -> None:
    name, folder = options.keep_best, run.out / "best"
    if name is None:
        return
    best = {"step": -1, "metric": name, "value": -math.inf}
    if folder.exists():
        with stage(f"reading {folder}/best.json"):
            best = json.loads((folder / "best.json").read_text())
        if parts.new_folder or best["metric"] != name:
            raise ValueError(f"out must have no best policy of another run or metric, {folder} has"
                             f" one of {best['metric']}; move it away")
    for_saving: list[Callable] = []

    def begin(trainer: Any, record: dict[str, Any]) -> None:
        if best["step"] >= parts.first_step:
            print(f"{folder} stays, of step {best['step']}, which is after the checkpoint",
                  flush=True)
        parts.writers.append(lambda row: keep(trainer.policy.model, row))

    def keep(model: Any, row: dict[str, Any]) -> None:
        names = sorted(metric for metric in row if metric.startswith("eval_"))
        if names and name not in names:
            raise ValueError(f"keep_best must be one of {', '.join(names)}, got {name}")
        value = row.get(name)
        if value is None or not value > best["value"]:  # NaN is not
            return
        best.update(step=row["step"], value=value)
        with (stage(f"writing {folder}"),
              TemporaryDirectory(dir=run.out, prefix="best.") as unfinished):
            place = Path(unfinished)
            undo = [change() for change in for_saving]
            save_policy(replace(run, out=place), model, parts.after_save)
            for change_back in undo:
                change_back()
            (place / "policy" / "best.json").write_text(json.dumps(best))
            if folder.exists():
                folder.rename(place / "before")
            (place / "policy").rename(folder)

    # Installed last, so that all functions of the loaded model have added to `at_end`.
    parts.with_model.append(lambda model: for_saving.extend(parts.at_end))
    parts.at_begin.append(begin)
