"""Master weights and moments in host memory except during an update (`--offload-optimizer`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl import Optimizer

LARGEST_SLAB = 2**30  # fp32 numbers


class OffloadedOptimizer(Optimizer):
    """An `Optimizer` with its masters and moments in host memory (pinned) between updates.

    fp32 masters are the parameters themselves, which the engine's load needs: they stay.
    """

    def __init__(self, model: torch.nn.Module, weight_decay: float):
        super().__init__(model, weight_decay)
        self.device = next(model.parameters()).device
        # Pinned once: pinning takes longer than copying.
        self.host = host_views(self._held(), self.device)
        self._move(to_host=True)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._move(to_host=False)
        yield
        self._move(to_host=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._move(to_host=True)

    def _move(self, to_host: bool) -> None:
        for (master, name), tensor in self._held().items():
            if to_host:
                moved = self.host[master, name].copy_(tensor)
            else:
                moved = tensor.to(self.device, non_blocking=True, copy=True)
            if name == "master":
                master.data = moved
            else:
                self.adamw.state[master][name] = moved

    def _held(self) -> dict[tuple[Tensor, str], Tensor]:
        """The tensors that move, by their master and name."""
        held = {(master, name): tensor for master in self.masters
                for name, tensor in self.adamw.state[master].items()}
        return held | {(master, "master"): master.data for _, master in self.rounded}


def host_views(tensors: dict[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    """Uninitialised host memory for fp32 tensors, as views of a few slabs.

    torch rounds pinned memory up to powers of two. The largest tensors come first, and later ones
    fill the gaps. A slab has at most 4 GiB, unless one tensor is larger.
    """
    free: list[Tensor] = []  # the free rest of each slab
    views = {}
    left = sum(tensor.numel() for tensor in tensors.values())
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        size = tensor.numel()
        slab = next((index for index, rest in enumerate(free) if len(rest) >= size), len(free))
        if slab == len(free):
            usual = min(LARGEST_SLAB, 1 << (left.bit_length() - 1))
            room = max(1 << (size - 1).bit_length(), usual)
            free.append(torch.empty(room, dtype=torch.float32, pin_memory=device.type == "cuda"))
        views[key] = free[slab][:size].view(tensor.shape)
        free[slab] = free[slab][size:]
        left -= size
    return views
