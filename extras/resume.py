"""`--resume`: a run goes on from its newest checkpoint, with the same options, model and task."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from report.errors import replace_file
from report.files import (
    TABLES,
    checkpoints,
    read_json,
    read_rows,
    refuse_changes,
    refuse_other_prompts,
)

NOT_OF_THE_EXPERIMENT = {"resume"}


@dataclass(frozen=True)
class Options:
    """Recovery."""

    resume: bool = False  # Go on from the newest checkpoint in `out`, with the same options.


def check(config: Any, options: Options) -> None:
    if options.resume and not config.parity.uncached_runtime:
        raise ValueError("resume must be off without uncached_runtime (no checkpoint has V1's"
                         " prefix cache, whose stale blocks are the fault, or a step that is"
                         " scheduled ahead); try another --out")


def check_machine(config: Any, options: Options) -> None:
    out = Path(config.out)
    if not options.resume and ((out / "config.json").exists() or checkpoints(out)):
        raise ValueError(f"out must be a new folder, {out} holds a run; go on with --resume or"
                         " choose another --out")


def install(run: Any, options: Options, parts: Any) -> None:
    if not options.resume:
        return
    parts.new_folder = False
    parts.checkpoint = newest_checkpoint(run)
    without = ": there was no checkpoint"
    if parts.checkpoint:
        without = ""
        step = parts.checkpoint["step"]
        parts.first_step = step + 1
        parts.at_begin.append(partial(go_on, step))
    parts.at_begin.append(lambda trainer, record: print(
        f"resumed at step {parts.first_step}{without}"))


def newest_checkpoint(run: Any) -> dict[str, Any] | None:
    """The newest checkpoint of a run.Run, None before its first one.

    Raises: ValueError if the folder holds another run, or one without its checkpoints, or if the
    checkpoint cannot be read.
    """
    options, paths = run.config, checkpoints(run.out)
    if not (run.out / "config.json").exists():
        if paths:
            raise ValueError(f"out must be new or a whole run, {run.out} has a run's files without"
                             " config.json")
        return None
    earlier = read_json(run.out / "config.json")
    free = run.config.flat().keys() - run.config.experiment.keys()
    before = run.config.defaults() | earlier["config"]  # an option can be younger than the run
    refuse_other_rates(options, before)
    before = {name: value for name, value in before.items() if name not in free}
    refuse_changes("options", run.config.experiment, before)
    refuse_changes("model and its task", run.files, earlier["files"])
    refuse_other_prompts(run.task.prompts_record, earlier["prompts"])
    if not paths:
        # At most step 0 and the steps up to the first checkpoint.
        if len(read_rows(run.out / "metrics.jsonl")) > options.checkpoint_every + 1:
            raise ValueError(f"a resumed run must have its checkpoints, {run.out} has none; try"
                             " another --out")
        return None
    try:
        state = torch.load(paths[-1], weights_only=True, map_location="cpu")
    except Exception:  # of many kinds, and torch advises to trust the file
        raise ValueError(f"checkpoints must be readable, {paths[-1]} is not; move it away to go on"
                         " from the one before it") from None
    if state["step"] > options.steps:
        raise ValueError(f"steps must be at least {state['step']}, the checkpoint's, got"
                         f" {options.steps}")
    return state


def refuse_other_rates(config: Any, before: dict[str, Any]) -> None:
    """Raises: ValueError if the run to be resumed has other learning rates at its steps."""
    now = config.steps, config.lr_decay
    then = before["steps"], before["lr_decay"]
    if now != then and "linear" in (config.lr_decay, before["lr_decay"]):
        raise ValueError(
            f"steps and lr_decay must stay {then} (the rate of each step depends on both, and a"
            f" linear one ends at 0), got {now}; try a new run with --model {config.out}/policy and"
            " another --out (optimizer and KL reference start anew); python -m lab.export"
            " CHECKPOINT writes the policy of an unfinished run")


def go_on(step: int, trainer: Any, record: dict[str, Any]) -> None:
    """Drop the rows after the checkpoint's step, and keep the run's first record.

    What goes on now is in its list `resumed`.
    """
    out = trainer.run.out
    for name in TABLES:
        rows = [row for row in read_rows(out / name) if row["step"] <= step]
        replace_file(out / name, "".join(json.dumps(row) + "\n" for row in rows))
    now, first = {"step": step + 1} | record, read_json(out / "config.json")
    record.clear()
    record.update(first | {"resumed": [*first.get("resumed", []), now]})
