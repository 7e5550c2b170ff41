"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

One step: sample, sleep, score, update, wake, load. `train_step` is the whole algorithm.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean as mean
from typing import Any, NamedTuple

import torch
import tyro

import records
from config import Config, GrpoConfig
from engine_adapter import Engine
from models import save_model
from objectives import OBJECTIVES, Batch, backend_metrics, mismatch_metrics
from prepare import Run, TrainingState, build, prepare
from rl import frozen_measures, make_batch, update
from sampling import Rollout, reseed
from tasks import Problem, score


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
        problems, rollouts = state.source.next(step)  # prepare.Synchronous; P, B = P * G rows
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
        batch = state.add_reference(batch, grpo)  # for --kl-coef, see prepare.py
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
