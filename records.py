"""What a run leaves: seconds and memory, log lines, config.json, pictures, checkpoints."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryFile
from typing import Any

import torch


def memory_gib(*, peak: bool = False) -> float:
    """Memory in use (`peak`: since `reset_peak`), in GiB: of this process, or of the whole GPU."""
    if torch.cuda.is_available():  # the peak too: torch keeps its blocks until `Engine.wake`
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    # Some sandboxes have no VmHWM.
    return int(found[1] if found else getrusage(RUSAGE_SELF).ru_maxrss) / 2**20


def reset_peak() -> None:
    """Start a new measurement of the CPU's peak; where that is forbidden, it is the process's."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Clock:
    """Seconds and peak memory of each phase, seconds of the step."""

    def __init__(self):
        self.started = time.perf_counter()
        self.phases = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        reset_peak()
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases[f"{phase}_s"] = time.perf_counter() - started
        self.phases[f"{phase}_gib"] = memory_gib(peak=True)

    def figures(self) -> dict[str, float]:
        return self.phases | {"step_s": time.perf_counter() - self.started}


# ---------------------------------------------------------------------------------- errors
def one_line(error: BaseException) -> str:
    """An exception's type and text in one line that can be printed."""
    text = "".join(traceback.format_exception_only(error))  # also if the error's own __str__ fails
    return printable(" ".join(text.split())[:1000])


def printable(text: str) -> str:
    """The text with characters that the terminal cannot show written as their numbers."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Turns an exception of a library into a ValueError that names what failed."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} failed: {one_line(error)}") from error


@contextmanager
def one_sentence(status: int, out: str | None = None) -> Iterator[None]:
    """A command's boundary: an exception, SIGINT or SIGTERM becomes a sentence and a status.

    `out`: the folder of an accepted run, for the traceback. Before a run is accepted, what is no
    check of this program is printed with its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit
        print("stopped by a signal; a run goes on from its newest checkpoint with --resume, a study"
              " deletes and repeats its unfinished runs", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        where = ""
        if out:
            path = Path(out).absolute() / "error.txt"
            with suppress(OSError):  # the disk may be full
                replace_file(path, traceback.format_exc())
                where = f" (traceback: {path})"
        elif not _is_own_check(error):
            traceback.print_exc()
        print(f"error: {one_line(error).removeprefix('ValueError: ')}{where}", file=sys.stderr)
        sys.exit(status)


def _is_own_check(error: Exception) -> bool:
    """Whether a line of this program raised the ValueError, and not a library."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    folders = Path(raised.filename).parents
    return (isinstance(error, ValueError) and (raised.line or "").startswith("raise")
            and Path(__file__).parent in folders[:2])


def end_process() -> None:
    """On a GPU vLLM's allocator may abort a process that has done its work, where Python ends."""
    if torch.cuda.is_available():
        sys.stdout.flush()
        os._exit(0)


@contextmanager
def locked(out: str) -> Iterator[None]:
    """Make the folder of a run and lock it, until the process ends. No file in it is touched."""
    try:
        os.makedirs(out, exist_ok=True)
        TemporaryFile(dir=out).close()  # it can be written
        folder = os.open(out, os.O_DIRECTORY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"out must not be in use, another process holds {out}") from None
    except OSError as error:
        raise ValueError(f"out must be a writable folder, got {out}: {error}") from None
    try:
        yield
    finally:
        os.close(folder)


# ---------------------------------------------------------------------------------- log and files
TABLES = ("metrics.jsonl", "samples.jsonl")  # a line per step, and per answer of an evaluation

COLUMNS = (
    " | reward {reward:.3f} | len {response_len:5.1f} | trunc {trunc_frac:4.0%}"
    " | flat {flat_frac:4.0%} | mismatch_kl {mismatch_kl:8.1e} | clip {clip_rate:5.1%}"
    " | entropy {entropy:.2f} | gnorm {grad_norm:.2f}"
    " | gen {generate_s:.2f} upd {update_s:.2f} sync {sync_s:.2f} s | {left} left"
)

# Shown after the columns if not 0; tokens_wasted, groups_dropped and kv_lost count from the start.
NAMED = {
    "groups_in_flight":
        " | in flight {groups_in_flight} stale {staleness_mean:.2f} max {staleness_max}",
    "tokens_wasted": " | {tokens_wasted} tokens thrown away",
    "groups_dropped": " | {groups_dropped} groups DROPPED: older than --max-staleness",
    "kv_lost": " | {kv_lost} kept KV caches LOST to preemption: raise --kv-cache-gib",
    "skipped_updates":
        " | NO SIGNAL in {skipped_updates} minibatch(es): flat, masked or rejected rows, no step",
    "overflowed_updates": " | fp16 OVERFLOW in {overflowed_updates} minibatch(es): scale halved",
    "rejected_frac": " | {rejected_frac:.1%} of tokens rejected by {reject}",
    "routed_otherwise": " | {routed_otherwise:.2%} routed otherwise",
    "outside_frac": " | {outside_frac:.2%} of tokens outside the trainer's own mask",
    "reward_errors": " | {reward_errors} rewards FAILED, counted as 0",
}
EVALUATED = {  # shown at the end if there
    "eval_reward":
        " | eval {eval_reward:.3f} greedy {eval_reward_greedy:.3f} agree {eval_agree:.3f}",
    "eval_reward_trainer_alone": " (trainer alone {eval_reward_trainer_alone:.3f})",
}


def log_line(metrics: dict[str, Any], steps: int, reject: str) -> str:
    """One line per step in fixed columns; a degenerate batch and an evaluation are named after.

    `reject`: the rule of --reject.
    """
    texts = ["step {step:>3}/{steps}"]
    if metrics["step"]:  # before the first step there is an evaluation alone
        texts.append(COLUMNS)
    texts += [text for name, text in NAMED.items() if metrics.get(name)]
    if metrics.get("trunc_frac") == 1.0:
        texts.append(" | ALL TRUNCATED: raise --max-new-tokens")
    texts += [text for name, text in EVALUATED.items() if name in metrics]
    shown = {name: 0.0 if value is None else value for name, value in metrics.items()}
    minutes, seconds = divmod(round(metrics.get("left_s", 0)), 60)
    left = f"{minutes} min" if minutes else f"{seconds} s"
    return "".join(texts).format(**shown, steps=steps, left=left, reject=reject)


def answer_line(row: dict[str, Any]) -> str:
    """An answer of an evaluation, a row of samples.jsonl, in one line."""
    texts = [json.dumps(row[name], ensure_ascii=False) for name in ("question", "response")]
    question, response = (text if len(text) <= 80 else f"{text[:77]}..." for text in texts)
    return printable(f"    {question} -> {response}, reward {row['reward']:g}")


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, commit (None outside a repository), whether tracked files were changed, device."""
    command = "git describe --always --abbrev=40 --exclude='*' --dirty"  # COMMIT[-dirty] or none
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, check=False,
                         capture_output=True, text=True)
    commit, _, dirty = git.stdout.strip().partition("-")
    versions = {name: version(name) for name in ("torch", "transformers", "einops", "tyro")}
    versions["python"] = sys.version.split()[0]
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    known = {"commit": commit, "dirty": bool(dirty)} if commit else {"commit": None, "dirty": None}
    return {"versions": versions, "device": name} | known


def write_config(path: Path, record: dict[str, Any], first_step: int) -> None:
    """config.json: what defines the run; a resumed run adds its own record to `resumed`."""
    if first_step > 1:
        before = json.loads(path.read_text())
        for name in ("versions", "device"):
            now, then = record[name], before[name]
            if now != then:
                print(f"NOTE: resumed with {now}, before it was {then}")
        resumed = [*before.get("resumed", []), {"step": first_step} | record]
        record = before | {"resumed": resumed}
    replace_file(path, json.dumps(record, indent=2))


def replace_file(path: Path, text: str) -> None:
    """Write a file anew: a kill leaves the old text or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)  # a link would lead out of the folder
    unfinished.write_text(text, errors="backslashreplace")
    unfinished.replace(path)


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ---------------------------------------------------------------------------------- pictures
PANELS = {  # of curves.png: titles, and figures of metrics.jsonl
    "reward": ("reward", "eval_reward", "eval_reward_greedy"), "clip rate": ("clip_rate",),
    "KL(old, new), nats": ("kl_old_new",), "entropy, nats": ("entropy",),
    "mismatch, nats (log)": ("mismatch_abs_mean", "mismatch_max"),
    "seconds": ("generate_s", "old_logprobs_s", "update_s", "sync_s"),
}  # fmt: skip


def draw_at_evaluation(out: Path, metrics: dict[str, Any]) -> None:
    """Draw curves.png of the run in `out` anew, if `metrics` are those of an evaluation."""
    from matplotlib.figure import Figure

    if not metrics["step"] or "eval_reward" not in metrics:
        return
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (title, names) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        for name in names:
            measured = {row["step"]: row[name] for row in rows if row.get(name) is not None}
            axis.plot(list(measured), list(measured.values()), label=name)
        axis.set(title=title, xlabel="step")
        if "(log)" in title:
            axis.set_yscale("symlog", linthresh=1e-9)  # linear below, so that 0 is on the axis
        axis.legend(fontsize=8)
    figure.savefig(out / "curves.png", dpi=110)


# ---------------------------------------------------------------------------------- checkpoints
def earlier_files(out: str, resume: bool, options: dict[str, Any]) -> dict[str, str] | None:
    """`Run.files` of the run in `out`, if there is one that is to be resumed.

    `options`: those that must be the same. Raises: ValueError if that run is damaged, not to be
    resumed, or had other options.
    """
    path = Path(out) / "config.json"
    if not path.exists():
        tables = [table for table in path.parent.glob("*.jsonl") if table.stat().st_size]
        if tables or any(path.parent.glob("checkpoints/*")):
            raise ValueError(f"out must be new or a whole run, {out} has a run's files without"
                             " config.json")
        return None
    if not resume:
        raise ValueError(f"out must be a new folder, {out} holds a run; go on with --resume or"
                         " choose another --out")
    with stage(f"reading {path}"):
        record = json.loads(path.read_text())
        theirs = dict(record["config"])
        files = {name: str(digest) for name, digest in record["files"].items()}
    ours = json.loads(json.dumps(options))  # tuples become lists
    changed = sorted(name for name, value in ours.items() if value != theirs.get(name))
    if changed:
        raise ValueError(f"a resumed run must keep its options, changed are {', '.join(changed)}")
    return files


def keep_files(earlier: dict[str, str], files: dict[str, str]) -> None:
    """Raises: ValueError that names those of `files` that are not as in the run to be resumed."""
    changed = sorted(dict(earlier.items() ^ files.items()))
    if changed:
        raise ValueError("a resumed run must keep its model and its task, changed are"
                         f" {', '.join(changed)}; try another --out")


def _checkpoints(out: Path) -> list[Path]:
    """The files of this program in checkpoints/, the oldest first."""
    paths = sorted(out.glob("checkpoints/*.pt"))
    return [path for path in paths if re.fullmatch(r"step_\d{6,}", path.stem)]


def save_checkpoint(out: Path, step: int, state: dict[str, Any]) -> None:
    """checkpoints/step_N.pt. The newest two are kept; files of other names are left alone."""
    folder = out / "checkpoints"
    folder.mkdir(exist_ok=True)
    unfinished = folder / "unfinished"  # renamed when it is complete
    with stage(f"writing a checkpoint in {folder}"):
        try:
            with unfinished.open("wb") as file:
                torch.save(state | {"step": step}, file)
        except RuntimeError as error:  # torch hides the file's own error, such as a full disk
            raise error.__context__ or error from None
        unfinished.replace(folder / f"step_{step:06d}.pt")
    for old in _checkpoints(out)[:-2]:
        old.unlink()


def newest_checkpoint(out: Path, checkpoint_every: int, run: str) -> dict[str, Any] | None:
    """The newest checkpoint, None before the first one. Raises: ValueError if it is not of `run`,
    `Run.fingerprint`, or cannot be read.
    """
    paths = _checkpoints(out)
    if paths:
        try:
            state = torch.load(paths[-1], weights_only=True, map_location="cpu")
        except Exception:  # of many kinds, and torch advises to trust the file
            raise ValueError(f"checkpoints must be readable, {paths[-1]} is not; move it away to go"
                             " on from the one before it") from None
        whole = isinstance(state, dict) and state.keys() >= {"policy", "optimizer", "source"}
        if not whole or state["run"] != run or paths[-1].stem != f"step_{state['step']:06d}":
            raise ValueError(f"checkpoints must be of this run, {paths[-1]} is of another step,"
                             " other options or other files; move it away, or try another --out")
        return state
    table = out / "metrics.jsonl"
    rows = table.read_bytes().count(b"\n") if table.exists() else 0
    if rows > checkpoint_every + 1:  # at most step 0 and those up to the first checkpoint
        raise ValueError(f"a resumed run must have its checkpoints, {out} has none; try another"
                         " --out")
    return None


def digest_of(path: Path) -> str:
    """The first 16 digits of the file's SHA-256."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]


def cut_tables(out: Path, step: int) -> None:
    """Keep the rows up to `step`, the checkpoint's; -1 keeps none."""
    for name in TABLES:
        path = out / name
        with stage(f"reading {path}"):
            lines = path.read_text().split("\n")[:-1] if step >= 0 else []  # the last may be cut
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= step]
        replace_file(path, "".join(kept))
