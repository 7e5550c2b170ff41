"""Countdown: make the target from the numbers. A task file like any user's: a `sample` and a `reward`.

Each number is used exactly once, as in TinyZero and the Countdown-Tasks-3to4 data (on television: at most once). Every
problem can be solved, because its target is made from its numbers. Answers are evaluated by the parser below, exactly
and in bounded time, whatever the model writes.
"""

import operator
import random
import re
from fractions import Fraction

LARGEST_TARGET = 999
MAX_CHARACTERS, MAX_DEPTH = 200, 20  # of an expression; no honest one is near
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TYPOGRAPHY = str.maketrans("×÷−", "*/-")  # noqa: RUF001, models write these too
TOKEN = re.compile(r"[0-9]+|[-+*/()]|\S")


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
    except (Malformed, ZeroDivisionError):
        return 0.0
    return float(value == int(target) and sorted(used) == list(map(int, numbers.split())))


class Malformed(ValueError):
    """Not an expression of whole numbers, + - * / and brackets, or a longer or deeper one than is looked at."""


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers in it, in the order they stand there.

    Raises: Malformed; ZeroDivisionError.
    """
    if len(expression) > MAX_CHARACTERS:
        raise Malformed(f"{len(expression)} characters")
    parser = Parser(TOKEN.findall(expression.translate(TYPOGRAPHY)))
    value = parser.sum()
    if parser.tokens:
        raise Malformed(f"{parser.tokens[-1]} after the end")
    return value, parser.numbers


class Parser:
    """sum: product {+- product}; product: factor {*/ factor}; factor: number, - factor or ( sum ). Left to right."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens[::-1]  # a stack, the next token last
        self.numbers: list[int] = []
        self.depth = 0

    def sum(self) -> Fraction:
        value = self.product()
        while symbol := self.accept("+-"):
            value = OPERATIONS[symbol](value, self.product())
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while symbol := self.accept("*/"):
            value = OPERATIONS[symbol](value, self.factor())
        return value

    def factor(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} levels")
        if self.accept("-"):
            value = -self.factor()
        elif self.accept("("):
            value = self.sum()
            if not self.accept(")"):
                raise Malformed("a bracket is not closed")
        else:
            value = Fraction(self.number())
        self.depth -= 1
        return value

    def number(self) -> int:
        if not self.tokens or not (self.tokens[-1].isascii() and self.tokens[-1].isdigit()):
            raise Malformed("a number is missing")
        self.numbers.append(int(self.tokens.pop()))
        return self.numbers[-1]

    def accept(self, symbols: str) -> str | None:
        """The next token, taken, if it is one of the symbols."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in symbols else None
