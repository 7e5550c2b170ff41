"""--tensorboard: the rows of metrics.jsonl as scalars, answers of evaluations as text."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from records import answer_line

ANSWERS = 20  # shown of each evaluation, the first held-out problems, greedily


class TensorBoard:
    """A watcher of a run: writes event files into the folder `tensorboard` of the run.

    A resumed run hides what was written after its checkpoint.
    """

    def __init__(self, out: Path, first_step: int):
        self.samples = out / "samples.jsonl"
        self.writer = SummaryWriter(out / "tensorboard", purge_step=first_step)

    def __call__(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)
        if "eval_reward" in metrics:
            rows = map(json.loads, self.samples.read_text().splitlines())
            greedy = [row for row in rows if (row["step"], row["mode"]) == (step, "greedy")]
            # A line each, which Markdown shows unchanged.
            lines = map(answer_line, greedy[:ANSWERS])
            self.writer.add_text("answers", "\n".join(lines), step)
        self.writer.flush()
