"""Weights and rejections against the definitions in their sources, and when they are refused."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from helpers import config_of, parametrize, value_error

from engine_adapter import ParityFlags
from extras.rejection import REJECTIONS, Options
from objectives import CORRECTIONS


def ragged():
    """(6, 8) in float64. The mismatch is small in some rows, large in others, huge outside the mask. A row has 0 to 8
    tokens.
    """
    draw = partial(torch.rand, dtype=torch.float64)
    mask = (draw(6, 8) < 2 * draw(6, 1) - 0.5).double()
    mask[0] = 1.0  # a batch has tokens
    behavior = -7 * draw(6, 8) - 0.01
    mismatch = 10 ** (4 * draw(6, 1) - 3) * (2 * draw(6, 8) - 1)
    return SimpleNamespace(old_logprobs=(behavior + mismatch).clamp(max=-1e-3) * mask,
                           behavior_logprobs=behavior.where(mask > 0, 50.0), mask=mask)


BOUNDS = {"token": (0.5, 2), "sequence": (0.5, 2), "geometric": (0.99, 1.01), "worst": (1e-4, 100),
          "trm": (-math.inf, 0.05), "binary_tv": (-math.inf, 0.2)}  # fmt: skip


def by_hand(old, behavior):
    """The weights, and what is rejected, of one response's tokens (N,)."""
    ratio = old.exp() / behavior.exp()
    whole = ratio.prod().expand_as(ratio)
    statistics = {"token": ratio, "sequence": whole, "geometric": whole ** (1 / len(ratio)), "worst": ratio,
                  "trm": (ratio - 1 - ratio.log()).max().expand_as(ratio),
                  "binary_tv": (old.exp() - behavior.exp()).abs()}  # fmt: skip
    rejected = {name: (statistics[name] < low) | (statistics[name] > high) for name, (low, high) in BOUNDS.items()}
    rejected["worst"] = rejected["worst"].any().expand_as(ratio)
    # The least product is verl's and SkyRL's limit.
    weights = {"off": torch.ones_like(ratio), "token": ratio, "sequence": whole.clamp(min=math.exp(-20))}
    return {name: values.clamp(max=1.5) for name, values in weights.items()}, rejected


def test_weights_and_rejections_equal_their_definitions_on_60_ragged_batches():
    shares = dict.fromkeys(REJECTIONS, 0.0)
    for _ in range(60):
        batch = ragged()
        sides, inside = [*vars(batch).values()], batch.mask > 0
        rows = [by_hand(old[at], behavior[at])
                for old, behavior, at in zip(*sides[:2], inside, strict=True) if at.any()]
        for tis, correct in CORRECTIONS.items():
            weights = correct(*sides, 1.5)
            expected = torch.cat([by_name[tis] for by_name, _ in rows])
            torch.testing.assert_close(weights[inside], expected, rtol=1e-9, atol=0)
            assert not weights[~inside].any()
        for name, rule in REJECTIONS.items():
            rejected, counted = rule(batch)
            assert torch.equal(rejected[inside], torch.cat([by_name[name] for _, by_name in rows])), name
            assert not rejected[~inside].any()
            assert torch.equal(counted > 0, inside & ~rejected if name == "sequence" else inside)
            shares[name] += rejected[inside].double().mean() / 60
    assert all(0.001 < share < 0.9 for share in shares.values())


def test_a_rule_has_its_usual_bounds_and_mean_unless_others_are_given():
    sequence = Options(reject="sequence", reject_low=0.1, reject_mean="all").rule
    assert sequence == REJECTIONS["sequence"]._replace(low=0.1, mean="all")
    assert Options(reject="trm", reject_high=0.5).rule == REJECTIONS["trm"]._replace(high=0.5)


@parametrize("option, name", [*product(["tis"], [*CORRECTIONS][1:]), *product(["reject"], REJECTIONS)])
def test_a_correction_is_refused_while_a_fix_is_off_with_one_way_around_and_with_two_policies_always(option, name):
    correction = {option: name}
    config_of(**correction)
    with value_error(f"{option} must be off with two_policy"):
        config_of(**correction, two_policy=True, correct_a_broken_backend=True)
    for fix in vars(ParityFlags()):
        off = correction | {"parity": ParityFlags(**{fix: False}), "top_p": 0.9 if fix == "sampling_mask" else 1.0}
        config_of(**off, correct_a_broken_backend=True)
        with value_error(f"a correction hides the broken.*, got {option} {name} without {fix};"):
            config_of(**off)
