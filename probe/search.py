"""The search for an explanation of what the engine reported, cheap hypotheses first.

A hypothesis is a forward pass (which weights, which KV cache) and a readout (which distribution,
which token, which head). All are computed in twice the trainer's precision. A hypothesis explains a
trace if the engine's error against it is as small as the error of the trainer's own arithmetic
under the same hypothesis (`Limit`).
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
from probe import causes
from probe.causes import Cause
from probe.noise import twice_precise
from probe.replay import NO_PENALTIES, Replay, Weights
from probe.traces import Trace
from rl import Policy
from rollouts import Sampling

TIMES, SPREADS = 1.3, 3.0  # see Limit
ROUNDING = 1e-6  # nats: a float32 step of a log-probability between 8 and 16
MAX_CAUSES = 2  # of one explanation, beside wrong requests
MOST_LEFT = 0.7  # of the mean error without a cause, that may remain with it
# Standard deviations of a fair coin by which the signs of what a 16-bit head changes must agree
# with the engine's error: its rounding of a slightly different hidden state is only partly the
# same, so that it may leave the mean error as it is.
SIGN_SIGMAS = 4.0
EDGE = 0.01  # share of the tokens that rounding may put on the other side of a mask's edge
BLOCK_SIZES = (16, 32, 64, 128)  # tokens per KV block, if the trace does not record the engine's
NO_MASK = dict(top_k=0, top_p=1.0, min_p=0.0)  # fields of a Sampling
# ---------------------------------------------------------------------------------- the rule
@dataclass(frozen=True)
class Limit:
    """How large the engine's mean |error| may be: the trainer's own |error| sets it.

    Over n sequences: TIMES (mean + SPREADS spread / sqrt(n)) + ROUNDING. Both errors are against
    twice the precision.
    `spread` is the standard deviation of a sequence's mean. One sequence more, as far from the mean
    as the RMS of single tokens, is counted for it: few sequences do not show their spread.
    """

    mean: float
    spread: float
    sequences: int

    @classmethod
    def of(cls, replay: Replay, size: Tensor) -> "Limit":
        mean = size.nanmean()
        distance = (replay.row_means(size) - mean).square().sum() + size.square().nanmean()
        spread = (distance / len(replay.lengths)).sqrt()
        return cls(mean.item(), spread.item(), len(replay.lengths))

    def of_mean(self, sequences: int | None = None) -> float:
        n = sequences or self.sequences
        return TIMES * (self.mean + SPREADS * self.spread / n**0.5) + ROUNDING

    @property
    def of_one(self) -> float:
        """Of the worst sequence of all: twice that of one sequence."""
        return 2 * self.of_mean(1)


# ---------------------------------------------------------------------------------- hypotheses
@dataclass(frozen=True)
class Readout:
    """How reported values follow from a forward pass; each change of a default is a cause."""

    distribution: str = "processed"  # a key of Probe.distributions
    token: str = "sampled"  # or "likeliest"
    head: str = "float32"  # or "16 bits"


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
    limit: Limit
    wrong: Tensor  # (B,) bool: sequences that the hypothesis does not explain
    apart: Tensor  # (B,) bool: sequences left out as wrong requests
    enough: bool = True  # False: the causes explain too little

    @property
    def fits(self) -> bool:
        allowed = self.limit.of_mean(int((~self.apart).sum()))
        return self.enough and not self.wrong.any() and self.mean <= allowed

    @property
    def order(self) -> tuple:
        """Sort key: fewest causes (a wrong request is one), least fitted, smallest error."""
        further = max(0, int(self.apart.sum()) - 1)
        return len(self.causes) + further, self.found.fitted, self.mean

    @property
    def name(self) -> str:
        return " + ".join(cause.name for cause in self.causes) or "nothing wrong"


class Probe:
    """Forward passes and readouts of one trace. The arguments are those of `diagnose`.

    Without `version` the trainer's weight version is the newest in the trace.
    """

    def __init__(self, policy: Policy, trace: Trace, earlier: list[Weights],
                 version: int | None = None,
                 trainer: Literal["processed", "temperature"] = "processed"):
        self.policy, self.trace, self.replay = policy, trace, Replay(policy, trace)
        self.weights = {name: each.detach() for name, each in policy.model.named_parameters()}
        self.earlier = {updates: weights for updates, weights in enumerate(earlier, 1)
                        if any(not torch.equal(self.weights[name], old)
                               for name, old in weights.items())}
        labels = [each for rollout in trace.rollouts for each in rollout.versions]
        self.version = version if version is not None else max(labels, default=0)
        self.labels = torch.tensor(labels or [self.version] * len(self.replay.rows),
                                   device=policy.device)  # (N,)
        self.distributions = _distributions(trace.sampling, policy.model, trainer)
        self.heads = {"float32": torch.float32}
        if policy.model.dtype != torch.float32:
            self.heads["16 bits"] = policy.model.dtype
        scored = "temperature" if "temperature" in self.distributions else "processed"
        head = "float32" if policy.scoring.fp32_head else list(self.heads)[-1]
        self.trainer = Readout(scored, head=head)
        self.reported = self.replay.reported.masked_fill(~self.replay.reported.isfinite(), math.nan)
        twice = twice_precise(policy, self.weights)
        self.now = Pass(self._values(twice), self.read(self.replay.as_trained()))

    def forward_pass(self, weights: Weights, *named: Cause, old: Weights | None = None,
                     num_old: Tensor | None = None) -> Pass:
        """With weights, and with the first keys and values of old ones."""
        twice = twice_precise(self.policy, weights)
        twice_old = old and twice_precise(self.policy, old)
        return Pass(self._values(twice, twice_old, num_old), self._values(weights, old, num_old),
                    named)

    def _values(self, weights: Weights, old: Weights | None = None,
                num_old: Tensor | None = None) -> Values:
        hidden = self.replay.hidden(weights, old, num_old)
        with self.policy.using(weights):
            return self.read(hidden)

    def read(self, hidden: Tensor) -> Values:
        """Log-probabilities of the sampled and the likeliest token, under each readout."""
        values, replay = defaultdict(list), self.replay
        for head, dtype in self.heads.items():
            states = hidden if head == "float32" else hidden.to(dtype)
            for chunk, logits in replay.logits(states, dtype):
                for name, (sampling, _) in self.distributions.items():
                    logprobs, sampled = replay.logprobs(logits, sampling, chunk)
                    values[Readout(name, "sampled", head)].append(sampled)
                    values[Readout(name, "likeliest", head)].append(logprobs.amax(dim=-1))
        return {readout: torch.cat(parts).double() for readout, parts in values.items()}

    def causes_of(self, readout: Readout) -> tuple[Cause, ...]:
        """One cause for each value of the readout that is not the default."""
        named = (self.distributions[readout.distribution][1],
                 causes.TOP_1 if readout.token == "likeliest" else None,
                 causes.HEAD if readout.head != "float32" else None)
        return tuple(filter(None, named))

    def error(self, values: Values, readout: Readout) -> Tensor:
        """The engine's error against a hypothesis: (N,)."""
        return self.reported - values[readout]

    def trainer_error(self, readout: Readout, found: Pass) -> Tensor:
        """That of the trainer's own arithmetic; 0 where both sides rule the token out: (N,)."""
        ours, exact = found.rounded[readout], found.precise[readout]
        return (ours - exact).masked_fill(ours.isinf() & exact.isinf(), 0.0)

    def explain(self, found: Pass, readout: Readout, apart: Tensor | None = None) -> Explanation:
        limit = Limit.of(self.replay, _size(self.trainer_error(readout, found)))
        size = _size(self.error(found.precise, readout))
        if apart is None:
            apart = torch.zeros_like(self.replay.lengths, dtype=torch.bool)
        size = size.masked_fill(apart[self.replay.rows], math.nan)
        mean = size.nanmean().nan_to_num(math.inf).item()
        wrong = self.replay.row_means(size) > limit.of_one
        named = (*found.causes, *self.causes_of(readout))
        return Explanation(named, found, readout, mean, limit, wrong, apart)


def _size(error: Tensor) -> Tensor:
    """|error| (N,); NaN for a few tokens at the edge of a mask, 1 nat for more than a few."""
    outside = error.isinf()
    few = outside.double().mean() <= EDGE
    return error.abs().masked_fill(outside, math.nan if few else 1.0)


def _distributions(sampling: Sampling, model: Any,
                   trainer: str) -> dict[str, tuple[Sampling, Cause | None]]:
    """The sampled distribution, and those that an engine may report or draw from instead."""
    found = {"processed": (sampling, None)}
    alone = replace(sampling, **NO_MASK, **NO_PENALTIES)
    if trainer == "temperature" and alone != sampling:
        what = "mask" if has_sampling_mask(sampling) else "penalties"
        found["temperature"] = alone, causes.NO_MASK.of(what)
    raw = replace(alone, temperature=0.0 if sampling.temperature == 0 else 1.0)
    if raw not in [other for other, _ in found.values()]:
        found["raw"] = raw, causes.RAW
    config = model.generation_config.to_diff_dict()
    neutral = NO_MASK | NO_PENALTIES
    hidden = {name: config[name] for name in neutral if name in config
              and getattr(sampling, name) == neutral[name] != config[name]}
    for some in ([hidden] if hidden else []) + [{name: hidden[name]} for name in hidden]:
        shown = ", ".join(f"{name} {value}" for name, value in some.items())
        found[shown] = replace(sampling, **some), causes.HIDDEN.of(shown)
    return found


# ---------------------------------------------------------------------------------- the search
class Search:
    """Tests hypotheses by cost: readouts, weights, KV caches, a few wrong requests."""

    def __init__(self, probe: Probe):
        self.probe, self.replay = probe, probe.replay
        self.old: list[Pass] = []  # under the earlier weights
        self.found: dict[tuple[Pass, Readout], Explanation] = {}

    def run(self) -> list[Explanation]:
        """All explanations tried, the best first; those that fit come before those that do not."""
        probe, readouts = self.probe, list(self.probe.now.precise)
        self._explain(probe.now, [Readout()])
        if not self._done(0):
            self._explain(probe.now, readouts)
        if not self._done(1):
            for updates, weights in probe.earlier.items():
                old = probe.forward_pass(weights, causes.STALE.of(updates))
                self.old.append(old)
                self._explain(old, readouts)
                if not self._done(1):
                    for readout in self._promising():
                        self._kv_caches(old, weights, readout)
                        self._in_flight(old, weights, readout)
        explanations = list(self.found.values())
        if not self._done(1):
            explanations += self._few_wrong()
        return sorted(explanations, key=lambda e: (not e.fits, e.order if e.fits else e.mean))

    def _done(self, max_causes: int) -> bool:
        """Is there an explanation by at most so many causes, with nothing fitted to the trace?"""
        return any(each.fits and not each.found.fitted and len(each.causes) <= max_causes
                   for each in self.found.values())

    def _explain(self, found: Pass, readouts: list[Readout]) -> None:
        for readout in readouts:
            each = self.probe.explain(found, readout)
            if len(each.causes) <= MAX_CAUSES:
                self.found[found, readout] = each
                start = self.found[self.probe.now, Readout()]
                each.enough = not each.causes or each.mean <= MOST_LEFT * start.mean
                if readout.head != "float32":
                    each.enough = self._signs_agree(found, readout)

    def _signs_agree(self, found: Pass, readout: Readout) -> bool:
        """Has what a 16-bit head changes the signs and the size of the engine's error without?"""
        fine = replace(readout, head="float32")
        values = found.rounded  # the hidden states are rounded as the engine's are
        change = values[readout] - values[fine]
        error = self.probe.error(values, fine)
        agreement = change * error
        signed = agreement.isfinite() & (agreement != 0)
        agreeing = agreement[signed] > 0
        large = error[signed].abs().mean() > 0.5 * change[signed].abs().mean()
        sigmas = (2 * agreeing.double().mean() - 1) * len(agreeing) ** 0.5
        return bool(large and sigmas > SIGN_SIGMAS)

    def _promising(self) -> list[Readout]:
        """The two fp32 readouts that bring each token closest to a version of the weights."""
        def distance(readout: Readout) -> float:
            errors = [self.probe.error(each.precise, readout).abs()
                      for each in (self.probe.now, *self.old)]
            return torch.stack(errors).amin(dim=0).clamp(max=1.0).nanmean().item()

        plain = [each for each in self.probe.now.precise if each.head == "float32"]
        return sorted(plain, key=distance)[:2]

    def _explain_heads(self, found: Pass, readout: Readout) -> None:
        self._explain(found, [replace(readout, head=head) for head in self.probe.heads])

    # ------------------------------------------------------------------------------ KV caches
    def _kv_caches(self, old: Pass, weights: Weights, readout: Readout) -> None:
        """Old weights or stale prefixes of whole blocks, in all requests or in some."""
        probe, replay, stale = self.probe, self.replay, [old]
        block_size = probe.trace.meta.get("audit", {}).get("block_size")
        for block in (block_size,) if block_size else BLOCK_SIZES:
            # (B,) a full hit leaves one token to compute.
            prefix = (replay.prompt_lengths - 1) // block * block
            if prefix.any():
                stale.append(probe.forward_pass(probe.weights, causes.PREFIX, old=weights,
                                                num_old=prefix))
        for each in stale:
            self._explain_heads(each, readout)
            rows = self._row_errors(each, readout) <= self._row_errors(probe.now, readout)
            if rows.any():
                merged = _merged(rows[replay.rows], each, probe.now)
                merged.causes, merged.fitted = each.causes, 1
                merged.note = f"in {int(rows.sum())} of {len(rows)} requests"
                self._explain_heads(merged, readout)

    def _in_flight(self, old: Pass, weights: Weights, readout: Readout) -> None:
        """An update before a token of the response: in each sequence at the place that fits best.

        Candidates: where the old weights' values end, where those of most sequences end, and where
        the trace's versions change (or one token later: async scheduling).
        """
        probe, replay = self.probe, self.replay
        ends = self._change_point(old, readout)  # (B,)
        inside = ends[(ends > 0) & (ends < replay.lengths)]
        if not len(inside):
            return
        newest = torch.zeros_like(replay.lengths).scatter_reduce(
            0, replay.rows, probe.labels, "amax")
        labelled = replay.row_sums((probe.labels < newest[replay.rows]).long())  # (B,)
        usual = torch.full_like(ends, mode(inside.tolist())).minimum(replay.lengths)
        for cause in (causes.RECOMPUTED, causes.KEPT):
            best, place = probe.now, torch.zeros_like(ends)
            for candidate in (ends, usual, labelled, (labelled + 1).minimum(replay.lengths)):
                then = probe.now
                if cause == causes.KEPT:
                    prefix = replay.prompt_lengths + candidate - 1
                    then = probe.forward_pass(probe.weights, old=weights, num_old=prefix)
                tried = _merged(replay.positions < candidate[replay.rows], old, then)
                closer = self._row_errors(tried, readout) < self._row_errors(best, readout)
                best = _merged(closer[replay.rows], tried, best)
                place = torch.where(closer, candidate, place)
            best.causes, best.fitted = (cause,), 2
            changed = (place > 0) & (place < replay.lengths)
            late = (place - labelled)[changed & (labelled > 0)]
            if len(late) and late.median() == 1:
                best.causes += (causes.MISLABELLED,)
            best.note = _described(place[changed].tolist(), len(place))
            self._explain_heads(best, readout)

    def _row_errors(self, found: Pass, readout: Readout) -> Tensor:
        """Mean |error| per sequence: (B,), 0 for one without known values."""
        return self.replay.row_means(self.probe.error(found.precise, readout).abs())

    def _change_point(self, old: Pass, readout: Readout) -> Tensor:
        """How many first tokens of each row are closer to the old weights' values: (B,)."""
        replay = self.replay
        now, before = (self.probe.error(each.precise, readout).abs()
                       for each in (self.probe.now, old))
        gain = (now - before).nan_to_num(0.0).clamp(-1.0, 1.0)  # (N,) positive for the old weights
        table = gain.new_zeros(len(replay.lengths), int(replay.lengths.max()))
        table[replay.rows, replay.positions] = gain
        # Of (B, T + 1): the gain of the first k tokens.
        return pad(table.cumsum(dim=1), (1, 0)).argmax(dim=1)

    # ------------------------------------------------------------------------------ a few requests
    def _few_wrong(self) -> list[Explanation]:
        """Explanations that hold for at least half of the sequences; the others are listed."""
        found = []
        for each in self.found.values():
            few = 0 < each.wrong.sum() <= 0.5 * len(each.wrong)
            if few and each.enough and len(each.causes) < MAX_CAUSES:
                rest = self.probe.explain(each.found, each.readout, apart=each.wrong)
                cause = causes.EXCHANGED if self._exchanged(each) else causes.WRONG_REQUESTS
                found.append(replace(rest, causes=(*each.causes, cause)))
        return found

    def _exchanged(self, explanation: Explanation) -> bool:
        """Does each wrong response follow from another wrong request's prompt?"""
        rollouts = self.probe.trace.rollouts
        wrong = explanation.wrong.nonzero()[:, 0].tolist()
        if not 2 <= len(wrong) <= 16:
            return False
        pairs = [replace(rollouts[row], prompt_ids=rollouts[other].prompt_ids)
                 for row, other in product(wrong, wrong)]
        swapped = Probe(self.probe.policy, replace(self.probe.trace, rollouts=pairs), [],
                        trainer=self.probe.trainer.distribution)
        size = _size(swapped.error(swapped.now.precise, explanation.readout))
        closest = swapped.replay.row_means(size).view(len(wrong), len(wrong)).amin(dim=1)
        return bool((closest <= explanation.limit.of_one).all())


def _described(places: list[int], requests: int) -> str:
    """The places of an in-flight update, for the verdict's sentence."""
    if not places:
        return ""
    spread = f"tokens {min(places)} to {max(places)}, mostly {mode(places)},"
    where = spread if len(set(places)) > 1 else f"token {places[0]}"
    return f"before {where} of the response in {len(places)} of {requests} requests"


def _merged(first: Tensor, ours: Pass, theirs: Pass) -> Pass:
    """A pass with the values of `ours` where `first` (N,) is true, else of `theirs`."""
    def choose(one: Values, other: Values) -> Values:
        return {readout: torch.where(first, one[readout], other[readout]) for readout in one}

    return Pass(choose(ours.precise, theirs.precise), choose(ours.rounded, theirs.rounded))
