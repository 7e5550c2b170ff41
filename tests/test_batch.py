"""What a fork's source, advantage function, objective and token filter return is checked before it is trained on."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import built, parametrize, value_error

from engine_adapter import ParityFlags, Rollout
from objectives import OBJECTIVES, Objective, grpo
from tasks import Problem
from train import evaluate, train, train_step
from verify.batch import check_advantages, check_averaged, check_rollouts
from verify.settings import AuditError

# ------------------------------------------------------------------------------------------------ rollouts
PROBLEMS = [Problem("", "", "", [row, 5]) for row in range(3)]


CHANGES = [  # of the first rollout
    dict(logprobs=[-0.1]), dict(versions=[]), dict(versions=[2, 2]), dict(trained=[True]), dict(trained=[True] * 3),
    dict(trained=[0.5, 1.0]), dict(finish_reason=None), dict(token_ids=[], logprobs=[], versions=[], trained=[]),
    dict(prompt_ids=[0])]  # fmt: skip


def test_a_source_returns_g_whole_rollouts_of_each_problem_in_the_order_of_the_problems():
    right = [Rollout([*problem.prompt_ids, 7], 0, [1, 2], [-0.1, -0.2], [1, 1], "stop", trained=[False, True])
             for problem in PROBLEMS for _ in range(2)]  # fmt: skip
    check_rollouts(PROBLEMS, right, 3, 2, 1)
    wrong = [right[:4], right * 2, right[1:], right[2:] + right[:2], right[::2] + right[1::2]]
    wrong += [[replace(right[0], **change), *right[1:]] for change in CHANGES]
    for rollouts in wrong:
        with value_error(r"of a source must begin|a source must return 3 problems and 2 rollouts"):
            check_rollouts(PROBLEMS, rollouts, 3, 2, 1)
    with value_error("a source must return 3 problems"):
        check_rollouts(PROBLEMS[:2], right[:4], 3, 2, 1)


def test_advantages_are_finite_floating_numbers_of_rows_or_of_tokens():
    mask, rows = torch.ones(4, 4), torch.ones(4, 1)
    check_advantages(rows, mask)
    check_advantages(mask.double(), mask)
    for wrong in (rows[:, 0], mask[:1], mask[:, :2], rows[0, 0], rows.int(), rows * math.nan, rows * math.inf):
        with value_error(r"advantages must be finite .* \(4, 4\), got"):
            check_advantages(wrong, mask)


def test_the_mean_of_the_loss_counts_each_token_that_a_filter_keeps_and_none_outside_the_mask():
    mask, kept = torch.tensor([[0.0, 1, 1], [0, 1, 1]]), torch.tensor([[0, 1, 1], [0, 0, 1]]) > 0
    for averaged in (mask, kept, mask > 0):
        check_averaged(averaged, kept, mask)
    for wrong in (0 * mask, 0 * mask + 1, mask * math.nan, mask[:, :1], mask[:1]):
        with value_error("a token filter's second mask"):
            check_averaged(wrong, kept, mask)


# ------------------------------------------------------------------------------------------------ in a step
def longer_prompts(trainer, is_stale=False):
    usual = trainer.source.next

    def longer(step):
        problems, rollouts = usual(step)
        for rollout in rollouts:
            rollout.prompt_ids = [*rollout.prompt_ids, 5]
            rollout.versions = [version - is_stale for version in rollout.versions]
        return problems, rollouts

    trainer.source.next = longer


def reverse_answers(trainer):
    answer = trainer.source.answer
    trainer.source.answer = lambda *given, **how: answer(*given, **how)[::-1]


def objective(surrogate, **changes):
    return lambda trainer: OBJECTIVES.update(grpo=Objective(surrogate, **changes))


FAULTS = {
    "prompts": (longer_prompts, AuditError, "the mismatch is .* nats, more than 10 times the canary's limit"),
    "order": (reverse_answers, ValueError, "of a source must begin with its problem's prompt"),
    "a gradient": (lambda trainer: trainer.policy.model.get_output_embeddings().weight.sum().backward(), ValueError,
                   "must leave no gradient"),
    "a source": (lambda trainer: setattr(trainer.source, "answer", lambda *given, **how: {}["mine"]), ValueError,
                 "sampling by Source failed: KeyError: 'mine'"),
    "before_scores": (lambda trainer: trainer.run.before_scores.append(lambda problems, rollouts: [1.0]), TypeError,
                      "and return nothing"),
    "extra": (lambda trainer: trainer.run.before_scores.append(
        lambda problems, rollouts: setattr(rollouts[1], "extra", [1.0])), ValueError, "one number a token"),
    "advantages": (lambda trainer: setattr(trainer.run, "advantages", lambda scores, size, batch: scores), ValueError,
                   "the advantage function failed: .*finite floating numbers"),
    "surrogate": (objective(lambda *given: grpo(*given)._replace(loss=torch.ones(()))), ValueError,
                  "a surrogate must return"),
    "filter": (lambda trainer: setattr(trainer.run, "token_filter", lambda batch: (
        batch.mask == 0, torch.ones_like(batch.mask))), ValueError, "a token filter's second mask"),
}  # fmt: skip


@parametrize("fault", FAULTS)
def test_a_step_is_not_trained_on_what_a_fork_returns_wrongly(good, tmp_path, monkeypatch, fault):
    monkeypatch.setattr("train.OBJECTIVES", OBJECTIVES)
    monkeypatch.setitem(OBJECTIVES, "grpo", OBJECTIVES["grpo"])  # restored
    trainer = built(good, tmp_path, task=str(good / "task.py"), temperature=2.0)
    before = trainer.policy.copied_weights()
    plant, error, reason = FAULTS[fault]
    plant(trainer)
    with pytest.raises(error, match=reason):
        train_step(trainer, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.policy.copied_weights().items())


@parametrize("options", [dict(parity=ParityFlags(sampling_mask=False), top_p=0.9), {}], ids=["off", "on"])
def test_with_a_fix_off_a_step_may_have_any_mismatch_and_stale_rows_may_always(good, tmp_path, options):
    trainer = built(good, tmp_path, temperature=2.0, **options)
    longer_prompts(trainer, is_stale=not options)
    assert train_step(trainer, 1).metrics["mismatch_abs_mean"] > 0.1


FIGURES = {
    "reward": lambda trainer, more: setattr(trainer.source, "after_update", more),
    "eval_reward": lambda trainer, more: trainer.run.step_metrics.append(lambda step: more()),
    "eval_agree": lambda trainer, more: trainer.run.evaluations.append(lambda answers: more()),
}  # fmt: skip


@parametrize("figure", FIGURES)
def test_a_source_an_observer_and_an_evaluation_may_not_replace_a_figure(good, tmp_path, figure):
    trainer = built(good, tmp_path, steps=1, eval_problems=2)
    FIGURES[figure](trainer, lambda: {figure: 7.0})
    with value_error(f"must have a name of its own, got {figure}"):
        train(trainer)


def test_answers_of_an_evaluation_belong_to_its_problems(good, tmp_path):
    trainer = built(good, tmp_path, eval_problems=2)
    reverse_answers(trainer)
    with value_error("of a source must begin with its problem's prompt"):
        evaluate(trainer, 0)
