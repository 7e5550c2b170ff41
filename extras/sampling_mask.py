"""The sampler's mask (`--top-k`, `--top-p`, `--min-p`): the trainer's softmax over the kept tokens.

The ids that the mask kept travel with each sampled token. docs/fixes.md has the reasons.
"""

import math
from functools import partial
from itertools import compress
from typing import Any

import numpy
import torch
from torch import Tensor

from engine_adapter import Rollout, Sampling, has_sampling_mask
from rl import Batch, Restriction, at_targets, no_restriction

ENDINGS = {
    "engine_kept_mass": " | kept mass {kept_mass:.3f} engine {engine_kept_mass:.3f}",
    "outside_frac": " | {outside_frac:.2%} of tokens outside the trainer's own mask",
}  # fmt: skip


def masked_logits(logits: Tensor, sampling: Any) -> Tensor:
    """(N, V) logits after temperature, -inf where the mask cuts them off: min-p, top-k, top-p.

    `sampling` has the three options. Source: vLLM's v1/sample/sampler.py and
    ops/topk_topp_sampler.py; V0 applied min-p last.
    """
    if sampling.min_p > 0:
        ratios = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        logits = logits.masked_fill(ratios < sampling.min_p, -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k).values[:, -1:]  # (N, 1)
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1:
        # 512 tokens are usually enough, and they are sorted much faster than the vocabulary.
        for size in (min(512, logits.shape[-1]), logits.shape[-1]):
            likely, order = logits.topk(size)  # (N, size), in descending order
            probabilities = torch.exp(likely - logits.logsumexp(dim=-1, keepdim=True))
            # Of all likelier ones.
            kept = probabilities.cumsum(dim=-1) - probabilities < sampling.top_p
            if not kept[:, -1].any():
                break
        cut = torch.full_like(logits, -math.inf)
        logits = cut.scatter(-1, order, likely.masked_fill(~kept, -math.inf))
    return logits


def collect_kept_sets(rollout: Rollout, ids: numpy.ndarray, logprobs: numpy.ndarray) -> None:
    """Add the ids that the mask kept for each token: those whose log-probability is not -inf.

    Shapes: (n, K), (n, K). Raises: ValueError if a set is larger than `max_kept`.
    """
    largest = rollout.sampling.max_kept
    if not largest:
        return
    finite = logprobs > -math.inf  # (n, K)
    if finite.sum(axis=1).max() > largest:
        raise ValueError("max_kept must be at least the size of each set of tokens that the"
                         f" sampler's mask keeps, got {largest}, one has more ({rollout.sampling});"
                         " raise --max-kept or give --top-k")
    rollout.kept += [row[inside] for row, inside in zip(ids, finite, strict=True)]  # copies


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
    for rollout in batch.rollouts[response.any(dim=1).numpy(force=True)]:
        trained = rollout.trained or [True] * len(rollout.kept)
        kept += compress(rollout.kept, trained)
    if not kept:
        return no_restriction
    tokens = int(response.sum())
    assert len(kept) == tokens, f"{len(kept)=} {tokens=}: of all tokens of a row"
    return lambda logits, chunk: mask_outside(logits, kept[chunk])


def masses(sampling: Sampling, logits: Tensor, restricted: Tensor, _: Tensor,
           targets: Tensor) -> dict[str, Tensor]:
    """Figures of both masks: (n, V) logits, the restricted ones, (n,) targets -> (n,) by name.

    `kept_mass`: the trainer's probability of the tokens that its own mask keeps.
    `engine_kept_mass`: its probability of the engine's kept set, if the engine returned one. No
    mismatch shows a set that is too small, because both softmaxes are over it. `outside_frac`: 1 if
    the trainer's mask cuts off the sampled token (by rounding or staleness), else 0.
    """
    masked = masked_logits(logits, sampling)
    whole = logits.logsumexp(dim=-1)
    figures = {"kept_mass": (masked.logsumexp(dim=-1) - whole).exp(),
               "outside_frac": at_targets(masked, targets).isinf().float()}
    if restricted is not logits:  # there are kept sets
        figures["engine_kept_mass"] = (restricted.logsumexp(dim=-1) - whole).exp()
    return figures


def policy_options(sampling: Sampling) -> dict[str, Any]:
    """Arguments of `Policy`."""
    return {"restrict": kept_sets, "measures": (partial(masses, sampling),)}


def install(run: Any, options: None, parts: Any) -> None:
    sampling = run.sampling
    if has_sampling_mask(sampling):
        parts.policy |= policy_options(sampling)
        parts.engine["collect"] = collect_kept_sets
        parts.stated = lambda logits: masked_logits(logits / sampling.temperature, sampling)
