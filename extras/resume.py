"""`--resume`: a run goes on from its newest checkpoint, with the same options, model and task."""

import json
from typing import Any

from extras import Extra
from report.errors import replace_file, stage
from report.files import (
    TABLES,
    checkpoints,
    read_checkpoint,
    read_json,
    read_rows,
    refuse_another_run,
)
from tasks.job import teach_toy


class Options(Extra):
    """Recovery."""

    resume: bool = False  # Go on from the newest checkpoint in `out`, with the same options.
    may_change = ("resume",)

    def check(self, config: Any) -> None:
        if self.resume and not config.parity.uncached_runtime:
            raise ValueError("resume must be off without uncached_runtime (no checkpoint has V1's"
                             " prefix cache, whose stale blocks are the fault, or a step that is"
                             " scheduled ahead); try another --out")

    def install(self, run: Any) -> None:
        if self.resume:
            run.find_start = find_newest


def find_newest(run: Any) -> None:
    """The run goes on from its newest checkpoint, or begins anew if it has none yet.

    Raises: ValueError if the folder holds another run, or one without its checkpoints.
    """
    teach_toy(run.config)  # if the cache has lost it: its digests are compared
    folders, record = checkpoints(run.out), run.out / "config.json"
    if folders or record.exists():
        refuse_another_run(run.config, run.identity, read_json(record))
    if not folders:
        # At most step 0 and the steps up to the first checkpoint.
        most = run.config.checkpoint_every + 1
        if len(read_rows(run.out / "metrics.jsonl")) > most:
            raise ValueError(f"a resumed run must have its checkpoints, {run.out} has none; try"
                             " another --out")
        print("resumed at step 1: there was no checkpoint")
        return
    checkpoint = folders[-1]
    state = read_checkpoint(checkpoint)
    step = state["step"]
    with stage(f"going on from {checkpoint}"):
        refuse_another_run(run.config, run.identity, state["run"])
    if step > run.config.steps:
        raise ValueError(f"steps must be at least {step}, the checkpoint's, got {run.config.steps}")
    run.checkpoint = state | {"folder": checkpoint}
    run.at_begin.insert(0, go_on)
    print(f"resumed at step {step + 1}")


def go_on(sides: Any, record: dict[str, Any]) -> None:
    """Drop the rows after the checkpoint's step, and keep the run's first record.

    What goes on now is in its list `resumed`. Raises: ValueError if rows are missing.
    """
    out, step = sides.run.out, sides.run.checkpoint["step"]
    for name in TABLES:
        rows = [row for row in read_rows(out / name) if row["step"] <= step]
        if name == "metrics.jsonl" and [row["step"] for row in rows] != [*range(step + 1)]:
            raise ValueError(f"{name} of a resumed run must have the steps 0 to {step}, {out} has"
                             f" {len(rows)} of them; try another --out")
        replace_file(out / name, "".join(json.dumps(row) + "\n" for row in rows))
    now, first = {"step": step + 1} | record, read_json(out / "config.json")
    record.clear()
    record.update(first | {"resumed": [*first.get("resumed", []), now]})
