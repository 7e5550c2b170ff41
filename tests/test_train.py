"""Whole runs: learning, evaluation, the live probe, users' models and tasks, the exported policy."""

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from helpers import (
    ROUNDING,
    built,
    config_of,
    parametrize,
    rows,
    rows_of_run,
    run_script,
    task_of,
)

from engine_adapter import Rollout, Source
from train import evaluate, train_step
from verify import agreement


# ------------------------------------------------------------------------------------------------ the default job
@pytest.mark.engine
def test_the_default_job_learns_at_parity(tmp_path):
    """In two thirds of its steps."""
    options = "--steps 20 --eval-problems 500 --eval-every 20"  # of 500 problems the standard error is 0.011
    run_script("train.py", "--out", tmp_path / "run", *options.split())
    table = rows(tmp_path / "run")
    steps = table[1:]
    for name in ("eval_reward", "eval_reward_greedy"):  # the policy starts with a wrong habit
        assert table[0][name] < 0.5
        assert table[-1][name] > 0.6
    assert max(row["mismatch_abs_mean"] for row in steps) <= ROUNDING
    assert max(row["mismatch_max"] for row in steps) <= 100 * ROUNDING
    assert all(row["staleness_max"] == 0 for row in steps)
    assert min(row["eval_agree"] for row in table if "eval_agree" in row) >= 0.95  # float32 has a few near ties


def test_options_arrive_where_they_act_and_unasked_no_step_is_probed(good, tmp_path):
    trainer = built(good, tmp_path, seed=7, inflight_groups=1, max_staleness=3, probe_every=2)
    done = train_step(trainer, 2)
    assert [observe(done) for observe in trainer.run.step_metrics] == [{}]
    assert (trainer.source.seed, trainer.source.max_staleness) == (7, 3)
    split = task_of(good / "task.jsonl", 7)
    assert [each.question for each in trainer.run.task.held_out] == [each.question for each in split.held_out]


# ------------------------------------------------------------------------------------------------ evaluation
@torch.no_grad()
def test_greedy_agreement_is_the_share_of_answers_without_another_token(policy):
    (likely,) = policy.model.generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=2, eos_token_id=None)
    first, second = likely[2:].tolist()
    answers = [Rollout([5, 6], None, ids, [0.0] * len(ids))
               for ids in ([first], [first, second], [first - 1], [first, second - 1])]
    assert agreement(policy, answers, 4096) == 2 / 4
    policy.model.lm_head.weight.zero_()  # each token is a likeliest one
    assert agreement(policy, answers, 4096) == 1


class Signed(Source):
    """Answers with a fixed token after what the engine samples, which has no loss, and scores it."""

    def answer(self, problems, num_samples, sampling, evaluates=False):
        rollouts = super().answer(problems, num_samples, sampling)
        for place, rollout in enumerate(rollouts):
            rollout.append([9], [-1.0], self.engine.weight_version)
            rollout.trained = [True] * (len(rollout.token_ids) - 1) + [False]
            rollout.finish_reason = "length" if place == 7 else "stop"
            rollout.reward = 1e8 + place % num_samples if place else math.nan  # float32 cannot tell these apart
        return rollouts


@parametrize("masks", [False, True])
def test_a_sources_answer_serves_training_and_evaluation_and_what_it_leaves_out_has_no_loss(good, tmp_path, masks):
    """With --mask-truncated, what is cut off has none either."""
    trainer = built(good, tmp_path, task=str(good / "task.py"), eval_problems=5, eval_samples=3,
                          num_minibatches=1, mask_truncated=masks)  # fmt: skip
    trainer.source = Signed(trainer.engine, trainer.run.task, trainer.run.sampling, 4, 2, 0)
    metrics, _, batch, _ = train_step(trainer, 1)
    assert (metrics["updates"], trainer.engine.weight_version) == (1, 2)
    assert (batch.advantages != 0).flatten().tolist() == [False] * 2 + [True] * 6  # alone in its group is the second
    *middle, last = [len(rollout.token_ids) - 1 for rollout in batch.rollouts[1:]]
    assert batch.mask.sum(dim=1).tolist() == [0, *middle, 0 if masks else last]
    assert metrics["lr"] == trainer.optimizer.adamw.param_groups[0]["lr"] == trainer.run.config.lr_at(1)
    figures = evaluate(trainer, 1)
    samples = [[row["reward"] for row in rows(tmp_path, "samples") if row["mode"] == mode]
               for mode in ("greedy", "sampled")]  # fmt: skip
    for rewards, name in zip(samples, ("eval_reward_greedy", "eval_reward"), strict=True):
        assert (rewards[0], figures[f"{name}_left_out"], figures[name]) == (None, 1, fmean(rewards[1:]))
    assert [*map(len, samples)] == [5, 15]


# ------------------------------------------------------------------------------------------------ users' tasks
MINE = """
def sample(rng):
    number = rng.randint(1, 60)
    return f"{number}+1=", str(number + 1)

def reward(problem, response):
    if response.startswith(tuple("456789")):
        return float("nan")
    return float(len(response) % 3)
"""


@pytest.mark.engine
def test_a_users_task_is_trained_on_with_gspo_kl_and_tis_in_float16_and_failures_are_counted(good, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    out = tmp_path / "run"
    _, *steps = rows_of_run(
        good, out, f"--task {tmp_path}/mine.py --num-prompts 8 --group-size 4 --steps 3 --max-new-tokens 48"
                   " --temperature 2 --dtype float16 --gradient-checkpointing --micro-batch-tokens 64"
                   " --reward-errors leave-out --eval-problems 16 --eval-samples 2 --eval-every 3 --eval-trainer-alone"
                   " --objective gspo --kl-coef 0.05 --tis sequence --lr 1e-4")  # fmt: skip
    assert all(0 < row["mismatch_abs_mean"] < 0.1 for row in steps)
    assert sum(row["reward_errors"] for row in steps) > 0
    samples, answers = rows(out, "samples"), {"greedy": 1, "sampled": 2, "trainer_alone": 2}  # to each of 6 problems
    assert Counter((sample["step"], sample["mode"]) for sample in samples) == {
        (step, mode): 6 * count for step in (0, 3) for mode, count in answers.items()}
    assert len({tuple(s["response"] for s in samples if s["mode"] == mode) for mode in answers}) == 3  # two backends
    assert {bool(sample["error"]) for sample in samples} == {s["response"][:1] > "3" for s in samples}


# ------------------------------------------------------------------------------------------------ without a run
def test_learning_rate_warms_up_and_decays_to_zero():
    config, steps = config_of(steps=100, lr=1.0, lr_warmup_steps=4), (1, 4, 5, 50, 100)
    constant = replace(config, lr_decay="none")
    assert [config.lr_at(step) for step in steps] == pytest.approx([0.2, 0.8 * 0.97, 0.96, 0.51, 0.01])
    assert [constant.lr_at(step) for step in steps] == pytest.approx([0.2, 0.8, 1.0, 1.0, 1.0])
