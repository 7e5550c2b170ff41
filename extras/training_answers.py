"""samples.jsonl has answers of training, too: those to the first problem of each evaluated step."""

from typing import Any

from extras import Extra
from report.files import append_rows


class Options(Extra):
    """None: it acts in each run."""

    def install(self, run: Any) -> None:
        config = run.config

        def observe(step: Any) -> dict[str, Any]:
            number = step.metrics["step"]
            if number == config.steps or number % config.eval_every == 0:
                rollouts = step.batch.rollouts[: config.group_size]
                answers = run.task.score(step.problems[:1], rollouts)
                append_rows(run.out / "samples.jsonl",
                            [{"step": number, "mode": "train"} | answer for answer in answers])
            return {}

        run.step_metrics.append(observe)
