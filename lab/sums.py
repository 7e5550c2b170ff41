"""Sums of two numbers below 100, as chat prompts: SmolLM2's task in the study `gpu`."""

import random
import re


def sample(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    question = f"What is {a} + {b}? Answer with the number alone."
    return question, str(a + b), f"{min(a, b)}+{max(a, b)}"


def reward(problem, response: str) -> float:
    numbers = re.findall(r"\d+", response)
    return float(numbers[-1:] == [problem.answer])
