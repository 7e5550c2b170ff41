"""The audit: settings as they are in force, read back from the live engine.

Each argument that `engine_adapter` or an option asks for has its reader here, by its last part.
"""

from typing import Any

import torch

from engine_adapter import Engine
from rl import Policy
from verify.parity import head_dtype, name_of


def graph_mode(engine: Engine) -> str:
    """As configured if decode replays graphs; NONE if each of its steps calls the model."""
    calls = []
    hook = engine.vllm_model.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.sample_beside([[0, 0]], 2)
    hook.remove()
    if len(calls) > 1:  # more than the prompt's step
        return "NONE"
    return engine.llm.vllm_config.compilation_config.cudagraph_mode.name


READERS = {
    "logprobs_mode": lambda engine: engine.runner.sampler.logprobs_mode,
    "enable_prefix_caching": lambda engine: engine.core.scheduler.kv_cache_manager.enable_caching,
    "async_scheduling": lambda engine: "Async" in type(engine.core.scheduler).__name__
    and engine.core.batch_queue is not None,
    "head_dtype": lambda engine: head_dtype(engine.core.model_executor.driver_worker.worker),
    "max_logprobs": lambda engine: engine.llm.vllm_config.model_config.max_logprobs,
    "generation_config": lambda engine: engine.llm.vllm_config.model_config.generation_config,
    # Model runner V1 of 0.32 has no cascade attention.
    "disable_cascade_attn": lambda engine:
        not getattr(engine.runner, "cascade_attn_enabled", False),
    "model_dtype": lambda engine: name_of(next(engine.vllm_model.parameters()).dtype),
    "cudagraph_mode": graph_mode,
}  # fmt: skip
# Not observed: from the configuration alone.
ECHOED = ["max_logprobs", "generation_config"]
# cudagraph_mode shows whether graphs are in use.
NOT_READ = {"enforce_eager", "mode", "cudagraph_capture_sizes"}


class AuditError(RuntimeError):
    """A requested setting is not in force, or a side's distribution is not the stated one."""


def audit(engine: Engine) -> dict[str, Any]:
    """What is in force, read from the live engine's objects and arithmetic.

    Raises: AuditError that names each setting that is not as wanted, and each that has no reader.
    """
    from vllm.compilation.counter import compilation_counter

    config, own_dtype = engine.llm.vllm_config, name_of(engine.dtype)
    model = config.model_config
    wanted = {"cudagraph_mode": "NONE", "model_dtype": own_dtype}
    wanted |= {name.rpartition(".")[2]: value for name, value in engine.wanted.items()}
    if unpaired := (wanted.keys() - NOT_READ) ^ READERS.keys():
        raise AuditError("each setting must have a reader in READERS, and each reader a setting"
                         f" (None leaves its value to vLLM), {', '.join(sorted(unpaired))} has not")
    in_force = {name: read(engine) for name, read in READERS.items()}
    if wanted["head_dtype"] == "model":
        wanted["head_dtype"] = own_dtype
    wrong = [f"{name} is {value!r}, not {wanted[name]!r}" for name, value in in_force.items()
             if wanted[name] is not None and value != wanted[name]]
    if in_force["cudagraph_mode"] != wanted["cudagraph_mode"]:
        wrong.append("try --no-cuda-graphs")
    if wrong:
        raise AuditError(f"requested but not in force in vLLM {engine.vllm_version}:"
                         f" {'; '.join(wrong)} ({engine.parity})")
    return in_force | {
        "vllm": engine.vllm_version,
        "runner": f"{type(engine.runner).__module__}.{type(engine.runner).__name__}",
        "attention_backend": sorted({type(layer.impl).__name__ for layer in
                                     engine.vllm_model.modules() if hasattr(layer, "impl")}),
        # By these torch and vLLM choose kernels.
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, bf16 in AVX-512"
               f" {torch.cpu._is_avx512_bf16_supported()}, AMX tiles"
               f" {torch.cpu._is_amx_tile_supported()}",
        "block_size": config.cache_config.block_size,
        "max_model_len": model.max_model_len,
        "cuda_graphs": compilation_counter.num_cudagraph_captured,
        "echoed": [*ECHOED, *engine.settings],  # an engine's own say, too
        "sleep": "level 2" if model.enable_sleep_mode else "state only, memory is not released",
    }


def of_trainer(policy: Policy) -> dict[str, str | float]:
    """What is in force on the trainer's side."""
    return {
        "attention": policy.model.config._attn_implementation,
        "body": policy.body.__name__,
        "engine_gets": policy.send.name,
        "model_dtype": name_of(policy.model.dtype),
        "head_dtype": name_of(policy.head.dtype),
        "temperature": policy.head.temperature,
    }
