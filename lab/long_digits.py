"""The task `digits` with answers of 64 to 80 digits: only there do the ratios of responses grow.

The study `corrections` writes its model, which is taught as that of `digits` (`write_model`).
"""

import random
from pathlib import Path

from examples.toys import TOYS, larger_digits, share_of_digits, teach, toy_config, toy_tokenizer
from models import write_folder
from tasks import Problem

LENGTHS = dict(shortest=64, longest=80, field=80)
# 80 problems, so that each comes back after some steps: vLLM has cached its prompt by then.
TRAINED_ON = larger_digits(random.Random("task"), 80, **LENGTHS)


def sample(rng: random.Random) -> tuple[str, str]:
    chosen = rng.choice(TRAINED_ON)
    return chosen.question, chosen.answer


def reward(problem: Problem, response: str) -> float:
    return share_of_digits(problem, response)


def write_model(folder: Path, seed: int) -> None:
    """A model that writes the smaller digit at 8 of 10 places; 1.5 minutes of one CPU core."""
    toy = TOYS["digits"]._replace(pool=lambda seed: larger_digits(
        random.Random(f"teacher {seed}"), 10_000, **LENGTHS))
    config = toy_config("digits")
    config.max_position_embeddings = 256
    write_folder(teach(toy, config, seed), toy_tokenizer(), folder)
