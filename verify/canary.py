"""The canary: a few sampled tokens, whose log-probabilities the trainer computes too.

The proof compares weights bit for bit. The canary is for the rest: KV cache, windows, kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verify import experts
from verify.decode import disagreement
from verify.errors import AuditError, WeightLoadError
from verify.head import checked_body
from verify.own_noise import UNMEASURED, measure

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 5, 3
# Largest mean |trainer - engine| in fp32, in nats: the two agree to 1e-5. In 16 bits the limit is
# measured (own_noise.py).
NATS = 1e-4
# Of the canary's limit, for the rows of a step. In 22 right jobs their mean is at most 0.006 times
# the limit in fp32, and in 16 bits 1.6 times (at five times the usual learning rate).
TIMES_IN_A_STEP = 10
TrainerLogprobs = Callable[..., list[list[float]]]  # Policy.response_logprobs


def longest(engine: Any) -> int:
    """Tokens that a prompt can have."""
    return engine.llm.vllm_config.model_config.max_model_len - NEW_TOKENS


def length(engine: Any) -> int:
    """Tokens of a prompt: past a block of the KV cache and past a sliding window.

    It is never longer than the run's rows. With V1's own prefix cache it stays below a block,
    because the prompts are the same at each load, so the canary would read stale blocks, which
    are the fault under study.
    """
    if engine.wanted["enable_prefix_caching"] and not engine.parity.uncached_runtime:
        return PROMPT_TOKENS
    config = engine.llm.vllm_config
    spans = config.cache_config.block_size, config.model_config.get_sliding_window() or 0
    return max([PROMPT_TOKENS, *(span + 1 for span in spans if span < longest(engine))])


def sample(
    engine: Any, of_length: int = 0, prompt_seed: int = 0, max_new_tokens: int = NEW_TOKENS
) -> list[Any]:
    """A few tokens of decode, at temperature 1, where raw and processed values agree.

    After one prompt of the length, or after the canary's own prompts.
    """
    shape = (1, of_length) if of_length else (PROMPTS, length(engine))
    generator = torch.Generator().manual_seed(prompt_seed)
    prompts = torch.randint(engine.vocab_size, shape, generator=generator).tolist()
    room = engine.llm.vllm_config.model_config.max_model_len - shape[1]
    return engine.sample_beside(prompts, min(max_new_tokens, room))


class Sides(NamedTuple):
    """Log-probabilities of the canary's tokens, (B, T)."""

    of_trainer: Callable[..., Tensor]  # the trainer's, by another body or head
    trainer: Tensor
    engine: Tensor


def both_sides(engine: Any, trainer_logprobs: TrainerLogprobs, *request: int) -> Sides:
    """Of `sample(engine, *request)`."""
    rollouts = sample(engine, *request)

    def of_trainer(**changes: Any) -> Tensor:
        return torch.tensor(trainer_logprobs(rollouts, **changes))

    reported = torch.tensor([rollout.logprobs for rollout in rollouts])
    return Sides(of_trainer, of_trainer(), reported)


def check(engine: Any, trainer_logprobs: TrainerLogprobs, of_length: int = 0) -> None:
    """Raises: WeightLoadError if both sides differ by more than the limit; ValueError if the
    trainer's head is at fault.

    In 16 bits the first load measures the limit, and a load that exceeds it measures another
    one, because rounding grows with the logits.
    """
    average, attempts = experts.canary(engine)
    ties = UNMEASURED * (attempts > 1)  # of a mixture, in fp32 too: they widen the mean of a step
    limit = engine.checks.canary_nats
    if engine.dtype == torch.float32:
        limit = limit or NATS
    limits, is_measured = engine.checked.canary_limits, limit is None
    if is_measured:  # then `measure` has other prompts
        limit, attempts = limits.get(of_length, 0.0), 1
    for prompt_seed in range(attempts):
        sides = both_sides(engine, trainer_logprobs, of_length, prompt_seed)
        difference = average((sides.trainer - sides.engine).abs()).item()
        if difference <= limit:
            break
    if not difference <= limit and is_measured:
        another = partial(both_sides, engine, trainer_logprobs, of_length)
        difference, limit = measure(engine, sides, another, average)
        limit = max(NATS, limit)
        limits.setdefault(of_length, limit)
    engine.checked.limit = max(engine.checked.limit, limit, ties)
    first = engine.weight_version == 1
    if first:
        where = f"canary after {of_length} tokens" if of_length else "canary"
        engine.settings[where] = (
            f"{difference:.1e} nats, {difference / limit:.2f} of the limit {limit:.1e}")
    if difference <= limit:
        return
    fault = "the engine does not hold the trainer's weights"
    if first:  # or one of the two sides computes this model wrongly
        sides.of_trainer(body=checked_body)
        beyond = f" after {of_length} tokens, beyond its original context" if of_length else ""
        fault += f", or vLLM computes {engine.config.model_type} differently{beyond}"
        fault = disagreement(*sides, average, limit) or fault
    raise WeightLoadError(
        f"after load {engine.weight_version} {fault}: the canary's {average.__name__}"
        f" |trainer - engine| is {difference:.2e} nats, more than {limit:.1e}")


def check_step(engine: Any, figures: dict[str, Any]) -> None:
    """The mismatch of a step's rows that are not stale: a source, an observer or a later change of
    the trainer can spoil what the canary, which has prompts of its own, has found right.

    Raises: AuditError if it is far beyond the canary's limit.
    """
    difference = figures.get("current_mismatch_abs_mean", 0.0)
    limit = TIMES_IN_A_STEP * engine.checked.limit
    if difference > limit:
        raise AuditError(
            f"the mismatch is {difference:.2e} nats, more than {TIMES_IN_A_STEP} times the canary's"
            f" limit of {engine.checked.limit:.1e}, and no fix is off: the trainer scores other"
            " tokens than the engine sampled (a changed prompt, say), or with other weights; an"
            " option that means it adds to run.not_stated; for vLLM's noise alone, try a larger"
            " --canary-nats")
