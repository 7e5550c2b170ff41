"""A user's file: its functions in processes of their own, killed at the limit and started again.

What a user's code does (it raises, exits, crashes, waits, or loops in compiled code) ends in a
sentence. Only the standard library is imported, so that a process starts in a tenth of a second.
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
import time
import traceback
from collections import namedtuple
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import ModuleType, SimpleNamespace
from typing import Any

PROGRAM = "import sys; sys.path = sys.argv[2:]; from extras.task_file import serve; serve()"
ROLLOUT = ("token_ids", "logprobs", "finish_reason", "versions")  # what a reward can read of it
Problem = namedtuple("Problem", "question answer source row")  # tasks.py would import torch


class TaskFile:
    """The functions of a user's file. A call that fails, or takes longer than `limit_s` seconds, is
    a ValueError. `text` is the file's; a process that is started again runs the same text.

    `rewards_only`: the file needs no problems. `num_processes` compute rewards at the same time.
    """

    def __init__(self, path: str, seed: int, limit_s: float, rewards_only: bool = False,
                 num_processes: int = 1):
        self.path, self.seed, self.limit_s, self.rewards_only = path, seed, limit_s, rewards_only
        self.text = None
        self.processes = [Process(self) for _ in range(num_processes)]
        self.threads = ThreadPoolExecutor(num_processes)  # kept: a child ends with its thread
        about = self._call(f"the import of {path}", "about")
        self.text, self.takes_rollout, self.whole_groups, self.has_problems = about

    def sample(self) -> Any:
        """A problem. The random state is the process's own and begins with `seed`."""
        return self._call(f"sample of {self.path}", "sample")

    def problems(self) -> list[Any]:
        return self._call(f"problems of {self.path}", "problems")

    def reward(self, problem: Any, response: str, rollout: Any = None) -> Any:
        """A finite number, a dictionary of them, or None."""
        ((result,),) = self.grade([(problem, [response], [rollout])])
        if isinstance(result, ValueError):
            raise result
        return result

    def grade(self, groups: Sequence[tuple[Any, list[str], Sequence[Any]]]) -> list[list[Any]]:
        """For each (problem, responses, rollouts) the rewards; a ValueError for one that fails."""
        calls = []
        for problem, texts, rollouts in groups:
            asked = Problem(problem.question, problem.answer, problem.source, problem.row)
            columns = [texts]
            if self.takes_rollout:
                columns.append([SimpleNamespace(**{name: getattr(each, name) for name in ROLLOUT})
                                for each in rollouts])
            calls += [("rewards", asked, *columns)] if self.whole_groups else [
                ("reward", asked, *each) for each in zip(*columns, strict=True)]
        results = iter(self._call_all("the reward", calls))
        if self.whole_groups:
            return [each if isinstance(each, list) else [each] * len(texts)
                    for each, (_, texts, _) in zip(results, groups, strict=True)]
        return [[next(results) for _ in texts] for _, texts, _ in groups]

    def _call(self, what: str, *call: Any) -> Any:
        (result,) = self._call_all(what, [call])
        if isinstance(result, ValueError):
            raise result
        return result

    def _call_all(self, what: str, calls: list[tuple]) -> list[Any]:
        """Results in the order of the calls, each (name, arguments ...)."""
        idle = SimpleQueue()
        for process in self.processes:
            idle.put(process)

        def run(call: tuple) -> Any:
            process = idle.get()
            result, error = process.call(*call)
            idle.put(process)
            return ValueError(f"{what} fails ({error.strip():.300})") if error else result

        try:
            return list(self.threads.map(run, calls))
        except BaseException:  # a signal: no thread must wait for a call
            for process in self.processes:
                process.kill()
            raise


class Process:
    """A process that runs the functions of a TaskFile, one call at a time."""

    def __init__(self, file: TaskFile):
        self.file, self.child, self.deadline = file, None, math.inf
        Thread(target=self._watch, daemon=True).start()
        atexit.register(self.kill)

    def call(self, name: str, *arguments: Any) -> tuple[Any, str | None]:
        """The result, or what has failed."""
        about = error = None
        if self.child is None or self.child.poll() is not None:
            self._start()
            file = self.file
            about, error = self._ask("load", file.path, file.seed, file.text, file.rewards_only)
        return (about, error) if error or name == "about" else self._ask(name, *arguments)

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True)  # a signal of the terminal reaches the run alone
        self.connection.recv()  # the process has started; the limit is for the file's code

    def _ask(self, *call: Any) -> tuple[Any, str | None]:
        limit = self.file.limit_s
        self.deadline = deadline = time.monotonic() + limit
        try:
            self.connection.send(call)
            return self.connection.recv()
        except Exception:  # no answer, or bytes of the file's code in its place
            status = self.kill()
            if time.monotonic() >= deadline:
                return None, f"no answer within {limit:g} s; try --reward-limit-s"
            return None, f"its process ended with status {status}"
        finally:
            self.deadline = math.inf

    def _watch(self) -> None:
        """A thread that ends a call at its deadline; a thread for each call would cost more."""
        never = Event()
        while not never.wait(0.05):
            if time.monotonic() >= self.deadline:
                self.kill()

    def kill(self) -> int | None:
        """End the process and what the file's code has started. Returns its status."""
        if self.child is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        return self.child.wait()


# ---------------------------------------------------------------------------------- the process
def serve() -> None:
    """Answer calls until the run ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed run ends this too
    process, functions, connection = os.getpid(), Functions(), Connection(int(sys.argv[1]))
    with suppress(EOFError, OSError):
        connection.send("started")
        while True:
            name, *arguments = connection.recv()
            result = error = None
            try:
                result = getattr(functions, name)(*arguments)
            except BaseException as raised:  # SystemExit, asyncio.CancelledError, KeyboardInterrupt
                error = "".join(traceback.format_exception_only(raised))
            if os.getpid() != process:  # a child that the user's code forked and did not end
                os._exit(0)
            signal.alarm(0)  # one that the user's code set and did not clear
            try:
                connection.send((result, error))
            except Exception as raised:  # an object of the file's own class
                connection.send((None, "".join(traceback.format_exception_only(raised))))


class Functions:
    """What the run calls."""

    def load(
        self, path: str, seed: int, text: bytes | None, rewards_only: bool
    ) -> tuple[bytes, bool, bool, bool]:
        """Import the file, which has this text. Returns the text, whether its reward takes the
        rollout and whether it takes a whole group, and whether the file lists its problems.
        """
        text = Path(path).read_bytes() if text is None else text
        name = f"task_{Path(path).stem}"
        self.module, self.rng = ModuleType(name), random.Random(seed)
        self.module.__file__ = path
        sys.modules[name] = self.module  # dataclasses need it there
        sys.path.insert(0, str(Path(path).resolve().parent))
        exec(compile(text, path, "exec"), vars(self.module))
        sources = [] if rewards_only else [("sample", "problems")]
        for pair in (*sources, ("reward", "rewards")):
            found = [each for each in pair if callable(vars(self.module).get(each))
                     or each == "problems" in vars(self.module)]
            if len(found) != 1:
                raise AttributeError(f"a task file must have {pair[0]} or {pair[1]}, it has"
                                     f" {' and '.join(found) or f'no {pair[0]}'}")
        whole_groups = hasattr(self.module, "rewards")
        has_problems = hasattr(self.module, "problems")
        return text, self._takes_rollout(whole_groups), whole_groups, has_problems

    def _takes_rollout(self, whole_groups: bool) -> bool:
        """Whether the reward takes the rollout, by name. Raises: TypeError if it is no reward."""
        name = "rewards" if whole_groups else "reward"
        function = getattr(self.module, name)
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{name} must be a plain function, it is a coroutine (async def)")
        signature = inspect.signature(function)
        named = signature.parameters.keys() & {"rollout", "rollouts"}
        try:
            signature.bind("problem", "response", **dict.fromkeys(named))
        except TypeError:
            raise TypeError(f"{name} must take a problem, a response and perhaps `rollout`, it is"
                            f" {name}{signature}") from None
        self.named = [*named]
        return bool(named)

    def sample(self) -> Any:
        return self.module.sample(self.rng)

    def problems(self) -> list[Any]:
        problems = self.module.problems
        return list(problems() if callable(problems) else problems)

    def reward(self, problem: Problem, response: str, *rollout: Any) -> Any:
        named = dict(zip(self.named, rollout, strict=True))
        return as_reward(self.module.reward(problem, response, **named))

    def rewards(self, problem: Problem, responses: list[str], *rollouts: Any) -> list[Any]:
        named = dict(zip(self.named, rollouts, strict=True))
        values = list(self.module.rewards(problem, responses, **named))
        if len(values) != len(responses):
            raise TypeError(f"it returned {len(values)} rewards for {len(responses)} responses")
        return list(map(as_reward, values))


def as_reward(value: Any) -> float | dict[str, float] | None:
    """Raises: TypeError if it is no number, no dictionary of numbers, and not None."""
    if isinstance(value, dict) and value:
        return {str(name): number(part) for name, part in value.items()}
    return None if value is None else number(value)


def number(value: Any) -> float:
    converted = float(value) if hasattr(value, "__float__") else math.nan  # not strings
    if not abs(converted) <= 1e15:
        raise TypeError(f"it returned {value!r:.80}, not a finite number of at most 1e15")
    return converted
