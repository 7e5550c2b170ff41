"""Countdown's reward against an exhaustive search that shares no code with it, and against hostile text."""

import itertools
import random
import time
from fractions import Fraction

import pytest

from config import Config
from examples.countdown import evaluate, reward, sample
from tasks import Problem
from train import find_task


def expressions(values: list[tuple[Fraction, str]]):
    """Every value that can be computed from all of the values, with its expression in full brackets."""
    if len(values) == 1:
        yield values[0]
    for left, right in itertools.permutations(range(len(values)), 2):
        rest = [each for index, each in enumerate(values) if index not in (left, right)]
        (a, first), (b, second) = values[left], values[right]
        for symbol, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", b and a / b)):
            if symbol != "/" or b:
                yield from expressions([*rest, (value, f"({first}{symbol}{second})")])


def test_every_problem_has_a_solution_and_the_solution_is_rewarded():
    rng = random.Random(0)
    for _ in range(12):
        question, answer = sample(rng)
        problem = Problem(question, answer, "test")
        numbers, target = answer.split(" = ")
        assert set(numbers.split()) <= set(question.replace(",", "").split())
        made = expressions([(Fraction(number), number) for number in numbers.split()])
        solution = next(text for value, text in made if value == int(target))
        assert reward(problem, f"<answer>{solution}</answer>") == 1.0
        wrong = next(text for value, text in expressions([(Fraction(n), n) for n in numbers.split()])
                     if value != int(target))  # fmt: skip
        assert reward(problem, f"<answer>{wrong}</answer>") == 0.0


PROBLEM = Problem("", "3 4 25 = 100", "test")


@pytest.mark.parametrize("response, earned", [
    ("<answer>(25 - 3) * 4 + 12</answer>", 0),  # 100, with other numbers
    ("<answer>25 * 4</answer>", 0),  # one number is not used
    ("<answer>25*4*3/3</answer>", 0),  # a number is used twice
    ("<answer>4*25+3-3</answer>", 0),
    ("<answer>25*(3+4)</answer>", 0),  # all numbers, another value
    ("100", 0), ("", 0), ("<answer></answer>", 0), ("<answer>100 = 4*25</answer>", 0),
    ("<answer>25*4**3</answer>", 0), ("<answer>25//3*4</answer>", 0), ("<answer>0x19*4+3</answer>", 0),
    ("<answer>__import__('os').getcwd()</answer>", 0), ("<answer>25*4+(3</answer>", 0),
    ("<answer>3/0+25*4</answer>", 0),
    ("<answer>25²*4+3</answer>", 0), ("<answer>٣*4+25</answer>", 0), ("<answer>2 5*4*3</answer>", 0),
])  # fmt: skip
def test_other_values_other_numbers_and_other_text_earn_nothing(response, earned):
    assert reward(PROBLEM, response) == earned


@pytest.mark.parametrize("response", [
    "<answer>4*5/2</answer>", "<answer>4/2*5</answer>", "I think <answer>1</answer> no, <answer> 5*(4/2) </answer>",
    "4*5/2", "<answer>5×4÷2</answer>", "<answer>-(2-4*(5+2-2)/2)</answer>", "<answer>5*4/\n2</answer>",  # noqa: RUF001
])  # fmt: skip
def test_a_right_answer_is_rewarded_in_each_notation(response):
    expected = 0.0 if "+2-2" in response else 1.0  # the right value, but 2 is used three times
    assert reward(Problem("", "2 4 5 = 10", "test"), response) == expected


def test_fractions_are_exact_and_operations_have_the_usual_precedence():
    assert reward(Problem("", "1 3 3 = 1", ""), "<answer>1/3*3</answer>") == 1.0
    assert reward(Problem("", "2 3 8 = 3", ""), "<answer>8-3-2</answer>") == 1.0
    assert reward(Problem("", "2 3 12 = 2", ""), "<answer>12/3/2</answer>") == 1.0
    assert reward(Problem("", "2 3 4 = 14", ""), "<answer>2+3*4</answer>") == 1.0


@pytest.mark.parametrize("text", [
    "(" * 10_000, "-" * 100_000, "9" * 1_000_000, "1+" * 50_000 + "1", "(" * 50 + "1" + ")" * 50, "<answer>" * 20_000,
    "9" * 190 + "*" + "9" * 5, "**".join("9" * 60), "9(" * 60, "-" * 199 + "1",
])  # fmt: skip
def test_hostile_text_takes_no_time(text):
    started = time.perf_counter()
    assert reward(PROBLEM, text) == 0.0
    assert reward(PROBLEM, f"<answer>{text}</answer>") == 0.0
    assert time.perf_counter() - started < 0.5


def test_deep_expressions_are_evaluated_up_to_the_longest_length():
    assert evaluate("(" * 99 + "7" + ")" * 99) == (7, [7])
    assert evaluate("-" * 199 + "7") == (-7, [7])
    with pytest.raises(SyntaxError):
        evaluate("1)+(2")
    for text in ("-" * 200 + "7", "(1)(2)", "1_000", "1e3", "True", "1 if 1 else 2", "3j", "1.5"):
        with pytest.raises(ValueError, match=r"not an expression|not allowed"):
            evaluate(text)


def test_countdown_is_a_built_in_task_of_ten_thousand_problems():
    task = find_task(Config.of(task="countdown"))
    assert (len(task.train), len(task.held_out)) == (9000, 1000)
    assert task.reward(task.train[0], "") == 0.0
