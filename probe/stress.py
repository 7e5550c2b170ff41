"""The workload of `python -m probe record --stress`: an engine under pressure on purpose.

The KV cache has room for a third of the running requests, so that vLLM preempts some. The token
budget of a step is smaller than the prompts, so that prompts are computed in chunks. A healthy
engine gives a trace at parity.
"""

import math
from collections.abc import Callable

import torch

from engine_adapter import Engine
from rollouts import Rollout, Sampling, reseed

SLOTS = 12  # requests that may run at once
ROOM = 4  # requests for which the KV cache has room at their full length
LEAST_BUDGET = 24  # tokens of a step; the canary's four prompts must fit, their requests have seeds


def start_engine(start: Callable[..., Engine], longest_prompt: int, longest: int) -> Engine:
    """An engine with a small KV cache and token budget; `longest`: a prompt with its response.

    It starts twice, because vLLM chooses the block sizes of a model while it starts.
    """
    options = dict(max_model_len=longest, max_num_seqs=SLOTS,
                   token_budget=max(LEAST_BUDGET, longest_prompt // 3),
                   block_size=None if torch.cuda.is_available() else 32)
    engine = start(**options)
    groups = engine.core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    blocks = sum(math.ceil(longest / group.kv_cache_spec.block_size) for group in groups)
    engine.close()
    return start(**options, kv_blocks=1 + ROOM * blocks)  # vLLM keeps one block empty


def sample_under_pressure(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, seed: int
) -> tuple[list[Rollout], dict[str, int]]:
    """One response per prompt, and how often a request was preempted or computed in chunks.

    The requests have no seeds, because the CPU cannot compute the prompt of a request with a seed
    in chunks. Raises: ValueError if nothing was preempted, or nothing computed in chunks.
    """
    reseed(seed, "stress")
    scheduler, rollouts = engine.core.scheduler, []
    for prompt in prompts:
        rollouts += engine.submit(prompt, 1, sampling)
    requests, chunks = [*scheduler.requests.values()], 0
    while engine.num_unfinished:
        engine.step()
        chunks += sum(0 < each.num_computed_tokens < each.num_prompt_tokens
                      for each in scheduler.running)
    met = {"preemptions": sum(each.num_preemptions for each in requests), "chunks": chunks}
    if missing := [name for name, count in met.items() if not count]:
        raise ValueError(f"pressure must be of every kind, there were no {', '.join(missing)}; try"
                         " more --num-prompts, longer --prompt-tokens or a larger"
                         " --max-new-tokens")
    return rollouts, met
