"""`--prefix-cache`: vLLM's prefix cache, which finds no block of other weights.

On by default: the answers to a prompt share its keys and values, which changes values at most by
rounding (docs/fixes.md).
"""

from functools import partial
from typing import Any, Literal

import torch

from extras import Extra
from extras.shared.kv_cache import has_recurrent_layers


class Options(Extra):
    """A KV cache that requests share."""

    # versioned: keyed by the weight version, where prompts are longer than a block (on a CPU of 32
    # tokens, if block_size is not given), but not with recurrent layers. off: each answer computes
    # its prompt. Without uncached_runtime the cache is V1's own.
    prefix_cache: Literal["versioned", "off"] = "versioned"

    def check(self, config: Any) -> None:
        if self.prefix_cache == "off" and not config.parity.uncached_runtime:
            raise ValueError("prefix_cache must not be off without uncached_runtime (which switches"
                             " V1's own cache on); try --variants async-scheduling")

    def install(self, run: Any) -> None:
        if self.prefix_cache == "versioned" and run.config.parity.uncached_runtime:
            run.with_model.append(partial(share_prompts, run))


def share_prompts(run: Any, model: torch.nn.Module) -> None:
    """The weight version enters the key of each block (vLLM's `cache_salt`), and the number of
    steps and evaluations: a run must find no block that a resumed run lacks.
    """
    config = model.config.get_text_config()
    on_gpu = torch.cuda.is_available()
    uncached_by_vllm = hasattr(config, "kv_lora_rank") and not on_gpu
    # vLLM's own choice on a GPU is 16 or more; 32 is the smallest of its CPU build.
    block_size = run.config.block_size or (None if on_gpu else 32)
    too_short = max(map(len, run.task.prompts)) <= (block_size or 16)
    of_vllm = run.engine_kind.copies_weights
    if has_recurrent_layers(model) or uncached_by_vllm or too_short or not of_vllm:
        return
    run.further["enable_prefix_caching"] = True
    done: list[Any] = []  # steps and evaluations
    for functions in run.step_metrics, run.evaluations:
        functions.append(lambda each: done.append(1) or {})
    run.engine |= {"cache_salt": lambda version: f"{version}, {len(done)}",
                   "block_size": block_size}
