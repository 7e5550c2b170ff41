"""Mixtures of experts in the engine: what their weight load and their canary need.

proof.py compares their tensors. It imports nothing of ours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def packed_again(layers: list[Any], model_type: str) -> Iterator[None]:
    """Around a weight load on a CPU: vLLM packs experts when it makes the kernel of their layer,
    so the load must make it again.

    Raises: ValueError if the load does not reach a layer that had a kernel.
    """
    dropped = [layer for layer in layers if layer.moe_kernel is not None]
    for layer in dropped:
        layer.moe_kernel = None
    yield
    if any(layer.moe_kernel is None for layer in dropped):
        raise ValueError(f"its weight load does not reach the experts of {model_type}")


def canary(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], int]:
    """The average of |trainer - engine|, and the number of attempts with other prompts.

    Rounding can send a token to another expert, and one such token can differ by several nats. In
    16 bits there are a few, which the median bears; in fp32 other prompts rarely have such a tie.
    """
    return (Tensor.mean if dtype == torch.float32 else Tensor.median), 2
