"""Each formula against an oracle that shares no code with it: enumeration, plain Python floats, finite differences."""

import math
from itertools import product

import pytest
import torch

from objectives import (
    OBJECTIVES,
    Batch,
    TokenLoss,
    effective_sample_size,
    group_advantages,
    kl_k3,
    loss_weights,
    mismatch_metrics,
    tis_weights,
)

MASK = torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4])


def policies(seed: int, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """logprobs and old_logprobs (3, 4) in float64, far enough apart for clips to bind on both sides."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.2
    return old + spread * torch.randn(3, 4, generator=generator, dtype=torch.float64), old


def batch(mask: torch.Tensor = MASK, advantages: torch.Tensor = ADVANTAGES) -> Batch:
    """A micro-batch of which only mask and advantages count."""
    unused = torch.zeros_like(mask)
    return Batch(unused, unused, mask, unused, advantages, torch.tensor([4, 4, 4]), torch.tensor([1, 1, 1]))


def surrogate(name: str, logprobs: torch.Tensor, old: torch.Tensor, low: float, high: float) -> TokenLoss:
    return OBJECTIVES[name].surrogate(logprobs, old, batch(), (low, high))


def slope(function, logprobs: torch.Tensor, row: int, column: int, step: float = 1e-6) -> float:
    up, down = logprobs.clone(), logprobs.clone()
    up[row, column] += step
    down[row, column] -= step
    return (function(up) - function(down)) / (2 * step)


def test_group_advantages_equal_hand_computed_values():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    std = math.sqrt(4 * 0.25 / 3)  # four rewards half a point from their mean, unbiased
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0, 0, 0, 0]
    assert group_advantages(rewards, 4).tolist() == pytest.approx(expected)
    assert group_advantages(rewards, 4, divide_by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_equal_rewards_have_no_advantage_whatever_their_value_and_number(divide_by_std):
    values = [0.0, 0.1, 0.2, 0.3, 0.7, 0.9, 1.0, 1 / 3, -0.6, 1e-8, 123.456, 1e6 + 0.3]
    for value, group_size in product(values, range(2, 70)):
        advantages = group_advantages(torch.full((2 * group_size,), value), group_size, divide_by_std)
        assert not advantages.any(), (value, group_size)
    close = torch.tensor([0.1] * 7 + [0.1 + 1e-6])
    assert group_advantages(close, 8)[-1] > 1e-3  # nearly equal is not equal
    assert group_advantages(close, 8, divide_by_std=False)[-1].item() == pytest.approx(7 / 8 * 1e-6, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_grpo_equals_the_scalar_formula_and_its_clip_is_where_the_slope_is_zero(seed):
    logprobs, old = policies(seed)
    loss, clipped = surrogate("grpo", logprobs, old, 0.2, 0.28)
    for row in range(3):
        for column in range(4):
            if MASK[row, column]:
                a, r = ADVANTAGES[row].item(), math.exp(logprobs[row, column] - old[row, column])
                assert loss[row, column].item() == pytest.approx(-min(r * a, min(max(r, 0.8), 1.28) * a), rel=1e-6)
                total = lambda lp: (surrogate("grpo", lp, old, 0.2, 0.28).loss * MASK).sum().item()  # noqa: E731
                assert clipped[row, column].item() == (abs(slope(total, logprobs, row, column)) < 1e-9)


def test_grpo_clips_both_sides_somewhere():
    seen = [surrogate("grpo", *policies(seed), 0.2, 0.2).clipped for seed in range(5)]
    assert any(c[0].any() for c in seen), "positive advantages never clipped"
    assert any(c[1].any() for c in seen), "negative advantages never clipped"


@pytest.mark.parametrize("seed", range(3))
def test_gspo_equals_the_sequence_formula_and_its_gradient(seed):
    logprobs, old = policies(seed, spread=0.1)
    weights = loss_weights(MASK, "sequence", 99)

    def by_hand(lp: torch.Tensor) -> float:
        total = 0.0
        for row in range(3):
            logs = [(lp[row, t] - old[row, t]).item() for t in range(4) if MASK[row, t]]
            s, a = math.exp(sum(logs) / len(logs)), ADVANTAGES[row].item()
            total += -min(s * a, min(max(s, 0.95), 1.05) * a) / 3
        return total

    logprobs.requires_grad_()
    loss = (surrogate("gspo", logprobs, old, 0.05, 0.05).loss * weights).sum()
    loss.backward()
    assert loss.item() == pytest.approx(by_hand(logprobs.detach()), rel=1e-6)
    for row in range(3):
        for column in range(4):
            numeric = slope(by_hand, logprobs.detach(), row, column)
            assert logprobs.grad[row, column].item() == pytest.approx(numeric, abs=1e-7)


def test_gspo_clip_is_one_value_per_sequence():
    clipped = surrogate("gspo", *policies(1), 3e-4, 4e-4).clipped
    assert (clipped == clipped[:, :1]).all()


def test_cispo_keeps_the_gradient_of_capped_tokens():
    logprobs, old = policies(0, spread=1.0)
    ratios = (logprobs - old).exp().tolist()
    logprobs.requires_grad_()
    loss, clipped = surrogate("cispo", logprobs, old, 0.0, 1.5)
    (loss * MASK).sum().backward()
    for row in range(3):
        for column in range(4):
            ratio = ratios[row][column] if MASK[row, column] else 0.0
            expected = -min(ratio, 1.5) * ADVANTAGES[row].item()
            assert logprobs.grad[row, column].item() == pytest.approx(expected, rel=1e-6)
            if MASK[row, column]:
                assert clipped[row, column].item() == (ratio > 1.5)
    assert (clipped & (MASK > 0)).any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_the_old_policy_every_objective_has_the_policy_gradient(name):
    _, old = policies(0)
    logprobs = old.clone().requires_grad_()
    objective = OBJECTIVES[name]
    weights = loss_weights(MASK, objective.normalizer, 7).double()
    micro = batch(MASK.double(), ADVANTAGES.double())
    loss, clipped = objective.surrogate(logprobs, old, micro, objective.clip)
    (loss * weights).sum().backward()
    torch.testing.assert_close(logprobs.grad, -ADVANTAGES[:, None].double() * weights)
    assert not clipped.any()


def test_loss_weights_average_tokens_sequences_or_by_a_constant():
    token, sequence, constant = (loss_weights(MASK, how, 10) for how in ("token", "sequence", "constant"))
    assert token[MASK > 0].tolist() == pytest.approx([1 / 7] * 7)
    assert sequence.sum(dim=1).tolist() == pytest.approx([1 / 3] * 3)
    assert constant[MASK > 0].tolist() == pytest.approx([1 / 30] * 7)
    assert all(w[MASK == 0].abs().sum() == 0 for w in (token, sequence, constant))


def test_kl_k3_is_unbiased_by_enumeration():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = (p * (p / q).log()).sum()
    assert (p * kl_k3(p.log(), q.log())).sum().item() == pytest.approx(exact.item())
    assert (kl_k3(p.log(), q.log()) >= 0).all()


def test_token_tis_without_a_cap_makes_the_expectation_unbiased_by_enumeration():
    behavior, old = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    value = torch.tensor([3.0, -1.0, 2.0])
    weights, cut = tis_weights("token", old.log()[None], behavior.log()[None], torch.ones(1, 3), 100.0, 0.0)
    assert (behavior * weights[0] * value).sum().item() == pytest.approx((old * value).sum().item())
    assert not cut.any()


def test_tis_caps_masks_and_leaves_off_alone():
    rho = torch.tensor([[0.3, 1.0, 4.0]]).double()
    arguments = rho.log(), torch.zeros(1, 3).double(), torch.ones(1, 3).double(), 2.0, 0.5
    assert tis_weights("token", *arguments).weights[0].tolist() == pytest.approx([0.3, 1.0, 2.0])
    assert tis_weights("token", *arguments).cut[0].tolist() == [False, False, True]
    assert tis_weights("masked", *arguments).weights[0].tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert tis_weights("masked", *arguments).cut[0].tolist() == [True, False, True]
    assert tis_weights("sequence", *arguments).weights[0].tolist() == pytest.approx([1.2] * 3)  # 0.3 * 1 * 4
    assert tis_weights("off", *arguments).weights[0].tolist() == [1.0] * 3


def test_tis_ignores_what_is_outside_the_mask_and_carries_no_gradient():
    old = torch.zeros(1, 3, requires_grad=True)
    weights, _ = tis_weights("sequence", old, torch.tensor([[0.0, 50.0, -0.1]]), torch.tensor([[1.0, 0, 1]]), 3.0, 0.5)
    assert weights[0, 0].item() == pytest.approx(math.exp(0.1))
    assert not weights.requires_grad


def test_sequence_tis_survives_disjoint_policies():
    huge = torch.full((1, 4), 100.0)
    for sign, expected in ((1, math.exp(20)), (-1, math.exp(-20))):  # the exponent is clamped to +-20
        weights, _ = tis_weights("sequence", sign * huge, torch.zeros(1, 4), torch.ones(1, 4), 1e12, 0.5)
        assert weights[0].tolist() == pytest.approx([expected] * 4, rel=1e-4)


def test_effective_sample_size_equals_hand_computed_values():
    assert effective_sample_size(torch.ones(4)).item() == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])).item() == 0.25
    assert effective_sample_size(torch.tensor([1.0, 3])).item() == 16 / 20


def test_mismatch_kl_estimates_the_divergence_from_behavior_to_old_by_enumeration():
    behavior, old = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    samples = torch.tensor([[0, 0, 1, 2]])  # behavior's tokens in their exact proportions
    metrics = mismatch_metrics(old.log()[samples], behavior.log()[samples], torch.ones(1, 4))
    assert metrics["mismatch_kl"] == pytest.approx((behavior * (behavior / old).log()).sum().item(), rel=1e-6)
    assert metrics["mismatch_abs_mean"] == pytest.approx(0.75 * math.log(2), rel=1e-6)
    assert metrics["mismatch_max"] == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["ess"] == pytest.approx((0.5 + 0.5 + 1 + 2) ** 2 / (4 * (0.25 + 0.25 + 1 + 4)), rel=1e-6)


def test_mismatch_of_a_nan_is_an_error_only_inside_the_mask():
    values = torch.tensor([[float("nan"), -1.0]])
    with pytest.raises(FloatingPointError, match="1 of 2"):
        mismatch_metrics(values, torch.zeros(1, 2), torch.ones(1, 2))
    assert mismatch_metrics(values, torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))["mismatch_max"] == 1.0
