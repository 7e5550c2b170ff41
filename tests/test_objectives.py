"""Each formula against an oracle that shares no code with it: enumeration, plain Python floats, hand-computed numbers.

The losses and gradients of the objectives are in test_rl.py, where `update` computes them.
"""

import math
from itertools import product

import pytest
import torch
from helpers import config_of

from objectives import (
    OBJECTIVES,
    REJECTIONS,
    WEIGHTS,
    backend_metrics,
    correct,
    correction_metrics,
    kl_loss,
    mismatch_metrics,
    surprisal_z,
    update_sums,
)


def advantages(rewards: list[float], group_size: int, objective: str = "grpo") -> list[float]:
    return OBJECTIVES[objective].advantages(torch.tensor(rewards, dtype=torch.float64), group_size, None)[:, 0].tolist()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_group_advantages_equal_hand_computed_values_and_equal_rewards_have_none(objective):
    for value, group_size in product([0.1, 0.7, 1 / 3, -0.6, 1e-8, 1e6 + 0.3], range(2, 70, 3)):
        assert not any(advantages([value] * 2 * group_size, group_size, objective)), (value, group_size)
    for value, apart in ((0.1, 1e-6), (0.0, 1.0), (1e8, 1.0)):  # and a group of equal rewards beside
        std = apart / math.sqrt(8)  # of seven equal numbers and one that is `apart` from them
        unit = apart / 8 / (1 if objective == "dr_grpo" else std + 1e-4)
        found = advantages([value] * 7 + [value + apart] + [value] * 8, 8, objective)
        assert found == pytest.approx([-unit] * 7 + [7 * unit] + [0] * 8, rel=1e-6)


@pytest.mark.parametrize("kl_gradient, of_pi", [("k3", False), ("exact", True)])
def test_the_gradient_of_the_kl_term_is_that_of_the_stated_divergence_by_enumeration(kl_gradient, of_pi):
    """All tokens of a small vocabulary, each weighted with its probability."""
    table = torch.tensor([0.3, -0.5, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    logprobs = table.log_softmax(dim=0)[:, None]  # a token is a row
    old, ones = logprobs.detach(), torch.ones(4, 1)
    loss = (old.exp() * kl_loss(logprobs, old, ref[:, None], ones > 0, 1.0, kl_gradient)).sum()
    (ours,) = torch.autograd.grad(loss, table, retain_graph=True)
    now = logprobs[:, 0]
    divergence = (now.exp() * (now - ref)).sum() if of_pi else (ref.exp() * (ref - now)).sum()
    (expected,) = torch.autograd.grad(divergence, table)
    torch.testing.assert_close(ours, expected)


# ------------------------------------------------------------------------------------------------ surprisal
def test_the_surprisal_of_drawn_tokens_exceeds_the_entropy_by_nothing_and_of_others_by_many_standard_deviations():
    """400 policies over 8 words, 64 draws of each, from the policy or at another temperature."""
    logits = 2 * torch.randn(400, 8, dtype=torch.float64)
    policy = torch.distributions.Categorical(logits=logits)
    spread = (policy.probs * (policy.logits + policy.entropy()[:, None]) ** 2).sum(dim=1)
    every = torch.ones(400, 64)
    given = [each[:, None] * every for each in (policy.entropy(), spread)]
    for temperature, low, high in ((0.7, -math.inf, -20), (1.0, -5, 5), (1.3, 20, math.inf)):
        tokens = torch.distributions.Categorical(logits=logits / temperature).sample((64,)).T  # (400, 64)
        logprobs = policy.logits.gather(1, tokens)
        found = surprisal_z(logprobs, *given, every)
        excess = -(logprobs + policy.entropy()[:, None]).sum().item()
        assert found == pytest.approx(excess / (spread.sum().item() * 64 + 100) ** 0.5)
        assert low < found < high
    assert surprisal_z(*[torch.zeros(2, 3)] * 4) == 0  # no row of the current weights


# ------------------------------------------------------------------------------------------------ corrections
def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """old_logprobs, behavior_logprobs, mask (6, 8), float64. The mismatch is small in some rows, large in others, and
    outside the mask it is huge. A row has 0 to 8 tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = (draw(6, 8) < 2 * draw(6, 1) - 0.5).double()
    mask[0] = 1.0  # a batch has tokens
    behavior = -7 * draw(6, 8) - 0.01
    mismatch = 10 ** (4 * draw(6, 1) - 3) * (2 * draw(6, 8) - 1)
    return (behavior + mismatch).clamp(max=-1e-3) * mask, behavior.where(mask > 0, 50.0), mask


BATCHES = [ragged(seed) for seed in range(60)]
BOUNDS = {"token": (0.5, 2), "sequence": (0.5, 2), "geometric": (0.99, 1.01), "worst": (1e-4, 100),
          "trm": (-math.inf, 0.05), "binary_tv": (-math.inf, 0.2)}  # fmt: skip


def by_hand(old: torch.Tensor, behavior: torch.Tensor, tis: str, name: str) -> tuple[torch.Tensor, ...]:
    """Weights, what is truncated and what is rejected, of one response's tokens (N,), from the definitions in the
    sources of the rules.
    """
    ratio, (low, high) = old.exp() / behavior.exp(), BOUNDS[name]
    whole = ratio.prod().expand_as(ratio)
    statistic = {"token": ratio, "sequence": whole, "geometric": whole ** (1 / len(ratio)), "worst": ratio,
                 "trm": (ratio - 1 - ratio.log()).max().expand_as(ratio),
                 "binary_tv": (old.exp() - behavior.exp()).abs()}[name]  # fmt: skip
    rejected = (statistic < low) | (statistic > high)
    if name == "worst":
        rejected = rejected.any().expand_as(ratio)
    # The least product is verl's and SkyRL's limit.
    weights = {"off": torch.ones_like(ratio), "token": ratio,
               "sequence": whole.clamp(min=math.exp(-20))}[tis]  # fmt: skip
    return weights.clamp(max=1.5) * ~rejected, (weights > 1.5) & ~rejected, rejected


@pytest.mark.parametrize("name", REJECTIONS)
@pytest.mark.parametrize("tis", ["off", *WEIGHTS])
def test_each_weight_with_each_rejection_equals_its_definition_on_60_ragged_batches(tis, name):
    seen = []
    for batch in BATCHES:
        corrected, inside = correct(*batch, tis, 1.5, REJECTIONS[name]), batch[2] > 0
        rows = [by_hand(old[at], behavior[at], tis, name)
                for old, behavior, at in zip(*batch[:2], inside, strict=True) if at.any()]  # fmt: skip
        weights, truncated, rejected = (torch.cat(parts) for parts in zip(*rows, strict=True))
        torch.testing.assert_close(corrected.weights[inside], weights, rtol=1e-9, atol=0)
        assert torch.equal(corrected.capped[inside], truncated)
        assert torch.equal(corrected.rejected[inside], rejected)
        assert not corrected.rejected[~inside].any()
        metrics = correction_metrics(corrected, *batch)
        ess = weights.sum() ** 2 / (len(weights) * weights.square().sum())
        seen.append(rejected.double().mean())
        expected = {"rejected_frac": seen[-1], f"rejected_frac_{name}": seen[-1],
                    "tis_capped_frac": truncated.double().mean(), "weights_ess": ess.nan_to_num(),
                    "weights_mean": weights.mean()}  # fmt: skip
        for figure, value in expected.items():
            assert metrics[figure] == pytest.approx(value.item()), figure
    assert 0.001 < sum(seen) / len(seen) < 0.9, name


def test_sequence_mask_of_trl_is_a_choice_of_options():
    """TRL 1.16.0's default: exp of the summed log-ratio on each token, 0 above 3; its mean counts all tokens."""
    options = config_of(
        tis="sequence", tis_cap=3, reject="sequence", reject_low=1e-30, reject_high=3, reject_mean="all")
    summed = torch.tensor([[-9.0], [-0.5], [1.0], [1.2]])
    mask = torch.tensor([[1.0, 1.0, 0.0]]).expand(4, 3)
    found = correct(summed * mask / 2, torch.zeros(4, 3), mask, options.tis, options.tis_cap, options.rejection)
    torch.testing.assert_close(found.weights, summed.exp() * torch.tensor([[1.0], [1.0], [1.0], [0.0]]) * mask)
    assert options.rejection.mean == "all"


def test_mismatch_metrics_equal_the_divergence_by_enumeration_and_hand_computed_values():
    behavior, old = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    samples = torch.tensor([[0, 0, 1, 2]])  # behavior's tokens in their exact proportions
    metrics = mismatch_metrics(old.log()[samples], behavior.log()[samples], torch.ones(1, 4))
    expected = {
        "mismatch_kl": (behavior * (behavior / old).log()).sum().item(), "mismatch_abs_mean": 0.75 * math.log(2),
        "mismatch_max": math.log(2), "mismatch_ratio": (0.5 + 0.5 + 1 + 2) / 4,
        "ess": (0.5 + 0.5 + 1 + 2) ** 2 / (4 * (0.25 + 0.25 + 1 + 4)),
        "mismatch_near_1": 1 / 4, "mismatch_row_ratio": 0.5 * 0.5 * 1 * 2, "mismatch_rows_near_1": 0.0,
    }  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_mismatch_of_rows_that_differ_in_length_equals_hand_computed_values():
    """A row without a token, one beyond the clamp, and NaN outside the mask."""
    nan = math.nan
    mismatch = torch.tensor([[0.001, 0.0015, nan], [nan] * 3, [0.004, nan, nan], [10.0, 11.0, 12.0]]).double()
    metrics = mismatch_metrics(mismatch, torch.zeros(4, 3), (~mismatch.isnan()).float())
    assert metrics["mismatch_near_1"] == 2 / 6  # exp(0.001) and exp(0.0015) are in [0.999, 1.002]
    assert metrics["mismatch_rows_near_1"] == 1 / 3  # exp(0.00125) is
    products = math.exp(0.0025), math.exp(0.004), math.exp(20)
    assert metrics["mismatch_row_ratio"] == pytest.approx(sum(products) / 3, rel=1e-12)


def test_a_mismatch_of_nan_or_of_no_token_is_an_error():
    values = torch.tensor([[math.nan, -1.0]])
    with pytest.raises(FloatingPointError, match="1 of 2"):
        mismatch_metrics(values, torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="mask must have a response token"):
        mismatch_metrics(values, values, torch.zeros(1, 2))


def test_the_ratios_of_backend_and_update_equal_hand_computed_values_and_are_cut_off_at_exp_20():
    values, zeros = torch.tensor([[300.0, math.log(1.1), 7.0]]), torch.zeros(1, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    mean = pytest.approx((math.exp(20) + 1.1) / 2)
    found = backend_metrics(values, zeros, torch.ones(1, 1), mask, objective="grpo", clip=(0.2, 0.2), max_length=3)
    assert found == {"backend_clip_rate": 1 / 2, "backend_ratio_mean": mean}
    rows, of_rows = torch.tensor([[0.5], [0.0]]).expand(2, 3), torch.tensor([[1.0] * 3, [1.0, 0.0, 0.0]])
    found = backend_metrics(rows, 0 * rows, rows + 1, of_rows, objective="gspo", clip=(0.2, 0.2), max_length=3)
    assert found["backend_clip_rate"] == pytest.approx(1 / 2)  # weighted as in the loss: a share of rows
    sums = update_sums(values, zeros, None, mask > 0, mask / 2)
    assert sums["ratio_mean"] == mean
    assert sums["kl_old_new"].isfinite()
