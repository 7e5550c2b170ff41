"""Errors as sentences, a command's exit status, the lock of a run's folder."""

import errno
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any


def one_line(error: BaseException) -> str:
    """An exception's type and text in one line."""
    text = "".join(traceback.format_exception_only(error))  # also if the error's own __str__ fails
    return " ".join(text.split())[:1000]


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Turns an exception of a library into a ValueError that names what failed."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} failed: {one_line(error)}") from error


def show(stream: Any, text: str) -> None:
    """Write to a standard stream. Nobody reads it after its terminal or the pipe's reader has gone:
    it then goes nowhere, and no run ends.
    """
    try:
        type(stream).write(stream, text)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):  # such as on a full disk
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_each_line_at_once() -> None:
    """Also to a file or a pipe, so that a log is never behind and a kill loses no line.

    Characters that the terminal cannot show are written as their numbers.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # that of a notebook has no buffer
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
            stream.write = partial(show, stream)


STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does."""
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
            signal.signal(number, signal.default_int_handler)


@contextmanager
def exit_with_message(status: int, out: str | None = None) -> Iterator[None]:
    """A command's boundary: an exception or a signal's KeyboardInterrupt becomes a sentence and a
    status.

    The traceback is printed, unless the exception is a ValueError or a FloatingPointError, which
    the checks of this program raise. `out`: the folder of an accepted run, which gets the traceback
    in any case.
    """
    print_each_line_at_once()
    try:
        yield
    except KeyboardInterrupt:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)  # the process ends; a further one would show how
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
        if not isinstance(error, ValueError | FloatingPointError):
            traceback.print_exc()
        print(f"error: {one_line(error).removeprefix('ValueError: ')}{where}", file=sys.stderr)
        sys.exit(status)


@contextmanager
def end_of_process() -> Iterator[None]:
    """The last block of a process. On a GPU vLLM's allocator may abort it where Python ends."""
    import torch  # here: a process of a task's file imports this module, and no torch

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


def replace_file(path: Path, text: str) -> None:
    """Write a file anew: a kill leaves the old text or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, errors="backslashreplace")
    unfinished.replace(path)
