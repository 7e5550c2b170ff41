"""A task file's functions in a process of their own, killed at the limit and started again.

What a user's code does (it raises, exits, crashes, waits, or loops in compiled code) ends in a
sentence. Only the standard library is imported, so that the process starts in a tenth of a second.
"""

import ctypes
import importlib.util
import inspect
import math
import os
import random
import signal
import subprocess
import sys
import traceback
from collections import namedtuple
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

PROGRAM = "import sys; sys.path = sys.argv[2:]; from extras.task_file import serve; serve()"
ROLLOUT = ("token_ids", "logprobs", "finish_reason", "versions")  # what a reward can read of it
Problem = namedtuple("Problem", "question answer source")  # tasks.py would import torch


# ---------------------------------------------------------------------------------- the run's side
class TaskFile:
    """`sample` and `reward` of a user's file. A call that fails, or takes longer than `limit_s`
    seconds, is a ValueError.

    `takes_rollout`: the file's reward has a third argument. `paths`: the file and its imports from
    the same folder.
    """

    def __init__(self, path: str, seed: int, limit_s: float):
        self.path, self.seed, self.limit_s = path, seed, limit_s
        self._start()

    def sample(self) -> tuple[str, str]:
        """A question and an answer. The random state is the process's own and begins with `seed`.
        """
        return self._call(f"sample of {self.path}", "sample")

    def reward(self, problem: Any, response: str, rollout: Any = None) -> float:
        """A finite number."""
        if rollout is not None:
            rollout = {name: getattr(rollout, name) for name in ROLLOUT}
        return self._call("the reward", "reward", tuple(problem[:3]), response, rollout)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True)  # a signal of the terminal reaches the run alone
        finalize(self._connection, _kill, self._process)
        self._connection.recv()  # the process has started; the limit is for the file's code
        self.takes_rollout, names = self._call(
            f"the import of {self.path}", "load", self.path, self.seed)
        self.paths = [Path(self.path).with_name(name) for name in names]

    def _call(self, what: str, name: str, *arguments: Any) -> Any:
        from records import printable  # here, because it imports torch

        if self._process.returncode is not None:
            self._start()
        try:
            self._connection.send((name, arguments))
            if self._connection.poll(self.limit_s):
                result, error = self._connection.recv()
            else:
                _kill(self._process)
                result, error = None, f"no answer within {self.limit_s:g} s; try --reward-limit-s"
        except (EOFError, OSError):
            result, error = None, f"its process ended with status {_kill(self._process)}"
        if error:
            raise ValueError(f"{what} fails ({printable(' '.join(error.split()))[:300]})")
        return result


def _kill(process: subprocess.Popen) -> int:
    """End the process and what it has started; returns its exit status, negative for a signal."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


# ---------------------------------------------------------------------------------- the process
def serve() -> None:
    """Answer calls until the run ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed run ends this too
    process, functions, connection = os.getpid(), Functions(), Connection(int(sys.argv[1]))
    connection.send("started")
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        result, error = None, None
        try:
            result = getattr(functions, name)(*arguments)
        except BaseException as raised:  # SystemExit, asyncio.CancelledError, KeyboardInterrupt
            error = "".join(traceback.format_exception_only(raised))[:10_000]
        if os.getpid() != process:  # a child that the user's code forked and did not end
            os._exit(0)
        signal.alarm(0)  # one that the user's code set and did not clear
        connection.send((result, error))


class Functions:
    """What the run calls."""

    def load(self, path: str, seed: int) -> tuple[bool, list[str]]:
        """Import the file. Returns `takes_rollout` and the names of `paths`, see TaskFile."""
        spec = importlib.util.spec_from_file_location(f"task_{Path(path).stem}", path)
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module  # dataclasses need it there
        spec.loader.exec_module(self.module)
        for name in ("sample", "reward"):
            if not callable(getattr(self.module, name, None)):
                raise AttributeError(f"a task file must have sample and reward, it has no {name}")
        self.rng = random.Random(seed)
        parameters = inspect.signature(self.module.reward).parameters.values()
        by_place = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        self.takes_rollout = any(
            each.default is each.empty or each.name == "rollout" for each in by_place[2:3])
        imported = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        files = {Path(file).absolute() for file in imported if file}
        folder = Path(path).absolute().parent
        return self.takes_rollout, sorted(each.name for each in files if each.parent == folder)

    def sample(self) -> tuple[str, str]:
        match self.module.sample(self.rng):
            case tuple([str(question), str(answer)]) if question:
                return str(question), str(answer)
            case other:
                raise TypeError(f"it must return a question and an answer, two strings, it returned"
                                f" {other!r:.80}")

    def reward(
        self, problem: tuple[str, str, str], response: str, rollout: dict[str, Any] | None
    ) -> float:
        arguments = [Problem(*problem), response]
        if self.takes_rollout:
            arguments.append(rollout and SimpleNamespace(**rollout))
        value = self.module.reward(*arguments)
        converted = float(value) if hasattr(value, "__float__") else math.nan  # not strings
        if not abs(converted) <= 1e15:
            raise TypeError(f"it returned {value!r:.80}, not a finite number of at most 1e15")
        return converted
