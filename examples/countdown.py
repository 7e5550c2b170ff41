"""Countdown: make the target from the numbers. A task file like any user's: a `sample` and a `reward`.

Each number is used exactly once, as in TinyZero and the Countdown-Tasks-3to4 data (on television: at most once). Every
problem can be solved, because its target is made from its numbers. An answer is parsed as Python and evaluated exactly,
with the four operations and nothing else, in bounded time whatever the model writes.
"""

import ast
import operator
import random
import re
from fractions import Fraction

LARGEST_TARGET = 999
MAX_CHARACTERS = 200  # of an expression; no honest one is near
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NODES = dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), OPERATIONS.values(), strict=True))
TYPOGRAPHY = str.maketrans("×÷−", "*/-")  # noqa: RUF001, models write these too
ALLOWED = re.compile(r"[-+*/() 0-9]+")


def sample(rng: random.Random) -> tuple[str, str]:
    """Three or four numbers from 1 to 99 and a target from 1 to LARGEST_TARGET, with answers like "19 35 44 = 98"."""
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        target = _combine(rng, numbers)
        if target.denominator == 1 and 1 <= target <= LARGEST_TARGET:
            break
    question = (
        f"Using each of the numbers {', '.join(map(str, numbers))} exactly once, with + - * / and brackets, write an"
        f" expression that equals {target}. Give it between <answer> and </answer>, without an equals sign."
    )
    return question, f"{' '.join(map(str, sorted(numbers)))} = {target}"


def _combine(rng: random.Random, numbers: list[int]) -> Fraction:
    """Join two of the values by an operation until one is left."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        left, right = (values.pop(rng.randrange(len(values))) for _ in range(2))
        symbol = rng.choice("+-*/" if right else "+-*")
        values.append(OPERATIONS[symbol](left, right))
    return values[0]


def reward(problem, response: str) -> float:
    """1.0 if the last <answer> (the whole response, if there is none) uses exactly the numbers and is the target."""
    numbers, target = problem.answer.split(" = ")
    before, closed, _ = response.rpartition("</answer>")  # a regular expression would be quadratic in open tags
    try:
        value, used = evaluate(before.rpartition("<answer>")[2] if closed else response)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == int(target) and sorted(used) == list(map(int, numbers.split())))


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers in it, in the order they stand there.

    Raises: ValueError if it is no expression of whole numbers, + - * / and brackets, or longer than MAX_CHARACTERS;
    ZeroDivisionError.
    """
    numbers = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, operation, right) if type(operation) in NODES:
                return NODES[type(operation)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int(number)):
                numbers.append(number)
                return Fraction(number)
        raise ValueError(f"{type(node).__name__} is not allowed")

    text = " ".join(expression.translate(TYPOGRAPHY).split())
    if len(text) > MAX_CHARACTERS or not ALLOWED.fullmatch(text):
        raise ValueError(f"not an expression of at most {MAX_CHARACTERS} characters")
    try:
        return value(ast.parse(text, mode="eval").body), numbers
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error}") from error
