"""Colocated GRPO in one process: a transformers trainer and a vLLM V1 engine take turns on one device.

One step is: sample, sleep, score, update, wake, load. It is spelled out in `train_step`, the page to read.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal

import torch
import transformers
import tyro
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine_adapter import Engine, ParityFlags, Rollout, Sampling, check_vllm_version
from inflight import Flight
from models import describe_model, describe_without_weights, encode_prompt, toy_model
from objectives import OBJECTIVES, group_advantages, mismatch_metrics
from parity import alarms, current_weights, diagnose, plot_verdict, sample_trace
from plan import print_plan
from reference import ReferenceEngine, kv_bytes_per_token
from replay import Weights, save_trace
from rl import Batch, Optimizer, Policy, UpdateOptions, frozen_logprobs, make_batch, update
from scoring import Scores, score
from tasks import BUILT_IN, Problem, Task, load_task


@dataclass(frozen=True)
class Config(UpdateOptions):
    """The options of a run. The defaults are the toy job: a small model learns to add on two CPU cores."""

    out: str = "runs/toy"
    """Folder of the run: config.json, metrics.jsonl, curves.png, checkpoints/."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`; the other options must be those of the first start."""
    seed: int = 0
    """Decides the toy model, the held-out split, the problems of each step and the seed of every sample."""
    steps: int = 100
    """Batches of rollouts; the learning rate decays to zero over them."""
    model: str = "toy"
    """`toy`, a folder with a Hugging Face causal language model, or a hub name."""
    task: str = "toy"
    """`toy` (addition), `digits` (for ablations), `countdown`; a JSONL file of {"question", "answer"} with numbers as
    answers; a Python file with `sample` and `reward`; or a hub's dataset with such columns, NAME or NAME:CONFIG."""
    eval_task: str | None = None
    """JSONL file of held-out problems; if not given, a tenth of `task` is held out."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; if not given, what the model's context leaves beside max_new_tokens."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """What to do with problems whose prompt is longer; dropped ones are counted."""
    reward_limit_s: float = 10.0
    """Seconds after which one call of the task's reward counts as hanging."""
    reward_errors: Literal["stop", "count"] = "stop"
    """If a reward raises, hangs or is not a finite number: stop the run, or count it and go on with reward 0."""
    cache_dir: str = str(Path(__file__).parent / ".cache")
    """Where the toy model is kept once it has been taught."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the model on both sides; 16 bits keep fp32 masters in the optimizer, float16 scales its loss as well."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for backward and compute the layer again there: less memory, more time."""
    offload_optimizer: bool = False
    """Keep master weights and moments in pinned host memory but during the update: lets large models fit a GPU."""

    num_prompts: int = 128
    """Problems per step (P)."""
    group_size: int = 8
    """Samples per problem (G); their mean is the baseline, so a single one would carry no signal."""
    mask_truncated: bool = False
    """Leave responses cut off at max_new_tokens out of the loss; their reward stays in the baseline (DAPO's filter)."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """Who samples: vLLM, or the trainer's own modules (reference.py): slow, without mismatch, the known-good curve."""
    inflight_groups: int = 0
    """Groups on their way beyond the P that a step consumes (N), unfinished while the weights change; 0: none."""
    max_staleness: int = 8
    """Updates after which a group in flight is dropped, counted from its oldest token."""
    parity: ParityFlags = field(default_factory=ParityFlags)
    """The four backend fixes, each switchable alone."""
    tis_over_a_broken_backend: bool = False
    """Allow `tis` although a parity flag is off: only to study how a correction hides a broken backend."""

    lr: float = 1e-3
    """AdamW's peak learning rate; right for the toy, a thousand times too high for a pretrained model."""
    lr_warmup_steps: int = 5
    """Linear warm-up: Adam's second moments are noise at first."""
    weight_decay: float = 0.0
    """Decoupled; a few hundred steps of RL have nothing to regularise."""
    eval_every: int = 20
    """Steps between evaluations on held-out problems; also before the first step and after the last."""
    eval_problems: int = 256
    """Held-out problems per evaluation (or all there are), answered through the engine: sampled, and greedily."""
    eval_samples: int = 1
    """Samples of each; the greedy answer is one."""
    eval_with_trainer: bool = True
    """Evaluate without the engine as well: a broken backend can learn to please itself (eval_gap); slow if large."""
    checkpoint_every: int = 20
    """Steps between checkpoints, and after the last; the newest two are kept."""

    probe_every: int = 0
    """Steps between probes of the mismatch (parity.py), the first after the first step; 0 for none. In `out`/probe."""
    probe_on_alarm: bool = False
    """Probe after a step whose mismatch is beyond parity.ALARMS. Either keeps a second copy of the weights."""

    max_num_seqs: int = 512
    """Sequences the engine decodes at once; further rollouts queue, so memory does not grow with their number."""
    block_size: int | None = None
    """Tokens per block of the KV cache; if not given, vLLM's choice (CPU 128, GPU 16). Prompts are cached by blocks."""
    kv_cache_gib: float = 0.25
    """The engine's KV cache: given, not guessed from memory that the trainer will need."""
    enforce_eager: bool = True
    """No CUDA graphs: starts in seconds instead of minutes; switch off for long GPU runs."""
    allow_untested_vllm: bool = False
    """Try a vLLM version outside the tested range."""
    plan: bool = False
    """Print the memory of each phase on a GPU, from the model's configuration alone, and stop: no weights, no GPU."""
    plan_gib: float = 80.0
    """The GPU's memory that the plan is held against."""

    def __post_init__(self):
        for rule, holds, names in (
            ("at least 1", lambda value: value >= 1, "steps num_prompts max_new_tokens num_minibatches"
             " micro_batch_tokens eval_every eval_problems eval_samples checkpoint_every max_num_seqs"),
            ("positive and finite", lambda value: 0 < value < float("inf"),
             "temperature lr grad_clip tis_cap kv_cache_gib reward_limit_s plan_gib"),
            ("at least 1, if given", lambda value: value is None or value >= 1, "max_prompt_tokens"),
            ("non-negative and finite", lambda value: 0 <= value < float("inf"),
             "kl_coef tis_floor weight_decay lr_warmup_steps seed probe_every inflight_groups max_staleness"),
            ("at least 2 (the group's mean is the baseline)", lambda value: value >= 2, "group_size"),
            ("below 2^32 (numpy's limit)", lambda value: value < 2**32, "seed"),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        if (rows := self.num_prompts * self.group_size) % self.num_minibatches:
            raise ValueError(f"num_minibatches must divide num_prompts * group_size = {rows} (all optimizer steps weigh"
                             f" alike), got {self.num_minibatches}")
        if not (0 <= self.clip[0] < 1 and 0 < self.clip[1] < float("inf")):
            raise ValueError(f"clip_low must be in [0, 1) and clip_high positive and finite, got {self.clip}")
        if self.objective == "cispo" and self.clip_low is not None:
            raise ValueError(f"clip_low must not be given with cispo (it has an upper cap only), got {self.clip_low}")
        if self.eval_task is not None and (self.task in BUILT_IN or self.task.endswith(".py")):
            raise ValueError(f"eval_task must not be given with task {self.task} (it holds problems out itself), got"
                             f" {self.eval_task}")
        if self.tis != "off":
            self._check_tis()
        self._check_backend()

    def _check_tis(self) -> None:
        """Fix the backend first, then correct what is left."""
        if self.old_policy == "rollout":
            raise ValueError(f"tis must be off with old_policy rollout (its ratio holds the mismatch already: a weight"
                             f" would count it twice), got {self.tis}; try --old-policy recompute")
        if self.parity.off() and not self.tis_over_a_broken_backend:
            raise ValueError(f"tis must be off before parity (a correction hides the broken backend), got {self.tis}"
                             f" without {', '.join(self.parity.off())}; to study that, --tis-over-a-broken-backend")
        if self.tis == "masked" and self.tis_floor >= self.tis_cap:
            raise ValueError(f"tis_floor must be below tis_cap = {self.tis_cap}, got {self.tis_floor}")

    def _check_backend(self) -> None:
        if self.parity.inflight_keep and self.parity.inflight_otherwise != "abort":
            raise ValueError(f"inflight_otherwise must not be given with inflight_keep (it would do nothing), got"
                             f" {self.parity.inflight_otherwise}; try --parity.no-inflight-keep")
        if self.engine == "transformers" and set(self.parity.off()) & {"processed_logprobs", "explicit_runtime"}:
            raise ValueError(f"engine must be vllm to leave out a fix of vLLM's (the reference has no such faults), got"
                             f" transformers without {', '.join(self.parity.off())}")

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        return self.lr * min(1.0, step / (self.lr_warmup_steps + 1)) * (1 - (step - 1) / self.steps)


# ------------------------------------------------------------------------------------------------ the loop
@dataclass
class Live:
    """What changes from step to step."""

    policy: Policy
    reference: Policy | None
    optimizer: Optimizer
    engine: Engine | ReferenceEngine
    flight: Flight
    rng: random.Random


def train(run: "Run") -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    config, (live, first_step) = run.config, build(run)
    if first_step == 1:
        run.log({"step": 0} | evaluate(run, live, 0))
    for step in range(first_step, config.steps + 1):
        earlier = current_weights(live.policy) if config.probe_every or config.probe_on_alarm else None
        metrics, _, problems = train_step(run, live, step)
        last = step == config.steps
        if earlier and (why := probe_reason(config, step, metrics)):
            metrics["probe"] = probe(run, live, step, why, problems, earlier)
        if last or step % config.eval_every == 0:
            metrics |= evaluate(run, live, step)
        run.log(metrics)
        if last or step % config.checkpoint_every == 0:
            save_checkpoint(run, live, step)
    live.engine.close()
    save_policy(run, live.policy, run.out / "policy")
    plot_curves(run.out)


def train_step(run: "Run", live: Live, step: int) -> tuple[dict[str, Any], Batch, list[Problem]]:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    config, policy, engine, flight, clock = run.config, live.policy, live.engine, live.flight, Clock()
    problems = run.task.sample(live.rng, config.num_prompts + config.inflight_groups - len(flight.groups))
    seeds = [sample_seed(config.seed, "train", step, p) for p in range(len(problems))]
    flight.submit(problems, run.encode(problems), seeds)
    with clock("generate"):
        groups = flight.take(config.num_prompts)  # P
        engine.sleep()

    problems = [group.problem for group in groups]  # P
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # B = P * G, group-major
    scores = run.score([problem for problem in problems for _ in range(config.group_size)], rollouts)
    rewards = torch.tensor(scores.rewards)  # (B,)
    sampled = rollout_metrics(rollouts, rewards, config.group_size, engine.weight_version)
    advantages = group_advantages(rewards, config.group_size, OBJECTIVES[config.objective].divide_by_std)  # (B,)
    batch = make_batch(rollouts, advantages, policy.device)  # (B, T)
    with clock("old_logprobs"):
        old_logprobs, entropy = frozen_logprobs(policy, batch, config)  # (B, T), before any update
        batch = replace(batch, old_logprobs=old_logprobs)
        if live.reference is not None:
            batch = replace(batch, ref_logprobs=frozen_logprobs(live.reference, batch, config)[0])
    sampled |= measure_mismatch(batch, rollouts, engine.weight_version)
    entropy = (entropy.sum() / batch.mask.sum()).item()
    if config.mask_truncated:
        batch = batch.without(torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]))
    with clock("update"):
        metrics = update(policy, live.optimizer, batch, config, config.lr_at(step))

    with clock("sync"):
        engine.wake()
        loaded = engine.load(policy.weights(), policy.score)
        flight.after_update()

    metrics |= sampled | flight.counts()
    metrics |= {"step": step, "entropy": entropy, "lr": config.lr_at(step), "reward_errors": scores.num_errors}
    metrics |= clock.figures() | loaded | {"memory_gib": memory_gib(policy.device)}
    return metrics, batch, problems


def measure_mismatch(batch: Batch, rollouts: list[Rollout], version: int) -> dict[str, float | None]:
    """`mismatch_metrics` of the batch and, as fresh_..., of the rollouts sampled by the present weights alone: what is
    older is stale as well, and staleness is not the backend's fault. None if all is older."""
    fresh = torch.tensor([[min(rollout.versions) == version] for rollout in rollouts]).to(batch.mask)  # (B, 1)
    policies = batch.old_logprobs, batch.behavior_logprobs
    metrics = mismatch_metrics(*policies, batch.mask)
    backend = mismatch_metrics(*policies, batch.mask * fresh) if fresh.any() else dict.fromkeys(metrics)
    return metrics | {f"fresh_{name}": value for name, value in backend.items()}


def evaluate(run: "Run", live: Live, step: int) -> dict[str, float]:
    """Mean reward on held-out problems at the run's temperature: through the engine and, as a broken backend can learn
    to please itself, by the trainer alone; `eval_gap` is how much better the engine looks. And greedily, through the
    engine. Every answer goes to samples.jsonl."""
    problems = run.task.held_out[: run.config.eval_problems]
    seeds = [sample_seed(run.config.seed, "eval", step, p) for p in range(len(problems))]
    errors = 0

    def mean_reward(engine: Engine | ReferenceEngine, mode: str, samples: int, sampling: Sampling) -> float:
        nonlocal errors
        asked = [problem for problem in problems for _ in range(samples)]
        rollouts = engine.generate(run.encode(problems), samples, sampling, seeds)
        scores = run.score(asked, rollouts)
        run.log_samples(step, mode, asked, rollouts, scores)
        errors += scores.num_errors
        return mean(scores.rewards)

    samples = run.config.eval_samples
    greedy = mean_reward(live.engine, "greedy", 1, replace(run.sampling, temperature=0.0))
    alone = through_engine = mean_reward(live.engine, "sampled", samples, run.sampling)
    if run.config.eval_with_trainer and run.config.engine == "vllm":  # the reference engine is the trainer alone
        trainer = reference_engine(run, live.policy)
        trainer.load(live.policy.weights(), live.policy.score)
        alone = mean_reward(trainer, "trainer", samples, run.sampling)
    metrics = {"eval_reward": through_engine, "eval_reward_greedy": greedy, "eval_reward_errors": errors}
    if run.config.eval_with_trainer:
        metrics |= {"eval_reward_trainer": alone, "eval_gap": through_engine - alone}
    return metrics


# ------------------------------------------------------------------------------------------------ the probe
PROBE_REQUESTS = 128  # over the problems of the step just taken: met again, they show a stale prefix cache


def probe_reason(config: Config, step: int, metrics: dict[str, Any]) -> str | None:
    """Why the engine is to be probed after this step, if it is."""
    backend = {name: metrics[f"fresh_{name}"] for name in ("mismatch_kl", "mismatch_abs_mean", "ess")}
    if config.probe_on_alarm and None not in backend.values() and (rung := alarms(backend)):
        return f"alarm of {', '.join(rung)}"
    return "as planned" if config.probe_every and (step - 1) % config.probe_every == 0 else None


def probe(run: "Run", live: Live, step: int, why: str, problems: list[Problem], earlier: Weights) -> str:
    """Sample the step's problems again, diagnose them (`earlier`: the weights before the step's update), keep the trace
    and the verdict; returns the verdict's status."""
    problems = (problems * -(-PROBE_REQUESTS // len(problems)))[:PROBE_REQUESTS]
    seeds = [sample_seed(run.config.seed, "probe", step, p) for p in range(len(problems))]
    trace = sample_trace(live.engine, run.encode(problems), run.sampling, seeds)
    verdict = diagnose(live.policy, trace, [earlier], live.engine.weight_version, trainer="temperature")
    path = run.out / "probe" / f"step_{step:06d}"
    path.parent.mkdir(exist_ok=True)
    save_trace(f"{path}.npz", trace)
    plot_verdict(verdict, f"{path}.png")
    path.with_suffix(".json").write_text(json.dumps({"step": step, "why": why} | verdict.record(), indent=1))
    print(f"probe after step {step} ({why}): {verdict.headline}", flush=True)
    return verdict.status


def rollout_metrics(rollouts: list[Rollout], rewards: torch.Tensor, group_size: int, version: int) -> dict[str, float]:
    """What the rollouts alone tell; staleness counts updates between sampling a token and training on it."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    versions = [token_version for rollout in rollouts for token_version in rollout.versions]
    groups = rewards.view(-1, group_size)  # (P, G)
    return {
        "reward": rewards.mean().item(),
        "flat_frac": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
        "trunc_frac": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": version - min(versions),
        "staleness_mean": version - mean(versions),
    }


def sample_seed(run_seed: int, stream: str, step: int, index: int) -> int:
    """The seed of a group, far from all others (its samples use seed, seed + 1, ...): 48 bits of a hash."""
    return int.from_bytes(sha256(f"{run_seed}/{stream}/{step}/{index}".encode()).digest()[:6], "big")


def memory_gib(device: torch.device) -> float:
    """GPU: all that is taken on the device now. CPU: the process's resident memory now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def reset_peak() -> None:
    """CPU: forget the process's highest resident memory. GPU: nothing, see `peak_gib`."""
    if not torch.cuda.is_available():
        Path("/proc/self/clear_refs").write_text("5")


def peak_gib() -> float:
    """The most that was taken since `reset_peak`; on a GPU now, as torch keeps what it once took until a wake."""
    if torch.cuda.is_available():
        return memory_gib(torch.device("cuda"))
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


class Clock:
    """Seconds and peak memory of each phase, seconds of the step."""

    def __init__(self):
        self.started, self.phases = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        reset_peak()
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases |= {f"{phase}_s": time.perf_counter() - started, f"{phase}_gib": peak_gib()}

    def figures(self) -> dict[str, float]:
        return self.phases | {"step_s": time.perf_counter() - self.started}


# ------------------------------------------------------------------------------------------------ set-up and its checks
@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    out: Path
    model_path: str
    task: Task
    prompt_ids: dict[Problem, list[int]]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    max_model_len: int
    dropped_prompts: int

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        return [self.prompt_ids[problem] for problem in problems]

    def score(self, problems: list[Problem], rollouts: list[Rollout]) -> Scores:
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        stop = self.config.reward_errors == "stop"
        scores = score(self.task.reward, problems, texts, self.config.reward_limit_s, stop)
        for error in [error for error in scores.errors if error][:1]:  # the others of the batch are in its count
            print(f"REWARD FAILED, one of {scores.num_errors}: {error}", flush=True)
        return scores

    def log_samples(
        self, step: int, mode: str, problems: list[Problem], rollouts: list[Rollout], scores: Scores
    ) -> None:
        """A line of samples.jsonl per answer: what the model writes, and what it earned."""
        with open(self.out / "samples.jsonl", "a") as file:
            for problem, rollout, response, reward, error in zip(
                problems, rollouts, scores.responses, scores.rewards, scores.errors, strict=True
            ):
                sample = {"step": step, "mode": mode, "reward": reward, "response": response,
                          "question": problem.question, "answer": problem.answer, "source": problem.source,
                          "finish_reason": rollout.finish_reason, "tokens": len(rollout.token_ids), "error": error}
                file.write(json.dumps(sample) + "\n")

    def log(self, metrics: dict[str, Any]) -> None:
        """All of it to metrics.jsonl, one line to the terminal."""
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        print(log_line(metrics, self.config.steps), flush=True)


def prepare(config: Config) -> Run:
    """Find what can be wrong before a model is loaded (or taught). Raises: ValueError with the rule and the way out."""
    if config.engine == "vllm":
        check_vllm_version(config.allow_untested_vllm)
    _check_out(config)
    task = load_task(config.task, config.seed, config.eval_task)
    if config.offload_optimizer and not torch.cuda.is_available():
        raise ValueError("offload_optimizer must not be given without a GPU (the optimizer is in host memory anyway)")
    model_config, tokenizer, stop_token_ids = describe_model(config.model)
    prompt_ids = _encode_prompts(tokenizer, task)
    task, dropped = _fitting(config, task, prompt_ids, getattr(model_config, "max_position_embeddings", None))
    if (groups := config.num_prompts + config.inflight_groups) > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all there are),"
                         f" got {groups}")
    longest = max(len(prompt_ids[problem]) for problem in task.train + task.held_out)
    path = config.model
    if path == "toy":  # taught, if it is not there yet, after all else has been checked
        path = str(toy_model(config.cache_dir, config.seed, "digits" if config.task == "digits" else "toy"))
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_token_ids)
    max_model_len = longest + config.max_new_tokens
    if (record := Path(config.out) / "config.json").exists():
        earlier = json.loads(record.read_text()).get("problems", {}).get("sha256")
        if earlier != task.fingerprint:
            raise ValueError(f"a resumed run must keep its problems, {config.task} has others now")
    return Run(config, Path(config.out), path, task, prompt_ids, tokenizer, sampling, max_model_len, dropped)


def _check_out(config: Config) -> None:
    out, record = Path(config.out), Path(config.out) / "config.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out must be a writable folder, got {out}: {error}") from error
    if record.exists() and not config.resume:
        raise ValueError(f"out must be a new folder, {out} holds a run; go on with --resume or choose another --out")
    if record.exists():
        ours, theirs = asdict(config), json.loads(record.read_text())["config"]
        free = {"resume", "out", "cache_dir", "plan", "plan_gib"}
        changed = [name for name in ours.keys() - free if ours[name] != theirs.get(name)]
        if changed:
            raise ValueError(f"a resumed run must keep its options, changed are {', '.join(sorted(changed))}")


def _encode_prompts(tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[Problem, list[int]]:
    prompt_ids = {}
    for problem in task.train + task.held_out:
        try:
            prompt_ids[problem] = encode_prompt(tokenizer, problem)
        except Exception as error:  # tokenizers raise bare Exceptions on text outside their vocabulary
            raise ValueError(f"the tokenizer must encode all prompts, it fails on {problem.source}: {error}") from error
    return prompt_ids


def _fitting(
    config: Config, task: Task, prompt_ids: dict[Problem, list[int]], context: int | None
) -> tuple[Task, int]:
    """The task without the problems whose prompts are too long, and how many these are."""
    limit, why = config.max_prompt_tokens, "--max-prompt-tokens"
    if context is not None and (limit is None or context - config.max_new_tokens < limit):
        limit, why = context - config.max_new_tokens, f"the context of {context} less --max-new-tokens"
    overlong = {problem for problem, ids in prompt_ids.items() if limit is not None and len(ids) > limit}
    if not overlong:
        return task, 0
    worst = max(overlong, key=lambda problem: len(prompt_ids[problem]))
    if config.overlong_prompts == "refuse":
        raise ValueError(f"prompts must be at most {limit} tokens long ({why}), {worst.source} has"
                         f" {len(prompt_ids[worst])}, {len(overlong)} of {len(prompt_ids)} are longer;"
                         " try --overlong-prompts drop")
    train, held_out = ([p for p in problems if p not in overlong] for problems in (task.train, task.held_out))
    if not train or not held_out:
        raise ValueError(f"prompts must be at most {limit} tokens long ({why}), none of the"
                         f" {'held-out' if train else 'training'} problems is left")
    print(f"{len(overlong)} of {len(prompt_ids)} prompts DROPPED: longer than {limit} tokens ({why})", flush=True)
    return replace(task, train=train, held_out=held_out), len(overlong)


def build(run: Run) -> tuple[Live, int]:
    """Both sides with the same weights, fresh or from the newest checkpoint, and the first step to take."""
    config, rng, first_step = run.config, random.Random(run.config.seed), 1
    checkpoint = newest_checkpoint(run.out) if config.resume else None
    placement = getattr(torch, config.dtype), "cuda" if torch.cuda.is_available() else "cpu", config.parity.fp32_head
    path = str(checkpoint / "policy" if checkpoint else run.model_path)
    policy = Policy.load(path, *placement, gradient_checkpointing=config.gradient_checkpointing)
    reference = Policy.load(run.model_path, *placement) if config.kl_coef else None  # the first policy, resumed or not
    optimizer = Optimizer(policy.model, config.weight_decay, config.offload_optimizer)
    engine = start_engine(run, policy)
    flight = Flight(engine, config.group_size, run.sampling, config.max_staleness)
    torch.manual_seed(config.seed)  # after the engine, whose start reseeds the process
    if checkpoint:
        first_step = load_checkpoint(run, checkpoint, optimizer, flight, rng) + 1
    else:
        for name in TABLES:  # of a run that died before its first checkpoint
            (run.out / name).unlink(missing_ok=True)
    engine.load(policy.weights(), policy.score)
    write_config(run, engine, policy, first_step)
    print("engine: " + ", ".join(f"{name} {value}" for name, value in engine.settings.items()), flush=True)
    if config.resume:
        print(f"resumed at step {first_step}" + ("" if checkpoint else ": there was no checkpoint"), flush=True)
    return Live(policy, reference, optimizer, engine, flight, rng), first_step


def start_engine(run: Run, policy: Policy) -> Engine | ReferenceEngine:
    """The engine that `config.engine` names, still without the policy's weights."""
    config = run.config
    if config.engine == "transformers":
        return reference_engine(run, policy)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(
        run.model_path, contract, config.parity, dtype=policy.model.dtype, max_model_len=run.max_model_len,
        max_num_seqs=config.max_num_seqs, kv_cache_gib=config.kv_cache_gib, block_size=config.block_size,
        enforce_eager=config.enforce_eager, seed=config.seed, allow_untested_vllm=config.allow_untested_vllm,
    )
    if engine.on_gpu != (policy.device.type == "cuda"):
        raise RuntimeError("torch and vLLM see different devices, one is a CPU build: make a fresh .venv")
    return engine


def reference_engine(run: Run, policy: Policy) -> ReferenceEngine:
    """The trainer's own modules as an engine, with as many sequences at once as kv_cache_gib holds."""
    config, model_config = run.config, policy.model.config.get_text_config()
    bytes_per_rollout = run.max_model_len * kv_bytes_per_token(model_config, policy.model.dtype)
    fitting = max(1, int(config.kv_cache_gib * 2**30 / bytes_per_rollout))
    return ReferenceEngine(policy, config.parity.inflight_update, min(config.max_num_seqs, fitting))


# ------------------------------------------------------------------------------------------------ records
TABLES = ("metrics.jsonl", "samples.jsonl")  # a line for each step, and for each answer of each evaluation

COLUMNS = (
    "step {step:>3}/{steps} | reward {reward:.3f} | len {response_len:5.1f} | trunc {trunc_frac:4.0%}"
    " | flat {flat_frac:4.0%} | mismatch_kl {mismatch_kl:8.1e} | clip {clip_rate:5.1%} | entropy {entropy:.2f}"
    " | gnorm {grad_norm:.2f} | gen {generate_s:.2f} upd {update_s:.2f} sync {sync_s:.2f} s"
)

NAMED = {  # since the run's start
    "tokens_wasted": "tokens thrown away", "groups_dropped": "groups DROPPED: older than --max-staleness",
    "kv_lost": "kept KV caches LOST to preemption: raise --kv-cache-gib",
}


def log_line(metrics: dict[str, Any], steps: int) -> str:
    """One line per step in fixed columns; an evaluation and a degenerate batch are named at its end."""
    evaluated = ""
    if "eval_reward" in metrics:
        evaluated = f" | eval {metrics['eval_reward']:.3f} greedy {metrics['eval_reward_greedy']:.3f}"
    if "eval_reward_trainer" in metrics:
        evaluated += f" (trainer alone {metrics['eval_reward_trainer']:.3f})"
    if metrics["step"] == 0:
        return f"step   0/{steps}{evaluated}"
    shown = {name: 0.0 if value is None else value for name, value in metrics.items()}
    line = COLUMNS.format(**shown, steps=steps)
    if metrics["groups_in_flight"]:
        line += " | in flight {groups_in_flight} stale {staleness_mean:.2f} max {staleness_max}".format(**metrics)
    line += evaluated
    for name, what in NAMED.items():
        if metrics[name]:
            line += f" | {metrics[name]} {what}"
    if metrics["skipped_updates"]:
        line += f" | NO SIGNAL in {metrics['skipped_updates']} minibatch(es): all groups flat, no optimizer step"
    if metrics["overflowed_updates"]:
        line += f" | fp16 OVERFLOW in {metrics['overflowed_updates']} minibatch(es): no optimizer step, scale halved"
    if metrics["reward_errors"]:
        line += f" | {metrics['reward_errors']} rewards FAILED, counted as 0"
    if metrics["trunc_frac"] == 1.0:
        line += " | ALL TRUNCATED: raise --max-new-tokens"
    return line


def write_config(run: Run, engine: Engine | ReferenceEngine, policy: Policy, first_step: int) -> None:
    """config.json: all one needs to know of what was run; a resumed run adds its own record to `resumed`."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    versions = {name: version(name) for name in ("torch", "transformers", "einops", "tyro")}
    status = git("status", "--porcelain")
    on_gpu = policy.device.type == "cuda"
    record = {
        "config": asdict(run.config),
        "audit": engine.settings,
        "trainer": {"attention": policy.model.config._attn_implementation, "model_path": run.model_path},
        "problems": {"train": len(run.task.train), "held_out": len(run.task.held_out), "dropped": run.dropped_prompts,
                     "sha256": run.task.fingerprint},
        "versions": versions | {"vllm": engine.version, "python": sys.version.split()[0]},
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "seed": run.config.seed,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
    }
    path = run.out / "config.json"
    if first_step > 1:
        previous, resumed = json.loads(path.read_text()), {"step": first_step} | record
        record = previous | {"resumed": [*previous.get("resumed", []), resumed]}
        if previous["versions"] != resumed["versions"]:
            print(f"NOTE: resumed with {resumed['versions']}, before it was {previous['versions']}", flush=True)
    _write_atomically(path, json.dumps(record, indent=2))


def _write_atomically(path: Path, text: str) -> None:
    path.with_name(path.name + ".new").write_text(text)
    path.with_name(path.name + ".new").replace(path)


def plot_curves(out: Path) -> None:
    """curves.png from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    panels = {
        "reward": ["reward", "eval_reward"], "clip rate": ["clip_rate"], "KL new/old, nats": ["kl_new_old"],
        "entropy, nats": ["entropy"], "mismatch, nats": ["mismatch_abs_mean", "mismatch_max"],
        "seconds": ["generate_s", "old_logprobs_s", "update_s", "sync_s"],
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if name == "eval_reward" else None)
                axis.legend(fontsize=8)
        axis.set(title=title, xlabel="step", yscale="log" if title.startswith("mismatch") else "linear")
    figure.savefig(out / "curves.png", dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ checkpoints
def save_checkpoint(run: Run, live: Live, step: int) -> None:
    """checkpoints/step_N, whole or not there if the process dies: renamed at the end; the one before it stays."""
    folder = run.out / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_policy(run, live.policy, unfinished / "policy")
    random_states = {"rng": live.rng.getstate(), "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    state = {"step": step, "optimizer": live.optimizer.state_dict(), "flight": live.flight.state_dict()}
    torch.save(state | random_states, unfinished / "state.pt")
    unfinished.rename(folder)
    for old in sorted(folder.parent.glob("step_??????"))[:-2]:
        shutil.rmtree(old)


def save_policy(run: Run, policy: Policy, folder: Path) -> None:
    """A Hugging Face folder: safetensors, tokenizer, and the sampling the policy was trained under as its defaults."""
    policy.model.generation_config = GenerationConfig(
        do_sample=True, temperature=run.sampling.temperature, top_k=0, max_new_tokens=run.sampling.max_new_tokens,
        eos_token_id=list(run.sampling.stop_token_ids), pad_token_id=run.tokenizer.pad_token_id,
    )
    policy.model.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)


def newest_checkpoint(out: Path) -> Path | None:
    return max(out.glob("checkpoints/step_??????"), default=None)


def load_checkpoint(run: Run, folder: Path, optimizer: Optimizer, flight: Flight, rng: random.Random) -> int:
    """Restore all but the policy (loaded from the folder), drop the metrics written since; returns the step."""
    state = torch.load(folder / "state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    flight.load_state_dict(state["flight"])
    rng.setstate(state["rng"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    for name in TABLES:
        lines = (run.out / name).read_text().split("\n")[:-1]  # what follows the last newline was cut off
        kept = [line for line in lines if json.loads(line)["step"] <= state["step"]]
        _write_atomically(run.out / name, "".join(f"{line}\n" for line in kept))
    return state["step"]


def plan(config: Config) -> None:
    """Print the memory of each phase. Raises: ValueError if configuration or prompts cannot be had."""
    model_config, tokenizer = describe_without_weights(config.model, config.task)
    longest = config.max_prompt_tokens
    if longest is None:
        if tokenizer is None:
            raise ValueError(f"max_prompt_tokens must be given for a plan where no tokenizer is, got {config.model}")
        prompt_ids = _encode_prompts(tokenizer, load_task(config.task, config.seed, config.eval_task))
        longest = max(map(len, prompt_ids.values()))
    print_plan(config, model_config, longest, config.plan_gib)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    config = tyro.cli(Config, description=__doc__)
    try:
        run = plan(config) if config.plan else prepare(config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if run is not None:
        train(run)


if __name__ == "__main__":
    main()
