"""Master weights and moments in host memory except during an update (`--offload-optimizer`).

Its tests pass on a GPU (H200); its speed there has not been measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from extras import Extra
from rl import Optimizer


class Options(Extra):
    """Memory of the optimizer."""

    offload_optimizer: bool = False  # Masters and moments in host memory between updates.

    def install(self, run: Any) -> None:
        if not self.offload_optimizer:
            return
        if not torch.cuda.is_available():
            raise ValueError("offload_optimizer must not be given without a GPU (it would do"
                             " nothing)")
        run.optimizer = OffloadedOptimizer


class OffloadedOptimizer(Optimizer):
    """An `Optimizer` with its masters and moments in host memory between updates.

    fp32 masters are the parameters themselves, which the engine's load needs: they stay.
    """

    def __init__(self, model: torch.nn.Module, grad_clip: float = 1.0):
        # Made there: at the start of a run the engine is awake, so the GPU has no room for them.
        super().__init__(model, grad_clip, torch.device("cpu"))
        self.device = next(model.parameters()).device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._move(self.device)
        yield
        self._move(torch.device("cpu"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for state in self.adamw.state.values():
            for name, tensor in state.items():
                state[name] = tensor.to(device, copy=True)
        for _, master in self.rounded:
            master.data = master.data.to(device, copy=True)
