"""`--cuda-graphs`: vLLM decodes with CUDA graphs of whole steps, which are not compiled."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    """Graphs of the engine's decode steps."""

    cuda_graphs: bool = False  # Decode with CUDA graphs, without compilation; docs/run.md.


def check_machine(config: Any, options: Options) -> None:
    if options.cuda_graphs and not torch.cuda.is_available():
        raise ValueError("cuda_graphs must not be given without a GPU (it would do nothing)")


def install(run: Any, options: Options, parts: Any) -> None:
    """A graph for each number of requests that a step may have, in steps of 8."""
    from verify import canary

    if options.cuda_graphs:
        slots = parts.engine["max_num_seqs"] + canary.PROMPTS
        sizes = sorted({1, 2, canary.PROMPTS, *range(8, slots, 8), slots})
        parts.engine.setdefault("further", {}).update({
            "enforce_eager": False, "compilation_config.mode": 0,
            "compilation_config.cudagraph_mode": "FULL_DECODE_ONLY",
            "compilation_config.cudagraph_capture_sizes": sizes})
