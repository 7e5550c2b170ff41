"""Seconds of the phases of a step, and a GPU's memory in them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PEAKS = "generate", "sleep", "update"


@dataclass
class Clock:
    """Seconds of the step and of its phases; on a GPU the peak memory of those in PEAKS, in GiB."""

    started: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self.phases[f"{phase}_s"] = time.perf_counter() - started
        if on_gpu and phase in PEAKS:  # torch keeps its blocks until `Engine.wake`
            free, total = torch.cuda.mem_get_info()
            self.phases[f"{phase}_gib"] = (total - free) / 2**30

    def metrics(self) -> dict[str, float]:
        return self.phases | {"step_s": time.perf_counter() - self.started}
