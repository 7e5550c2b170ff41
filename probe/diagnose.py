"""The verdict on one trace: layer, cause and repair of its mismatch, or "unexplained"."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from engine_adapter import Engine
from probe import causes
from probe.causes import Cause
from probe.replay import Weights
from probe.search import Explanation, Probe, Readout, Search
from probe.traces import Trace, save_trace
from rl import Policy
from rollouts import Rollout, Sampling

SHOWN = 12  # requests listed in a sentence; the JSON lists all
WORST = 10  # tokens listed


# ---------------------------------------------------------------------------------- verdict
@dataclass
class Verdict:
    """What the probe found in one trace."""

    probe: Probe = field(repr=False)
    causes: list[Cause]  # none: exact, parity or unexplained
    requests: dict[str, list[int]]  # rows of the trace by finding
    found: list[Explanation]  # all hypotheses tried, the best first
    logprobs: Tensor = field(repr=False)  # (N,) the trainer's

    def __post_init__(self):
        self.trace, self.replay = self.probe.trace, self.probe.replay
        self.start = self.probe.explain(self.probe.now, Readout())  # nothing wrong
        self.best = self.found[0]
        self.status: Literal["exact", "parity", "mismatch", "unexplained"] = "parity"
        if self.causes:
            self.status = "mismatch"
        elif not self.best.fits:
            self.status = "unexplained"
        elif torch.equal(self.logprobs, self.replay.reported):
            self.status = "exact"
        self.layers = list(dict.fromkeys(cause.layer for cause in self.causes))
        named = "; and ".join(f"{cause.layer}: {cause.name}" for cause in self.causes)
        self.blamed = named or self.status
        self.mismatch = (self.logprobs - self.replay.reported).abs()  # (N,)
        known = self.mismatch[self.mismatch.isfinite()]
        count = len(self.mismatch)
        self.sizes = {"mismatch": known.mean().item() if len(known) else math.inf,
                      "engine_error": self.start.mean, "trainer_error": self.start.limit.mean,
                      "num_tokens": count, "not_finite": count - len(known)}
        self.figures = ("mean |mismatch| {mismatch:.1e} nats, error of the engine"
                        " {engine_error:.1e}, of the trainer {trainer_error:.1e}"
                        ).format(**self.sizes)
        self.headline = f"{self.blamed}. {self.figures}"

    @property
    def sentence(self) -> str:
        """The verdict in words, with repairs and figures."""
        parts = [f"{self.status}: {self.figures}"]
        if self.status == "exact":
            parts = [f"exact: all {len(self.logprobs)} tokens are equal bit for bit", self.figures]
        elif self.status == "mismatch":
            note = f" ({self.best.found.note})" if self.best.found.note else ""
            repairs = "; ".join(dict.fromkeys(cause.repair for cause in self.causes))
            parts = [f"{self.blamed}{note}", f"Repair: {repairs}",
                     f"{self.figures}; with this cause the engine's is {self.best.mean:.1e}"]
        elif self.status == "unexplained":
            tried = ", ".join(dict.fromkeys(each.name for each in self.found
                                            if len(each.causes) == 1))
            if not self.probe.earlier:
                tried += "; not tested without earlier weights (--earlier): old weights, KV caches"
            parts += [f"Excluded: {tried}",
                      "Next: python -m probe layers says which layer of the model differs"]
        for finding, rows in self.requests.items():
            if rows:
                more = " ..." if len(rows) > SHOWN else ""
                parts.append(f"Requests {finding}: {', '.join(map(str, rows[:SHOWN]))}{more}")
        return ". ".join(parts)

    @property
    def table(self) -> list[Explanation]:
        """A row per hypothesis: the best, then each set of causes at its closest."""
        rows: dict[tuple[Cause, ...], Explanation] = {self.best.causes: self.best}
        for each in sorted(self.found, key=lambda e: e.mean):
            rows.setdefault(each.causes, each)
        return list(rows.values())[:16]

    @property
    def worst(self) -> list[dict[str, Any]]:
        """The tokens with the largest finite mismatch, the largest first."""
        finite = self.mismatch.isfinite().nonzero()[:, 0]
        largest = finite[self.mismatch[finite].argsort(descending=True)][:WORST]
        return [{"request": int(self.replay.rows[token]),
                 "position": int(self.replay.positions[token]),
                 "trainer": self.logprobs[token].item(),
                 "reported": self.replay.reported[token].item()} for token in largest]

    def record(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        hypotheses = [{"causes": [cause.name for cause in each.causes], "fits": each.fits,
                       "engine_error": each.mean, "limit": each.limit.of_mean()}
                      for each in self.table]
        return {
            "trace": self.trace.name, "status": self.status, "layers": self.layers,
            "sentence": self.sentence, "causes": [asdict(cause) for cause in self.causes],
            **self.sizes, "requests": self.requests, "hypotheses": hypotheses, "worst": self.worst,
        }


@torch.no_grad()
def diagnose(
    policy: Policy, trace: Trace, earlier: list[Weights] | None = None, version: int | None = None,
    trainer: Literal["processed", "temperature"] = "processed", observed: list[Cause] | None = None,
) -> Verdict:
    """Explain the difference between a trace and the trainer's own log-probabilities of its tokens.

    `earlier` are the trainer's weights 1, 2, ... updates before its present `version`, by parameter
    name. `trainer` is the distribution that the trainer scores: all sampling parameters, or the
    temperature alone (train.py without sampling_mask). `observed` are causes already known. The
    policy's weights do not change.

    Raises: ValueError if a token is outside the vocabulary, the trainer's own values are not finite
    or all reported values are 0.
    """
    probe = Probe(policy, trace, earlier or [], version, trainer)
    logprobs = probe.now.rounded[probe.trainer]
    if logprobs.isnan().any():
        raise ValueError(f"the trainer's log-probabilities must be finite on {trace.name}; check"
                         " the model's weights")
    if not probe.replay.reported.any() and logprobs.abs().median() > 0.01:
        raise ValueError(f"logprobs must be what the engine reported, all of {trace.name}'s are 0")
    found = Search(probe).run()
    best = found[0]
    wrong = best.wrong | best.apart
    requests = {
        "wrong": wrong.nonzero()[:, 0].tolist() if wrong.sum() <= 0.5 * len(wrong) else [],
        "not finite": sorted(set(probe.replay.rows[probe.reported.isnan()].tolist())),
        "not finite in the trainer": [row for row, values in enumerate(trace.trainer_logprobs)
                                      if not all(map(math.isfinite, values))]}
    named = (observed or []) + (_causes(probe, best) if best.fits else [])
    named += [causes.NOT_FINITE] * bool(requests["not finite"])
    named += [causes.TRAINER_NOT_FINITE] * bool(requests["not finite in the trainer"])
    return Verdict(probe, named, requests, found, logprobs)


def _causes(probe: Probe, best: Explanation) -> list[Cause]:
    """The causes of an explanation that fits, and what settings and versions add."""
    in_engine, in_trainer = best.readout.head != "float32", probe.trainer.head != "float32"
    reported, scored = (probe.distributions[each.distribution][1]
                        for each in (best.readout, probe.trainer))
    named = [cause for cause in best.causes if cause not in (causes.HEAD, scored)]
    if in_engine or in_trainer:
        sides = {(True, False): "in the engine", (False, True): "in the trainer"}
        side = sides.get((in_engine, in_trainer), "on both sides")
        named.append(replace(causes.HEAD, name=f"{causes.HEAD.name} {side}"))
    if scored and not reported:
        named.append(scored)  # the engine reports the mask, the trainer has none
    moved = {causes.STALE.of(updates): causes.MOVED_ON.of(updates) for updates in probe.earlier
             if (probe.labels == probe.version - updates).double().mean() > 0.5}
    return [moved.get(cause, cause) for cause in named]


# ---------------------------------------------------------------------------------- output
def print_verdict(verdict: Verdict) -> None:
    """Print the table, the sentence, and how far the values of the trace's own trainer are."""
    print(f"\n{verdict.trace.name}: {verdict.sizes['num_tokens']} tokens")
    print(f"{'hypothesis':<72} {'error':>8} {'limit':>8}")
    for each in verdict.table:
        mark = "*" if each is verdict.best and each.fits else " "
        print(f"{mark}{each.name[:70]:<71} {each.mean:8.1e} {each.limit.of_mean():8.1e}")
    print("worst tokens (request, position: trainer, reported):", "; ".join(
        "{request}, {position}: {trainer:.4f}, {reported:.4f}".format(**each)
        for each in verdict.worst))
    print(f"=> {verdict.sentence}", flush=True)
    if verdict.trace.trainer_logprobs:
        own = torch.tensor(list(chain(*verdict.trace.trainer_logprobs)), dtype=torch.float64)
        reported, recomputed = ((own - other.cpu()).abs().nanmean().item()
                                for other in (verdict.replay.reported, verdict.logprobs))
        print(f"   the trainer's own log-probabilities: mean |difference| {reported:.1e} nats to"
              f" the reported, {recomputed:.1e} to those recomputed here")


# ---------------------------------------------------------------------------------- a live engine
# Metrics of a step, of its rollouts with current weights, and the values above which train.py
# probes the engine (--probe-on-alarm).
ALARMS = {
    "mismatch_kl": 1e-3,  # k3; healthy bfloat16 rollouts stay below it (verl, prime-rl)
    "mismatch_abs_mean": math.log(1.05),  # NeMo RL: mean exp|d| above 1.05 needs investigation
    "ess_loss": 0.02,  # 1 - ess; smoke checks of verl users require an ess of 0.98
    # Of clean runs in bfloat16 the largest are 0.0016 and 0.0004 (docs/probe.md).
    "backend_clip_rate": 0.005,
    "backend_ratio_error": 0.005,
    # Clean mixtures of 3 to 48 layers have 0.005 to 0.006, with 2 % of noise 0.017 to 0.022.
    "router_noise": 0.01,
}
NARROW_CLIP = 0.1  # bounds below it, such as GSPO's 4e-4, are left by the rounding of 16 bits alone


def alarms(metrics: dict[str, Any], clip_high: float) -> list[str]:
    """The names of the ALARMS that a step exceeds."""
    if metrics.get("current_ess") is None:
        return []
    values = {name: metrics[f"current_{name}"] for name in ("mismatch_kl", "mismatch_abs_mean")}
    values["ess_loss"] = 1 - metrics["current_ess"]
    if clip_high >= NARROW_CLIP:
        values["backend_clip_rate"] = metrics["backend_clip_rate"]
    values["backend_ratio_error"] = abs(1 - metrics["backend_ratio_mean"])
    if not metrics.get("staleness_max"):  # old weights have routed otherwise too
        values["router_noise"] = metrics.get("router_noise", 0.0)
    return [name for name, value in values.items() if not value <= ALARMS[name]]


def as_trace(engine: Engine, rollouts: list[Rollout], sampling: Sampling, **more: Any) -> Trace:
    """What a live engine has sampled, with its audit; `more` goes into the trace's meta."""
    meta = {"vllm": engine.version, "dtype": engine.settings["model_dtype"],
            "audit": engine.settings, "stop_token_ids": list(sampling.stop_token_ids)}
    return Trace("sampled", rollouts, sampling, meta | more)


def sample_trace(engine: Engine, prompts: list[list[int]], sampling: Sampling,
                 seeds: list[int]) -> Trace:
    """One response per prompt from a live engine."""
    return as_trace(engine, engine.generate(prompts, 1, sampling, seeds), sampling)


class StepProbe:
    """Observes the steps of train.py: probes what a step has sampled, and asks the engine nothing.

    The rollouts that the weights before the update have sampled alone are compared with these
    weights, and with those one update earlier. So a probed run is the run without the probe.
    """

    def __init__(self, run: Any, state: Any):
        self.run, self.policy, self.engine = run, state.policy, state.engine
        self.weights: list[Weights] = [self.policy.copied_weights()]  # before the update, and older

    def __call__(self, step: Any) -> dict[str, str]:
        """The status for the step's metrics, {} without a probe.

        A step is probed if it is planned or its metrics exceed ALARMS. Writes step_N.npz (the
        trace) and step_N.json (the verdict) to the run's folder `probe` and prints a line.
        """
        measure, alarm = self.run.config.measure, []
        if measure.probe_on_alarm:
            alarm = alarms(step.metrics, self.run.config.grpo.clip[1])
        every = measure.probe_every
        status = {}
        if alarm or (every and (step.metrics["step"] - 1) % every == 0):
            status = self._probe(step, f"alarm of {', '.join(alarm)}" if alarm else "as planned")
        self.weights = [self.policy.copied_weights(), self.weights[0]]
        return status

    def _probe(self, step: Any, why: str) -> dict[str, str]:
        run, number, current = self.run, step.metrics["step"], step.current
        rollouts = [_sampled_part(rollout) for rollout, mask
                    in zip(current.rollouts, current.mask, strict=True) if mask.any()]
        if not rollouts:
            print(f"probe after step {number} ({why}): no rollout of the weights before it alone")
            return {"probe": "no rollouts"}
        trace = as_trace(self.engine, rollouts, replace(run.sampling, max_kept=0))
        scored = "processed" if run.sampling.max_kept else "temperature"
        weights, *earlier = self.weights
        with self.policy.using(weights):
            observed = []
            if "router_noise" in alarms(step.metrics, NARROW_CLIP):
                observed = [causes.ROUTER.of(step.metrics["routed_otherwise"])]
            version = rollouts[0].versions[0]
            verdict = diagnose(self.policy, trace, earlier, version, scored, observed)
        path = run.out / "probe" / f"step_{number:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_trace(f"{path}.npz", trace)
        record = {"step": number, "why": why} | verdict.record()
        path.with_suffix(".json").write_text(json.dumps(record, indent=1))
        print(f"probe after step {number} ({why}): {verdict.headline}", flush=True)
        return {"probe": verdict.status}


def _sampled_part(rollout: Rollout) -> Rollout:
    """The response up to the first word of an environment, which the engine did not sample.

    Without its routes: what replay hides is probed too.
    """
    end = rollout.trained.index(False) if False in rollout.trained else None
    return replace(rollout, token_ids=rollout.token_ids[:end], logprobs=rollout.logprobs[:end],
                   versions=rollout.versions[:end], trained=[], routes=[])
