"""Answers such as 1/2 or x^2 + 1, compared by math-verify. A task file without problems.

A response equals the answer, or has it as 1/2, or as LaTeX between dollars or in a box. If
math-verify needs longer than its limits, 5 s to read and 3 s to compare, a response is wrong.
"""

import re

from math_verify import LatexExtractionConfig, parse, verify

# math-verify reads only a part of these, or reads a product: "1 1/2", "1_000", "0x1F", "1e-5", a
# word.
MISREAD = r"\d\s+\d|\d_\d{3}|\b0[xX]|\de[-+\d]|[a-zA-Z]{2}"
sample = NotImplementedError  # the problems are those of a file or a data set


def reward(problem, response: str) -> float:
    """1.0 if the two answers are equal, else 0.0."""
    answer = problem.answer.rpartition("####")[2]
    gold = parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig()], "no_fallback")
    if not gold or re.search(MISREAD, re.sub(r"\\text\{[^}]*\}|\\[a-zA-Z]+", "", answer)):
        raise ValueError("math-verify does not read all of it")
    return float(response.strip() == answer.strip()
                 or verify(gold, parse(response), timeout_seconds=3))
