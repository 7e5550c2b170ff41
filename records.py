"""What a run leaves: seconds and memory, errors, log lines, tables, pictures, checkpoints."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch


def memory_gib(*, peak: bool = False) -> float:
    """Memory in use (`peak`: in a phase of `Clock`), in GiB: of this process, or of the GPU."""
    if torch.cuda.is_available():  # the peak too: torch keeps its blocks until `Engine.wake`
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    # Some sandboxes have no VmHWM.
    return int(found[1] if found else getrusage(RUSAGE_SELF).ru_maxrss) / 2**20


@dataclass
class Clock:
    """Seconds and peak memory of each phase, seconds of the step, memory at its end."""

    started: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with suppress(OSError):  # where it is forbidden, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the CPU's peak, begins anew
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases[f"{phase}_s"] = time.perf_counter() - started
        self.phases[f"{phase}_gib"] = memory_gib(peak=True)

    def figures(self) -> dict[str, float]:
        step_s = time.perf_counter() - self.started
        return self.phases | {"step_s": step_s, "memory_gib": memory_gib()}


TABLES = "metrics.jsonl", "samples.jsonl"


# ---------------------------------------------------------------------------------- errors
def one_line(error: BaseException) -> str:
    """An exception's type and text in one line that can be printed."""
    text = "".join(traceback.format_exception_only(error))  # also if the error's own __str__ fails
    return escaped(" ".join(text.split())[:1000])


def escaped(text: str) -> str:
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
    """A command's boundary: an exception or a signal's KeyboardInterrupt becomes a sentence and a
    status.

    `out`: the folder of an accepted run, for the traceback. Without it, the traceback is printed,
    unless the exception is a ValueError, which the checks of this program raise.
    """
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print("stopped by a signal; with --resume a run goes on from its newest checkpoint, or"
                  " begins anew if it has none; a study deletes and repeats its unfinished runs",
                  file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        where = ""
        if out:
            path = Path(out).absolute() / "error.txt"
            with suppress(OSError):  # the disk may be full
                replace_file(path, traceback.format_exc())
                where = f" (traceback: {path})"
        elif not isinstance(error, ValueError):
            traceback.print_exc()
        print(f"error: {one_line(error).removeprefix('ValueError: ')}{where}", file=sys.stderr)
        sys.exit(status)


@contextmanager
def end_of_process() -> Iterator[None]:
    """The last block of a process. On a GPU vLLM's allocator may abort it where Python ends."""
    status = 0
    try:
        yield
    except SystemExit as stop:
        status = stop.code
    if torch.cuda.is_available():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


@contextmanager
def locked(out: str) -> Iterator[None]:
    """Make the folder of a run and lock it until the block ends. No file in it is touched."""
    try:
        os.makedirs(out, exist_ok=True)
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
# What a step's line also says, if this figure is there and not 0. The counts of tokens_wasted and
# kv_lost are from the start of the run.
ENDINGS = {
    "groups_in_flight":
        "in flight {groups_in_flight} stale {staleness_mean:.2f} max {staleness_max}",
    "tokens_wasted": "{tokens_wasted} tokens thrown away",
    "kv_lost": "{kv_lost} kept KV caches LOST to preemption: raise --kv-cache-gib",
    "skipped_updates":
        "NO SIGNAL in {skipped_updates} minibatch(es): flat, masked or rejected rows, no step",
    "kl_only_updates": "NO SIGNAL in {kl_only_updates} minibatch(es), a step by the KL alone",
    "overflowed_updates": "fp16 OVERFLOW in {overflowed_updates} minibatch(es): scale halved",
    "rejected_frac": "{rejected_frac:.1%} of tokens rejected by {reject}",
    "engine_kept_mass": "kept mass {kept_mass:.3f} engine {engine_kept_mass:.3f}",
    "outside_frac": "{outside_frac:.2%} of tokens outside the trainer's own mask",
    "reward_errors": "{reward_errors} rewards FAILED",
    "left_out": "{left_out} responses LEFT OUT (no reward)",
}


def log_line(metrics: dict[str, Any], steps: int, reject: str) -> str:
    """One line per step in fixed columns; a degenerate batch and an evaluation are named after.

    `reject`: the rule of --reject.
    """
    get = metrics.get

    def of(name: str, form: str) -> str:
        """The figure in this format, or a dash of its width if it was not measured; then the number
        of responses that it leaves out, if there are any.
        """
        left_out = get(f"{name}_left_out")
        text = "-".rjust(int(form.partition(".")[0] or 1))
        if get(name) is not None:
            text = format(get(name), form)
        return f"{text} ({left_out} LEFT OUT)" if left_out else text

    line = f"step {metrics['step']:>3}/{steps}"
    if "reward" in metrics:
        minutes, seconds = divmod(round(metrics.get("left_s", 0)), 60)
        left = f"{minutes} min" if minutes else f"{seconds} s"
        parts = ", ".join(f"{name.removeprefix('reward/')} {value:.3f}"
                          for name, value in metrics.items() if name.startswith("reward/"))
        line += (
            f" | reward {of('reward', '.3f')}{escaped(parts and f' ({parts})')}"
            f" | len {of('response_len', '5.1f')}"
            f" | trunc {of('trunc_frac', '4.0%')} | flat {of('flat_frac', '4.0%')}"
            f" | mismatch_kl {of('mismatch_kl', '8.1e')} | clip {of('clip_rate', '5.1%')}"
            f" backend {of('backend_clip_rate', '5.1%')} | entropy {of('entropy', '.2f')}"
            f" | gnorm {of('grad_norm', '.2f')} lr {of('lr', '.1e')}"
            f" | gen {of('generate_s', '.2f')} upd {of('update_s', '.2f')}"
            f" sync {of('sync_s', '.2f')} s | {left} left")
    if "kl_ref" in metrics:
        line += f" | kl_ref {of('kl_ref', '.1e')} max {of('kl_ref_max', '.1e')}"
    figures = metrics | {"reject": reject}
    line += "".join(f" | {said.format_map(figures)}" for name, said in ENDINGS.items() if get(name))
    if get("trunc_frac") == 1:
        line += " | ALL TRUNCATED: raise --max-new-tokens"
    if "eval_reward" in metrics:
        line += (f" | eval {of('eval_reward', '.3f')} greedy {of('eval_reward_greedy', '.3f')}"
                 f" agree {of('eval_agree', '.3f')}")
    if "eval_reward_trainer_alone" in metrics:
        line += f" (trainer alone {of('eval_reward_trainer_alone', '.3f')})"
    return line


def shown(text: str, head: int = 300, tail: int = 300) -> str:
    """A text as JSON in one line that the terminal can print, with the middle left out."""
    text = json.dumps(text, ensure_ascii=False)
    if len(text) > head + tail + 3:
        text = f"{text[:head]}...{text[len(text) - tail :]}"
    return escaped(text)


def answer_line(row: dict[str, Any]) -> str:
    """An answer of an evaluation, a row of samples.jsonl, in one line."""
    texts = [shown(row[name], 77, 0) for name in ("question", "response")]
    reward = "left out" if row["reward"] is None else f"reward {row['reward']:g}"
    return escaped(f"    {' -> '.join(texts)}, {reward}")


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
    return {"versions": versions, "device": name, "commit": commit or None,
            "dirty": bool(dirty) if commit else None}


def replace_file(path: Path, text: str) -> None:
    """Write a file anew: a kill leaves the old text or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, errors="backslashreplace")
    unfinished.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, without a last one that a kill has cut off; none without a table."""
    with stage(f"reading {path}"):
        lines = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines[:-1]]


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
    rows = read_rows(out / "metrics.jsonl")
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
def checkpoints(out: Path) -> list[Path]:
    """The files of this program in checkpoints/, the oldest first."""
    return sorted(out.glob(f"checkpoints/step_{'[0-9]' * 6}.pt"))


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
    for old in checkpoints(out)[:-2]:
        old.unlink()


def digest_of(path: Path) -> str:
    """The first 16 digits of the file's SHA-256."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()[:16]
