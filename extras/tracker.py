"""`--tracker`: the numbers of metrics.jsonl go to trackio, wandb or a library like them, too.

None is in requirements.txt. A resumed run goes on in the same run of the library.
"""

import os
from functools import partial
from importlib import import_module
from operator import attrgetter
from secrets import token_hex
from typing import Any

from extras import Extra
from report.errors import one_line
from report.log import call_reports

FUNCTIONS = "init", "log", "finish"
# Arguments of wandb.init that the environment decides; wandb reads its other variables itself.
WANDB = {"project": "WANDB_PROJECT", "name": "WANDB_NAME", "id": "WANDB_RUN_ID"}


class Options(Extra):
    """Where the numbers go besides metrics.jsonl."""

    # The numbers of each step also go to this library, trackio or wandb; it must be installed.
    tracker: str = "none"
    may_change = ("tracker",)

    def install(self, run: Any) -> None:
        if self.tracker == "none":
            return
        try:
            library = import_module(self.tracker)
            attrgetter(*FUNCTIONS)(library)
        except (Exception, SystemExit) as error:
            raise ValueError("tracker must be an installed library with init, log and finish, such"
                             " as trackio or wandb (TensorBoard is gone: its"
                             " SummaryWriter.add_scalar takes the numbers of metrics.jsonl), got"
                             f" {self.tracker}: {one_line(error)}") from error

        def begin(sides: Any, record: dict[str, Any]) -> None:
            run_id = token_hex(4)
            arguments = {"project": "grpo", "name": f"{run.out.name}-{run_id}"}
            if self.tracker == "wandb":
                arguments["id"] = run_id
                arguments = {name: os.environ.get(WANDB[name], value)
                             for name, value in arguments.items()}
            arguments = record.setdefault(self.tracker, arguments)  # those of the resumed run
            library.init(**arguments, config=dict(record), resume="allow")
            run.reports.append(log)
            run.at_end.append(library.finish)

        def log(row: dict[str, Any]) -> None:
            numbers = {name: value for name, value in row.items()
                       if isinstance(value, int | float) and name != "step"}
            # Also a column, because wandb's upload of an offline run that was resumed shifts steps.
            library.log(numbers | {"at_step": row["step"]}, step=row["step"])

        run.at_begin.append(partial(call_reports, [begin]))
