"""`--rollout-weights`: the engine samples from rounded weights, and the trainer keeps its own.

Weight-only rounding of the body's linear layers, symmetric, one scale for each output channel: a
mismatch that people choose, for speed. Here it is for its effect on the numbers; nothing is saved.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Linear

from extras import Extra
from extras.shared.linear_layers import LazyWeights, only_linear_layers, replaced
from rl import EngineWeights

# The largest value of each format, in steps of its scale; fp8 is e4m3.
LARGEST = {"int8": 127, "fp8": 448, "int6": 31, "int4": 7, "int3": 3}


class Options(Extra):
    """Rounded weights in the engine."""

    # Format of the engine's linear layers; the trainer keeps its own weights. A mismatch by choice
    # and no fault: corrections are for it. It saves nothing here.
    rollout_weights: Literal[("own", *LARGEST)] = "own"

    def check(self, config: Any) -> None:
        if self.rollout_weights != "own" and config.given & {"engine", "lora_rank"}:
            raise ValueError("rollout_weights must be own with engine transformers, and with"
                             " lora_rank (only full training with engine vllm rounds what it"
                             f" sends), got {self.rollout_weights}")

    def install(self, run: Any) -> None:
        if self.rollout_weights != "own":
            run.not_stated.add("weights")
            run.with_model.append(lambda model: setattr(
                run, "send", RoundedWeights(model, self.rollout_weights)))


class RoundedWeights(EngineWeights):
    """The engine gets the tensors of a policy, those of linear layers rounded.

    Raises: ValueError by `only_linear_layers`.
    """

    def __init__(self, model: torch.nn.Module, kind: str):
        self.kind = kind
        self.layers, which = only_linear_layers(model, "rollout_weights must be own", "are rounded")
        self.name = f"{which} rounded to {kind}"

    def rounded(self, layer: Linear) -> Tensor:
        return rounded(layer.weight.detach(), self.kind)

    def __call__(self, weights: dict[str, Tensor]) -> LazyWeights:
        return replaced(weights, self.layers.values(), self.rounded)

    def engine_parameters(self) -> dict[str, Tensor]:
        return {name: self.rounded(each) for name, each in self.layers.items()}


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The nearest values of the format, in the weight's dtype: (out, in) -> (out, in).

    The scale is such that the largest value of a channel is the format's: intK has 2^(K - 1) - 1
    steps up to it, and fp8 rounds as e4m3.
    """
    values = weight.float()
    largest = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)  # (out, 1)
    scale = largest / LARGEST[kind]
    steps = values / scale
    nearest = steps.to(torch.float8_e4m3fn).float() if kind == "fp8" else steps.round()
    return (nearest * scale).to(weight.dtype)
