"""The search for an explanation of what the engine reported, cheap hypotheses first.

A hypothesis is a forward pass (which weights, which KV cache) and a readout (which distribution,
which token, which head). All are computed in twice the trainer's precision. A hypothesis explains a
trace if the engine's error against it is as small as the error of the trainer's own arithmetic
under the same hypothesis (`limit`).
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from statistics import mode
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from config import has_sampling_mask
from extras.rounded_weights import linear_layers, rounded
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
ROUNDINGS = ("int8", "fp8", "int4")  # that engines offer
BLOCK_SIZES = (16, 32, 64, 128)  # tokens per KV block, if the trace does not record the engine's
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
    likeliest: bool = False  # token, or the sampled one
    head: torch.dtype = torch.float32  # or the model's


Values = dict[Readout, Tensor]  # log-probabilities (N,)


@dataclass(eq=False)
class Pass:
    """A forward pass under a hypothesis, as log-probabilities."""

    precise: Values  # in twice the precision of the model
    rounded: Values  # in the model's own
    causes: tuple[Cause, ...] = ()
    note: str = ""  # for the verdict's sentence
    fitted: int = 0  # to the trace: 1 a yes or no per sequence, 2 a position per sequence


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
        """Sort key: those that fit first, by fewest causes (a wrong request is one), least fitted.

        Among equals, and among those that do not fit, the smallest error is first.
        """
        if not self.fits:
            return True, self.mean
        further = max(0, int(self.apart.sum()) - 1)
        return False, len(self.causes) + further, self.found.fitted, self.mean

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
    """The search in one trace. The arguments are those of `diagnose`.

    Without `version` the trainer's weight version is the newest in the trace.
    """

    def __init__(self, policy: Policy, trace: Trace, earlier: list[Weights],
                 version: int | None = None,
                 trainer: Literal["processed", "temperature"] = "processed"):
        super().__init__(policy, trace)
        self.weights = {name: each.detach() for name, each in policy.model.named_parameters()}
        self.earlier = dict(enumerate(earlier, 1))  # by updates since then
        self.labels = [each for rollout in trace.rollouts for each in rollout.versions]  # or none
        self.version = version if version is not None else max(self.labels, default=0)
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
        """Tries readouts, weights, KV caches, a few wrong requests. Returns all, the best first."""
        readouts = list(self.now.precise)
        self._try(self.now, [Readout()])
        if not self._done(0):
            self._try(self.now, readouts)
        if not self._done(1):
            for kind in ROUNDINGS:
                weights = {name: rounded(each.weight.detach(), kind)
                           for name, each in linear_layers(self.policy.model).items()}
                self._try(self._forward(self.weights | weights, causes.ROUNDED.of(kind)), readouts)
        if not self._done(1):
            passes = [self.now]
            for updates, weights in self.earlier.items():
                old = self._forward(weights, causes.STALE.of(updates))
                passes.append(old)
                self._try(old, readouts)
                if not self._done(1):
                    for readout in self._promising(passes):
                        self._kv_caches(old, weights, readout)
                        self._in_flight(old, weights, readout)
        if not self._done(1):
            self.found += self._few_wrong()
        return sorted(self.found, key=lambda each: each.order)

    def _done(self, max_causes: int) -> bool:
        """Is there an explanation by at most so many causes, with nothing fitted to the trace?"""
        return any(each.fits and not each.found.fitted and len(each.causes) <= max_causes
                   for each in self.found)

    # ------------------------------------------------------------------------------ passes
    def _forward(self, weights: Weights, *named: Cause, old: Weights | None = None,
                 num_old: Tensor | None = None) -> Pass:
        """With weights, and with the first keys and values of old ones."""
        precise = self._values(twice_precise(self.policy, weights),
                               old and twice_precise(self.policy, old), num_old)
        return Pass(precise, self._values(weights, old, num_old), named)

    def _values(self, weights: Weights, old: Weights | None = None,
                num_old: Tensor | None = None) -> Values:
        hidden = self.hidden(weights, old, num_old)
        with self.policy.using(weights):
            return self._read(hidden)

    def _read(self, hidden: Tensor) -> Values:
        """Log-probabilities of the sampled and the likeliest token, under each readout."""
        values, policy = defaultdict(list), self.policy
        for head in self.heads:
            states = hidden if head == torch.float32 else hidden.to(head)
            projection = policy.projection(1.0, torch.promote_types(states.dtype, head))
            for part in projection.parts(len(states)):
                logits, _ = projection.logits(states[part], policy.head.weight, policy.head_bias)
                for name, (sampling, _) in self.distributions.items():
                    logprobs, sampled = self.logprobs(logits, sampling, part)
                    values[Readout(name, False, head)].append(sampled)
                    values[Readout(name, True, head)].append(logprobs.amax(dim=-1))
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
                 causes.TOP_1 if readout.likeliest else None,
                 causes.HEAD if readout.head != torch.float32 else None)
        return Explanation(
            causes=(*found.causes, *filter(None, named)), found=found, readout=readout,
            mean=size.nanmean().nan_to_num(math.inf).item(), trainer_error=own[0],
            allowed=limit(*own, int((~apart).sum())), allowed_alone=alone,
            wrong=self.row_means(size) > alone, apart=apart)

    def _try(self, found: Pass, readouts: list[Readout]) -> None:
        for readout in readouts:
            each = self.explain(found, readout)
            if len(each.causes) <= MAX_CAUSES:
                self.found.append(each)
                if readout.head != torch.float32:
                    each.enough = self._signs_agree(found, readout)
                elif each.causes:
                    each.enough = each.mean <= MOST_LEFT * self.start.mean

    def _try_heads(self, found: Pass, readout: Readout) -> None:
        self._try(found, [replace(readout, head=head) for head in self.heads])

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

    def _promising(self, passes: list[Pass]) -> list[Readout]:
        """The two fp32 readouts that bring each token closest to one of the passes."""
        def distance(readout: Readout) -> float:
            errors = [self.error(each, readout).abs() for each in passes]
            return torch.stack(errors).amin(dim=0).clamp(max=1.0).nanmean().item()

        plain = [each for each in self.now.precise if each.head == torch.float32]
        return sorted(plain, key=distance)[:2]

    # ------------------------------------------------------------------------------ KV caches
    def _kv_caches(self, old: Pass, weights: Weights, readout: Readout) -> None:
        """Old weights or stale prefixes of whole blocks, in all requests or in some."""
        stale = [old]
        block_size = self.trace.meta.get("audit", {}).get("block_size")
        for block in [block_size] if block_size else BLOCK_SIZES:
            # (B,) a full hit leaves one token to compute.
            prefix = (self.prompt_lengths - 1) // block * block
            if prefix.any():
                stale.append(self._forward(self.weights, causes.PREFIX, old=weights,
                                           num_old=prefix))
        for each in stale:
            self._try_heads(each, readout)
            rows = self._row_errors(each, readout) <= self._row_errors(self.now, readout)
            if rows.any():
                merged = merge(rows[self.rows], each, self.now)
                merged.causes, merged.fitted = each.causes, 1
                merged.note = f"in {int(rows.sum())} of {len(rows)} requests"
                self._try_heads(merged, readout)

    def _in_flight(self, old: Pass, weights: Weights, readout: Readout) -> None:
        """An update before a token of the response: in each sequence at the place that fits best.

        Candidates: where the old weights' values end, where those of most sequences end, and where
        the trace's versions change (or one token later: async scheduling).
        """
        ends = self._change_point(old, readout)  # (B,)
        inside = ends[(ends > 0) & (ends < self.lengths)].tolist()
        if not inside:
            return
        labels = [rollout.versions for rollout in self.trace.rollouts]
        labelled = ends.new_tensor([len(each) - each.count(max(each, default=0))
                                    for each in labels])  # (B,) tokens before the last change
        usual = self.lengths.clamp(max=mode(inside))
        for cause in (causes.RECOMPUTED, causes.KEPT):
            best, place = self.now, torch.zeros_like(ends)
            for candidate in (ends, usual, labelled, (labelled + 1).minimum(self.lengths)):
                then = self.now
                if cause == causes.KEPT:
                    prefix = self.prompt_lengths + candidate - 1
                    then = self._forward(self.weights, old=weights, num_old=prefix)
                tried = merge(self.positions < candidate[self.rows], old, then)
                closer = self._row_errors(tried, readout) < self._row_errors(best, readout)
                best = merge(closer[self.rows], tried, best)
                place = torch.where(closer, candidate, place)
            best.causes, best.fitted = (cause,), 2
            changed = (place > 0) & (place < self.lengths)
            late = (place - labelled)[changed & (labelled > 0)]
            if len(late) and late.median() == 1:
                best.causes += (causes.MISLABELLED,)
            if changed.any():
                best.note = (f"mostly before token {mode(place[changed].tolist())} of the response"
                             f" in {int(changed.sum())} of {len(place)} requests")
            self._try_heads(best, readout)

    def _row_errors(self, found: Pass, readout: Readout) -> Tensor:
        """Mean |error| per sequence: (B,), 0 for one without known values."""
        return self.row_means(self.error(found, readout).abs())

    def _change_point(self, old: Pass, readout: Readout) -> Tensor:
        """How many first tokens of each row are closer to the old weights' values: (B,)."""
        now, before = (self.error(each, readout).abs() for each in (self.now, old))
        gain = (now - before).nan_to_num(0.0).clamp(-1.0, 1.0)  # (N,) positive for the old weights
        table = gain.new_zeros(len(self.lengths), int(self.lengths.max()))
        table[self.rows, self.positions] = gain
        # Of (B, T + 1): the gain of the first k tokens.
        return pad(table.cumsum(dim=1), (1, 0)).argmax(dim=1)

    # ------------------------------------------------------------------------------ a few requests
    def _few_wrong(self) -> list[Explanation]:
        """Explanations that hold for at least half of the sequences; the others are listed."""
        found = []
        for each in self.found:
            few = 0 < each.wrong.sum() <= 0.5 * len(each.wrong)
            if few and each.enough and len(each.causes) < MAX_CAUSES:
                rest = self.explain(each.found, each.readout, apart=each.wrong)
                cause = causes.EXCHANGED if self._exchanged(each) else causes.WRONG_REQUESTS
                found.append(replace(rest, causes=(*each.causes, cause)))
        return found

    def _exchanged(self, explanation: Explanation) -> bool:
        """Does each wrong response follow from another wrong request's prompt?"""
        rollouts = self.trace.rollouts
        wrong = explanation.wrong.nonzero()[:, 0].tolist()
        if not 2 <= len(wrong) <= 16:
            return False
        pairs = [replace(rollouts[row], prompt_ids=rollouts[other].prompt_ids)
                 for row, other in product(wrong, wrong)]
        swapped = Probe(self.policy, replace(self.trace, rollouts=pairs), [],
                        trainer=self.trainer.distribution)
        size = size_of(swapped.error(swapped.now, explanation.readout))
        closest = swapped.row_means(size).view(len(wrong), len(wrong)).amin(dim=1)
        return bool((closest <= explanation.allowed_alone).all())


def merge(first: Tensor, ours: Pass, theirs: Pass) -> Pass:
    """A pass with the values of `ours` where `first` (N,) is true, else of `theirs`."""
    def choose(one: Values, other: Values) -> Values:
        return {readout: torch.where(first, one[readout], other[readout]) for readout in one}

    return Pass(choose(ours.precise, theirs.precise), choose(ours.rounded, theirs.rounded))
