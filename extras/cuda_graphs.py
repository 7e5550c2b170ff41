"""`--no-cuda-graphs`: without it, vLLM decodes on a GPU with CUDA graphs of whole steps.

They are not compiled. On an H100 they changed no mismatch and shortened generation (docs/run.md).
"""

from functools import partial
from typing import Any

import torch

from extras import Extra
from extras.shared.kv_cache import has_recurrent_layers
from vllm_cases import CANARY_PROMPTS


class Options(Extra):
    """Graphs of the engine's decode steps."""

    # Decode with CUDA graphs, without compilation. CPUs and recurrent layers have none.
    cuda_graphs: bool = True
    may_change = ("cuda_graphs",)

    def install(self, run: Any) -> None:
        if self.cuda_graphs and torch.cuda.is_available() and "engine" not in run.config.given:
            run.with_model.append(partial(add_graphs, run))


def add_graphs(run: Any, model: torch.nn.Module) -> None:
    """A graph for each number of requests that a step may have, in steps of 8.

    None for recurrent layers: with graphs vLLM refuses more slots than their cache has blocks.
    """
    if has_recurrent_layers(model):
        return
    config = run.config
    groups = config.num_prompts + config.flat().get("inflight_groups", 0)
    most = max(groups * config.group_size, config.eval_problems * config.eval_samples)
    slots = min(most, config.max_num_seqs) + CANARY_PROMPTS
    run.further |= {
        "enforce_eager": False, "compilation_config.mode": 0,
        "compilation_config.cudagraph_mode": "FULL_DECODE_ONLY",
        "compilation_config.cudagraph_capture_sizes": sorted(
            {1, 2, CANARY_PROMPTS, *range(8, slots, 8), slots})}
