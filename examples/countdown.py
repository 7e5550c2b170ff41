"""Countdown: reach a target with given numbers. `--task examples/countdown.py`

Each number is used exactly once, as in TinyZero and the data set Countdown-Tasks-3to4 (on
television: at most once). Every problem has a solution, because the target is computed from the
numbers. An answer is evaluated exactly, as Python. Only whole numbers, the four operations and
brackets are allowed, and the time is bounded for any text.
"""

import operator
import random
import re
from fractions import Fraction

LARGEST_TARGET = 999
OPERATIONS = operator.add, operator.sub, operator.mul, operator.truediv
TYPOGRAPHY = str.maketrans("×÷−", "*/-")  # noqa: RUF001, models write these too
# At most 200 characters; the longest sensible answer is much shorter.
ALLOWED = re.compile(r"(?!.*(\*\*|//))[-+*/() 0-9]{1,200}")


def sample(rng: random.Random) -> tuple[str, str]:
    """Three or four numbers and a target, with an answer such as "19 35 44 = 98"."""
    target = Fraction(0)
    while target.denominator > 1 or not 1 <= target <= LARGEST_TARGET:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        values = list(map(Fraction, numbers))
        while len(values) > 1:  # replace two values by the result of an operation
            left, right = (values.pop(rng.randrange(len(values))) for _ in range(2))
            operation = rng.choice(OPERATIONS[: 4 if right else 3])  # no division by 0
            values.append(operation(left, right))
        (target,) = values
    question = (
        f"Using each of the numbers {', '.join(map(str, numbers))} exactly once, with + - * / and"
        f" brackets, write an expression that equals {target}. Give it between <answer> and"
        " </answer>, without an equals sign."
    )
    return question, f"{' '.join(map(str, sorted(numbers)))} = {target}"


def reward(problem, response: str) -> float:
    """1.0 if the last <answer>, or the whole response, uses the numbers and equals the target."""
    numbers, target = problem.answer.split(" = ")
    # A regular expression would take quadratic time.
    before, closed, _ = response.rpartition("</answer>")
    answer = before.rpartition("<answer>")[2] if closed else response
    expression = " ".join(answer.translate(TYPOGRAPHY).split())
    if not ALLOWED.fullmatch(expression):
        return 0.0
    used = sorted(map(int, re.findall(r"\d+", expression)))
    if used != list(map(int, numbers.split())):
        return 0.0
    try:  # digits, signs and brackets alone
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return 0.0
    return float(value == int(target))
