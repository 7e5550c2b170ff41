"""The problems of examples/arithmetic.py after an instruction that is the same for all of them.

With it all prompts begin with the same 32 tokens, the smallest KV block on a CPU. So a prefix cache
that outlives a weight load reaches every prompt, as a long system prompt does on a GPU.
"""

import random

from examples.arithmetic import reward
from examples.arithmetic import sample as sample_alone

__all__ = ["reward", "sample"]


def sample(rng: random.Random) -> tuple[str, str, str]:
    """As examples.arithmetic.sample, with the instruction before the question."""
    question, answer, family = sample_alone(rng)
    return f"You are good at mental arithmetic. {question}", answer, family
