"""Seconds and memory of the phases of a step."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch

PEAKS = "generate", "sleep", "update"


def peak_gib() -> float:
    """Largest memory in use in a phase of `Clock`, in GiB: of this process, or of the GPU."""
    if torch.cuda.is_available():  # torch keeps its blocks until `Engine.wake`
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    # Some sandboxes have no VmHWM.
    return int(peak[1] if peak else getrusage(RUSAGE_SELF).ru_maxrss) / 2**20


@dataclass
class Clock:
    """Seconds of the step and of its phases, and the peak memory of those in PEAKS."""

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
        if phase in PEAKS:
            self.phases[f"{phase}_gib"] = peak_gib()

    def metrics(self) -> dict[str, float]:
        return self.phases | {"step_s": time.perf_counter() - self.started}
