"""`--lora-rank`: adapters of low rank are trained in fp32, and the model's own weights are frozen.

A linear layer with the weight W gets A (R, in) and B (out, R), and counts their product s times,
s = lora_alpha / R. B is 0 at the start. Each load sends the engine round(W + s B A), and with
`--lora-forward merged` the trainer computes with this very weight. docs/fixes.md has the reasons.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from extras.linear_layers import only_linear_layers, replaced
from report.errors import LARGEST, MANY, SMALLEST, within
from report.files import read_json
from rl import EngineWeights

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # of a folder of PEFT


@dataclass(frozen=True)
class Options:
    """Adapters of low rank, trained in place of the model's weights."""

    lora_rank: int = 0  # R: fp32 adapters B A on all linear layers of the body; 0: full training.
    lora_alpha: float = 32.0  # The product B A counts lora_alpha / R times.
    # merged: the trainer computes with the rounded weight that the engine gets. added: with the
    # model's weight and the adapter apart, as in most libraries; with vLLM a fix that is off.
    lora_forward: Literal["merged", "added"] = "merged"

    def __post_init__(self):
        within(self, 0, MANY, "lora_rank")
        within(self, SMALLEST, LARGEST, "lora_alpha")


def check(config: Any, options: Options) -> None:
    needs_adapters = config.given & {"lora_alpha", "lora_forward"}
    if needs_adapters and not config.given & {"lora_rank", "adapter"}:
        raise ValueError("lora_alpha and lora_forward need lora_rank (without it there are no"
                         " adapters), got 0; try --lora-rank 16")
    if options.lora_forward == "added" and "engine" not in config.given:
        # Counts as a fix that is off: the engine's weights are rounded, the trainer's not.
        for correction in config.given & {"tis", "reject"}:
            config.check_correction(correction, [*config.parity.off(), "lora_forward merged"])


def install(run: Any, options: Options, parts: Any) -> None:
    if not options.lora_rank:
        return

    def adapt(model: Module) -> None:
        prefix = "model."
        if "text_config" in read_json(Path(run.folder) / "config.json"):
            prefix = "model.language_model."  # a multimodal model, which has the text model inside
        adapters = Adapters(model, options, run.config.seed, prefix)
        parts.send = adapters
        parts.while_saved.append(adapters.plain_model)
        parts.after_save.append(
            lambda _, policy: write(adapters, run, policy.with_name("adapter")))
        parts.save_weights = lambda _, folder: write(adapters, run, folder)
        parts.load_weights = lambda _, folder: adapters.load(load_file(folder / TENSORS))

    parts.with_model.append(adapt)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """round(W + s B A) in the dtype of W: (out, in), (R, in), (out, R) -> (out, in)."""
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)


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
        x_grad = None
        if ctx.needs_input_grad[0]:  # not in the first layer: the embedding is frozen
            x_grad = gradient @ merge(weight, a, b, ctx.scale)
        rows = x.flatten(0, -2).float()  # (N, in)
        outer = ctx.scale * gradient.flatten(0, -2).float()  # (N, out)
        return x_grad, None, None, (outer @ b).T @ rows, outer.T @ (rows @ a.T), None


class AdaptedLinear(Module):
    """A linear layer with an adapter. It holds the layer's own parameters under their names."""

    def __init__(self, plain: Linear, lora: Options, generator: torch.Generator):
        super().__init__()
        self.plain = [plain]  # in a list, so that it is no submodule
        self.weight, self.bias = plain.weight, plain.bias
        self.scale = lora.lora_alpha / lora.lora_rank
        self.merges = lora.lora_forward == "merged"
        width, device = plain.in_features, plain.weight.device
        a = 2 * torch.rand(lora.lora_rank, width, generator=generator) - 1  # on the CPU: the same
        self.lora_A = Parameter((a * width**-0.5).to(device))
        self.lora_B = Parameter(torch.zeros(plain.out_features, lora.lora_rank, device=device))

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight that the engine gets: (out, in)."""
        return merge(self.weight, self.lora_A, self.lora_B, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.merges:
            return MergedLinear.apply(
                x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        added = self.scale * (x.float() @ self.lora_A.T @ self.lora_B.T)
        return (linear(x, self.weight, self.bias) + added).to(x.dtype)


class Adapters(EngineWeights):
    """Freezes the model, and gives each linear layer of its body an adapter.

    The engine gets the model's tensors, with merged layers. Raises: ValueError by
    `only_linear_layers`.
    """

    def __init__(self, model: Module, lora: Options, seed: int, prefix: str = "model."):
        """`prefix`: what the names of layers have for PEFT in place of `model.`."""
        generator = torch.Generator().manual_seed(seed)
        plain, which = only_linear_layers(model, "lora_rank must be 0", "get adapters")
        model.requires_grad_(False)
        self.model = model
        self.prefix = prefix
        self.layers = {name.removesuffix(".weight"): AdaptedLinear(layer, lora, generator)
                       for name, layer in plain.items()}
        for name, adapted in self.layers.items():
            model.set_submodule(name, adapted)
        self.name = f"{lora.lora_forward} adapters of rank {lora.lora_rank} on {which}"

    def __call__(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        own = {name: each for name, each in weights.items() if ".lora_" not in name}
        return replaced(own, self.layers.values(), AdaptedLinear.merged)

    def in_base(self, name: str) -> str:
        """A layer's name for PEFT."""
        return name.replace("model.", self.prefix, 1)

    def tensors(self) -> dict[str, Tensor]:
        """The matrices by their names in TENSORS."""
        return {f"base_model.model.{self.in_base(name)}.{side}.weight": getattr(layer, side).data
                for name, layer in self.layers.items() for side in ("lora_A", "lora_B")}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the matrices of TENSORS. Raises: ValueError if they do not fit."""
        parameters = self.tensors()
        missing, further = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
        if missing or further:
            raise ValueError(f"{TENSORS} must have A and B of the linear layers that target_modules"
                             " names (head and embeddings have no adapters), it lacks"
                             f" {sorted(missing)[:2]} and has {sorted(further)[:2]} besides")
        for name, parameter in parameters.items():
            tensor = tensors[name]
            if tensor.shape != parameter.shape:
                raise ValueError(f"{name} must have the shape {[*parameter.shape]}, got"
                                 f" {[*tensor.shape]}")
            if not tensor.isfinite().all():
                raise ValueError(f"{name} must be finite, got NaN or an infinity")
            parameter.copy_(tensor)

    def keep_only(self, names: set[str]) -> None:
        """Remove the adapters of all other layers."""
        for name in self.layers.keys() - names:
            self.model.set_submodule(name, self.layers.pop(name).plain[0])
        self.name += f", used on {len(self.layers)} of them"

    @contextmanager
    def plain_model(self) -> Iterator[None]:
        """Inside, the model has merged weights, in host memory, and no adapters."""
        own = {name: layer.weight.data for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            layer.weight.data = layer.merged().cpu()
            self.model.set_submodule(name, layer.plain[0])
        yield
        for name, layer in self.layers.items():
            layer.weight.data = own[name]
            self.model.set_submodule(name, layer)


def write(adapters: Adapters, run: Any, folder: Path) -> None:
    """A folder of PEFT: both files with the adapters as they are."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": run.config.model, "r": run.config.lora.lora_rank,
              "lora_alpha": run.config.lora.lora_alpha,
              "target_modules": sorted(map(adapters.in_base, adapters.layers))}
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    (folder / TENSORS).write_bytes(save(adapters.tensors(), {"format": "pt"}))
