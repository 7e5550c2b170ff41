"""`--tracker`: the numbers of metrics.jsonl go to trackio, wandb or TensorBoard, too.

None of the three is in requirements.txt. The run has its folder's name there.
"""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any


class Tracker:
    """`log` takes a row; wandb sends nothing with WANDB_MODE=offline."""

    def __init__(self, library: str, out: Path, config: dict[str, Any], first_step: int = 1):
        self.writer = None
        if library == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run repeats steps.
            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)
            self.writer.add_text("config", json.dumps(config))
            return
        os.environ.setdefault("WANDB_DIR", str(out))
        self.library = import_module(library)  # both have these functions
        self.library.init(project="grpo", name=out.name, config=config)

    def log(self, row: dict[str, Any]) -> None:
        numbers = {name: value for name, value in row.items()
                   if isinstance(value, int | float) and name != "step"}
        if self.writer is None:
            self.library.log(numbers, step=row["step"])
            return
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        (self.writer.close if self.writer else self.library.finish)()
