"""Engines that sleep as on a GPU: weights and KV cache, which level 2 loses, are overwritten.

vLLM's own engine core pauses and resumes, and clears its caches. Its worker, which would release memory, is replaced.
"""


import torch

from engine_adapter import Engine

GARBAGE = 3e4  # in the KV cache: a CPU's attention multiplies unused places by 0, and NaN would stay NaN


def install(patch=setattr) -> list[Engine]:
    """All engines that start from now on sleep so. Each sleep adds its engine to the list."""
    sleeps, usual = [], Engine.__init__

    def start(engine, *given, **named):
        usual(engine, *given, **named)
        engine.on_gpu = True
        worker = engine.core.model_executor.driver_worker.worker

        @torch.no_grad()
        def sleep(level):
            assert level == 2
            sleeps.append(engine)
            for parameter in engine.vllm_model.parameters():
                parameter.fill_(torch.nan)
            for cache in engine.runner.kv_caches:
                cache.fill_(GARBAGE)
            for module in engine.vllm_model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None  # a packed copy, which only the CPU build has

        worker.sleep = sleep
        worker.wake_up = lambda tags: None

    patch(torch.cuda, "synchronize", lambda: None)
    patch(Engine, "__init__", start)
    return sleeps
