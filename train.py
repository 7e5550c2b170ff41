"""Colocated GRPO in one process: a transformers trainer and a vLLM V1 engine take turns on one device.

One step: sample, sleep, score, update, wake, load. `train_step` is the page to read.
"""

from __future__ import annotations

import json
import random
import signal
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch
import tyro

import records
from config import BUILT_IN, NOT_OF_THE_EXPERIMENT, Config
from engine_adapter import Engine, Flight, Rollout, Sampling, check_vllm_version, reseed
from objectives import OBJECTIVES, Batch, mismatch_metrics
from reference import ReferenceEngine, kv_bytes_per_token
from rl import Optimizer, Policy, frozen_logprobs, make_batch, update
from shared_engine import SharedEngine
from tasks import Problem, Task, describe_model, encode, load_task, score


# ------------------------------------------------------------------------------------------------ the loop
def train(run: Run, live: Live, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    config = run.config
    if first_step == 1:
        run.log({"step": 0} | evaluate(run, live, 0))
    for step in range(first_step, config.run.steps + 1):
        probed = config.measure.probe_every or config.measure.probe_on_alarm
        earlier = live.policy.copied_weights() if probed else None
        metrics, _, problems = train_step(run, live, step)
        last = step == config.run.steps
        if earlier:
            from probe.diagnose import probe_step

            metrics |= probe_step(run, live, metrics, problems, earlier)
        if last or step % config.measure.eval_every == 0:
            metrics |= evaluate(run, live, step)
        run.log(metrics)
        if last or step % config.run.checkpoint_every == 0:
            records.save_checkpoint(run.out, step, live.state_dict() | {"run": run.fingerprint})
    run.save_policy(live.policy, run.out / "policy")
    live.engine.close()
    from lab.curves import plot_curves

    plot_curves(run.out)


def train_step(run: Run, live: Live, step: int) -> tuple[dict[str, Any], Batch, list[Problem]]:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    config, grpo, policy = run.config, run.config.grpo, live.policy
    engine, flight, clock = live.engine, live.flight, records.Clock()
    problems = run.task.sample(live.rng, grpo.num_prompts + config.backend.inflight_groups - len(flight.groups))
    flight.submit(problems)
    reseed(config.run.seed, "train", step)
    with clock("generate"):
        groups = flight.take(config.grpo.num_prompts)  # P
    with clock("sleep"):
        engine.sleep()

    problems = [group.problem for group in groups]  # P
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # B = P * G, group-major
    with clock("reward"):
        scored = run.score([problem for problem in problems for _ in range(config.grpo.group_size)], rollouts)
    rewards = torch.tensor([each["reward"] for each in scored])  # (B,)
    sampled = rollout_metrics(rollouts, rewards, config.grpo.group_size, engine.weight_version)
    advantages = OBJECTIVES[config.grpo.objective].advantages(rewards, config.grpo.group_size)  # (B,)
    batch = make_batch(rollouts, advantages, policy.device)  # (B, T)
    fresh = torch.tensor([[rollout.oldest_version == engine.weight_version] for rollout in rollouts]).to(batch.mask)
    with clock("old_logprobs"):
        measured = frozen_logprobs(policy, batch, grpo)  # (B, T) by name, before any update
        batch = replace(batch, old_logprobs=measured.pop("logprobs"))
        sampled |= {name: (values.sum() / batch.mask.sum()).item() for name, values in measured.items()}
        sampled |= measure_mismatch(batch, fresh)
        if live.reference:
            with policy.using(live.reference):  # the same arithmetic for both sides of the divergence
                reference = frozen_logprobs(policy, batch, grpo, metrics=False)
            batch = replace(batch, ref_logprobs=reference["logprobs"])
    sampled |= engine.verify(replace(batch, mask=batch.mask * fresh))
    if config.measure.self_noise_every and (step - 1) % config.measure.self_noise_every == 0:
        from probe.noise import measure_self_noise

        sampled |= measure_self_noise(policy, batch, grpo)
    if config.grpo.mask_truncated:
        batch = batch.without(torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]))
    with clock("update"):
        metrics = update(policy, live.optimizer, batch, grpo, config.lr_at(step))

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
    problems = run.task.held_out[: config.measure.eval_problems]

    def mean_reward(engine: Engine, mode: str, samples: int, sampling: Sampling) -> float:
        nonlocal errors
        reseed(config.run.seed, "eval", step)
        rollouts = engine.generate([problem.prompt_ids for problem in problems], samples, sampling)
        scored = run.score([problem for problem in problems for _ in range(samples)], rollouts)
        records.append_rows(run.out / "samples.jsonl", [{"step": step, "mode": mode} | each for each in scored])
        errors += sum(each["error"] is not None for each in scored)
        return mean(each["reward"] for each in scored)

    greedy = mean_reward(live.engine, "greedy", 1, replace(sampling, temperature=0.0))
    alone = sampled = mean_reward(live.engine, "sampled", config.measure.eval_samples, sampling)
    with_trainer = config.measure.eval_with_trainer
    if with_trainer and config.backend.engine != "transformers":  # the reference engine is the trainer alone
        trainer = reference_engine(run, live.policy)
        trainer.load(live.policy.weights(), live.policy.response_logprobs)
        alone = mean_reward(trainer, "trainer", config.measure.eval_samples, sampling)
    metrics = {"eval_reward": sampled, "eval_reward_greedy": greedy, "eval_reward_errors": errors}
    return metrics | ({"eval_reward_trainer": alone, "eval_gap": sampled - alone} if with_trainer else {})


# ------------------------------------------------------------------------------------------------ set-up
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
        options = {name: value for name, value in self.config.flat().items() if name not in NOT_OF_THE_EXPERIMENT}
        return sha256(json.dumps([options, self.task.fingerprint]).encode()).hexdigest()

    def score(self, problems: list[Problem], rollouts: list[Rollout]) -> list[dict[str, Any]]:
        """A row per rollout, as in samples.jsonl: what was asked and answered, its reward, and what failed."""
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        rows = []
        for problem, rollout, text in zip(problems, rollouts, texts, strict=True):
            reward, error = score(self.task.reward, problem, text, self.config.data.reward_limit_s)
            if error and self.config.data.reward_errors == "stop":
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
        print(records.log_line(metrics, self.config.run.steps), flush=True)

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
    if config.backend.engine != "transformers":
        check_vllm_version(config.backend.allow_untested_vllm)
    grpo, record = config.grpo, _earlier_record(config)
    out = Path(config.run.out).absolute()  # a task may change the working directory
    for name, given in (("offload_optimizer", grpo.offload_optimizer), ("cuda_graphs", config.backend.cuda_graphs)):
        if given and not torch.cuda.is_available():
            raise ValueError(f"{name} must not be given without a GPU (it would do nothing)")
    task = find_task(config)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    if config.run.model == "toy":
        from examples.toys import describe_toy, toy_model

        model_config, tokenizer, stop_token_ids = describe_toy(config.run.task)
    else:
        model_config, tokenizer, stop_token_ids = describe_model(config.run.model)
    task = encode(tokenizer, task)
    prompts = [problem.prompt_ids for problem in task.train + task.held_out]
    if (largest := max(*map(max, prompts), *stop_token_ids)) >= model_config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the vocabulary of"
                         f" {model_config.vocab_size}")
    task = _fitting(config, task, getattr(model_config, "max_position_embeddings", None))
    if (groups := config.grpo.num_prompts + config.backend.inflight_groups) > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all there are),"
                         f" got {groups}")
    if record and record["problems"]["sha256"] != task.fingerprint:
        raise ValueError(f"a resumed run must keep its problems, {config.run.task} has others now")
    sampling = Sampling(grpo.temperature, grpo.max_new_tokens, stop_token_ids, grpo.top_k, grpo.top_p, grpo.min_p,
                        max_kept=config.max_kept)
    max_model_len = grpo.max_new_tokens + max(len(problem.prompt_ids) for problem in task.train + task.held_out)
    path = config.run.model
    if path == "toy":
        path = str(toy_model(config.run.cache_dir, config.run.seed, config.run.task))
    dropped = len(prompts) - len(task.train) - len(task.held_out)
    return Run(config, out, path, task, tokenizer, sampling, max_model_len, dropped)


def find_task(config: Config) -> Task:
    """The task that `--task` names. Raises: ValueError that says what is wrong with it."""
    name = config.run.task
    if name in BUILT_IN:
        from examples.toys import COUNTDOWN, TASKS

        if name in TASKS:
            return TASKS[name](config.run.seed)
        name = COUNTDOWN
    return load_task(name, config.run.seed, config.data.eval_task, config.data.reward_limit_s)


def _earlier_record(config: Config) -> dict[str, Any] | None:
    """config.json of the run in `out`, if any. Raises: ValueError if it is damaged, or the run is not to be resumed."""
    path = Path(config.run.out) / "config.json"
    if not path.exists():
        if any(path.parent.glob("checkpoints/*")) or any(each.stat().st_size for each in path.parent.glob("*.jsonl")):
            raise ValueError(f"out must be new or a whole run, {config.run.out} has a run's files without config.json")
        return None
    if not config.run.resume:
        raise ValueError(f"out must be a new folder, {config.run.out} holds a run; go on with --resume or choose"
                         " another --out")
    with records.stage(f"reading {path}"):
        record = json.loads(path.read_text())
        theirs, _ = dict(record["config"]), record["problems"]["sha256"]  # KeyError if one is missing
    ours = config.flat()
    if changed := [name for name in ours.keys() - NOT_OF_THE_EXPERIMENT if ours[name] != theirs.get(name)]:
        raise ValueError(f"a resumed run must keep its options, changed are {', '.join(sorted(changed))}")
    return record


def _fitting(config: Config, task: Task, context: int | None) -> Task:
    """The task without the problems whose prompts are too long, if these are to be dropped."""
    limit, why, longest = config.data.max_prompt_tokens, "--max-prompt-tokens", config.grpo.max_new_tokens
    if context is not None and longest >= context:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got {longest}")
    if context is not None and (limit is None or context - longest < limit):
        limit, why = context - longest, f"the context of {context} less --max-new-tokens"
    problems = task.train + task.held_out
    overlong = [problem for problem in problems if limit is not None and len(problem.prompt_ids) > limit]
    if not overlong:
        return task
    counted = f"{len(overlong)} of {len(problems)} prompts are longer than {limit} tokens ({why})"
    if config.data.overlong_prompts == "refuse":
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
    state = None
    if config.run.resume:
        state = records.newest_checkpoint(run.out, config.run.checkpoint_every, run.fingerprint)
    policy = load_policy(run)
    if policy.model._is_stateful and (config.measure.eval_with_trainer or config.backend.engine == "transformers"):
        raise ValueError("engine must be vllm and eval_with_trainer off with recurrent layers (transformers cannot"
                         f" drop a row of their state), got {config.backend.engine}; try --engine vllm"
                         " --no-eval-with-trainer")
    reference = policy.copied_weights() if config.grpo.kl_coef else None  # of the first policy, resumed or not
    optimizer = Optimizer(policy.model, config.grpo.weight_decay, config.grpo.offload_optimizer)
    engine = start_engine(run, policy)
    flight = Flight(engine, config.grpo.group_size, run.sampling, config.backend.max_staleness)
    live = Live(policy, reference, optimizer, engine, flight, random.Random(config.run.seed))
    records.restore(run.out, state)
    if state:
        live.load_state_dict(state)
    first_step = state["step"] + 1 if state else 1
    engine.load(policy.weights(), policy.response_logprobs)
    records.write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        print(f"{side}: " + ", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
    if config.run.resume:
        print(f"resumed at step {first_step}" + ("" if state else ": there was no checkpoint"), flush=True)
    return live, first_step


def _record(run: Run, policy: Policy, engine: Engine) -> dict[str, Any]:
    task, record = run.task, records.provenance(policy.device)
    return record | {
        "config": run.config.flat(), "audit": engine.settings, "seed": run.config.run.seed,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(task.train), "held_out": len(task.held_out), "dropped": run.dropped_prompts,
                     "merged": task.num_repeated, "sha256": task.fingerprint},
        "versions": record["versions"] | {"vllm": engine.version},
    }


def load_policy(run: Run) -> Policy:
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    with records.stage(f"loading the model in {run.model_path}"):
        return Policy.load(run.model_path, getattr(torch, config.run.dtype), device, config.parity.fp32_head,
                           config.grpo.gradient_checkpointing)


def start_engine(run: Run, policy: Policy) -> Engine:
    """The engine that `--engine` names, still without the policy's weights."""
    config, backend = run.config, run.config.backend
    if backend.engine == "transformers":
        return reference_engine(run, policy)
    options = dict(
        max_model_len=run.max_model_len, max_num_seqs=backend.max_num_seqs, kv_cache_gib=backend.kv_cache_gib,
        block_size=backend.block_size, prefix_cache=backend.prefix_cache, cuda_graphs=backend.cuda_graphs,
        seed=config.run.seed, allow_untested_vllm=backend.allow_untested_vllm,
    )
    if backend.engine == "shared":
        return SharedEngine(policy, run.model_path, config.parity, exact=backend.exact, **options)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return Engine(run.model_path, contract, config.parity, dtype=policy.model.dtype, **options)


def reference_engine(run: Run, policy: Policy) -> ReferenceEngine:
    """The trainer's own modules as an engine, with as many sequences at once as kv_cache_gib holds."""
    config, model_config = run.config, policy.model.config.get_text_config()
    bytes_per_rollout = run.max_model_len * kv_bytes_per_token(model_config, policy.model.dtype)
    fitting = max(1, int(config.backend.kv_cache_gib * 2**30 / bytes_per_rollout))
    return ReferenceEngine(policy, min(config.backend.max_num_seqs, fitting))


# ------------------------------------------------------------------------------------------------ the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused or failed during set-up, 1 failed later, 130 stopped by a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with records.one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    with records.one_sentence(2, config.run.out), records.locked(config.run.out):
        run = prepare(config)
        live, first_step = build(run)
        with records.one_sentence(1, config.run.out):
            train(run, live, first_step)


if __name__ == "__main__":
    main()
