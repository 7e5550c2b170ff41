"""`--tracker`: the numbers of metrics.jsonl go to trackio, wandb or a library like them, too.

None is in requirements.txt. A resumed run goes on in the same run of the library.
"""

import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from secrets import token_hex
from typing import Any

from report.errors import one_line
from report.log import report

FUNCTIONS = "init", "log", "finish"
# Arguments of wandb.init that the environment decides; wandb reads its other variables itself.
WANDB = {"project": "WANDB_PROJECT", "name": "WANDB_NAME", "id": "WANDB_RUN_ID"}
NOT_OF_THE_EXPERIMENT = {"tracker"}


@dataclass(frozen=True)
class Options:
    """Where the numbers go besides metrics.jsonl."""

    # The numbers of each step also go to this library, trackio or wandb; it must be installed.
    tracker: str = "none"


def check_machine(config: Any, options: Options) -> None:
    if options.tracker == "none":
        return
    try:
        attrgetter(*FUNCTIONS)(import_module(options.tracker))
    except (Exception, SystemExit) as error:
        raise ValueError("tracker must be an installed library with init, log and finish, such as"
                         " trackio or wandb (TensorBoard is gone: its SummaryWriter.add_scalar"
                         f" takes the numbers of metrics.jsonl), got {options.tracker}:"
                         f" {one_line(error)}") from error


def install(run: Any, options: Options, parts: Any) -> None:
    if options.tracker == "none":
        return
    library = import_module(options.tracker)

    def begin(trainer: Any, record: dict[str, Any]) -> None:
        run_id = token_hex(4)
        arguments = {"project": "grpo", "name": f"{run.out.name}-{run_id}"}
        if options.tracker == "wandb":
            arguments["id"] = run_id
            arguments = {name: os.environ.get(WANDB[name], value)
                         for name, value in arguments.items()}
        arguments = record.setdefault(options.tracker, arguments)  # those of the resumed run
        library.init(**arguments, config=dict(record), resume="allow")
        parts.reports.append(log)
        parts.at_end.append(library.finish)

    def log(row: dict[str, Any]) -> None:
        numbers = {name: value for name, value in row.items()
                   if isinstance(value, int | float) and name != "step"}
        # Also a column, because wandb's upload of an offline run that was resumed shifts steps.
        library.log(numbers | {"at_step": row["step"]}, step=row["step"])

    parts.at_begin.append(partial(report, [begin]))
