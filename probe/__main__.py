"""The probe: how far apart are sampler and trainer on the same tokens, and which layer is to blame?

`record` drives the installed vLLM along the decode path and writes a trace. `diagnose` replays a trace (or records one
first) with the trainer's weights and names the layer, the cause and the switch that repairs it; where no hypothesis
explains the mismatch it says "unexplained" and what was excluded. It never guesses.

Exit status: 0 parity, 1 mismatch, 2 bad input, 3 the probe itself failed.
"""

import json
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import transformers
import tyro

from engine_adapter import Engine, ParityFlags, Sampling
from probe.diagnose import diagnose, plot_verdict, print_verdict, sample_trace
from probe.traces import Trace, Weights, load_traces, save_trace
from rl import Policy

DTYPES = ("float32", "bfloat16", "float16")
WORKLOAD_SAMPLING = Sampling(temperature=0.7, max_new_tokens=64)  # not 1, so that raw log-probabilities show


@dataclass(frozen=True)
class Workload:
    """A fixed workload for the engine: prompts of random tokens."""

    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = WORKLOAD_SAMPLING
    num_prompts: int = 64
    """Requests in the engine at once."""
    prompt_tokens: tuple[int, int] = (4, 48)
    """Shortest and longest prompt; uniform between."""
    seed: int = 0
    """Of the prompts; sample i has the seed 1000 (seed + 1) + i."""
    parity: ParityFlags = field(default_factory=ParityFlags)
    """The four backend fixes, each switchable alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model in the engine."""
    block_size: int | None = None
    """Tokens per KV block; if not given, vLLM's own."""
    kv_cache_gib: float = 0.25
    """The engine's KV cache."""

    def __post_init__(self):
        low, high = self.prompt_tokens
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if not 1 <= low <= high:
            raise ValueError(f"prompt_tokens must be two numbers, 1 <= shortest <= longest, got {low} {high}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {self.seed}")

    def prompts(self, vocabulary: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        low, high = self.prompt_tokens
        lengths = torch.randint(low, high + 1, (self.num_prompts,), generator=generator).tolist()
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def record_trace(model: str, workload: Workload) -> Trace:
    """Start an engine on the model's weights and sample the workload."""
    policy = load_policy(model, workload.dtype, workload.parity.fp32_head)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(model, contract, workload.parity, dtype=policy.model.dtype, seed=workload.seed,
                    max_model_len=workload.prompt_tokens[1] + workload.sampling.max_new_tokens,
                    block_size=workload.block_size, kv_cache_gib=workload.kv_cache_gib)
    engine.load(policy.weights(), policy.score)
    seeds = [1000 * (workload.seed + 1) + index for index in range(workload.num_prompts)]
    trace = sample_trace(engine, workload.prompts(policy.head.weight.shape[0]), workload.sampling, seeds)
    engine.close()
    return trace


@dataclass(frozen=True)
class Record:
    """Sample a fixed workload with the installed vLLM and write a trace."""

    model: str
    """Folder or hub name of a Hugging Face causal language model."""
    out: str
    """The trace, an .npz file."""
    workload: Annotated[Workload, tyro.conf.arg(name="")] = field(default_factory=Workload)

    def run(self) -> int:
        _check_writable(self.out)
        trace = record_trace(self.model, self.workload)
        save_trace(self.out, trace)
        print(f"{self.out}: {sum(len(r.token_ids) for r in trace.rollouts)} tokens, vLLM {trace.meta['vllm']}")
        return 0


@dataclass(frozen=True)
class Diagnose:
    """Explain the mismatch in a trace; without one, a trace is recorded first."""

    model: str
    """The trainer's weights: a folder or a hub name."""
    traces: tyro.conf.Positional[tuple[str, ...]] = ()
    """npz or JSON traces; the README has the layout."""
    group: str | None = None
    """Only this group of the trace."""
    earlier: tuple[str, ...] = ()
    """Folders with the trainer's weights 1, 2, ... updates back, newest first."""
    version: int | None = None
    """The weight version of `model`; if not given, the newest the trace names."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the trainer; if not given, the trace's."""
    trainer: Literal["processed", "temperature"] = "processed"
    """The distribution the trainer scores; train.py applies the temperature alone."""
    trainer_head: Literal["float32", "model"] = "float32"
    """Dtype of the trainer's final projection."""
    json: str | None = None
    """Write all figures to this file."""
    plot: str | None = None
    """Write a picture to this file (the last trace diagnosed)."""
    brief: bool = False
    """One line per group, without the table."""
    workload: Annotated[Workload, tyro.conf.arg(name="record")] = field(default_factory=Workload)

    def run(self) -> int:
        for path in filter(None, (self.json, self.plot)):
            _check_writable(path)
        traces = [(Path(path).name, trace) for path in self.traces for trace in load_traces(path)]
        if not self.traces:
            traces = [("recorded now", record_trace(self.model, self.workload))]
        traces = [(file, trace) for file, trace in traces if self.group in (None, trace.name)]
        if not traces:
            raise ValueError(f"group must be one of the traces', got {self.group}")
        policies: dict[str, Policy] = {}
        verdicts = []
        for file, trace in traces:
            dtype = self.dtype or trace.meta.get("dtype", "float32")
            if dtype not in DTYPES:
                raise ValueError(f"meta.dtype of {file} must be one of {', '.join(DTYPES)}, got {dtype}")
            if dtype not in policies:
                policies[dtype] = load_policy(self.model, dtype, self.trainer_head == "float32")
                earlier = [self._earlier(path, policies[dtype]) for path in self.earlier]
            verdict = diagnose(policies[dtype], trace, earlier, self.version, self.trainer)
            verdict.trace = f"{file}, {trace.name}"
            verdicts.append(verdict)
            if self.brief:
                print(f"{verdict.trace}: {verdict.headline}", flush=True)
            else:
                print_verdict(verdict)
        if self.json:
            Path(self.json).write_text(json.dumps([verdict.record() for verdict in verdicts], indent=1))
        if self.plot:
            plot_verdict(verdicts[-1], self.plot)
        return int(any(verdict.status != "parity" for verdict in verdicts))

    def _earlier(self, path: str, policy: Policy) -> Weights:
        dtype = str(policy.model.dtype).removeprefix("torch.")
        weights, now = load_policy(path, dtype, policy.fp32_head).copied_weights(), policy.copied_weights()
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in now.items()}:
            raise ValueError(f"earlier must have the tensors of {self.model}, {path} has others")
        return weights


def load_policy(path: str, dtype: str, fp32_head: bool) -> Policy:
    """The trainer of the probe. Raises: ValueError whatever is wrong with the folder or the name."""
    try:
        return Policy.load(path, getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu", fp32_head)
    except Exception as error:  # transformers and safetensors raise all kinds
        raise ValueError(f"model must be a loadable causal language model, got {path}: {error}") from error


def _check_writable(path: str) -> None:
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise ValueError(f"the output must be a writable file, got {path}: {error}") from error


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    commands = {"record": Record, "diagnose": Diagnose}
    try:
        status = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__).run()
    except ValueError as error:
        print("error:", " ".join(str(error).split())[:500], file=sys.stderr)
        sys.exit(2)
    except Exception:  # Python's own status for it is 1, which here means a mismatch
        traceback.print_exc()
        sys.exit(3)
    sys.exit(status)


if __name__ == "__main__":
    main()
