"""A verdict on one trace: layer, cause and the switch that repairs it, or "unexplained" and what was excluded."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine_adapter import Engine, Sampling
from probe.hypotheses import (
    HEAD,
    IN_PLACE_OF_PROCESSED,
    MASK_EDGE,
    NOT_FINITE,
    NOT_IN_FORCE,
    UNLIKE,
    Cause,
    Explanation,
    Probe,
    moved_on,
    stale,
)
from probe.search import Search
from probe.traces import Trace, Weights
from rl import Policy

FALSE_ALARM = 1e-6  # chance, over a whole trace, that tokens honestly drawn are called implausible
SHOWN = 12  # requests named in a sentence; the JSON has all of them

# Metrics of metrics.jsonl and the value beyond which train.py asks the probe (--probe-on-alarm), with its source.
ALARMS: dict[str, tuple[float, str]] = {
    "mismatch_kl": (1e-3, "k3 of healthy bfloat16 rollouts, as logged by verl and prime-rl, stays below it"),
    "mismatch_abs_mean": (math.log(1.05), "NeMo RL, adding-new-models: mean exp|d| beyond 1.05 needs investigation"),
    "ess_loss": (0.02, "1 - ess; smoke checks of verl users ask for an effective sample size of 0.98"),
}


def alarms(metrics: dict[str, Any]) -> list[str]:
    """The alarms that a row of metrics sets off, by name."""
    values = metrics | {"ess_loss": 1 - metrics["ess"]}
    return [name for name, (limit, _) in ALARMS.items() if not values[name] <= limit]


# ------------------------------------------------------------------------------------------------ verdict
@dataclass
class Verdict:
    """What the probe found in one trace. No `causes` is parity; `requests` lists rows of the trace by finding."""

    trace: str
    status: Literal["parity", "mismatch", "unexplained"]
    causes: list[Cause]
    sentence: str
    start: Explanation  # the trainer as it is
    best: Explanation
    second: Explanation | None
    table: list[Explanation]
    requests: dict[str, list[int]]
    forwards: int
    difference: Tensor = field(repr=False)  # (N,) trainer - reported, nats
    trainer_logprobs: Tensor = field(repr=False)  # (N,)
    reported: Tensor = field(repr=False)  # (N,)
    positions: Tensor = field(repr=False)  # (N,)

    @property
    def headline(self) -> str:
        blamed = "; and ".join(f"{cause.layer}: {cause.name}" for cause in self.causes)
        return f"{blamed or self.status}. {_figures(self.start)}"

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(cause.layer for cause in self.causes))

    def record(self) -> dict[str, Any]:
        """All of it as JSON values."""
        def row(explanation: Explanation) -> dict[str, Any]:
            names = [cause.name for cause in explanation.causes]
            return {"causes": names, "fits": explanation.fits, "share": explanation.share(self.start),
                    "left": asdict(explanation.noise), "floor": asdict(explanation.floor)}

        return {
            "trace": self.trace, "status": self.status, "layers": self.layers, "sentence": self.sentence,
            "causes": [asdict(cause) for cause in self.causes], "mismatch": asdict(self.start.noise),
            "floor": asdict(self.start.floor), "best": row(self.best), "second": self.second and row(self.second),
            "requests": self.requests, "hypotheses": [row(each) for each in self.table], "forwards": self.forwards,
        }


@torch.no_grad()
def diagnose(
    policy: Policy, trace: Trace, earlier: list[Weights] | None = None, version: int | None = None,
    trainer: Literal["processed", "temperature"] = "processed",
) -> Verdict:
    """Explain the difference between a trace and the trainer's own log-probabilities of its tokens.

    `earlier` are the trainer's weights 1, 2, ... updates before its present `version`, by parameter name; `trainer` is
    the distribution it scores (train.py: the temperature alone). The policy's weights are the same afterwards.

    Raises: ValueError if a token is outside the vocabulary or the trainer's own values are not finite.
    """
    probe = Probe(policy, trace, earlier or [], version, trainer)
    values = probe.predict("current", probe.trainer)
    if values.isnan().any():
        raise ValueError(f"the trainer's own log-probabilities are not finite on {trace.name}: are its weights?")
    if not probe.replay.reported.any() and values.abs().median() > 0.01:
        raise ValueError(f"logprobs must be what the engine reported, all of {trace.name}'s are 0")
    start = replace(probe.explain("current", probe.trainer), causes=())
    start = replace(start, floor=probe.floor("current", replace(probe.trainer, head="float32")))
    found = Search(probe).run()
    best = found[0]
    requests = _requests(probe, best)
    causes = _causes(probe, best, start, requests)
    status = "unexplained" if not best.fits else "mismatch" if causes else "parity"
    others = [each for each in found if not set(best.causes) <= set(each.causes)]
    second = next(iter(others), None)  # the best that does not merely add to the verdict
    return Verdict(
        trace.name, status, causes, _sentence(probe, status, causes, start, best, second, found, requests), start, best,
        second, _table(found, best), requests, probe.replay.forwards, values - probe.replay.reported, values,
        probe.replay.reported, probe.replay.positions,
    )


def _causes(probe: Probe, best: Explanation, start: Explanation, requests: dict[str, list[int]]) -> list[Cause]:
    """The engine's causes, put beside what the trainer itself does differently and what the samples say."""
    causes = list(best.causes) if best.fits else []
    half_trainer = not probe.policy.fp32_head and probe.policy.model.dtype != torch.float32
    if half_trainer and best.fits:
        side = "on both sides" if HEAD in causes else "in the trainer"
        causes = [cause for cause in causes if cause != HEAD] + [replace(HEAD, name=f"{HEAD.name} {side}")]
    else:
        causes = [replace(HEAD, name=f"{HEAD.name} in the engine") if cause == HEAD else cause for cause in causes]
    if probe.trainer.kind == "temperature" and best.fits and not start.floor.allows(start.noise):
        what = "penalties" if probe.kinds["temperature"][0] == probe.kinds.get("no penalties", (None,))[0] else "mask"
        causes.append(Cause("semantics", f"{what} applied by the sampler and not by the trainer",
                            "sample without it, or score the processed distribution (rl.process_logits)"))
    for index, cause in enumerate(causes):
        updates = next((n for n in probe.earlier if cause == stale(n)), 0)
        if updates and probe.labels is not None and (probe.labels == probe.version - updates).double().mean() > 0.5:
            causes[index] = moved_on(updates)
    if _drawn_as_reported(probe, best):
        causes = [NOT_IN_FORCE if cause in IN_PLACE_OF_PROCESSED else cause for cause in causes]
    elif requests["implausible"] and best.fits:
        causes.append(UNLIKE)
    if requests["not finite"]:
        causes.append(NOT_FINITE)
    return causes


def _drawn_as_reported(probe: Probe, best: Explanation) -> bool:
    """Were the tokens drawn from the reported distribution rather than from the trace's? A likelihood ratio decides."""
    if not best.fits or probe.kinds[best.reading.kind][1] not in IN_PLACE_OF_PROCESSED:
        return False
    values = probe.bodies[best.body].values
    reported, declared = (values[best.reading.head, kind, "sampled"] for kind in (best.reading.kind, "processed"))
    outside = declared.isinf()
    if outside.sum() > 2 + MASK_EDGE * len(declared) * (probe.policy.model.dtype != torch.float32):
        return True
    return (reported - declared)[~outside].sum().item() > -math.log(FALSE_ALARM)


def _requests(probe: Probe, best: Explanation) -> dict[str, list[int]]:
    """Rows of the trace that stand out: wrong values, values that are not finite, improbable text, repetition."""
    replay, everything = probe.replay, torch.arange(len(probe.replay.lengths))
    wrong = everything[(best.wrong if best.apart is None else best.apart).cpu()].tolist()
    broken = sorted(set(replay.rows[probe.broken].tolist()))
    return {
        "wrong": wrong if best.fits or len(wrong) <= 0.5 * len(everything) else [],
        "not finite": broken,
        "implausible": [row for row in _implausible(probe, best) if row not in wrong + broken],
        "repetitive": [row for row, r in enumerate(probe.trace.rollouts) if _repeats(r.token_ids)],
    }


def _implausible(probe: Probe, best: Explanation) -> list[int]:
    """Sequences whose tokens are too improbable to have been drawn from the distribution the trainer computes.

    A perplexity test that needs no threshold of its own: the likelihood ratio of an alternative (half uniform noise;
    the distribution sharpened or flattened) to the trainer's distribution has mean 1 if the tokens were drawn from the
    latter, so that it exceeds B / alpha in any of B sequences with probability alpha at most (Ville's inequality).
    """
    if probe.trace.sampling.temperature == 0 or probe.bodies[best.body].hidden is None:
        return []
    replay, body = probe.replay, probe.bodies[best.body]
    kind = best.reading.kind if best.reading.kind.startswith("fitted") else "processed"
    ratios: dict[str, list[Tensor]] = {"noise": [], "sharper": [], "flatter": []}
    with replay.holding(body.weights):
        for chunk, logits in replay.logits(body.hidden, probe.heads[best.reading.head]):
            logprobs = torch.log_softmax(replay.process(logits, probe.kinds[kind][0], chunk).double(), dim=-1)
            sampled = logprobs.gather(-1, replay.targets[chunk, None])[:, 0]
            support = logprobs.isfinite().sum(dim=-1)
            ratios["noise"].append(torch.log(0.5 + 0.5 / support * torch.exp(-sampled)))
            ratios["sharper"].append(sampled - torch.logsumexp(2 * logprobs, dim=-1))
            ratios["flatter"].append(-0.5 * sampled - torch.logsumexp(0.5 * logprobs, dim=-1))
    limit, rows = math.log(3 * len(replay.lengths) / FALSE_ALARM), set()
    for parts in ratios.values():
        values = torch.cat(parts)
        values = values.masked_fill(~values.isfinite(), 0.0)  # outside a mask: its edge, counted elsewhere
        sums = torch.zeros(len(replay.lengths), dtype=values.dtype, device=values.device)
        sums = sums.index_add(0, replay.rows, values)
        rows |= set((sums > limit).nonzero()[:, 0].tolist())
        if values.sum() > limit:  # all of them together
            rows |= set(range(len(replay.lengths)))
    return sorted(rows)


def _repeats(token_ids: list[int]) -> bool:
    """Does the second half or more of at least 16 tokens repeat a pattern four times or more?"""
    for period in range(1, len(token_ids) // 4 + 1):
        same = 0
        while same + period < len(token_ids) and token_ids[-1 - same] == token_ids[-1 - same - period]:
            same += 1
        repeated = same + period
        if repeated >= max(16, 4 * period, len(token_ids) // 2):
            return True
    return False


# ------------------------------------------------------------------------------------------------ words
def _sentence(
    probe: Probe, status: str, causes: list[Cause], start: Explanation, best: Explanation, second: Explanation | None,
    found: list[Explanation], requests: dict[str, list[int]],
) -> str:
    floor = _figures(start)
    if status == "parity":
        text = f"parity: {floor}"
    elif status == "mismatch":
        note = probe.bodies[best.body].note
        blamed = "; and ".join(f"{cause.layer}: {cause.name}" for cause in causes)
        text = f"{blamed}{f' ({note})' if note else ''}. Repair: {'; '.join(dict.fromkeys(c.repair for c in causes))}."
        text += f" {floor}, left unexplained {best.noise.mean:.1e}"
        if any(cause.layer == "objective" for cause in causes):
            text += f"; the policies differ by {start.noise.k3:.1e} nats a token (k3)"
        if second is not None:
            names = " + ".join(cause.name for cause in second.causes) or "nothing wrong"
            text += f". Next best: {names}, which leaves {second.noise.mean:.1e}"
    else:
        tried = dict.fromkeys(cause.name for each in found for cause in each.causes if len(each.causes) == 1)
        text = f"unexplained: {floor}. Excluded: {', '.join(tried)}"
        if not probe.earlier:
            text += "; not tested, for want of earlier weights (--earlier): old weights, tensors and KV caches"
    for finding, rows in requests.items():
        if rows:
            text += f". Requests {finding}: {', '.join(map(str, rows[:SHOWN]))}{' ...' if len(rows) > SHOWN else ''}"
    return text


def _figures(start: Explanation) -> str:
    return f"mean |d| {start.noise.mean:.1e} nats, floor {start.floor.mean:.1e}"


def _table(found: list[Explanation], best: Explanation) -> list[Explanation]:
    """One row per hypothesis: the best, each single cause, and the closest combinations."""
    rows: dict[tuple[Cause, ...], Explanation] = {best.causes: best}
    for each in sorted(found, key=lambda e: e.noise.mean):
        rows.setdefault(each.causes, each)
    others = [each for each in rows.values() if each is not best]
    combined = [each for each in others if len(each.causes) > 1]
    return [best, *(each for each in others if len(each.causes) <= 1), *combined[:5]]


def print_verdict(verdict: Verdict) -> None:
    """The table and the sentence."""
    print(f"\n{verdict.trace}: {verdict.start.noise.tokens} tokens, {verdict.forwards} forward passes")
    print(f"{'hypothesis':<72} {'mean |d|':>8} {'RMS':>8} {'max':>8} {'k3':>8} {'floor':>8} {'explains':>8}")
    rows = [("the trainer as it is", verdict.start)]
    rows += [(" + ".join(c.name for c in each.causes) or "nothing wrong", each) for each in verdict.table]
    for name, each in rows:
        short = name if len(name) <= 70 else name[:69] + "…"
        mark = "*" if each is verdict.best and each.fits else " "
        figures = (each.noise.mean, each.noise.rms, each.noise.max, each.noise.k3, each.floor.mean)
        print(f"{mark}{short:<71} {' '.join(f'{figure:8.1e}' for figure in figures)} {each.share(verdict.start):8.0%}")
    print(f"=> {verdict.sentence}", flush=True)


def plot_verdict(verdict: Verdict, path: str) -> None:
    """Mismatch by position, its histogram on a log axis, and both log-probabilities against each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = verdict.difference.abs().cpu()
    known = size.isfinite()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    axes[0].plot(verdict.positions.cpu()[known], size[known].clamp(min=1e-9), ".", markersize=2)
    axes[0].axhline(verdict.start.floor.mean, color="tab:green", label="floor, mean")
    axes[0].set(title="|trainer - reported| by position", xlabel="token of the response", ylabel="nats", yscale="log")
    axes[0].legend()
    axes[1].hist(size[known].clamp(min=1e-9).log10(), bins=60)
    axes[1].set(title="histogram", xlabel="log10 |trainer - reported|, nats", ylabel="tokens", yscale="log")
    axes[2].plot(verdict.reported.cpu()[known], verdict.trainer_logprobs.cpu()[known], ".", markersize=2)
    axes[2].axline((0, 0), slope=1, color="tab:green", linewidth=0.8)
    axes[2].set(title="log-probabilities, nats", xlabel="reported", ylabel="trainer")
    figure.suptitle(f"{verdict.trace}: {verdict.status} {'; '.join(c.name for c in verdict.causes)}"[:150])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------- traces of a live engine
def sample_trace(engine: Engine, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> Trace:
    """One response per prompt along the decode path of a live engine, with its audit."""
    rollouts = engine.generate(prompts, 1, sampling, seeds)
    meta = {"vllm": engine.version, "dtype": engine.settings["model_dtype"], "audit": engine.settings,
            "stop_token_ids": list(sampling.stop_token_ids)}
    return Trace("sampled", rollouts, sampling, meta)
