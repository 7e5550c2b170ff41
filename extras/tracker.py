"""`--tracker`: the numbers of metrics.jsonl go to trackio, wandb or TensorBoard, too.

None of the three is in requirements.txt. The run has its folder's name there.
"""

import json
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

NOT_OF_THE_EXPERIMENT = {"tracker"}


@dataclass(frozen=True)
class Options:
    """Where the numbers go besides metrics.jsonl."""

    # The numbers of each step also go to this library; it must be installed.
    tracker: Literal["none", "trackio", "tensorboard", "wandb"] = "none"


def check_machine(config: Any, options: Options) -> None:
    name = options.tracker
    if name != "none" and find_spec(name) is None:
        raise ValueError(f"tracker must be installed, {name} is not: pip install {name}")


def install(run: Any, options: Options, parts: Any) -> None:
    def begin(trainer: Any, record: dict[str, Any]) -> None:
        tracker = Tracker(options.tracker, run.out, record, parts.first_step)
        parts.writers.append(tracker.log)
        parts.at_end.append(tracker.close)

    if options.tracker != "none":
        parts.at_begin.append(begin)


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
