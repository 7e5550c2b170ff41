"""The figures of a step against plain sums and hand-computed numbers; those of a mismatch are in test_exercises.py."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import value_error

from engine_adapter import Rollout
from objectives import OBJECTIVES
from report import metrics
from rl import make_batch


def test_the_figures_of_rollouts_equal_hand_computed_values():
    """Two groups, one of them flat; one response is left out, one has no token."""
    values = (([0, 1, 2], "length", 1.0, {"form": 1.0}), ([2], "stop", 0.0, {"form": 0.0, "late": -0.5}),
              ([1, 1], "stop", math.nan, {}), ([], "stop", 0.5, {}))  # fmt: skip
    rows = [Rollout([0], None, [5] * len(versions), [-1.0] * len(versions), versions, reason,
                    reward=reward, terms=terms)
            for versions, reason, reward, terms in values]  # fmt: skip
    rows[2].reward_error, rows[3].prompt_version = "x", 3
    has_signal = torch.tensor([[True, True], [False, False]])
    assert metrics.of_rollouts(make_batch(rows), torch.tensor([2.0, 0.0, math.nan, 1.0]), has_signal, 3) == {
        "reward": 0.5, "reward/form": 0.5, "reward/late": -0.25, "reward_errors": 1, "left_out": 1,
        "score": 1.0, "flat_frac": 0.5, "trunc_frac": 0.25, "response_len": 1.5, "tokens": 6, "staleness_max": 3,
        "staleness_mean": 3 - 7 / 6,
    }  # fmt: skip


def test_the_figures_of_current_rows_are_those_of_a_batch_without_the_stale_ones():
    def figures(batch):
        measured = {"entropy": batch.entropy, "varentropy": batch.mask, "kept_mass": 0.9 * batch.mask}
        current = batch.mask_rows([rollout.versions[0] == 1 for rollout in batch.rollouts])
        return metrics.before_update(batch, current, measured, torch.ones(len(batch.mask)), torch.ones(1, 1).bool(), 1,
                                     objective=OBJECTIVES["grpo"], clip=(0.2, 0.2), max_length=8)

    batch = make_batch([Rollout([0], None, [5] * 4, [logprob] * 4, [version] * 4, reward=1.0, score=1.0)
                        for logprob, version in ((-0.2, 1), (-0.9, 1), (-0.5, 1), (-9.0, 0), (-9.0, 0))])
    batch = replace(batch, old_logprobs=0.7 * batch.behavior_logprobs, advantages=batch.mask,
                    entropy=batch.mask * (batch.behavior_logprobs + 2))
    whole, alone = figures(batch), figures(batch.select(torch.arange(3)))
    assert (whole["kept_mass"], whole["entropy"]) == pytest.approx((0.9, 2 - (1.6 + 18) / 5))
    assert whole["mismatch_max"] > 1 > alone["mismatch_max"]
    of_current = [name for name in whole if re.match("current|backend|surprisal", name)]
    assert len(of_current) == 6
    assert [whole[name] for name in of_current] == pytest.approx([alone[name] for name in of_current])


def test_the_surprisal_beyond_the_entropy_equals_a_hand_computed_value_in_standard_deviations():
    """That tokens of another distribution show in it is in test_runner_v2.py."""
    values = [[-1.0, -3.0, -9.0]], [[1.0, 1.0, 5.0]], [[24.0, 20.0, 7.0]], [[1.0, 1.0, 0.0]]
    assert metrics.surprisal_z(*map(torch.tensor, values)) == pytest.approx((4 - 2) / (44 + 100) ** 0.5)


def test_a_mismatch_of_nan_or_of_no_token_is_an_error():
    values, zeros = torch.tensor([[math.nan, -1.0]]), torch.zeros(1, 2)
    with pytest.raises(FloatingPointError, match="1 of 2"):
        metrics.of_mismatch(values, zeros, zeros + 1)
    with value_error("mask must have a response token"):
        metrics.of_mismatch(values, zeros, zeros)


def test_the_ratios_of_backend_and_update_equal_hand_computed_values_and_are_cut_off_at_exp_20():
    def of_backend(values, mask, objective):
        return metrics.of_backend(values, 0 * values, mask, mask, OBJECTIVES[objective], (0.2, 0.2), 3)

    values, mask = torch.tensor([[300.0, math.log(1.1), 7.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    mean = pytest.approx((math.exp(20) + 1.1) / 2)
    assert of_backend(values, mask, "grpo") == {"backend_clip_rate": 1 / 2, "backend_ratio_mean": mean}
    figures = of_backend(torch.tensor([[0.5], [0.0]]).expand(2, 3), torch.tensor([[1.0] * 3, [1.0, 0.0, 0.0]]), "gspo")
    assert figures["backend_clip_rate"] == pytest.approx(1 / 2)  # weighted as in the loss: a share of rows
    sums = metrics.Sums()
    sums.add(SimpleNamespace(denominator=0 * values, ref_logprobs=None, token_weights=mask / 2), values, mask > 0, 0.0)
    figures = sums.metrics(1)
    assert figures["ratio_mean"] == mean and figures["kl_old_new"] < math.inf


def test_the_figures_of_a_correction_equal_hand_computed_values():
    """One token is capped, one rejected, one outside the mask."""
    weights, mask = torch.tensor([[2.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    learns = torch.tensor([[True, True, False, False]])
    assert metrics.of_correction(weights, learns, mask, 2.0) == pytest.approx(
        {"tis_capped_frac": 1 / 3, "rejected_frac": 1 / 3, "weights_ess": 9 / 15})
