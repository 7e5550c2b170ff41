"""The canary's limit in 16 bits: from the trainer's own noise. It imports nothing of ours.

The noise is the distance of the trainer's log-probabilities from those of its weights in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# On 72 tokens right engines of 60 classes differ from the trainer by 0.5 to 1.7 times its noise (1
# of 250 by 2.1), HRM-Text by 2.2 to 11, Cohere 2 beyond its window by 10 to 20. On 12 tokens one of
# 1,000 right ones differs by more than 4.6 times.
TIMES, TIMES_LATER = 2.0, 4.0  # at the first load, where a wrong model shows; at later ones
TOKENS, MOST_TOKENS = 72, 288  # of the first load; before an engine is refused
RESPONSE = 9  # tokens; a long prompt costs more than them
UNMEASURED = 0.15  # nats, above the rounding of bf16
SIXTEEN = torch.bfloat16, torch.float16


class InFloat32(TorchFunctionMode):
    """Every function of torch gets float32 in place of 16 bits: no second model is in memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.float() if value.dtype in SIXTEEN else value
            return torch.float32 if value in SIXTEEN else value

        return function(*tree_map(widened, args), **tree_map(widened, kwargs or {}))


def unmeasured(error: Exception) -> float:
    """The limit beside a kernel that takes 16 bits alone."""
    print(f"notice: the trainer's own noise is NOT MEASURED, {error!r}", flush=True)
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

    If the difference exceeds the limit, and at the first load always, further canaries are added,
    because of few tokens both vary. An engine's head in 16 bits is a part of the noise.
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
        except Exception as error:  # of whose kernel it is
            return difference, unmeasured(error)
        noises.append((trainers - precise).abs().flatten())
        limit = (TIMES if first else TIMES_LATER) * average(torch.cat(noises)).item()
        enough = first * TOKENS if difference <= limit else MOST_TOKENS
        if sum(map(len, noises)) >= enough:
            return difference, limit
        rollouts = engine.sample_canary(len(noises), length, RESPONSE)
