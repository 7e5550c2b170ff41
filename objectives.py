"""What one update computes: options and log-probabilities in, loss and diagnostics out.

Pure functions, no state.

Three policies, always by these names. `behavior_logprobs`: what the engine reported for the token
it sampled. `old_logprobs`: the trainer's own value before the update. `logprobs`: the trainer now,
with gradient. `mismatch = old_logprobs - behavior_logprobs` is the backend's fault; of rollouts
that were sampled with older weights it also holds the staleness. The `denominator` of the ratio is
old_logprobs or, with two policies, behavior_logprobs; `log_ratio = logprobs - denominator`.

P prompts, G group size, B = P * G rows, group-major, T target positions. Every per-token tensor is
(B, T), aligned with the targets. `mask` is 1.0 on response tokens, the end-of-sequence token
included, else 0.0. Log-probabilities are in nats. Those of masked rows and of rejected tokens are
not 0, so each formula multiplies by its mask. The mask of a surrogate is 0 on rejected tokens, too.
"""

from collections.abc import Callable
from functools import partial
from math import exp
from typing import Literal, NamedTuple, Protocol

import torch
from einops import rearrange, reduce
from torch import Tensor

# exp(20) is 5e8: beyond it a sequence weight says only "disjoint" (verl clamps at the same value).
MAX_LOG_WEIGHT = 20.0
# MLPerf Training 6.1 and NeMo RL reject a sequence whose geometric mean ratio is outside.
NEAR_1 = 0.999, 1.002


# ---------------------------------------------------------------------------------- advantages
class TokenLogprobs(Protocol):
    """What advantages may use of a batch, (B, T) each: its log-probabilities before the update."""

    mask: Tensor
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    ref_logprobs: Tensor | None  # with a reference policy only


def centre(scores: Tensor, group_size: int) -> Tensor:
    """R - mean_group, exactly 0 for equal scores: (B,), B = P * group_size -> (P, group_size).

    A score of NaN marks a response that is left out: it does not enter the mean and becomes 0.
    """
    groups = rearrange(scores, "(p g) -> p g", g=group_size)
    # The first score is subtracted before the mean, so that equal scores give exactly 0: their
    # rounded mean can differ from them by one unit in the last place.
    counted = (~groups.isnan()).int()
    groups = groups - groups.gather(1, counted.argmax(dim=1, keepdim=True))
    return (groups - groups.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)


def group_advantages(
    scores: Tensor, group_size: int, batch: TokenLogprobs, divide_by_std: bool = True
) -> Tensor:
    """A = (R - mean_group) / (std_group + 1e-4), or R - mean_group without the division.

    It is exactly 0 for equal scores. `batch` is not used: every row of OBJECTIVES gets it.

    Shapes: scores (B,) in float64, B = P * group_size, group-major -> (B, 1) in float32.
    Source: GRPO, Shao et al. 2024, arXiv 2402.03300; Dr. GRPO, Liu et al. 2025, arXiv 2503.20783.
    The unbiased std and 1e-4 are TRL's; verl adds 1e-6.
    """
    centred = centre(scores, group_size)  # (P, G)
    if divide_by_std:
        others = rearrange(~scores.isnan(), "(p g) -> p g", g=group_size).sum(1, keepdim=True) - 1
        variance = reduce(centred.square(), "p g -> p 1", "sum") / others.clamp(min=1)
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
    bounds as in DAPO, Yu et al. 2025, arXiv 2503.14476. verl clips a second time where A < 0: the
    loss is at most -3 A ("dual clip").
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
    weighted, it is the share of clipped sequences, as in the paper; verl reports the share of
    tokens.
    """
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    log_ratio = ((logprobs - denominator) * mask).sum(dim=1, keepdim=True) / length  # (B, 1)
    return _clipped(torch.exp(log_ratio).expand_as(mask), advantages, *clip)


def cispo(
    logprobs: Tensor, denominator: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLoss:
    """CISPO: -sg(min(r, clip_high)) A logprobs per token: no token loses its gradient.

    Shapes: (B, T), (B, T) -> (B, T). `clip_high` is the absolute cap.
    Source: MiniMax-M1, 2025, arXiv 2506.13585; cap 5 as in ScaleRL, arXiv 2510.13786. `clipped`
    counts A < 0 too; TRL's clip rate counts A > 0 only.
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
    micro-batch. Its `mask` leaves rejected tokens out. `advantages(scores, group_size, batch)`
    maps (B,) to (B, 1), or to (B, T) for an advantage per token. `clip` has the papers' usual
    bounds, unless the user gives others. `old_policy` is the only value of --old-policy that is
    allowed with the row; None allows both. No row here sets it or `needs_reference`: forks do.
    """

    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]
    normalizer: Normalizer = "token"
    advantages: Callable[[Tensor, int, TokenLogprobs], Tensor] = group_advantages
    clip: Clip = (0.2, 0.2)
    needs_reference: bool = False  # whether its advantages use `batch.ref_logprobs`
    old_policy: Literal["recompute", "rollout"] | None = None


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
    by a constant). TRL's "grpo" is "sequence" here, its "dapo" and "bnpo" are "token". B has masked
    rows in TRL too, not in verl.
    """
    num_rows = mask.shape[0]
    if normalizer == "token":
        return mask / mask.sum().clamp(min=1)
    if normalizer == "sequence":
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_rows)
    return mask / (num_rows * max_length)


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
# (old_logprobs, behavior_logprobs, mask) -> (B, T). Where the first two are equal a ratio is
# exactly 1 and a divergence exactly 0. Values outside the mask do not count.
Statistic = Callable[[Tensor, Tensor, Tensor], Tensor]


def token_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho = exp(old - behavior) of each token.

    Source: as a weight, Yao et al. 2025 (off-policy RL note); as a rejection, IcePop, arXiv
    2510.18855. As in TRL and SkyRL; verl's `token_k1` applies its bounds to 1 / rho.
    """
    mismatch = (old_logprobs - behavior_logprobs) * mask
    return mismatch.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def row_ratio(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, geometric: bool = False
) -> Tensor:
    """exp sum_t log rho, a response's ratio, on each of its tokens; exp mean_t if `geometric`.

    Source: Liu et al. 2025, "When Speed Kills Stability"; as in TRL (no geometric mean) and verl.
    SkyRL sums over the tokens that its token rejection has kept.
    """
    mismatch = ((old_logprobs - behavior_logprobs) * mask).sum(dim=1, keepdim=True)  # (B, 1)
    if geometric:
        mismatch = mismatch / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mismatch.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp().expand_as(mask)


def token_k3(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The divergence k3 of each token, of KL(behavior || old)."""
    return kl_k3(behavior_logprobs, old_logprobs)


def token_tv(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The divergence |p_old - p_behavior| of each token."""
    return (old_logprobs.exp() - behavior_logprobs.exp()).abs()


class Rejection(NamedTuple):
    """A token is rejected if its statistic is outside the bounds; its row too, if `whole_rows`.

    Bounds are of a ratio, or -inf and the largest divergence.
    """

    statistic: Statistic
    bounds: tuple[float, float]
    whole_rows: bool = False
    mean: Literal["all", "kept"] = "all"  # tokens that the loss's mean counts, as in the source

    def rejects(self, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
        """(B, T), (B, T), mask (B, T) -> (B, T), bool."""
        statistic = self.statistic(old_logprobs, behavior_logprobs, mask)
        outside = ((statistic < self.bounds[0]) | (statistic > self.bounds[1])) & (mask > 0)
        if self.whole_rows:
            outside = outside.any(dim=1, keepdim=True) & (mask > 0)
        return outside


NO_REJECTION = Rejection(token_ratio, (0.0, torch.inf))
WEIGHTS: dict[str, Statistic] = {"token": token_ratio, "sequence": row_ratio}
REJECTIONS: dict[str, Rejection] = {
    # IcePop's mask and weight: bounds 0.5 and 5, with --tis token --tis-cap 5
    "token": Rejection(token_ratio, (0.5, 2.0)),
    # The mean over kept tokens is that of MIS and verl; TRL and SkyRL count all.
    "sequence": Rejection(row_ratio, (0.5, 2.0), whole_rows=True, mean="kept"),
    # SkyRL; verl's preset: mean over kept tokens, bounds 0.999 and 1.001.
    "geometric": Rejection(partial(row_ratio, geometric=True), (0.99, 1.01), whole_rows=True),
    "worst": Rejection(token_ratio, (1e-4, 100.0), whole_rows=True),  # SkyRL's outlier_token
    # TRM-Max, Li et al. 2025, arXiv 2512.23075, which uses the KL over the vocabulary. verl has k3
    # and the mean over kept tokens.
    "trm": Rejection(token_k3, (-torch.inf, 0.05), whole_rows=True),
    # prime-rl's `ipo`. DPPO, arXiv 2602.04879, uses the policy in the update, and one side only.
    "binary_tv": Rejection(token_tv, (-torch.inf, 0.2)),
}  # fmt: skip


class Correction(NamedTuple):
    """`weights` (B, T); `capped` and `rejected` (B, T), bool, where the cap and the rule act."""

    weights: Tensor
    capped: Tensor
    rejected: Tensor


def correct(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, tis: str, cap: float,
    rejection: Rejection,
) -> Correction:
    """sg(min(ratio, cap)), not renormalised; the ratio is WEIGHTS[tis], 1 with "off".

    The weights are 0 on rejected tokens and outside the mask, else positive.
    """
    logprobs_and_mask = old_logprobs.detach(), behavior_logprobs, mask
    rejected = rejection.rejects(*logprobs_and_mask)
    kept = (mask > 0) & ~rejected
    ratio = torch.ones_like(mask)
    if tis != "off":
        ratio = WEIGHTS[tis](*logprobs_and_mask)
    return Correction(ratio.clamp(max=cap) * kept, (ratio > cap) & kept, rejected)


def correction_metrics(
    correction: Correction, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Shares of the response tokens that are capped, rejected, or would be rejected by each rule;
    ESS and mean of the weights.
    """
    shares = {f"rejected_frac_{name}": rule.rejects(old_logprobs, behavior_logprobs, mask)
              for name, rule in REJECTIONS.items()}
    shares |= {"tis_capped_frac": correction.capped, "rejected_frac": correction.rejected}
    tokens = mask.sum().clamp(min=1)
    metrics = {name: (share.sum() / tokens).item() for name, share in shares.items()}
    return metrics | {
        "weights_ess": effective_sample_size(correction.weights[mask > 0]).item(),
        "weights_mean": ((correction.weights * mask).sum() / tokens).item(),
    }


def effective_sample_size(weights: Tensor) -> Tensor:
    """ESS = (sum w)^2 / (n sum w^2) over n tokens; 1/n: one token has all the weight.

    Shapes: (n,) -> (). Source: Kish 1965.
    """
    weights = weights.double()
    squares = len(weights) * (weights**2).sum()
    return weights.sum() ** 2 / squares.clamp(min=torch.finfo(torch.float64).tiny)


def mismatch_metrics(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's.

    mismatch d = old - behavior; of stale rows it also holds the staleness. `mismatch_kl` is the
    mean of k3 = expm1(d) - d, the estimate of KL(behavior || old), as in prime-rl (there of the
    policy in the update). Of the untruncated weights exp(d), `mismatch_ratio` is the mean, `ess`
    the effective sample size and `mismatch_near_1` the share in NEAR_1. With top-k, top-p or min-p
    and without `sampling_mask`, the mean is the mean probability of the tokens they keep.
    Of the rows with a token, `mismatch_row_ratio` is the mean of exp(sum_t d), and
    `mismatch_rows_near_1` the share whose geometric mean exp(mean_t d) is in NEAR_1.

    Shapes: (B, T), (B, T), (B, T) -> floats. Units: nats.
    Raises: FloatingPointError if a value on a response token is not finite; ValueError without one.
    """
    response = mask > 0
    if not response.any():
        raise ValueError("mask must have a response token, it has none")
    per_token = (old_logprobs - behavior_logprobs).double()  # (B, T)
    mismatch = per_token[response]
    if not torch.isfinite(mismatch).all():
        num_bad = (~torch.isfinite(mismatch)).sum()
        raise FloatingPointError(f"{num_bad} of {len(mismatch)} log-probabilities are not finite")
    lengths = response.sum(dim=1)
    rows = per_token.where(response, 0.0).sum(dim=1)[lengths > 0]
    geometric = rows / lengths[lengths > 0]
    weights, row_weights, row_means = (
        logs.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp() for logs in (mismatch, rows, geometric))
    return {
        "mismatch_abs_mean": mismatch.abs().mean().item(),
        "mismatch_max": mismatch.abs().max().item(),
        "mismatch_kl": (torch.expm1(mismatch) - mismatch).mean().item(),
        "mismatch_ratio": weights.mean().item(),
        "ess": effective_sample_size(weights).item(),
        "mismatch_near_1": near_1(weights),
        "mismatch_row_ratio": row_weights.mean().item(),
        "mismatch_rows_near_1": near_1(row_means),
    }


def near_1(ratios: Tensor) -> float:
    """The share of ratios in NEAR_1."""
    return ((ratios >= NEAR_1[0]) & (ratios <= NEAR_1[1])).double().mean().item()


def surprisal_z(logprobs: Tensor, entropy: Tensor, varentropy: Tensor, mask: Tensor) -> float:
    """sum(-log p - entropy) / sqrt(sum varentropy + 10^2) over the sampled tokens.

    If the tokens were drawn from p, which scores them, each term -log p - entropy has the mean 0
    and the variance `varentropy`, so this is about standard normal. A mismatch of 0 does not prove
    that they were. 10^2, one token of 10 nats, keeps a single rare token of a nearly certain policy
    from being an alarm.

    Shapes: (B, T) each -> float. Units: standard deviations.
    """
    excess = -((logprobs + entropy) * mask).sum(dtype=torch.float64)
    variance = (varentropy * mask).sum(dtype=torch.float64) + 10.0**2
    return (excess / variance.sqrt()).item()


def backend_metrics(
    old_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    objective: str, clip: Clip, max_length: int,
) -> dict[str, float]:
    """Clip rate and mean of the ratio old / behavior: what the backend alone does to a loss.

    With two policies the first minibatch of an update has this ratio, before any weight has moved.
    The mean is of token ratios, for GSPO too, with the weights of the loss. Without a response
    token both are nan.
    """
    row = OBJECTIVES[objective]
    weights = loss_weights(mask, row.normalizer, max_length)
    _, clipped = row.surrogate(old_logprobs, behavior_logprobs, advantages, mask, clip)
    ratio = token_ratio(old_logprobs, behavior_logprobs, mask)
    total = weights.sum()
    return {
        "backend_clip_rate": ((clipped * weights).sum() / total).item(),
        "backend_ratio_mean": ((ratio * weights).sum() / total).item(),
    }


# ---------------------------------------------------------------------------------- an update
def update_sums(
    logprobs: Tensor, denominator: Tensor, ref_logprobs: Tensor | None, clipped: Tensor,
    weights: Tensor,
) -> dict[str, Tensor]:
    """Diagnostics of a micro-batch: sums over tokens, which are weighted as in the loss.

    Those of micro-batches add up, except for `kl_ref_max`, the largest k3. `kl_old_new` is
    KL(policy of the denominator || new): with two policies it holds the mismatch, as the ratio
    does. `total_weight` is the sum of the weights.

    Shapes: (B, T) -> () by name.
    """
    counted = weights > 0
    log_ratio = ((logprobs - denominator) * counted).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    terms = {"ratio_mean": log_ratio.exp(), "clip_rate": clipped,
             "kl_old_new": torch.expm1(log_ratio) - log_ratio,
             "total_weight": torch.ones_like(weights)}
    largest = {}
    if ref_logprobs is not None:
        terms["kl_ref"] = kl_k3(logprobs * counted, ref_logprobs * counted)
        largest["kl_ref_max"] = terms["kl_ref"].max()
    return {name: (term * weights).sum() for name, term in terms.items()} | largest
