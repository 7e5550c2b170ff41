"""Rewards that raise, hang or return nonsense: named with their problem and response, counted or the end of the run."""

import math
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from config import Config
from tasks import Problem, call_within, score

PROBLEMS = [Problem(f"{i}+1=", str(i + 1), f"line {i}") for i in range(3)]
RESPONSES = ["1", "two", "3"]


def scores(reward, limit_s: float) -> list[tuple[float, str | None]]:
    return [score(reward, *each, limit_s) for each in zip(PROBLEMS, RESPONSES, strict=True)]


def fails_on_two(failure):
    """Scores "1" and "3" as 1.0 and calls `failure` on "two"."""
    return lambda problem, response: failure(problem, response) if response == "two" else 1.0


def raises(_problem, _response):
    raise KeyError("no such thing")


def loops(*_):
    while True:
        pass


def sleeps(*_):
    time.sleep(60)


def backtracks(*_):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def swallows(*_):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def catches_all(*_):
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


def mute(*_):
    raise Mute


def unprintable(*_):
    raise ValueError("\ud800")  # half of a character: no encoding has it


def leaves(*_):
    raise SystemExit(0)


FAILURES = {
    "raises": (raises, "KeyError: 'no such thing'"), "loops": (loops, "no answer within 0.2 s"),
    "sleeps": (sleeps, "no answer within 0.2 s"), "backtracks": (backtracks, "no answer within 0.2 s"),
    "swallows": (swallows, "no answer within 0.2 s"), "catches all": (catches_all, "no answer within 0.2 s"),
    "mute": (mute, "Mute"), "unprintable": (unprintable, r"ValueError: \ud800"), "leaves": (leaves, "SystemExit"),
    "nan": (lambda *_: math.nan, "it returned nan"), "infinite": (lambda *_: math.inf, "it returned inf"),
    "none": (lambda *_: None, "it returned None"), "text": (lambda *_: "1.0", "it returned '1.0'"),
    "several": (lambda *_: torch.ones(2), "Error"), "huge": (lambda *_: 1e300, "it returned 1e+300"),
    "digits": (lambda *_: 10**5000, "OverflowError"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_counted_with_reward_0_and_named_with_its_problem_and_response(name):
    failure, why = FAILURES[name]
    started = time.perf_counter()
    (one, no_error), (two, error), (three, _) = scores(fails_on_two(failure), limit_s=0.2)
    assert time.perf_counter() - started < 5
    assert (one, two, three, no_error) == (1.0, 0.0, 1.0, None)
    for part in (why, "line 1", "'1+1='", "'two'"):
        assert part in error


@pytest.mark.parametrize("value", [True, 1, 1.0, numpy.float32(1), numpy.int64(1), torch.tensor(1.0), torch.ones(1)])
def test_whatever_is_one_finite_number_is_a_reward(value):
    reward, error = score(lambda *_: value, PROBLEMS[0], "1", limit_s=1.0)
    assert (reward, type(reward), error) == (1.0, float, None)


def test_ctrl_c_is_no_failure_and_the_alarm_is_as_it_was():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt):
        score(interrupt, PROBLEMS[0], "1", limit_s=1.0)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_limit_is_for_each_call_and_not_for_the_batch():
    assert scores(lambda *_: time.sleep(0.1) or 1.0, limit_s=0.25) == [(1.0, None)] * 3


# ------------------------------------------------------------------------------------------------ the alarm
def spins(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def spins_and_raises(seconds: float) -> None:
    spins(seconds)
    raise KeyError(seconds)


def spins_again(seconds: float) -> None:
    try:
        spins(1.0)
    except BaseException:
        spins(seconds)


@pytest.fixture
def own_handler():
    """A handler that call_within must put back; SIGALRM's default would end the process."""

    def handler(*_):
        raise AssertionError("an alarm came after the call")

    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_tiny_limits_end_in_a_value_error_and_leave_neither_timer_nor_handler(own_handler):
    rng, outcomes = random.Random(0), set()
    for number in range(4000):
        limit_s = (1e-3, 1e-4, 3e-5)[number % 3] if number < 1000 else 1e-5
        function = rng.choice((spins, spins_and_raises, lambda _: None, spins_again if number < 200 else spins))
        try:
            call_within(limit_s, "it", function, limit_s * rng.uniform(0.5, 1.2))
            outcomes.add("in time")
        except ValueError as error:
            outcomes.add(re.search("no answer|KeyError", str(error))[0])
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is own_handler
    assert outcomes == {"in time", "no answer", "KeyError"}


def test_a_limit_below_the_time_of_the_handler_does_not_stop_the_program():
    program = (
        "from tasks import Problem, score\n"
        "for _ in range(1000): score(lambda *_: 1.0, Problem('', '', ''), '', 1e-7)"
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], timeout=60, check=True)


@pytest.mark.parametrize("function", [abs, spins_and_raises])
def test_an_alarm_between_any_two_instructions_outside_the_call_has_no_effect(function, own_handler):
    alarms = 0

    def alarm(frame, event, _):
        nonlocal alarms
        if frame.f_code is not call_within.__code__:
            return None
        frame.f_trace_opcodes = True
        if signal.getsignal(signal.SIGALRM) is not own_handler:
            alarms += 1
            signal.raise_signal(signal.SIGALRM)
        return alarm

    sys.settrace(alarm)
    try:
        result = call_within(1000.0, "it", function, 0.01)
    except ValueError as error:
        result = str(error)
    finally:
        sys.settrace(None)
    assert result == (0.01 if function is abs else "it fails (KeyError: 0.01)")
    assert alarms > 20
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is own_handler


@pytest.mark.parametrize("limit_s", [0.0, -1.0, math.nan, math.inf, 1e300, 1e9])
def test_a_limit_that_no_timer_can_hold_is_refused(limit_s):
    with pytest.raises(ValueError, match=r"reward_limit_s must be in \(0, 1e9\), a timer's range, got"):
        Config.of(reward_limit_s=limit_s)


def test_the_longest_limit_works(own_handler):
    longest = math.nextafter(1e9, 0)
    assert Config.of(reward_limit_s=longest).data.reward_limit_s == longest
    assert call_within(longest, "it", abs, -1) == 1
