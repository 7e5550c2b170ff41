"""A task for measurements of time and memory: prompts of 128 tokens, random rewards.

No answer is right, and no group is flat.
"""

import random


def sample(rng: random.Random) -> tuple[str, str]:
    return "".join(rng.choices("0123456789", k=127)), "none"  # <bos> is the first token


def reward(problem, response: str) -> float:
    return float(random.random() < 0.5)
