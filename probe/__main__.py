"""Measure the mismatch between engine and trainer on the same tokens, and name the layer that
causes it.

Exit status: 0 exact or parity (compare: the second is not worse), 1 mismatch (the second is worse),
2 bad input, 3 the probe itself failed.
"""

import json
import math
import sys
import traceback
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro

from config import MANY, MAX_SEED, ParityFlags, within
from engine_adapter import Engine
from examples.record_vllm import weights_of
from probe.compare import change, cut_alike, same_workload
from probe.diagnose import as_trace, diagnose, print_verdict, sample_trace
from probe.layers import compare_layers, print_layers
from probe.replay import Weights
from probe.stress import sample_under_pressure, start_engine
from probe.traces import Trace, load_traces, save_trace
from records import one_line, stage
from rl import Policy
from rollouts import Sampling

Dtype = Literal["float32", "bfloat16", "float16"]
WORKLOAD_SAMPLING = Sampling(temperature=0.7, max_new_tokens=64)  # at 1 raw values do not show


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and prompts of random tokens."""

    model: str  # Folder or hub name of a Hugging Face causal language model.
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = WORKLOAD_SAMPLING
    num_prompts: int = 64  # Concurrent requests.
    # Shortest and longest prompt, in tokens; lengths are uniform between the two.
    prompt_tokens: tuple[int, int] = (4, 48)
    # Of the prompts; request i has the seed 1000 (seed + 1) + i (with --stress none).
    seed: int = 0
    # The fixes; sampling_mask has no effect.
    parity: ParityFlags = field(default_factory=ParityFlags)
    dtype: Dtype = "float32"  # Of the model, in the engine too.

    def __post_init__(self):
        within(self, 1, MANY, "num_prompts")
        within(self, 0, MAX_SEED, "seed")
        within(self.sampling, 0, 2, "temperature")  # vLLM's range
        if not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[1]:
            raise ValueError("prompt_tokens must be two numbers, 1 <= shortest <= longest, got"
                             f" {self.prompt_tokens}")

    def requests(self, vocabulary: int) -> tuple[list[list[int]], list[int]]:
        """Prompts of random tokens, and the seeds of their responses."""
        generator = torch.Generator().manual_seed(self.seed)
        low, high = self.prompt_tokens
        lengths = torch.randint(low, high + 1, (self.num_prompts,), generator=generator).tolist()
        prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist()
                   for length in lengths]
        return prompts, [1000 * (self.seed + 1) + index for index in range(self.num_prompts)]

    def both_sides(self, stress: bool = False) -> tuple[Policy, Engine]:
        """The trainer, and an engine that holds its weights."""
        policy = load_policy(self.model, self.dtype, self.parity.trainer_fp32_head)
        contract = {name: tensor.shape for name, tensor in policy.weights().items()}
        longest = self.prompt_tokens[1]
        whole = longest + self.sampling.max_new_tokens
        start = partial(Engine, self.model, contract, self.parity, dtype=policy.model.dtype,
                        seed=self.seed)
        engine = start_engine(start, longest, whole) if stress else start(max_model_len=whole)
        engine.canary_tolerance = math.inf  # a wrong engine is to be measured, not refused
        engine.load(policy.weights(), policy.response_logprobs)
        return policy, engine


@dataclass(frozen=True, kw_only=True)
class Record(Workload):
    """Sample a workload of random prompts with the installed vLLM and write a trace."""

    out: str  # Output file for the trace, .npz.
    # Put the engine under pressure: preemptions, and prompts in chunks.
    stress: bool = False

    def run(self) -> int:
        check_writable(self.out)
        policy, engine = self.both_sides(self.stress)
        prompts, seeds = self.requests(policy.head.weight.shape[0])
        if self.stress:
            rollouts, met = sample_under_pressure(engine, prompts, self.sampling, self.seed)
            trace = as_trace(engine, rollouts, self.sampling, stress=met)
            print(", ".join(f"{number} {what}" for what, number in met.items()))
        else:
            trace = sample_trace(engine, prompts, self.sampling, seeds)
        engine.close()
        save_trace(self.out, trace)
        tokens = sum(len(rollout.token_ids) for rollout in trace.rollouts)
        print(f"{self.out}: {tokens} tokens, vLLM {trace.meta['vllm']}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Layers(Workload):
    """Tell which layer of the model differs in the engine, and which half of it."""

    num_prompts: int = 8  # One after another.

    def run(self) -> int:
        policy, engine = self.both_sides()
        requests = self.requests(policy.head.weight.shape[0])
        rows, sentence = compare_layers(policy, engine, *requests, self.sampling)
        engine.close()
        print_layers(rows)
        print(f"=> vLLM {engine.version}, {self.dtype}: {sentence}")
        return int(any(row["beyond"] for row in rows))


@dataclass(frozen=True)
class Diagnose:
    """Name layer, cause and repair of the mismatch in traces, or list what was excluded."""

    model: str  # Folder or hub name of the trainer's weights.
    # Trace files, .npz or .json; docs/audit.md has the layout.
    traces: tyro.conf.Positional[tuple[str, ...]]
    group: str | None = None  # Diagnose only this group of the traces.
    # Folders with the trainer's weights 1, 2, ... updates back, newest first.
    earlier: tuple[str, ...] = ()
    # Weight version of `model`; if not given, the newest version in the trace.
    version: int | None = None
    dtype: Dtype | None = None  # Dtype of the trainer; if not given, the trace's dtype.
    # Distribution that the trainer scores: all sampling parameters, or the temperature alone.
    trainer: Literal["processed", "temperature"] = "processed"
    # Dtype of the trainer's final projection.
    trainer_head: Literal["float32", "model"] = "float32"
    json: str | None = None  # Write all verdicts with their figures to this file.

    def run(self) -> int:
        if not self.traces:
            raise ValueError("traces must be at least one file, got none")
        check_writable(self.json)
        traces = [replace(trace, name=f"{Path(path).name}, {trace.name}") for path in self.traces
                  for trace in load_traces(path) if self.group in (None, trace.name)]
        if not traces:
            raise ValueError(f"group must be one of the traces', got {self.group}")
        trainer = cache(self._trainer)
        records = []
        for trace in traces:
            policy, earlier = trainer(check_dtype(self.dtype or trace.meta.get("dtype", "float32")))
            check_model(policy, trace, self.model)
            verdict = diagnose(policy, trace, earlier, self.version, self.trainer)
            records.append(verdict.record())
            print_verdict(verdict)
        if self.json:
            Path(self.json).write_text(json.dumps(records, indent=1))
        return int(any(record["status"] not in ("exact", "parity") for record in records))

    def _trainer(self, dtype: str) -> tuple[Policy, list[Weights]]:
        """The trainer and its earlier weights in one dtype."""
        policy = load_policy(self.model, dtype, self.trainer_head == "float32")
        earlier = [load_policy(path, dtype, policy.scoring.fp32_head).copied_weights()
                   for path in self.earlier]
        shapes = {name: parameter.shape for name, parameter in policy.model.named_parameters()}
        for path, weights in zip(self.earlier, earlier, strict=True):
            if {name: tensor.shape for name, tensor in weights.items()} != shapes:
                raise ValueError(f"earlier must have {self.model}'s tensors, {path} has others")
        return policy, earlier


@dataclass(frozen=True)
class Compare:
    """Compare two traces of one workload, before and after an upgrade."""

    # Before and after, .npz or .json (docs/audit.md).
    traces: tyro.conf.Positional[tuple[str, str]]
    model: str  # Folder or hub name of the weights that both engines had.
    group: str | None = None  # Compare only this group; if not given, every group.
    dtype: Dtype | None = None  # Dtype of the trainer; if not given, that of each trace.

    def run(self) -> int:
        pairs = same_workload(*map(load_traces, self.traces), self.group)
        policy = cache(lambda dtype: load_policy(self.model, dtype, True))
        words = []
        for pair in pairs:
            verdicts = []
            for path, trace in zip(self.traces, cut_alike(*pair), strict=True):
                trainer = policy(check_dtype(self.dtype or trace.meta.get("dtype", "float32")))
                check_model(trainer, trace, self.model)
                verdicts.append(diagnose(trainer, trace))
                print(f"{Path(path).name}, {trace.name}: {verdicts[-1].headline}", flush=True)
            word, details = change(*verdicts, pair)
            words.append(word)
            print(f"=> {word}: {details}", flush=True)
        return int("worse" in words)


def check_model(policy: Policy, trace: Trace, path: str) -> None:
    """Raises: ValueError if the trace names a model of another size, or other weight files."""
    stated = trace.meta.get("model", {})
    for name, theirs in stated.get("config", {}).items():
        ours = getattr(policy.model.config, name, None)
        if theirs is not None and theirs != ours:
            raise ValueError(f"model must be that of the trace, whose {name} is {theirs}; {path}"
                             f" has {ours}")
    recorded, present = stated.get("weights"), weights_of(path)
    if None not in (recorded, present) and recorded != present:
        raise ValueError(f"model must be that of the trace, the weight files in {path} are not"
                         " those that it names")


def check_dtype(dtype: Any) -> str:
    if dtype not in get_args(Dtype):
        raise ValueError(f"meta.dtype of a trace must be one of {', '.join(get_args(Dtype))}, got"
                         f" {dtype}")
    return dtype


def load_policy(path: str, dtype: str, fp32_head: bool) -> Policy:
    """The trainer of the probe. Raises: ValueError for every error in loading it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with stage(f"loading the model in {path}"):
        return Policy.load(path, getattr(torch, dtype), device, fp32_head)


def check_writable(path: str | None) -> None:
    if path:
        with stage(f"opening {path} for writing"):
            Path(path).open("ab").close()


def main(arguments: list[str] | None = None) -> None:
    try:
        commands = {"record": Record, "diagnose": Diagnose, "compare": Compare, "layers": Layers}
        words = sys.argv[1:] if arguments is None else arguments
        command = tyro.extras.subcommand_cli_from_dict(
            commands, prog="python -m probe", description=__doc__, args=words)
        status = command.run()
    except ValueError as error:
        print("error:", one_line(error).removeprefix("ValueError: "), file=sys.stderr)
        status = 2
    except Exception:  # Python's own exit status would be 1, which here means a mismatch
        traceback.print_exc()
        status = 3
    sys.exit(status)


if __name__ == "__main__":
    main()
