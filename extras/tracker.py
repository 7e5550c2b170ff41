"""`--tracker`: the numbers of metrics.jsonl go to trackio, wandb or TensorBoard, too.

None of the three is in requirements.txt. A resumed run goes on in the same run of the library.
"""

import json
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from report.errors import replace_file
from report.files import read_json

# Arguments of wandb.init that the environment decides; wandb reads its other variables itself.
WANDB = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "name": "WANDB_NAME",
         "id": "WANDB_RUN_ID", "dir": "WANDB_DIR", "resume": "WANDB_RESUME"}  # fmt: skip
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
        first_step = parts.first_step if parts.checkpoint else 0  # without one, step 0 comes again
        tracker = Tracker(options.tracker, run.out, record, first_step)
        parts.writers.append(tracker.log)
        parts.at_end.append(tracker.close)

    if options.tracker != "none":
        parts.at_begin.append(begin)


class Tracker:
    """`log` takes a row. A resumed run repeats steps, from `first_step` on.

    TensorBoard replaces them, wandb and trackio do not. wandb drops a row whose step is not its
    highest (the upload of an offline run shifts it), so there `step` is a column and the x axis.
    """

    def __init__(self, library: str, out: Path, config: dict[str, Any], first_step: int):
        self.writer = None
        self.of_wandb = library == "wandb"
        if library == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)
            self.writer.add_text("config", json.dumps(config))
            return
        # A folder without config.json holds no run, whatever an earlier start has left.
        resumed = (out / f"{library}.json").exists() and (out / "config.json").exists()
        arguments = arguments_of_run(library, out, resumed)
        if resumed:
            print(f"{library} replaces no row: its rows from step {first_step} on stay beside the"
                  " new ones, and the last rows before a kill may be missing")
        self.library = import_module(library)  # both have these functions
        self.library.init(**arguments, config=config)
        if self.of_wandb:
            self.library.define_metric("*", step_metric="step")

    def log(self, row: dict[str, Any]) -> None:
        step = row["step"]
        numbers = {name: value for name, value in row.items()
                   if isinstance(value, int | float) and name != "step"}
        if self.of_wandb:
            self.library.log(numbers | {"step": step})
        elif self.writer is None:
            self.library.log(numbers, step=step)
        else:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        (self.writer.close if self.writer else self.library.finish)()


def arguments_of_run(library: str, out: Path, resumed: bool) -> dict[str, str]:
    """Arguments of `init` that identify the run. OUT/LIBRARY.json keeps them for a resumed run."""
    path = out / f"{library}.json"
    run_id = token_hex(4)
    arguments = {"project": "grpo", "name": out.name, "id": run_id}
    if library == "trackio":  # a run's name is its only id
        arguments = {"project": "grpo", "name": f"{out.name}-{run_id}"}
    if resumed:
        arguments |= read_json(path) | {"resume": "allow"}
    if library == "wandb":
        arguments |= {"dir": str(out)} | {
            argument: os.environ[variable] for argument, variable in WANDB.items()
            if os.environ.get(variable)}
    replace_file(path, json.dumps(arguments))
    return arguments
