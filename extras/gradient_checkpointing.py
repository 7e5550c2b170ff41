"""`--gradient-checkpointing`: backward computes each layer again, so less memory is needed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module

from extras import Extra


class Options(Extra):
    """Memory of the backward pass."""

    gradient_checkpointing: bool = False  # Compute each layer again in backward: less memory.

    def install(self, run: Any) -> None:
        if self.gradient_checkpointing:
            run.with_model.append(checkpoint_layers)


def checkpoint_layers(model: Module) -> None:
    """Keep only the input of each layer for backward.

    Raises: ValueError if the model does not support it, or if a layer is not computed again.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})  # ValueError without support
    layers = [*outermost_layers(model)]
    if not layers:
        raise ValueError(f"gradient_checkpointing must be off: {type(model).__name__} has no layers"
                         " that support it")

    # transformers checkpoints in training mode only, and a pass without gradients needs a cache.
    def before(*_: Any) -> None:
        for layer in layers:
            layer.training = torch.is_grad_enabled()

    model.base_model.register_forward_pre_hook(before)
    # From its first part on a layer computes in evaluation mode: there is no dropout. A hook of the
    # layer itself would come too early: transformers 5.23 and newer decide after it.
    before_each_part(layers, lambda layer: setattr(layer, "training", False))
    check_recomputation(model, layers)


def outermost_layers(module: Module) -> Iterator[Module]:
    """A layer inside of another one (Zamba 2) is computed again with it, and may not decide anew
    then: torch would mix up what the two passes save.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for part in module.children():
        if isinstance(part, GradientCheckpointingLayer):
            yield part
        else:
            yield from outermost_layers(part)


def before_each_part(layers: list[Module], call: Callable[[Module], None]) -> list:
    """Call `call(layer)` before each part of a layer. The hooks are returned."""
    return [part.register_forward_pre_hook(lambda *_, layer=layer: call(layer))
            for layer in layers for part in layer.children()]


def check_recomputation(model: Module, layers: list[Module]) -> None:
    """A forward and a backward pass of 8 tokens, without a change of any `grad`.

    Raises: ValueError if backward does not compute each layer again.
    """
    computed: list[Module] = []
    hooks = before_each_part(layers, computed.append)
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    first, forward = computed[0], {*computed}
    computed.clear()
    # Gradients of the first layer's parameters need those of all other layers' inputs.
    trained = [each for each in first.parameters() if each.requires_grad]
    torch.autograd.grad(states.sum(), trained, allow_unused=True)
    for hook in hooks:
        hook.remove()
    if once := forward - {*computed}:
        import transformers

        raise ValueError("gradient_checkpointing must be off: in the backward pass transformers"
                         f" {transformers.__version__} does not compute {len(once)} of"
                         f" {len(forward)} layers of {type(model).__name__} again")
