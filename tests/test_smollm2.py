"""The arithmetic task's problems and rewards.

Not part of the environment is reasoning-gym, because one of its packages needs a C compiler.
"""

import pytest
from helpers import ROOT, task_of

from tasks import Problem

RIGHT = "13", " 13\n", "The answer is 13.", "14, no, **13**"
WRONG = "14", "-13", "131", "13 or 14", "", "1e999999999"


def test_the_arithmetic_task_has_the_sums_of_small_numbers_and_the_verifiers_rewards():
    pytest.importorskip("reasoning_gym", reason="needs pip install -r examples/requirements-real.txt, and a C compiler")
    task = task_of(ROOT / "examples" / "arithmetic.py", reward_limit_s=60)
    assert len(task.train) + len(task.held_out) == 21 * 21
    assert len({problem.family for problem in task.held_out}) == 23  # a tenth of the unordered pairs
    problem = Problem("Calculate 9 + 4.", "13", "test")
    assert [task.reward(problem, response) for response in RIGHT + WRONG] == [1] * len(RIGHT) + [0] * len(WRONG)
