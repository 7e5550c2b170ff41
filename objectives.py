"""Objectives: log-probabilities and advantages in, loss terms and diagnostics out. Pure functions, no state.

Three policies, always by these names. `behavior_logprobs`: what the engine reported for the token it sampled.
`old_logprobs`: the trainer's own value at the rollout's weights. `logprobs`: the trainer now, with grad.
`mismatch = old_logprobs - behavior_logprobs` is the backend's fault, `log_ratio = logprobs - old_logprobs` is
staleness. The two are never mixed in one number.

Every per-token tensor is (B, T), rows group-major, aligned with the targets; `mask` is 1.0 on response tokens, the
end-of-sequence token included, else 0.0. Log-probabilities are in nats.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor

# exp(20) is 5e8: beyond it a sequence weight says only "disjoint" (verl clamps at the same value).
MAX_LOG_WEIGHT = 20.0


def group_advantages(rewards: Tensor, group_size: int, divide_by_std: bool = True) -> Tensor:
    """A = (R - mean_group) / (std_group + 1e-4), or R - mean_group without the division; exactly 0 for equal rewards.

    Shapes: rewards (B,), B = P * group_size, group-major -> (B,).
    Source: GRPO, Shao et al. 2024, arXiv 2402.03300 (unbiased std); Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.
    TRL adds 1e-4 too, verl 1e-6.
    """
    groups = rearrange(rewards, "(p g) -> p g", g=group_size)
    groups = groups - groups[:, :1]  # else the rounded mean of equal rewards of 0.1 differs from them by an ulp
    centred = groups - reduce(groups, "p g -> p 1", "mean")
    if divide_by_std:
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    return rearrange(centred, "p g -> (p g)")


# ------------------------------------------------------------------------------------------------ surrogates
class TokenLoss(NamedTuple):
    """What a surrogate returns: `loss` (B, T), to be weighted and summed; `clipped` (B, T) bool, where a clip binds."""

    loss: Tensor
    clipped: Tensor


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """GRPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(logprobs - old_logprobs).

    Shapes: (B, T), (B, T), (B,), (B, T) -> (B, T).
    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, as used by GRPO, arXiv 2402.03300; two bounds as in DAPO,
    Yu et al. 2025, arXiv 2503.14476. verl clips a second time where A < 0: the loss is at most -3 A ("dual clip").
    """
    return _clipped(torch.exp((logprobs - old_logprobs) * mask), advantages[:, None], clip_low, clip_high)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """GSPO: the same clip on the sequence ratio s = exp(mean_t log r), written on every token of its row.

    Shapes: (B, T), (B, T), (B,), (B, T) -> (B, T); weighted by 1 / (B * length) the row sums to one sequence's loss.
    Source: Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7. `clipped` marks all tokens of a row: weighted, it is the
    share of clipped sequences, as in the paper; verl reports the share of tokens.
    """
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    sequence_ratio = torch.exp(((logprobs - old_logprobs) * mask).sum(dim=1, keepdim=True) / length)
    return _clipped(sequence_ratio.expand_as(mask), advantages[:, None], clip_low, clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """CISPO: -sg(min(r, clip_high)) A logprobs per token: the weight is capped, no token loses its gradient.

    Shapes: (B, T), (B, T), (B,), (B, T) -> (B, T). `clip_high` is the absolute cap; `clip_low` is unused.
    Source: MiniMax-M1, 2025, arXiv 2506.13585; cap 5 as in ScaleRL, arXiv 2510.13786. `clipped` counts A < 0 too; TRL's
    clip rate counts A > 0 only.
    """
    ratio = torch.exp((logprobs - old_logprobs) * mask).detach()
    loss = -ratio.clamp(max=clip_high) * advantages[:, None] * logprobs * mask
    return TokenLoss(loss, (ratio > clip_high) & (advantages[:, None] != 0))


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's pessimistic bound; `clipped` where the bounded term is the smaller one, so that the gradient is zero."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return TokenLoss(-torch.minimum(ratio * advantages, bounded * advantages), clipped)


Normalizer = Literal["token", "sequence", "constant"]


class Objective(NamedTuple):
    """An objective: its surrogate, how tokens are averaged, whether A is divided by the std, its usual clip bounds."""

    surrogate: Callable[..., TokenLoss]
    normalizer: Normalizer
    divide_by_std: bool
    clip: tuple[float, float]  # (low, high): the papers' usual values, used unless the user gives others


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(grpo, "token", True, (0.2, 0.2)),  # token mean as in DAPO; the GRPO paper's is "sequence"
    "dr_grpo": Objective(grpo, "constant", False, (0.2, 0.2)),  # GRPO's surrogate without its two biases
    "gspo": Objective(gspo, "sequence", True, (3e-4, 4e-4)),
    "cispo": Objective(cispo, "token", True, (0.0, 5.0)),
}


def loss_weights(mask: Tensor, normalizer: Normalizer, max_length: int) -> Tensor:
    """The weight of each token in the loss, counted once over the whole optimizer batch, so micro-batches only sum.

    "token": 1 / tokens. "sequence": 1 / (B * length of the row). "constant": 1 / (B * max_length), Dr. GRPO's. B counts
    rows that are masked out entirely.

    Shapes: mask (B, T) -> (B, T), zero outside the mask.
    Source: token mean, DAPO, arXiv 2503.14476; constant, arXiv 2503.20783, appendix A (masked_mean by a constant).
    TRL's "grpo" is "sequence" here, its "dapo" and "bnpo" are "token". B has masked rows in TRL too, not in verl.
    """
    num_rows = mask.shape[0]
    if normalizer == "token":
        return mask / mask.sum().clamp(min=1)
    if normalizer == "sequence":
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_rows)
    return mask / (num_rows * max_length)


# ------------------------------------------------------------------------------------------------ divergences
def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """k3 = expm1(d) - d, d = other - logprobs: unbiased for KL(pi || other) on tokens drawn from pi, never negative.

    Shapes: (B, T), (B, T) -> (B, T).
    Source: Schulman 2020, "Approximating KL divergence" (note).
    """
    log_ratio = other_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


# ------------------------------------------------------------------------------------------------ mismatch and TIS
TisKind = Literal["off", "token", "sequence", "masked"]


class TisWeights(NamedTuple):
    """`weights` (B, T), without gradient, multiply the token losses; `cut` (B, T) bool, where cap or floor cut them."""

    weights: Tensor
    cut: Tensor


def tis_weights(
    kind: TisKind, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float, floor: float
) -> TisWeights:
    """sg(w) per token for what is left of the backend mismatch, rho = exp(old_logprobs - behavior_logprobs).

    "token": min(rho, cap). "sequence": min(exp sum_t log rho, cap). "masked": rho inside [floor, cap], else 0, without
    renormalising. "off": 1.

    Shapes: (B, T), (B, T), (B, T) -> (B, T).
    Source: Yao et al. 2025 (off-policy RL note), verl and SkyRL for the sequence form, IcePop for the masked one.
    """
    mismatch = ((old_logprobs - behavior_logprobs) * mask).detach()
    if kind == "off":
        return TisWeights(torch.ones_like(mask), torch.zeros_like(mask, dtype=torch.bool))
    if kind == "sequence":
        log_weight = mismatch.sum(dim=1, keepdim=True).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).expand_as(mask)
    else:
        log_weight = mismatch
    weights = torch.exp(log_weight)
    if kind == "masked":
        outside = (weights < floor) | (weights > cap)
        return TisWeights(weights.masked_fill(outside, 0.0), outside)
    return TisWeights(weights.clamp(max=cap), weights > cap)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """ESS = (sum w)^2 / (n sum w^2) over the masked tokens; 1 is perfect, 1/n is one token carrying everything.

    Shapes: (B, T), (B, T) -> ().
    Source: Kish 1965.
    """
    weights = weights.double() * mask
    return weights.sum() ** 2 / (mask.sum() * (weights**2).sum()).clamp(min=torch.finfo(torch.float64).tiny)


def mismatch_metrics(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's on the same tokens and (meant) the same weights.

    mismatch = old - behavior; `mismatch_kl` is its k3 = expm1(d) - d, the estimate of KL(behavior || old); `ess` is the
    effective sample size of the untruncated weights exp(mismatch).

    Shapes: (B, T), (B, T), (B, T) -> floats. Units: nats.
    Raises: FloatingPointError if a value on a response token is not finite.
    """
    response = mask > 0
    mismatch = (old_logprobs - behavior_logprobs)[response].double()
    if not torch.isfinite(mismatch).all():
        num_bad = (~torch.isfinite(mismatch)).sum()
        raise FloatingPointError(f"{num_bad} of {len(mismatch)} log-probabilities are not finite")
    weights = mismatch.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    return {
        "mismatch_abs_mean": mismatch.abs().mean().item(),
        "mismatch_max": mismatch.abs().max().item(),
        "mismatch_kl": (torch.expm1(mismatch) - mismatch).mean().item(),
        "ess": effective_sample_size(weights, torch.ones_like(weights)).item(),
    }
