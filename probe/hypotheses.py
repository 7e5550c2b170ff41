"""What an engine may have done to the log-probabilities it reported: hypotheses, recomputed token by token.

A hypothesis is a forward pass (which weights, which KV cache, which dtype) and a reading of it (which distribution,
which token, which place). It explains a trace if it brings the mismatch down to the floor, and the floor is measured:
the trainer against itself along another path of the same arithmetic.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from engine_adapter import Sampling
from probe.noise import check_other_path
from probe.traces import Replay, Trace, Weights
from rl import Policy

# Parity: a mean mismatch up to FLOORS floors + STANDARD_ERRORS standard errors, rms / sqrt(tokens) of the floor. Clean
# traces of 12 architectures in fp32 and bf16: 0.86 to 1.23 floors; the farthest of 640: 1.3 floors + 2.1 errors.
FLOORS, STANDARD_ERRORS = 1.3, 3.0
MEDIAN_FACTOR = 2.5  # the same for the median, which varies more between kernels
TAIL_FACTOR = 6.0  # the same for the largest token and for the worst sequence, which vary more
TAIL_RMS = 4.0  # the largest of a few hundred tokens, in RMS
TAIL_FP32 = 1e-4  # nats: kernels differ by as much at a rare token of a trained model, and no fault is as small
FEW_STEPS = 8.0  # of rounding, which a log-probability may be off by
ROUNDING = 2e-7  # nats: reported log-probabilities are float32
LOGPROB_STEP = 5e-7  # nats: one step of float32 from 4 to 8; the median of a floor can be 0 and another's one step
MASK_EDGE = 0.004  # share of the tokens that may lie at the edge of a top-k, top-p or min-p mask
HEAD_EDGE = 0.02  # the same for the edges between the 16-bit values of V logits, where the body is in fp32
SIGN_SIGMAS = 4.0  # of a coin thrown once a token, by which a 16-bit hypothesis must agree in sign


# ------------------------------------------------------------------------------------------------ causes
@dataclass(frozen=True)
class Cause:
    """One thing the engine (or the trainer) does differently, its layer, and the switch that repairs it."""

    layer: Literal["semantics", "inference path", "numerics", "objective"]
    name: str
    repair: str


PROCESSED = 'logprobs_mode="processed_logprobs" (--parity.processed-logprobs)'
ALIGN = "align log-probabilities with their own tokens, as make_batch does"
RUNTIME = "enable_prefix_caching=False, async_scheduling=False (--parity.explicit-runtime)"
RAW = Cause("semantics", "raw log-probabilities", PROCESSED)
NO_TEMPERATURE = Cause("semantics", "temperature not applied", PROCESSED)
NO_MASK = Cause("semantics", "top-k/top-p/min-p mask not applied to the reported value", PROCESSED)
NO_PENALTIES = Cause("semantics", "penalties not applied to the reported value", PROCESSED)
IN_PLACE_OF_PROCESSED = (RAW, NO_TEMPERATURE, NO_MASK, NO_PENALTIES)
TOP_1 = Cause("semantics", "log-probability of the likeliest token in place of the sampled one",
              "look the sampled id up; index 0 of a list of log-probabilities need not be it")
SHIFTED = {1: Cause("semantics", "shifted by one position (each token has its predecessor's value)", ALIGN),
           -1: Cause("semantics", "shifted by one position (each token has its successor's value)", ALIGN)}
NO_STOP = Cause("semantics", "stop token without a log-probability",
                "keep the stop token's own log-probability and its place in the mask")
HEAD = Cause("numerics", "head in 16 bits", 'an fp32 head on both sides, hf_overrides={"head_dtype": "float32"} in vLLM'
             " (--parity.fp32-head)")
PREFIX = Cause("inference path", "prompt KV computed under earlier weights (stale prefix cache)",
               "enable_prefix_caching=False, or reset_prefix_cache() at each load (--parity.explicit-runtime)")
KEPT = Cause("inference path", "KV kept over an in-flight update",
             "none in the backend: these values belong to no single set of weights, which is what TIS is for")
RECOMPUTED = Cause("inference path", "in-flight update with KV recomputed under the new weights",
                   "none in the backend, but score each token under the weights of its own version")
MISLABELLED = Cause("inference path", "weight versions one token off at an update (async scheduling)", RUNTIME)
ALONE = "replay those requests alone, see `requests`"
WRONG_REQUESTS = Cause("inference path", "wrong requests among right ones", ALONE)
UNLIKE = Cause("semantics", "tokens that were not drawn from the reported distribution",
               "check the sampler's own parameters: generation_config.json, logit processors, the seed's path")
NOT_IN_FORCE = Cause("semantics", "sampling parameters of the trace not in force in the sampler, which drew from what"
                     " it reported", "pass them with every request")
NOT_FINITE = Cause("inference path", "log-probabilities that are not finite", ALONE)


def stale(updates: int) -> Cause:
    return Cause("inference path", f"weights {updates} update(s) old", "load the weights before sampling, every name")


def moved_on(updates: int) -> Cause:
    return Cause("objective", f"the trainer has moved on by {updates} update(s) since (staleness)",
                 "none in the backend: bound the staleness, then correct it with the ratio")


def old_tensors(names: list[str], updates: int) -> Cause:
    return Cause("inference path", f"tensors {updates} update(s) old: {', '.join(names)}",
                 "load every name; Engine.load checks the set")


def hidden(what: str) -> Cause:
    return Cause("semantics", f"{what} in the sampler and not in the trace",
                 'name every sampling parameter in every request; generation_config="vllm" (--parity.explicit-runtime)')


# ------------------------------------------------------------------------------------------------ figures
@dataclass(frozen=True)
class Noise:
    """How large a difference is, in nats; `infinite` counts tokens that one side gives no probability at all."""

    mean: float
    median: float
    rms: float
    max: float
    k3: float
    worst_row: float
    infinite: int
    tokens: int
    step: float = 0.0  # of the arithmetic it is the floor of: relative rounding, as for numbers near 1

    @classmethod
    def of(cls, replay: Replay, difference: Tensor, step: float = 0.0) -> "Noise":
        infinite = difference.isinf()
        finite = difference[difference.isfinite()]
        if not len(finite):
            return cls(*[math.inf] * 6, int(infinite.sum()), 0, step)
        size, rows = finite.abs(), replay.row_means(difference.abs().masked_fill(infinite, math.nan))
        return cls(size.mean().item(), size.median().item(), size.pow(2).mean().sqrt().item(), size.max().item(),
                   (torch.expm1(finite.clamp(max=20)) - finite).mean().item(), rows[~rows.isnan()].max().item(),
                   int(infinite.sum()), len(finite), step)

    def allows(self, other: "Noise", by_steps: bool = False) -> bool:
        """Is the other difference no more than this floor, given how few tokens each is measured on?

        The median is tested too, because a heavy tail widens the mean's tolerance; but not where most tokens are off by
        nothing and the rest by whole steps.
        """
        tokens = max(1, other.tokens)
        few = 4 * self.median / tokens**0.5 + FEW_STEPS * self.step / tokens
        typical = by_steps or other.median <= MEDIAN_FACTOR * self.median + few + LOGPROB_STEP
        return (typical and other.mean <= self.allowed_mean(other.tokens) and other.max <= self.allowed_max
                and other.infinite == 0)

    def allowed_mean(self, tokens: int) -> float:
        """More than clean traces of so many tokens reach; and steps, since the floor of few tokens can be 0 by luck."""
        return FLOORS * self.mean + STANDARD_ERRORS * self.rms / tokens**0.5 + FEW_STEPS * self.step / tokens + ROUNDING

    @property
    def tail(self) -> float:
        return TAIL_FP32 if 0 < self.step <= torch.finfo(torch.float32).eps else 0.0

    @property
    def allowed_max(self) -> float:
        largest = max(self.max, TAIL_RMS * self.rms, FEW_STEPS * self.step)
        return max(TAIL_FACTOR * largest + ROUNDING, self.tail)

    def wrong_rows(self, replay: Replay, difference: Tensor) -> Tensor:
        """Sequences whose mean difference is beyond what the floor's worst sequence and the length allow: (B,) bool."""
        few = 8 * self.rms / replay.lengths**0.5 + FEW_STEPS * self.step / replay.lengths
        worst = max(TAIL_FACTOR * self.worst_row, self.tail / 4)  # one token in a response of four
        limit = torch.maximum(FLOORS * self.mean + few, torch.tensor(worst))
        return replay.row_means(difference.abs()) > limit.clamp(max=self.allowed_max) + ROUNDING


@dataclass(frozen=True)
class Reading:
    """How a forward pass becomes reported values: the distribution, the token, its place, its end, the head's dtype."""

    kind: str = "processed"
    token: str = "sampled"
    shift: int = 0
    stop: bool = False
    head: str = "float32"

    @property
    def num_causes(self) -> int:
        return sum(getattr(self, each.name) != each.default for each in fields(self))


@dataclass
class Explanation:
    """A hypothesis of what the engine did: its causes, what it leaves unexplained per token, and its own floor."""

    causes: tuple[Cause, ...]
    body: str
    reading: Reading
    noise: Noise  # of predicted - reported: what is left unexplained
    floor: Noise  # of the same hypothesis recomputed along another path
    wrong: Tensor  # (B,) sequences it does not explain
    coverage: float  # share of the tokens it says something about
    supported: bool = True  # a hypothesis of 16-bit rounding must also agree token by token
    apart: Tensor | None = None  # (B,) sequences set aside as wrong requests
    fitted: int = 0  # read off the trace itself: 1 a number, or a yes or no per sequence; 2 a place per sequence
    num_tensors: int = 0  # that it calls old

    @property
    def fits(self) -> bool:
        sound = self.supported and self.coverage >= 0.5 and not self.wrong.any()
        return sound and self.floor.allows(self.noise, by_steps=self.reading.head != "float32")

    @property
    def order(self) -> tuple:
        """Fewest causes first, a wrong request each being one; what was fitted to the trace last; then the closest."""
        apart = 0 if self.apart is None else int(self.apart.sum())
        return len(self.causes) + max(0, apart - 1), self.fitted, apart, self.num_tensors, self.noise.mean

    def share(self, start: "Explanation") -> float:
        """Share of the start's excess over its floor that this explains; each side is held against its own floor."""
        excess = start.noise.mean - start.floor.mean
        return min(1.0, max(0.0, 1 - (self.noise.mean - self.floor.mean) / excess)) if excess > 0 else 0.0


# ------------------------------------------------------------------------------------------------ hypotheses
@dataclass
class Body:
    """One forward pass under a hypothesis, and what each head and distribution makes of it."""

    causes: tuple[Cause, ...]
    hidden: Tensor | None  # (N, H); None where put together from others
    weights: Weights | None
    values: dict[tuple[str, str, str], Tensor]  # (head, kind, token) -> (N,)
    note: str = ""
    fitted: int = 0  # as in Explanation
    num_tensors: int = 0  # that are said to be old one by one


class Probe:
    """All hypotheses about one trace. `earlier` are the trainer's older weights, newest first: 1, 2, ... updates back.

    `version` is the trainer's own (if not given: the newest the trace names); `trainer` says what distribution the
    trainer scores: the full processed one, or the temperature alone, as train.py does.
    """

    def __init__(self, policy: Policy, trace: Trace, earlier: list[Weights], version: int | None = None,
                 trainer: Literal["processed", "temperature"] = "processed"):
        self.replay, self.policy, self.trace = Replay(policy, trace), policy, trace
        now = dict(policy.model.named_parameters())
        self.earlier = {updates: weights for updates, weights in enumerate(earlier, 1)
                        if any(not torch.equal(now[name], tensor) for name, tensor in weights.items())}
        labels = [v for r in trace.rollouts for v in r.versions]
        self.labels = torch.tensor(labels, device=policy.device) if labels else None  # (N,)
        self.version = version if version is not None else max(labels, default=0)
        self.stops = self.replay.is_last
        if trace.sampling.stop_token_ids:
            ids = torch.tensor(trace.sampling.stop_token_ids, device=policy.device)
            self.stops = self.stops & torch.isin(self.replay.targets, ids)
        self.reported, broken = self.replay.reported.clone(), ~self.replay.reported.isfinite()
        if (broken & ~self.stops).any():  # broken output: named by request, kept out of the means
            self.broken = broken
        else:  # NaN at stop tokens alone says the same as a zero there: no value
            self.broken = torch.zeros_like(broken)
            self.reported[broken] = 0.0
        self.kinds: dict[str, tuple[Sampling, Cause | None]] = {"processed": (trace.sampling, None)}
        self.kinds |= _variants(trace.sampling)
        alone = Sampling(trace.sampling.temperature, trace.sampling.max_new_tokens, trace.sampling.stop_token_ids)
        self.trainer = Reading("processed", head="float32" if policy.fp32_head else "16 bits")
        if trainer == "temperature" and alone != trace.sampling:
            self.kinds["temperature"] = alone, NO_MASK
            self.trainer = replace(self.trainer, kind="temperature")
        self.half = torch.bfloat16 if policy.model.dtype == torch.float32 else policy.model.dtype
        self.heads = {"float32": torch.float32, "16 bits": self.half}
        self.bodies: dict[str, Body] = {}
        current = self.replay.body()
        self.bodies["current"] = self._body((), current)
        other = self.replay.other_arithmetic()
        check_other_path(policy, current, other)
        self.other = {"": self._body((), other)}  # the floor's second passes, by arithmetic

    # ---------------------------------------------------------------------------------------------- predictions
    def _body(self, causes: tuple[Cause, ...], hidden: Tensor, weights: Weights | None = None) -> Body:
        body = Body(causes, hidden, weights, {})
        self._read(body, {name: sampling for name, (sampling, _) in self.kinds.items()})
        return body

    def _read(self, body: Body, samplings: dict[str, Sampling]) -> None:
        for head, dtype in self.heads.items():
            for key, values in self.replay.read(body.hidden, samplings, dtype, body.weights).items():
                body.values[head, *key] = values

    def add_kind(self, name: str, sampling: Sampling, cause: Cause) -> None:
        """A distribution found by looking at the trace, read from every pass there is."""
        self.kinds[name] = sampling, cause
        for body in (*self.bodies.values(), *self.other.values()):
            self._read(body, {name: sampling})

    def predict(self, body: str, reading: Reading) -> Tensor:
        """What the engine would have reported: (N,), NaN where the hypothesis says nothing."""
        values = self.bodies[body].values[reading.head, reading.kind, reading.token]
        if reading.shift:
            values = self.replay.neighbours(values, reading.shift)
        return values.masked_fill(self.stops, 0.0) if reading.stop else values

    def aligned(self, reading: Reading) -> Tensor:
        """The reported values at the tokens they are of, whatever place they were reported at: (N,), NaN if unknown."""
        reported = self.reported.masked_fill(self.broken | (self.stops & reading.stop), math.nan)
        return self.replay.neighbours(reported, -reading.shift) if reading.shift else reported

    def miss(self, body: Body, reading: Reading) -> Tensor:
        """|value - reported| of each token, as `aligned`: (N,)."""
        return (body.values[reading.head, reading.kind, reading.token] - self.aligned(reading)).abs()

    def residual(self, body: str, reading: Reading) -> Tensor:
        return (self.predict(body, reading) - self.reported).masked_fill(self.broken, math.nan)

    def floor(self, body: str, reading: Reading) -> Noise:
        """The trainer against itself along another path of the same arithmetic."""
        arithmetic = body if body in self.other else ""
        key = reading.head, reading.kind, reading.token
        base = self.bodies[arithmetic or "current"].values[key]
        weights = self.bodies[arithmetic or "current"].weights
        dtypes = next(iter(weights.values())).dtype if weights else self.policy.model.dtype, self.heads[reading.head]
        step = max(torch.finfo(dtype).eps for dtype in dtypes)
        return Noise.of(self.replay, _difference(base, self.other[arithmetic].values[key]), step)

    def explain(self, body: str, reading: Reading) -> Explanation:
        causes = list(self.bodies[body].causes)
        if (kind := self.kinds[reading.kind][1]) is not None:
            causes.append(kind)
        causes += [TOP_1] * (reading.token == "top-1") + [NO_STOP] * reading.stop
        causes += [SHIFTED[reading.shift]] if reading.shift else []
        supported = True
        if reading.head != "float32":
            causes.append(HEAD)
            fine = replace(reading, head="float32")
            supported = self._points_there(body, reading, body, fine)
        floor = self.floor(body, reading)
        residual = self._without_flips(body, reading, floor)
        if body in self.other and body:
            supported &= self._points_there(body, reading, "current", reading)
        noise = Noise.of(self.replay, residual)
        return Explanation(tuple(causes), body, reading, noise, floor, floor.wrong_rows(self.replay, residual),
                           noise.tokens / len(residual), supported,
                           fitted=reading.kind.startswith("fitted") + self.bodies[body].fitted,
                           num_tensors=self.bodies[body].num_tensors)

    def _without_flips(self, body: str, reading: Reading, floor: Noise) -> Tensor:
        """The residual without the few tokens that an error of rounding moves by a whole step: at a mask's edge, in for
        one side and out for the other; or at the edge between two 16-bit values of logits computed in fp32."""
        residual, sampling, edge = self.residual(body, reading), self.kinds[reading.kind][0], 0.0
        beyond = residual.abs() > floor.allowed_max
        if reading.head != "float32" and self.policy.model.dtype == torch.float32:
            fine = self.bodies[body].values["float32", reading.kind, reading.token]
            step = (self.bodies[body].values["16 bits", reading.kind, reading.token] - fine).abs().max()
            edge, beyond = HEAD_EDGE, beyond & (residual.abs() <= 2 * step)
        elif (sampling.top_k, sampling.top_p, sampling.min_p) != (0, 1.0, 0.0):
            edge = MASK_EDGE
        expected = edge * len(residual)  # give or take two standard deviations of such a count
        few = 0 < beyond.sum() <= expected + 2 * expected**0.5 + 3 * floor.infinite * (edge > 0)
        return residual.masked_fill(beyond, math.nan) if few else residual

    def _points_there(self, body: str, reading: Reading, from_body: str, from_reading: Reading) -> bool:
        """Is the mismatch as large as what this hypothesis changes, and mostly of its sign?

        Rounding in 16 bits is a hypothesis about noise: its size alone would excuse any fault that is no larger.
        """
        change = self.predict(body, reading) - self.predict(from_body, from_reading)
        miss = -self.residual(from_body, from_reading)
        told = (change * miss).isfinite() & (change * miss != 0)
        agreeing = (change * miss > 0)[told].double().mean().item() if told.any() else 0.0
        large = bool(told.any()) and miss[told].abs().mean() > 0.5 * change[told].abs().mean()
        return bool(large) and (agreeing - 0.5) * 2 * told.sum().item() ** 0.5 > SIGN_SIGMAS


def _difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """ours - theirs, 0 where both give no probability at all."""
    return (ours - theirs).masked_fill(ours.isinf() & theirs.isinf(), 0.0)


def _variants(sampling: Sampling) -> dict[str, tuple[Sampling, Cause]]:
    """The distributions an engine may report in place of the one it drew from."""
    neutral = dict(top_k=0, top_p=1.0, min_p=0.0)
    no_penalties = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    unit = dict(temperature=0.0 if sampling.temperature == 0 else 1.0)
    variants = {
        "raw": (replace(sampling, **unit, **neutral, **no_penalties), RAW),
        "no temperature": (replace(sampling, **unit), NO_TEMPERATURE),
        "no mask": (replace(sampling, **neutral), NO_MASK),
        "no penalties": (replace(sampling, **no_penalties), NO_PENALTIES),
    }
    seen, kept = {sampling}, {}
    for name, (variant, cause) in variants.items():
        if variant not in seen:
            kept[name] = variant, cause
            seen.add(variant)
    return kept
