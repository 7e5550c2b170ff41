"""What an engine may have done to the log-probabilities it reported: hypotheses, recomputed token by token.

A hypothesis is a forward pass (which weights, which KV cache, which dtype) and a reading of it (which distribution,
which token, which place). It explains a trace if it brings the mismatch down to the floor, and the floor is measured:
the trainer against itself along another path of the same arithmetic.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from engine_adapter import Sampling
from replay import Replay, Trace, Weights
from rl import Policy

FLOOR_FACTOR = 1.5  # a mean mismatch within this many times the measured floor is parity
TAIL_FACTOR = 4.0  # the same for the largest token and for the worst sequence, which vary more
ROUNDING = 2e-7  # nats: reported log-probabilities are float32
FEW = 0.2  # at most this share of the sequences can be "a few wrong requests"
MASK_EDGE = 0.004  # share of the tokens that may lie at the edge of a top-k, top-p or min-p mask
HEAD_EDGE = 0.02  # the same for the edges between the 16-bit values of V logits, where the body is in fp32
MAX_CAUSES = 3
FALSE_ALARM = 1e-6  # chance, over a whole trace, that tokens honestly drawn are called implausible
SIGN_SIGMAS = 4.0  # of a coin thrown once a token, by which a 16-bit hypothesis must agree in sign
PROJECTIONS = 128  # of the tokens, by which old tensors are told apart
BLOCK_SIZES = (16, 32, 64, 128)  # of a KV cache, where the trace does not tell


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
RAW = Cause("semantics", "raw log-probabilities (temperature, penalties and masks not applied)", PROCESSED)
NO_TEMPERATURE = Cause("semantics", "temperature not applied", PROCESSED)
NO_MASK = Cause("semantics", "top-k/top-p/min-p mask not applied to the reported value", PROCESSED)
NO_PENALTIES = Cause("semantics", "penalties not applied to the reported value", PROCESSED)
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

    @classmethod
    def of(cls, replay: Replay, difference: Tensor) -> "Noise":
        infinite = difference.isinf()
        finite = difference[difference.isfinite()]
        if not len(finite):
            return cls(*[math.inf] * 6, int(infinite.sum()), 0)
        size, rows = finite.abs(), replay.row_means(difference.abs().masked_fill(infinite, math.nan))
        return cls(size.mean().item(), size.median().item(), size.pow(2).mean().sqrt().item(), size.max().item(),
                   (torch.expm1(finite.clamp(max=20)) - finite).mean().item(), rows[~rows.isnan()].max().item(),
                   int(infinite.sum()), len(finite))

    def allows(self, other: "Noise") -> bool:
        """Is the other difference no more than this floor, given how few tokens each is measured on?"""
        return (other.mean <= self.allowed_mean(other.tokens) and other.max <= self.allowed_max
                and other.infinite == 0)

    def allowed_mean(self, tokens: int) -> float:
        """1.5 times the floor, and four standard errors of a mean over so few tokens."""
        return FLOOR_FACTOR * self.mean + 4 * self.rms / tokens**0.5 + ROUNDING

    @property
    def allowed_max(self) -> float:
        return TAIL_FACTOR * max(self.max, TAIL_FACTOR * self.rms) + ROUNDING

    def wrong_rows(self, replay: Replay, difference: Tensor) -> Tensor:
        """Sequences whose mean difference is beyond what the floor's worst sequence and the length allow: (B,) bool."""
        limit = torch.maximum(FLOOR_FACTOR * self.mean + 8 * self.rms / replay.lengths**0.5,
                              torch.tensor(TAIL_FACTOR * self.worst_row))
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
    fitted: bool = False  # has a number or a place that was read off the trace itself
    num_tensors: int = 0  # that it calls old

    @property
    def fits(self) -> bool:
        sound = self.supported and self.coverage >= 0.5 and not self.wrong.any()
        return sound and self.floor.allows(self.noise)

    @property
    def order(self) -> tuple:
        """Fewest causes first, a wrong request each being one; what was fitted to the trace last; then the closest."""
        apart = 0 if self.apart is None else int(self.apart.sum())
        return len(self.causes) + max(0, apart - 1), apart, self.num_tensors, self.fitted, self.noise.mean

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
        self.other = {"": self._body((), self.replay.other_arithmetic())}  # the floor's second passes, by arithmetic

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
        return Noise.of(self.replay, _difference(base, self.other[arithmetic].values[key]))

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
                           fitted=reading.kind.startswith("fitted") or bool(self.bodies[body].note),
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
        few = edge and 0 < beyond.sum() <= edge * len(residual) + 3 * floor.infinite
        return residual.masked_fill(beyond, math.nan) if few else residual

    def _points_there(self, body: str, reading: Reading, from_body: str, from_reading: Reading) -> bool:
        """Does the mismatch have the sign of what this hypothesis changes, in clearly more than half of the tokens?

        Rounding in 16 bits is a hypothesis about noise: its size alone would excuse any fault that is no larger.
        """
        change = self.predict(body, reading) - self.predict(from_body, from_reading)
        product_of_both = change * -self.residual(from_body, from_reading)
        told = product_of_both[product_of_both.isfinite() & (product_of_both != 0)]
        return len(told) > 0 and ((told > 0).double().mean().item() - 0.5) * 2 * len(told) ** 0.5 > SIGN_SIGMAS


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


# ------------------------------------------------------------------------------------------------ the search
class Search:
    """Hypotheses in the order of their cost, until one explains the trace: readings, weights, KV caches, tensors."""

    def __init__(self, probe: Probe):
        self.probe, self.replay = probe, probe.replay
        self.found: dict[tuple[str, Reading], Explanation] = {}

    def run(self) -> list[Explanation]:
        """All explanations tried, the best first; those that fit come before those that do not."""
        probe = self.probe
        self._combine(["current"], max_causes=0)
        if not self._fitting(0):
            self._combine(["current"])
        if not self._fitting(1):
            for updates, weights in probe.earlier.items():
                hidden = self.replay.body(weights)
                probe.bodies[f"{updates} back"] = probe._body((stale(updates),), hidden, weights)
            self._other_dtype()
            self._fit_kinds()
            self._combine(list(probe.bodies))
        if not self._fitting(1) and probe.earlier:
            readings = self._promising()
            for updates, weights in probe.earlier.items():
                self._kv_bodies(updates, weights, readings)
            for (updates, weights), reading in product(probe.earlier.items(), readings):
                if not self._fitting(reading.num_causes + 1):
                    self._tensors(updates, weights, reading)
        if not self._fitting(1):
            self._few_wrong()
        return sorted(self.found.values(), key=lambda e: (not e.fits, e.order if e.fits else e.noise.mean))

    def _fitting(self, max_causes: int) -> bool:
        """Is there an explanation by so few causes, without a number or a place read off the trace?"""
        return any(e.fits and not e.fitted and len(e.causes) <= max_causes for e in self.found.values())

    def _combine(self, bodies: list[str], max_causes: int = MAX_CAUSES) -> None:
        """Every reading of every pass, up to so many causes."""
        probe = self.probe
        stops = (False, True) if (probe.reported[probe.stops] == 0).any() else (False,)
        ways = product(bodies, probe.kinds, ("sampled", "top-1"), (0, 1, -1), stops, probe.heads)
        for body, kind, token, shift, stop, head in ways:
            reading = Reading(kind, token, shift, stop, head)
            num_causes = reading.num_causes + len(probe.bodies[body].causes)
            if num_causes <= max_causes and (body, reading) not in self.found:
                self.found[body, reading] = probe.explain(body, reading)

    def _promising(self, most: int = 3) -> list[Reading]:
        """The readings under which the tokens are closest to some version of the weights; fp32 heads."""
        probe = self.probe
        bodies = ["current", *(name for name in probe.bodies if name.endswith(" back"))]
        scores = {}
        for reading in {reading for _, reading in self.found if reading.head == "float32"}:
            if reading.num_causes < MAX_CAUSES:
                best = torch.stack([probe.residual(body, reading).abs() for body in bodies]).nan_to_num(math.inf)
                scores[reading] = best.amin(dim=0).clamp(max=1.0).mean().item()  # one wild token decides nothing
        ordered = sorted(scores, key=lambda reading: scores[reading])
        fitted = [reading for reading in ordered if reading.kind.startswith("fitted")]
        plain = [reading for reading in ordered if reading not in fitted]
        return list(dict.fromkeys([*plain[:most], Reading(), *fitted[:1]]))

    # ---------------------------------------------------------------------------------------------- numerics
    def _other_dtype(self) -> None:
        """The whole body in bfloat16 where the trainer is in fp32, and the other way round."""
        probe, replay = self.probe, self.replay
        other = torch.bfloat16 if probe.policy.model.dtype == torch.float32 else torch.float32
        name = f"body in {str(other).removeprefix('torch.')}"
        cause = Cause("numerics", f"whole {name} in the engine", "the same dtype on both sides (--dtype)")
        weights = {n: p.detach().to(other) for n, p in probe.policy.model.named_parameters()}
        probe.bodies[name] = probe._body((cause,), replay.body(weights), weights)
        with replay.holding(weights):
            hidden = replay.other_arithmetic()
        probe.other[name] = probe._body((), hidden, weights)

    # ---------------------------------------------------------------------------------------------- semantics
    def _fit_kinds(self) -> None:
        """Sampling parameters that are in force and not in the trace: read off the first tokens' values."""
        probe, replay, declared = self.probe, self.replay, self.probe.trace.sampling
        chunk, logits = next(replay.logits(probe.bodies["current"].hidden[:512], torch.float32))
        targets, reported = replay.targets[chunk], probe.reported[chunk]

        def miss(sampling: Sampling) -> Tensor:
            logprobs = torch.log_softmax(replay.process(logits, sampling, chunk), dim=-1)
            return (logprobs.gather(-1, targets[:, None])[:, 0] - reported).abs().nan_to_num(1.0)

        for name, low, high in (("temperature", 0.05, 5.0), ("repetition_penalty", 0.5, 2.0)):
            if name == "temperature" and declared.temperature == 0:
                continue
            best, width = (low * high) ** 0.5, (high / low) ** 0.5
            for _ in range(14):  # grids of nine, each within two cells of the best of the last
                grid = [best * width ** (step / 4) for step in range(-4, 5)]
                best = min(grid, key=lambda value: miss(replace(declared, **{name: value})).median().item())
                width **= 0.25
            if abs(best / getattr(declared, name) - 1) > 0.02:  # noise moves the optimum by less
                probe.add_kind(f"fitted {name}", replace(declared, **{name: best}), hidden(f"{name} {best:.3f}"))
        if (declared.top_k, declared.top_p, declared.min_p) == (0, 1.0, 0.0):
            self._fit_masks(logits, chunk, miss)

    def _fit_masks(self, logits: Tensor, chunk: Tensor, miss: Callable[[Sampling], Tensor]) -> None:
        """A hidden mask shows in each value: reported - unmasked = -log(mass kept)."""
        probe, replay, declared = self.probe, self.replay, self.probe.trace.sampling
        probabilities = torch.softmax(replay.process(logits, declared, chunk).double(), dim=-1)  # (n, V)
        sampled = probabilities.gather(-1, replay.targets[chunk][:, None])[:, 0]
        kept = sampled / probe.reported[chunk].exp()  # (n,)
        descending = probabilities.sort(dim=-1, descending=True).values
        mass = descending.cumsum(dim=-1)
        size = (mass - kept[:, None]).abs().argmin(dim=-1, keepdim=True)  # (n, 1) last kept place
        cut = (kept < 1 - 1e-3) & (kept > sampled)
        if not cut.any():
            return
        quantiles = torch.tensor([0.0, 0.002, 0.01, 0.02, 0.05, 0.1, 0.2], dtype=mass.dtype, device=mass.device)
        values = {"top_k": [int(size[cut].mode(dim=0).values) + 1]}
        limits = {"top_p": mass.gather(-1, size), "min_p": descending.gather(-1, size) / descending[:, :1]}
        for name, limit in limits.items():
            least = limit[cut].quantile(quantiles).tolist()  # the limit is the least of them, but for noise
            values[name] = [value * (1 - 1e-6) for value in least] + [round(value, 2) for value in least]
        for name, candidates in values.items():
            best = min((value for value in candidates if 0 < value < 1 or name == "top_k"), default=None,
                       key=lambda value: miss(replace(declared, **{name: value})).clamp(max=1.0).mean().item())
            if best is not None:
                probe.add_kind(f"fitted {name}", replace(declared, **{name: best}), hidden(f"{name} {best:.4g}"))

    # ---------------------------------------------------------------------------------------------- KV caches
    def _kv_bodies(self, updates: int, weights: Weights, readings: list[Reading]) -> None:
        """Stale prefixes of whole blocks; and updates in flight, their places found sequence by sequence."""
        probe, replay = self.probe, self.replay
        old, new = probe.bodies[f"{updates} back"], probe.bodies["current"]
        audited = probe.trace.meta.get("audit", {}).get("block_size")
        for block in (audited,) if audited else BLOCK_SIZES:
            prefix = (replay.prompt_lengths - 1) // block * block  # (B,) a full hit leaves one token to compute
            if prefix.any():
                body = probe._body((PREFIX,), replay.body_over_kv(weights, prefix))
                for number, reading in enumerate(readings):
                    hit = self._closest_rows([body, new], reading) == 0  # (B,) prompts that were met before
                    if hit.any():
                        note = f"in {int(hit.sum())} of {len(hit)} requests"
                        self._add(f"prefix of {block}s, {updates} back, {number}",
                                  _merged(hit[replay.rows], body, new, (PREFIX,), note))
        for number, reading in enumerate(readings):
            place = self._change_point(old, new, reading)  # (B,)
            if ((place > 0) & (place < replay.lengths)).any():
                before = replay.positions < place[replay.rows]
                self._add(f"recomputed, {updates} back, {number}",
                          _merged(before, old, new, (RECOMPUTED,), _places(place, replay.lengths)))
            self._kept(f"kept, {updates} back, {number}", weights, old, reading)

    def _kept(self, name: str, weights: Weights, old: Body, reading: Reading) -> None:
        """KV kept over an update: each sequence's own best place, or the one most sequences have (they run in step)."""
        probe, replay = self.probe, self.replay
        own = self._change_point(old, None, reading)  # (B,)
        inside = own[(own > 0) & (own < replay.lengths)]
        if not len(inside):
            return
        places = [own, inside.mode().values.expand_as(own).minimum(replay.lengths)]
        merged = []
        for place in places:
            kept = probe._body((KEPT,), replay.body_over_kv(weights, (replay.prompt_lengths + place - 1).clamp(min=0)))
            merged.append(_merged(replay.positions < place[replay.rows], old, kept, (KEPT,), ""))
        choice = self._closest_rows(merged, reading)
        place = torch.where(choice == 0, *places)
        causes = (KEPT, MISLABELLED) if self._mislabelled(place) else (KEPT,)
        self._add(name, _merged((choice == 0)[replay.rows], *merged, causes, _places(place, replay.lengths)))

    def _closest_rows(self, bodies: list[Body], reading: Reading) -> Tensor:
        """Which of the passes comes closest, sequence by sequence: (B,)."""
        misses = [self.replay.row_means(self.probe.miss(body, reading)).nan_to_num(0.0) for body in bodies]
        return torch.stack(misses).argmin(dim=0)

    def _add(self, name: str, body: Body) -> None:
        self.probe.bodies[name] = body
        self._combine([name])

    def _change_point(self, old: Body, new: Body | None, reading: Reading) -> Tensor:
        """How many tokens of each row are the old weights': (B,). Without `new`, where they stop being so."""
        probe, replay = self.probe, self.replay
        gain = -probe.miss(old, reading)  # (N,) for calling this token old
        if new is None:
            gain = gain + max(3 * probe.floor("current", reading).rms, 10 * ROUNDING)
        else:
            gain = gain + probe.miss(new, reading)
        table = torch.zeros(len(replay.lengths), int(replay.lengths.max()), dtype=gain.dtype, device=gain.device)
        table[replay.rows, replay.positions] = gain.nan_to_num(0.0).clamp(-1.0, 1.0)  # one wild token decides nothing
        sums = torch.nn.functional.pad(table.cumsum(dim=1), (1, 0))  # (B, T + 1): the gain of k old tokens
        return sums.argmax(dim=1)

    def _mislabelled(self, place: Tensor) -> bool:
        """Do the trace's labels change one token before the weights did, in most sequences that saw an update?"""
        probe, replay = self.probe, self.replay
        if probe.labels is None:
            return False
        newest = torch.zeros_like(replay.lengths).scatter_reduce(0, replay.rows, probe.labels, "amax")
        labelled = replay.row_means((probe.labels < newest[replay.rows]).double()) * replay.lengths
        changed = (place > 0) & (place < replay.lengths) & (labelled > 0)
        return bool(changed.any() and (place - labelled.round())[changed].median() == 1)

    # ---------------------------------------------------------------------------------------------- tensors
    def _tensors(self, updates: int, weights: Weights, reading: Reading, rounds: int = 6) -> None:
        """Which tensors are still the old ones? Ranked by gradients, settled by recomputed values.

        To first order the mismatch is the sum of the old tensors' effects, and one backward pass gives the effect of
        every tensor on one random projection of the tokens. A hundred such projections make a sparse linear problem;
        its greedy solutions of 1, 2, 4, ... tensors are then recomputed exactly: O(log n) forwards a round, and no
        claim without a recomputed value.
        """
        names = [name for name, p in self.probe.policy.model.named_parameters() if not torch.equal(p, weights[name])]
        old, closest = frozenset(), math.inf
        for _ in range(rounds):
            candidates = self._ranked(names, old, weights, reading)
            tried = {}
            for size in sorted({min(2**power, len(candidates)) for power in range(len(candidates).bit_length())} - {0}):
                subset = old.symmetric_difference(candidates[:size])
                tried[subset] = self._with_old(subset, updates, weights, reading)
            if not tried:
                return
            old = min(tried, key=lambda subset: (not tried[subset].fits, len(subset) * tried[subset].fits,
                                                 tried[subset].noise.mean))
            if tried[old].fits or tried[old].noise.mean >= 0.9 * closest:
                break
            closest = tried[old].noise.mean
        if tried[old].fits:
            for name in sorted(old) if 1 < len(old) <= 8 else ():  # is each of them needed?
                fewer = self._with_old(old - {name}, updates, weights, reading)
                old = old - {name} if fewer.fits else old
            self._with_old(old, updates, weights, reading)
            self._combine([self._name(old, updates)])

    def _name(self, old: frozenset[str], updates: int) -> str:
        return f"{updates} back: {', '.join(sorted(old))}"

    def _with_old(self, old: frozenset[str], updates: int, weights: Weights, reading: Reading) -> Explanation:
        """The explanation by these old tensors; kept only as long as it is the one looked at."""
        probe, replay, name = self.probe, self.replay, self._name(old, updates)
        some = {tensor: weights[tensor] for tensor in old}
        with torch.no_grad():
            probe.bodies[name] = probe._body((old_tensors(sorted(old), updates),), replay.body(some), some)
            probe.bodies[name].num_tensors = len(old)
            both = [probe.explain(name, replace(reading, head=head)) for head in ("float32", "16 bits")]
        explanation = min(both, key=lambda e: (not e.fits, e.noise.mean))
        if explanation.fits:
            self.found[name, explanation.reading] = explanation
        elif not any(body == name for body, *_ in self.found):
            del probe.bodies[name]
        return explanation

    def _ranked(self, names: list[str], old: frozenset[str], weights: Weights, reading: Reading) -> list[str]:
        """Tensors whose exchange for their other version should explain what is left, the most telling first."""
        parameters = dict(self.probe.policy.model.named_parameters())
        held = {name: parameter.detach() for name, parameter in parameters.items()}
        left, effects = [], []  # one entry per random projection of the tokens
        with torch.enable_grad(), self.replay.holding({name: weights[name] for name in old}):
            steps = [(held[name] if name in old else weights[name]).float() - parameters[name].detach().float()
                     for name in names]
            for miss, projections in self._projected(reading):
                for signs in projections:
                    left.append((signs * miss.detach()).sum())
                    gradients = torch.autograd.grad((signs * -miss).sum(), [parameters[name] for name in names],
                                                    retain_graph=True, allow_unused=True)
                    effects.append(torch.stack([left[-1] * 0 if gradient is None else (gradient.float() * step).sum()
                                                for gradient, step in zip(gradients, steps, strict=True)]))
        left, effects = torch.stack(left).double(), torch.stack(effects).double()  # (m,), (m, n)
        chosen = []
        while len(chosen) < len(names):  # matching pursuit with coefficients of one
            errors = (left[:, None] - effects).pow(2).sum(dim=0)  # (n,) estimates |mismatch left after the exchange|^2
            errors[chosen] = math.inf
            best = int(errors.argmin())
            if chosen and errors[best] >= left.pow(2).sum():
                break
            chosen.append(best)
            left = left - effects[:, best]
        return [names[index] for index in chosen]

    def _projected(self, reading: Reading) -> Iterator[tuple[Tensor, Tensor]]:
        """Groups of sequences: reported - value with its graph (n,), and random signs (k, n); PROJECTIONS in all."""
        probe, replay, sampling = self.probe, self.replay, self.probe.kinds[reading.kind][0]
        reported, generator = probe.aligned(reading), torch.Generator().manual_seed(0)
        groups = list(replay.micros(max(1, len(replay.inputs) // 32)))
        for rows in groups:
            tokens = ((replay.rows >= rows.start) & (replay.rows < rows.stop)).nonzero()[:, 0]
            logits = replay.head(replay._hidden(rows)[replay.response[rows]], torch.float32)
            logprobs = torch.log_softmax(replay.process(logits, sampling, tokens), dim=-1)
            sampled = logprobs.gather(-1, replay.targets[tokens, None])[:, 0]
            miss = reported[tokens] - (sampled if reading.token == "sampled" else logprobs.amax(dim=-1))
            known = miss.isfinite()
            shape = -(-PROJECTIONS // len(groups)), int(known.sum())
            yield miss[known], (torch.randint(2, shape, generator=generator) * 2 - 1).to(miss)

    # ---------------------------------------------------------------------------------------------- a few requests
    def _few_wrong(self) -> None:
        """Explanations that hold for all but a few sequences: those are listed, not averaged away."""
        for key, explanation in list(self.found.items()):
            wrong = explanation.wrong
            if 0 < wrong.sum() <= FEW * len(wrong) and len(explanation.causes) < MAX_CAUSES:
                residual = self.probe.residual(explanation.body, explanation.reading)
                rest = residual.masked_fill(wrong[self.replay.rows], math.nan)
                self.found[*key, "few"] = replace(
                    explanation, causes=(*explanation.causes, WRONG_REQUESTS), noise=Noise.of(self.replay, rest),
                    wrong=torch.zeros_like(wrong), apart=wrong,
                )


def _merged(first: Tensor, ours: Body, theirs: Body, causes: tuple[Cause, ...], note: str) -> Body:
    values = {key: torch.where(first, ours.values[key], theirs.values[key]) for key in ours.values}
    return Body(causes, None, None, values, note)


def _places(place: Tensor, lengths: Tensor) -> str:
    """Where an update came, in words."""
    inside = place[(place > 0) & (place < lengths)].tolist()
    common = max(set(inside), key=inside.count) if inside else 0
    spread = f"tokens {min(inside, default=0)} to {max(inside, default=0)}, mostly {common},"
    where = f"token {common}" if len(set(inside)) == 1 else spread
    return f"before {where} of the response in {len(inside)} of {len(lengths)} requests"
