"""--tensorboard: the rows of metrics.jsonl as scalars."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A watcher of a run: writes event files into the folder `tensorboard` of the run.

    A resumed run hides what was written after its checkpoint.
    """

    def __init__(self, out: Path, first_step: int):
        self.writer = SummaryWriter(out / "tensorboard", purge_step=first_step)

    def __call__(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, metrics["step"])
        self.writer.flush()
