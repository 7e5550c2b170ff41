"""The search for an explanation of what the engine reported, cheap hypotheses first.

A hypothesis is a forward pass (which weights, which KV cache) and a readout (which distribution,
which head). All are computed in twice the trainer's precision. A hypothesis explains a
trace if the engine's error against it is as small as the error of the trainer's own arithmetic
under the same hypothesis (`limit`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from config import has_sampling_mask
from probe import causes
from probe.causes import Cause
from probe.noise import twice_precise
from probe.replay import NO_PENALTIES, Replay, Weights
from probe.traces import Trace
from rl import Policy
from rollouts import Sampling

TIMES, SPREADS = 1.3, 3.0  # see `limit`
ROUNDING = 1e-6  # nats: a float32 step of a log-probability between 8 and 16
MAX_CAUSES = 2  # of one explanation, beside wrong requests
MOST_LEFT = 0.7  # of the mean error without a cause, that may remain with it
# Standard deviations of a fair coin by which the signs of what a 16-bit head changes must agree
# with the engine's error: its rounding of a slightly different hidden state is only partly the
# same, so that it may leave the mean error as it is.
SIGN_SIGMAS = 4.0
EDGE = 0.01  # share of the tokens that rounding may put on the other side of a mask's edge
BLOCK_SIZES = (16, 32, 64, 128)  # tokens per KV block
NEUTRAL = dict(top_k=0, top_p=1.0, min_p=0.0) | NO_PENALTIES  # fields of a Sampling


# ---------------------------------------------------------------------------------- the rule
def limit(mean: float, spread: float, sequences: int) -> float:
    """How large the engine's mean |error| may be: the trainer's own |error| sets it.

    TIMES (mean + SPREADS spread / sqrt(sequences)) + ROUNDING. Both errors are against twice the
    precision. `spread` is the standard deviation of a sequence's mean.
    """
    return TIMES * (mean + SPREADS * spread / sequences**0.5) + ROUNDING


# ---------------------------------------------------------------------------------- hypotheses
@dataclass(frozen=True)
class Readout:
    """How reported values follow from a forward pass; each change of a default is a cause."""

    distribution: str = "processed"  # a key of Probe.distributions
    head: torch.dtype = torch.float32  # or the model's


Values = dict[Readout, Tensor]  # log-probabilities (N,)


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass under a hypothesis, as log-probabilities."""

    precise: Values  # in twice the precision of the model
    rounded: Values  # in the model's own
    causes: tuple[Cause, ...] = ()
    of_some: bool = False  # it may hold for some requests: those that it brings closer
    merged: bool = False  # from two others; among equals these come last


@dataclass
class Explanation:
    """A hypothesis and the engine's error against it."""

    causes: tuple[Cause, ...]
    found: Pass
    readout: Readout
    mean: float  # |reported - computed|
    trainer_error: float
    allowed: float  # the limit of `mean`
    allowed_alone: float  # that of a sequence's mean
    wrong: Tensor  # (B,) bool: sequences that the hypothesis does not explain
    apart: Tensor  # (B,) bool: sequences left out as wrong requests
    enough: bool = True  # False: the causes explain too little

    @property
    def fits(self) -> bool:
        return self.enough and not self.wrong.any() and self.mean <= self.allowed

    @property
    def order(self) -> tuple:
        """Sort key: those that fit first, by fewest causes, not merged, smallest error."""
        if not self.fits:
            return True, self.mean
        return False, len(self.causes), self.found.merged, self.mean

    @property
    def name(self) -> str:
        return " + ".join(cause.name for cause in self.causes) or "nothing wrong"


def size_of(error: Tensor) -> Tensor:
    """|error| (N,); NaN for a few tokens at the edge of a mask, 1 nat for more than a few."""
    outside = error.isinf()
    few = outside.double().mean() <= EDGE
    return error.abs().masked_fill(outside, math.nan if few else 1.0)


def distributions_of(sampling: Sampling, model: Any,
                     trainer: str) -> dict[str, tuple[Sampling, Cause | None]]:
    """The sampled distribution, and those that an engine may report or draw from instead."""
    found = {"processed": (sampling, None)}
    alone = replace(sampling, **NEUTRAL)
    if trainer == "temperature" and alone != sampling:
        what = "mask" if has_sampling_mask(sampling) else "penalties"
        found["temperature"] = alone, causes.NO_MASK.of(what)
    raw = replace(alone, temperature=float(sampling.temperature > 0))
    if raw not in [other for other, _ in found.values()]:
        found["raw"] = raw, causes.RAW
    config = model.generation_config.to_diff_dict()
    hidden = {name: config[name] for name, neutral in NEUTRAL.items()
              if getattr(sampling, name) == neutral != config.get(name, neutral)}
    for some in [hidden] * bool(hidden) + [{name: value} for name, value in hidden.items()]:
        shown = ", ".join(f"{name} {value}" for name, value in some.items())
        found[shown] = replace(sampling, **some), causes.HIDDEN.of(shown)
    return found


# ---------------------------------------------------------------------------------- the search
class Probe(Replay):
    """The search in one trace. The arguments are those of `diagnose`."""

    def __init__(self, policy: Policy, trace: Trace, earlier: list[Weights],
                 trainer: Literal["processed", "temperature"] = "processed"):
        super().__init__(policy, trace)
        self.weights = {name: each.detach() for name, each in policy.model.named_parameters()}
        self.earlier = dict(enumerate(earlier, 1))  # by updates since then
        self.distributions = distributions_of(trace.sampling, policy.model, trainer)
        self.heads = dict.fromkeys((torch.float32, policy.model.dtype))
        scored = "temperature" if "temperature" in self.distributions else "processed"
        head = torch.float32 if policy.scoring.fp32_head else policy.model.dtype
        self.trainer = Readout(scored, head=head)
        precise = self._values(twice_precise(policy, self.weights))
        self.now = Pass(precise, self._read(self.as_trained()))
        self.start = self.explain(self.now, Readout())
        self.found: list[Explanation] = []

    def search(self) -> list[Explanation]:
        """Tries pass after pass until one cause explains the trace. Returns all, the best first.

        If nothing explains it, a few requests may be wrong.
        """
        self._try(self.now, Readout())
        for found in self._passes():
            if any(each.fits and len(each.causes) <= 1 for each in self.found):
                break
            for readout in self.now.precise:
                self._try(found, readout)
                if found.of_some:
                    gain = self.error(self.now, readout).abs() - self.error(found, readout).abs()
                    closer = self.row_means(gain) > 0  # (B,)
                    merged = merge(closer[self.rows], found, self.now, found.causes)
                    self._try(merged, readout)
        if not any(each.fits for each in self.found):
            self.found += self._few_wrong()
        return sorted(self.found, key=lambda each: each.order)

    # ------------------------------------------------------------------------------ passes
    def _passes(self) -> Iterator[Pass]:
        """Weights and KV caches, cheap ones first."""
        yield self.now
        for updates, weights in self.earlier.items():
            yield self._forward(weights, causes.STALE.of(updates), of_some=True)
            yield from self._stale_prefixes(weights)

    def _stale_prefixes(self, weights: Weights) -> Iterator[Pass]:
        """Keys and values of whole blocks of the prompt, computed under old weights."""
        for block in BLOCK_SIZES:
            # (B,) a full hit leaves one token to compute.
            prefix = (self.prompt_lengths - 1) // block * block
            if prefix.any():
                yield self._forward(self.weights, causes.PREFIX, of_some=True, old=weights,
                                    num_old=prefix)

    def _forward(self, weights: Weights, *named: Cause, of_some: bool = False,
                 old: Weights | None = None, num_old: Tensor | None = None) -> Pass:
        """With weights, and with the first keys and values of old ones."""
        precise = self._values(twice_precise(self.policy, weights),
                               old and twice_precise(self.policy, old), num_old)
        return Pass(precise, self._values(weights, old, num_old), named, of_some)

    def _values(self, weights: Weights, old: Weights | None = None,
                num_old: Tensor | None = None) -> Values:
        hidden = self.hidden(weights, old, num_old)
        with self.policy.using(weights):
            return self._read(hidden)

    def _read(self, hidden: Tensor) -> Values:
        """Log-probabilities of the sampled tokens under each readout."""
        values, policy = defaultdict(list), self.policy
        for head in self.heads:
            states = hidden if head == torch.float32 else hidden.to(head)
            projection = policy.projection(1.0, torch.promote_types(states.dtype, head))
            for part in projection.parts(len(states)):
                logits, _ = projection.logits(states[part], policy.head.weight, policy.head_bias)
                for name, (sampling, _) in self.distributions.items():
                    logprobs = self.logprobs(logits, sampling, part)
                    values[Readout(name, head)].append(logprobs)
        return {readout: torch.cat(parts).double() for readout, parts in values.items()}

    # ------------------------------------------------------------------------------ explanations
    def error(self, found: Pass, readout: Readout) -> Tensor:
        """The engine's error against a hypothesis: (N,)."""
        return self.reported - found.precise[readout]

    def trainer_error(self, found: Pass, readout: Readout) -> Tensor:
        """That of the trainer's own arithmetic; 0 where both sides rule the token out: (N,)."""
        ours, exact = found.rounded[readout], found.precise[readout]
        return (ours - exact).masked_fill(ours.isinf() & exact.isinf(), 0.0)

    def explain(self, found: Pass, readout: Readout, apart: Tensor | None = None) -> Explanation:
        ours = size_of(self.trainer_error(found, readout))
        mean = ours.nanmean()
        # One sequence more, as far from the mean as the RMS of single tokens: few sequences do not
        # show their spread.
        distance = (self.row_means(ours) - mean).square().sum() + ours.square().nanmean()
        own = mean.item(), (distance / len(self.lengths)).sqrt().item()
        if apart is None:
            apart = torch.zeros_like(self.lengths, dtype=torch.bool)
        size = size_of(self.error(found, readout)).masked_fill(apart[self.rows], math.nan)
        alone = 2 * limit(*own, 1)  # the worst sequence of all is further away than one
        named = (self.distributions[readout.distribution][1],
                 causes.HEAD if readout.head != torch.float32 else None)
        return Explanation(
            causes=(*found.causes, *filter(None, named)), found=found, readout=readout,
            mean=size.nanmean().nan_to_num(math.inf).item(), trainer_error=own[0],
            allowed=limit(*own, int((~apart).sum())), allowed_alone=alone,
            wrong=self.row_means(size) > alone, apart=apart)

    def _try(self, found: Pass, readout: Readout) -> None:
        each = self.explain(found, readout)
        if len(each.causes) <= MAX_CAUSES:
            self.found.append(each)
            if readout.head != torch.float32:
                each.enough = self._signs_agree(found, readout)
            elif each.causes:
                each.enough = each.mean <= MOST_LEFT * self.start.mean

    def _signs_agree(self, found: Pass, readout: Readout) -> bool:
        """Has what a 16-bit head changes the signs and the size of the engine's error without?"""
        fine = replace(readout, head=torch.float32)
        # The hidden states are rounded as the engine's are.
        change = found.rounded[readout] - found.rounded[fine]
        error = self.error(found, fine)
        agreement = change * error
        signed = agreement.isfinite() & (agreement != 0)
        agreeing = agreement[signed] > 0
        large = error[signed].abs().mean() > 0.5 * change[signed].abs().mean()
        sigmas = (2 * agreeing.double().mean() - 1) * len(agreeing) ** 0.5
        return bool(large and sigmas > SIGN_SIGMAS)

    # ------------------------------------------------------------------------------ a few requests
    def _few_wrong(self) -> list[Explanation]:
        """Explanations that hold for at least half of the sequences; the others are listed."""
        found = []
        for each in self.found:
            few = 0 < each.wrong.sum() <= 0.5 * len(each.wrong)
            if few and each.enough and len(each.causes) < MAX_CAUSES:
                rest = self.explain(each.found, each.readout, apart=each.wrong)
                found.append(replace(rest, causes=(*each.causes, causes.WRONG_REQUESTS)))
        return found


def merge(first: Tensor, ours: Pass, theirs: Pass, named: tuple[Cause, ...]) -> Pass:
    """A pass with the values of `ours` where `first` (N,) is true, else of `theirs`."""
    def choose(one: Values, other: Values) -> Values:
        return {readout: torch.where(first, one[readout], other[readout]) for readout in one}

    return Pass(choose(ours.precise, theirs.precise), choose(ours.rounded, theirs.rounded),
                named, merged=True)
