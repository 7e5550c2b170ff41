"""Colocated GRPO in one process: a transformers trainer and a vLLM V1 engine take turns on one device.

One step: sample, sleep, score, update, wake, load. `train_step` is the page to read.
"""

from __future__ import annotations

import json
import random
import signal
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean as mean
from typing import Annotated, Any, Literal

import torch
import tyro

import records
from engine_adapter import Engine, Flight, ParityFlags, Rollout, Sampling, check_vllm_version, reseed
from objectives import (
    OBJECTIVES,
    Batch,
    Count,
    FurtherGrpoOptions,
    GrpoOptions,
    Name,
    Positive,
    Rule,
    UpdateOptions,
    Whole,
    check_rules,
    mismatch_metrics,
)
from reference import ReferenceEngine, kv_bytes_per_token
from rl import Optimizer, Policy, frozen_logprobs, has_mask, make_batch, update
from shared_engine import SharedEngine
from tasks import CALL_LIMIT_S, Problem, Task, describe_model, encode, load_task, score


# ------------------------------------------------------------------------------------------------ the loop
def train(run: Run, live: Live, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    config = run.config
    if first_step == 1:
        run.log({"step": 0} | evaluate(run, live, 0))
    for step in range(first_step, config.steps + 1):
        earlier = live.policy.copied_weights() if config.probe_every or config.probe_on_alarm else None
        metrics, _, problems = train_step(run, live, step)
        last = step == config.steps
        if earlier:
            from probe.diagnose import probe_step

            metrics |= probe_step(run, live, metrics, problems, earlier)
        if last or step % config.eval_every == 0:
            metrics |= evaluate(run, live, step)
        run.log(metrics)
        if last or step % config.checkpoint_every == 0:
            records.save_checkpoint(run.out, step, live.state_dict() | {"run": run.fingerprint})
    run.save_policy(live.policy, run.out / "policy")
    live.engine.close()
    from lab.curves import plot_curves

    plot_curves(run.out)


def train_step(run: Run, live: Live, step: int) -> tuple[dict[str, Any], Batch, list[Problem]]:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    config, policy, engine, flight, clock = run.config, live.policy, live.engine, live.flight, records.Clock()
    problems = run.task.sample(live.rng, config.num_prompts + config.inflight_groups - len(flight.groups))
    flight.submit(problems)
    reseed(config.seed, "train", step)
    with clock("generate"):
        groups = flight.take(config.num_prompts)  # P
    with clock("sleep"):
        engine.sleep()

    problems = [group.problem for group in groups]  # P
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # B = P * G, group-major
    with clock("reward"):
        scored = run.score([problem for problem in problems for _ in range(config.group_size)], rollouts)
    rewards = torch.tensor([each["reward"] for each in scored])  # (B,)
    sampled = rollout_metrics(rollouts, rewards, config.group_size, engine.weight_version)
    advantages = OBJECTIVES[config.objective].advantages(rewards, config.group_size)  # (B,)
    batch = make_batch(rollouts, advantages, policy.device)  # (B, T)
    fresh = torch.tensor([[rollout.oldest_version == engine.weight_version] for rollout in rollouts]).to(batch.mask)
    with clock("old_logprobs"):
        measured = frozen_logprobs(policy, batch, config)  # (B, T) by name, before any update
        batch = replace(batch, old_logprobs=measured.pop("logprobs"))
        sampled |= {name: (values.sum() / batch.mask.sum()).item() for name, values in measured.items()}
        sampled |= measure_mismatch(batch, fresh)
        if live.reference:
            with policy.using(live.reference):  # the same arithmetic for both sides of the divergence
                reference = frozen_logprobs(policy, batch, config, metrics=False)
            batch = replace(batch, ref_logprobs=reference["logprobs"])
    sampled |= engine.verify(replace(batch, mask=batch.mask * fresh))
    if config.self_noise_every and (step - 1) % config.self_noise_every == 0:
        from probe.noise import measure_self_noise

        sampled |= measure_self_noise(policy, batch, config)
    if config.mask_truncated:
        batch = batch.without(torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]))
    with clock("update"):
        metrics = update(policy, live.optimizer, batch, config, config.lr_at(step))

    with clock("sync"):
        engine.wake()
        loaded = engine.load(policy.weights(), policy.response_logprobs, changed=metrics["updates"] > 0)
        flight.after_update()

    metrics |= sampled | flight.counts() | clock.figures() | loaded | {
        "step": step, "lr": config.lr_at(step), "memory_gib": records.memory_gib(),
        "reward_errors": sum(each["error"] is not None for each in scored),
    }
    return metrics, batch, problems


def rollout_metrics(rollouts: list[Rollout], rewards: torch.Tensor, group_size: int, version: int) -> dict[str, float]:
    """Metrics of the rollouts alone. Staleness counts the updates between sampling a token and training on it."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    versions = [token_version for rollout in rollouts for token_version in rollout.versions]
    groups = rewards.view(-1, group_size)  # (P, G)
    return {
        "reward": rewards.mean().item(),
        "flat_frac": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
        "trunc_frac": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": version - min(rollout.oldest_version for rollout in rollouts),
        "staleness_mean": version - mean(versions),
    }


def measure_mismatch(batch: Batch, fresh: torch.Tensor) -> dict[str, float | None]:
    """`mismatch_metrics` of the batch and, as fresh_..., of the rows sampled with the current weights alone: (B, 1).

    Older rollouts are stale as well, and staleness is not the backend's fault. fresh_... is None if all are older.
    """
    policies = batch.old_logprobs, batch.behavior_logprobs
    metrics = mismatch_metrics(*policies, batch.mask)
    backend = mismatch_metrics(*policies, batch.mask * fresh) if fresh.any() else dict.fromkeys(metrics)
    return metrics | {f"fresh_{name}": value for name, value in backend.items()}


def evaluate(run: Run, live: Live, step: int) -> dict[str, float]:
    """Mean reward on held-out problems: greedy and sampled through the engine, sampled by the trainer alone.

    A policy can adapt to a broken backend: `eval_gap` is how much better the engine looks than the trainer alone.
    Every answer goes to samples.jsonl.
    """
    config, sampling, errors = run.config, replace(run.sampling, max_kept=0), 0
    problems = run.task.held_out[: config.eval_problems]

    def mean_reward(engine: Engine, mode: str, samples: int, sampling: Sampling) -> float:
        nonlocal errors
        reseed(config.seed, "eval", step)
        rollouts = engine.generate([problem.prompt_ids for problem in problems], samples, sampling)
        scored = run.score([problem for problem in problems for _ in range(samples)], rollouts)
        records.append_rows(run.out / "samples.jsonl", [{"step": step, "mode": mode} | each for each in scored])
        errors += sum(each["error"] is not None for each in scored)
        return mean(each["reward"] for each in scored)

    greedy = mean_reward(live.engine, "greedy", 1, replace(sampling, temperature=0.0))
    alone = sampled = mean_reward(live.engine, "sampled", config.eval_samples, sampling)
    if config.eval_with_trainer and config.engine != "transformers":  # the reference engine is the trainer alone
        trainer = reference_engine(run, live.policy)
        trainer.load(live.policy.weights(), live.policy.response_logprobs)
        alone = mean_reward(trainer, "trainer", config.eval_samples, sampling)
    metrics = {"eval_reward": sampled, "eval_reward_greedy": greedy, "eval_reward_errors": errors}
    return metrics | ({"eval_reward_trainer": alone, "eval_gap": sampled - alone} if config.eval_with_trainer else {})


# ------------------------------------------------------------------------------------------------ options
@dataclass(frozen=True)
class RunOptions:
    """The defaults are the toy job: a small model unlearns a wrong habit on two CPU cores."""

    out: Name = "runs/toy"  # Folder of the run: config.json, metrics.jsonl, curves.png, checkpoints/.
    resume: bool = False  # Go on from the newest checkpoint in `out`, with the options of the first start.
    # Decides the toy model, the held-out split, the problems of each step and the samples.
    seed: Annotated[int, Rule("in [0, 2^32), numpy's range", lambda value: 0 <= value < 2**32)] = 0
    steps: Count = 60  # Batches of rollouts; the learning rate decays to zero over them.
    eval_every: Count = 20  # Steps between evaluations on held-out problems; also before the first step and at the end.


@dataclass(frozen=True)
class TaskOptions:
    """The model that is trained, and the problems."""

    model: Name = "toy"  # `toy`, a folder with a Hugging Face causal language model, or a hub name.
    # `toy` (addition), `digits` (for the ladder), `countdown`; a JSONL file of {"question", "answer"} with numbers as
    # answers; a Python file with `sample` and `reward`; a folder or hub name of a dataset with such columns.
    task: Name = "toy"
    # Of the model on both sides. In 16 bits the optimizer keeps fp32 masters; float16 uses dynamic loss scaling too.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class EngineOptions:
    """The sampler, and its share of the memory."""

    # vllm; shared: vLLM around the trainer's own module (shared_engine.py), no copy and no load of the weights;
    # transformers: the trainer's own module alone (reference.py), slow, without mismatch, the known-good curve.
    engine: Literal["vllm", "shared", "transformers"] = "vllm"
    # With --engine shared, on a CPU: the trainer scores with vLLM's attention kernel; a mismatch above 0 stops the run.
    exact: bool = False
    kv_cache_gib: Positive = 0.25  # Size of the engine's KV cache; fixed: the trainer needs the free memory later.


@dataclass(frozen=True)
class FurtherOptions:
    """Everything else."""

    eval_task: str | None = None  # JSONL file of held-out problems; if not given, a tenth of `task` is held out.
    # Longest prompt in tokens; if not given, the model's context minus max_new_tokens.
    max_prompt_tokens: Count | None = None
    overlong_prompts: Literal["refuse", "drop"] = "refuse"  # Longer prompts: refuse the run, or drop and count them.
    # Limit for a task file's import, and for a call of its sample or reward.
    reward_limit_s: Annotated[float, Rule("in (0, 1e9), a timer's range", lambda limit: 0 < limit < 1e9)] = CALL_LIMIT_S
    # If a reward raises, hangs or is not a finite number: stop the run, or count it and go on with reward 0.
    reward_errors: Literal["stop", "count"] = "stop"
    cache_dir: Name = str(Path(__file__).parent / ".cache")  # Where the toy model is kept once it has been taught.
    gradient_checkpointing: bool = False  # Compute each layer again in backward: less memory, more time.
    offload_optimizer: bool = False  # Keep master weights and moments in pinned host memory except during the update.
    inflight_groups: Whole = 0  # Groups in flight (N) beyond the P of a step, unfinished while the weights change.
    max_staleness: Whole = 8  # Largest staleness of a token in updates; groups with an older token are dropped.
    # Allow `tis` although a parity flag is off: only to study how a correction hides a broken backend.
    tis_over_a_broken_backend: bool = False
    max_kept: Count | None = None  # Largest set that the mask may keep; if not given, 512, or above top_k (for ties).
    max_num_seqs: Count = 512  # Sequences the engine decodes at once; the others wait, so memory does not grow.
    block_size: int | None = None  # Tokens per KV block; if not given, vLLM's choice (CPU 128, GPU 16).
    # versioned: the samples of a group share the KV cache of their prompt, keyed by the weight version. A resumed run
    # starts with an empty cache, and can then differ by rounding.
    prefix_cache: Literal["off", "versioned"] = "off"
    cuda_graphs: bool = False  # Decode with CUDA graphs, captured without compilation; not measured on a GPU yet.
    allow_untested_vllm: bool = False  # Try a vLLM version outside the tested range.
    eval_problems: Count = 256  # Held-out problems per evaluation (or all there are).
    # Sampled answers per problem; the greedy evaluation has one.
    eval_samples: Annotated[int, Rule("in [1, 65536]", lambda value: 1 <= value <= 2**16)] = 1
    eval_with_trainer: bool = True  # Evaluate without the engine as well (eval_gap); slow if the model is large.
    checkpoint_every: Count = 20  # Steps between checkpoints, and after the last; the newest two are kept.
    self_noise_every: Whole = 0  # Steps between measurements of the mismatch's noise floor (probe/noise.py); 0: none.
    probe_every: Whole = 0  # Steps between probes of the mismatch (probe/), from the first step on; 0: none.
    probe_on_alarm: bool = False  # Probe after a step whose mismatch exceeds probe.diagnose.ALARMS.


@dataclass(frozen=True)
class Config(FurtherOptions, EngineOptions, UpdateOptions, TaskOptions, RunOptions):
    """All options of a run."""

    parity: ParityFlags = field(default_factory=ParityFlags)

    def __post_init__(self):
        check_rules(self)
        low = OBJECTIVES[self.objective].clip[0]
        for holds, sentence in (
            (self.num_prompts * self.group_size % self.num_minibatches == 0,
             f"num_minibatches must divide num_prompts * group_size = {self.num_prompts * self.group_size} (all"
             f" optimizer steps weigh alike), got {self.num_minibatches}"),
            (low is not None or self.clip_low is None,
             f"clip_low must not be given with {self.objective} (it has an upper cap only), got {self.clip_low}"),
            (self.eval_task is None or not (self.task in BUILT_IN or self.task.endswith(".py")),
             f"eval_task must not be given with task {self.task} (it holds problems out itself), got {self.eval_task}"),
            (not (self.parity.inflight_keep and self.parity.inflight_otherwise != "abort"),
             f"inflight_otherwise must not be given with inflight_keep (it would do nothing), got"
             f" {self.parity.inflight_otherwise}; try --parity.no-inflight-keep"),
            (self.engine != "transformers" or not set(self.parity.off()) - {"fp32_head", "sampling_mask"},
             f"engine must be vllm to leave out a fix of vLLM's (the reference has no such faults), got transformers"
             f" without {', '.join(set(self.parity.off()) - {'fp32_head', 'sampling_mask'})}"),
            (has_mask(self) or self.parity.sampling_mask,
             "sampling_mask must be on without top_k, top_p and min_p (there is no mask to leave out); give one"),
            (self.max_kept is None or self.kept_limit,
             f"max_kept must be given with top_k, top_p or min_p and sampling_mask only (else no kept set is returned),"
             f" got {self.max_kept}"),
            (not self.kept_limit or self.parity.processed_logprobs,
             "sampling_mask needs processed_logprobs if top_k, top_p or min_p is given (raw log-probabilities do not"
             " show which tokens were kept); try --parity.no-sampling-mask"),
            (not self.exact or (self.engine == "shared" and not self.parity.off() and not self.gradient_checkpointing),
             "exact must be off without --engine shared, without a parity fix and with gradient_checkpointing"),
            (self.prefix_cache == "off" or (self.engine != "transformers" and self.parity.explicit_runtime),
             "prefix_cache must be off with the reference engine (it has none) and without explicit_runtime (which"
             f" switches V1's own cache on), got {self.prefix_cache}"),
            # Fix the backend first, then correct the remaining mismatch.
            (self.tis == "off" or self.old_policy == "recompute",
             f"tis must be off with old_policy rollout (its ratio holds the mismatch already: a weight would count it"
             f" twice), got {self.tis}; try --old-policy recompute"),
            (self.tis == "off" or not self.parity.off() or self.tis_over_a_broken_backend,
             f"tis must be off while a fix is off (a correction hides the broken backend), got {self.tis} without"
             f" {', '.join(self.parity.off())}; to study that, --tis-over-a-broken-backend"),
            (self.tis != "masked" or self.tis_floor < self.tis_cap,
             f"tis_floor must be below tis_cap = {self.tis_cap}, got {self.tis_floor}"),
        ):
            if not holds:
                raise ValueError(sentence)

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        return self.lr * min(1.0, step / (self.lr_warmup_steps + 1)) * (1 - (step - 1) / self.steps)

    @property
    def kept_limit(self) -> int:
        """`Sampling.max_kept` of the training; 0: the trainer takes the softmax over the whole vocabulary."""
        usual = self.top_k + self.top_k // 4 + 16 if self.top_k else 512  # many logits of a 16-bit head are equal
        return (self.max_kept or usual) if has_mask(self) and self.parity.sampling_mask else 0


Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class CommandLine:
    """The options in the groups of --help; what most users need comes first."""

    run: Annotated[RunOptions, Flat] = field(default_factory=RunOptions)
    model_and_task: Annotated[TaskOptions, Flat] = field(default_factory=TaskOptions)
    grpo: Annotated[GrpoOptions, Flat] = field(default_factory=GrpoOptions)
    parity: ParityFlags = field(default_factory=ParityFlags)
    engine_and_memory: Annotated[EngineOptions, Flat] = field(default_factory=EngineOptions)
    further_grpo: Annotated[FurtherGrpoOptions, Flat] = field(default_factory=FurtherGrpoOptions)
    further: Annotated[FurtherOptions, Flat] = field(default_factory=FurtherOptions)

    def config(self) -> Config:
        groups = [group for name, group in vars(self).items() if name != "parity"]
        return Config(parity=self.parity, **{name: value for group in groups for name, value in vars(group).items()})


# ------------------------------------------------------------------------------------------------ set-up
BUILT_IN = ("toy", "digits", "countdown")  # tasks in examples/
NOT_OF_THE_EXPERIMENT = {"resume", "out", "cache_dir"}  # options that a resumed run may change


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    out: Path
    model_path: str
    task: Task
    tokenizer: Any
    sampling: Sampling
    max_model_len: int
    dropped_prompts: int

    @property
    def fingerprint(self) -> str:
        """Digest of the options and the problems: equal for a run and its resumption."""
        options = {name: value for name, value in asdict(self.config).items() if name not in NOT_OF_THE_EXPERIMENT}
        return sha256(json.dumps([options, self.task.fingerprint]).encode()).hexdigest()

    def score(self, problems: list[Problem], rollouts: list[Rollout]) -> list[dict[str, Any]]:
        """A row per rollout, as in samples.jsonl: what was asked and answered, its reward, and what failed."""
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        rows = []
        for problem, rollout, text in zip(problems, rollouts, texts, strict=True):
            reward, error = score(self.task.reward, problem, text, self.config.reward_limit_s)
            if error and self.config.reward_errors == "stop":
                raise ValueError(f"{error}; to go on with reward 0, --reward-errors count")
            rows.append({"reward": reward, "response": text, "question": problem.question, "answer": problem.answer,
                         "source": problem.source, "finish_reason": rollout.finish_reason,
                         "tokens": len(rollout.token_ids), "error": error})
        if errors := [row["error"] for row in rows if row["error"]]:
            print(f"REWARD FAILED, one of {len(errors)}: {errors[0]}", flush=True)
        return rows

    def log(self, metrics: dict[str, Any]) -> None:
        """All of it to metrics.jsonl, one line to the terminal."""
        records.append_rows(self.out / "metrics.jsonl", [metrics])
        print(records.log_line(metrics, self.config.steps), flush=True)

    def save_policy(self, policy: Policy, folder: Path) -> None:
        """A Hugging Face folder: safetensors, tokenizer, and the sampling of the training as generation defaults."""
        from transformers import GenerationConfig

        policy.model.generation_config = GenerationConfig(
            do_sample=True, temperature=self.sampling.temperature, top_k=self.sampling.top_k, top_p=self.sampling.top_p,
            min_p=self.sampling.min_p, max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=list(self.sampling.stop_token_ids), pad_token_id=self.tokenizer.pad_token_id,
        )
        policy.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@dataclass
class Live:
    """What changes from step to step."""

    policy: Policy
    reference: dict[str, torch.Tensor] | None  # the first policy's weights by name, for --kl-coef
    optimizer: Optimizer
    engine: Engine
    flight: Flight
    rng: random.Random

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "flight": self.flight.state_dict(), "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.model.load_state_dict(state["policy"])
        self.flight.load_state_dict(state["flight"], Problem)
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.setstate(state["rng"])


def prepare(config: Config) -> Run:
    """Check all that can be checked before a model is loaded or taught. Raises: ValueError."""
    if config.engine != "transformers":
        check_vllm_version(config.allow_untested_vllm)
    record, out = _earlier_record(config), Path(config.out).absolute()  # a task may change the working directory
    for name in ("offload_optimizer", "cuda_graphs"):
        if getattr(config, name) and not torch.cuda.is_available():
            raise ValueError(f"{name} must not be given without a GPU (it would do nothing)")
    task = find_task(config)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    if config.model == "toy":
        from examples.toys import describe_toy, toy_model

        model_config, tokenizer, stop_token_ids = describe_toy(config.task)
    else:
        model_config, tokenizer, stop_token_ids = describe_model(config.model)
    task = encode(tokenizer, task)
    prompts = [problem.prompt_ids for problem in task.train + task.held_out]
    if (largest := max(*map(max, prompts), *stop_token_ids)) >= model_config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the vocabulary of"
                         f" {model_config.vocab_size}")
    task = _fitting(config, task, getattr(model_config, "max_position_embeddings", None))
    if (groups := config.num_prompts + config.inflight_groups) > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all there are),"
                         f" got {groups}")
    if record and record["problems"]["sha256"] != task.fingerprint:
        raise ValueError(f"a resumed run must keep its problems, {config.task} has others now")
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_token_ids, config.top_k, config.top_p,
                        config.min_p, max_kept=config.kept_limit)
    max_model_len = config.max_new_tokens + max(len(problem.prompt_ids) for problem in task.train + task.held_out)
    path = str(toy_model(config.cache_dir, config.seed, config.task)) if config.model == "toy" else config.model
    dropped = len(prompts) - len(task.train) - len(task.held_out)
    return Run(config, out, path, task, tokenizer, sampling, max_model_len, dropped)


def find_task(config: Config) -> Task:
    """The task that `config.task` names. Raises: ValueError that says what is wrong with it."""
    name = config.task
    if name in BUILT_IN:
        from examples.toys import COUNTDOWN, TASKS

        if name in TASKS:
            return TASKS[name](config.seed)
        name = COUNTDOWN
    return load_task(name, config.seed, config.eval_task, config.reward_limit_s)


def _earlier_record(config: Config) -> dict[str, Any] | None:
    """config.json of the run in `out`, if any. Raises: ValueError if it is damaged, or the run is not to be resumed."""
    path = Path(config.out) / "config.json"
    if not path.exists():
        if any(path.parent.glob("checkpoints/*")) or any(each.stat().st_size for each in path.parent.glob("*.jsonl")):
            raise ValueError(f"out must be new or a whole run, {config.out} has a run's files without config.json")
        return None
    if not config.resume:
        raise ValueError(f"out must be a new folder, {config.out} holds a run; go on with --resume or choose another"
                         " --out")
    with records.stage(f"reading {path}"):
        record = json.loads(path.read_text())
        theirs, _ = dict(record["config"]), record["problems"]["sha256"]  # KeyError if one is missing
    ours = asdict(config)
    if changed := [name for name in ours.keys() - NOT_OF_THE_EXPERIMENT if ours[name] != theirs.get(name)]:
        raise ValueError(f"a resumed run must keep its options, changed are {', '.join(sorted(changed))}")
    return record


def _fitting(config: Config, task: Task, context: int | None) -> Task:
    """The task without the problems whose prompts are too long, if these are to be dropped."""
    limit, why = config.max_prompt_tokens, "--max-prompt-tokens"
    if context is not None and config.max_new_tokens >= context:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got {config.max_new_tokens}")
    if context is not None and (limit is None or context - config.max_new_tokens < limit):
        limit, why = context - config.max_new_tokens, f"the context of {context} less --max-new-tokens"
    problems = task.train + task.held_out
    overlong = [problem for problem in problems if limit is not None and len(problem.prompt_ids) > limit]
    if not overlong:
        return task
    counted = f"{len(overlong)} of {len(problems)} prompts are longer than {limit} tokens ({why})"
    if config.overlong_prompts == "refuse":
        worst = max(overlong, key=lambda problem: len(problem.prompt_ids))
        raise ValueError(f"{counted}, {worst.source} has {len(worst.prompt_ids)}; try --overlong-prompts drop")
    train, held_out = ([p for p in part if len(p.prompt_ids) <= limit] for part in (task.train, task.held_out))
    if not train or not held_out:
        raise ValueError(f"{counted}, none of the {'held-out' if train else 'training'} problems is left")
    print(f"{counted}: DROPPED", flush=True)
    return replace(task, train=train, held_out=held_out)


def build(run: Run) -> tuple[Live, int]:
    """Both sides with the same weights, fresh or from the newest checkpoint, and the first step to take."""
    config = run.config
    state = records.newest_checkpoint(run.out, config.checkpoint_every, run.fingerprint) if config.resume else None
    policy = load_policy(run)
    if policy.model._is_stateful and (config.eval_with_trainer or config.engine == "transformers"):
        raise ValueError("engine must be vllm and eval_with_trainer off with recurrent layers (transformers cannot drop"
                         f" a row of their state), got {config.engine}; try --engine vllm --no-eval-with-trainer")
    reference = policy.copied_weights() if config.kl_coef else None  # of the first policy, resumed or not
    optimizer = Optimizer(policy.model, config.weight_decay, config.offload_optimizer)
    engine = start_engine(run, policy)
    flight = Flight(engine, config.group_size, run.sampling, config.max_staleness)
    live = Live(policy, reference, optimizer, engine, flight, random.Random(config.seed))
    records.restore(run.out, state)
    if state:
        live.load_state_dict(state)
    first_step = state["step"] + 1 if state else 1
    engine.load(policy.weights(), policy.response_logprobs)
    records.write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        print(f"{side}: " + ", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
    if config.resume:
        print(f"resumed at step {first_step}" + ("" if state else ": there was no checkpoint"), flush=True)
    return live, first_step


def _record(run: Run, policy: Policy, engine: Engine) -> dict[str, Any]:
    task, record = run.task, records.provenance(policy.device)
    return record | {
        "config": asdict(run.config), "audit": engine.settings, "seed": run.config.seed,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(task.train), "held_out": len(task.held_out), "dropped": run.dropped_prompts,
                     "merged": task.num_repeated, "sha256": task.fingerprint},
        "versions": record["versions"] | {"vllm": engine.version},
    }


def load_policy(run: Run) -> Policy:
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    with records.stage(f"loading the model in {run.model_path}"):
        return Policy.load(run.model_path, getattr(torch, config.dtype), device, config.parity.fp32_head,
                           config.gradient_checkpointing)


def start_engine(run: Run, policy: Policy) -> Engine:
    """The engine that `config.engine` names, still without the policy's weights."""
    config = run.config
    if config.engine == "transformers":
        return reference_engine(run, policy)
    options = dict(
        max_model_len=run.max_model_len, max_num_seqs=config.max_num_seqs, kv_cache_gib=config.kv_cache_gib,
        block_size=config.block_size, prefix_cache=config.prefix_cache, cuda_graphs=config.cuda_graphs,
        seed=config.seed, allow_untested_vllm=config.allow_untested_vllm,
    )
    if config.engine == "shared":
        return SharedEngine(policy, run.model_path, config.parity, exact=config.exact, **options)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return Engine(run.model_path, contract, config.parity, dtype=policy.model.dtype, **options)


def reference_engine(run: Run, policy: Policy) -> ReferenceEngine:
    """The trainer's own modules as an engine, with as many sequences at once as kv_cache_gib holds."""
    config, model_config = run.config, policy.model.config.get_text_config()
    bytes_per_rollout = run.max_model_len * kv_bytes_per_token(model_config, policy.model.dtype)
    fitting = max(1, int(config.kv_cache_gib * 2**30 / bytes_per_rollout))
    return ReferenceEngine(policy, min(config.max_num_seqs, fitting))


# ------------------------------------------------------------------------------------------------ the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused or failed during set-up, 1 failed later, 130 stopped by a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with records.one_sentence(2):
        config = tyro.cli(CommandLine, args=arguments, description=__doc__).config()
    with records.one_sentence(2, config.out), records.locked(config.out):
        run = prepare(config)
        live, first_step = build(run)
        with records.one_sentence(1, config.out):
            train(run, live, first_step)


if __name__ == "__main__":
    main()
