"""Calling a reward: code of others, which may raise, return nonsense, or never return."""

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks import Problem


class RewardError(RuntimeError):
    """A reward raised, returned no finite number or ran out of time; names the problem and the response."""


class OutOfTime(BaseException):
    """Not an Exception, so that a reward's own `except Exception` lets it through."""


@dataclass(frozen=True)
class Scores:
    """One entry per response; `errors` names each response that could not be scored, its reward is 0."""

    responses: list[str]
    rewards: list[float]
    errors: list[str | None]

    @property
    def num_errors(self) -> int:
        return sum(error is not None for error in self.errors)


def score(
    reward: Callable[[Problem, str], float], problems: list[Problem], responses: list[str], limit_s: float, stop: bool
) -> Scores:
    """The reward of each response, at most `limit_s` seconds each. Raises: RewardError at the first error if `stop`."""
    rewards, errors = [], []
    for problem, response in zip(problems, responses, strict=True):
        value, failure = 0.0, None
        try:
            value = call_within(limit_s, _finite, reward, problem, response)
        except (Exception, SystemExit, OutOfTime) as error:  # whatever it is, it is named, and counted or raised
            failure = _describe(error, limit_s, problem, response)
            if stop:
                raise RewardError(f"{failure}; to go on with reward 0, --reward-errors count") from error
        rewards.append(value)
        errors.append(failure)
    return Scores(responses, rewards, errors)


def _finite(reward: Callable[[Problem, str], float], problem: Problem, response: str) -> float:
    """Numbers of any library count (they convert themselves), strings that look like one do not."""
    value = reward(problem, response)
    if not hasattr(value, "__float__") or not math.isfinite(value):
        raise TypeError(f"it returned {value!r:.80}, not a finite number")
    return float(value)


def _describe(error: BaseException, limit_s: float, problem: Problem, response: str) -> str:
    try:
        why = f"no answer within {limit_s:g} s" if isinstance(error, OutOfTime) else f"{type(error).__name__}: {error}"
    except Exception:  # of the error's own __str__
        why = type(error).__name__
    question, answer = (f"{text!r:.200}" for text in (problem.question, response))
    return f"the reward fails ({why:.300}) on {problem.source}, question {question}, response {answer}"


def call_within(limit_s: float, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, interrupted after `limit_s` seconds. Raises: OutOfTime.

    By SIGALRM, in the main thread: it stops Python code, sleeps and waits, regular expressions and long integers of
    Python's own; not compiled code that does not come back to the interpreter (that must be run in a process of its
    own), and not a function that catches BaseException again and again.
    """

    def expire(*_):
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # again and again, should the first one be swallowed
        try:
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come just before the line above
        raise
    finally:
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)  # None: a handler that Python has not set
