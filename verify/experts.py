"""Mixtures of experts in the engine: what their weight load and their canary need.

proof.py compares their tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def layers(engine: Any) -> list[Any]:
    """What computes each layer of experts in vLLM's model; empty if it is no mixture."""
    methods = [getattr(module, "quant_method", None) for module in engine.vllm_model.modules()]
    return [method for method in methods if hasattr(method, "moe_kernel")]


@contextmanager
def packed_again(engine: Any) -> Iterator[None]:
    """Around a weight load on a CPU: vLLM packs experts when it makes the kernel of their layer,
    so the load must make it again.

    Raises: ValueError if the load does not reach a layer that had a kernel.
    """
    dropped = [layer for layer in layers(engine) if layer.moe_kernel is not None]
    for layer in dropped:
        layer.moe_kernel = None
    yield
    if any(layer.moe_kernel is None for layer in dropped):
        raise ValueError("its weight load does not reach the experts of"
                         f" {engine.config.model_type}")


def canary(engine: Any) -> tuple[Callable[[Tensor], Tensor], int]:
    """The average of |trainer - engine|, and the number of attempts with other prompts.

    In a mixture rounding can send a token to another expert, and one such token can differ by
    several nats. In 16 bits there are a few, which the median bears; in fp32 other prompts rarely
    have such a tie.
    """
    is_mixture = bool(layers(engine))
    median = is_mixture and engine.dtype != torch.float32
    return Tensor.median if median else Tensor.mean, 1 + is_mixture
