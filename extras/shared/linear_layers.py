"""The linear layers of a body, and weights for the engine that are computed when they are sent.

Shared by extras/lora.py and extras/rounded_weights.py.
"""

from collections import UserDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Conv1d, Embedding, Linear, Module


def only_linear_layers(
    model: Module, rule: str, what_they_get: str
) -> tuple[dict[str, Linear], str]:
    """The linear layers of the body, by the names of their weights, and their count for the audit.

    Embeddings, and the short convolutions before a recurrent state, stay as they are. Raises:
    ValueError if the body has other matrices, such as experts; it begins with the option's `rule`.
    """
    head = model.get_output_embeddings()
    layers = {f"{name}.weight": module for name, module in model.named_modules()
              if type(module) is Linear and module is not head}
    kinds = {type(each) for each in model.base_model.modules()
             if any(own.ndim > 1 for own in each.parameters(recurse=False))} - {Linear}
    left = sorted(kind.__name__ for kind in kinds if issubclass(kind, Conv1d))
    others = sorted(kind.__name__ for kind in kinds if not issubclass(kind, (Conv1d, Embedding)))
    if others or not layers:
        raise ValueError(f"{rule} for models with matrices of other classes than Linear, such as"
                         f" experts (only linear layers {what_they_get}), got"
                         f" {type(model).__name__} with {', '.join(others)}")
    which = f"{len(layers)} linear layers"
    if left:
        which += f" (not {', '.join(left)})"
    return layers, which


class LazyWeights(UserDict):
    """Tensors by name, or functions that compute one each time it is asked for.

    So a load needs memory for a layer, and not for a second model.
    """

    def __getitem__(self, name: str) -> Tensor:
        held = self.data[name]
        return held() if callable(held) else held


def replaced(
    weights: dict[str, Tensor], layers: Iterable[Any], of: Callable[[Any], Tensor]
) -> LazyWeights:
    """The tensors that the engine gets, `of(layer)` in place of the weight of each layer.

    A weight is found by its memory, because checkpoints have other names (Nemotron-H). Raises:
    ValueError if a checkpoint stores it in another form.
    """
    changes = {each.weight.data_ptr(): partial(of, each) for each in layers}
    held = {name: changes.get(each.data_ptr(), each) for name, each in weights.items()}
    if changes.keys() - {each.data_ptr() for each in weights.values()}:
        raise ValueError("rollout_weights must be own and lora_rank 0 (checkpoints of this class"
                         " store linear layers in another form)")
    return LazyWeights(held)
