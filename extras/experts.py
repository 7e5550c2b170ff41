"""Mixtures of experts: what the proof of a load compares of them on a CPU."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def held_experts(
    path: str, module: Any, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of a mixture's layer: name, held, sent.

    They are packed again from what was sent, because no product reads them back exactly. On a GPU
    there are none: experts have the layouts of their kernels.
    """
    method = module.quant_method
    kernel = getattr(method.moe_kernel, "fused_experts", None)
    kernel = kernel or getattr(method, "cpu_fused_moe", None)  # vLLM 0.26
    if not hasattr(kernel, "isa"):
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts = len(module.w13_weight)
    for gate, up, down in PARTS:
        if f"{path}.experts.0.{gate}.weight" not in weights:
            continue
        stacked = [torch.stack([weights[f"{path}.experts.{expert}.{part}.weight"]
                                for expert in range(experts)]) for part in (gate, up, down)]
        inner = module.w2_weight.numel() // (experts * stacked[2].shape[1])  # vLLM pads it
        more = inner - stacked[2].shape[2]
        both = torch.cat([pad(each, (0, 0, 0, more)) for each in stacked[:2]], dim=1)
        down_rows = pad(stacked[2], (0, more))
        for held, sent in ((module.w13_weight, both), (module.w2_weight, down_rows)):
            yield f"{path}.experts", held, cpu_prepack_moe_weight(sent, kernel.isa)
