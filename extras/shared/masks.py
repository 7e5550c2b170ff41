"""Sampling under a mask (top-k, top-p, min-p), and the sets that a mask keeps.

Shared by extras/sampling_mask.py and extras/transformers_engine.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from engine_adapter import Rollout, Sampling


@dataclass(frozen=True)
class MaskedSampling(Sampling):
    """With a mask."""

    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    max_kept: int = 0  # Return the ids that the mask kept, at most so many a token; 0: none.

    def at(self, temperature: float) -> "MaskedSampling":
        return replace(self, temperature=temperature, max_kept=0)

    def shaped(self, logits: Tensor) -> Tensor:
        return masked_logits(logits / self.temperature, self)

    def arguments(self, vocab_size: int) -> dict[str, Any]:
        # Of the sampled token; with `max_kept` also of the likeliest, one more than allowed, to see
        # if a set is larger.
        num_logprobs = min(self.max_kept + 1, vocab_size) if self.max_kept else 0
        return super().arguments(vocab_size) | dict(
            logprobs=num_logprobs, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)


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
    largest = getattr(rollout.sampling, "max_kept", 0)  # not every request has a mask
    if not largest:
        return
    finite = logprobs > -math.inf  # (n, K)
    if finite.sum(axis=1).max() > largest:
        raise ValueError("max_kept must be at least the size of each set of tokens that the"
                         f" sampler's mask keeps, got {largest}, one has more ({rollout.sampling});"
                         " raise --max-kept or give --top-k")
    rollout.kept += [row[inside] for row, inside in zip(ids, finite, strict=True)]  # copies
