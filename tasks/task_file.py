"""A user's file: its functions in a process of its own, killed at the limit and started again.

Whatever a user's code does (raise, exit, crash, wait, loop in compiled code), the run gets a
sentence. Only the standard library is imported, so that a process starts in a tenth of a second.
What that process starts ends with the run, with two exceptions: a child that called setsid, and
children of a run that was killed with SIGKILL. To compute the rewards of a group at the same time,
let `rewards` start a pool.
"""

import atexit
import ctypes
import inspect
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket, socketpair
from types import ModuleType, SimpleNamespace
from typing import Any

PROGRAM = "import sys; sys.path = sys.argv[2:]; from tasks.task_file import serve; serve()"
# What a reward can read of a rollout, whose class would import torch.
ROLLOUT = ("token_ids", "logprobs", "finish_reason", "versions")


class TaskFile:
    """The functions of a user's file, in a process of its own. A call that fails, or takes longer
    than `limit_s` seconds, is a ValueError.

    `files` are the bytes of the file and of the modules in its folder that it imports. A process
    that is started again runs the same text, and the modules must stay the same.
    """

    def __init__(self, path: str, seed: int, limit_s: float):
        self.path, self.seed, self.limit_s = path, seed, limit_s
        self.child = self.files = None
        atexit.register(self.kill)
        self.files, self.whole_groups, self.read = self._start(f"the import of {path}")

    def problems(self) -> list[Any] | None:
        """Those that it lists; None if it draws them."""
        return self._call(f"problems of {self.path}", "problems")

    def sample(self) -> Any:
        """A problem. The random state is the process's own and begins with `seed`."""
        return self._call(f"sample of {self.path}", "sample")

    def reward(self, problem: Any, response: str) -> Any:
        """A finite number, a dictionary of them, or None; of a text without a rollout."""
        return self.rewards(problem, [response], [None])[0]

    def rewards(self, problem: Any, texts: list[str], rollouts: Sequence[Any]) -> list[Any]:
        """Of all responses to a problem, if the file has `rewards`; else of one response."""
        read = [{name: getattr(rollout, name, None) for name in self.read} for rollout in rollouts]
        return self._call("the reward", "grade", problem, texts, read)

    def _call(self, what: str, *call: Any) -> Any:
        """The result. Raises: ValueError that says why `what` has failed."""
        if self.child.poll() is not None:
            self._start(what)
        return self._ask(what, *call)

    def _start(self, what: str) -> Any:
        """Start the process and import the file in it. Returns what `Functions.load` returns."""
        self.socket, theirs = socketpair()
        self.stream = self.socket.makefile("rwb")
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONHASHSEED": str(self.seed)},  # the order of a set
                start_new_session=True)  # a signal of the terminal reaches the run alone
        self.stream.readline()  # the process has started; the limit is for the file's code
        return self._ask(what, "load", self.path, self.seed, self.files)

    def _ask(self, what: str, *call: Any) -> Any:
        try:
            # Of each read, because the file's code can also write a part of a message.
            self.socket.settimeout(self.limit_s)
            pickle.dump(call, self.stream)
            self.stream.flush()
            result, error = pickle.load(self.stream)
        except TimeoutError:
            self.kill()
            error = f"no answer within {self.limit_s:g} s; try --reward-limit-s"
        except KeyboardInterrupt:  # its answer would be taken for that to the next call
            self.kill()
            raise
        except Exception:  # no answer, or bytes of the file's code in its place
            error = f"its process ended with status {self.kill()}"
        if error:
            raise ValueError(f"{what} fails ({error.strip():.300})")
        return result

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
    process, functions, connection = os.getpid(), Functions(), socket(fileno=int(sys.argv[1]))
    with suppress(EOFError, OSError):
        connection.send(b"started\n")
        calls = connection.makefile("rb")
        while True:
            name, *arguments = pickle.load(calls)
            try:  # to pickle an object of the file's own class can fail too
                answer = pickle.dumps((getattr(functions, name)(*arguments), None))
            except BaseException as raised:  # SystemExit, asyncio.CancelledError, KeyboardInterrupt
                error = "".join(traceback.format_exception_only(raised))
                answer = pickle.dumps((None, error))
            if os.getpid() != process:  # a child that the user's code forked and did not end
                os._exit(0)
            connection.sendall(answer)


class Functions:
    """What the run calls."""

    def load(
        self, path: str, seed: int, files: list[bytes] | None
    ) -> tuple[list[bytes], bool, tuple[str, ...]]:
        """Import the file. `files`: what the first process has read, for one that is started again.

        Returns the files, whether whole groups get rewards, and what the reward reads of a rollout.
        """
        source = Path(path).resolve()  # a process that this one starts imports it by this name
        text = files[0] if files else source.read_bytes()
        name = source.stem
        if name in sys.modules:
            raise ImportError("a task file must not have the name of a loaded module, got"
                              f" {name}; rename the file")
        self.module, self.rng = ModuleType(name), random.Random(seed)
        random.seed(seed)  # for code that draws from the module
        self.module.__file__ = path
        sys.modules[name] = self.module  # dataclasses need it there
        before, folder = {*sys.modules}, source.parent
        sys.path.insert(0, str(folder))
        exec(compile(text, path, "exec"), vars(self.module))
        beside = {Path(getattr(sys.modules[new], "__file__", None) or "").resolve()
                  for new in sys.modules.keys() - before}
        now = [text, *sorted(file.read_bytes() for file in beside if file.suffix == ".py"
                             and file.is_relative_to(folder) and "site-packages" not in file.parts)]
        if files not in (None, now):
            raise ImportError("what it imports from its folder must stay the same in a run")
        self.name = self._only("reward", "rewards")
        self.function = getattr(self.module, self.name)
        signature = inspect.signature(self.function)
        self.named = [*signature.parameters.keys() & {"rollout", "rollouts"}]
        try:
            signature.bind("problem", "response", **dict.fromkeys(self.named))
        except TypeError:
            raise TypeError(f"{self.name} must take a problem, a response and perhaps `rollout`, it"
                            f" is {self.name}{signature}") from None
        return now, self.name == "rewards", ROLLOUT if self.named else ()

    def _only(self, *names: str) -> str:
        """The one of these names that the file defines. Raises: AttributeError if it is not one."""
        there = [name for name in names if hasattr(self.module, name)]
        if len(there) != 1:
            raise AttributeError(f"a task file must have {names[0]} or {names[1]}, it has"
                                 f" {' and '.join(there) or f'no {names[0]}'}")
        return there[0]

    def sample(self) -> Any:
        return self.module.sample(self.rng)

    def problems(self) -> list[Any] | None:
        if self._only("sample", "problems") == "sample":
            return None
        problems = self.module.problems
        return list(problems() if callable(problems) else problems)

    def grade(self, problem: Any, texts: list[str], read: list[dict[str, Any]]) -> list[Any]:
        """The rewards; `reward` gets one text a call. `read`: what it can read of rollouts."""
        rollouts = [SimpleNamespace(**values) for values in read]
        if self.name == "reward":
            named = dict.fromkeys(self.named, rollouts[0])
            return [as_reward(self.function(problem, texts[0], **named))]
        rewards = self.function(problem, texts, **dict.fromkeys(self.named, rollouts))
        listed = [] if isinstance(rewards, dict | set) else list(rewards)
        if len(listed) != len(texts):
            raise TypeError(f"it returned {rewards!r:.80}, not a list of {len(texts)} rewards")
        return list(map(as_reward, listed))


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
