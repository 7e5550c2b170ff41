"""samples.jsonl has answers of training, too: those to the first problem of each evaluated step."""

from typing import Any

from report.files import append_rows


def install(run: Any, options: None, parts: Any) -> None:
    def observe(step: Any) -> dict[str, Any]:
        number, config = step.metrics["step"], run.config
        if number == config.steps or number % config.eval_every == 0:
            answers = run.task.score(step.problems[:1], step.batch.rollouts[: config.group_size])
            append_rows(run.out / "samples.jsonl",
                        [{"step": number, "mode": "train"} | answer for answer in answers])
        return {}

    parts.observers.append(observe)
