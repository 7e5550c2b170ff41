"""Tensors of vLLM's model that no load may change: rotary tables, scales."""

from itertools import compress

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
    every = dict(model.named_buffers(remove_duplicate=False))
    written = [every[name] for name in every.keys() & loaded]
    memory = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *written)}
    once = {(tensor.data_ptr(), tensor.shape): name for name, tensor in every.items()
            if tensor.untyped_storage().data_ptr() not in memory}
    return {name: every[name] for name in once.values()}


def changed_buffers(engine: Engine, first: dict[str, Tensor]) -> set[str]:
    """The names of those that differ from the `first` ones, which were copied before any load."""
    now = buffers(engine)
    names = now.keys() & first.keys()
    flags = [(now[name] != first[name]).any() for name in names]
    changed = now.keys() ^ first.keys()  # a view of a weight that a load replaced by a copy, say
    if flags:  # in one transfer: each one would wait for the GPU
        together = torch.stack([flag.to(flags[0].device) for flag in flags])
        changed |= {*compress(names, together.tolist())}
    return changed
