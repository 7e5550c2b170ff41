"""Seconds and memory of the phases of a step."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch


def memory_gib(*, peak: bool = False) -> float:
    """Memory in use (`peak`: in a phase of `Clock`), in GiB: of this process, or of the GPU."""
    if torch.cuda.is_available():  # the peak too: torch keeps its blocks until `Engine.wake`
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    # Some sandboxes have no VmHWM.
    return int(found[1] if found else getrusage(RUSAGE_SELF).ru_maxrss) / 2**20


@dataclass
class Clock:
    """Seconds and peak memory of each phase, seconds of the step, memory at its end."""

    started: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with suppress(OSError):  # where it is forbidden, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the CPU's peak, begins anew
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.phases[f"{phase}_s"] = time.perf_counter() - started
        self.phases[f"{phase}_gib"] = memory_gib(peak=True)

    def figures(self) -> dict[str, float]:
        step_s = time.perf_counter() - self.started
        return self.phases | {"step_s": step_s, "memory_gib": memory_gib()}
