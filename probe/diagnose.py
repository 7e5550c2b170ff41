"""The verdict on one trace: layer, cause and repair of its mismatch, or "unexplained"."""

import json
import math
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from engine_adapter import Engine
from probe import causes
from probe.causes import Cause
from probe.replay import Replay, Weights
from probe.search import Explanation, Probe, Search
from probe.traces import Trace, save_trace
from rl import Policy
from sampling import Rollout, Sampling

SHOWN = 12  # requests listed in a sentence; the JSON lists all


# ---------------------------------------------------------------------------------- verdict
@dataclass
class Verdict:
    """What the probe found in one trace."""

    trace: Trace = field(repr=False)
    causes: list[Cause]  # none: exact, parity or unexplained
    requests: dict[str, list[int]]  # rows of the trace by finding
    start: Explanation  # nothing wrong
    found: list[Explanation]  # all hypotheses tried, the best first
    knows_earlier: bool  # earlier weights were given
    replay: Replay = field(repr=False)
    logprobs: Tensor = field(repr=False)  # (N,) the trainer's
    trainer_error: Tensor = field(repr=False)  # (N,)
    tokens: dict[str, Any] = field(repr=False)  # of by_token

    def __post_init__(self):
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
        mismatch = (self.logprobs - self.replay.reported).abs()
        known = mismatch[mismatch.isfinite()]
        self.sizes = {"mismatch": known.mean().item() if len(known) else math.inf,
                      "engine_error": self.start.mean, "trainer_error": self.start.limit.mean,
                      "tokens": len(mismatch), "not_finite": len(mismatch) - len(known)}
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
            if not self.knows_earlier:
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

    def record(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        hypotheses = [{"causes": [cause.name for cause in each.causes], "fits": each.fits,
                       "engine_error": each.mean, "limit": each.limit.of_mean()}
                      for each in self.table]
        return {
            "trace": self.trace.name, "status": self.status, "layers": self.layers,
            "sentence": self.sentence, "causes": [asdict(cause) for cause in self.causes],
            **self.sizes, "requests": self.requests, "hypotheses": hypotheses,
            "forwards": self.replay.forwards, "tokens_by": self.tokens,
        }


@torch.no_grad()
def diagnose(
    policy: Policy, trace: Trace, earlier: list[Weights] | None = None, version: int | None = None,
    trainer: Literal["processed", "temperature"] = "processed",
) -> Verdict:
    """Explain the difference between a trace and the trainer's own log-probabilities of its tokens.

    `earlier` are the trainer's weights 1, 2, ... updates before its present `version`, by parameter
    name. `trainer` is the distribution that the trainer scores: all sampling parameters, or the
    temperature alone (train.py without sampling_mask). The policy's weights do not change.

    Raises: ValueError if a token is outside the vocabulary, the trainer's own values are not finite
    or all reported values are 0.
    """
    probe = Probe(policy, trace, earlier or [], version, trainer)
    logprobs = probe.values(probe.current, probe.trainer)
    if logprobs.isnan().any():
        raise ValueError(f"the trainer's log-probabilities must be finite on {trace.name}; check"
                         " the model's weights")
    if not probe.replay.reported.any() and logprobs.abs().median() > 0.01:
        raise ValueError(f"logprobs must be what the engine reported, all of {trace.name}'s are 0")
    search = Search(probe)
    found = search.run()
    start, best = probe.explain(probe.precise, Readout()), found[0]
    wrong = best.wrong if best.apart is None else best.apart
    requests = {
        "wrong": wrong.nonzero()[:, 0].tolist() if wrong.sum() <= 0.5 * len(wrong) else [],
        "not finite": sorted(set(probe.replay.rows[probe.reported.isnan()].tolist())),
        "not finite in the trainer": [row for row, values in enumerate(trace.trainer_logprobs)
                                      if not all(map(math.isfinite, values))]}
    named = _causes(probe, best, start) if best.fits else []
    named += [causes.NOT_FINITE] * bool(requests["not finite"])
    named += [causes.TRAINER_NOT_FINITE] * bool(requests["not finite in the trainer"])
    error = probe.trainer_error(probe.trainer)
    return Verdict(trace, named, requests, start, found, bool(probe.earlier), probe.replay,
                   logprobs, error, by_token(probe, logprobs, error))


def _causes(probe: Probe, best: Explanation, start: Explanation) -> list[Cause]:
    """The causes of an explanation that fits, and what settings and versions add."""
    in_engine = causes.HEAD in best.causes
    in_trainer = probe.trainer.head != "float32"
    named = [cause for cause in best.causes if cause != causes.HEAD]
    if in_engine or in_trainer:
        sides = {(True, False): "in the engine", (False, True): "in the trainer"}
        named.append(causes.HEAD.of(sides.get((in_engine, in_trainer), "on both sides")))
    alone, cause = probe.distributions[probe.trainer.distribution]
    if cause is not None and best.readout.distribution == "processed":
        named.append(cause)  # the engine reports the mask, the trainer has none
    moved = {causes.STALE.of(updates): causes.MOVED_ON.of(updates) for updates in probe.earlier
             if (probe.labels == probe.version - updates).double().mean() > 0.5}
    return [moved.get(cause, cause) for cause in named]


# ---------------------------------------------------------------------------------- by token
def by_token(probe: Probe) -> dict[str, Any]:
    """|trainer as it is - reported| of the finite tokens, in nats, as JSON values.

    In ten bins of equal numbers of tokens (equal values are in one bin), tails, and worst tokens.
    """
    replay, readout = probe.replay, probe.trainer
    ours, second = (each.logprobs(readout) for each in (probe.current, probe.second))
    sampling, _ = probe.distributions[readout.distribution]
    entropy = [torch.special.entr(replay.logprobs(logits, sampling, chunk)[0].exp()).sum(dim=-1)
               for chunk, logits in replay.logits(probe.current.hidden, probe.heads[readout.head])]
    columns = {"position": replay.positions, "prompt length": replay.prompt_lengths[replay.rows],
               "probability": ours.exp(), "entropy": torch.cat(entropy)}
    size, floor, tables = probe.residual(probe.current, readout).abs(), (ours - second).abs(), {}
    known = size.isfinite()
    for name, column in columns.items():
        values = column.double()
        edges = values.quantile(torch.arange(1, 10).to(values) / 10).unique()
        bins = torch.bucketize(values, edges, right=True)
        parts = [known & (bins == each) for each in bins[known].unique()]
        tables[name] = [{"from": values[part].min().item(), "tokens": int(part.sum()),
                         "mismatch": size[part].mean().item(), "floor": floor[part].mean().item()}
                        for part in parts]
    tails = {times: (size[known] > times * size[known].mean()).double().mean().item()
             for times in (10, 100)}
    order = size.masked_fill(~known, -1.0).argsort(descending=True)[:known.sum()]
    worst = [{"request": int(replay.rows[token]), "position": int(replay.positions[token]),
              "trainer": ours[token].item(), "reported": probe.reported[token].item()}
             for token in order[:10]]
    return {"tables": tables, "tails": tails, "worst": worst}


def print_tokens(tokens: dict[str, Any]) -> None:
    for name, bins in tokens["tables"].items():
        print(f"{f'by {name}, from':<24}", *(f"{each['from']:8.3g}" for each in bins))
        for figure in ("mismatch", "floor"):
            print(f"{figure:>24}", *(f"{each[figure]:8.1e}" for each in bins))
    for times, share in tokens["tails"].items():
        print(f"tokens above {times} times the mean: {share:.2%}")
    print("worst tokens (request, position: trainer, reported):", "; ".join(
        "{request}, {position}: {trainer:.4f}, {reported:.4f}".format(**each)
        for each in tokens["worst"]))


# ---------------------------------------------------------------------------------- output
def print_verdict(verdict: Verdict) -> None:
    """Print the tables, the sentence, and how far the values of the trace's own trainer are."""
    print(f"\n{verdict.trace.name}: {verdict.start.noise.tokens} tokens, {verdict.replay.forwards}"
          " forward passes")
    print(f"{'hypothesis':<72} {'mean':>8} {'RMS':>8} {'max':>8} {'k3':>8} {'floor':>8}"
          f" {'explains':>8}")
    for name, each in [("the trainer as it is", verdict.start),
                       *((each.name, each) for each in verdict.table)]:
        short = name if len(name) <= 70 else name[:69] + "…"
        mark = "*" if each is verdict.best and each.fits else " "
        figures = (each.noise.mean, each.noise.rms, each.noise.max, each.noise.k3, each.floor.mean)
        print(f"{mark}{short:<71} {' '.join(f'{figure:8.1e}' for figure in figures)}"
              f" {each.share(verdict.start):8.0%}")
    print_tokens(verdict.tokens)
    print(f"=> {verdict.sentence}", *verdict.under_pressure, sep="\n   ", flush=True)
    if verdict.trace.trainer_logprobs:
        own = torch.tensor(list(chain(*verdict.trace.trainer_logprobs)), dtype=torch.float64)
        reported, recomputed = ((own - other.cpu()).abs().nanmean().item()
                                for other in (verdict.replay.reported, verdict.logprobs))
        print(f"   the trainer's own log-probabilities: mean |difference| {reported:.1e} nats to"
              f" the reported, {recomputed:.1e} to those recomputed here")


def plot_verdict(verdict: Verdict, path: str) -> None:
    """Plot the mismatch by bins of tokens, its histogram, and one side against the other."""
    from matplotlib.figure import Figure

    replay, mismatch = verdict.replay, (verdict.logprobs - verdict.replay.reported).abs()
    columns = (mismatch.clamp(min=1e-9), verdict.logprobs, replay.reported)  # log axes have no 0
    size, ours, reported = (column[mismatch.isfinite()].cpu() for column in columns)
    figure = Figure(figsize=(13, 8), layout="constrained")
    *panels, histogram, scatter = figure.subplots(2, 3).flat
    for axes, (name, bins) in zip(panels, verdict.tokens["tables"].items(), strict=True):
        for kind, color in (("mismatch", "tab:blue"), ("floor", "tab:green")):
            means = [max(each[kind], 1e-9) for each in bins]
            axes.semilogy([each["from"] for each in bins], means, "o-", color=color, label=kind)
        axes.set(title="mean, nats", xlabel=f"{name}, from")
    panels[0].legend()
    histogram.hist(size.log10(), bins=60, log=True)
    histogram.set(title="tokens", xlabel="log10 |mismatch|, nats")
    scatter.plot(reported, ours, ".", markersize=2)
    scatter.axline((0, 0), slope=1, color="tab:green")
    scatter.set(title="log-probabilities, nats", xlabel="reported", ylabel="trainer")
    figure.suptitle(f"{verdict.trace.name}: {verdict.blamed}"[:150])
    figure.savefig(path)


# ---------------------------------------------------------------------------------- a live engine
PROBE_REQUESTS = 128  # over the problems of a step: repeated prompts show a stale prefix cache

# Metrics of a step, of its rollouts with current weights, and the values above which train.py
# probes the engine (--probe-on-alarm).
ALARMS = {
    "mismatch_kl": 1e-3,  # k3; healthy bfloat16 rollouts stay below it (verl, prime-rl)
    "mismatch_abs_mean": math.log(1.05),  # NeMo RL: mean exp|d| above 1.05 needs investigation
    "ess_loss": 0.02,  # 1 - ess; smoke checks of verl users require an ess of 0.98
    # Of clean runs in bfloat16 the largest are 0.0016 and 0.0004 (docs/probe.md).
    "backend_clip_rate": 0.005,
    "backend_ratio_error": 0.005,
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
    """Observes the steps of train.py: `probe_step` with the weights before each."""

    def __init__(self, run: Any, state: Any):
        self.run, self.state, self.earlier = run, state, state.policy.copied_weights()

    def __call__(self, step: Any) -> dict[str, str]:
        status = probe_step(self.run, self.state, step.metrics, step.problems, self.earlier)
        self.earlier = self.state.policy.copied_weights()
        return status


def probe_step(run: Any, state: Any, metrics: dict[str, Any], problems: list[Any],
               earlier: Weights) -> dict[str, str]:
    """Probe the engine after a step, if it is planned or its metrics exceed ALARMS.

    PROBE_REQUESTS responses over the step's problems. `run` and `state` are a prepare.Run and its
    TrainingState; `earlier` are the policy's weights before the step's update. Writes step_N.npz
    (the trace), .png and .json (the verdict) to the run's folder `probe` and prints a line. Returns
    the status for the step's metrics, {} without a probe.
    """
    config, engine = run.config, state.engine
    step, alarm = metrics["step"], []
    if config.measure.probe_on_alarm:
        alarm = alarms(metrics, config.grpo.clip[1])
    planned = config.measure.probe_every and (step - 1) % config.measure.probe_every == 0
    if not (alarm or planned):
        return {}
    why = f"alarm of {', '.join(alarm)}" if alarm else "as planned"
    prompts = [problem.prompt_ids for problem in islice(cycle(problems), PROBE_REQUESTS)]
    seeds = [2**20 * config.run.seed + PROBE_REQUESTS * step + index
             for index in range(PROBE_REQUESTS)]
    trace = sample_trace(engine, prompts, replace(run.sampling, max_kept=0), seeds)
    scored = "processed" if run.sampling.max_kept else "temperature"
    verdict = diagnose(state.policy, trace, [earlier], engine.weight_version, scored)
    path = run.out / "probe" / f"step_{step:06d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(f"{path}.npz", trace)
    plot_verdict(verdict, f"{path}.png")
    path.with_suffix(".json").write_text(json.dumps({"step": step, "why": why} | verdict.record(),
                                                    indent=1))
    print(f"probe after step {step} ({why}): {verdict.headline}", flush=True)
    return {"probe": verdict.status}
