"""Each formula against an oracle that shares no code with it: enumeration, hand-computed numbers.

The losses and gradients of the objectives are in test_rl.py, where `update` computes them, weights and rejections in
test_corrections.py.
"""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import parametrize, value_error

from objectives import OBJECTIVES, loss_weights


def advantages(rewards, group_size, objective="grpo"):
    """Of responses of one token, which the reference scores as the policy does: a fork's row may use both."""
    ones = torch.ones(len(rewards), 1)
    batch = SimpleNamespace(mask=ones, old_logprobs=-ones, behavior_logprobs=-ones, ref_logprobs=-ones)
    scores = torch.tensor(rewards, dtype=torch.float64)
    return OBJECTIVES[objective].advantages(scores, group_size, batch)[:, 0].tolist()


def test_a_normalizer_is_one_of_three():
    with value_error("normalizer must be token, sequence or constant, got tokens"):
        loss_weights(torch.ones(2, 3), "tokens", 3)


@parametrize("objective", OBJECTIVES)
def test_group_advantages_equal_hand_computed_values_and_equal_rewards_have_none(objective):
    """A response that is left out (nan) has none, and its group is smaller: at 0 a failure would beat -1."""
    for value, group_size in product([0.1, 0.7, 1 / 3, -0.6, 1e-8, 1e6 + 0.3, math.nan], range(2, 70, 3)):
        rewards = [value] * (2 * group_size - 1) + [math.nan]
        assert not any(advantages(rewards, group_size, objective)), (value, group_size)
    assert not any(advantages([0.1 + 0.2, 0.3, 0.1 + 0.2 - 0.3, 0.1 - 0.3 + 0.2], 2, objective))
    for value, apart in ((0.1, 1e-6), (0.0, 1.0), (1e8, 1.0)):  # and a group of equal rewards beside
        std = apart / math.sqrt(8)  # of seven equal numbers and one that is `apart` from them
        unit = apart / 8 / (1 if objective == "dr_grpo" else std + 1e-4)
        rewards = [math.nan] + [value] * 7 + [value + apart] + [value] * 9
        assert advantages(rewards, 9, objective) == pytest.approx([0] + [-unit] * 7 + [7 * unit] + [0] * 9, rel=1e-6)
