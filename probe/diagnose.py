"""The verdict on one trace: layer, cause and repair of its mismatch, or "unexplained"."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any, Literal

import torch
from torch import Tensor

from engine_adapter import Engine, Rollout, Sampling
from probe import causes
from probe.causes import Cause
from probe.hypotheses import MASK_EDGE, Explanation, Probe
from probe.search import Search
from probe.stress import BY_CHANCE, compare
from probe.traces import Replay, Trace, Weights, save_trace
from rl import Policy

FALSE_ALARM = 1e-6  # probability, per trace, that tokens drawn correctly are called implausible
UNLIKELY = 0.05  # chance below which a kind of pressure is shown beside the wrong requests
SHOWN = 12  # requests listed in a sentence; the JSON lists all

# ---------------------------------------------------------------------------------- verdict
@dataclass
class Verdict:
    """What the probe found in one trace."""

    trace: Trace = field(repr=False)
    causes: list[Cause]  # none: exact, parity or unexplained
    requests: dict[str, list[int]]  # rows of the trace by finding
    start: Explanation  # the trainer as it is
    found: list[Explanation]  # all hypotheses tried, the best first
    knows_earlier: bool  # earlier weights were given
    replay: Replay = field(repr=False)
    logprobs: Tensor = field(repr=False)  # (N,) the trainer's
    tokens: dict[str, Any] = field(repr=False)  # of by_token

    def __post_init__(self):
        self.best = self.found[0]
        others = (each for each in self.found if not set(self.best.causes) <= set(each.causes))
        self.second = next(others, None)  # the best that does not merely add causes to `best`
        self.status: Literal["exact", "parity", "mismatch", "unexplained"] = "parity"
        if not self.best.fits:
            self.status = "unexplained"
        elif self.causes:
            self.status = "mismatch"
        elif torch.equal(self.logprobs, self.replay.reported):
            self.status = "exact"
        self.layers = list(dict.fromkeys(cause.layer for cause in self.causes))
        named = "; and ".join(f"{cause.layer}: {cause.name}" for cause in self.causes)
        self.blamed = named or self.status
        mismatch, floor = self.start.noise.mean, self.start.floor.mean
        self.figures = f"mean |mismatch| {mismatch:.1e} nats, noise floor {floor:.1e}"
        self.headline = f"{self.blamed}. {self.figures}"

    @property
    def sentence(self) -> str:
        """The verdict in words, with repairs and figures."""
        if self.status == "exact":
            equal = f"all {len(self.logprobs)} tokens are equal bit for bit"
            parts = [f"exact: {equal}", self.figures]
        elif self.status == "parity":
            parts = [f"parity: {self.figures}"]
        elif self.status == "mismatch":
            note = f" ({self.best.forward.note})" if self.best.forward.note else ""
            repairs = "; ".join(dict.fromkeys(cause.repair for cause in self.causes))
            staleness = ""
            if "objective" in self.layers:
                k3 = self.start.noise.k3
                staleness = f"; the policies differ by {k3:.1e} nats a token (k3)"
            remaining = f"remaining mismatch {self.best.noise.mean:.1e}"
            parts = [f"{self.blamed}{note}", f"Repair: {repairs}",
                     f"{self.figures}, {remaining}{staleness}"]
            if self.second is not None:
                left = self.second.noise.mean
                parts.append(f"Next best: {self.second.name}, remaining mismatch {left:.1e}")
        else:
            tried = [each.name for each in self.found if len(each.causes) == 1]
            excluded = ", ".join(dict.fromkeys(tried))
            if not self.knows_earlier:
                excluded += ("; not tested without earlier weights (--earlier): old weights,"
                             " tensors and KV caches")
            parts = [f"unexplained: {self.figures}", f"Excluded: {excluded}"]
        for finding, rows in self.requests.items():
            if rows:
                more = " ..." if len(rows) > SHOWN else ""
                parts.append(f"Requests {finding}: {', '.join(map(str, rows[:SHOWN]))}{more}")
        return ". ".join(parts)

    @property
    def under_pressure(self) -> list[str]:
        """Lines for a trace under pressure: what the wrong requests met, how to replay one."""
        events = self.trace.events
        faults = [rows for finding, rows in self.requests.items() if finding != "repetitive"]
        wrong = sorted(set(chain(*faults)))
        if not events or not wrong:
            return []
        command = self.trace.meta.get("command", "record --stress ...")
        more_often = [each.sentence for each in compare(events, wrong) if each.chance < UNLIKELY]
        return [*(f"request {row}: {events[row]}" for row in wrong[:SHOWN]),
                *(more_often or ["none of this is more frequent among these requests"]),
                f"replay one alone: python -m probe {command} --only {wrong[0]}"
                f" --out request_{wrong[0]}.npz"]

    @property
    def table(self) -> list[Explanation]:
        """A row per hypothesis: the best, each single cause, the five closest combinations."""
        rows: dict[tuple[Cause, ...], Explanation] = {self.best.causes: self.best}
        for each in sorted(self.found, key=lambda e: e.noise.mean):
            rows.setdefault(each.causes, each)
        best, *others = rows.values()
        combined = [each for each in others if len(each.causes) > 1]
        return [best, *(each for each in others if len(each.causes) <= 1), *combined[:5]]

    def record(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        def row(explanation: Explanation) -> dict[str, Any]:
            names = [cause.name for cause in explanation.causes]
            return {"causes": names, "fits": explanation.fits,
                    "share": explanation.share(self.start), "left": asdict(explanation.noise),
                    "floor": asdict(explanation.floor)}

        return {
            "trace": self.trace.name, "status": self.status, "layers": self.layers,
            "sentence": self.sentence, "causes": [asdict(cause) for cause in self.causes],
            "mismatch": asdict(self.start.noise), "floor": asdict(self.start.floor),
            "best": row(self.best), "second": self.second and row(self.second),
            "requests": self.requests, "hypotheses": [row(each) for each in self.table],
            "forwards": self.replay.forwards, "under_pressure": self.under_pressure,
            "tokens": self.tokens,
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
    logprobs = probe.predict(probe.current, probe.trainer)
    if logprobs.isnan().any():
        raise ValueError(f"the trainer's log-probabilities must be finite on {trace.name}; check"
                         " the model's weights")
    if not probe.replay.reported.any() and logprobs.abs().median() > 0.01:
        raise ValueError(f"logprobs must be what the engine reported, all of {trace.name}'s are 0")
    start = replace(probe.explain(probe.current, probe.trainer), causes=(),
                    floor=probe.floor(probe.current, replace(probe.trainer, head="float32")))
    found = Search(probe).run()
    requests = _requests(probe, found[0], start)
    named = _causes(probe, found[0], start, requests) if found[0].fits else []
    if requests["not finite"]:
        named.append(causes.NOT_FINITE)
    elif causes.NO_STOP not in named and not probe.replay.reported.isfinite().all():
        named.append(causes.NO_STOP)
    if requests["not finite in the trainer"]:
        named.append(causes.TRAINER_NOT_FINITE)
    return Verdict(trace, named, requests, start, found, bool(probe.earlier), probe.replay,
                   logprobs, by_token(probe))


def _causes(probe: Probe, best: Explanation, start: Explanation,
            requests: dict[str, list[int]]) -> list[Cause]:
    """The causes of an explanation that fits, and what settings, versions and samples add."""
    named = [cause for cause in best.causes if cause != causes.HEAD]
    in_engine = causes.HEAD in best.causes
    in_trainer = not probe.policy.fp32_head and probe.policy.model.dtype != torch.float32
    if in_engine or in_trainer:
        side = "in the engine" if in_engine else "in the trainer"
        if in_engine and in_trainer:
            side = "on both sides"
        named.append(replace(causes.HEAD, name=f"{causes.HEAD.name} {side}"))
    if probe.trainer.distribution == "temperature" and not start.floor.allows(start.noise):
        what = "mask" if probe.trace.sampling.has_mask else "penalties"
        named.append(causes.NOT_IN_TRAINER.of(what))
    precise = {causes.STALE.of(updates): causes.MOVED_ON.of(updates) for updates in probe.earlier
               if (probe.labels == probe.version - updates).double().mean() > 0.5}
    if causes.WRONG_REQUESTS in named and probe.trace.events:
        first, *_ = compare(probe.trace.events, requests["wrong"])
        if first.all_of_them and first.chance < BY_CHANCE:
            name = f"{causes.WRONG_REQUESTS.name}, all with {first.kind}"
            precise[causes.WRONG_REQUESTS] = replace(causes.WRONG_REQUESTS, name=name)
    if _drawn_as_reported(probe, best):
        precise |= dict.fromkeys(causes.IN_PLACE_OF_PROCESSED, causes.NOT_IN_FORCE)
    elif requests["implausible"]:
        named.append(causes.UNLIKE)
    return [precise.get(cause, cause) for cause in named]


def _drawn_as_reported(probe: Probe, best: Explanation) -> bool:
    """Whether tokens come from the reported distribution: a likelihood ratio decides."""
    if probe.distributions[best.readout.distribution][1] not in causes.IN_PLACE_OF_PROCESSED:
        return False
    reported = best.forward.logprobs(replace(best.readout, token="sampled"))
    declared = best.forward.logprobs(replace(best.readout, token="sampled",
                                             distribution="processed"))
    outside = declared.isinf()  # outside the mask of the trace's sampling parameters
    if outside.sum() > 2 + MASK_EDGE * len(declared) * (probe.policy.model.dtype != torch.float32):
        return True
    return (reported - declared)[~outside].sum().item() > -math.log(FALSE_ALARM)


def _requests(probe: Probe, best: Explanation, start: Explanation) -> dict[str, list[int]]:
    """Rows of the trace by finding: wrong, not finite, implausible, repetitive."""
    wrong = (best.wrong if best.apart is None else best.apart).nonzero()[:, 0].tolist()
    if not best.fits and probe.trace.events:
        wrong = start.wrong.nonzero()[:, 0].tolist()
    broken = sorted(set(probe.replay.rows[probe.broken].tolist()))
    return {
        "wrong": wrong if best.fits or probe.trace.events or len(wrong) <= 0.5 * len(best.wrong)
        else [],
        "not finite": broken,
        "not finite in the trainer": [row for row, values in enumerate(probe.trace.trainer_logprobs)
                                      if not all(map(math.isfinite, values))],
        "implausible": [row for row in _implausible(probe, best) if row not in wrong + broken],
        "repetitive": [row for row, r in enumerate(probe.trace.rollouts) if _repeats(r.token_ids)],
    }


def _implausible(probe: Probe, best: Explanation) -> list[int]:
    """Sequences whose tokens are too improbable to have been drawn from the trainer's distribution.

    The test statistic is the likelihood ratio of an alternative to the trainer's distribution.
    Alternatives: half uniform noise; the distribution sharpened; the distribution flattened. The
    ratio has mean 1 if the tokens were drawn from the trainer's distribution, so it exceeds B /
    alpha in any of B sequences with probability at most alpha (Ville's inequality).
    """
    if probe.trace.sampling.temperature == 0 or best.forward.hidden is None:
        return []
    replay, readout = probe.replay, best.readout
    sampling, _ = probe.distributions[readout.distribution if readout.fitted else "processed"]
    parts = []  # (3, n) each
    with replay.policy.using(best.forward.weights):
        for chunk, logits in replay.logits(best.forward.hidden, probe.heads[readout.head]):
            logprobs, sampled = replay.logprobs(logits, sampling, chunk, torch.float64)
            support = logprobs.isfinite().sum(dim=-1)
            noise = torch.log(0.5 + 0.5 / support * torch.exp(-sampled))
            sharper = sampled - torch.logsumexp(2 * logprobs, dim=-1)
            flatter = -0.5 * sampled - torch.logsumexp(0.5 * logprobs, dim=-1)
            parts.append(torch.stack([noise, sharper, flatter]))
    ratios = torch.cat(parts, dim=1)  # (3, N)
    # (3, B); tokens outside a mask: see Probe._without_flips.
    sums = replay.row_sums(ratios.masked_fill(~ratios.isfinite(), 0.0))
    if best.apart is not None:  # these are wrong anyway, and their sum would blame all others
        sums = sums.masked_fill(best.apart, 0.0)
    together = sums.sum(dim=1, keepdim=True)  # (3, 1)
    limit = math.log(3 * len(replay.lengths) / FALSE_ALARM)
    return (torch.maximum(sums, together) > limit).any(dim=0).nonzero()[:, 0].tolist()


def _repeats(token_ids: list[int]) -> bool:
    """Do the last 16 or more tokens, at least half of all, repeat a pattern four times?"""
    for period in range(1, len(token_ids) // 4 + 1):
        end = token_ids[-max(16, 4 * period, len(token_ids) // 2):]
        if len(end) >= 16 and end[period:] == end[:-period]:
            return True
    return False


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
