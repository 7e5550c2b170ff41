"""The fixes: what each asks of vLLM, and what is in force in the live engine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParityFlags:
    """The five fixes. Off is V1's default; without sampling_mask: that of most trainers."""

    # Semantics, engine: log-probabilities of the distribution that the sampler drew from
    # (temperature applied); off: raw ones.
    processed_logprobs: bool = True
    # Inference path, engine: prefix caching, async scheduling, cascade attention and the model's
    # generation_config.json off; off: V1's defaults, and a load does not clear the cache (on a GPU
    # the sleep before it does). --prefix-cache versioned is not V1's cache.
    explicit_runtime: bool = True
    # Inference path, engine: a weight update keeps unfinished requests and their KV cache; off: see
    # inflight_otherwise.
    inflight_keep: bool = True
    # Numerics, both sides: the final projection in fp32; off: see head_otherwise.
    fp32_head: bool = True
    # Semantics, trainer: with a mask (top-k, top-p, min-p) its softmax is over the tokens that the
    # sampler kept, which travel with each token; off: over the vocabulary, as in most trainers.
    sampling_mask: bool = True
    # Without inflight_keep. abort: V1's pause, partial work is thrown away and its requests start
    # again (V1 also clears the prefix cache; here only explicit_runtime controls the cache).
    # recompute: requests stay, their KV cache is computed again under the new weights.
    inflight_otherwise: Literal["abort", "recompute"] = "abort"
    # Without fp32_head. engine: the engine's projection in the model's dtype, V1's default; the
    # trainer's stays in fp32. both: both in the model's dtype.
    head_otherwise: Literal["engine", "both"] = "engine"

    def __post_init__(self):
        for name, usual, fix in (("inflight_otherwise", "abort", "inflight_keep"),
                                 ("head_otherwise", "engine", "fp32_head")):
            value = getattr(self, name)
            if getattr(self, fix) and value != usual:
                raise ValueError(f"{name} must not be given with {fix} (it would do nothing), got"
                                 f" {value}; try --parity.no-{fix.replace('_', '-')}")

    @property
    def inflight_update(self) -> Literal["keep", "abort", "recompute"]:
        return "keep" if self.inflight_keep else self.inflight_otherwise

    @property
    def trainer_fp32_head(self) -> bool:
        return self.fp32_head or self.head_otherwise == "engine"

    def off(self) -> list[str]:
        return [name for name, on in asdict(self).items() if on is False]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Setting(NamedTuple):
    """A setting of vLLM that a parity flag controls: a row of SETTINGS, for start and audit.

    `argument` is its name in vLLM's EngineArgs (NAME.KEY for a dictionary), with its values while
    the flag is on and off; None leaves the value to vLLM. `read` returns the value that is in force
    in a live engine_adapter.Engine.
    """

    flag: str
    argument: str
    on: Any
    off: Any
    read: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return self.argument.rpartition(".")[2]

    def wanted(self, parity: ParityFlags, dtype: torch.dtype) -> Any:
        value = self.on if getattr(parity, self.flag) else self.off
        return dtype_name(dtype) if value == "model" else value


def observed_head_dtype(engine: Any) -> str:
    """The dtype in which the head's product is really computed, read from its logits.

    A 16-bit product that is cast to fp32 afterwards is still recognised: its values do not change
    in 16 bits.
    """
    sixteen_bits = dict.fromkeys((engine.dtype, torch.bfloat16, torch.float16))  # in this order
    sixteen_bits.pop(torch.float32, None)
    seen: set[str] = set()

    def look(_module: Any, _inputs: Any, logits: Tensor) -> None:
        equal = [dtype for dtype in sixteen_bits
                 if torch.equal(logits.to(dtype).to(logits.dtype), logits)]
        seen.add(dtype_name(equal[0] if equal else logits.dtype))

    heads = [module for name, module in engine.vllm_model.named_modules()
             if name.endswith("logits_processor")]
    hooks = [head.register_forward_hook(look) for head in heads]
    engine.sample_canary()  # any weights will do: only the arithmetic is observed
    for hook in hooks:
        hook.remove()
    assert len(seen) == 1, f"{type(engine.vllm_model).__name__}'s head was seen in {seen}"
    return seen.pop()


# Start and audit of the engine. inflight_keep has no row: Engine._interrupt does it.
SETTINGS = [
    Setting("processed_logprobs", "logprobs_mode", "processed_logprobs", "raw_logprobs",
            lambda engine: engine.runner.sampler.logprobs_mode),
    Setting("explicit_runtime", "enable_prefix_caching", False, True,
            lambda engine: engine.core.scheduler.kv_cache_manager.enable_caching),
    Setting("explicit_runtime", "async_scheduling", False, True,
            lambda engine: "Async" in type(engine.core.scheduler).__name__
            and engine.core.batch_queue is not None),
    Setting("explicit_runtime", "disable_cascade_attn", True, None,
            lambda engine: not getattr(engine.runner, "cascade_attn_enabled", False)),
    Setting("explicit_runtime", "generation_config", "vllm", "auto",
            lambda engine: engine.llm.vllm_config.model_config.generation_config),
    # "model": the model's dtype.
    Setting("fp32_head", "hf_overrides.head_dtype", "float32", "model", observed_head_dtype),
    # -1: a request may ask for kept sets of any size.
    Setting("sampling_mask", "max_logprobs", -1, None,
            lambda engine: engine.llm.vllm_config.model_config.max_logprobs),
]  # fmt: skip


class AuditError(RuntimeError):
    """A requested setting is not in force in the live engine."""


def wanted_settings(parity: ParityFlags, dtype: torch.dtype) -> dict[str, Any]:
    """What the flags ask of vLLM, by the names of SETTINGS; None leaves a value to vLLM."""
    return {each.name: each.wanted(parity, dtype) for each in SETTINGS}


def with_settings(arguments: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """These arguments of vLLM's EngineArgs, with the settings added."""
    arguments = dict(arguments)
    for setting in SETTINGS:
        argument, _, key = setting.argument.partition(".")
        value = wanted[setting.name]
        if value is not None:
            arguments[argument] = arguments.get(argument, {}) | {key: value} if key else value
    return arguments


def audit(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """What is in force, read from the live engine's objects and arithmetic.

    Raises: AuditError that names each setting that is not as wanted.
    """
    config = engine.llm.vllm_config
    model = config.model_config
    layers = [module for module in engine.vllm_model.modules() if hasattr(module, "impl")]
    found = {setting.name: setting.read(engine) for setting in SETTINGS} | {
        "vllm": engine.version,
        "runner": f"{type(engine.runner).__module__}.{type(engine.runner).__name__}",
        # Of the model's file; each request overrides them.
        "sampling_defaults": model.get_diff_sampling_param(),
        "model_dtype": dtype_name(next(engine.vllm_model.parameters()).dtype),
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "attention_backend": sorted({type(layer.impl).__name__ for layer in layers}),
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "block_size": config.cache_config.block_size,
        "max_model_len": model.max_model_len,
        "prefix_cache": engine.prefix_cache if engine.parity.explicit_runtime
        else "V1's default, not cleared by a load",
        "inflight_update": engine.parity.inflight_update,  # done by the adapter
        "sleep": "level 2" if model.enable_sleep_mode else "state only, memory is not released",
    }
    wrong = [f"{name} is {found[name]!r}, not {value!r}"
             for name, value in wanted.items()
             if value is not None and found[name] != value]
    if wrong:
        raise AuditError(f"requested but not in force in vLLM {engine.version}:"
                         f" {'; '.join(wrong)} ({engine.parity})")
    return found
