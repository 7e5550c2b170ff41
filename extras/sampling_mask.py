"""The sampler's mask (`--top-k`, `--top-p`, `--min-p`): the trainer's softmax over the kept tokens.

The ids that the mask kept travel with each sampled token. docs/fixes.md has the reasons.
"""

import math
from functools import partial
from itertools import compress
from typing import Annotated, Any

import numpy
import torch
from torch import Tensor

from extras import Extra
from extras.shared.masks import MaskedSampling, collect_kept_sets, masked_logits
from report.ranges import Count, CountOrZero, Range
from rl import Batch, Chunk, Restriction, at_targets, entropies, no_restriction

SMALLEST_TOP_P = 1e-6  # in float32 less keeps no token
ENDINGS = {
    "engine_kept_mass": " | kept mass {kept_mass:.3f} engine {engine_kept_mass:.3f}",
    "outside_frac": " | {outside_frac:.2%} of tokens outside the trainer's own mask",
}  # fmt: skip


class Options(Extra):
    """The sampler's mask."""

    top_k: CountOrZero = 0  # The sampler's mask: keep the K likeliest tokens; 0 is off.
    # Keep the fewest likeliest tokens that sum to at least top_p; 1 is off.
    top_p: Annotated[float, Range(SMALLEST_TOP_P, 1)] = 1.0
    # Keep tokens with min_p times the largest probability or more; 0 is off.
    min_p: Annotated[float, Range(0, 1)] = 0.0
    # Largest set of a mask; by default 512, or above top_k (for ties).
    max_kept: Count | None = None

    @property
    def has_mask(self) -> bool:
        """Whether a token can be cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def check(self, config: Any) -> None:
        is_on = config.parity.sampling_mask
        if not (is_on or self.has_mask):
            raise ValueError("sampling_mask must be on without top_k, top_p and min_p (no mask)")
        if self.max_kept and not (is_on and self.has_mask):
            raise ValueError("max_kept must be given with top_k, top_p or min_p and sampling_mask"
                             f" only (else no kept set is returned), got {self.max_kept}")
        if is_on and self.has_mask and not config.parity.processed_logprobs:
            raise ValueError("sampling_mask needs processed_logprobs if top_k, top_p or min_p is"
                             " given (raw log-probabilities do not show which tokens were kept);"
                             " try --parity.no-sampling-mask")

    def install(self, run: Any) -> None:
        if not self.has_mask:
            return
        vllm = "engine" not in run.config.given
        if torch.cuda.is_available() and vllm and self.min_p and self.top_p < 1:
            raise ValueError("min_p must be 0 with top_p on a GPU (vLLM's kernel for top-p drops"
                             f" tokens after min-p), got {self.min_p} and {self.top_p};"
                             " try --top-k")
        # More than top_k, because of ties: many logits of a 16-bit head are equal.
        usual = self.top_k + self.top_k // 4 + 16 if self.top_k else 512
        largest = self.max_kept or usual
        mask = vars(self) | {"max_kept": largest * run.config.parity.sampling_mask}
        run.sampling = MaskedSampling(**vars(run.sampling) | mask)
        run.policy |= policy_options(run.sampling)
        run.engine["collect"] = collect_kept_sets
        run.endings |= ENDINGS


def policy_options(sampling: MaskedSampling) -> dict[str, Any]:
    """Arguments of `Policy`."""
    return {"restrict": kept_sets, "metrics": (entropies, partial(masses, sampling))}


def mask_outside(logits: Tensor, kept: list[numpy.ndarray]) -> Tensor:
    """-inf outside the kept sets: (n, V) and n arrays of ids -> (n, V)."""
    rows = numpy.repeat(numpy.arange(len(logits)), [len(ids) for ids in kept])
    indices = torch.from_numpy(numpy.stack([rows, numpy.concatenate(kept)])).to(logits.device)
    outside = torch.ones_like(logits, dtype=torch.bool)
    outside[tuple(indices)] = False
    return logits.masked_fill(outside, -math.inf)


def kept_sets(batch: Batch, response: Tensor) -> Restriction:
    """The softmax of a token is over its kept set, if the sampler returned it.

    Without kept sets (`--parity.no-sampling-mask`) it is over the vocabulary. Shapes: response
    (B, T), bool, N of them true.
    """
    kept: list[numpy.ndarray] = []
    for rollout in compress(batch.rollouts, response.any(dim=1).tolist()):
        trained = rollout.trained or [True] * len(rollout.kept)
        kept += compress(rollout.kept, trained)
    tokens = int(response.sum())
    if not kept:
        largest = getattr(batch.rollouts[0].sampling, "max_kept", 0)
        assert not (tokens and largest), "the engine collects no sets"
        return no_restriction
    assert len(kept) == tokens, f"{len(kept)=} {tokens=}: of all tokens of a row"
    return lambda logits, chunk: mask_outside(logits, kept[chunk])


def masses(sampling: MaskedSampling, chunk: Chunk) -> dict[str, Tensor]:
    """Figures of both masks: (n,) by name.

    `kept_mass`: the trainer's probability of the tokens that its own mask keeps.
    `engine_kept_mass`: its probability of the engine's kept set, if the engine returned one. No
    mismatch shows a set that is too small, because both softmaxes are over it. `outside_frac`: 1 if
    the trainer's mask cuts off the sampled token (by rounding or staleness), else 0.
    """
    masked = masked_logits(chunk.logits, sampling)
    whole = chunk.logits.logsumexp(dim=-1)
    figures = {"kept_mass": (masked.logsumexp(dim=-1) - whole).exp(),
               "outside_frac": at_targets(masked, chunk.targets).isinf().float()}
    if chunk.restricted is not chunk.logits:  # there are kept sets
        figures["engine_kept_mass"] = (chunk.restricted.logsumexp(dim=-1) - whole).exp()
    return figures
