"""A task file's functions in a process of their own, killed at the limit and started again.

What a user's code does (it raises, exits, crashes, waits, or loops in compiled code) ends in a
sentence. Only the standard library is imported, so that the process starts in a tenth of a second.
All that it has started ends with the run, except for a child that called setsid, and for children
of a run that is killed with SIGKILL.
"""

import atexit
import ctypes
import inspect
import math
import os
import random
import signal
import subprocess
import sys
import traceback
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PROGRAM = "import sys; sys.path = sys.argv[2:]; from extras.task_file import serve; serve()"
ROLLOUT = ("token_ids", "logprobs", "finish_reason", "versions")  # what a reward can read of it
Problem = namedtuple("Problem", "question answer source")  # tasks.py would import torch


class TaskFile:
    """`sample` and `reward` of a user's file. A call that fails, or takes longer than `limit_s`
    seconds, is a ValueError. `takes_rollout`: the file's reward has a third argument. `text` is the
    file's; a process that is started again runs the same text.
    """

    def __init__(self, path: str, seed: int, limit_s: float):
        self.path, self.seed, self.limit_s, self.text = path, seed, limit_s, None
        self._start()
        atexit.register(self._kill)

    def sample(self) -> tuple[str, str, str]:
        """Question, answer, family (or ""). The random state is the process's own and begins with
        `seed`.
        """
        return self._call(f"sample of {self.path}", "sample")

    def reward(self, problem: Any, response: str, *rollout: Any) -> float:
        """A finite number."""
        copies = [SimpleNamespace(**{name: getattr(each, name) for name in ROLLOUT})
                  for each in rollout]
        return self._call("the reward", "reward", Problem(*problem[:3]), response, *copies)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True)  # a signal of the terminal reaches the run alone
        self._connection.recv()  # the process has started; the limit is for the file's code
        self.takes_rollout, self.text = self._call(
            f"the import of {self.path}", "load", self.path, self.seed, self.text)

    def _call(self, what: str, name: str, *arguments: Any) -> Any:
        if self._process.returncode is not None:
            self._start()
        try:
            with time_limit(self.limit_s):
                self._connection.send((name, arguments))
                result, error = self._connection.recv()
        except TimeoutError as late:
            self._kill()
            error = str(late)
        except Exception:  # no answer, or bytes of the file's code in its place
            error = f"its process ended with status {self._kill()}"
        if error:
            raise ValueError(f"{what} fails ({error.strip():.300})")
        return result

    def _kill(self) -> int:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what the file's code has started too
        return self._process.wait()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError. For the main thread, and not for compiled code that does not return."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s; try --reward-limit-s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---------------------------------------------------------------------------------- the process
def serve() -> None:
    """Answer calls until the run ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed run ends this too
    process, functions, connection = os.getpid(), Functions(), Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
        connection.send("started")
        while True:
            name, arguments = connection.recv()
            result = error = None
            try:
                result = getattr(functions, name)(*arguments)
            except BaseException as raised:  # SystemExit, asyncio.CancelledError, KeyboardInterrupt
                error = "".join(traceback.format_exception_only(raised))
            if os.getpid() != process:  # a child that the user's code forked and did not end
                os._exit(0)
            signal.alarm(0)  # one that the user's code set and did not clear
            connection.send((result, error))


class Functions:
    """What the run calls."""

    def load(self, path: str, seed: int, text: bytes | None) -> tuple[bool, bytes]:
        """Import the file, which has this text. Returns `takes_rollout` and the text."""
        text = Path(path).read_bytes() if text is None else text
        name = f"task_{Path(path).stem}"
        self.module, self.rng = ModuleType(name), random.Random(seed)
        self.module.__file__ = path
        sys.modules[name] = self.module  # dataclasses need it there
        exec(compile(text, path, "exec"), vars(self.module))
        for name in ("sample", "reward"):
            if not callable(getattr(self.module, name, None)):
                raise AttributeError(f"a task file must have sample and reward, it has no {name}")
        parameters = inspect.signature(self.module.reward).parameters.values()
        return sum(each.kind <= each.POSITIONAL_OR_KEYWORD for each in parameters) > 2, text

    def sample(self) -> tuple[str, str, str]:
        drawn = self.module.sample(self.rng)
        match drawn:
            case tuple([str(question), str(answer), *family]) if question and len(family) < 2:
                if all(isinstance(each, str) for each in family):
                    return str(question), str(answer), str(*family)
        raise TypeError(f"it must return a question and an answer, two strings, and perhaps a"
                        f" family, it returned {drawn!r:.80}")

    def reward(self, *arguments: Any) -> float:
        value = self.module.reward(*arguments)
        converted = float(value) if hasattr(value, "__float__") else math.nan  # not strings
        if not abs(converted) <= 1e15:
            raise TypeError(f"it returned {value!r:.80}, not a finite number of at most 1e15")
        return converted
