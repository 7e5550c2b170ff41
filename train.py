"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

One step: sample, sleep, score, update, wake, load. `train_step` is the page to read.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean as mean
from types import ModuleType
from typing import Any, NamedTuple

import torch
import tyro

import records
from config import Config, GrpoConfig
from engine_adapter import Engine, Rollout, Sampling, reseed
from models import save_model
from objectives import OBJECTIVES, Batch, backend_metrics, mismatch_metrics
from prepare import Run, prepare
from rl import Optimizer, Policy, frozen_logprobs, frozen_measures, make_batch, update
from tasks import Problem, Task, score

HERE = Path(__file__).parent


# ---------------------------------------------------------------------------------- the loop
def train(run: Run, state: TrainingState, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    run_config, measure = run.config.run, run.config.measure
    if first_step == 1:
        log(run, state, {"step": 0} | evaluate(run, state, 0))
    started = time.perf_counter()
    for step in range(first_step, run_config.steps + 1):
        done = train_step(run, state, step)
        for observe in state.observers:
            done.metrics.update(observe(done))
        last = step == run_config.steps
        if last or step % measure.eval_every == 0:
            done.metrics.update(evaluate(run, state, step))
        a_step = (time.perf_counter() - started) / (step - first_step + 1)
        log(run, state, done.metrics | {"left_s": a_step * (run_config.steps - step)})
        if last or step % run_config.checkpoint_every == 0:
            records.save_checkpoint(run.out, step, state.state_dict() | {"run": run.fingerprint})
    save_model(state.policy.model, run.tokenizer, run.sampling, run.out / "policy")
    state.engine.close()


class Step(NamedTuple):
    """What a step has done: its metrics, the batch (B, T) that was trained on, the P problems."""

    metrics: dict[str, Any]
    batch: Batch
    problems: list[Problem]


def train_step(run: Run, state: TrainingState, step: int) -> Step:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    grpo, policy, engine = run.config.grpo, state.policy, state.engine
    clock = records.Clock()
    with clock("generate"):
        problems, rollouts = state.source.next(step)  # P, and B = P * G, group-major
    with clock("sleep"):
        engine.sleep()

    with clock("reward"):
        asked = [problem for problem in problems for _ in range(grpo.group_size)]  # B
        scored = score_rollouts(run, asked, rollouts)
    rewards = torch.tensor([each["reward"] for each in scored])  # (B,)
    advantages = OBJECTIVES[grpo.objective].advantages(rewards, grpo.group_size)  # (B,)
    batch = make_batch(rollouts, advantages, policy.device)  # (B, T)

    with clock("old_logprobs"):
        measured = frozen_measures(policy, batch, grpo)  # (B, T) by name, before any update
        old_logprobs = measured.pop("logprobs")
        batch = replace(batch, old_logprobs=old_logprobs)
        batch = state.add_reference(batch, grpo)
    # The rows that were sampled with the current weights alone.
    current = batch.only([each.oldest_version == engine.weight_version for each in rollouts])
    metrics = rollout_metrics(rollouts, rewards, grpo.group_size, engine.weight_version)
    metrics |= {name: (values.sum() / batch.mask.sum()).item() for name, values in measured.items()}
    metrics |= measure_mismatch(batch, current, grpo) | engine.verify(current)
    if grpo.mask_truncated:
        batch = batch.only([each.finish_reason != "length" for each in rollouts])
    with clock("update"):
        metrics |= update(policy, state.optimizer, batch, grpo, run.config.lr_at(step))

    with clock("sync"):
        engine.wake()
        changed = metrics["updates"] > 0  # loaded in any case: sleep has discarded the weights
        metrics |= engine.load(policy.weights(), policy.response_logprobs, changed)
        metrics |= state.source.after_update()

    errors = sum(each["error"] is not None for each in scored)
    metrics |= {"step": step, "lr": run.config.lr_at(step), "reward_errors": errors}
    metrics |= {"memory_gib": records.memory_gib()} | clock.figures()
    return Step(metrics, batch, problems)


class Synchronous:
    """Where rollouts come from: P problems a step, all responses sampled to their end."""

    def __init__(self, task: Task, engine: Engine, sampling: Sampling, config: Config):
        self.task, self.engine, self.sampling, self.config = task, engine, sampling, config
        self.rng = random.Random(config.run.seed)

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G rollouts, group-major."""
        problems = self.task.sample(self.rng, self.config.grpo.num_prompts)
        reseed(self.config.run.seed, "train", step)
        prompts = [problem.prompt_ids for problem in problems]
        return problems, self.engine.generate(prompts, self.config.grpo.group_size, self.sampling)

    def after_update(self) -> dict[str, int]:
        """Called after each load: drop what is too old, return metrics. Nothing is unfinished."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])


def score_rollouts(
    run: Run, problems: list[Problem], rollouts: list[Rollout]
) -> list[dict[str, Any]]:
    """A row per rollout, as in samples.jsonl: question, response, reward, and what failed."""
    data = run.config.data
    ids = [rollout.token_ids for rollout in rollouts]
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    rows = []
    for problem, rollout, text in zip(problems, rollouts, texts, strict=True):
        reward, error = score(run.task.reward, problem, text, data.reward_limit_s)
        if error and data.reward_errors == "stop":
            raise ValueError(f"{error}; to go on with reward 0, --reward-errors count")
        rows.append({
            "reward": reward, "response": text, "question": problem.question,
            "answer": problem.answer, "source": problem.source,
            "finish_reason": rollout.finish_reason,
            "tokens": len(rollout.token_ids), "error": error,
        })
    errors = [row["error"] for row in rows if row["error"]]
    if errors:
        print(f"REWARD FAILED, one of {len(errors)}: {errors[0]}", flush=True)
    return rows


def rollout_metrics(
    rollouts: list[Rollout], rewards: torch.Tensor, group_size: int, version: int
) -> dict[str, float]:
    """Metrics of the rollouts alone. Staleness counts the updates between sampling and training."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    versions = [token_version for rollout in rollouts for token_version in rollout.versions]
    truncated = sum(rollout.finish_reason == "length" for rollout in rollouts)
    groups = rewards.view(-1, group_size)  # (P, G)
    return {
        "reward": rewards.mean().item(),
        "flat_frac": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
        "trunc_frac": truncated / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": version - min(rollout.oldest_version for rollout in rollouts),
        "staleness_mean": version - mean(versions),
    }


def measure_mismatch(batch: Batch, current: Batch, grpo: GrpoConfig) -> dict[str, float | None]:
    """`mismatch_metrics` of the batch, and as current_... and backend_... of its rows in `current`.

    These were sampled with the current weights alone. Older rollouts are stale as well, and
    staleness is not the backend's fault. Without such rows only the batch is measured.
    """
    metrics = mismatch_metrics(batch.old_logprobs, batch.behavior_logprobs, batch.mask)
    if not current.mask.any():
        return metrics
    backend = mismatch_metrics(current.old_logprobs, current.behavior_logprobs, current.mask)
    metrics |= {f"current_{name}": value for name, value in backend.items()}
    return metrics | backend_metrics(current, grpo.objective, grpo.clip, grpo.max_new_tokens)


def evaluate(run: Run, state: TrainingState, step: int) -> dict[str, float]:
    """Mean reward on held-out problems, by the engine and by the trainer alone.

    A policy can adapt to a broken backend: `eval_gap` is how much better the engine looks than the
    trainer alone. Every answer goes to samples.jsonl.
    """
    measure, seed = run.config.measure, run.config.run.seed
    problems = run.task.held_out[: measure.eval_problems]
    prompts = [problem.prompt_ids for problem in problems]
    errors = 0

    def mean_reward(engine: Engine, mode: str, samples: int, temperature: float) -> float:
        nonlocal errors
        reseed(seed, "eval", step)
        sampling = replace(run.sampling, max_kept=0, temperature=temperature)
        rollouts = engine.generate(prompts, samples, sampling)
        asked = [problem for problem in problems for _ in range(samples)]
        scored = score_rollouts(run, asked, rollouts)
        rows = [{"step": step, "mode": mode} | each for each in scored]
        records.append_rows(run.out / "samples.jsonl", rows)
        if mode == "greedy":
            print(records.answer_line(rows[0]), flush=True)
        errors += sum(each["error"] is not None for each in scored)
        return mean(each["reward"] for each in scored)

    temperature = run.sampling.temperature
    greedy = mean_reward(state.engine, "greedy", 1, 0.0)
    sampled = mean_reward(state.engine, "sampled", measure.eval_samples, temperature)
    metrics = {"eval_reward": sampled, "eval_reward_greedy": greedy}
    if state.trainer_alone:
        alone = sampled
        if state.trainer_alone is not state.engine:
            state.trainer_alone.load(state.policy.weights(), state.policy.response_logprobs)
            alone = mean_reward(state.trainer_alone, "trainer", measure.eval_samples, temperature)
        metrics |= {"eval_reward_trainer": alone, "eval_gap": sampled - alone}
    return metrics | {"eval_reward_errors": errors}


def log(run: Run, state: TrainingState, metrics: dict[str, Any]) -> None:
    """All of it to metrics.jsonl and to the state's watchers, one line to the terminal."""
    records.append_rows(run.out / "metrics.jsonl", [metrics])
    config = run.config
    print(records.log_line(metrics, config.run.steps, config.grpo.reject), flush=True)
    for watch in state.watchers:
        watch(metrics)


# ---------------------------------------------------------------------------------- set-up
@dataclass
class TrainingState:
    """What changes from step to step."""

    policy: Policy
    reference: dict[str, torch.Tensor] | None  # the first policy's weights by name, for --kl-coef
    optimizer: Optimizer
    engine: Engine
    source: Synchronous  # or extras.inflight.InFlightSource
    # Evaluates beside the engine, with the trainer's own modules.
    trainer_alone: Engine | None = None
    # At the end of a step.
    observers: list[Callable[[Step], dict[str, Any]]] = field(default_factory=list)
    # After each row of metrics.jsonl.
    watchers: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)

    def add_reference(self, batch: Batch, grpo: Any) -> Batch:
        """The batch with `ref_logprobs`, if there is a KL term."""
        if self.reference is None:
            return batch
        # The same arithmetic for both sides of the divergence.
        with self.policy.using(self.reference):
            return replace(batch, ref_logprobs=frozen_logprobs(self.policy, batch, grpo))

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.model.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


def extra_if_there(name: str) -> ModuleType | None:
    """A file of extras/ that the default job uses, or None if it has been deleted."""
    if (HERE / "extras" / f"{name}.py").exists():
        return import_module(f"extras.{name}")
    return None


def build(run: Run, start: Callable | None = None) -> tuple[TrainingState, int]:
    """Both sides with the same weights, fresh or from a checkpoint, and the first step."""
    config, grpo = run.config, run.config.grpo
    checkpoint = None
    if config.run.resume:
        every = config.run.checkpoint_every
        checkpoint = records.newest_checkpoint(run.out, every, run.fingerprint)
    policy = load_policy(run)
    # The first policy's, resumed or not: the checkpoint comes later.
    reference = policy.copied_weights() if grpo.kl_coef else None
    make_optimizer = Optimizer
    if grpo.offload_optimizer:
        from extras.offload import OffloadedOptimizer as make_optimizer
    optimizer = make_optimizer(policy.model, grpo.weight_decay)
    alone = trainer_alone(run, policy)
    start = start or start_engine  # lab/other_vllm.py has another
    engine = start(run, policy, alone)
    if grpo.has_mask:
        from extras.masks import use_masks

        use_masks(policy, engine, run.sampling)
    make_source = Synchronous
    if config.backend.inflight_groups:
        from extras.inflight import InFlightSource as make_source
    source = make_source(run.task, engine, run.sampling, config)
    state = TrainingState(policy, reference, optimizer, engine, source, alone)
    records.restore(run.out, checkpoint)
    if checkpoint:
        state.load_state_dict(checkpoint)
    first_step = checkpoint["step"] + 1 if checkpoint else 1
    engine.load(policy.weights(), policy.response_logprobs)
    state.observers = observers(run, state)
    state.watchers = watchers(run, first_step)
    records.write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        in_force = ", ".join(f"{name} {value}" for name, value in settings.items())
        print(f"{side}: {in_force}", flush=True)
    if config.run.resume:
        without = "" if checkpoint else ": there was no checkpoint"
        print(f"resumed at step {first_step}{without}", flush=True)
    return state, first_step


def _record(run: Run, policy: Policy, engine: Engine) -> dict[str, Any]:
    task, record = run.task, records.provenance(policy.device)
    return record | {
        "config": run.config.flat(), "audit": engine.settings, "seed": run.config.run.seed,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(task.train), "held_out": len(task.held_out),
                     "dropped": run.dropped_prompts, "merged": task.num_repeated,
                     "sha256": task.fingerprint},
        "versions": record["versions"] | {"vllm": engine.version},
    }


def load_policy(run: Run) -> Policy:
    """The policy of `--model`; each prompt is computed once, if extras/prompts.py is there."""
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    with records.stage(f"loading the model in {run.model_path}"):
        policy = Policy.load(run.model_path, getattr(torch, config.run.dtype), device,
                             config.parity.trainer_fp32_head)
        if config.grpo.gradient_checkpointing:
            from extras.checkpointing import checkpoint_layers

            checkpoint_layers(policy)
    prompts = extra_if_there("prompts")
    if prompts:
        prompts.compute_prompts_once(policy)
    return policy


def start_engine(run: Run, policy: Policy, alone: Engine | None = None) -> Engine:
    """The engine that `--engine` names, still without the policy's weights.

    `alone`: see trainer_alone.
    """
    config, backend = run.config, run.config.backend
    if backend.engine == "transformers":
        from extras.reference import engine_for

        return alone or engine_for(run, policy)
    options = dict(
        max_model_len=run.max_model_len, max_num_seqs=backend.max_num_seqs, seed=config.run.seed,
        kv_cache_gib=backend.kv_cache_gib, block_size=backend.block_size,
        prefix_cache=backend.prefix_cache, cuda_graphs=backend.cuda_graphs,
        allow_untested_vllm=backend.allow_untested_vllm,
    )
    if backend.engine == "shared":
        from extras.shared_engine import SharedEngine

        return SharedEngine(policy, run.model_path, config.parity, exact=backend.exact, **options)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return Engine(run.model_path, contract, config.parity, dtype=policy.model.dtype, **options)


def trainer_alone(run: Run, policy: Policy) -> Engine | None:
    """The engine of `--eval-with-trainer`, if extras/reference.py is there."""
    if not run.config.measure.eval_with_trainer:
        return None
    reference = extra_if_there("reference")
    if reference is None:
        print("eval_with_trainer is LEFT OUT: it needs extras/reference.py", flush=True)
        return None
    return reference.engine_for(run, policy)


def observers(run: Run, state: TrainingState) -> list[Callable[[Step], dict[str, Any]]]:
    """What the options ask to be called with each Step; it returns further metrics."""
    measure = run.config.measure
    asked = []
    if measure.self_noise_every:
        from probe.noise import SelfNoise

        asked.append(SelfNoise(state.policy, run.config))
    if measure.probe_every or measure.probe_on_alarm:
        from probe.diagnose import StepProbe

        asked.append(StepProbe(run, state))
    return asked


def watchers(run: Run, first_step: int) -> list[Callable[[dict[str, Any]], None]]:
    """What draws the rows of metrics.jsonl while the run goes on."""
    found = []
    curves = extra_if_there("curves")
    if curves:
        found.append(partial(curves.draw_at_evaluation, run.out))
    if run.config.measure.tensorboard:
        from extras.tensorboard import TensorBoard

        found.append(TensorBoard(run.out, first_step))
    return found


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None, start: Callable | None = None) -> None:
    """Exit status: 0 done, 2 refused in set-up, 1 failed later, 130 stopped by a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with records.one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    with records.one_sentence(2, config.run.out), records.locked(config.run.out):
        run = prepare(config)
        state, first_step = build(run, start)
        with records.one_sentence(1, config.run.out):
            train(run, state, first_step)


if __name__ == "__main__":
    main()
