"""What a step measures: rollouts and mismatch before the update, and the update itself.

Words and shapes as in objectives.py. Figures are floats, None where there was nothing to measure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from objectives import MAX_LOG_WEIGHT, kl_k3, loss_weights


def further(figures: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`more`, of a source, an observer or an evaluation.

    Raises: ValueError if it has a figure of the step.
    """
    if twice := figures.keys() & more.keys():
        raise ValueError(f"a further metric must have a name of its own, got {', '.join(twice)}")
    return more


# ---------------------------------------------------------------------------------- before it
def before_update(
    batch: Any, current: Any, of_tokens: dict[str, Tensor], scores: Tensor, has_signal: Tensor,
    weight_version: int, *, objective: Any, clip: Any, max_length: int,
) -> dict[str, float | None]:
    """All that a step measures before its update. `of_tokens`: the policy's `token_metrics`.

    Figures named current_... and backend_..., and surprisal_z, are those of `current`, the rows
    that were sampled with the current weights alone, because the others are stale and staleness is
    not the backend's fault.
    """
    figures = of_rollouts(batch, scores, has_signal, weight_version)
    # entropy; with the sampler's mask kept_mass, engine_kept_mass, outside_frac
    figures |= {name: (values.sum() / batch.mask.sum()).item() for name, values in of_tokens.items()
                if name != "varentropy" and not name.endswith("logprobs")}
    figures |= of_mismatch(batch.old_logprobs, batch.behavior_logprobs, batch.mask)
    if current.mask.any():
        sides = current.old_logprobs, current.behavior_logprobs, current.mask
        figures["surprisal_z"] = surprisal_z(
            current.old_logprobs, current.entropy, of_tokens["varentropy"], current.mask)
        figures |= {f"current_{name}": value for name, value in of_mismatch(*sides).items()
                    if name != "mismatch_max"}
        figures |= of_backend(*sides, current.advantages, objective, clip, max_length)
    return figures


def of_rollouts(
    batch: Any, scores: Tensor, has_signal: Tensor, weight_version: int
) -> dict[str, float | None]:
    """Figures of the rollouts alone. Tokens are the response's, without an environment's words.

    Staleness is the number of updates between sampling and training: `staleness_max` that of the
    oldest part of any row, its prompt included, `staleness_mean` the mean over tokens.

    Shapes: scores (B,), has_signal (P, G).
    """
    rollouts, tokens = batch.rollouts, int(batch.mask.sum())
    sums = [rollout.terms for rollout in rollouts if rollout.terms]  # rewards that have terms
    terms = dict.fromkeys(name for each in sums for name in each)
    versions = [version for rollout in rollouts for version in rollout.versions]
    return {
        "reward": mean(rollout.reward for rollout in rollouts),
        # A term that a reward does not name is 0 there, so that the means add up to the reward's.
        **{f"reward/{name}": fmean(each.get(name, 0.0) for each in sums) for name in terms},
        "reward_errors": sum(rollout.reward_error is not None for rollout in rollouts),
        "left_out": int(scores.isnan().sum()),
        "score": mean([scores.nanmean().item()]),
        "flat_frac": (~has_signal).all(dim=1).float().mean().item(),
        "trunc_frac": fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": weight_version - min(rollout.oldest_version for rollout in rollouts),
        "staleness_mean": weight_version - fmean(versions),
    }


def of_mismatch(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's.

    mismatch d = old - behavior; of stale rows it also holds the staleness. `mismatch_kl` is the
    mean of k3 = expm1(d) - d, the estimate of KL(behavior || old), and `ess` the effective sample
    size of the untruncated weights exp(d).

    Shapes: (B, T), (B, T), (B, T) -> floats. Units: nats.
    Raises: FloatingPointError if a value on a response token is not finite; ValueError without one.
    """
    mismatch = (old_logprobs - behavior_logprobs).double()[mask > 0]
    if not len(mismatch):
        raise ValueError("mask must have a response token, it has none")
    if not torch.isfinite(mismatch).all():
        num_bad = (~torch.isfinite(mismatch)).sum()
        raise FloatingPointError(f"{num_bad} of {len(mismatch)} log-probabilities are not finite")
    return {
        "mismatch_abs_mean": mismatch.abs().mean().item(),
        "mismatch_max": mismatch.abs().max().item(),
        "mismatch_kl": (torch.expm1(mismatch) - mismatch).mean().item(),
        "ess": effective_sample_size(ratio(mismatch)),
    }


def surprisal_z(logprobs: Tensor, entropy: Tensor, varentropy: Tensor, mask: Tensor) -> float:
    """sum(-log p - entropy) / sqrt(sum varentropy + 10^2) over the sampled tokens.

    If the tokens were drawn from p, which scores them, each term -log p - entropy has the mean 0
    and the variance `varentropy`, so this is about standard normal. A mismatch of 0 does not prove
    that they were. 10^2, one token of 10 nats, keeps a single rare token of a nearly certain policy
    from looking like a fault.

    Shapes: (B, T) each -> float. Units: standard deviations.
    """
    excess = -((logprobs + entropy) * mask).sum(dtype=torch.float64)
    variance = (varentropy * mask).sum(dtype=torch.float64) + 10.0**2
    return (excess / variance.sqrt()).item()


def of_backend(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, advantages: Tensor,
    objective: Any, clip: Any, max_length: int,
) -> dict[str, float]:
    """Clip rate and mean of the ratio old / behavior: what the backend alone does to a loss.

    With two policies the first minibatch of an update has this ratio, before any weight has moved.
    The mean is of token ratios, for GSPO too, with the weights of the loss. Without a response
    token both are nan. `objective`: a row of OBJECTIVES.
    """
    weights = loss_weights(mask, objective.normalizer, max_length)
    loss, clipped = objective.surrogate(old_logprobs, behavior_logprobs, advantages, mask, clip)
    if loss.shape != mask.shape:
        raise ValueError(f"a surrogate must return (B, T) = {mask.shape}, got {loss.shape}")
    ratios = ratio((old_logprobs - behavior_logprobs) * mask)
    total = weights.sum()
    return {
        "backend_clip_rate": ((clipped * weights).sum() / total).item(),
        "backend_ratio_mean": ((ratios * weights).sum() / total).item(),
    }


# ---------------------------------------------------------------------------------- an update
def of_correction(weights: Tensor, learns: Tensor, mask: Tensor, cap: float) -> dict[str, float]:
    """Shares of the response tokens whose weight is the cap, and that are rejected; ESS of the
    weights, 0 on rejected tokens.

    Shapes: weights (B, T), 0 outside the mask; learns (B, T), bool: not rejected.
    """
    tokens, weights = mask.sum().clamp(min=1), weights * learns
    return {
        "tis_capped_frac": ((weights >= cap).sum() / tokens).item(),
        "rejected_frac": (((weights == 0) & (mask > 0)).sum() / tokens).item(),
        "weights_ess": effective_sample_size(weights[mask > 0]),
    }


class Sums:
    """Figures of an update: sums over tokens, which are weighted as in the loss.

    `kl_old_new` is KL(policy of the denominator || new): with two policies it holds the mismatch,
    as the ratio does. `kl_ref_max` is the largest k3 of any token.
    """

    def __init__(self):
        self.totals: dict[str, Any] = defaultdict(float)
        self.weight: Any = 0.0
        self.largest_kl: list[float] = []  # by micro-batch
        self.loss = 0.0  # of the minibatch
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.kl_only_updates = 0

    def add(
        self, micro: Any, logprobs: Tensor, clipped: Tensor, loss: float
    ) -> None:
        """Add a micro-batch, its values (b, T). Where a token's weight in the loss is 0, nothing
        counts.

        Raises: FloatingPointError if the loss is not finite.
        """
        weights, ref_logprobs = micro.token_weights, micro.ref_logprobs
        counted = weights > 0
        log_ratio = (logprobs - micro.denominator) * counted
        log_ratio = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
        terms = {"ratio_mean": log_ratio.exp(), "clip_rate": clipped,
                 "kl_old_new": torch.expm1(log_ratio) - log_ratio}
        if ref_logprobs is not None:
            terms["kl_ref"] = kl_k3(logprobs * counted, ref_logprobs * counted)
            self.largest_kl.append(terms["kl_ref"].max().item())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}, the largest KL of a token"
                                     f" {max(self.largest_kl, default=0.0):.2g}")
        for name, term in terms.items():
            self.totals[name] += (term * weights).sum()
        self.weight += weights.sum()
        self.loss += loss

    def step(self, norm: float, kl_only: bool) -> None:
        """The optimizer has taken a step for a minibatch, `kl_only` if it has no other signal."""
        self.losses.append(self.loss)
        self.norms.append(norm)
        self.kl_only_updates += kl_only
        self.loss = 0.0

    def metrics(self, num_minibatches: int) -> dict[str, float | None]:
        """Over all minibatches with a signal; of none there is neither loss nor ratio.

        `overflowed_updates` counts the steps that fp16 has lost, `updates` those that changed the
        weights.
        """
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        figures = {name: float(total / self.weight) for name, total in self.totals.items()}
        if self.largest_kl:
            figures["kl_ref_max"] = max(self.largest_kl)
        return figures | {
            "loss": mean(self.losses), "grad_norm": mean(finite), "updates": len(finite),
            "overflowed_updates": len(self.norms) - len(finite),
            "skipped_updates": num_minibatches - len(self.norms),
            "kl_only_updates": self.kl_only_updates,
        }


# ---------------------------------------------------------------------------------- everywhere
def of_answers(name: str, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The mean reward of an evaluation's rows by this name, and how many have none: it leaves them
    out.
    """
    rewards = [row["reward"] for row in rows]
    return {name: mean(rewards), f"{name}_left_out": rewards.count(None)}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean without NaN and None, which left-out responses have; None if all are left out."""
    counted = [value for value in values if value is not None and not math.isnan(value)]
    return fmean(counted) if counted else None


def ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def effective_sample_size(weights: Tensor) -> float:
    """ESS = (sum w)^2 / (n sum w^2) over n tokens; 1/n: one token has all the weight.

    Shapes: (n,) -> float. Source: Kish 1965.
    """
    weights = weights.double()
    squares = len(weights) * (weights**2).sum()
    return (weights.sum() ** 2 / squares.clamp(min=torch.finfo(torch.float64).tiny)).item()
