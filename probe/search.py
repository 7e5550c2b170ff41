"""The search for an explanation of what the engine reported, cheap hypotheses first.

A hypothesis is a forward pass (which weights, which KV cache) and a readout (which distribution,
which head). All are computed in twice the trainer's precision. A hypothesis explains the reported
values if the engine's error against it is as small as the error of the trainer's own arithmetic
under the same hypothesis (`limit`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap

import torch
from torch import Tensor

from engine_adapter import Rollout, Sampling
from probe import causes
from probe.causes import Cause
from probe.replay import Replay, Weights
from rl import Policy
from verify import parity

TIMES, SPREADS = 1.3, 3.0  # see `limit`
ROUNDING = 1e-6  # nats: a float32 step of a log-probability between 8 and 16
MOST_LEFT = 0.7  # of the mean error without a cause: at most this share may remain with it
# With a 16-bit head the mean error may stay the same, because the head rounds slightly different
# hidden states differently. Then the signs of each cause's changes must agree with the error's, by
# this many standard deviations of a fair coin.
SIGN_SIGMAS = 4.0
size_of = partial(parity.size_of, edge=0.01)  # that share may cross a mask's edge by rounding
WRONG_TOKENS = 1 / 2  # of a wrong request: at a mask's edge one token may be far off


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

    distribution: Sampling
    head: torch.dtype  # float32, or the model's


@dataclass(frozen=True)
class Pass:
    """A forward pass under a hypothesis."""

    # Log-probabilities in twice the precision of the model and in the model's own: (2, N).
    values: dict[Readout, Tensor]
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
    fits: bool  # at most half are wrong, the others' mean is allowed, no cause explains too little

    @property
    def order(self) -> tuple:
        """Sort key: those that fit first, for all sequences, by fewest causes, smallest error."""
        if not self.fits:
            return True, self.mean
        return False, self.wrong.any().item(), len(self.causes), self.mean

    @property
    def name(self) -> str:
        return " + ".join(cause.name for cause in self.causes) or "nothing wrong"


# ---------------------------------------------------------------------------------- the search
class Probe(Replay):
    """The search in the rollouts of one step. The arguments are those of `diagnose`."""

    def __init__(self, policy: Policy, rollouts: list[Rollout], sampling: Sampling,
                 before: Weights | None = None, block: int = 0, trainer: str = "processed"):
        super().__init__(policy, rollouts)
        self.before, self.block = before, block
        raw = Sampling(1.0, sampling.max_new_tokens)
        self.unmasked = raw.at(sampling.temperature)
        sampled = self.unmasked if type(sampling) is Sampling else sampling
        scored = self.unmasked if trainer == "temperature" else sampled
        # What an engine may report, and the cause if it is not what the trainer scores.
        self.distributions = {raw: causes.RAW, sampled: causes.NO_MASK, scored: None}
        self.trainer = Readout(scored, policy.head.dtype)
        where = "in the engine" if policy.head.dtype == torch.float32 else "on both sides"
        self.heads = {policy.model.dtype: causes.HEAD.of(where), torch.float32: None}
        self.now = self._forward(None, {})
        _, self.recomputed = self.now.values[self.trainer]  # (N,) the trainer's log-probabilities
        self.start = self.explain(self.now, Readout(scored, torch.float32))

    def search(self) -> list[Explanation]:
        """Tries pass after pass until one cause explains all. Returns all tried, the best first."""
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
        if self.before:
            yield self._forward(causes.STALE, self.before)
            if self.block and any(len(prompt) > self.block for prompt, _ in self.tokens):
                yield self._forward(causes.PREFIX, {}, self.before)

    def _forward(self, cause: Cause | None, weights: Weights, old: Weights | None = None) -> Pass:
        """With weights, and with the keys and values of old ones in the prompts' full blocks."""
        readouts = starmap(Readout, product({*self.distributions, self.unmasked}, self.heads))
        with self.policy.using(weights):
            with parity.twice_as_precise(self.policy.model):
                precise = self.hidden(old, self.block)
            both = precise, self.hidden(old, self.block)
            values = {each: torch.stack([self.logprobs(states, each.head, each.distribution)
                                         for states in both]) for each in readouts}
        return Pass(values, cause)

    def _where_closer(self, hypothesis: Pass, readout: Readout) -> Pass:
        """The pass in the requests that it brings closer, and the trainer's own in the others."""
        gain = size_of(self.error(self.now, readout)) - size_of(self.error(hypothesis, readout))
        closer = (self.row_means(gain) > 0)[self.rows]  # (N,)
        values = {each: torch.where(closer, hypothesis.values[each], self.now.values[each])
                  for each in hypothesis.values}
        return Pass(values, hypothesis.cause)

    # ------------------------------------------------------------------------------ explanations
    def error(self, hypothesis: Pass, readout: Readout) -> Tensor:
        """The engine's error against a hypothesis: (N,)."""
        return self.reported - hypothesis.values[readout][0]

    def explain(self, hypothesis: Pass, readout: Readout) -> Explanation:
        """The engine's error against the noise of each token, by which the trainer's own error sets
        the limits (`limit`).

        Rounded logits move a log-probability in proportion to 1 - p. A mask leaves few uncertain
        tokens, so the trainer's error is measured without it.
        """
        unmasked = replace(readout, distribution=self.unmasked)
        exact, rounded = hypothesis.values[unmasked]
        error = (rounded - exact).abs()
        others = ROUNDING - exact.expm1()
        share = error.sum() / others.sum()
        multiples = error / (share * others + ROUNDING)
        mean = multiples.mean().item()
        sequences = len(self.tokens)
        # One sequence more, as far from the mean as the RMS of single tokens: few sequences do not
        # show their spread.
        distance = (self.row_means(multiples) - mean).square().sum() + multiples.square().mean()
        spread = (distance / sequences).sqrt().item()
        allowed = limit(mean, spread, sequences)
        # The worst sequence of all is further away than one.
        allowed_alone = 2 * limit(mean, spread, 1)

        size = size_of(self.error(hypothesis, readout))  # (N,)
        noise = share * -hypothesis.values[readout][0].expm1() + ROUNDING
        multiples = ((size - ROUNDING) / noise).clamp(0, allowed_alone / WRONG_TOKENS)
        wrong = self.row_means(multiples) > allowed_alone  # (B,)
        of_right = multiples[~wrong[self.rows]].nanmean().item()
        fits = (wrong.double().mean().item() <= 0.5 and of_right <= allowed
                and self._each_removes_enough(hypothesis, readout))
        changes = (hypothesis.cause, self.distributions[readout.distribution],
                   self.heads[readout.head])
        return Explanation(tuple(filter(None, changes)), readout, size.nanmean().item(),
                           error.mean().item(), allowed * noise.mean().item() + ROUNDING, wrong,
                           fits)

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
        by_head = hypothesis.values[readout][1] - hypothesis.values[fine][1]
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
