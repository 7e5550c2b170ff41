"""The search for an explanation of what the engine reported, cheap hypotheses first.

A hypothesis is a forward pass (which weights, which KV cache) and a readout (which distribution,
which head). All are computed in twice the trainer's precision. A hypothesis explains a
trace if the engine's error against it is as small as the error of the trainer's own arithmetic
under the same hypothesis (`limit`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import Any

import torch
from torch import Tensor

from extras.shared.linear_layers import linear_layers, rounded
from extras.shared.masks import MaskedSampling
from probe import causes
from probe.causes import Cause
from probe.replay import NEVER_FULL, Replay, Weights
from probe.traces import Trace
from rl import Policy
from verify.parity import NEUTRAL, twice_as_precise

TIMES, SPREADS = 1.3, 3.0  # see `limit`
ROUNDING = 1e-6  # nats: a float32 step of a log-probability between 8 and 16
MOST_LEFT = 0.7  # of the mean error without a cause: at most this share may remain with it
# With a 16-bit head the mean error may stay the same, because the head rounds slightly different
# hidden states differently. Then the signs of each cause's changes must agree with the error's, by
# this many standard deviations of a fair coin.
SIGN_SIGMAS = 4.0
EDGE = 0.01  # share of the tokens that rounding may put on the other side of a mask's edge
WRONG_TOKENS = 1 / 2  # of a wrong request: at a mask's edge one token may be far off
ROUNDINGS = ("int8", "fp8", "int4")  # that engines offer
BLOCK_SIZES = (16, 32, 64, 128)  # tokens per KV block
OFF = {name: value for name, value in NEUTRAL.items() if name != "temperature"} | {"top_k": 0}


# ---------------------------------------------------------------------------------- the rule
def limit(mean: float, spread: float, sequences: int) -> float:
    """How large the engine's mean |error| may be: the trainer's own |error| sets it.

    TIMES (mean + SPREADS spread / sqrt(sequences)). Both errors are against twice the precision, in
    multiples of a token's noise. `spread` is the standard deviation of a sequence's mean.
    """
    return TIMES * (mean + SPREADS * spread / sequences**0.5)


# ---------------------------------------------------------------------------------- hypotheses
@dataclass(frozen=True)
class Readout:
    """How reported values follow from a forward pass."""

    distribution: MaskedSampling
    head: torch.dtype  # float32, or the model's


Values = dict[Readout, Tensor]  # log-probabilities (N,)


@dataclass(frozen=True)
class Pass:
    """A forward pass under a hypothesis, as log-probabilities."""

    precise: Values  # in twice the precision of the model
    rounded: Values  # in the model's own
    cause: Cause | None = None


@dataclass(frozen=True)
class Explanation:
    """A hypothesis and the engine's error against it."""

    causes: tuple[Cause, ...]
    readout: Readout
    mean: float  # |reported - computed|
    trainer_error: float
    allowed: float  # the limit of the mean of the sequences that are not wrong
    wrong: Tensor  # (B,) bool: sequences that the hypothesis does not explain
    explains_right: bool  # that mean is allowed, and no cause explains too little

    @property
    def few_wrong(self) -> bool:
        return self.wrong.double().mean().item() <= 0.5

    @property
    def fits(self) -> bool:
        return self.explains_right and self.few_wrong

    @property
    def order(self) -> tuple:
        """Sort key: those that fit first, for all sequences, by fewest causes, smallest error."""
        if not self.fits:
            return True, self.mean
        return False, self.wrong.any().item(), len(self.causes), self.mean

    @property
    def name(self) -> str:
        return " + ".join(cause.name for cause in self.causes) or "nothing wrong"


def size_of(error: Tensor) -> Tensor:
    """|error| (N,); NaN for a few tokens at the edge of a mask, 1 nat for more than a few."""
    outside = error.isinf()
    few = outside.double().mean() <= EDGE
    return error.abs().masked_fill(outside, math.nan if few else 1.0)


def distributions_of(
    sampling: MaskedSampling, model: Any, trainer: str
) -> dict[MaskedSampling, Cause | None]:
    """What the trainer scores, and what an engine may report instead, with the cause of that."""
    alone = replace(sampling, **OFF)
    distributions = {alone if trainer == "temperature" else sampling: None}
    distributions.setdefault(sampling, causes.NO_MASK)
    raw = replace(alone, temperature=float(sampling.temperature > 0))
    distributions.setdefault(raw, causes.RAW)
    config = model.generation_config.to_diff_dict()
    hidden = {name: config[name] for name, off in OFF.items()
              if name in config and getattr(sampling, name) == off}
    shown = ", ".join(f"{name} {value}" for name, value in hidden.items())
    distributions.setdefault(replace(sampling, **hidden), causes.HIDDEN.of(shown))
    return distributions


# ---------------------------------------------------------------------------------- the search
class Probe(Replay):
    """The search in one trace. The arguments are those of `diagnose`."""

    def __init__(self, policy: Policy, trace: Trace, earlier: Sequence[Weights],
                 trainer: str = "processed"):
        super().__init__(policy, trace)
        self.weights = {name: each.detach() for name, each in policy.model.named_parameters()}
        self.earlier = earlier
        self.distributions = distributions_of(trace.sampling, policy.model, trainer)
        self.unmasked = replace(trace.sampling, **OFF)
        scored = next(iter(self.distributions))
        fp32_head = policy.head.dtype == torch.float32
        where = "in the engine" if fp32_head else "on both sides"
        self.heads = {policy.model.dtype: causes.HEAD.of(where), torch.float32: None}
        self.trainer = Readout(scored, torch.float32 if fp32_head else policy.model.dtype)
        self.now = self._forward(None, self.weights)
        self.recomputed = self.now.rounded[self.trainer]  # (N,) the trainer's log-probabilities
        self.start = self.explain(self.now, Readout(scored, torch.float32))

    def search(self) -> list[Explanation]:
        """Tries pass after pass until one cause explains the trace. Returns all, the best first."""
        tried = []
        for hypothesis in self._passes():
            for readout in starmap(Readout, product(self.distributions, self.heads)):
                closer = self._where_closer(hypothesis, readout)
                tried.append(self.explain(closer, readout))
            tried.sort(key=lambda each: each.order)
            best = tried[0]
            if best.fits and not best.wrong.any() and len(best.causes) <= 1:
                break
        return tried

    # ------------------------------------------------------------------------------ passes
    def _passes(self) -> Iterator[Pass]:
        """Weights and KV caches, cheap ones first."""
        yield self.now
        for kind in ROUNDINGS:
            weights = {name: rounded(self.weights[name], kind)
                       for name in linear_layers(self.policy.model)}
            yield self._forward(causes.ROUNDED.of(kind), self.weights | weights)
        for updates, weights in enumerate(self.earlier, 1):
            yield self._forward(causes.STALE.of(updates), weights)
            for block in BLOCK_SIZES:
                if self.prompt_lengths.max() > block:
                    yield self._forward(causes.PREFIX, self.weights, weights, block)

    def _forward(self, cause: Cause | None, weights: Weights, old: Weights | None = None,
                 block: int = NEVER_FULL) -> Pass:
        """With weights, and with the keys and values of old ones in the prompts' full blocks."""
        with self.policy.using(weights):
            with twice_as_precise(self.policy.model):
                hidden = self.hidden(old, block)
            return Pass(self._read(hidden), self._read(self.hidden(old, block)), cause)

    def _read(self, hidden: Tensor) -> Values:
        """Log-probabilities of the sampled tokens under each readout."""
        values = {}
        for dtype in self.heads:
            states = hidden if dtype == torch.float32 else hidden.to(dtype)
            head = replace(self.policy.head, temperature=1.0,
                           dtype=torch.promote_types(states.dtype, dtype))
            for sampling in {*self.distributions, self.unmasked}:
                logprobs = self.logprobs(states, head, sampling)
                values[Readout(sampling, dtype)] = logprobs.double()
        return values

    def _where_closer(self, hypothesis: Pass, readout: Readout) -> Pass:
        """The pass in the requests that it brings closer, and the trainer's own in the others."""
        gain = size_of(self.error(self.now, readout)) - size_of(self.error(hypothesis, readout))
        closer = (self.row_means(gain) > 0)[self.rows]  # (N,)

        def choose(one: Values, other: Values) -> Values:
            return {each: torch.where(closer, one[each], other[each]) for each in one}

        return Pass(choose(hypothesis.precise, self.now.precise),
                    choose(hypothesis.rounded, self.now.rounded), hypothesis.cause)

    # ------------------------------------------------------------------------------ explanations
    def error(self, hypothesis: Pass, readout: Readout) -> Tensor:
        """The engine's error against a hypothesis: (N,)."""
        return self.reported - hypothesis.precise[readout]

    def limits(self, hypothesis: Pass, readout: Readout) -> tuple[float, Tensor, float, float]:
        """The trainer's mean |error| and the noise of each token, in nats, (N,); the limits of the
        engine's mean |error| and of each sequence's, in multiples of the noise.

        Rounded logits move a log-probability in proportion to 1 - p. A mask leaves few uncertain
        tokens, so the trainer's error is measured without it.
        """
        unmasked = replace(readout, distribution=self.unmasked)
        exact = hypothesis.precise[unmasked]
        error = (hypothesis.rounded[unmasked] - exact).abs()
        others = ROUNDING - exact.expm1()
        share = error.sum() / others.sum()
        multiples = error / (share * others + ROUNDING)
        mean = multiples.mean().item()
        sequences = len(self.inputs)
        # One sequence more, as far from the mean as the RMS of single tokens: few sequences do not
        # show their spread.
        distance = (self.row_means(multiples) - mean).square().sum() + multiples.square().mean()
        spread = (distance / sequences).sqrt().item()
        noise = share * -hypothesis.precise[readout].expm1() + ROUNDING
        # The worst sequence of all is further away than one.
        alone = 2 * limit(mean, spread, 1)
        return error.mean().item(), noise, limit(mean, spread, sequences), alone

    def explain(self, hypothesis: Pass, readout: Readout) -> Explanation:
        trainer_error, noise, allowed, allowed_alone = self.limits(hypothesis, readout)
        size = size_of(self.error(hypothesis, readout))  # (N,)
        multiples = ((size - ROUNDING) / noise).clamp(0, allowed_alone / WRONG_TOKENS)
        wrong = self.row_means(multiples) > allowed_alone
        right = ~wrong[self.rows]  # (N,)
        explains_right = (multiples[right].nanmean().item() <= allowed
                          and self._each_removes_enough(hypothesis, readout))
        changes = (hypothesis.cause, self.distributions[readout.distribution],
                   self.heads[readout.head])
        in_nats = allowed * noise.mean().item() + ROUNDING
        return Explanation(tuple(filter(None, changes)), readout, size.nanmean().item(),
                           trainer_error, in_nats, wrong, explains_right)

    def _each_removes_enough(self, hypothesis: Pass, readout: Readout) -> bool:
        """Whether each cause removes enough of the error that remains without it.

        The errors are computed with an fp32 head: two passes round differently in 16 bits, so a
        wrong pass can come closer in some requests by chance. With a 16-bit head the signs decide.
        """
        fine = replace(readout, head=torch.float32)
        left = self.error(hypothesis, fine)
        without = []  # errors without one of the causes
        if hypothesis.cause:
            without.append(self.error(self.now, fine))
        if self.distributions[readout.distribution]:
            without.append(self.error(hypothesis, self.start.readout))
        if readout.head == torch.float32:
            return all(size_of(left).nanmean() <= MOST_LEFT * size_of(each).nanmean()
                       for each in without)
        # The hidden states are rounded as the engine's are.
        by_head = hypothesis.rounded[readout] - hypothesis.rounded[fine]
        return signs_agree(by_head, left) and all(signs_agree(each - left, each)
                                                  for each in without)


def signs_agree(change: Tensor, error: Tensor) -> bool:
    """Whether a cause's change has the signs of the error without it, which is over half as large.
    """
    agreement = change * error
    signed = agreement.isfinite() & (agreement != 0)
    signs = agreement[signed].sign()
    large = error[signed].abs().mean() > 0.5 * change[signed].abs().mean()
    return bool(large and signs.sum() > SIGN_SIGMAS * len(signs) ** 0.5)
