"""Hypotheses of what the engine did to the log-probabilities it reported, recomputed by token.

A hypothesis is a forward pass (which weights, which KV cache, which dtype) and a readout (which
distribution, which token, which position). It explains a trace if its remaining mismatch is no
larger than its noise floor. The floor is measured: the trainer computes the same values along a
second numerical path.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine_adapter import Sampling
from probe import causes
from probe.causes import Cause
from probe.noise import check_other_path
from probe.traces import NO_MASK, NO_PENALTIES, Replay, Trace, Weights
from rl import Policy

# Parity: the mean mismatch is at most FLOORS * floor + STANDARD_ERRORS * (RMS of the floor) /
# sqrt(tokens). Of 640 clean traces of 12 random toys in fp32 and bf16 the largest has 1.3 floors +
# 2.1 errors.
FLOORS, STANDARD_ERRORS = 1.3, 3.0
# In fp32 the order in which a kernel adds the terms of a long sum matters, and the second path has
# the trainer's own products. A clean SmolLM2-135M (sums of 1,536 terms) has 2.05 floors.
FLOORS_FP32 = 3.0
MEDIAN_FACTOR = 2.5  # limit of the median, in the floor's; it varies more than the mean
TAIL_FACTOR = 6.0  # the same, of the largest token and of the worst sequence, which vary more
# Limit of the largest token with experts in 16 bits; the largest of 300 clean traces has 27.
TAIL_FACTOR_EXPERTS = 40.0
TAIL_RMS = 4.0  # the largest of a few hundred tokens, in RMS
# Nats: fp32 kernels differ by this much at a rare token of a trained model; every fault is larger.
TAIL_FP32 = 1e-4
FEW_STEPS = 8.0  # rounding steps by which a log-probability may be off
ROUNDING = 2e-7  # nats: reported log-probabilities are float32
LOGPROB_STEP = 5e-7  # nats: a float32 step between 4 and 8; a median may be 0, another one step
MASK_EDGE = 0.004  # share of the tokens that may lie at the edge of a top-k, top-p or min-p mask
# Share of the tokens whose logits may lie between two 16-bit values, if the body is in fp32.
HEAD_EDGE = 0.02
# Standard deviations of a fair coin by which the signs of a 16-bit hypothesis must agree.
SIGN_SIGMAS = 4.0
Values = dict[tuple[str, str, str], Tensor]  # log-probabilities (N,) by head, distribution, token


# ---------------------------------------------------------------------------------- figures
@dataclass(frozen=True)
class Noise:
    """Size of a difference in nats; `infinite` counts tokens that one side rules out."""

    mean: float
    median: float
    rms: float
    max: float
    k3: float
    worst_row: float
    infinite: int
    tokens: int
    step: float = 0.0  # of a noise floor: the machine epsilon of its dtype
    # Of a noise floor with experts in 16 bits: their number. Rounding sends a token to another
    # expert, and all tokens after it differ: the independent samples are sequences, not tokens.
    sequences: int = 0

    @classmethod
    def of(cls, replay: Replay, difference: Tensor, step: float = 0.0,
           sequences: int = 0) -> "Noise":
        infinite = difference.isinf()
        finite = difference[difference.isfinite()]
        if not len(finite):
            return cls(*[math.inf] * 6, int(infinite.sum()), 0, step, sequences)
        size = finite.abs()
        rows = replay.row_means(difference.abs().masked_fill(infinite, math.nan))
        k3 = torch.expm1(finite.clamp(max=20)) - finite
        rms, worst_row = size.pow(2).mean().sqrt(), rows.nan_to_num(0.0).max()
        figures = (size.mean(), size.median(), rms, size.max(), k3.mean(), worst_row)
        values = (figure.item() for figure in figures)
        return cls(*values, int(infinite.sum()), len(finite), step, sequences)

    def allows(self, other: "Noise", by_steps: bool = False) -> bool:
        """Is the other difference at most this noise floor, up to sampling error?

        The median is tested too, because a heavy tail widens the mean's tolerance. `by_steps` skips
        the median, for differences that are 0 at most tokens and whole rounding steps at the
        others.
        """
        tokens = max(1, other.tokens)
        few = 4 * self.median / (self.sequences or tokens) ** 0.5 + FEW_STEPS * self.step / tokens
        typical = by_steps or other.median <= MEDIAN_FACTOR * self.median + few + LOGPROB_STEP
        return (typical and other.mean <= self.allowed_mean(tokens)
                and other.max <= self.allowed_max and other.infinite == 0)

    def allowed_mean(self, tokens: int) -> float:
        """Limit of the mean, with rounding steps: the floor of few tokens can be 0."""
        errors = STANDARD_ERRORS * (1 + 1 / self.sequences) if self.sequences else STANDARD_ERRORS
        sampling_error = errors * self.rms / (self.sequences or tokens) ** 0.5
        steps = FEW_STEPS * self.step / tokens + ROUNDING
        return self.floors * self.mean + sampling_error + steps

    @property
    def in_fp32(self) -> bool:
        return 0 < self.step <= torch.finfo(torch.float32).eps

    @property
    def floors(self) -> float:
        return FLOORS_FP32 if self.in_fp32 else FLOORS

    @property
    def tail(self) -> float:
        return TAIL_FP32 if self.in_fp32 else 0.0

    @property
    def allowed_max(self) -> float:
        largest = max(self.max, TAIL_RMS * self.rms, FEW_STEPS * self.step)
        factor = TAIL_FACTOR_EXPERTS if self.sequences else TAIL_FACTOR
        return max(factor * largest + ROUNDING, self.tail)

    def wrong_rows(self, replay: Replay, difference: Tensor) -> Tensor:
        """Sequences whose mean difference is above the floor's limit: (N,) -> (B,) bool."""
        samples = torch.ones_like(replay.lengths) if self.sequences else replay.lengths
        few = 8 * self.rms / samples**0.5 + FEW_STEPS * self.step / replay.lengths
        worst = max(TAIL_FACTOR * self.worst_row, self.tail / 4)  # one token in a response of four
        limit = torch.maximum(self.floors * self.mean + few, torch.tensor(worst))
        return replay.row_means(difference.abs()) > limit.clamp(max=self.allowed_max) + ROUNDING


# ---------------------------------------------------------------------------------- hypotheses
@dataclass(frozen=True)
class Readout:
    """How reported values follow from a forward pass; each change of a default is a cause."""

    distribution: str = "processed"  # a key of Probe.distributions
    token: str = "sampled"  # or "top-1"
    shift: int = 0  # positions by which the values are reported too late
    no_stop: bool = False  # the stop token's value is reported as 0
    head: str = "float32"  # or "16 bits"

    @property
    def fitted(self) -> bool:
        return self.distribution.startswith("fitted")


@dataclass(eq=False)
class ForwardPass:
    """The trainer's forward pass under a hypothesis, with its log-probabilities."""

    causes: tuple[Cause, ...]
    hidden: Tensor | None  # (N, H); None for a pass merged from two others
    weights: Weights | None  # those that are not the trainer's own
    values: Values
    second: "ForwardPass | None" = None  # along the second path, if the dtype is not the trainer's
    note: str = ""  # for the verdict's sentence
    fitted: int = 0  # to the trace: 1 a yes or no per sequence, 2 a position per sequence
    num_tensors: int = 0  # tensors that the hypothesis names as old

    def logprobs(self, readout: Readout) -> Tensor:
        return self.values[readout.head, readout.distribution, readout.token]


@dataclass
class Explanation:
    """A hypothesis, its remaining mismatch and its noise floor."""

    causes: tuple[Cause, ...]
    forward: ForwardPass
    readout: Readout
    noise: Noise  # remaining mismatch: predicted - reported
    floor: Noise  # of the same hypothesis
    wrong: Tensor  # (B,) bool: sequences that the hypothesis does not explain
    supported: bool  # False if it predicts too few tokens, or another test rejects it
    apart: Tensor | None = None  # (B,) bool: sequences left out as wrong requests

    @property
    def fits(self) -> bool:
        sound = self.supported and not self.wrong.any()
        return sound and self.floor.allows(self.noise, by_steps=self.readout.head != "float32")

    @property
    def fitted(self) -> int:
        return self.readout.fitted + self.forward.fitted

    @property
    def order(self) -> tuple:
        """Sort key: fewest causes (a wrong request is one), least fitted, smallest mismatch."""
        apart = 0 if self.apart is None else int(self.apart.sum())
        blamed = len(self.causes) + max(0, apart - 1)
        return blamed, self.fitted, apart, self.forward.num_tensors, self.noise.mean

    @property
    def name(self) -> str:
        return " + ".join(cause.name for cause in self.causes) or "nothing wrong"

    def share(self, start: "Explanation") -> float:
        """Explained share of the excess: of the mean mismatch above the own noise floor."""
        excess = start.noise.mean - start.floor.mean
        if excess <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - (self.noise.mean - self.floor.mean) / excess))


class Probe:
    """Forward passes and readouts of one trace. The arguments are those of `diagnose`.

    Without `version` the trainer's weight version is the newest in the trace.
    """

    def __init__(self, policy: Policy, trace: Trace, earlier: list[Weights],
                 version: int | None = None,
                 trainer: Literal["processed", "temperature"] = "processed"):
        self.replay = Replay(policy, trace)
        self.policy, self.trace = policy, trace
        self.experts = any("Experts" in type(each).__name__ for each in policy.model.modules())
        now = dict(policy.model.named_parameters())
        self.earlier = {updates: weights for updates, weights in enumerate(earlier, 1)
                        if any(not torch.equal(now[name], old) for name, old in weights.items())}
        labels = [each for rollout in trace.rollouts for each in rollout.versions]
        self.version = version if version is not None else max(labels, default=0)
        self.labels = torch.tensor(labels or [self.version] * len(self.replay.rows),
                                   device=policy.device)  # (N,)
        self.stops = self.replay.positions == self.replay.lengths[self.replay.rows] - 1  # (N,) bool
        if trace.sampling.stop_token_ids:
            ids = torch.tensor(trace.sampling.stop_token_ids, device=policy.device)
            self.stops = self.stops & torch.isin(self.replay.targets, ids)
        not_finite = ~self.replay.reported.isfinite()
        # NaN at stop tokens alone means 0: no value. Other values that are not finite are left out.
        others = (not_finite & ~self.stops).any()
        self.broken = not_finite & others  # (N,) bool
        self.reported = self.replay.reported.masked_fill(not_finite & ~self.broken, 0.0)  # (N,)
        self.distributions = _distributions(trace.sampling)
        alone = replace(trace.sampling, **NO_MASK, **NO_PENALTIES)
        self.trainer = Readout(head="float32" if policy.fp32_head else "16 bits")
        if trainer == "temperature" and alone != trace.sampling:
            self.distributions["temperature"] = alone, causes.NO_MASK
            self.trainer = replace(self.trainer, distribution="temperature")
        half = torch.bfloat16 if policy.model.dtype == torch.float32 else policy.model.dtype
        self.heads = {"float32": torch.float32, "16 bits": half}
        self.current = self.forward_pass()
        self.second = self.forward_pass(hidden=self.replay.second_path())
        check_other_path(policy, self.current.hidden, self.second.hidden)

    def forward_pass(self, *named: Cause, weights: Weights | None = None,
                     hidden: Tensor | None = None) -> ForwardPass:
        """The pass with other weights, or from other hidden states (N, H), if given."""
        hidden = self.replay.all_hidden(weights) if hidden is None else hidden
        return ForwardPass(named, hidden, weights, self.read(hidden, weights, *self.distributions))

    def read(self, hidden: Tensor, weights: Weights | None, *names: str) -> Values:
        """Log-probabilities (N,) of the sampled and the likeliest token, for a ForwardPass."""
        values, replay = defaultdict(list), self.replay
        with replay.policy.using(weights):
            for head, dtype in self.heads.items():
                for chunk, logits in replay.logits(hidden, dtype):
                    for name in names:
                        sampling, _ = self.distributions[name]
                        logprobs, sampled = replay.logprobs(logits, sampling, chunk)
                        values[head, name, "sampled"].append(sampled)
                        values[head, name, "top-1"].append(logprobs.amax(dim=-1))
        return {key: torch.cat(parts).double() for key, parts in values.items()}

    def causes_of(self, readout: Readout) -> tuple[Cause, ...]:
        """One cause for each value of the readout that is not the default."""
        named = (self.distributions[readout.distribution][1],
                 causes.TOP_1 if readout.token == "top-1" else None,
                 causes.NO_STOP if readout.no_stop else None, causes.SHIFTED.get(readout.shift),
                 causes.HEAD if readout.head != "float32" else None)
        return tuple(filter(None, named))

    def predict(self, forward: ForwardPass, readout: Readout) -> Tensor:
        """What the engine would have reported: (N,), NaN where the hypothesis predicts no value."""
        values = self.replay.neighbours(forward.logprobs(readout), readout.shift)
        return values.masked_fill(self.stops & readout.no_stop, 0.0)

    def residual(self, forward: ForwardPass, readout: Readout) -> Tensor:
        """Remaining mismatch, predicted - reported: (N,), NaN where either is missing."""
        return (self.predict(forward, readout) - self.reported).masked_fill(self.broken, math.nan)

    def aligned(self, readout: Readout) -> Tensor:
        """The reported values at the tokens they belong to, the shift undone: (N,), or NaN."""
        reported = self.reported.masked_fill(self.broken | (self.stops & readout.no_stop), math.nan)
        return self.replay.neighbours(reported, -readout.shift)

    def error(self, forward: ForwardPass, readout: Readout) -> Tensor:
        """|computed - reported| of each token, by `aligned`: (N,)."""
        return (forward.logprobs(readout) - self.aligned(readout)).abs()

    def floor(self, forward: ForwardPass, readout: Readout) -> Noise:
        """The difference between both numerical paths: of this pass, or of the trainer's."""
        first, second = (forward, forward.second) if forward.second else (self.current, self.second)
        ours, theirs = first.logprobs(readout), second.logprobs(readout)
        # Both give probability 0.
        difference = (ours - theirs).masked_fill(ours.isinf() & theirs.isinf(), 0.0)
        body_dtype = self.policy.model.dtype
        if first.weights:
            body_dtype = next(iter(first.weights.values())).dtype
        step = max(torch.finfo(dtype).eps for dtype in (body_dtype, self.heads[readout.head]))
        sequences = len(self.replay.lengths) if self.experts and body_dtype != torch.float32 else 0
        return Noise.of(self.replay, difference, step, sequences)

    def explain(self, forward: ForwardPass, readout: Readout) -> Explanation:
        floor = self.floor(forward, readout)
        residual = self._without_flips(forward, readout, floor)
        noise = Noise.of(self.replay, residual)
        supported = noise.tokens >= 0.5 * len(residual)
        if readout.head != "float32":
            fp32 = replace(readout, head="float32")
            supported = supported and self._signs_agree(forward, readout, forward, fp32)
        if forward.second is not None:
            supported = supported and self._signs_agree(forward, readout, self.current, readout)
        named = (*forward.causes, *self.causes_of(readout))
        wrong = floor.wrong_rows(self.replay, residual)
        return Explanation(named, forward, readout, noise, floor, wrong, supported)

    def _without_flips(self, forward: ForwardPass, readout: Readout, floor: Noise) -> Tensor:
        """The residual, NaN at the few tokens at which rounding causes a large step: (N,).

        Such a token lies at the edge of a mask, inside for one side and outside for the other; or
        its logits were computed in fp32 and lie at the edge between two 16-bit values.
        """
        residual, edge = self.residual(forward, readout), 0.0
        beyond = residual.abs() > floor.allowed_max
        if readout.head != "float32" and self.policy.model.dtype == torch.float32:
            fine, half = (forward.logprobs(replace(readout, head=head)) for head in self.heads)
            edge, beyond = HEAD_EDGE, beyond & (residual.abs() <= 2 * (half - fine).abs().max())
        elif self.distributions[readout.distribution][0].has_mask:
            edge = MASK_EDGE
        expected = edge * len(residual)  # the limit adds two standard deviations of such a count
        few = 0 < beyond.sum() <= expected + 2 * expected**0.5 + 3 * floor.infinite * (edge > 0)
        return residual.masked_fill(beyond, math.nan) if few else residual

    def _signs_agree(self, forward: ForwardPass, readout: Readout, base: ForwardPass,
                     base_readout: Readout) -> bool:
        """Has the change from `base` to this hypothesis the size and signs of `base`'s mismatch?

        Rounding in 16 bits is a hypothesis about noise. Without this test it would excuse any fault
        that is no larger.
        """
        change = self.predict(forward, readout) - self.predict(base, base_readout)
        mismatch = -self.residual(base, base_readout)
        # If there is none, both means below are NaN.
        signed = (change * mismatch).isfinite() & (change * mismatch != 0)
        change, mismatch = change[signed], mismatch[signed]
        agreeing = (change * mismatch > 0).double().mean().item()
        large = bool(mismatch.abs().mean() > 0.5 * change.abs().mean())
        return large and (agreeing - 0.5) * 2 * len(change) ** 0.5 > SIGN_SIGMAS


def _distributions(sampling: Sampling) -> dict[str, tuple[Sampling, Cause | None]]:
    """The sampled distribution, and those that an engine may report in place of it."""
    unit = dict(temperature=0.0 if sampling.temperature == 0 else 1.0)
    found = {"processed": (sampling, None)}
    for name, changes, cause in (
        ("raw", unit | NO_MASK | NO_PENALTIES, causes.RAW),
        ("no temperature", unit, causes.NO_TEMPERATURE),
        ("no mask", NO_MASK, causes.NO_MASK),
        ("no penalties", NO_PENALTIES, causes.NO_PENALTIES),
    ):
        variant = replace(sampling, **changes)
        if variant not in [other for other, _ in found.values()]:
            found[name] = variant, cause
    return found
