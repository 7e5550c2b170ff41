"""The probe: how far apart are sampler and trainer on the same tokens, and which layer is to blame?

`record` drives the installed vLLM along the decode path and writes a trace. `diagnose` replays a trace (or records one
first) with the trainer's weights and names the layer, the cause and the switch that repairs it; where no hypothesis
explains the mismatch it says "unexplained" and what was excluded. It never guesses.

Exit status: 0 parity, 1 mismatch, 2 bad input, 3 the probe itself failed.
"""

import json
import math
import sys
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import tyro
from torch import Tensor

from engine_adapter import Engine, ParityFlags, Sampling
from hypotheses import (
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
from replay import Trace, Weights, load_traces, save_trace
from rl import Policy
from search import Search

FALSE_ALARM = 1e-6  # chance, over a whole trace, that tokens honestly drawn are called implausible
DTYPES = ("float32", "bfloat16", "float16")
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


# ------------------------------------------------------------------------------------------------ commands
WORKLOAD_SAMPLING = Sampling(temperature=0.7, max_new_tokens=64)  # not 1, so that raw log-probabilities show


@dataclass(frozen=True)
class Workload:
    """A fixed workload for the engine: prompts of random tokens."""

    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = WORKLOAD_SAMPLING
    num_prompts: int = 64
    """Requests in the engine at once."""
    prompt_tokens: tuple[int, int] = (4, 48)
    """Shortest and longest prompt; uniform between."""
    seed: int = 0
    """Of the prompts; sample i has the seed 1000 (seed + 1) + i."""
    parity: ParityFlags = field(default_factory=ParityFlags)
    """The four backend fixes, each switchable alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model in the engine."""
    block_size: int | None = None
    """Tokens per KV block; if not given, vLLM's own."""
    kv_cache_gib: float = 0.25
    """The engine's KV cache."""

    def __post_init__(self):
        low, high = self.prompt_tokens
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if not 1 <= low <= high:
            raise ValueError(f"prompt_tokens must be two numbers, 1 <= shortest <= longest, got {low} {high}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {self.seed}")

    def prompts(self, vocabulary: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        low, high = self.prompt_tokens
        lengths = torch.randint(low, high + 1, (self.num_prompts,), generator=generator).tolist()
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def sample_trace(engine: Engine, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> Trace:
    """One response per prompt along the decode path of a live engine, with its audit."""
    rollouts = engine.generate(prompts, 1, sampling, seeds)
    meta = {"vllm": engine.version, "dtype": engine.settings["model_dtype"], "audit": engine.settings,
            "stop_token_ids": list(sampling.stop_token_ids)}
    return Trace("sampled", rollouts, sampling, meta)


def record_trace(model: str, workload: Workload) -> Trace:
    """Start an engine on the model's weights and sample the workload."""
    policy = load_policy(model, workload.dtype, workload.parity.fp32_head)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(model, contract, workload.parity, dtype=policy.model.dtype, seed=workload.seed,
                    max_model_len=workload.prompt_tokens[1] + workload.sampling.max_new_tokens,
                    block_size=workload.block_size, kv_cache_gib=workload.kv_cache_gib)
    engine.load(policy.weights(), policy.score)
    seeds = [1000 * (workload.seed + 1) + index for index in range(workload.num_prompts)]
    trace = sample_trace(engine, workload.prompts(policy.head.weight.shape[0]), workload.sampling, seeds)
    engine.close()
    return trace


@dataclass(frozen=True)
class Record:
    """Sample a fixed workload with the installed vLLM and write a trace."""

    model: str
    """Folder or hub name of a Hugging Face causal language model."""
    out: str
    """The trace, an .npz file."""
    workload: Annotated[Workload, tyro.conf.arg(name="")] = field(default_factory=Workload)

    def run(self) -> int:
        _check_writable(self.out)
        trace = record_trace(self.model, self.workload)
        save_trace(self.out, trace)
        print(f"{self.out}: {sum(len(r.token_ids) for r in trace.rollouts)} tokens, vLLM {trace.meta['vllm']}")
        return 0


@dataclass(frozen=True)
class Diagnose:
    """Explain the mismatch in a trace; without one, a trace is recorded first."""

    model: str
    """The trainer's weights: a folder or a hub name."""
    traces: tyro.conf.Positional[tuple[str, ...]] = ()
    """npz or JSON traces; the README has the layout."""
    group: str | None = None
    """Only this group of the trace."""
    earlier: tuple[str, ...] = ()
    """Folders with the trainer's weights 1, 2, ... updates back, newest first."""
    version: int | None = None
    """The weight version of `model`; if not given, the newest the trace names."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the trainer; if not given, the trace's."""
    trainer: Literal["processed", "temperature"] = "processed"
    """The distribution the trainer scores; train.py applies the temperature alone."""
    trainer_head: Literal["float32", "model"] = "float32"
    """Dtype of the trainer's final projection."""
    json: str | None = None
    """Write all figures to this file."""
    plot: str | None = None
    """Write a picture to this file (the last trace diagnosed)."""
    brief: bool = False
    """One line per group, without the table."""
    workload: Annotated[Workload, tyro.conf.arg(name="record")] = field(default_factory=Workload)

    def run(self) -> int:
        for path in filter(None, (self.json, self.plot)):
            _check_writable(path)
        traces = [(Path(path).name, trace) for path in self.traces for trace in load_traces(path)]
        if not self.traces:
            traces = [("recorded now", record_trace(self.model, self.workload))]
        traces = [(file, trace) for file, trace in traces if self.group in (None, trace.name)]
        if not traces:
            raise ValueError(f"group must be one of the traces', got {self.group}")
        policies: dict[str, Policy] = {}
        verdicts = []
        for file, trace in traces:
            dtype = self.dtype or trace.meta.get("dtype", "float32")
            if dtype not in DTYPES:
                raise ValueError(f"meta.dtype of {file} must be one of {', '.join(DTYPES)}, got {dtype}")
            if dtype not in policies:
                policies[dtype] = load_policy(self.model, dtype, self.trainer_head == "float32")
                earlier = [self._earlier(path, policies[dtype]) for path in self.earlier]
            verdict = diagnose(policies[dtype], trace, earlier, self.version, self.trainer)
            verdict.trace = f"{file}, {trace.name}"
            verdicts.append(verdict)
            if self.brief:
                print(f"{verdict.trace}: {verdict.headline}", flush=True)
            else:
                print_verdict(verdict)
        if self.json:
            Path(self.json).write_text(json.dumps([verdict.record() for verdict in verdicts], indent=1))
        if self.plot:
            plot_verdict(verdicts[-1], self.plot)
        return int(any(verdict.status != "parity" for verdict in verdicts))

    def _earlier(self, path: str, policy: Policy) -> Weights:
        dtype = str(policy.model.dtype).removeprefix("torch.")
        weights, now = current_weights(load_policy(path, dtype, policy.fp32_head)), current_weights(policy)
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in now.items()}:
            raise ValueError(f"earlier must have the tensors of {self.model}, {path} has others")
        return weights


def load_policy(path: str, dtype: str, fp32_head: bool) -> Policy:
    """The trainer of the probe. Raises: ValueError whatever is wrong with the folder or the name."""
    try:
        return Policy.load(path, getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu", fp32_head)
    except Exception as error:  # transformers and safetensors raise all kinds
        raise ValueError(f"model must be a loadable causal language model, got {path}: {error}") from error


def _check_writable(path: str) -> None:
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise ValueError(f"the output must be a writable file, got {path}: {error}") from error


def current_weights(policy: Policy) -> Weights:
    """A policy's weights by parameter name, kept while others are in the trainer."""
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    commands = {"record": Record, "diagnose": Diagnose}
    try:
        status = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__).run()
    except ValueError as error:
        print("error:", " ".join(str(error).split())[:500], file=sys.stderr)
        sys.exit(2)
    except Exception:  # Python's own status for it is 1, which here means a mismatch
        traceback.print_exc()
        sys.exit(3)
    sys.exit(status)


if __name__ == "__main__":
    main()
