"""The files of a run: tables, the record of where it comes from, checkpoints."""

import json
import operator
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from pickle import PicklingError
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch

from report.errors import replace_file, stage

TABLES = "metrics.jsonl", "samples.jsonl"
# COMMIT[-dirty] or nothing. At the import, because the files may change before a run begins.
DESCRIBED = subprocess.run(
    "git describe --always --abbrev=40 --exclude='*' --dirty", shell=True, check=False,
    cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
READABLE = "tensors, numbers, texts, lists and dictionaries alone (--resume reads no others)"


def record_of(run: Any, trainer: dict[str, Any], engine: Any) -> dict[str, Any]:
    """config.json: versions, device and commit, options, what is in force on both sides, problems,
    digests.

    Outside a repository commit and dirty (whether tracked files were changed) are None.
    """
    task = run.task
    versions = {name: version(name) for name in ("torch", "transformers", "einops", "tyro")}
    versions |= {"python": sys.version.split()[0], "vllm": engine.vllm_version}
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    commit, _, dirty = DESCRIBED.partition("-")
    evaluated = min(len(task.held_out), run.config.eval_problems)
    return {
        "versions": versions, "device": device, "commit": commit or None,
        "dirty": bool(dirty) if commit else None,
        **run.identity,
        "audit": engine.settings,
        "trainer": trainer | {"model_path": run.folder},
        "problems": {"train": len(task.train), "held_out": len(task.held_out),
                     "evaluated": f"{evaluated}, at each step the same, chosen by the seed",
                     "dropped": task.num_dropped, "merged": task.num_repeated},
    }


def refuse_another_run(config: Any, identity: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Refuse to continue a run that had other options, files or prompts.

    `earlier`: what its config.json or checkpoint has. `identity`: the same of this call. Raises:
    ValueError that names what has changed.
    """
    free = config.flat().keys() - config.experiment.keys()
    before = config.defaults() | earlier["config"]  # an option can be younger than the run
    before = {name: value for name, value in before.items() if name not in free}
    for what, sides in (("options", [config.experiment, before]),
                        ("model and its task", [identity["files"], earlier["files"]])):
        now, then = json.loads(json.dumps(sides))  # tuples become lists
        changed = sorted(name for name in now.keys() | then.keys()
                         if now.get(name) != then.get(name))
        if changed:
            raise ValueError(f"a resumed run must keep its {what}, changed are"
                             f" {', '.join(changed)}; try another --out")
    if identity["prompts"] != earlier["prompts"]:
        new, old = identity["prompts"]["first"], earlier["prompts"]["first"]
        differing = [*map(operator.ne, new, old), True].index(True)
        there = slice(max(0, differing - 30), differing + 30)
        raise ValueError("a resumed run must keep its prompts: the same questions have other tokens"
                         f" now, such as {new[there]!r} in place of {old[there]!r}. A chat template"
                         ' can write the date: try --chat-template-args \'{"date_string": "..."}\','
                         " with the name that the template gives it")


def read_json(path: Path) -> dict[str, Any]:
    with stage(f"reading {path}"):
        return json.loads(path.read_text())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, without a last one that a kill has cut off; none without a table."""
    with stage(f"reading {path}"):
        lines = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines[:-1]]


def empty_tables(out: Path) -> None:
    """For a new run."""
    for table in TABLES:
        replace_file(out / table, "")


def write_record(out: Path, record: dict[str, Any]) -> None:
    replace_file(out / "config.json", json.dumps(record, indent=2))


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def checkpoints(out: Path) -> list[Path]:
    """The folders of this program in checkpoints/, the oldest first."""
    return sorted(out.glob(f"checkpoints/step_{'[0-9]' * 6}"))


def refuse_used_folder(run: Any) -> None:
    """Raises: ValueError if `out` holds another run."""
    if (run.out / "config.json").exists() or checkpoints(run.out):
        raise ValueError(f"out must be a new folder, {run.config.out} holds a run; go on with"
                         " --resume or choose another --out")


def save_checkpoint(sides: Any, step: int) -> None:
    """checkpoints/step_N: the folder of a model, or of adapters, and state.pt with all the rest.

    state.pt has digests of the other files. The newest two checkpoints are kept; files and folders
    of other names are left alone.
    """
    run = sides.run
    folder = run.out / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_name("unfinished")  # renamed when it is complete
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"writing {folder}")
    with stage(f"writing {folder}"):
        unfinished.mkdir(parents=True)
        run.save_weights(run, sides.policy.model, unfinished)
        files = {path.name: digest_of(path) for path in unfinished.iterdir()}
        state = sides.state_dict() | {"step": step, "run": run.identity, "files": files}
        try:
            with (unfinished / "state.pt").open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch hides the file's own error, such as a full disk
            raise error.__context__ or error from None
        except (PicklingError, AttributeError, TypeError) as error:  # a lambda, a generator, a lock
            raise ValueError(f"a state_dict must have {READABLE}, got another: {error}") from None
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(unfinished / "state.pt"):
            raise ValueError(f"a state_dict must have {READABLE}, got {', '.join(refused)}")
        unfinished.rename(folder)
    for old in checkpoints(run.out)[:-2]:
        shutil.rmtree(old)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """What state.pt has. Raises: ValueError that names a file which is not as it was written."""
    file = folder / "state.pt"
    try:
        damaged = ZipFile(file).testzip()
        state = torch.load(file, weights_only=True, map_location="cpu")
        for name, digest in state["files"].items():
            if not damaged:
                file = folder / name
                damaged = digest_of(file) != digest
    except Exception:  # of many kinds, and torch advises to trust the file
        damaged = True
    if damaged:
        raise ValueError(f"a checkpoint must be as it was written, {file} is damaged, missing or of"
                         f" another version; move {folder} away to go on from the one before it")
    return state


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
