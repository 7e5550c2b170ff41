"""Each formula against an oracle that shares no code with it: enumeration, hand-computed numbers.

The losses and gradients of the objectives are in test_rl.py, where `update` computes them, weights and rejections in
test_corrections.py.
"""

import math
from itertools import product

import pytest
import torch

from objectives import OBJECTIVES


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
