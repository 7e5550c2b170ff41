"""`--keep-best`: OUT/best is the policy of the evaluation with the largest value of a metric.

It is a folder like a checkpoint's without state.pt: a model, or adapters of PEFT. best.json in it
has the step, the metric and the value. A resumed run replaces OUT/best only by a larger value, even
if OUT/best is of a later step than the checkpoint.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from report.errors import stage
from report.files import appears_whole, read_json, read_rows

NOT_OF_THE_EXPERIMENT = {"keep_best"}


@dataclass(frozen=True)
class Options:
    """The best policy of a run."""

    # Metric of evaluations, such as eval_reward_greedy. Whenever an evaluation exceeds all earlier
    # ones, its policy is written to OUT/best, a folder as a checkpoint has it.
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
        best = read_json(folder / "best.json")
        is_new = parts.new_folder or not (run.out / "config.json").exists()
        if is_new or best["metric"] != name:
            raise ValueError("out must be without another run's or metric's best policy (it would"
                             f" be overwritten), {folder} has one of {best['metric']}; move it"
                             " away")

    def begin(trainer: Any, record: dict[str, Any]) -> None:
        kept = best["step"]
        for row in read_rows(run.out / "metrics.jsonl"):
            raises_best(row)
        if best["step"] != kept:
            print(f"notice: the best evaluation so far is of step {best['step']}, whose policy was"
                  f" not kept: only a better one goes to {folder}")
        parts.writers.append(lambda row: keep(trainer.policy.model, row))

    def check_name(row: dict[str, Any]) -> None:
        names = sorted(metric for metric in row if metric.startswith("eval_"))
        if names and name not in names:
            raise ValueError(f"keep_best must be one of {', '.join(names)}, got {name}")

    def raises_best(row: dict[str, Any]) -> bool:
        """Whether the row's evaluation is the best so far; `best` is then of it."""
        check_name(row)
        value = row.get(name)
        is_better = value is not None and value > best["value"]  # also leaves out NaN
        if is_better:
            best.update(step=row["step"], value=value)
        return is_better

    def keep(model: Any, row: dict[str, Any]) -> None:
        if not raises_best(row):
            return
        with stage(f"writing {folder}"), appears_whole(folder) as new:
            parts.save_weights(model, new)
            (new / "best.json").write_text(json.dumps(best))
            if folder.exists():
                folder.rename(new.with_name("before"))

    parts.at_begin.append(begin)
