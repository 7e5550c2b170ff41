"""The workload of `python -m probe record --stress`: an engine under pressure on purpose.

The KV cache has room for a third of the running requests, so that vLLM preempts some. The token
budget of a step is smaller than the prompts, so that prompts are computed in chunks. Requests are
aborted and submitted again, and other weights are loaded and used in between. Every recorded token
is sampled under the model's own weights, so a healthy engine gives a trace at parity.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count

import torch

from engine_adapter import Engine, Rollout, Sampling, reseed
from rl import Policy

SLOTS = 12  # requests that may run at once
ROOM = 4  # requests for which the KV cache has room at their full length
LEAST_BUDGET = 24  # tokens of a step; the canary's four prompts must fit, their requests have seeds
LOADS, DECOY_STEPS = 2, 6  # loads of other weights in between; engine steps under them
ABORT_EVERY = 5  # engine steps between aborts, of a quarter of the requests
# Steps between forced preemptions: a model whose cache does not grow is never preempted otherwise.
PREEMPT_EVERY = 60


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
    engine: Engine, policy: Policy, prompts: list[list[int]], sampling: Sampling, seed: int,
) -> tuple[list[Rollout], Counter]:
    """One response per prompt from an engine that holds the policy's weights, and what it met.

    The requests have no seeds, because the CPU cannot compute the prompt of a request with a seed
    in chunks. Raises: ValueError if no request was preempted, aborted or computed in chunks.
    """
    reseed(seed, "stress")
    met = Counter(preemptions=0, aborts=0, chunks=0, loads=0)
    scheduler, rollouts, requests = engine.core.scheduler, {}, {}

    def submit(rows: Iterable[int]) -> None:
        for row in rows:
            (rollouts[row],) = engine.submit(prompts[row], 1, sampling)
            *_, requests[row] = scheduler.requests.values()

    submit(range(len(prompts)))
    for number in count(1):
        unfinished = [row for row, each in rollouts.items() if each.finish_reason is None]
        if not unfinished:
            break
        finished = len(prompts) - len(unfinished)
        started = [row for row in unfinished if requests[row].num_computed_tokens > 0]
        if met["loads"] < LOADS and finished * (LOADS + 1) >= len(prompts) * (met["loads"] + 1):
            engine.abort([rollouts[row] for row in unfinished])
            use_other_weights(engine, policy, [prompts[row] for row in unfinished], sampling)
            met["loads"] += 1
            submit(unfinished)
        elif started and number % ABORT_EVERY == 0 and met["aborts"] < len(prompts) // 4:
            row = started[number % len(started)]
            engine.abort([rollouts[row]])
            met["aborts"] += 1
            met["preemptions"] += requests[row].num_preemptions
            submit([row])
        if number % PREEMPT_EVERY == 0:
            engine.llm.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        met["chunks"] += sum(0 < each.num_computed_tokens < each.num_prompt_tokens
                             for each in scheduler.running)
    met["preemptions"] += sum(each.num_preemptions for each in requests.values())
    if missing := [name for name, count in met.items() if not count]:
        raise ValueError(f"pressure must be of every kind, there were no {', '.join(missing)}; try"
                         " more --num-prompts, longer --prompt-tokens or a larger"
                         " --max-new-tokens")
    for each in rollouts.values():  # all loads of the policy's weights are one version
        each.versions = [engine.weight_version] * len(each.token_ids)
    return [rollouts[row] for row in range(len(prompts))], met


def use_other_weights(engine: Engine, policy: Policy, prompts: list[list[int]],
                      sampling: Sampling) -> None:
    """Load other weights, use them for some steps, and load the policy's again."""
    weights = {name: 1.1 * tensor for name, tensor in policy.copied_weights().items()}
    with policy.using(weights):
        engine.load(policy.weights(), policy.response_logprobs)
        decoys = [engine.submit(prompt, 1, sampling)[0] for prompt in prompts]
        for _ in range(DECOY_STEPS):
            engine.step()
    engine.abort(decoys)
    engine.load(policy.weights(), policy.response_logprobs)
