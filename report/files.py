"""The files of a run: tables, the record of where it comes from, checkpoints."""

import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from shutil import copymode
from tempfile import TemporaryDirectory
from typing import Any

import torch

from report.errors import stage

TABLES = "metrics.jsonl", "samples.jsonl"
LARGE = 10**8  # trained parameters whose checkpoint, 1.2 GB, is not written at once


def provenance() -> dict[str, Any]:
    """Versions, commit (None outside a repository), whether tracked files were changed, device."""
    command = "git describe --always --abbrev=40 --exclude='*' --dirty"  # COMMIT[-dirty] or none
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, check=False,
                         capture_output=True, text=True)
    commit, _, dirty = git.stdout.strip().partition("-")
    versions = {name: version(name) for name in ("torch", "transformers", "einops", "tyro")}
    versions["python"] = sys.version.split()[0]
    name = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return {"versions": versions, "device": name, "commit": commit or None,
            "dirty": bool(dirty) if commit else None}


def record_of(run: Any, trainer: dict[str, Any], engine: Any) -> dict[str, Any]:
    """config.json: options, what is in force on both sides, versions, problems, digests."""
    task, record = run.task, provenance()
    record["versions"]["vllm"] = engine.vllm_version
    evaluated = min(len(task.held_out), run.config.eval_problems)
    return record | {
        "config": run.config.flat(), "audit": engine.settings,
        "trainer": trainer | {"model_path": run.folder},
        "problems": {"train": len(task.train), "held_out": len(task.held_out),
                     "evaluated": f"{evaluated}, at each step the same, chosen by the seed",
                     "dropped": task.num_dropped, "merged": task.num_repeated},
        "files": run.files, "prompts": task.prompts_record,
    }


def refuse_changes(
    what: str, now: dict[str, Any], before: dict[str, Any], run: str = "a resumed run"
) -> None:
    """Raises: ValueError that names the values which are not as in the run's config.json."""
    now, before = json.loads(json.dumps([now, before]))  # tuples become lists
    changed = sorted(name for name in now.keys() | before.keys()
                     if now.get(name) != before.get(name))
    if changed:
        raise ValueError(f"{run} must keep its {what}, changed are {', '.join(changed)};"
                         " try another --out")


def refuse_other_prompts(
    now: dict[str, str], before: dict[str, str], run: str = "a resumed run"
) -> None:
    """Raises: ValueError if the prompts are not as in the run's config.json."""
    if now == before:
        return
    new, old = now["first"], before["first"]
    differ = [*map(operator.ne, new, old), True]  # at the end at the latest
    start = max(0, differ.index(True) - 30)
    there = slice(start, start + 60)
    raise ValueError(f"{run} must keep its prompts: the same questions have other tokens"
                     f" now, such as {new[there]!r} in place of {old[there]!r}. A chat template can"
                     " write the date: try --chat-template-args"
                     ' \'{"date_string": "..."}\', with the name that the template gives it')


def read_json(path: Path) -> dict[str, Any]:
    with stage(f"reading {path}"):
        return json.loads(path.read_text())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, without a last one that a kill has cut off; none without a table."""
    with stage(f"reading {path}"):
        lines = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines[:-1]]


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def checkpoints(out: Path) -> list[Path]:
    """The files of this program in checkpoints/, the oldest first."""
    return sorted(out.glob(f"checkpoints/step_{'[0-9]' * 6}.pt"))


def save_checkpoint(out: Path, step: int, state: dict[str, Any]) -> None:
    """checkpoints/step_N.pt. The newest two are kept; files of other names are left alone."""
    folder = out / "checkpoints"
    folder.mkdir(exist_ok=True)
    unfinished = folder / "unfinished"  # renamed when it is complete
    if sum(map(torch.numel, state["policy"].values())) > LARGE:
        print(f"writing {folder}/step_{step:06d}.pt")
    with stage(f"writing a checkpoint in {folder}"):
        try:
            with unfinished.open("wb") as file:
                torch.save(state | {"step": step}, file)
        except RuntimeError as error:  # torch hides the file's own error, such as a full disk
            raise error.__context__ or error from None
        unfinished.replace(folder / f"step_{step:06d}.pt")
    for old in checkpoints(out)[:-2]:
        old.unlink()


def digest_of(path: Path) -> str:
    """The first 16 digits of the file's SHA-256."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]


@contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which gets its name when the block has ended."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as unfinished:
        new = Path(unfinished) / folder.name
        yield new
        try:
            new.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise


def write_folder(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder whose weights have the mode of its other files.

    safetensors writes files that only their owner can read.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        copymode(folder / "config.json", weights)


def save_policy(run: Any, model: torch.nn.Module, parts: Any, folder: Path) -> None:
    """The policy of a run with its train.Parts as a Hugging Face folder."""
    with ExitStack() as contexts:
        for as_saved in parts.while_saved:
            contexts.enter_context(as_saved())
        print(f"writing {folder}")
        write_folder(model, run.task.tokenizer, folder)
        for complete in parts.after_save:
            complete(model, folder)
