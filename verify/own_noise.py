"""The trainer's own noise, and the canary's limit in 16 bits from it.

The noise is the distance of the trainer's values from those in twice its precision.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine_adapter import Engine
from rl import Batch, Policy
from verify.parity import twice_as_precise

# Measured with 60 classes on 72 tokens: right engines differ from the trainer by 0.5 to 1.7 times
# the noise (1 of 250 by 2.1), HRM-Text by 2.2 to 11, Cohere 2 beyond its window by 10 to 20. On 12
# tokens one of 1,000 right engines differs by more than 4.6 times. On a GPU nobody has measured it:
# an H100's records, translated, give 1.75 to 2.1 for right engines of some classes.
TIMES, TIMES_ON_GPU = 2.0, 3.0  # of the noise, at the first load, which finds wrong models
TIMES_LATER = 4.0
TOKENS, MOST_TOKENS = 72, 288  # to compare at the first load; before a load is refused
RESPONSE = 9  # new tokens of a further canary; a long prompt costs more than they do
UNMEASURED = 0.15  # nats, more than bf16 rounds


class Compared(NamedTuple):
    """Log-probabilities of the canary's tokens, (B, T)."""

    of_policy: Callable[[Policy], Tensor]  # those of another one
    trainer: Tensor
    engine: Tensor


def attempted(compute: Callable[[], Tensor]) -> Tensor | None:
    """What needs float32; None, with a notice, if a kernel takes 16 bits alone."""
    try:
        return compute()
    except Exception as error:  # of the library whose kernel it is
        print(f"notice: the trainer's own noise is NOT MEASURED, {error!r}: the limit is"
              f" {UNMEASURED} nats")
        return None


def precise_body(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `rl.row_by_row`, in twice the precision."""
    with twice_as_precise(policy.model):
        return policy.hidden(batch.inputs)[response]


def measure(
    engine: Engine, policy: Policy, both: Compared, another: Callable[[int, int], Compared],
    average: Callable[[Tensor], Tensor], first: bool,
) -> tuple[float, float]:
    """The average |trainer - engine| and its limit, in nats.

    `another` samples and compares further ones, with other prompts and so many new tokens: at the
    `first` load, and at each load whose difference exceeds the limit, because figures of few tokens
    vary. If the engine's head has 16 bits, its rounding is noise too.
    """
    times = TIMES_LATER
    if first:
        times = TIMES_ON_GPU if engine.on_gpu else TIMES
    head = replace(policy.head, dtype=getattr(torch, engine.settings["head_dtype"]))
    precise_policy = policy.with_(body=precise_body, head=head)
    differences, noises = [], []
    while True:
        differences.append((both.trainer - both.engine).abs().flatten())
        difference = average(torch.cat(differences)).item()
        precise = attempted(partial(both.of_policy, precise_policy))
        if precise is None:
            return difference, UNMEASURED
        noises.append((both.trainer - precise).abs().flatten())
        limit = times * average(torch.cat(noises)).item()
        enough = first * TOKENS if difference <= limit else MOST_TOKENS
        if sum(map(len, noises)) >= enough:
            return difference, limit
        both = another(len(noises), RESPONSE)
