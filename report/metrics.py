"""Figures of a step and of an evaluation."""

import math
from collections.abc import Iterable
from statistics import fmean as mean
from typing import Any


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean without NaN and None, which left-out responses have; None if all are left out."""
    counted = [value for value in values if value is not None and not math.isnan(value)]
    return mean(counted) if counted else None


def mean_reward(name: str, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """By this name, and the number of the answers without a reward, which the mean leaves out."""
    rewards = [row["reward"] for row in rows]
    return {name: mean_of(rewards), f"{name}_left_out": rewards.count(None)}
