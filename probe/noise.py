"""The noise floor: the trainer's own values, computed along a second numerical path."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from report.metrics import of_mismatch
from rl import Policy, in_micro_batches
from verify.own_noise import Widened

KEY_BLOCK = 16  # keys per block; small, so that short sequences have several blocks too


def blockwise_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *,
    scaling: float, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """softmax(cap(scaling q k^T) + mask) v, with other rounding errors than transformers' own.

    The query is scaled before the product with the keys. Weights times values are summed in fp32 by
    blocks of keys. Soft-capping, cap(z) = softcap tanh(z / softcap), is computed with a sigmoid:
    its rounding error is relative to the cap, not to z, as large as that of vLLM's CPU kernel.
    Scores and weights are rounded to the model's dtype.

    Shapes: query (B, h, T, D), key and value (B, h_kv, S, D), mask (B, 1, T, S), added to the
    scores -> (B, T, h, D).
    """
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
                  for each in (key, value))
    scores = (query * scaling @ key.mT).float()  # (B, h, T, S)
    if softcap is not None:
        scores = softcap * (2 * torch.sigmoid(2 * scores / softcap) - 1)
    weights = torch.softmax(scores + mask, dim=-1).to(query.dtype).float()
    blocks = zip(weights.split(KEY_BLOCK, dim=-1), value.float().split(KEY_BLOCK, dim=2),
                 strict=True)
    attended = sum(some @ values for some, values in blocks).to(query.dtype)  # (B, h, T, D)
    return attended.transpose(1, 2).contiguous(), None


@contextmanager
def rounded_otherwise(policy: Policy) -> Iterator[None]:
    """The model with `blockwise_attention`; recurrent layers scan in half the chunks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("blockwise", blockwise_attention)
    AttentionMaskInterface.register("blockwise", eager_mask)
    usual = policy.model.config._attn_implementation
    chunk_sizes = {layer: layer.chunk_size for layer in policy.model.modules()
                   if hasattr(layer, "chunk_size")}
    policy.model.set_attn_implementation("blockwise")
    for layer, size in chunk_sizes.items():
        layer.chunk_size = max(1, size // 2)
    try:
        yield
    finally:
        policy.model.set_attn_implementation(usual)
        for layer, size in chunk_sizes.items():
            layer.chunk_size = size


@contextmanager
def twice_as_precise(policy: Policy) -> Iterator[None]:
    """The body in twice the precision of the policy's dtype.

    Experts run eagerly: torch has no grouped float64 product.
    """
    usual = policy.model.get_experts_implementation()
    policy.model.set_experts_implementation("eager")
    try:
        with Widened(torch.float64 if policy.model.dtype == torch.float32 else torch.float32):
            yield
    finally:
        policy.model.set_experts_implementation(usual)


def observe_self_noise(policy: Policy, config: Any, every: int, step: Any) -> dict[str, float]:
    """Mean difference of the log-probabilities to those along the second path, with smaller
    micro-batches, in nats: the mismatch that rounding alone would cause. It is measured with the
    updated weights, once in `every` steps, the first included.
    """
    batch = step.batch
    # --mask-truncated may leave no token.
    if (step.metrics["step"] - 1) % every or not batch.mask.any():
        return {}
    has_signal = batch.advantages.any(dim=1).cpu()

    def recomputed(micro_batch_tokens: int) -> Tensor:
        minibatches = batch.minibatches(has_signal, config.num_minibatches, micro_batch_tokens)
        return in_micro_batches(policy.score, batch, minibatches)["logprobs"]

    usual = recomputed(config.micro_batch_tokens)
    with rounded_otherwise(policy):
        second = recomputed(-(-config.micro_batch_tokens // 3))
    difference = of_mismatch(usual, second, batch.mask)["mismatch_abs_mean"]
    return {"self_noise_abs_mean": difference}
