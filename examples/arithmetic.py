"""Sums of two numbers up to 20, drawn by reasoning-gym.

A task file: a `sample` and a `reward`. The problems are those of reasoning-gym's basic_arithmetic
with two terms, cut to small numbers for a model of 135 million parameters. With the first sentence
all prompts begin with the same 32 tokens, the smallest KV block on a CPU: so a prefix cache that
outlives a weight load reaches every prompt, as a long system prompt does on a GPU.
"""

import random

from reasoning_gym import create_dataset

from tasks.answers import last_number

LARGEST = 20  # 441 problems; SmolLM2-135M-Instruct (4-bit rounded) solves 0.43 of them greedily
SIZE = 2**31 - 1  # problems are computed when they are asked for
POOL = create_dataset("basic_arithmetic", size=SIZE, seed=0, min_terms=2, max_terms=2, min_digits=2,
                      max_digits=2, operators=["+"], allow_parentheses=False)


def sample(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer, and its family.

    The family is the unordered pair, so 17 + 3 is not in training while 3 + 17 is held out.
    """
    while True:
        problem = POOL[rng.randrange(SIZE)]
        left, _, right = problem["metadata"]["expression"].split()
        if max(int(left), int(right)) <= LARGEST:
            question = f"Think about the next problem. {problem['question']} Give only the result."
            return question, problem["answer"], " ".join(sorted((left, right)))


def reward(problem, response: str) -> float:
    """1.0 if the last number of the response equals the answer ("07" and "7.0" are 7), else 0.0."""
    return float(last_number(response) == int(problem.answer))
