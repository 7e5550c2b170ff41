"""`--reject`: tokens or responses of a large mismatch get no policy gradient.

docs/objectives.md has the sources of the rules, and which published corrections they are part of.
"""

from collections.abc import Callable
from math import inf
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from extras import Extra
from objectives import OBJECTIVES, kl_k3, row_ratio, token_ratio
from report.ranges import SMALLEST, Positive, Range
from rl import Batch


# ---------------------------------------------------------------------------------- statistics
# (old_logprobs, behavior_logprobs, mask) -> (B, T), as `token_ratio`. Where the first two are equal
# a ratio is exactly 1 and a divergence exactly 0. Values outside the mask do not count.
def geometric_ratio(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp mean_t log rho, the geometric mean of a response's ratios, on each of its tokens."""
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return row_ratio(old_logprobs / length, behavior_logprobs / length, mask)


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

    statistic: Callable[[Tensor, Tensor, Tensor], Tensor]
    low: float
    high: float
    whole_rows: bool = False
    mean: Literal["all", "kept"] = "all"  # tokens that the loss's mean counts, as in the source

    def outside(self, *tensors: Tensor) -> Tensor:
        """Whether the statistic of each token is outside the bounds."""
        statistic = self.statistic(*tensors)
        return (statistic < self.low) | (statistic > self.high)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is rejected (B, T), bool, and the tokens that the loss's mean counts (B, T)."""
        mask = batch.mask
        rejected = self.outside(batch.old_logprobs, batch.behavior_logprobs, mask) & (mask > 0)
        if self.whole_rows:
            rejected = rejected.any(dim=1, keepdim=True) & (mask > 0)
        return rejected, mask * ~rejected if self.mean == "kept" else mask


REJECTIONS: dict[str, Rejection] = {
    # IcePop's mask, arXiv 2510.18855. IcePop: bounds 0.5 and 5, with --tis token --tis-cap 5
    "token": Rejection(token_ratio, 0.5, 2.0),
    # The mean over kept tokens is that of MIS and verl; TRL and SkyRL count all.
    "sequence": Rejection(row_ratio, 0.5, 2.0, whole_rows=True, mean="kept"),
    # SkyRL; verl's preset: mean over kept tokens, bounds 0.999 and 1.001.
    "geometric": Rejection(geometric_ratio, 0.99, 1.01, whole_rows=True),
    "worst": Rejection(token_ratio, 1e-4, 100.0, whole_rows=True),  # SkyRL's outlier_token
    # TRM-Max, Li et al. 2025, arXiv 2512.23075, which uses the KL over the vocabulary. verl has k3
    # and the mean over kept tokens.
    "trm": Rejection(token_k3, -inf, 0.05, whole_rows=True),
    # prime-rl's `ipo`. DPPO, arXiv 2602.04879, uses the policy in the update, and one side only.
    "binary_tv": Rejection(token_tv, -inf, 0.2),
}  # fmt: skip


# ---------------------------------------------------------------------------------- options
class Options(Extra):
    """Rejection of what the backend changed most."""

    reject: Literal[("off", *REJECTIONS)] = "off"  # Rule by which tokens get no policy gradient.
    # Smallest ratio that is kept; if not given, the rule's own.
    reject_low: Annotated[float, Range(SMALLEST, 1)] | None = None
    # Largest ratio, or divergence, that is kept; if not given, the rule's own.
    reject_high: Positive | None = None
    # Tokens that the loss's mean counts; if not given, the rule's own.
    reject_mean: Literal["all", "kept"] | None = None

    @property
    def rule(self) -> Rejection:
        """The rule with the user's bounds and mean in place of the usual ones."""
        given = {"low": self.reject_low, "high": self.reject_high, "mean": self.reject_mean}
        return REJECTIONS[self.reject]._replace(
            **{name: value for name, value in given.items() if value is not None})

    def check(self, config: Any) -> None:
        """Raises: ValueError if a bound rejects every token, or an option changes nothing."""
        if self.reject == "off":
            if self != Options():
                raise ValueError("reject_low, reject_high and reject_mean need reject (without it"
                                 " they do nothing), got off")
            return
        # Three rows of a token: without a mismatch, and with 80 nats in each direction.
        old, behavior = torch.tensor([[0.0, 0.0, -80.0], [0.0, -80.0, 0.0]])[..., None]  # (3, 1)
        equal, *apart = self.rule.outside(old, behavior, torch.ones(3, 1))
        if equal or not any(apart):
            raise ValueError("reject_low and reject_high must keep a token without a mismatch (its"
                             " ratio is 1, its divergence 0) and reject one of 80 nats, got"
                             f" {self.reject_low} and {self.reject_high} with {self.reject}")
        normalizer = OBJECTIVES[config.objective].normalizer
        of_rows = normalizer == "sequence" and self.rule.whole_rows
        changes_no_mean = normalizer == "constant" or of_rows
        if self.reject_mean and changes_no_mean and not config.kl_coef:
            raise ValueError(f"reject_mean must not be given with {config.objective} and reject"
                             f" {self.reject} (it would change no loss)")
        config.check_correction("reject", config.parity.off())

    def install(self, run: Any) -> None:
        if self.reject != "off":
            run.token_filter = self.rule
            run.endings["rejected_frac"] = " | {rejected_frac:.1%} of tokens rejected"
