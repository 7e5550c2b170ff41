"""The formulas of an update: pure functions of tensors, without state.

Three policies, always by these names. `behavior_logprobs`: what the engine reported for the token
it sampled. `old_logprobs`: the trainer's own value before the update. `logprobs`: the trainer now,
with gradient. `mismatch = old_logprobs - behavior_logprobs` is the backend's fault; of rollouts
that were sampled with older weights it also holds the staleness. The `denominator` of the ratio is
old_logprobs or, with two policies, behavior_logprobs; `log_ratio = logprobs - denominator`.

P prompts, G group size, B = P * G rows, group-major, T target positions. Every per-token tensor is
(B, T), aligned with the targets. `mask` is 1.0 on response tokens, the end-of-sequence token
included, else 0.0. Log-probabilities are in nats. Those of masked rows are not 0, so each formula
multiplies by its mask. A surrogate's mask is 0 on rejected tokens, too.
"""

from collections.abc import Callable
from functools import partial
from math import exp
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor

MAX_LOG_WEIGHT = 20.0  # exp(20) is 5e8: beyond it a sequence weight says only "disjoint"


# ---------------------------------------------------------------------------------- advantages
def centre(scores: Tensor, group_size: int) -> Tensor:
    """R - mean_group, exactly 0 for equal scores: (B,), B = P * group_size -> (P, group_size).

    Scores within 1e-12 of the group's first are equal: sums of the same terms in another order can
    differ by so much.
    A score of NaN marks a response that is left out: it does not enter the mean and becomes 0.
    """
    groups = rearrange(scores, "(p g) -> p g", g=group_size)
    # The first counted score is subtracted before the mean, so that equal scores give exactly 0:
    # their rounded mean can differ from them by one unit in the last place.
    counted = (~groups.isnan()).int()
    first = groups.gather(1, counted.argmax(dim=1, keepdim=True))
    groups = groups - first
    groups = groups.masked_fill(groups.abs() < 1e-12, 0.0)
    return (groups - groups.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)


def group_advantages(
    scores: Tensor, group_size: int, batch: Any, divide_by_std: bool = True
) -> Tensor:
    """A = (R - mean_group) / (std_group + 1e-4), or R - mean_group without the division.

    It is exactly 0 for equal scores; the std has G - 1 in its denominator. `batch`, the rl.Batch
    before the update, is not used: every advantage function gets it, for its log-probabilities,
    mask, `extra` and rollouts.

    Shapes: scores (B,) in float64, B = P * group_size, group-major -> (B, 1) in float32.
    Source: GRPO, Shao et al. 2024, arXiv 2402.03300; Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.
    """
    centred = centre(scores, group_size)  # (P, G)
    if divide_by_std:
        degrees = rearrange(~scores.isnan(), "(p g) -> p g", g=group_size).sum(1, keepdim=True) - 1
        variance = reduce(centred.square(), "p g -> p 1", "sum") / degrees.clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-4)
    return rearrange(centred, "p g -> (p g) 1").float()


# ---------------------------------------------------------------------------------- surrogates
# Distances (low, high) of the ratio from 1; cispo: (None, the absolute cap).
Clip = tuple[float | None, float]


class TokenLoss(NamedTuple):
    """What a surrogate returns: `loss` (B, T), still to be weighted; `clipped` (B, T), bool."""

    loss: Tensor
    clipped: Tensor


def grpo(
    logprobs: Tensor, denominator: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLoss:
    """GRPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = pi / pi_old.

    `denominator` has the log-probabilities of pi_old: the trainer's own before the update or, with
    two policies, the engine's.

    Shapes: log-probabilities and mask (B, T), advantages (B, 1) or (B, T) -> (B, T).
    Source: PPO, Schulman et al. 2017, arXiv 1707.06347, as used by GRPO, arXiv 2402.03300; two
    bounds as in DAPO, Yu et al. 2025, arXiv 2503.14476.
    """
    log_ratio = (logprobs - denominator) * mask
    return _clipped(torch.exp(log_ratio), advantages, *clip)


def gspo(
    logprobs: Tensor, denominator: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLoss:
    """GSPO: the same clip on the sequence ratio s = exp(mean_t log r), written on every token.

    With weights of 1 / (B * length) and no correction, a row sums to 1/B of its sequence's loss.

    Shapes: (B, T), (B, T) -> (B, T).
    Source: Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7. `clipped` marks all tokens of a row:
    weighted, it is the share of clipped sequences, as in the paper.
    """
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    log_ratio = ((logprobs - denominator) * mask).sum(dim=1, keepdim=True) / length  # (B, 1)
    return _clipped(torch.exp(log_ratio).expand_as(mask), advantages, *clip)


def cispo(
    logprobs: Tensor, denominator: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLoss:
    """CISPO: -sg(min(r, clip_high)) A logprobs per token: no token loses its gradient.

    Shapes: (B, T), (B, T) -> (B, T). `clip_high` is the absolute cap.
    Source: MiniMax-M1, 2025, arXiv 2506.13585; cap 5 as in ScaleRL, arXiv 2510.13786.
    """
    _, cap = clip
    ratio = torch.exp((logprobs - denominator) * mask).detach()
    loss = -ratio.clamp(max=cap) * advantages * logprobs * mask
    return TokenLoss(loss, (ratio > cap) & (advantages != 0) & (mask > 0))


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's pessimistic bound; `clipped` where the bounded term is the smaller one."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped_above = (advantages > 0) & (ratio > 1 + clip_high)
    clipped_below = (advantages < 0) & (ratio < 1 - clip_low)
    clipped = clipped_above | clipped_below
    return TokenLoss(-torch.minimum(ratio * advantages, bounded * advantages), clipped)


Normalizer = Literal["token", "sequence", "constant"]


class Objective(NamedTuple):
    """A row of OBJECTIVES.

    `surrogate(logprobs, denominator, advantages, mask, clip)` returns a TokenLoss for one
    micro-batch. `advantages(scores, group_size, batch)` maps (B,) to (B, 1), or to (B, T) for an
    advantage per token. `clip` has the papers' usual bounds, unless the user gives others.
    """

    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]
    normalizer: Normalizer = "token"
    advantages: Callable[[Tensor, int, Any], Tensor] = group_advantages
    clip: Clip = (0.2, 0.2)


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(grpo),  # token mean as in DAPO; the GRPO paper's is "sequence"
    # Without GRPO's two biases.
    "dr_grpo": Objective(grpo, "constant", partial(group_advantages, divide_by_std=False)),
    "gspo": Objective(gspo, "sequence", clip=(3e-4, 4e-4)),
    "cispo": Objective(cispo, clip=(None, 5.0)),
    # REINFORCE with untruncated importance weights, -sg(r) A logprobs: CISPO without its cap.
    "reinforce": Objective(cispo, clip=(None, exp(MAX_LOG_WEIGHT))),
}


def loss_weights(mask: Tensor, normalizer: Normalizer, max_length: int) -> Tensor:
    """The weight of each token in the loss, normalised once over the B rows of an optimizer step.

    "token": 1 / tokens. "sequence": 1 / (B * length of the row). "constant": 1 / (B * max_length),
    Dr. GRPO's. B counts rows that are masked out entirely.

    Shapes: mask (B, T) -> (B, T), zero outside the mask.
    Source: token mean, DAPO, arXiv 2503.14476; constant, arXiv 2503.20783, appendix A (masked_mean
    by a constant).
    """
    num_rows = mask.shape[0]
    if normalizer == "token":
        return mask / mask.sum().clamp(min=1)
    if normalizer == "sequence":
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_rows)
    if normalizer == "constant":
        return mask / (num_rows * max_length)
    raise ValueError(f"normalizer must be token, sequence or constant, got {normalizer}")


# ---------------------------------------------------------------------------------- divergences
def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """k3 = expm1(d) - d, d = other - logprobs: a KL(pi || other) that is never negative.

    It is unbiased on tokens that are drawn from pi.

    Shapes: (B, T), (B, T) -> (B, T).
    Source: Schulman 2020, "Approximating KL divergence" (note).
    """
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference


def kl_loss(
    logprobs: Tensor, denominator: Tensor, ref_logprobs: Tensor, counted: Tensor, coef: float,
    gradient: str,
) -> Tensor:
    """coef * k3(pi, ref) of each token that the loss's mean counts, else 0.

    The gradient of k3 on tokens drawn from pi is that of KL(ref || pi); with `gradient` "exact" k3
    is multiplied by the ratio, and the gradient is that of KL(pi || ref).

    Shapes: (B, T), `counted` bool -> (B, T).
    """
    # A token that is not counted can have k3 = inf, and 0 * inf is nan.
    k3 = kl_k3(logprobs * counted, ref_logprobs * counted)
    ratio = 1.0
    if gradient == "exact":
        ratio = ((logprobs - denominator) * counted).exp()
    return coef * ratio * k3


# ---------------------------------------------------------------------- corrections of a mismatch
def token_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho = exp(old - behavior) of each token, exactly 1 where both are equal.

    Shapes: (B, T), (B, T), (B, T) -> (B, T).
    Source: Yao et al. 2025 (off-policy RL note).
    """
    mismatch = (old_logprobs - behavior_logprobs) * mask
    return mismatch.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def row_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp sum_t log rho, a response's ratio, on each of its tokens. Shapes: as token_ratio.

    Source: Liu et al. 2025, "When Speed Kills Stability".
    """
    mismatch = ((old_logprobs - behavior_logprobs) * mask).sum(dim=1, keepdim=True)  # (B, 1)
    return mismatch.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp().expand_as(mask)


def truncated(ratio: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: sg(min(ratio, cap)), not renormalised, 0 outside the mask."""
    return ratio.detach().clamp(max=cap) * mask


# (old_logprobs, behavior_logprobs, mask, cap) -> weights (B, T), 0 outside the mask, else positive.
CORRECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "off": lambda old, behavior, mask, cap: mask,
    "token": lambda old, behavior, mask, cap: truncated(
        token_ratio(old, behavior, mask), mask, cap),
    "sequence": lambda old, behavior, mask, cap: truncated(
        row_ratio(old, behavior, mask), mask, cap),
}
