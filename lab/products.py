"""Matrix products of 16-bit tensors on a CPU that has no instructions for them."""

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("aten", "IMPL")  # the kernels below live as long as it does
SUPPORT = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}


def are_slow(dtype: str) -> bool:
    """Whether a CPU computes here, and products of this dtype without instructions of its own."""
    if torch.cuda.is_available() or dtype not in SUPPORT:
        return False
    return not getattr(torch.ops.mkldnn, SUPPORT[dtype])()


def widen(dtype: str) -> None:
    """From now on products of this dtype are computed in float32 and rounded.

    The instructions do the same. PyTorch's replacement for them takes 15 times as long.
    """
    narrow = getattr(torch, dtype)
    for name in ("mm", "bmm", "addmm"):
        kernel = _kernel(getattr(torch.ops.aten, name).out, narrow)
        LIBRARY.impl(name, kernel, "CPU", allow_override=True)


def _kernel(out_variant: Any, narrow: torch.dtype) -> Any:
    def kernel(*tensors: Tensor, **scalars: float) -> Tensor:
        left = tensors[-2]
        wide = [each.float() if each.dtype == narrow else each for each in tensors]
        product = out_variant(*wide, **scalars, out=left.new_empty(0, dtype=wide[-1].dtype))
        return product.to(left.dtype)

    return kernel
