"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

One step: sample, sleep, score, update, wake, load. `train_step` is the whole algorithm.
"""

from importlib.util import find_spec

# Checked first, so that the user gets one sentence. What not all runs need is checked later.
NEEDED = "torch", "transformers", "tyro", "einops"
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise SystemExit(f"error: this Python has no {', '.join(missing)}: install what is missing (the"
                     " versions that are tested are in requirements.txt), or run `make setup`,"
                     " which makes .venv")

# isort: split
import math
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean as mean
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor

from config import Config, LearningConfig
from engine_adapter import Rollout, Synchronous, reseed
from objectives import (
    OBJECTIVES,
    backend_metrics,
    centre,
    mismatch_metrics,
    surprisal_z,
)
from report.clock import Clock
from report.curves import draw_at_evaluation
from report.errors import end_of_process, locked, one_sentence, stage
from report.files import append_rows, save_checkpoint
from report.log import answer_line, log_line
from rl import Batch, Policy, in_micro_batches, make_batch, update
from run import (
    Run,
    TrainingState,
    begin,
    build,
    find_checkpoint,
    load_policy,
    prepare,
    save_policy,
    start_engine,
)
from tasks import Problem
from tasks.job import teach_toy


# ---------------------------------------------------------------------------------- the loop
def train(run: Run, state: TrainingState, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    job, measure = run.config.job, run.config.measure
    if first_step == 1:
        log(run, state, {"step": 0} | evaluate(run, state, 0))
    started = time.perf_counter()
    for step in range(first_step, job.steps + 1):
        with stage(f"step {step}"):
            done = train_step(run, state, step)
        for observe in state.observers:
            done.metrics.update(observe(done))
        last = step == job.steps
        if last or step % measure.eval_every == 0:
            done.metrics.update(evaluate(run, state, step))
        a_step = (time.perf_counter() - started) / (step - first_step + 1)
        log(run, state, done.metrics | {"left_s": a_step * (job.steps - step)})
        if last or step % job.checkpoint_every == 0:
            save_checkpoint(run.out, step, state.state_dict())
    save_policy(run, state.policy)
    state.engine.close()
    if state.tracker:
        state.tracker.close()


class Step(NamedTuple):
    """What a step has done: its metrics, the P problems, the batch (B, T) that was trained on.

    `current` is the same batch, but the mask is 0 on each row of which older weights than those
    before this update have computed a token or a part of the prompt. --mask-truncated does not
    change it.
    """

    metrics: dict[str, Any]
    problems: list[Problem]
    batch: Batch
    current: Batch


def train_step(run: Run, state: TrainingState, step: int) -> Step:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    learning, policy = run.config.learning, state.policy
    clock = Clock()
    with clock("generate"):
        problems, rollouts = state.source.next(step)  # P, B = P * G rows
    with clock("sleep"):
        state.engine.sleep()

    with clock("reward"):
        run.task.score(problems, rollouts)  # sets each rollout's reward and score
    scores = scores_of(rollouts)  # (B,)
    batch = make_batch(rollouts, policy.device)  # (B, T)
    # Which rows can have a gradient: for the cut into micro-batches, not for the loss. Advantages
    # may need old_logprobs, which are computed in micro-batches, so it is taken from the scores: a
    # row has no signal if its score is its group's mean, or NaN (`centre` has 0 for both).
    has_signal = centre(scores, learning.group_size) != 0  # (P, G)
    minibatches = batch.minibatches(has_signal.flatten(), learning.num_minibatches,
                                    learning.micro_batch_tokens, policy.pack)

    with clock("old_logprobs"):
        # (B, T) by name; "logprobs" are the old ones, because the update comes later
        token_metrics = in_micro_batches(policy.token_metrics, batch, minibatches)
    batch = with_old_logprobs_and_advantages(batch, token_metrics, scores, learning)

    version = state.engine.weight_version
    oldest = [rollout.oldest_version for rollout in rollouts]
    # The rows that were sampled with the current weights alone.
    current = batch.mask_rows([each == version for each in oldest])
    metrics = {"step": step, "lr": run.config.lr_at(step),
               **rollout_metrics(batch, scores, has_signal, oldest, version),
               **batch_metrics(batch, current, token_metrics, learning)}
    # Only now: the metrics count truncated rows and those that are left out, too.
    batch = batch.mask_rows([has_loss(each, learning) for each in rollouts])
    for adjust in state.before_update:  # none, unless a fork adds one: docs/fork.md
        metrics |= adjust(batch, metrics)
    with clock("update"):
        metrics |= update(policy, state.optimizer, batch, minibatches, learning, metrics["lr"])
    with clock("sync"):
        metrics |= sync(state, metrics["updates"] > 0)
    return Step(metrics | clock.figures(), problems, batch, current)


def scores_of(rollouts: list[Rollout]) -> Tensor:
    """(B,) in float64; NaN: left out."""
    return torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64)


def with_old_logprobs_and_advantages(
    batch: Batch, token_metrics: dict[str, Tensor], scores: Tensor, learning: LearningConfig
) -> Batch:
    """The batch with log-probabilities from before the update; advantages are (B, 1) or (B, T)."""
    batch = replace(batch, old_logprobs=token_metrics["logprobs"],
                    ref_logprobs=token_metrics.get("ref_logprobs"))  # for --kl-coef
    advantages = OBJECTIVES[learning.objective].advantages
    scores = scores.to(batch.mask.device)
    return replace(batch, advantages=advantages(scores, learning.group_size, batch))


def sync(state: TrainingState, changed: bool) -> dict[str, float]:
    """The engine gets the policy's weights."""
    state.engine.wake()
    # Weights that have not changed are loaded too: on a GPU sleep may have discarded them.
    metrics = state.engine.load(state.policy.weights(), state.policy.response_logprobs, changed)
    return metrics | state.source.after_update()


def has_loss(rollout: Rollout, learning: LearningConfig) -> bool:
    """False if it is left out, or truncated with --mask-truncated."""
    masked = learning.mask_truncated and rollout.finish_reason == "length"
    return not masked and not math.isnan(rollout.score)


def rollout_metrics(
    batch: Batch, scores: Tensor, has_signal: Tensor, oldest: list[int], weight_version: int
) -> dict[str, float]:
    """Metrics of the rollouts alone. Tokens are the response's, without an environment's words.

    Staleness is the number of updates between sampling and training: `staleness_max` that of the
    oldest part of any row, `staleness_mean` the mean over tokens. `oldest` has the weight version
    of each row's oldest part, its prompt included.
    """
    rollouts, tokens = batch.rollouts, int(batch.mask.sum())
    truncated = sum(rollout.finish_reason == "length" for rollout in rollouts)
    versions = [version for rollout in rollouts for version in rollout.versions]
    parts = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            parts[f"reward/{name}"].append(value)
    return {
        "reward": mean_of(rollout.reward for rollout in rollouts),
        **{name: mean(values) for name, values in parts.items()},
        "reward_errors": sum(rollout.reward_error is not None for rollout in rollouts),
        "left_out": int(scores.isnan().sum()),
        "score": mean_of([scores.nanmean().item()]),
        "flat_frac": (~has_signal).all(dim=1).float().mean().item(),
        "trunc_frac": truncated / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": weight_version - min(oldest),
        "staleness_mean": weight_version - mean(versions),
    }


def batch_metrics(
    batch: Batch, current: Batch, token_metrics: dict[str, Tensor], learning: LearningConfig
) -> dict[str, float]:
    """Means over the tokens before the update, `mismatch_metrics` among them.

    Metrics named current_... and backend_..., and surprisal_z, use only `current`, the rows that
    were sampled with the current weights alone, because the others are stale and staleness is not
    the backend's fault.
    """
    # entropy, varentropy; with a mask kept_mass, engine_kept_mass, outside_frac.
    metrics = {name: (values.sum() / batch.mask.sum()).item()
               for name, values in token_metrics.items() if not name.endswith("logprobs")}
    metrics |= mismatch_metrics(batch.old_logprobs, batch.behavior_logprobs, batch.mask)
    if current.mask.any():
        metrics["surprisal_z"] = surprisal_z(current.old_logprobs, token_metrics["entropy"],
                                             token_metrics["varentropy"], current.mask)
        both_sides = current.old_logprobs, current.behavior_logprobs
        on_current = mismatch_metrics(*both_sides, current.mask)
        metrics |= {f"current_{name}": value for name, value in on_current.items()}
        metrics |= backend_metrics(
            *both_sides, current.advantages, current.mask,
            objective=learning.objective, clip=learning.clip, max_length=learning.max_new_tokens)
    return metrics


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean without NaN and None, which left-out responses have; None if all are left out."""
    counted = [value for value in values if value is not None and not math.isnan(value)]
    return mean(counted) if counted else None


# ---------------------------------------------------------------------------------- evaluation
def evaluate(run: Run, state: TrainingState, step: int) -> dict[str, float]:
    """Mean reward on held-out problems. Every answer goes to samples.jsonl.

    A policy can adapt to a broken backend. `eval_agree` shows it: the share of the engine's greedy
    answers whose every token is the trainer's likeliest too. With --eval-trainer-alone, `eval_gap`
    is how much better the engine's answers are than those that the trainer samples alone.
    """
    samples, temperature = run.config.measure.eval_samples, run.sampling.temperature
    rollouts, greedy = answer_held_out(run, state.source, step, "greedy", 1, 0.0)
    print(answer_line(greedy[0]), flush=True)
    _, sampled = answer_held_out(run, state.source, step, "sampled", samples, temperature)
    metrics = mean_reward("eval_reward", sampled) | mean_reward("eval_reward_greedy", greedy)
    metrics["eval_agree"] = greedy_agreement(state.policy, rollouts, run.config.learning)
    rows = greedy + sampled
    if state.trainer_alone:
        # This load copies nothing. It checks that the engine has these weights.
        state.trainer_alone.engine.load(state.policy.weights(), state.policy.response_logprobs)
        _, alone = answer_held_out(
            run, state.trainer_alone, step, "trainer_alone", samples, temperature)
        rows = rows + alone
        metrics |= mean_reward("eval_reward_trainer_alone", alone)
        reward = metrics["eval_reward_trainer_alone"]
        if None not in (reward, metrics["eval_reward"]):
            metrics["eval_gap"] = metrics["eval_reward"] - reward
    return metrics | {"eval_reward_errors": sum(row["error"] is not None for row in rows)}


def answer_held_out(
    run: Run, source: Synchronous, step: int, mode: str, num_samples: int, temperature: float
) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """The source's answers to the held-out problems, and their rows of samples.jsonl."""
    problems = run.task.held_out[: run.config.measure.eval_problems]
    reseed(run.config.job.seed, "eval", step)
    sampling = replace(run.sampling, max_kept=0, temperature=temperature)  # no kept sets
    rollouts = source.answer(problems, num_samples, sampling)
    rows = [{"step": step, "mode": mode} | row
            for row in run.task.score(problems, rollouts, evaluates=True)]
    append_rows(run.out / "samples.jsonl", rows)
    return rollouts, rows


def mean_reward(name: str, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """By this name, and the number of the answers without a reward, which the mean leaves out."""
    rewards = [row["reward"] for row in rows]
    return {name: mean_of(rewards), f"{name}_left_out": rewards.count(None)}


def greedy_agreement(policy: Policy, rollouts: list[Rollout], learning: LearningConfig) -> float:
    """The share of rollouts whose every token is the trainer's likeliest one."""
    batch = make_batch(rollouts, policy.device)
    rows = torch.arange(len(rollouts))
    micro_batches = policy.pack(batch, rows, learning.micro_batch_tokens)
    agrees = in_micro_batches(policy.agreement, batch, [micro_batches])["agrees"]  # (B, T)
    return (agrees == batch.mask).all(dim=1).float().mean().item()


def log(run: Run, state: TrainingState, metrics: dict[str, Any]) -> None:
    """All of it to metrics.jsonl, the pictures and the tracker, one line to the terminal."""
    append_rows(run.out / "metrics.jsonl", [metrics])
    config = run.config
    print(log_line(metrics, config.job.steps, config.learning.reject), flush=True)
    draw_at_evaluation(run.out, metrics)
    if state.tracker:
        state.tracker.log(metrics)


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused in set-up, 1 failed later, 130 stopped by a signal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    out = config.job.out
    with one_sentence(2), locked(out):
        run = prepare(config)
        teach_toy(config.job.task, config.job.seed, config.job.model, config.job.cache_dir)
        checkpoint = find_checkpoint(run)
        # The run is accepted: from here on files are written, an error's traceback too.
        with one_sentence(2, out):
            policy = load_policy(run)
            engine = start_engine(run, policy)
            state = build(run, policy, engine)
            first_step = begin(run, state, checkpoint)
        with one_sentence(1, out):
            train(run, state, first_step)


if __name__ == "__main__":
    from report.quiet import harmless_left_out

    with end_of_process(), harmless_left_out():
        main()
