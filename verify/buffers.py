"""Tensors of vLLM's model that no load may change: rotary tables, scales."""

import torch
from torch import Tensor

from engine_adapter import Engine
from verify.proof import renaming


def buffers(engine: Engine) -> dict[str, Tensor]:
    """By name, each once: all layers share a rotary table. One that shares its memory with a weight
    is not included.
    """
    model = engine.vllm_model
    loaded = set(map(renaming(model), engine.tensor_names))
    # Under all their names: a mixture's experts hold its gate too.
    written = [tensor for name, tensor in model.named_buffers(remove_duplicate=False)
               if name in loaded]
    memory = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *written)}
    return {name: tensor for name, tensor in model.named_buffers()
            if tensor.untyped_storage().data_ptr() not in memory}


def changed_buffers(engine: Engine, first: dict[str, Tensor]) -> set[str]:
    """The names of those that differ from the `first` ones, which were copied before any load."""
    now = buffers(engine)
    same = {name for name in now.keys() & first.keys() if torch.equal(now[name], first[name])}
    # Also a new name: a buffer that was a view of a weight until a load replaced it by a copy.
    return (now.keys() | first.keys()) - same
