"""The problems of examples/arithmetic.py with a graded reward: the answer, and nothing else."""

import re

from examples.arithmetic import reward as answer_reward
from examples.arithmetic import sample

__all__ = ["reward", "sample"]
ONLY_A_NUMBER = re.compile(r"\s*-?\d+\s*")


def reward(problem, response: str) -> float:
    """0.8 for the right answer, and 0.2 for a response that is a number without words."""
    is_short = ONLY_A_NUMBER.fullmatch(response) is not None
    return 0.8 * answer_reward(problem, response) + 0.2 * is_short
