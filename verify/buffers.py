"""Tensors of vLLM's model that no load may change: rotary tables, scales."""

from itertools import compress

import torch
from torch import Tensor

from engine_adapter import Engine
from verify.proof import renaming
from vllm_cases import WeightLoadError


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


class Buffers:
    """Copies of the first ones, before any load."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.first = {name: tensor.clone() for name, tensor in buffers(engine).items()}

    def check(self) -> None:
        """Raises: WeightLoadError that names those which differ from the first ones."""
        now, first = buffers(self.engine), self.first
        # Also a new name: a buffer that was a view of a weight until a load replaced it by a copy.
        changed = now.keys() ^ first.keys()
        names = now.keys() - changed
        differ = [(now[name] != first[name]).any() for name in names]
        if differ:  # one transfer for all: each would wait for the GPU
            flags = torch.stack([each.to(differ[0].device) for each in differ])
            changed |= {*compress(names, flags.tolist())}
        if changed:
            raise WeightLoadError(f"after load {self.engine.weight_version} buffers of the engine"
                                  " differ from those at its start:"
                                  f" {', '.join(sorted(changed))}")
