"""Each formula against an oracle that shares no code with it: enumeration, plain Python floats, finite differences."""

import math
from itertools import product

import pytest
import torch

from objectives import (
    NO_REJECTION,
    OBJECTIVES,
    REJECTIONS,
    WEIGHTS,
    Batch,
    Rejection,
    TokenLoss,
    correct,
    correction_metrics,
    effective_sample_size,
    group_advantages,
    kl_k3,
    loss_weights,
    mismatch_metrics,
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


# ------------------------------------------------------------------------------------------------ corrections
OFF = NO_REJECTION


def test_token_tis_without_a_cap_makes_the_expectation_unbiased_by_enumeration():
    behavior, old = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    value = torch.tensor([3.0, -1.0, 2.0])
    weights, truncated, rejected = correct(old.log()[None], behavior.log()[None], torch.ones(1, 3), "token", 100.0, OFF)
    assert (behavior * weights[0] * value).sum().item() == pytest.approx((old * value).sum().item())
    assert not truncated.any() | rejected.any()


def test_sequence_tis_without_a_cap_makes_the_expectation_unbiased_by_enumeration():
    """Over all 9 responses of two tokens, whose second token has other probabilities after each first token."""
    first, second = [0.5, 0.3, 0.2], [[0.1, 0.6, 0.3], [0.4, 0.4, 0.2], [0.8, 0.1, 0.1]]
    old_first, old_second = [0.3, 0.3, 0.4], [[0.2, 0.2, 0.6], [0.5, 0.1, 0.4], [0.3, 0.3, 0.4]]
    responses = list(product(range(3), range(3)))
    behavior = torch.tensor([[first[a], second[a][b]] for a, b in responses])
    old = torch.tensor([[old_first[a], old_second[a][b]] for a, b in responses])
    value = torch.tensor([3.0, -1.0, 2.0, 0.5, 1.0, -2.0, 4.0, 0.0, 1.0])
    for tis, unbiased in (("sequence", True), ("token", False)):
        weights = correct(old.log(), behavior.log(), torch.ones(9, 2), tis, 100.0, OFF).weights
        expectation = (behavior.prod(dim=1) * weights[:, 0] * value).sum().item()
        assert (expectation == pytest.approx((old.prod(dim=1) * value).sum().item())) == unbiased


def test_a_cap_truncates_a_rule_rejects_and_off_leaves_alone():
    rho = torch.tensor([[0.3, 1.0, 4.0]]).double()
    policies = rho.log(), torch.zeros(1, 3).double(), torch.ones(1, 3).double()

    def corrected(tis: str, rejection: Rejection = OFF) -> list[list[float]]:
        return [each[0].tolist() for each in correct(*policies, tis, 2.0, rejection)]

    no, icepop = [False] * 3, REJECTIONS["token"]
    assert corrected("token") == [pytest.approx([0.3, 1.0, 2.0]), [False, False, True], no]
    assert corrected("token", icepop) == [pytest.approx([0.0, 1.0, 0.0]), no, [True, False, True]]
    assert corrected("token", icepop._replace(bounds=(0.2, 5.0))) == [
        pytest.approx([0.3, 1.0, 2.0]), [False, False, True], no]  # kept, and truncated
    assert corrected("sequence") == [pytest.approx([1.2] * 3), no, no]  # 0.3 * 1 * 4
    assert corrected("sequence", icepop) == [pytest.approx([0.0, 1.2, 0.0]), no, [True, False, True]]
    assert corrected("off") == [[1.0] * 3, no, no]
    assert corrected("off", icepop) == [[0.0, 1.0, 0.0], no, [True, False, True]]


def test_a_correction_ignores_what_is_outside_the_mask_and_carries_no_gradient():
    old = torch.zeros(1, 3, requires_grad=True)
    behavior, mask = torch.tensor([[0.0, 50.0, -0.1]]), torch.tensor([[1.0, 0, 1]])
    weights = correct(old, behavior, mask, "sequence", 3.0, OFF).weights
    assert weights[0, 0].item() == pytest.approx(math.exp(0.1))
    assert not weights.requires_grad
    assert correct(old, behavior, mask, "token", 3.0, OFF).weights[0, 1].item() == 1.0
    for name in ("worst", "trm"):
        assert REJECTIONS[name].rejects(torch.tensor([[-20.0, 0, 0]]), behavior, mask).tolist() == [[True, False, True]]
    for name, rule in REJECTIONS.items():
        rejected = rule.rejects(old.detach(), behavior, mask)
        assert not rejected[0, 1], name
        assert rejected.any() == (name == "geometric"), name  # exp(0.05) is above 1.01


def test_a_correction_survives_disjoint_policies():
    huge = torch.full((1, 4), 100.0)
    for sign, expected in ((1, math.exp(20)), (-1, math.exp(-20))):  # the exponent is clamped to +-20
        for tis in WEIGHTS:
            weights = correct(sign * huge, torch.zeros(1, 4), torch.ones(1, 4), tis, 1e12, OFF).weights
            assert weights[0].tolist() == pytest.approx([expected] * 4, rel=1e-4)
        policies = sign * huge - 100, sign * -huge - 100, torch.ones(1, 4)
        assert all(rule.rejects(*policies).all() for name, rule in REJECTIONS.items() if name != "binary_tv")


Ragged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Row = list[tuple[float, float]]  # of each response token: log pi_old, log mu


def ragged(seed: int) -> Ragged:
    """old_logprobs, behavior_logprobs, mask (B, T), float64. The mismatch is small in some, large in others."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(2, 9, (), generator=generator)) for _ in range(2))
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)  # an empty row too
    start = torch.randint(0, columns, (rows, 1), generator=generator).clamp(max=columns - lengths)
    at = torch.arange(columns)
    mask = ((at >= start) & (at < start + lengths)).double()
    spread = 10 ** (4 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 3)
    behavior = -7 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 0.01
    noise = spread * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (behavior + noise).clamp(max=-1e-3) * mask, behavior * mask, mask


def rows_of(batch: Ragged) -> list[Row]:
    old, behavior, mask = (each.tolist() for each in batch)
    rows = [zip(*row, strict=True) for row in zip(old, behavior, mask, strict=True)]
    return [[(pi, mu) for pi, mu, inside in row if inside] for row in rows]


def flat(values: torch.Tensor, mask: torch.Tensor) -> list:
    return values[mask > 0].tolist()


BATCHES = [ragged(seed) for seed in range(60)]
GEOMETRIC = lambda row: math.prod(math.exp(pi - mu) for pi, mu in row) ** (1 / len(row))  # noqa: E731
RATIO = lambda pi, mu: math.exp(pi) / math.exp(mu)  # noqa: E731
OUTSIDE = lambda value, low, high: not low <= value <= high  # noqa: E731
# Each rule as a loop over the tokens of one response, from the definition in its source.
ORACLES = {
    "token": lambda row: [OUTSIDE(RATIO(*each), 0.5, 2) for each in row],
    "sequence": lambda row: [OUTSIDE(math.prod(RATIO(*each) for each in row), 0.5, 2)] * len(row),
    "geometric": lambda row: [OUTSIDE(GEOMETRIC(row), 0.99, 1.01)] * len(row),
    "worst": lambda row: [any(OUTSIDE(RATIO(*each), 1e-4, 100) for each in row)] * len(row),
    "trm": lambda row: [max(RATIO(*each) - 1 - math.log(RATIO(*each)) for each in row) > 0.05] * len(row),
    "binary_tv": lambda row: [abs(math.exp(pi) - math.exp(mu)) > 0.2 for pi, mu in row],
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTIONS)
def test_each_rejection_equals_its_definition_on_60_ragged_batches(name):
    seen = []
    for batch in BATCHES:
        rejected = flat(REJECTIONS[name].rejects(*batch), batch[2])
        expected = [each for row in rows_of(batch) if row for each in ORACLES[name](row)]
        assert rejected == expected
        assert not REJECTIONS[name].rejects(batch[0], batch[0], batch[2]).any()  # without a mismatch
        seen += rejected
    assert 0.001 < sum(seen) / len(seen) < 0.9, name


@pytest.mark.parametrize("name", REJECTIONS)
@pytest.mark.parametrize("tis", ["off", *WEIGHTS])
def test_each_weight_with_each_rejection_equals_its_definition_on_60_ragged_batches(tis, name):
    for batch in BATCHES:
        corrected = correct(*batch, tis, 1.5, REJECTIONS[name])
        weights, truncated = [], []
        for row in rows_of(batch):
            product_of_row = max(math.exp(-20), math.prod(RATIO(*each) for each in row))  # verl's and SkyRL's limit
            for each, rejected in zip(row, ORACLES[name](row) if row else [], strict=True):
                ratio = {"off": 1.0, "token": RATIO(*each), "sequence": product_of_row}[tis]
                weights.append(0.0 if rejected else min(ratio, 1.5))
                truncated.append(ratio > 1.5 and not rejected)
        assert flat(corrected.weights, batch[2]) == pytest.approx(weights, rel=1e-9)
        assert flat(corrected.truncated, batch[2]) == truncated
        metrics = correction_metrics(corrected, *batch)
        tokens = len(weights)
        assert metrics["rejected_frac"] == metrics[f"rejected_frac_{name}"]
        assert metrics["rejected_frac"] == pytest.approx(corrected.rejected.sum().item() / max(1, tokens))
        assert metrics["tis_clip_frac"] == pytest.approx(sum(truncated) / max(1, tokens))
        squares = sum(weight**2 for weight in weights)
        expected = sum(weights) ** 2 / (tokens * squares) if squares else 0.0
        assert metrics["weights_ess"] == pytest.approx(expected, rel=1e-9)


# What verl, SkyRL and TRL compute, re-derived from their definitions: whether they keep each token of a response, or
# its factor in the loss. `delta` is log pi_old - log mu of each token.
VERL = {  # rollout_rs: its statistics are those of log mu - log pi_old, between the logarithms of the bounds
    "token_k1": lambda delta, low, high: [low <= math.exp(-each) <= high for each in delta],
    "seq_sum_k1": lambda delta, low, high: [low <= math.exp(-sum(delta)) <= high] * len(delta),
    "seq_mean_k1": lambda delta, low, high: [low <= math.exp(-sum(delta) / len(delta)) <= high] * len(delta),
    "seq_max_k3": lambda delta, _, high: [max(math.exp(each) - 1 - each for each in delta) <= high] * len(delta),
}
SKYRL = {
    "token_mask": lambda delta, low, high: [low <= math.exp(each) <= high for each in delta],
    "product": lambda delta, low, high: [low <= math.exp(sum(delta)) <= high] * len(delta),
    "geometric": lambda delta, low, high: [low <= math.exp(sum(delta) / len(delta)) <= high] * len(delta),
    "outlier_token": lambda delta, low, high: [all(low <= math.exp(each) <= high for each in delta)] * len(delta),
}
THEIRS = [  # their function, our rule, and the bounds: ours, theirs
    (VERL["token_k1"], "token", (0.5, 5.0), (0.2, 2.0)), (VERL["seq_sum_k1"], "sequence", (0.5, 5.0), (0.2, 2.0)),
    (VERL["seq_mean_k1"], "geometric", (0.98, 1.01), (1 / 1.01, 1 / 0.98)),
    (VERL["seq_max_k3"], "trm", (-math.inf, 0.05), (None, 0.05)),
    (SKYRL["token_mask"], "token", (0.5, 5.0), (0.5, 5.0)), (SKYRL["product"], "sequence", (0.5, 5.0), (0.5, 5.0)),
    (SKYRL["geometric"], "geometric", (0.98, 1.01), (0.98, 1.01)),
    (SKYRL["outlier_token"], "worst", (0.3, 4.0), (0.3, 4.0)),
]  # fmt: skip


@pytest.mark.parametrize("theirs, name, bounds, their_bounds", THEIRS)
def test_a_rejection_keeps_what_verl_and_skyrl_keep_on_60_ragged_batches(theirs, name, bounds, their_bounds):
    """verl bounds 1 / rho: its bounds are the reciprocals of ours, in the other order."""
    rule, seen = REJECTIONS[name]._replace(bounds=bounds), []
    for batch in BATCHES:
        kept = [not each for each in flat(rule.rejects(*batch), batch[2])]
        deltas = [[pi - mu for pi, mu in row] for row in rows_of(batch) if row]
        assert kept == [each for delta in deltas for each in theirs(delta, *their_bounds)]
        seen += kept
    assert 0.05 < sum(seen) / len(seen) < 0.999


def test_the_same_bounds_reject_other_tokens_in_verl_unless_they_are_reciprocal():
    for bounds, equal in (((0.5, 2.0), True), ((0.5, 5.0), False)):
        rule = REJECTIONS["token"]._replace(bounds=bounds)
        ours = [not each for batch in BATCHES for each in flat(rule.rejects(*batch), batch[2])]
        theirs = [each for batch in BATCHES for row in rows_of(batch)
                  for each in VERL["token_k1"]([pi - mu for pi, mu in row], *bounds)]  # fmt: skip
        assert (ours == theirs) == equal


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_correction_is_trls_factor_on_60_ragged_batches(level, mode):
    """TRL 1.10: vllm_importance_sampling_mode LEVEL_MODE with clip_min and clip_max. It has no limit of exp(-20)."""
    low, high = (None, 3.0) if mode == "truncate" else (0.4, 3.0)
    rule = OFF if mode == "truncate" else REJECTIONS[level]._replace(bounds=(low, high))
    for batch in BATCHES:
        factors = []
        for row in rows_of(batch):
            deltas = [pi - mu for pi, mu in row]
            ratios = [math.exp(sum(deltas) if level == "sequence" else each) for each in deltas]
            if mode == "truncate":
                factors += [min(ratio, high) for ratio in ratios]
            else:
                factors += [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
        assert flat(correct(*batch, level, high, rule).weights, batch[2]) == pytest.approx(factors, rel=1e-9, abs=3e-9)


def test_skyrls_sequence_weight_leaves_out_tokens_that_its_token_mask_rejected():
    differing = 0
    for batch in BATCHES:
        ours = flat(correct(*batch, "sequence", 5.0, REJECTIONS["token"]).weights, batch[2])
        theirs = []
        for row in rows_of(batch):
            deltas = [pi - mu for pi, mu in row]
            kept = [0.5 <= math.exp(each) <= 2 for each in deltas]
            weight = min(5.0, math.exp(sum(each for each, keep in zip(deltas, kept, strict=True) if keep)))
            theirs += [weight * keep for keep in kept]
        same = ours == pytest.approx(theirs, rel=1e-9, abs=3e-9)
        assert same or 0 in theirs
        differing += not same
    assert differing > 10


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
