"""A third opinion for a failed canary: transformers' own decode, without our code."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from rl import Batch, Policy


def decoded_body(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `rl.row_by_row`, with transformers' cache: the prompts in one pass, then token by token.

    The prompts have one length. A failed canary compares the two before it blames vLLM.
    """
    cuts = [*range(int(batch.prompt_lengths[0]), batch.inputs.shape[1])]
    cache, states = {}, []  # Mamba 2 has another name for its cache
    for ids in batch.inputs.tensor_split(cuts, dim=1):
        cache = dict(policy.model.base_model(input_ids=ids, use_cache=True, **cache))
        states.append(cache.pop("last_hidden_state"))
        if not cache:
            raise ValueError(f"{type(policy.model).__name__} returns no cache")
    return torch.cat(states, dim=1)[response]


def disagreement(
    by_body: Callable[..., Tensor], trainer: Tensor, engine: Tensor,
    average: Callable[[Tensor], Tensor], tolerance: float,
) -> str | None:
    """What to say if the trainer's forward pass differs from its own decode, by nats; else None.

    `by_body` computes the trainer's log-probabilities by another body. Transformers may not decode
    the model so: then nothing is known.
    """
    with suppress(Exception):
        decoded = by_body(body=decoded_body)
        own, apart = (average((decoded - side).abs()).item() for side in (trainer, engine))
        if own > tolerance:
            return ("the trainer disagrees with itself: its forward pass differs by"
                    f" {own:.2e} nats from transformers' decode with a cache, the engine by"
                    f" {apart:.2e}; try another version of transformers, or the kernels that its"
                    " log misses")
    return None
