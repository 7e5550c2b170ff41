"""Measure the mismatch between engine and trainer on the same tokens, and name the layer that causes it.

`record` samples with the installed vLLM and writes a trace. `diagnose` computes the trainer's log-probabilities of a
trace's tokens and names the layer, the cause and the setting that repairs it. If no hypothesis explains the mismatch,
the verdict is "unexplained" and lists what was excluded.

Exit status: 0 parity, 1 mismatch, 2 bad input, 3 the probe itself failed.
"""

import json
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from engine_adapter import Engine, ParityFlags, Sampling
from probe.diagnose import diagnose, plot_verdict, print_verdict, sample_trace
from probe.traces import Trace, Weights, load_traces, save_trace
from rl import Policy

DTYPES = ("float32", "bfloat16", "float16")
WORKLOAD_SAMPLING = Sampling(temperature=0.7, max_new_tokens=64)  # at temperature 1 raw log-probabilities do not show


@dataclass(frozen=True)
class Workload:
    """A fixed workload for the engine: prompts of random tokens."""

    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = WORKLOAD_SAMPLING
    num_prompts: int = 64
    """Concurrent requests."""
    prompt_tokens: tuple[int, int] = (4, 48)
    """Shortest and longest prompt, in tokens; lengths are uniform between the two."""
    seed: int = 0
    """Seed of the prompts; request i is sampled with the seed 1000 (seed + 1) + i."""
    parity: ParityFlags = field(default_factory=ParityFlags)
    """The four backend fixes, each switchable alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model in the engine."""
    block_size: int | None = None
    """Tokens per KV block; if not given, vLLM's default."""
    kv_cache_gib: float = 0.25
    """Size of the engine's KV cache in GiB."""

    def __post_init__(self):
        low, high = self.prompt_tokens
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if not 1 <= low <= high:
            raise ValueError(f"prompt_tokens must be two numbers, 1 <= shortest <= longest, got {low} {high}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {self.seed}")

    def record(self, model: str) -> Trace:
        """Start an engine on the model's weights and sample the workload."""
        policy = load_policy(model, self.dtype, self.parity.fp32_head)
        contract = {name: tensor.shape for name, tensor in policy.weights().items()}
        low, high = self.prompt_tokens
        engine = Engine(model, contract, self.parity, dtype=policy.model.dtype, seed=self.seed,
                        max_model_len=high + self.sampling.max_new_tokens, block_size=self.block_size,
                        kv_cache_gib=self.kv_cache_gib)
        engine.load(policy.weights(), policy.response_logprobs)
        generator, vocabulary = torch.Generator().manual_seed(self.seed), policy.head.weight.shape[0]
        lengths = torch.randint(low, high + 1, (self.num_prompts,), generator=generator).tolist()
        prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
        seeds = [1000 * (self.seed + 1) + index for index in range(self.num_prompts)]
        trace = sample_trace(engine, prompts, self.sampling, seeds)
        engine.close()
        return trace


@dataclass(frozen=True)
class Record:
    """Sample a fixed workload with the installed vLLM and write a trace."""

    model: str
    """Folder or hub name of a Hugging Face causal language model."""
    out: str
    """Output file for the trace, .npz."""
    workload: Annotated[Workload, tyro.conf.arg(name="")] = field(default_factory=Workload)

    def run(self) -> int:
        _check_writable(self.out)
        trace = self.workload.record(self.model)
        save_trace(self.out, trace)
        print(f"{self.out}: {sum(len(r.token_ids) for r in trace.rollouts)} tokens, vLLM {trace.meta['vllm']}")
        return 0


@dataclass(frozen=True)
class Diagnose:
    """Explain the mismatch in traces; if no trace is given, one is recorded first."""

    model: str
    """Folder or hub name of the trainer's weights."""
    traces: tyro.conf.Positional[tuple[str, ...]] = ()
    """Trace files, .npz or .json; the README describes the layout."""
    group: str | None = None
    """Diagnose only this group of the traces."""
    earlier: tuple[str, ...] = ()
    """Folders with the trainer's weights 1, 2, ... updates back, newest first."""
    version: int | None = None
    """Weight version of `model`; if not given, the newest version in the trace."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the trainer; if not given, the trace's dtype."""
    trainer: Literal["processed", "temperature"] = "processed"
    """Distribution that the trainer scores: with all sampling parameters, or with the temperature alone (train.py)."""
    trainer_head: Literal["float32", "model"] = "float32"
    """Dtype of the trainer's final projection."""
    json: str | None = None
    """Write all verdicts with their figures to this file."""
    plot: str | None = None
    """Write a plot of the last trace to this file."""
    brief: bool = False
    """Print one line per group, without the table."""
    workload: Annotated[Workload, tyro.conf.arg(name="record")] = field(default_factory=Workload)

    def run(self) -> int:
        for path in filter(None, (self.json, self.plot)):
            _check_writable(path)
        traces = [(Path(path).name, trace) for path in self.traces for trace in load_traces(path)]
        traces = traces or [("recorded now", self.workload.record(self.model))]
        traces = [replace(t, name=f"{file}, {t.name}") for file, t in traces if self.group in (None, t.name)]
        if not traces:
            raise ValueError(f"group must be one of the traces', got {self.group}")
        trainers: dict[str, tuple[Policy, list[Weights]]] = {}  # by dtype
        records = []
        for trace in traces:
            dtype = self.dtype or trace.meta.get("dtype", "float32")
            if dtype not in trainers:
                trainers[dtype] = self._trainer(dtype)
            policy, earlier = trainers[dtype]
            verdict = diagnose(policy, trace, earlier, self.version, self.trainer)
            records.append(verdict.record())
            if self.brief:
                print(f"{verdict.trace}: {verdict.headline}", flush=True)
            else:
                print_verdict(verdict)
        if self.json:
            Path(self.json).write_text(json.dumps(records, indent=1))
        if self.plot:
            plot_verdict(verdict, self.plot)
        return int(any(record["status"] != "parity" for record in records))

    def _trainer(self, dtype: str) -> tuple[Policy, list[Weights]]:
        """The trainer and its earlier weights in one dtype."""
        if dtype not in DTYPES:
            raise ValueError(f"meta.dtype of a trace must be one of {', '.join(DTYPES)}, got {dtype}")
        policy, earlier = load_policy(self.model, dtype, self.trainer_head == "float32"), []
        shapes = {name: tensor.shape for name, tensor in policy.copied_weights().items()}
        for path in self.earlier:
            earlier.append(load_policy(path, dtype, policy.fp32_head).copied_weights())
            if {name: tensor.shape for name, tensor in earlier[-1].items()} != shapes:
                raise ValueError(f"earlier must have the tensors of {self.model}, {path} has others")
        return policy, earlier


def load_policy(path: str, dtype: str, fp32_head: bool) -> Policy:
    """The trainer of the probe. Raises: ValueError for every error in loading it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return Policy.load(path, getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu", fp32_head)
    except Exception as error:  # transformers and safetensors raise many types
        raise ValueError(f"model must be a loadable causal language model, got {path}: {error}") from error


def _check_writable(path: str) -> None:
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise ValueError(f"the output must be a writable file, got {path}: {error}") from error


def main(arguments: list[str] | None = None) -> None:
    try:
        commands, prog = {"record": Record, "diagnose": Diagnose}, "python -m probe"
        command = tyro.extras.subcommand_cli_from_dict(commands, prog=prog, description=__doc__, args=arguments)
        status = command.run()
    except ValueError as error:
        print("error:", " ".join(str(error).split())[:500], file=sys.stderr)
        status = 2
    except Exception:  # Python's own exit status would be 1, which here means a mismatch
        traceback.print_exc()
        status = 3
    sys.exit(status)


if __name__ == "__main__":
    main()
