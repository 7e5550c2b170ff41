"""`--no-cuda-graphs`: without it, vLLM decodes on a GPU with CUDA graphs of whole steps.

They are not compiled. On an H100 they changed no mismatch and shortened generation (docs/run.md).
"""

from typing import Any

import torch

from extras import Extra


class Options(Extra):
    """Graphs of the engine's decode steps."""

    cuda_graphs: bool = True  # Decode with CUDA graphs, without compilation; a CPU has none.
    may_change = ("cuda_graphs",)

    def install(self, run: Any) -> None:
        """A graph for each number of requests that a step may have, in steps of 8."""
        from verify import canary

        config = run.config
        if not (self.cuda_graphs and torch.cuda.is_available()) or "engine" in config.given:
            return
        groups = config.num_prompts + config.flat().get("inflight_groups", 0)
        most = max(groups * config.group_size, config.eval_problems * config.eval_samples)
        slots = min(most, config.max_num_seqs) + canary.PROMPTS
        sizes = sorted({1, 2, canary.PROMPTS, *range(8, slots, 8), slots})
        run.further |= {
            "enforce_eager": False, "compilation_config.mode": 0,
            "compilation_config.cudagraph_mode": "FULL_DECODE_ONLY",
            "compilation_config.cudagraph_capture_sizes": sizes}
