"""Matrix products of 16-bit tensors on a CPU that has no instructions for them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL")  # the kernels below live as long as it does
SUPPORT = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}


def widen_if_slow(dtype: str) -> str | None:
    """`widen` on a CPU without instructions for products of this dtype, which is then returned."""
    if torch.cuda.is_available() or dtype not in SUPPORT:
        return None
    if getattr(torch.ops.mkldnn, SUPPORT[dtype])():
        return None
    widen(dtype)
    return dtype


def widen(dtype: str) -> None:
    """From now on products of this dtype are computed in float32 and rounded.

    The instructions do the same. PyTorch's replacement for them takes 15 times as long.
    """
    for name in ("mm", "bmm", "addmm"):
        product = partial(_rounded, getattr(torch.ops.aten, name).out, getattr(torch, dtype))
        LIBRARY.impl(name, product, "CPU", allow_override=True)


def _rounded(product: Any, narrow: torch.dtype, *tensors: Tensor, **scalars: float) -> Tensor:
    left = tensors[-2]
    wide = [each.float() if each.dtype == narrow else each for each in tensors]
    out = left.new_empty(0, dtype=wide[-1].dtype)
    return product(*wide, **scalars, out=out).to(left.dtype)
