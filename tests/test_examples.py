"""The examples of task files: countdown's reward for right, wrong and hostile text, and the arithmetic task.

Not part of the environment is reasoning-gym, because one of its packages needs a C compiler.
"""

import re
import time

import pytest
from helpers import ROOT, parametrize, task_of

from examples.countdown import reward
from tasks import Problem

# An answer => right responses, or =/= wrong ones. The first: another number, one that is not used, one that is used
# twice, another value. The last two: a limit.
RESPONSES = f"""\
3 4 25 = 100 =/= <answer>(25 - 3) * 4 + 12</answer> ~ <answer>25 * 4</answer> ~ <answer>25*4*3/3</answer>
3 4 25 = 100 =/= <answer>25*(3+4)</answer> ~ <answer>25*4**3</answer> ~ <answer>25//3*4</answer> ~ 100
3 4 25 = 100 =/=  ~ <answer>25*4+(3</answer> ~ <answer>3/0+25*4</answer> ~ <answer>(3)(4)+25</answer>
3 4 25 = 100 =/= <answer>__import__('os').getcwd()</answer>
2 4 5 = 10 => 4*5/2 ~ <answer>5*4/⏎2</answer> ~ <answer>5×4÷2</answer>
2 4 5 = 10 => I think <answer>1</answer> no, <answer> 5*(4/2) </answer>
2 4 5 = -18 => <answer>-(4*5-2)</answer>
1 3 3 = 1 => 1/3*3
2 3 8 = 3 => 8-3-2
7 = -7 => {"-" * 199}7
7 = 7 =/= {"-" * 200}7"""  # noqa: RUF001


@parametrize("line", RESPONSES.split("\n"), ids=lambda line: line[:20])
def test_a_reward_is_for_the_value_with_each_number_once(line):
    answer, sign, responses = re.split(" (=>|=/=) ", line.replace("⏎", "\n"))
    for response in responses.split(" ~ "):
        assert reward(Problem("", answer, "test"), response) == (sign == "=>"), response


@parametrize("text", [
    "(" * 10_000, "9" * 1_000_000, "1+" * 50_000 + "1", "<answer>" * 20_000, "**".join("9" * 60), "9(" * 60,
])  # fmt: skip
def test_hostile_text_takes_no_time(text):
    problem, started = Problem("", "3 4 25 = 100", "test"), time.process_time()
    assert reward(problem, text) == reward(problem, f"<answer>{text}</answer>") == 0.0
    assert time.process_time() - started < 10  # a search without limits takes hours


def test_it_is_a_task_file(monkeypatch):
    monkeypatch.setattr("tasks.problem_files.drawn", lambda file: [file.sample() for _ in range(20)])
    task = task_of(ROOT / "examples" / "countdown.py")
    assert (len(task.train), len(task.held_out)) == (18, 2)
    assert task.reward(task.train[0], "") == 0.0


# ------------------------------------------------------------------------------------------------ arithmetic
RIGHT = "13", " 13\n", "The answer is 13.", "14, no, **13**"
WRONG = "14", "-13", "131", "13 or 14", "", "1e999999999"


def test_the_arithmetic_task_has_the_sums_of_small_numbers_and_the_verifiers_rewards():
    pytest.importorskip("reasoning_gym", reason="needs pip install -r examples/requirements-real.txt, and a C compiler")
    task = task_of(ROOT / "examples" / "arithmetic.py", reward_limit_s=60)
    assert len(task.train) + len(task.held_out) == 21 * 21
    assert len({problem.family for problem in task.held_out}) == 23  # a tenth of the unordered pairs
    problem = Problem("Calculate 9 + 4.", "13", "test")
    assert [task.reward(problem, response) for response in RIGHT + WRONG] == [1] * len(RIGHT) + [0] * len(WRONG)
