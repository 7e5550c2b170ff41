"""`--tracker`: the numbers of metrics.jsonl go to trackio or wandb, too.

Neither is in requirements.txt. A resumed run goes on in the same run of the library. Another
library with `init`, `log` and `finish` is one more name of the option.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from secrets import token_hex
from typing import Any, Literal

from report.files import read_json

NOT_OF_THE_EXPERIMENT = {"tracker"}


@dataclass(frozen=True)
class Options:
    """Where the numbers go besides metrics.jsonl."""

    # The numbers of each step also go to this library; it must be installed.
    tracker: Literal["none", "trackio", "wandb"] = "none"


def check_machine(config: Any, options: Options) -> None:
    name = options.tracker
    if name != "none" and find_spec(name) is None:
        raise ValueError(f"tracker must be installed, {name} is not: pip install {name}")


def install(run: Any, options: Options, parts: Any) -> None:
    if options.tracker == "none":
        return

    def begin(trainer: Any, record: dict[str, Any]) -> None:
        library = import_module(options.tracker)
        path = run.out / "config.json"  # of the run that is resumed
        earlier = read_json(path) if path.exists() else {}
        record["tracker"] = earlier.get("tracker") or token_hex(4)
        name = f"{run.out.name}-{record['tracker']}"  # trackio's only id
        os.environ.setdefault("WANDB_RUN_ID", record["tracker"])
        os.environ.setdefault("WANDB_DIR", str(run.out))
        library.init(project=os.environ.get("WANDB_PROJECT", "grpo"), config=record,
                     name=os.environ.get("WANDB_NAME", name), resume="allow")
        if earlier:
            print(f"{options.tracker} replaces no row: its rows from step {parts.first_step} on"
                  " stay beside the new ones, and the last rows before a kill may be missing")
        # wandb drops a row whose step is not its highest, so there `step` is a column.
        parts.writers.append(lambda row: library.log(
            {name: value for name, value in row.items() if isinstance(value, int | float)}))
        parts.at_end.append(library.finish)

    parts.at_begin.append(begin)
