"""The task `digits` with answers of 64 to 80 digits: only there do the ratios of responses grow.

`python -m examples.long_digits FOLDER SEED` writes its model, taught as that of `digits`:

    python train.py --model FOLDER --task examples/long_digits.py --max-new-tokens 84
"""

import random
import sys

from examples.toys import TOYS, share_of_digits, teach, toy_config, toy_tokenizer
from tasks import Problem

SHORTEST, LONGEST = 64, 80
# Few, so that each comes back after some steps: vLLM has cached its prompt by then.
NUM_PROBLEMS = 80


def problem(rng: random.Random) -> Problem:
    """The larger digit at each place of two numbers, in fields of LONGEST digits."""
    length = rng.randint(SHORTEST, LONGEST)
    a, b = ("".join(rng.choices("0123456789", k=length)) for _ in range(2))
    question = f"{a:=<{LONGEST}}+{b:=<{LONGEST}}="
    return Problem(question, "".join(map(max, a, b)), f"{a}+{b}")


def problems(seed: str, count: int) -> list[Problem]:
    rng = random.Random(seed)
    return [problem(rng) for _ in range(count)]


TRAINED_ON = problems("task", NUM_PROBLEMS)


def sample(rng: random.Random) -> tuple[str, str]:
    chosen = rng.choice(TRAINED_ON)
    return chosen.question, chosen.answer


def reward(problem: Problem, response: str) -> float:
    return share_of_digits(problem, response)


def write_model(folder: str, seed: int, steps: int = TOYS["digits"].steps) -> None:
    """A model that writes the smaller digit at 8 of 10 places; 1.5 minutes of one CPU core."""
    pool = lambda seed: problems(f"teacher {seed}", 10_000)  # noqa: E731
    toy = TOYS["digits"]._replace(pool=pool, steps=steps)
    config = toy_config("digits")
    config.max_position_embeddings = 256
    teach(toy, config, seed).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    write_model(sys.argv[1], int(sys.argv[2]))
