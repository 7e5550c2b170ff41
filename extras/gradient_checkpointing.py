"""`--gradient-checkpointing`: backward computes each layer again, so less memory is needed."""

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Keep only the input of each layer for backward.

    Raises: ValueError if the model does not support it.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})  # ValueError without support
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing must be off: {type(model).__name__} has no layers"
                         " that support it")

    # transformers checkpoints in training mode only, and a forward pass without gradients needs a
    # cache. Once it has decided, the layer computes in evaluation mode: there is no dropout.
    def before(*_: Any) -> None:
        for layer in layers:
            layer.training = torch.is_grad_enabled()

    model.base_model.register_forward_pre_hook(before)
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", False))
