"""`--keep-best`: OUT/best is the policy of the evaluation with the largest value of a metric.

It is a folder like a checkpoint's without state.pt: a model, or adapters of PEFT. best.json in it
has the step, the metric and the value.
"""

import json
import math
from functools import partial
from typing import Any

from extras import Extra
from report.errors import stage
from report.files import appears_whole, read_json, read_rows


class Options(Extra):
    """The best policy of a run."""

    # Metric of evaluations, such as eval_reward_greedy. Whenever an evaluation exceeds all earlier
    # ones, its policy is written to OUT/best, a folder as a checkpoint has it.
    keep_best: str | None = None
    may_change = ("keep_best",)

    def check(self, config: Any) -> None:
        name = self.keep_best
        if name is not None and not name.startswith("eval_"):
            raise ValueError("keep_best must be a metric of evaluations (a step's are of the policy"
                             f" before its update), got {name}; try eval_reward_greedy")

    def install(self, run: Any) -> None:
        name, folder = self.keep_best, run.out / "best"
        if name is None:
            return
        if folder.exists():
            other = read_json(folder / "best.json")["metric"]
            if other != name or not (run.out / "config.json").exists():
                raise ValueError("out must be without another run's or metric's best policy (it"
                                 f" would be overwritten), {folder} has one of {other}; move it"
                                 " away")

        def keep(model: Any, row: dict[str, Any]) -> None:
            names = sorted(metric for metric in row if metric.startswith("eval_"))
            if not names:
                return
            if name not in names:
                raise ValueError(f"keep_best must be one of {', '.join(names)}, got {name}")
            values = [each[name] for each in read_rows(run.out / "metrics.jsonl") if name in each]
            *earlier, value = (-math.inf if value is None or math.isnan(value) else value
                               for value in values)
            if not value > max(earlier, default=-math.inf):
                return
            best = {"step": row["step"], "metric": name, "value": value}
            with stage(f"writing {folder}"), appears_whole(folder) as new:
                run.save_weights(run, model, new)
                (new / "best.json").write_text(json.dumps(best))
                if folder.exists():
                    folder.rename(new.with_name("before"))

        run.with_model.append(lambda model: run.writers.append(partial(keep, model)))
