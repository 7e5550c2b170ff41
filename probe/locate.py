"""Where a mismatch comes from: the model's code, attention or batching, by removing one after the other.

Three recordings of one workload: by the ordinary engine; by the engine around the trainer's own module, which removes
the model's code (shared_engine.py); by that engine with products of few rows padded, which removes batching. The
trainer's score with vLLM's attention kernel removes attention.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

import rl
import shared_engine
from engine_adapter import Engine, ParityFlags, Sampling
from probe.diagnose import as_trace
from probe.traces import Replay, Trace
from rl import Policy
from shared_engine import SharedEngine

PARTS = "the model's code", "attention", "batching"  # what each step but the first removes


@dataclass(frozen=True)
class Step:
    """|trainer - engine| of one recording: its mean and largest value in nats, and the share of tokens that differ."""

    title: str
    mean: float
    max: float
    differing: float


@dataclass(frozen=True)
class Location:
    """What `locate` has measured: a step without each of PARTS, and why the last one need not be exactly 0."""

    steps: list[Step]
    why: str | None

    @property
    def sentence(self) -> str:
        whole, *_ = means = [*accumulate((step.mean for step in self.steps), min)]
        shares = [(before - after) / (whole or 1) for before, after in pairwise(means)]
        shown = ["less than 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %" for share in shares]
        named = [f"{share} from {part}" for share, part in zip(shown, PARTS, strict=False)]
        last = self.steps[-1].mean
        remaining = f"{last:.1e}" if last else "0"
        note = f"exact is refused: {self.why}" if self.why else "not exact" if last else "exact"
        return f"mean |mismatch| {whole:.1e}: {', '.join(named)}; remaining {remaining} ({note})"


def locate(policy: Policy, model: str, parity: ParityFlags, prompts: list[list[int]], seeds: list[int],
           sampling: Sampling, **options: Any) -> Location:
    """Measure the mismatch of one workload step by step; `options` are those of both engines.

    Raises: ValueError if one of the engines cannot serve the model.
    """
    engine, why = _start_shared(policy, model, parity, options)
    workload = policy, prompts, seeds, sampling
    with fewest_rows(1):
        trace, policy.kernel_hidden = _record(engine, *workload), None
        steps = [_step("shared engine, the trainer's own attention", policy, trace)]
        if not engine.on_gpu:
            policy.kernel_hidden = engine.kernel_hidden
            steps.append(_step("shared engine, vLLM's kernel", policy, trace))
    if not engine.on_gpu:
        steps.append(_step("the same, few rows padded", policy, _record(engine, *workload)))
    policy.kernel_hidden = None
    engine.close()
    # The ordinary engine comes last: serving some architectures, it patches the Python class of the trainer's module.
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(model, contract, parity, dtype=policy.model.dtype, **options)
    first = _step("ordinary engine, the trainer's own attention", policy, _record(engine, *workload))
    engine.close()
    return Location([first, *steps], why)


def _start_shared(policy: Policy, model: str, parity: ParityFlags, options: dict) -> tuple[SharedEngine, str | None]:
    """The engine around the trainer's module, and why it refuses `exact`, if so."""
    try:
        return SharedEngine(policy, model, parity, exact=True, **options), None
    except ValueError as error:
        return SharedEngine(policy, model, parity, **options), str(error).removeprefix("exact must be off here: ")


@contextmanager
def fewest_rows(rows: int) -> Iterator[None]:
    """Products of fewer rows are padded, on both sides."""
    usual = rl.FEWEST_ROWS
    rl.FEWEST_ROWS = shared_engine.FEWEST_ROWS = rows
    try:
        yield
    finally:
        rl.FEWEST_ROWS = shared_engine.FEWEST_ROWS = usual


def _record(engine: Engine, policy: Policy, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> Trace:
    """One response per prompt: of one prompt alone, then of two at once, of four, and so on."""
    engine.canary_tolerance = math.inf  # a wrong engine is to be measured, not refused
    engine.load(policy.weights(), policy.response_logprobs)
    rollouts, size = [], 1
    while len(rollouts) < len(prompts):
        some = slice(len(rollouts), len(rollouts) + size)
        rollouts += engine.generate(prompts[some], 1, sampling, seeds[some])
        size *= 2
    return as_trace(engine, rollouts, sampling)


@torch.no_grad()
def _step(title: str, policy: Policy, trace: Trace) -> Step:
    replay = Replay(policy, trace)
    scored = [replay.logprobs(logits, trace.sampling, tokens)[1]
              for tokens, logits in replay.logits(replay.all_hidden(), None)]
    difference = (torch.cat(scored).double() - replay.reported).abs()  # (N,)
    return Step(title, difference.mean().item(), difference.max().item(), (difference > 0).double().mean().item())
