"""Whether the trainer would have given the engine's greedy answers."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine_adapter import Rollout
from rl import Chunk, Policy, at_targets, in_micro_batches, make_batch


def likeliest(chunk: Chunk) -> dict[str, Tensor]:
    """`agrees`: 1.0 where the target is a likeliest token, else 0. An rl.TokenMetric."""
    agrees = at_targets(chunk.logits, chunk.targets) == chunk.logits.amax(dim=-1)
    return {"agrees": agrees.float()}


def agreement(policy: Policy, rollouts: list[Rollout], micro_batch_tokens: int) -> float:
    """The share of rollouts whose every token is the trainer's likeliest one."""
    batch = make_batch(rollouts, policy.device)
    micro_batches = policy.pack(batch, torch.arange(len(rollouts)), micro_batch_tokens)
    at_1 = policy.with_(head=replace(policy.head, temperature=1.0))
    score = partial(at_1.token_metrics, metrics=(likeliest,))
    agrees = in_micro_batches(score, batch, [micro_batches])["agrees"]  # (B, T)
    return (agrees == batch.mask).all(dim=1).float().mean().item()
