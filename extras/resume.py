"""`--resume`: a run goes on from its newest checkpoint, with the same options, model and task."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from report.errors import replace_file
from report.files import REMOVED, TABLES, checkpoints, earlier_run, of_today, read_rows

NOT_OF_THE_EXPERIMENT = {"resume"}


@dataclass(frozen=True)
class Options:
    """Recovery."""

    resume: bool = False  # Go on from the newest checkpoint in `out`, with the same options.


def check(config: Any, options: Options) -> None:
    if options.resume and config.parity.stale_cache:
        raise ValueError("resume must be off with V1's prefix cache (it is in no checkpoint, and an"
                         " empty cache has no stale block); try another --out")


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
        parts.on_record.append(partial(added, first_step=step + 1, out=run.out))
        parts.at_accept.append(partial(drop_rows_after, step, run.out))
    parts.at_begin.append(lambda trainer, record: print(
        f"resumed at step {parts.first_step}{without}", flush=True))


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
    earlier = earlier_run(run.out)
    free = run.config.flat().keys() - run.config.experiment.keys()
    before = of_today(run.config, earlier["config"])
    before = {name: value for name, value in before.items() if name not in free}
    refuse_changes("options", run.config.experiment | REMOVED, before)
    refuse_changes("model and its task", run.files, earlier["files"])
    # The questions are the same: a template can write the date.
    refuse_changes("prompts (see --chat-template-args)", run.task.prompts_record,
                   earlier["prompts"])
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


def refuse_changes(what: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Raises: ValueError that names the values which are not as in the run to be resumed."""
    now, before = json.loads(json.dumps([now, before]))  # tuples become lists
    changed = sorted(name for name in now.keys() | before.keys()
                     if now.get(name) != before.get(name))
    if changed:
        raise ValueError(f"a resumed run must keep its {what}, changed are {', '.join(changed)};"
                         " try another --out")


def drop_rows_after(step: int, out: Path) -> None:
    """Keep the rows of both tables up to `step`, the checkpoint's."""
    for name in TABLES:
        rows = [row for row in read_rows(out / name) if row["step"] <= step]
        replace_file(out / name, "".join(json.dumps(row) + "\n" for row in rows))


def added(record: dict[str, Any], first_step: int, out: Path) -> dict[str, Any]:
    """The run's config.json with the record of what goes on now in its list `resumed`."""
    before = earlier_run(out)
    resumed = [*before.get("resumed", []), {"step": first_step} | record]
    return before | {"resumed": resumed}
