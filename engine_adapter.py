"""vLLM V1 in this process, driven step by step.

Token ids in, token ids and behaviour log-probabilities out; the engine knows no task and no
tokenizer. It starts with random weights and gives rollouts only from weights that the trainer has
loaded into it. So a tensor that is never loaded shows at once, and is not hidden by a checkpoint on
disk.

In reading order: what is sampled, the fixes as settings of vLLM (`SETTINGS`), the `Engine`, and
where rollouts come from. What is checked of an engine is in verify/, which knows both sides; what
vLLM needs of a machine and of single architectures is in vllm_cases.py.
"""

import ctypes
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor

import vllm_cases
from model_folder import read_config
from report.ranges import Count, Range, check_ranges
from tasks import Problem, Task
from vllm_cases import EngineStateError, WeightLoadError


# ---------------------------------------------------------------------------------- rollouts
@dataclass(frozen=True)
class Sampling:
    """What shapes the sampled distribution; the rest stays at vLLM's neutral defaults.

    An option with another distribution has a subclass.
    """

    temperature: float  # 0 is greedy
    max_new_tokens: Count
    stop_token_ids: tuple[int, ...] = ()
    # A function of the Rollout after each of its tokens: true ends it there.
    ends: Callable[["Rollout"], bool] = field(default=lambda rollout: False, repr=False)

    def __post_init__(self):
        check_ranges(self)
        if self.temperature:
            Range(0.01, 2).check("temperature", self.temperature)  # vLLM's range

    def at(self, temperature: float) -> "Sampling":
        """The sampling of answers that are not trained on."""
        return replace(self, temperature=temperature)

    def shaped(self, logits: Tensor) -> Tensor:
        """(N, V) logits as they are before the sampler's softmax."""
        return logits / self.temperature

    def arguments(self, vocab_size: int) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams."""
        return dict(temperature=self.temperature, max_tokens=self.max_new_tokens,
                    stop_token_ids=list(self.stop_token_ids), logprobs=0)


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
    sampling: Sampling | None = None  # None where the probe has cut it
    kept: list[numpy.ndarray] = field(default_factory=list)  # by token: ids that the mask kept
    # Whether each token has a loss. Empty: all have one. An environment's words have none.
    trained: list[bool] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)  # a number a token, for `Batch.extra`
    reward: float | None = None  # the task's; None until it is scored, NaN if there is none
    terms: dict[str, float] = field(default_factory=dict)  # a reward can be the sum of terms
    reward_error: str | None = None  # what has failed, if the response is left out for it
    # What the policy is trained on: the reward, unless it is shaped. NaN: left out, without a loss
    # and without a place in its group's baseline.
    score: float | None = None
    # The version of the prompt's first part, if a load came while the prompt was computed.
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


# vLLM's reasons that end a rollout; any other one, such as "error", stops the run.
FINISH_REASONS = ("stop", "length", "abort")


# ------------------------------------------------------------ the fixes as settings of vLLM
@dataclass(frozen=True)
class ParityFlags:
    """The five fixes. Off is V1's default; without sampling_mask: that of most trainers."""

    # Semantics, engine. On: log-probabilities of the distribution that the sampler drew from
    # (temperature applied). Off: raw ones.
    processed_logprobs: bool = True
    # Inference path, engine. On: no prefix cache, or one keyed by the weight version, and no async
    # scheduling. Off: V1's defaults; a load does not clear the cache (on a GPU the sleep does).
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

    def off(self) -> list[str]:
        """The fixes that are off; a flag that is off by default, such as a fork's, is no fix."""
        return [flag.name for flag in fields(self)
                if flag.default and not getattr(self, flag.name)]


class Setting(NamedTuple):
    """A setting of vLLM that a parity flag controls: a row of SETTINGS.

    `argument` is its name in vLLM's EngineArgs (NAME.KEY for a dictionary), `fixed` its value with
    the fix, `default` that of V1 without it; None leaves the value to vLLM. verify/settings.py
    reads the value that is in force in a live engine. `moves_canary`: without the fix the engine
    differs by more than the canary's limit, so the canary reports and does not refuse.
    """

    flag: str
    argument: str
    fixed: Any
    default: Any
    moves_canary: bool = False


# inflight_keep has no row: it is what a load of extras/inflight.py does. In spite of the fix
# extras/prefix_cache.py asks for a cache, which is keyed by the weight version.
SETTINGS = [
    Setting("processed_logprobs", "logprobs_mode", "processed_logprobs", "raw_logprobs"),
    Setting("uncached_runtime", "enable_prefix_caching", False, True),
    Setting("uncached_runtime", "async_scheduling", False, True),
    Setting("fp32_head", "hf_overrides.head_dtype", "float32", "model"),  # "model": its dtype
    # -1: a request may ask for the likeliest tokens in any number.
    Setting("sampling_mask", "max_logprobs", -1, None),
]


# Said whatever the version's default is; no option brings another back.
ALWAYS = {"generation_config": "vllm", "disable_cascade_attn": True}


def wanted_settings(parity: ParityFlags) -> dict[str, Any]:
    """What the start asks for, by argument, and the audit must then find.

    Raises: ValueError if a flag has no row.
    """
    idle = vars(parity).keys() - {"inflight_keep", *(setting.flag for setting in SETTINGS)}
    if idle:
        raise ValueError(f"a flag of ParityFlags must have a row of SETTINGS, {idle} have none")
    return {setting.argument: setting.fixed if getattr(parity, setting.flag) else setting.default
            for setting in SETTINGS}


# ---------------------------------------------------------------------------------- the engine
CHECKS = "proof", "canary"  # what verify/ checks of each load


class Engine:
    """A vLLM V1 engine that sleeps while the trainer trains and holds the trainer's weights.

    States: "awake" (at start, and after `wake`: the weights are not the trainer's), "unproven"
    (after `load`), "ready" (when the CHECKS of the load have passed), "asleep", "broken" (after a
    failed load, or `close`). `tensor_names` are those of every load. Options add: `further`
    arguments of EngineArgs, which the audit compares too; `cache_salt`, the key of cached blocks by
    weight version; `collect`, which gets a rollout with the ids and the log-probabilities of the
    likeliest tokens, (n, K), if its sampling asks for them.

    Raises: EngineStateError if the process holds another engine; ValueError if vLLM cannot run the
    model; RuntimeError if torch and vLLM are of different devices.
    """

    holds_unfinished: ClassVar[bool] = False  # over a load
    copies_weights: ClassVar[bool] = True  # else it samples with the trainer's own
    live: ClassVar["Engine | None"] = None  # one in a process: vLLM's parallel groups are global

    def __init__(
        self, model: str, tensor_names: Iterable[str], parity: ParityFlags, *, max_model_len: int,
        dtype: torch.dtype = torch.float32, seed: int = 0, kv_cache_gib: float = 0.25,
        max_num_seqs: int = 512, block_size: int | None = None,
        allow_untested_vllm: bool = False, further: Mapping[str, Any] | None = None,
        cache_salt: Callable[[int], str | None] = lambda weight_version: None,
        collect: Callable[[Rollout, numpy.ndarray, numpy.ndarray], None] | None = None,
    ):
        if Engine.live is not None:
            raise EngineStateError("a process holds one engine, end the other one first:"
                                   " Engine.live.close()")
        self.vllm_version, self.on_gpu = vllm_cases.check_machine(allow_untested_vllm)
        self.config = read_config(model)  # the trainer's; vLLM would have read another
        self.tensor_names = set(tensor_names)
        self.parity, self.dtype = parity, dtype
        self.cache_salt, self.collect = cache_salt, collect
        self.max_num_seqs = max_num_seqs
        self.state, self.weight_version = "awake", 0
        self.settings = {}  # what is in force: the audit's record
        self._memory_released = False  # by vLLM's sleep
        self._request_ids = map(str, itertools.count())
        self._requests: dict[str, Rollout] = {}  # the unfinished ones, by vLLM's request id
        self.wanted = ALWAYS | wanted_settings(parity) | (further or {})
        torch.cuda.empty_cache()  # what the trainer has freed while it was built
        with vllm_cases.start_errors(
                self, f"kv_cache_gib {kv_cache_gib}, block_size {block_size}"):
            self._start(
                model=model, seed=seed, dtype=str(dtype).removeprefix("torch."),
                load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True,
                max_num_seqs=max_num_seqs + vllm_cases.CANARY_PROMPTS,
                max_model_len=max(max_model_len, vllm_cases.CANARY_TOKENS),
                max_num_batched_tokens=max(8192, max_model_len),
                # A CPU cannot split the prompt of a seeded request.
                enable_chunked_prefill=self.on_gpu,
                enable_sleep_mode=self.on_gpu, enforce_eager=True, block_size=block_size,
                attention_backend=vllm_cases.latent_attention(self.config, self.on_gpu),
                kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
                # vLLM only checks at start that this share is free; the size is given above.
                gpu_memory_utilization=0.1,
                # Autotuning is slow, and its choice of kernels is not reproducible.
                enable_flashinfer_autotune=False)
            vllm_cases.refuse_or_repair(self.vllm_model, dtype, self.tensor_names)
            self.sample_beside([[0, 0]], 2)  # a model that vLLM cannot compute fails here
        Engine.live = self

    def _start(self, **arguments: Any) -> None:
        """Make vLLM's engine of these arguments and the wanted settings, keep its inner objects."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        for name, value in self.wanted.items():
            argument, _, key = name.partition(".")
            if value is not None:
                arguments[argument] = arguments.get(argument, {}) | {key: value} if key else value
        self.config.update(arguments.pop("hf_overrides"))
        # A function in place of overrides: vLLM takes the trainer's config for its own reading.
        config = EngineArgs(
            **arguments, hf_overrides=lambda of_folder: self.config).create_engine_config()
        # The CPU platform switches async scheduling off in silence; V1's default is what the flag
        # promises.
        config.scheduler_config.async_scheduling = self.wanted["async_scheduling"]
        self.llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self.core = self.llm.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        # No local name: a frame that is kept alive would keep the model in memory after `close`.
        self.vllm_model = self.runner.get_model()
        self.vocab_size = config.model_config.get_vocab_size()

    @classmethod
    def start(cls, run: Any, policy: Any) -> "Engine":
        """The engine of a run for a policy, still without its weights."""
        config = run.config
        return cls(
            run.folder, policy.weights().keys(), config.parity, dtype=getattr(torch, config.dtype),
            seed=config.seed, max_model_len=run.max_model_len, kv_cache_gib=config.kv_cache_gib,
            max_num_seqs=config.max_num_seqs, further=run.further,
            allow_untested_vllm=config.checks.allow_untested_vllm,
            **{"block_size": config.block_size} | run.engine)

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
            while self.num_unfinished >= self.max_num_seqs:
                self.step()
            rollouts += self.submit(prompt, group_size, sampling, seed)
        return self._finished(rollouts)

    def sample_beside(
        self, prompts: list[list[int]], max_new_tokens: int,
        sampling: Sampling = Sampling(temperature=1.0, max_new_tokens=1),
    ) -> list[Rollout]:
        """A short seeded response to each prompt, for a check, whatever the weights are."""
        self._require("a check's sample", "awake", "unproven", "ready")
        sampling, rollouts = replace(sampling, max_new_tokens=max_new_tokens), []
        for row, prompt in enumerate(prompts):
            rollouts += self._submit([Rollout(prompt, row, sampling=sampling)])
        return self._finished(rollouts)

    def _finished(self, rollouts: list[Rollout]) -> list[Rollout]:
        while not all(rollout.finish_reason for rollout in rollouts):
            self.step()
        return rollouts

    @property
    def num_unfinished(self) -> int:
        """Rollouts that are queued or running in vLLM; queued ones take 50 kB each."""
        return self.core.scheduler.get_num_unfinished_requests()

    def submit(
        self, prompt_ids: list[int], group_size: int, sampling: Sampling, seed: int | None = None
    ) -> list[Rollout]:
        """Queue one group; its rollouts fill up in place as `step` runs."""
        self._require("generate", "ready")
        return self._submit([
            Rollout(prompt_ids, None if seed is None else seed + g, sampling=sampling)
            for g in range(group_size)])

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Queue rollouts of one prompt, a request each, in vLLM's engine core.

        LLMEngine's own add_request and step would also build objects that a server needs.
        """
        first = rollouts[0]
        params = self.sampling_params(first.sampling, first.seed)
        prompt = {"type": "token", "prompt_token_ids": first.prompt_ids}
        tasks = self.llm.get_supported_tasks()
        # One check for all. The copies differ in id and seed.
        checked = self.llm.input_processor.process_inputs("", prompt, params, tasks)
        checked.cache_salt = self.cache_salt(self.weight_version)
        for rollout in rollouts:
            request = copy(checked)
            request.request_id = next(self._request_ids)
            if rollout.seed is not None:
                request.sampling_params = copy(checked.sampling_params)
                request.sampling_params.seed = rollout.seed
            self.llm.engine_core.add_request(request)
            self._requests[request.request_id] = rollout
        return rollouts

    def sampling_params(self, sampling: Sampling, seed: int | None) -> Any:
        """vLLM's SamplingParams of one request."""
        from vllm import SamplingParams

        # It stops where the trainer says and nowhere else; ignore_eos leaves the model's own list
        # out.
        return SamplingParams(
            seed=seed, ignore_eos=True, detokenize=False, **sampling.arguments(self.vocab_size))

    def step(self) -> None:
        """One engine step (schedule, forward, sample); new tokens get the weight version."""
        # In one process this call schedules, computes and samples: there is no queue.
        for output in self.llm.engine_core.get_output().outputs:
            reason = output.finish_reason
            if reason is not None and str(reason) not in FINISH_REASONS:
                raise RuntimeError(f"vLLM ended a request with {reason}")
            rollout = self._requests[output.request_id]
            logprobs = output.new_logprobs.logprobs  # (n, 1 + K)
            rollout.append(output.new_token_ids, logprobs[:, 0].tolist(), self.weight_version)
            if self.collect:
                ids = output.new_logprobs.logprob_token_ids
                likeliest = slice(1, None)  # columns; column 0 is the sampled token
                self.collect(rollout, ids[:, likeliest], logprobs[:, likeliest])
            if rollout.sampling.ends(rollout):
                self.llm.engine_core.abort_requests([output.request_id])
                reason = "stop"
            if reason is not None:
                rollout.finish_reason = str(reason)
                del self._requests[output.request_id]

    # ------------------------------------------------------------------------------ sleep, wake
    def _require(self, call: str, *states: str) -> None:
        if self.state not in states:
            raise EngineStateError(
                f"{call} needs an engine that is {' or '.join(states)}, this one is {self.state}:"
                " from ready it goes by sleep() to asleep, by wake() to awake, by load() to"
                f" unproven, and by the checks of verify/ ({', '.join(CHECKS)}) to ready")

    def sleep(self) -> None:
        """Give the device to the trainer. GPU: level 2, memory released. CPU: the state changes."""
        self._require("sleep", "ready")
        if self.num_unfinished and not self.holds_unfinished:
            raise EngineStateError("sleep needs finished rollouts, or an engine that holds them"
                                   f" over a load; there are {self.num_unfinished} others")
        if self.on_gpu:
            self.llm.sleep(level=2, mode="keep")  # vLLM's queue is kept; not `inflight_keep`
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
        self.state = "awake"

    # ------------------------------------------------------------------------------ load
    def load(self, weights: Mapping[str, Tensor], is_new_version: bool = True) -> None:
        """Put the trainer's tensors into the live engine. No second copy of the model is made.

        The engine is "unproven" then, and has no rollouts to give before verify/ has let each of
        the CHECKS pass. Weights that have not changed are no new version.

        Raises: EngineStateError unless awake or ready. WeightLoadError if a tensor is missing or
        unexpected (the engine is unchanged then), or if vLLM refuses one (it is broken then).
        """
        self._require("load", "awake", "ready")
        if others := weights.keys() ^ self.tensor_names:
            raise WeightLoadError("weights must be those that the engine was started for, missing"
                                  f" or unknown are {', '.join(sorted(others))}")
        self.state = "broken"  # until all tensors are there
        self._transfer(weights)
        if self._memory_released:  # the cache's memory, after the weights': the load has freed some
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
            self._memory_released = False
        self.weight_version += is_new_version
        self.state, self._to_pass = "unproven", {*CHECKS}

    def _transfer(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the tensors into vLLM's model."""
        names = self.tensor_names - vllm_cases.heads_without_a_name(self)
        # One by one: a tensor may be computed when it is asked for.
        iterator = ((name, weights[name]) for name in weights if name in names)
        try:
            with nullcontext() if self.on_gpu else vllm_cases.packed_again(self):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        except Exception as error:
            raise WeightLoadError("vLLM refused the weights, build a new engine:"
                                  f" {vllm_cases.reason(error)}") from error
        if self.on_gpu:
            torch.cuda.synchronize()

    def passed(self, check: str) -> None:
        """verify/ has found no fault of the load. After the last check there are rollouts again."""
        self._require(check, "unproven")
        self._to_pass.remove(check)
        if not self._to_pass:
            self.state = "ready"

    def close(self) -> None:
        """Free the engine; vLLM destroys the process's default torch.distributed group with it."""
        vllm_cases.free_tensors(self.runner)  # they go before vLLM gives the memory back
        del self.core, self.runner, self.vllm_model
        self.llm.engine_core.shutdown()
        del self.llm
        self.state, Engine.live = "broken", None
        gc.collect()


# ---------------------------------------------------------- where rollouts come from
class Source:
    """P problems a step, all responses sampled to their end.

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
        problems = self.task.sample(self.rng, self.num_prompts, self.left)
        reseed(self.seed, "train", step)
        return problems, self.answer(problems, self.group_size, self.sampling)

    def answer(
        self, problems: list[Problem], num_samples: int, sampling: Sampling,
        evaluates: bool = False,
    ) -> list[Rollout]:
        """`num_samples` responses to each problem, group-major. `evaluates`: they are held out."""
        prompts = [problem.prompt_ids for problem in problems]
        return self.engine.generate(prompts, num_samples, sampling)

    def after_update(self) -> dict[str, int]:
        """After each load: further metrics. Here nothing is in flight."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])
        self.left = state["left"]
