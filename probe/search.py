"""The search for an explanation, cheap hypotheses first, until one is at its noise floor."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import mode

import torch
from torch import Tensor
from torch.nn.functional import pad

from probe import causes
from probe.causes import Cause
from probe.hypotheses import ROUNDING, Explanation, ForwardPass, Noise, Probe, Readout

MAX_CAUSES = 3  # of one explanation
LEAST_SHARE = 0.7  # of the mismatch above the noise floor that an explanation must explain
# Largest share of sequences that are "a few wrong requests"; under pressure so many must be right.
FEW = 0.2
PROJECTIONS = 64  # random projections of the tokens, to find the old tensors
MAX_ROUNDS = 5  # of the search for old tensors
# Tokens by which an update may come earlier than the old weights' values seem to end.
MAX_EARLIER = 6
BLOCK_SIZES = (16, 32, 64, 128)  # tokens per KV block, if the trace does not record the engine's


class Search:
    """Tests hypotheses by cost: readouts, weights and dtypes, KV caches, single tensors."""

    def __init__(self, probe: Probe):
        self.probe, self.replay = probe, probe.replay
        self.old: dict[int, ForwardPass] = {}  # under the earlier weights, by updates back
        self.found: dict[tuple[ForwardPass, Readout], Explanation] = {}

    def run(self) -> list[Explanation]:
        """All explanations tried, the best first; those that fit come before those that do not."""
        probe = self.probe
        self._explain([probe.current], max_causes=0)
        if not self._fitting(0):
            self._explain([probe.current])
        if not self._fitting(1):
            for updates, weights in probe.earlier.items():
                self.old[updates] = probe.forward_pass(causes.STALE.of(updates), weights=weights)
            passes = [probe.current, *self.old.values(), *self._other_dtypes()]
            seconds = [each.second for each in passes if each.second]
            self._fit_sampling([*passes, probe.second, *seconds])
            self._explain(passes)
        if not self._fitting(1) and self.old:
            readouts = self._promising()
            for old in self.old.values():
                self._kv_caches(old, readouts)
            for updates, readout in product(self.old, readouts):
                if not self._fitting(len(probe.causes_of(readout)) + 1):
                    self._tensors(updates, readout)
        explanations = [*self.found.values(), *([] if self._fitting(1) else self._few_wrong())]
        for explanation in explanations:
            explanation.supported &= self._enough(explanation)
        return sorted(explanations, key=lambda e: (not e.fits, e.order if e.fits else e.noise.mean))

    def _enough(self, explanation: Explanation) -> bool:
        """Most of the excess must be explained: the floor's tolerance could pass a wrong cause.

        Rounding hypotheses skip this test; `Probe._signs_agree` tests them instead. A number fitted
        on top of rounding must at least halve the remaining mismatch.
        """
        if explanation.readout.head == "float32" and explanation.forward.second is None:
            start = self.found[self.probe.current, Readout()]
            return not explanation.causes or explanation.share(start) >= LEAST_SHARE
        if not explanation.readout.fitted:
            return True
        without = self.found.get((explanation.forward,
                                  replace(explanation.readout, distribution="processed")))
        return without is not None and explanation.noise.mean < 0.5 * without.noise.mean

    def _fitting(self, max_causes: int) -> bool:
        """Is there an explanation by at most so many causes, with nothing fitted to the trace?"""
        return any(e.fits and not e.fitted and len(e.causes) <= max_causes and self._enough(e)
                   for e in self.found.values())

    def _explain(self, passes: list[ForwardPass], max_causes: int = MAX_CAUSES) -> None:
        """Test every readout of every pass, up to so many causes."""
        probe = self.probe
        no_stop = (False, True) if (probe.reported[probe.stops] == 0).any() else (False,)
        readouts = product(probe.distributions, ("sampled", "top-1"), (0, 1, -1), no_stop,
                           probe.heads)
        for forward, values in product(passes, list(readouts)):
            readout = Readout(*values)
            if readout.fitted and forward.second is not None:
                continue  # a fitted number could excuse too much of another dtype's noise
            num_causes = len(probe.causes_of(readout)) + len(forward.causes)
            if num_causes <= max_causes and (forward, readout) not in self.found:
                self.found[forward, readout] = probe.explain(forward, readout)

    def _promising(self) -> list[Readout]:
        """The readouts that bring the tokens closest to a version of the weights; fp32 heads only.

        The best three with nothing fitted, the default, and the best fitted one.
        """
        probe, passes, errors = self.probe, (self.probe.current, *self.old.values()), {}
        for readout in dict.fromkeys(readout for _, readout in self.found):
            if readout.head == "float32" and len(probe.causes_of(readout)) < MAX_CAUSES:
                residuals = torch.stack([probe.residual(each, readout).abs() for each in passes])
                closest = residuals.nan_to_num(math.inf).amin(dim=0)  # (N,)
                errors[readout] = closest.clamp(max=1.0).mean().item()  # a token counts at most 1
        ordered = sorted(errors, key=errors.get)
        plain = [readout for readout in ordered if not readout.fitted]
        fitted = [readout for readout in ordered if readout.fitted]
        return list(dict.fromkeys([*plain[:3], Readout(), *fitted[:1]]))

    # ------------------------------------------------------------------------------ numerics
    def _other_dtypes(self) -> Iterator[ForwardPass]:
        """An fp32 trainer's weights rounded to bfloat16; the whole body in the other dtype."""
        probe = self.probe
        parameters = {name: each.detach() for name, each in probe.policy.model.named_parameters()}
        other = torch.bfloat16 if probe.policy.model.dtype == torch.float32 else torch.float32
        if other == torch.bfloat16:
            rounded = {name: tensor.bfloat16().float() for name, tensor in parameters.items()}
            if any(not torch.equal(tensor, rounded[name]) for name, tensor in parameters.items()):
                yield probe.forward_pass(causes.ROUNDED, weights=rounded)
        weights = {name: tensor.to(other) for name, tensor in parameters.items()}
        forward = probe.forward_pass(causes.OTHER_DTYPE.of(str(other).removeprefix("torch.")),
                                     weights=weights)
        with self.replay.policy.using(weights):
            forward.second = probe.forward_pass(weights=weights, hidden=self.replay.second_path())
        yield forward

    # ------------------------------------------------------------------------------ semantics
    def _fit_sampling(self, passes: list[ForwardPass]) -> None:
        """Sampling parameters that the trace does not name, fitted to its first tokens.

        Each fitted value becomes a distribution that is read from the passes.
        """
        probe, replay, declared = self.probe, self.replay, self.probe.trace.sampling
        chunk, logits = next(replay.logits(probe.current.hidden[:512], torch.float32))

        def error(changes: dict[str, float]) -> float:
            """Mean |computed - reported|, at most 1 per token."""
            _, sampled = replay.logprobs(logits, replace(declared, **changes), chunk)
            errors = (sampled - probe.reported[chunk]).abs().nan_to_num(1.0)
            return errors.clamp(max=1.0).mean().item()

        for name, value, shown in [*self._fitted_scales(error),
                                   *self._fitted_masks(error, logits, chunk)]:
            hidden = replace(declared, **{name: value}), causes.HIDDEN.of(name, shown)
            probe.distributions[f"fitted {name}"] = hidden
            for each in passes:
                each.values |= probe.read(each.hidden, each.weights, f"fitted {name}")

    def _fitted_scales(self, error: Callable[[dict], float]) -> Iterator[tuple[str, float, str]]:
        """Temperature and repetition penalty with the smallest error: (name, value, text)."""
        declared = self.probe.trace.sampling
        for name, low, high in (("temperature", 0.05, 5.0), ("repetition_penalty", 0.5, 2.0)):
            if name == "temperature" and declared.temperature == 0:
                continue
            best, width = (low * high) ** 0.5, (high / low) ** 0.5
            # Grids of nine values, each within one step of the last grid's best value.
            for _ in range(14):
                grid = [best * width ** (step / 4) for step in range(-4, 5)]
                best = min(grid, key=lambda value: error({name: value}))
                width **= 0.25
            # Noise moves the optimum by less than 2 %. The value 1 is the raw distribution, a
            # hypothesis of its own.
            if min(abs(best / getattr(declared, name) - 1), abs(best - 1)) > 0.02:
                yield name, best, f"{best:.3f}"

    def _fitted_masks(
        self, error: Callable[[dict], float], logits: Tensor, chunk: Tensor
    ) -> Iterator[tuple[str, float, str]]:
        """Top-k, top-p, min-p with the smallest error: reported - unmasked = -log(mass kept)."""
        declared = self.probe.trace.sampling
        # (n, V), (n,)
        logprobs, sampled = self.replay.logprobs(logits, declared, chunk, torch.float64)
        kept = (sampled - self.probe.reported[chunk]).exp()  # (n,) mass inside the mask
        cut = (kept < 1 - 1e-3) & (kept > sampled.exp())
        if declared.has_mask or not cut.any():
            return
        descending = logprobs.exp().sort(dim=-1, descending=True).values
        mass = descending.cumsum(dim=-1)
        last = (mass - kept[:, None]).abs().argmin(dim=-1, keepdim=True)  # (n, 1) inside the mask
        top_k = int(last[cut].mode(dim=0).values) + 1
        yield "top_k", top_k, str(top_k)
        quantiles = mass.new_tensor([0.0, 0.002, 0.01, 0.02, 0.05, 0.1, 0.2])
        limits = {"top_p": mass.gather(-1, last),
                  "min_p": descending.gather(-1, last) / descending[:, :1]}
        for name, limit in limits.items():
            # Without noise the parameter is the smallest limit.
            least = limit[cut].quantile(quantiles).tolist()
            candidates = [value * (1 - 1e-6) for value in least]
            candidates += [round(value, 2) for value in least]
            if allowed := [value for value in candidates if 0 < value < 1]:
                best = min(allowed, key=lambda value: error({name: value}))
                yield name, best, f"{best:.4g}"

    # ------------------------------------------------------------------------------ KV caches
    def _kv_caches(self, old: ForwardPass, readouts: list[Readout]) -> None:
        """Stale prefixes of whole blocks, sequences under old weights, in-flight updates."""
        probe, replay, passes = self.probe, self.replay, []
        audited = probe.trace.meta.get("audit", {}).get("block_size")
        for block in (audited,) if audited else BLOCK_SIZES:
            # (B,) a full hit leaves one token to compute.
            prefix = (replay.prompt_lengths - 1) // block * block
            if prefix.any():
                hidden = replay.hidden_over_old_kv(old.weights, prefix)
                passes.append(probe.forward_pass(causes.PREFIX, hidden=hidden))
        for readout in readouts:
            for forward in (*passes, old):
                self._some_rows(forward, readout)
            place = self._change_point(old, probe.error(probe.current, readout), readout)  # (B,)
            if self._inside(place).any():
                before, note = replay.positions < place[replay.rows], self._described(place)
                merged = _merged(before, old, probe.current, causes.RECOMPUTED, note=note, fitted=2)
                self._explain([merged])
            self._kept(old, readout)

    def _some_rows(self, forward: ForwardPass, readout: Readout) -> None:
        """The pass holds for the sequences that are closer to it than to the current weights."""
        current = self.probe.current
        rows = self._row_errors(forward, readout) <= self._row_errors(current, readout)  # (B,)
        if rows.any():
            first = rows[self.replay.rows]
            note = f"in {int(rows.sum())} of {len(rows)} requests"
            self._explain([_merged(first, forward, current, *forward.causes, note=note, fitted=1)])

    def _kept(self, old: ForwardPass, readout: Readout) -> None:
        """KV kept over an update: the position of the update that explains each sequence best.

        Candidates for all sequences: where the old weights' values end, where most sequences end,
        and where the trace's versions change (or one token later: async scheduling). For sequences
        still unexplained: up to MAX_EARLIER tokens before, since old and new values may agree for a
        while.
        """
        probe, replay = self.probe, self.replay
        floor = probe.floor(probe.current, readout)
        end = self._change_point(old, max(3 * floor.rms, 10 * ROUNDING), readout)  # (B,)
        inside = end[self._inside(end)]
        if not len(inside):
            return
        everywhere = torch.ones_like(end, dtype=torch.bool)
        best, place = self._over_update(old, end, everywhere), end

        def try_place(candidate: Tensor, rows: Tensor) -> None:
            """Take the candidate place (B,) in those rows (B,) in which it is the closest."""
            nonlocal best, place
            tried = self._over_update(old, candidate, rows)
            closer = rows & (self._row_errors(tried, readout) < self._row_errors(best, readout))
            best = _merged(closer[replay.rows], tried, best)
            place = torch.where(closer, candidate, place)

        newest = torch.zeros_like(replay.lengths).scatter_reduce(
            0, replay.rows, probe.labels, "amax")
        # (B,) tokens before the newest weights.
        labelled = replay.row_sums((probe.labels < newest[replay.rows]).long())
        for candidate in (inside.mode().values, labelled, labelled + 1):
            try_place(candidate.minimum(replay.lengths), everywhere)
        for earlier in range(1, MAX_EARLIER + 1):
            wrong = floor.wrong_rows(replay, probe.error(best, readout)) & (end > earlier)
            if wrong.any():
                try_place(end - earlier, wrong)
        # Tokens between new version and new weights.
        late = (place - labelled)[self._inside(place) & (labelled > 0)]
        named = (causes.KEPT,)
        if len(late) and late.median() == 1:
            named = (causes.KEPT, causes.MISLABELLED)
        self._explain([replace(best, causes=named, note=self._described(place), fitted=2)])

    def _over_update(self, old: ForwardPass, place: Tensor, rows: Tensor) -> ForwardPass:
        """Old values before `place` (B,), then new weights over old KV; for `rows` (B,) bool."""
        replay = self.replay
        prefix = (replay.prompt_lengths + place - 1).masked_fill(~rows, replay.inputs.shape[1])
        kept = self.probe.forward_pass(hidden=replay.hidden_over_old_kv(old.weights, prefix))
        return _merged(replay.positions < place[replay.rows], old, kept)

    def _row_errors(self, forward: ForwardPass, readout: Readout) -> Tensor:
        """Mean |computed - reported| per sequence: (B,), 0 for one without known values."""
        return self.replay.row_means(self.probe.error(forward, readout)).nan_to_num(0.0)

    def _change_point(self, old: ForwardPass, other_error: Tensor | float,
                      readout: Readout) -> Tensor:
        """How many first tokens of each row have the old weights' values: (B,).

        `other_error` is the |computed - reported| from which on the old weights do not explain a
        token: (N,) or one.
        """
        replay = self.replay
        gain = other_error - self.probe.error(old, readout)  # (N,) positive for the old weights
        table = gain.new_zeros(len(replay.lengths), int(replay.lengths.max()))
        table[replay.rows, replay.positions] = gain.nan_to_num(0.0).clamp(-1.0, 1.0)
        # Of (B, T + 1): the gain of the first k tokens.
        return pad(table.cumsum(dim=1), (1, 0)).argmax(dim=1)

    def _inside(self, place: Tensor) -> Tensor:
        """Where an update before token `place` comes within the response: (B,) -> (B,) bool."""
        return (place > 0) & (place < self.replay.lengths)

    def _described(self, place: Tensor) -> str:
        """The places of an in-flight update, for the verdict's sentence."""
        places = place[self._inside(place)].tolist()
        if not places:
            return ""
        spread = f"tokens {min(places)} to {max(places)}, mostly {mode(places)},"
        where = spread if len(set(places)) > 1 else f"token {places[0]}"
        return f"before {where} of the response in {len(places)} of {len(place)} requests"

    # ------------------------------------------------------------------------------ tensors
    def _tensors(self, updates: int, readout: Readout) -> None:
        """Find the tensors that are still old: gradients rank them, recomputed values decide.

        To first order the mismatch is the sum of the old tensors' effects. One backward pass gives
        the effect of every tensor on one random projection of the tokens. The projections make a
        sparse linear problem. Its greedy solutions of 1, 2, 4, ... tensors are recomputed exactly,
        which costs O(log n) forward passes a round.
        """
        old, closest = frozenset(), self.probe.explain(self.probe.current, readout).noise.mean
        for _ in range(MAX_ROUNDS):
            ranked = self._ranked(old, updates, readout)
            subsets = [old.symmetric_difference(ranked[: 2**power])
                       for power in range(len(ranked).bit_length())]
            tried = {subset: self._with_old(subset, updates, readout) for subset in subsets}
            old = _fewest(tried) or min(tried, key=lambda subset: tried[subset].noise.mean)
            if tried[old].fits or tried[old].noise.mean > 0.8 * closest:
                break
            closest = tried[old].noise.mean
        if tried[old].fits:
            for name in sorted(old) if len(old) <= 8 else ():  # is each of them needed?
                if name in old and len(old) > 1:
                    tried[old - {name}] = self._with_old(old - {name}, updates, readout)
                    old = _fewest(tried)
            self._explain([tried[old].forward])

    def _with_old(self, old: frozenset[str], updates: int, readout: Readout) -> Explanation:
        """The explanation by these old tensors, with the better of both head dtypes."""
        probe = self.probe
        named = causes.OLD_TENSORS.of(updates, ", ".join(sorted(old)))
        some = {name: probe.earlier[updates][name] for name in old}
        forward = probe.forward_pass(named, weights=some)
        forward.num_tensors = len(old)
        both = [probe.explain(forward, replace(readout, head=head)) for head in probe.heads]
        return min(both, key=lambda e: (not e.fits, e.noise.mean))

    def _ranked(self, old: frozenset[str], updates: int, readout: Readout) -> list[str]:
        """Tensors whose exchange should explain the remaining mismatch, the best first."""
        weights = self.probe.earlier[updates]
        parameters = {name: each for name, each in self.probe.policy.model.named_parameters()
                      if not torch.equal(each, weights[name])}
        names = list(parameters)
        moves = {name: weights[name].float() - each.detach().float()
                 for name, each in parameters.items()}
        steps = [-move if name in old else move for name, move in moves.items()]
        remaining, effects = [], []  # one entry per random projection of the tokens
        with torch.enable_grad(), self.replay.policy.using({name: weights[name] for name in old}):
            for mismatch, signs in self._projections(readout):
                remaining.append((signs * mismatch.detach()).sum())
                gradients = torch.autograd.grad((signs * -mismatch).sum(),
                                                list(parameters.values()), retain_graph=True,
                                                allow_unused=True, materialize_grads=True)
                pairs = zip(gradients, steps, strict=True)
                effects.append(torch.stack([(each.float() * step).sum() for each, step in pairs]))
        # (m,), (m, n)
        remaining, effects = torch.stack(remaining).double(), torch.stack(effects).double()
        chosen = []
        while len(chosen) < len(names):  # matching pursuit with coefficients of one
            # (n,) estimated |mismatch after the exchange|^2.
            errors = (remaining[:, None] - effects).pow(2).sum(dim=0)
            errors[chosen] = math.inf
            best = int(errors.argmin())
            if chosen and errors[best] >= remaining.pow(2).sum():
                break
            chosen.append(best)
            remaining = remaining - effects[:, best]
        return [names[index] for index in chosen]

    def _projections(self, readout: Readout) -> Iterator[tuple[Tensor, Tensor]]:
        """PROJECTIONS times: reported - computed in some sequences, and random signs."""
        replay, sampling = self.replay, self.probe.distributions[readout.distribution][0]
        reported, generator = self.probe.aligned(readout), torch.Generator().manual_seed(0)
        groups = replay.split_rows(-(-len(replay.inputs) // 16))
        for rows in groups:
            tokens = torch.isin(replay.rows, rows).nonzero()[:, 0]
            logits = self.probe.policy.logits(replay.hidden(rows), torch.float32)
            logprobs, sampled = replay.logprobs(logits, sampling, tokens)
            ours = sampled if readout.token == "sampled" else logprobs.amax(dim=-1)
            mismatch = reported[tokens] - ours
            mismatch = mismatch[mismatch.isfinite()]
            for _ in range(-(-PROJECTIONS // len(groups))):
                signs = torch.randint(2, mismatch.shape, generator=generator) * 2 - 1
                yield mismatch, signs.to(mismatch)

    # ------------------------------------------------------------------------------ a few requests
    def _few_wrong(self) -> list[Explanation]:
        """Explanations that hold for all but a few sequences, listed as wrong requests."""
        found, most = [], 1 - FEW if self.probe.trace.events else FEW
        for explanation in self.found.values():
            wrong = explanation.wrong
            if 0 < wrong.sum() <= most * len(wrong) and len(explanation.causes) < MAX_CAUSES:
                residual = self.probe.residual(explanation.forward, explanation.readout)
                rest = Noise.of(self.replay,
                                residual.masked_fill(wrong[self.replay.rows], math.nan))
                named = (*explanation.causes, causes.WRONG_REQUESTS)
                found.append(replace(explanation, causes=named, apart=wrong, noise=rest,
                                     wrong=torch.zeros_like(wrong)))
        return found


def _merged(
    first: Tensor, ours: ForwardPass, theirs: ForwardPass, *named: Cause, note: str = "",
    fitted: int = 0,
) -> ForwardPass:
    """A pass with the values of `ours` where `first` (N,) is true, else of `theirs`."""
    values = {key: torch.where(first, ours.values[key], theirs.values[key]) for key in ours.values}
    return ForwardPass(named, None, None, values, note=note, fitted=fitted)


def _fewest(tried: dict[frozenset[str], Explanation]) -> frozenset[str] | None:
    """The smallest set that fits whose mismatch is within rms / sqrt(tokens) of the least."""
    fits = {subset: explanation.noise for subset, explanation in tried.items() if explanation.fits}
    least = min(fits.values(), key=lambda noise: noise.mean, default=None)
    close = [subset for subset, noise in fits.items()
             if noise.mean <= least.mean + least.rms / least.tokens**0.5]
    return min(close, key=lambda subset: (len(subset), fits[subset].mean), default=None)
