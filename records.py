"""What a run writes down: seconds and memory of each phase, log lines, config.json, curves.png."""

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def memory_gib(device: torch.device) -> float:
    """GPU: all that is taken on the device now. CPU: the process's resident memory now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def reset_peak() -> None:
    """CPU: forget the process's highest resident memory. GPU: nothing, see `peak_gib`."""
    if not torch.cuda.is_available():
        Path("/proc/self/clear_refs").write_text("5")


def peak_gib() -> float:
    """The most that was taken since `reset_peak`; on a GPU now, as torch keeps what it once took until a wake."""
    if torch.cuda.is_available():
        return memory_gib(torch.device("cuda"))
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


class Clock:
    """Seconds and peak memory of each phase, seconds of the step."""

    def __init__(self):
        self.started, self.phases = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        reset_peak()
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases |= {f"{phase}_s": time.perf_counter() - started, f"{phase}_gib": peak_gib()}

    def figures(self) -> dict[str, float]:
        return self.phases | {"step_s": time.perf_counter() - self.started}


# ------------------------------------------------------------------------------------------------ errors
def one_line(error: BaseException) -> str:
    """An exception's text in one line, after its type unless it is a ValueError, whose text is a sentence."""
    text = " ".join(str(error).split())[:1000]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


@contextmanager
def stage(what: str) -> Iterator[None]:
    """A library's exception becomes a ValueError that says what was being done."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} failed: {one_line(error)}") from error


@contextmanager
def one_sentence(status: int, out: str | None = None) -> Iterator[None]:
    """The error boundary of a command: an exception becomes a sentence and the exit status, SIGINT and SIGTERM too.

    The traceback goes to `out`/error.txt, except that of a ValueError raised by one of our own checks.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit
        print("stopped by a signal; a run goes on from its newest checkpoint with --resume", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        where = ""
        if out and (error.__cause__ or not isinstance(error, ValueError)):
            with suppress(OSError):  # the disk may be full
                (Path(out) / "error.txt").write_text(traceback.format_exc(), errors="backslashreplace")
                where = f" (traceback: {out}/error.txt)"
        print(f"error: {one_line(error)}{where}", file=sys.stderr)
        sys.exit(status)


@contextmanager
def locked(out: str) -> Iterator[None]:
    """Make the folder of a run and hold it. Raises: ValueError if it is not writable, or another process holds it."""
    path = Path(out) / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115, closed below
    except OSError as error:
        raise ValueError(f"out must be a writable folder, got {out}: {error}") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends; forked children do not hold it
        except BlockingIOError:
            raise ValueError(f"out must not be in use, {out} is held by {path.read_text().strip()}") from None
        file.truncate(0)
        print(f"process {os.getpid()} on {os.uname().nodename}", file=file, flush=True)
        yield


# ------------------------------------------------------------------------------------------------ log lines and files
MANIFEST = "sha256.json"  # of a checkpoint's files
TABLES = ("metrics.jsonl", "samples.jsonl")  # a line for each step, and for each answer of each evaluation

COLUMNS = (
    "step {step:>3}/{steps} | reward {reward:.3f} | len {response_len:5.1f} | trunc {trunc_frac:4.0%}"
    " | flat {flat_frac:4.0%} | mismatch_kl {mismatch_kl:8.1e} | clip {clip_rate:5.1%} | entropy {entropy:.2f}"
    " | gnorm {grad_norm:.2f} | gen {generate_s:.2f} upd {update_s:.2f} sync {sync_s:.2f} s"
)

NAMED = {  # since the run's start
    "tokens_wasted": "tokens thrown away", "groups_dropped": "groups DROPPED: older than --max-staleness",
    "kv_lost": "kept KV caches LOST to preemption: raise --kv-cache-gib",
}


def log_line(metrics: dict[str, Any], steps: int) -> str:
    """One line per step in fixed columns; an evaluation and a degenerate batch are named at its end."""
    evaluated = ""
    if "eval_reward" in metrics:
        evaluated = f" | eval {metrics['eval_reward']:.3f} greedy {metrics['eval_reward_greedy']:.3f}"
    if "eval_reward_trainer" in metrics:
        evaluated += f" (trainer alone {metrics['eval_reward_trainer']:.3f})"
    if metrics["step"] == 0:
        return f"step   0/{steps}{evaluated}"
    shown = {name: 0.0 if value is None else value for name, value in metrics.items()}
    line = COLUMNS.format(**shown, steps=steps)
    if metrics["groups_in_flight"]:
        line += " | in flight {groups_in_flight} stale {staleness_mean:.2f} max {staleness_max}".format(**metrics)
    line += evaluated
    for name, what in NAMED.items():
        if metrics[name]:
            line += f" | {metrics[name]} {what}"
    if metrics["skipped_updates"]:
        line += f" | NO SIGNAL in {metrics['skipped_updates']} minibatch(es): all groups flat, no optimizer step"
    if metrics["overflowed_updates"]:
        line += f" | fp16 OVERFLOW in {metrics['overflowed_updates']} minibatch(es): no optimizer step, scale halved"
    if metrics["reward_errors"]:
        line += f" | {metrics['reward_errors']} rewards FAILED, counted as 0"
    if metrics["trunc_frac"] == 1.0:
        line += " | ALL TRUNCATED: raise --max-new-tokens"
    return line


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, commit and device of this process."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    versions = {name: version(name) for name in ("torch", "transformers", "einops", "tyro")}
    status = git("status", "--porcelain")
    return {
        "versions": versions | {"python": sys.version.split()[0]},
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }


def write_config(path: Path, record: dict[str, Any], first_step: int) -> None:
    """config.json: all one needs to know of what was run; a resumed run adds its own record to `resumed`."""
    if first_step > 1:
        previous, resumed = json.loads(path.read_text()), {"step": first_step} | record
        record = previous | {"resumed": [*previous.get("resumed", []), resumed]}
        if previous["versions"] != resumed["versions"]:
            print(f"NOTE: resumed with {resumed['versions']}, before it was {previous['versions']}", flush=True)
    write_atomically(path, json.dumps(record, indent=2))


def write_atomically(path: Path, text: str) -> None:
    path.with_name(path.name + ".new").write_text(text)
    path.with_name(path.name + ".new").replace(path)


def plot_curves(out: Path) -> None:
    """curves.png from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    panels = {
        "reward": ["reward", "eval_reward", "eval_reward_greedy"], "clip rate": ["clip_rate"],
        "KL new/old, nats": ["kl_new_old"], "entropy, nats": ["entropy"],
        "mismatch, nats": ["mismatch_abs_mean", "mismatch_max"],
        "seconds": ["generate_s", "old_logprobs_s", "update_s", "sync_s"],
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if name.startswith("eval") else None)
                axis.legend(fontsize=8)
        axis.set(title=title, xlabel="step", yscale="log" if title.startswith("mismatch") else "linear")
    figure.savefig(out / "curves.png", dpi=110)
    pyplot.close(figure)


