"""The canary's limit in 16 bits, from the trainer's own noise. It imports nothing of ours.

The noise is the distance of the trainer's log-probabilities from those of its weights in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# Measured with 60 classes on 72 tokens: right engines differ from the trainer by 0.5 to 1.7 times
# the noise (1 of 250 by 2.1), HRM-Text by 2.2 to 11, Cohere 2 beyond its window by 10 to 20. On 12
# tokens one of 1,000 right engines differs by more than 4.6 times.
TIMES, TIMES_LATER = 2.0, 4.0  # of the noise: at the first load, which finds wrong models; later
TOKENS, MOST_TOKENS = 72, 288  # to compare at the first load; before a load is refused
RESPONSE = 9  # new tokens of a further canary; a long prompt costs more than they do
UNMEASURED = 0.15  # nats, more than bf16 rounds
SIXTEEN = torch.bfloat16, torch.float16


class InFloat32(TorchFunctionMode):
    """Each function of torch gets 16-bit arguments as float32: no second model is in memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.float() if value.dtype in SIXTEEN else value
            return torch.float32 if value in SIXTEEN else value

        return function(*tree_map(widened, args), **tree_map(widened, kwargs or {}))


def unmeasured(error: Exception) -> float:
    """The limit if a kernel takes 16 bits alone, with a notice."""
    print(f"notice: the trainer's own noise is NOT MEASURED, {error!r}: the limit is {UNMEASURED}"
          " nats", flush=True)
    return UNMEASURED


def precise_body(policy: Any, batch: Any, response: Tensor) -> Tensor:
    """As `rl.plain_body`, in float32."""
    with InFloat32():
        return policy.hidden(batch.inputs)[response]


def measure(
    engine: Any, trainer_logprobs: Any, rollouts: list[Any], length: int,
    average: Callable[[Tensor], Tensor],
) -> tuple[float, float]:
    """The average |trainer - engine| and its limit, in nats, of the canary's rollouts.

    The first load, and each load whose difference exceeds the limit, samples further canaries,
    because figures of few tokens vary. If the engine's head has 16 bits, its rounding is noise too.
    """
    first = engine.weight_version == 1
    fp32_head = engine.settings["head_dtype"] == "float32"
    differences, noises = [], []
    while True:
        of_trainer, trainers, engines = engine.both_sides(trainer_logprobs, rollouts)
        differences.append((trainers - engines).abs().flatten())
        difference = average(torch.cat(differences)).item()
        try:
            precise = torch.tensor(of_trainer(precise_body, fp32_head=fp32_head))
        except Exception as error:  # of the library whose kernel it is
            return difference, unmeasured(error)
        noises.append((trainers - precise).abs().flatten())
        limit = (TIMES if first else TIMES_LATER) * average(torch.cat(noises)).item()
        enough = first * TOKENS if difference <= limit else MOST_TOKENS
        if sum(map(len, noises)) >= enough:
            return difference, limit
        rollouts = engine.sample_canary(len(noises), length, RESPONSE)
