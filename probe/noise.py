"""The noise floor: how far the trainer is from itself along another path of the same arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from objectives import mismatch_metrics
from rl import Batch, Policy, UpdateOptions, frozen_logprobs

KEY_BLOCK = 16  # keys summed at once by blockwise_attention; short sequences have several blocks too


def blockwise_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """softmax(cap(scaling q k^T) + mask) v, rounded neither as in sdpa nor as in eager: for measuring a noise floor.

    The query is scaled before the product with the keys. Weights times values are summed in fp32 by blocks of keys.
    Soft-capping, cap(z) = softcap tanh(z / softcap), is computed with a sigmoid: its rounding error is relative to the
    cap, not to z, as large as that of vLLM's CPU kernel. Scores and weights are rounded to the model's dtype.

    Shapes: query (B, h, T, D), key and value (B, h_kv, S, D), mask (B, 1, T, S), added to the scores -> (B, T, h, D).
    """
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = (query * scaling @ key.mT).float()  # (B, h, T, S)
    if softcap is not None:
        scores = softcap * (2 * torch.sigmoid(2 * scores / softcap) - 1)
    weights = torch.softmax(scores + mask, dim=-1).to(query.dtype).float()
    blocks = zip(weights.split(KEY_BLOCK, dim=-1), value.float().split(KEY_BLOCK, dim=2), strict=True)
    return sum(some @ values for some, values in blocks).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("blockwise", blockwise_attention)
AttentionMaskInterface.register("blockwise", eager_mask)


@contextmanager
def rounded_otherwise(policy: Policy) -> Iterator[None]:
    """The body with `blockwise_attention` and, where layers are recurrent, scans in chunks of half the size."""
    usual = policy.model.config._attn_implementation
    scans = {each: each.chunk_size for each in policy.model.modules() if hasattr(each, "chunk_size")}
    policy.model.set_attn_implementation("blockwise")
    for layer, size in scans.items():
        layer.chunk_size = max(1, size // 2)
    try:
        yield
    finally:
        policy.model.set_attn_implementation(usual)
        for layer, size in scans.items():
            layer.chunk_size = size


def self_noise(policy: Policy, batch: Batch, options: UpdateOptions) -> Tensor:
    """old_logprobs less the same with `blockwise_attention` and smaller micro-batches: the noise floor of a mismatch,
    (B, T)."""
    smaller = replace(options, micro_batch_tokens=-(-options.micro_batch_tokens // 3))
    with rounded_otherwise(policy):
        other, _ = frozen_logprobs(policy, batch, smaller)
    unsure = batch.old_logprobs < -0.01  # of a sure token both paths may round to the same value
    check_other_path(policy, batch.old_logprobs[unsure], other[unsure])
    return batch.old_logprobs - other


def check_other_path(policy: Policy, ours: Tensor, other: Tensor) -> None:
    """Raises: RuntimeError if both paths of a 16-bit model gave the same values at all of N >= 16 tokens: (N, ...)."""
    if policy.model.dtype != torch.float32 and len(ours) >= 16 and ours.any() and torch.equal(ours, other):
        raise RuntimeError("the noise floor must be above 0 in 16 bits, its second path computes the same as the first")


def measure_self_noise(policy: Policy, batch: Batch, options: UpdateOptions) -> dict[str, float]:
    """What the mismatch would be if the trainer itself had sampled, along another path of its arithmetic."""
    noise = self_noise(policy, batch, options)
    metrics = mismatch_metrics(noise, torch.zeros_like(noise), batch.mask)
    return {"self_noise_abs_mean": metrics["mismatch_abs_mean"], "self_noise_max": metrics["mismatch_max"]}
