"""Engines that sleep as on a GPU: weights and KV cache, which level 2 loses, are overwritten.

vLLM's own engine core pauses and resumes, and clears its caches. Its worker, which would release memory, is replaced.
"""

from collections.abc import Callable

import torch

from engine_adapter import Engine

GARBAGE = 3e4  # in the KV cache: a CPU's attention multiplies unused places by 0, and NaN would stay NaN


def install(patch: Callable = setattr, value: float | None = float("nan")) -> dict:
    """All engines that start from now on sleep so. Returns a dict that tests read and change: `value`, which weights
    get in a sleep (None: they stay), and `count`, the number of sleeps.
    """
    state = {"value": value, "count": 0}
    usual = Engine.__init__

    def start(engine: Engine, *given, **named) -> None:
        usual(engine, *given, **named)
        engine.on_gpu = True
        worker = engine.core.model_executor.driver_worker.worker

        @torch.no_grad()
        def sleep(level: int) -> None:
            assert level == 2
            state["count"] += 1
            if state["value"] is None:
                return
            for parameter in engine.vllm_model.parameters():
                parameter.fill_(state["value"])
            for cache in engine.runner.kv_caches:
                cache.fill_(GARBAGE)
            for module in engine.vllm_model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None  # a packed copy, which only the CPU build has

        worker.sleep = sleep
        worker.wake_up = lambda tags: None

    patch(torch.cuda, "synchronize", lambda: None)
    patch(Engine, "__init__", start)
    return state
