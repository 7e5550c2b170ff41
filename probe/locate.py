"""Where a mismatch comes from: the model's code, attention or batching."""

import math
import os
from itertools import accumulate, pairwise
from typing import Any

import torch

from config import ParityFlags
from engine_adapter import Engine, Sampling
from extras.shared_engine import FEWEST_ROWS, SharedEngine, why_not
from probe.diagnose import as_trace
from probe.traces import Replay, Trace
from rl import Policy

PARTS = "the model's code", "attention", "batching"  # what each step but the first removes


def locate(
    policy: Policy, model: str, parity: ParityFlags, prompts: list[list[int]], seeds: list[int],
    sampling: Sampling, **options: Any,
) -> tuple[dict[str, torch.Tensor], str]:
    """|trainer - engine| of each token, by step, and a sentence.

    Raises: ValueError where an engine cannot do this.
    """
    if torch.cuda.is_available():
        raise ValueError("locate must run on a CPU (vLLM's kernels of a GPU are not the trainer's)")
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # as `exact` sets it
    engine = SharedEngine(policy, model, parity, **options)
    workload = (policy, prompts, seeds, sampling)
    refused = why_not(engine)
    engine.pad_rows(1)  # no padding
    sampled = _sample(engine, *workload)
    shared = _mismatch(policy, sampled)
    kernel = _mismatch(policy, sampled, engine.kernel_body)
    engine.pad_rows(FEWEST_ROWS)
    padded = _mismatch(policy, _sample(engine, *workload), engine.kernel_body)
    engine.close()
    # The ordinary engine comes last: serving some architectures, it patches the Python class of the
    # trainer's module.
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(model, contract, parity, dtype=policy.model.dtype, **options)
    ordinary = _mismatch(policy, _sample(engine, *workload))
    engine.close()
    steps = {
        "ordinary engine, trainer's attention": ordinary,
        "shared engine, trainer's attention": shared,
        "shared engine, vLLM's kernel": kernel,
        "the same, few rows padded": padded,
    }
    return steps, _sentence([each.mean().item() for each in steps.values()], refused)


def _sentence(means: list[float], refused: str | None) -> str:
    shares = [(before - after) / (means[0] or 1)
              for before, after in pairwise(accumulate(means, min))]
    named = [f"{'less than 1' if 0 < share < 0.01 else round(100 * share)} % from {part}"
             for share, part in zip(shares, PARTS, strict=True)]
    remaining = f"0 ({refused or 'exact'})"
    if means[-1]:
        remaining = f"{means[-1]:.1e} ({refused or 'not exact'})"
    return f"mean |mismatch| {means[0]:.1e}: {', '.join(named)}; remaining {remaining}"


def _sample(engine: Engine, policy: Policy, prompts: list[list[int]], seeds: list[int],
            sampling: Sampling) -> Trace:
    """One response per prompt: of one prompt alone, then of two at once, of four, and so on."""
    engine.canary_tolerance = math.inf  # a wrong engine is to be measured, not refused
    policy.body, rollouts = policy.own_body, []
    engine.load(policy.weights(), policy.response_logprobs)
    while len(rollouts) < len(prompts):
        some = slice(len(rollouts), 2 * len(rollouts) + 1)
        rollouts += engine.generate(prompts[some], 1, sampling, seeds[some])
    return as_trace(engine, rollouts, sampling)


@torch.no_grad()
def _mismatch(policy: Policy, trace: Trace, kernel: Any = None) -> torch.Tensor:
    """|trainer - engine|, where the trainer has its own attention or vLLM's `kernel`: (N,)."""
    policy.body, replay = kernel or policy.own_body, Replay(policy, trace)
    scored = [replay.logprobs(logits, trace.sampling, tokens)[1]
              for tokens, logits in replay.logits(replay.all_hidden(), None)]
    return (torch.cat(scored).double() - replay.reported).abs()
