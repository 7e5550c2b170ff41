"""`--rollout-weights`: the engine samples from rounded weights, and the trainer keeps its own.

Weight-only rounding of the body's linear layers, symmetric, one scale for each output channel: a
mismatch that people choose, for speed. Here it is for its effect on the numbers; nothing is saved.
"""

from collections import UserDict
from functools import partial

import torch
from torch import Tensor
from torch.nn import Linear

from rl import Send

LARGEST_FP8 = 448.0  # of e4m3


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The nearest values of the format, in the weight's dtype: (out, in) -> (out, in).

    intK: scale * n with 2^(K - 1) - 1 steps of the scale in the largest value of a channel. fp8:
    e4m3 with a scale such that the largest is the format's.
    """
    values = weight.float()
    largest = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)  # (out, 1)
    if kind == "fp8":
        scale = largest / LARGEST_FP8
        return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
    scale = largest / (2 ** (int(kind.removeprefix("int")) - 1) - 1)
    return ((values / scale).round() * scale).to(weight.dtype)


def linear_layers(model: torch.nn.Module) -> dict[str, Linear]:
    """Those of the body, by the names of their weights; the head is not one of them."""
    head = model.get_output_embeddings()
    return {f"{name}.weight": module for name, module in model.named_modules()
            if type(module) is Linear and module is not head}


def only_linear_layers(model: torch.nn.Module, rule: str, reason: str) -> dict[str, Linear]:
    """`linear_layers`, for an option whose `rule` is that the body has no other matrices.

    Raises: ValueError if it has, embeddings aside.
    """
    layers = linear_layers(model)
    others = {type(each).__name__ for each in model.base_model.modules()
              if type(each) is not Linear and not isinstance(each, torch.nn.Embedding)
              and any(own.ndim > 1 for own in each.parameters(recurse=False))}
    if others or not layers:
        raise ValueError(f"{rule} for models with experts, recurrent layers or Conv1D (only linear"
                         f" layers {reason}), got {type(model).__name__} with"
                         f" {', '.join(sorted(others))}")
    return layers


class LazyWeights(UserDict):
    """Tensors by name, or functions that compute one each time it is asked for.

    So a load needs memory for a layer, and not for a second model.
    """

    def __getitem__(self, name: str) -> Tensor:
        held = self.data[name]
        return held() if callable(held) else held


class RoundedWeights(Send):
    """The engine gets the tensors of a policy, those of linear layers rounded.

    Raises: ValueError if the body has other matrices than those of linear layers and embeddings.
    """

    def __init__(self, model: torch.nn.Module, kind: str):
        self.kind = kind
        self.layers = only_linear_layers(model, "rollout_weights must be own", "are rounded")
        self.name = f"linear layers rounded to {kind}"

    def __call__(self, weights: dict[str, Tensor]) -> LazyWeights:
        missing = self.layers.keys() - weights.keys()
        assert not missing, f"stored in another form: {missing=}"
        return LazyWeights(weights | {
            name: partial(rounded, weights[name].detach(), self.kind) for name in self.layers})

    @torch.no_grad()
    def engine_parameters(self) -> dict[str, Tensor]:
        return {name: rounded(each.weight, self.kind) for name, each in self.layers.items()}
