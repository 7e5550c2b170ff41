"""The search for an explanation: hypotheses in the order of their cost, until one brings the mismatch to the floor."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from engine_adapter import Sampling
from probe.hypotheses import (
    KEPT,
    MISLABELLED,
    PREFIX,
    RECOMPUTED,
    ROUNDING,
    WRONG_REQUESTS,
    Body,
    Cause,
    Explanation,
    Noise,
    Probe,
    Reading,
    hidden,
    old_tensors,
    stale,
)
from probe.traces import Weights

MAX_CAUSES = 3  # at once
LEAST_SHARE = 0.7  # of the excess over the floor that an explanation must explain
FEW = 0.2  # at most this share of the sequences can be "a few wrong requests"
SAME_DTYPE = "the same dtype on both sides (--dtype)"
PROJECTIONS = 64  # of the tokens, by which old tensors are told apart
PLACES = 7  # tokens by which the old weights' values may seem to outlast an update
BLOCK_SIZES = (16, 32, 64, 128)  # of a KV cache, where the trace does not tell


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
        for explanation in self.found.values():
            explanation.supported &= self._enough(explanation)
        return sorted(self.found.values(), key=lambda e: (not e.fits, e.order if e.fits else e.noise.mean))

    def _enough(self, explanation: Explanation) -> bool:
        """Most of the excess must be explained: near the floor its tolerance alone would let a wrong cause pass.
        Rounding hypotheses skip this test; `_points_there` checks the agreement of signs instead. A number fitted on
        top of rounding must at least halve the remaining mismatch."""
        by_noise = explanation.reading.head != "float32" or explanation.body in self.probe.other
        if by_noise and explanation.reading.kind.startswith("fitted"):
            without = self.found.get((explanation.body, replace(explanation.reading, kind="processed")))
            return without is not None and explanation.noise.mean < 0.5 * without.noise.mean
        start = self.found["current", Reading()]
        return by_noise or not explanation.causes or explanation.share(start) >= LEAST_SHARE

    def _fitting(self, max_causes: int) -> bool:
        """Is there an explanation by so few causes, without a number or a place read off the trace?"""
        return any(e.fits and not e.fitted and len(e.causes) <= max_causes and self._enough(e)
                   for e in self.found.values())

    def _combine(self, bodies: list[str], max_causes: int = MAX_CAUSES) -> None:
        """Every reading of every pass, up to so many causes."""
        probe = self.probe
        stops = (False, True) if (probe.reported[probe.stops] == 0).any() else (False,)
        ways = product(bodies, probe.kinds, ("sampled", "top-1"), (0, 1, -1), stops, probe.heads)
        for body, kind, token, shift, stop, head in ways:
            reading = Reading(kind, token, shift, stop, head)
            num_causes = reading.num_causes + len(probe.bodies[body].causes)
            if kind.startswith("fitted") and body in probe.other:
                continue  # a fitted number on top of another dtype's noise could excuse too much
            if num_causes <= max_causes and (body, reading) not in self.found:
                self.found[body, reading] = probe.explain(body, reading)

    def _promising(self, most: int = 3) -> list[Reading]:
        """The readings under which the tokens are closest to some version of the weights; fp32 heads."""
        probe = self.probe
        bodies = ["current", *(name for name in probe.bodies if name.endswith(" back"))]
        scores = {}
        for reading in dict.fromkeys(reading for _, reading in self.found):
            if reading.head == "float32" and reading.num_causes < MAX_CAUSES:
                best = torch.stack([probe.residual(body, reading).abs() for body in bodies]).nan_to_num(math.inf)
                scores[reading] = best.amin(dim=0).clamp(max=1.0).mean().item()  # one wild token decides nothing
        ordered = sorted(scores, key=lambda reading: scores[reading])
        fitted = [reading for reading in ordered if reading.kind.startswith("fitted")]
        plain = [reading for reading in ordered if reading not in fitted]
        return list(dict.fromkeys([*plain[:most], Reading(), *fitted[:1]]))

    # ---------------------------------------------------------------------------------------------- numerics
    def _other_dtype(self) -> None:
        """The whole body in bfloat16 where the trainer is in fp32, and the other way round; or its weights alone."""
        probe, replay = self.probe, self.replay
        if probe.policy.model.dtype == torch.float32:
            rounded = {n: p.detach().bfloat16().float() for n, p in probe.policy.model.named_parameters()}
            cause = Cause("numerics", "weights rounded to bfloat16 on their way into the engine", SAME_DTYPE)
            if any(not torch.equal(p, rounded[n]) for n, p in probe.policy.model.named_parameters()):
                probe.bodies["rounded"] = probe._body((cause,), replay.body(rounded), rounded)
        other = torch.bfloat16 if probe.policy.model.dtype == torch.float32 else torch.float32
        name = f"body in {str(other).removeprefix('torch.')}"
        cause = Cause("numerics", f"whole {name} in the engine", SAME_DTYPE)
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

        def miss(sampling: Sampling) -> float:
            """Mean |value - reported|; one wild token decides nothing."""
            logprobs = torch.log_softmax(replay.process(logits, sampling, chunk), dim=-1)
            sampled = logprobs.gather(-1, targets[:, None])[:, 0]
            return (sampled - reported).abs().nan_to_num(1.0).clamp(max=1.0).mean().item()

        for name, low, high in (("temperature", 0.05, 5.0), ("repetition_penalty", 0.5, 2.0)):
            if name == "temperature" and declared.temperature == 0:
                continue
            best, width = (low * high) ** 0.5, (high / low) ** 0.5
            for _ in range(14):  # grids of nine, each within two cells of the best of the last
                grid = [best * width ** (step / 4) for step in range(-4, 5)]
                best = min(grid, key=lambda value: miss(replace(declared, **{name: value})))
                width **= 0.25
            # noise moves the optimum by less; and a value of 1 is that of the raw distribution, a hypothesis of its own
            if min(abs(best / getattr(declared, name) - 1), abs(best - 1)) > 0.02:
                probe.add_kind(f"fitted {name}", replace(declared, **{name: best}), hidden(f"{name} {best:.3f}"))
        if (declared.top_k, declared.top_p, declared.min_p) == (0, 1.0, 0.0):
            self._fit_masks(logits, chunk, miss)

    def _fit_masks(self, logits: Tensor, chunk: Tensor, miss: Callable[[Sampling], float]) -> None:
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
                       key=lambda value: miss(replace(declared, **{name: value})))
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
                                  _merged(hit[replay.rows], body, new, (PREFIX,), note, fitted=1))
        for number, reading in enumerate(readings):
            stale_rows = self._closest_rows([old, new], reading) == 0  # (B,)
            note = f"in {int(stale_rows.sum())} of {len(stale_rows)} requests"
            self._add(f"rows, {updates} back, {number}",
                      _merged(stale_rows[replay.rows], old, new, (stale(updates),), note, fitted=1))
            place = self._change_point(old, new, reading)  # (B,)
            if ((place > 0) & (place < replay.lengths)).any():
                before = replay.positions < place[replay.rows]
                self._add(f"recomputed, {updates} back, {number}",
                          _merged(before, old, new, (RECOMPUTED,), _places(place, replay.lengths), fitted=2))
            self._kept(f"kept, {updates} back, {number}", weights, old, reading)

    def _kept(self, name: str, weights: Weights, old: Body, reading: Reading) -> None:
        """KV kept over an update, in each sequence before the place that explains it best: where the old weights'
        values end, where most sequences have it, where the trace says (or one token later: async scheduling); and, for
        sequences still unexplained, a few tokens before, since old and new values may agree for a while."""
        probe, replay = self.probe, self.replay
        own = self._change_point(old, None, reading)  # (B,)
        inside = own[(own > 0) & (own < replay.lengths)]
        if not len(inside):
            return
        likely = [own, inside.mode().values.minimum(replay.lengths)]
        if (labelled := self._labelled()) is not None:
            likely += [labelled, (labelled + 1).minimum(replay.lengths)]
        floor, best, place = probe.floor("current", reading), None, own
        for number, candidate in enumerate((*likely, *(own - less for less in range(1, PLACES)))):
            wanted = torch.ones_like(own, dtype=torch.bool)
            if number >= len(likely):
                wanted = floor.wrong_rows(replay, probe.miss(best, reading)) & (candidate > 0)
            if not wanted.any():
                break
            tried = self._over_update(weights, old, candidate, wanted)
            if best is not None:
                wanted = wanted & (self._closest_rows([best, tried], reading) == 1)
                tried = _merged(wanted[replay.rows], tried, best, (KEPT,))
            best, place = tried, torch.where(wanted, candidate, place)
        causes = (KEPT, MISLABELLED) if self._mislabelled(place) else (KEPT,)
        self._add(name, replace(best, causes=causes, note=_places(place, replay.lengths), fitted=2))

    def _over_update(self, weights: Weights, old: Body, place: Tensor, wanted: Tensor) -> Body:
        """Old values before `place` (B,), from there new weights over the old KV; of use for the `wanted` (B,) rows."""
        probe, replay = self.probe, self.replay
        prefix = (replay.prompt_lengths + place - 1).clamp(min=0).masked_fill(~wanted, replay.inputs.shape[1])
        kept = probe._body((KEPT,), replay.body_over_kv(weights, prefix))
        return _merged(replay.positions < place[replay.rows], old, kept, (KEPT,))

    def _labelled(self) -> Tensor | None:
        """How many tokens of each row the trace says were sampled before its newest weights: (B,)."""
        probe, replay = self.probe, self.replay
        if probe.labels is None:
            return None
        newest = torch.zeros_like(replay.lengths).scatter_reduce(0, replay.rows, probe.labels, "amax")
        before = (probe.labels < newest[replay.rows]).double()
        return (replay.row_means(before) * replay.lengths).round().long()

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
        labelled = self._labelled()
        if labelled is None:
            return False
        changed = (place > 0) & (place < self.replay.lengths) & (labelled > 0)
        return bool(changed.any() and (place - labelled)[changed].median() == 1)

    # ---------------------------------------------------------------------------------------------- tensors
    def _tensors(self, updates: int, weights: Weights, reading: Reading, rounds: int = 5) -> None:
        """Which tensors are still the old ones? Ranked by gradients, settled by recomputed values.

        To first order the mismatch is the sum of the old tensors' effects, and one backward pass gives the effect of
        every tensor on one random projection of the tokens. A hundred such projections make a sparse linear problem;
        its greedy solutions of 1, 2, 4, ... tensors are then recomputed exactly: O(log n) forwards a round, and no
        claim without a recomputed value.
        """
        names = [name for name, p in self.probe.policy.model.named_parameters() if not torch.equal(p, weights[name])]
        old, closest = frozenset(), self.probe.explain("current", reading).noise.mean
        for _ in range(rounds):
            candidates = self._ranked(names, old, weights, reading)
            tried = {}
            for size in sorted({min(2**power, len(candidates)) for power in range(len(candidates).bit_length())} - {0}):
                subset = old.symmetric_difference(candidates[:size])
                tried[subset] = self._with_old(subset, updates, weights, reading)
            if not tried:
                return
            old = _fewest(tried) or min(tried, key=lambda subset: tried[subset].noise.mean)
            if tried[old].fits or tried[old].noise.mean > 0.8 * closest:  # found, or not on its track
                break
            closest = tried[old].noise.mean
        if tried[old].fits:
            for name in sorted(old) if len(old) <= 8 else ():  # is each of them needed?
                if name in old and len(old) > 1:
                    tried[old - {name}] = self._with_old(old - {name}, updates, weights, reading)
                    old = _fewest(tried)
            self._with_old(old, updates, weights, reading, keep=True)
            self._combine([self._name(old, updates)])

    def _name(self, old: frozenset[str], updates: int) -> str:
        return f"{updates} back: {', '.join(sorted(old))}"

    def _with_old(
        self, old: frozenset[str], updates: int, weights: Weights, reading: Reading, keep: bool = False
    ) -> Explanation:
        """The explanation by these old tensors. Its pass is kept for the verdict only if `keep`."""
        probe, replay, name = self.probe, self.replay, self._name(old, updates)
        some = {tensor: weights[tensor] for tensor in old}
        with torch.no_grad():
            probe.bodies[name] = probe._body((old_tensors(sorted(old), updates),), replay.body(some), some)
            probe.bodies[name].num_tensors = len(old)
            both = [probe.explain(name, replace(reading, head=head)) for head in ("float32", "16 bits")]
        explanation = min(both, key=lambda e: (not e.fits, e.noise.mean))
        if not keep and not any(body == name for body, *_ in self.found):
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
        groups = list(replay.micros(-(-len(replay.inputs) // 16)))
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


def _merged(
    first: Tensor, ours: Body, theirs: Body, causes: tuple[Cause, ...], note: str = "", fitted: int = 0
) -> Body:
    """A pass put together token by token: `ours` where `first` (N,) is true."""
    values = {key: torch.where(first, ours.values[key], theirs.values[key]) for key in ours.values}
    return Body(causes, None, None, values, note, fitted)


def _fewest(tried: dict[frozenset[str], Explanation]) -> frozenset[str] | None:
    """Of the sets that fit, the smallest whose remaining mismatch is at most rms / sqrt(tokens) above the least."""
    fits = {subset: explanation.noise for subset, explanation in tried.items() if explanation.fits}
    least = min(fits.values(), key=lambda noise: noise.mean, default=None)
    close = [subset for subset, noise in fits.items() if noise.mean <= least.mean + least.rms / least.tokens**0.5]
    return min(close, key=lambda subset: (len(subset), fits[subset].mean), default=None)


def _places(place: Tensor, lengths: Tensor) -> str:
    """Where an update came, in words."""
    inside = place[(place > 0) & (place < lengths)].tolist()
    common = max(set(inside), key=inside.count) if inside else 0
    spread = f"tokens {min(inside, default=0)} to {max(inside, default=0)}, mostly {common},"
    where = f"token {common}" if len(set(inside)) == 1 else spread
    return f"before {where} of the response in {len(inside)} of {len(lengths)} requests"
