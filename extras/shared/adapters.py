"""Adapters that PEFT puts into the model, and folders that PEFT reads; for extras/lora.py.

Here is what PEFT lacks: a forward pass with the very weight that the engine gets.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners import lora
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict
from torch.nn.functional import linear

from extras.lora import Options
from extras.shared.linear_layers import only_linear_layers, replaced
from rl import EngineWeights

TENSORS = "adapter_model.safetensors"  # of a folder of PEFT


class MergedLinear(torch.autograd.Function):
    """x round(W + s B A)^T + bias; the gradient takes the rounding for the identity.

    So A and B are what fp32 masters are in full training: dB = s dW A^T, dA = s B^T dW. The merged
    weight is computed again in backward, and dW, (out, in), never exists.

    Shapes: x (..., in), W (out, in), bias (out,) or None, A (R, in), B (out, R) -> (..., out).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor,
                scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return linear(x, merge(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        x_grad = gradient @ merge(weight, a, b, ctx.scale)
        rows = x.flatten(0, -2).float()  # (N, in)
        outer = ctx.scale * gradient.flatten(0, -2).float()  # (N, out)
        return x_grad, None, None, (outer @ b).T @ rows, outer.T @ (rows @ a.T), None


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """round(W + s B A) in the dtype of W: (out, in), (R, in), (out, R) -> (out, in)."""
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)


def factors(layer: lora.Linear) -> tuple[Tensor, Tensor, float]:
    """A, B and s."""
    return layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"]


@torch.no_grad()
def merged(layer: lora.Linear) -> Tensor:
    """The weight that the engine gets: (out, in)."""
    return merge(layer.weight, *factors(layer))


class Added(lora.Linear):
    """A linear layer with an adapter beside its weight. In a state_dict it is without."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        return self.base_layer.state_dict(*args, **options)


class Merged(Added):
    """A linear layer with an adapter that is merged into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return MergedLinear.apply(x, self.weight, self.bias, *factors(self))


class Adapters(EngineWeights):
    """Freezes the model, and gives all linear layers of its body adapters in fp32.

    The engine gets the model's tensors, with merged layers. Raises: ValueError by
    `only_linear_layers`.
    """

    def __init__(self, model: Module, options: Options, seed: int, is_part: bool = False):
        """`is_part`: of a multimodal model, and PEFT gets the names of the whole."""
        _, which = only_linear_layers(model, "lora_rank must be 0", "get adapters")
        model.requires_grad_(False)
        self.whole = ModuleDict({model.base_model_prefix: model.base_model})  # it has no head
        if is_part:
            self.whole = ModuleDict({"model": ModuleDict({"language_model": model.base_model})})
        self.config = peft.LoraConfig(r=options.lora_rank, lora_alpha=options.lora_alpha,
                                      target_modules="all-linear", task_type="CAUSAL_LM")
        kind = Merged if options.lora_forward == "merged" else Added
        self.config._register_custom_module({Linear: kind})
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(self.config, self.whole)
        self.layers = {name: module for name, module in self.whole.named_modules()
                       if isinstance(module, kind)}
        for layer in self.layers.values():
            layer.lora_A.float()
            layer.lora_B.float()
        self.config.target_modules = sorted(self.layers)
        self.name = (f"{options.lora_forward} adapters of rank {options.lora_rank} on"
                     f" {len(self.layers)} of {which}")

    def __call__(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return replaced(weights, self.layers.values(), merged)

    def tensors(self) -> dict[str, Tensor]:
        """A and B of each layer by their names in a folder of PEFT, without the adapter's name."""
        return {f"base_model.model.{name.replace('.default', '')}": each.data
                for name, each in self.whole.named_parameters() if ".lora_" in name}

    def load(self, model: Module, folder: Path) -> None:
        """Take the values of a folder that `save` has written."""
        saved = load_file(folder / TENSORS)
        for name, each in self.tensors().items():
            each.copy_(saved[name])

    def save(self, run: Any, model: Module, folder: Path) -> None:
        """A folder of PEFT."""
        self.config.save_pretrained(folder)
        (folder / TENSORS).write_bytes(save(self.tensors(), {"format": "pt"}))

    def save_merged(
        self, save: Callable[[Any, Module, Path], None], run: Any, model: Module, folder: Path
    ) -> None:
        """What `save` writes of a model with merged weights, in host memory; beside it adapter/."""
        own = {layer: layer.weight.data for layer in self.layers.values()}
        for layer in own:
            layer.weight.data = merged(layer).cpu()
        save(run, model, folder)
        for layer, weight in own.items():
            layer.weight.data = weight
        self.save(run, model, folder.with_name("adapter"))
