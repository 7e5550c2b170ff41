"""The canary: a few sampled tokens, whose log-probabilities the trainer computes too.

The proof compares weights bit for bit. The canary is for the rest: KV cache, windows, kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_adapter import SETTINGS, Engine, Rollout
from rl import Batch, Policy, make_batch
from verify.head import check_head
from verify.parity import twice_as_precise
from verify.settings import AuditError
from vllm_cases import (
    CANARY_NEW_TOKENS,
    CANARY_PROMPT_TOKENS,
    CANARY_PROMPTS,
    WeightLoadError,
    expert_layers,
)

# Largest mean |trainer - engine| in fp32, in nats: the two agree to 1e-5.
NATS = 1e-4
UNMEASURED = 0.15  # in 16 bits, if the noise cannot be measured: more than bf16 rounds
# In 16 bits the limit is a multiple of the trainer's own noise. Measured with 60 classes on 72
# tokens: right engines differ from the trainer by 0.5 to 1.7 times the noise (1 of 250 by 2.1),
# HRM-Text by 2.2 to 11, Cohere 2 beyond its window by 10 to 20. On 12 tokens one of 1,000 right
# engines differs by more than 4.6 times. On a GPU nobody has measured it: an H100's records,
# translated, give 1.75 to 2.1 for right engines of some classes.
TIMES, TIMES_ON_GPU = 2.0, 3.0  # of the noise, at the first load, which finds wrong models
TIMES_LATER = 4.0
TOKENS, MOST_TOKENS = 72, 288  # to compare at the first load; before a load is refused
RESPONSE = 9  # new tokens of a further canary; a long prompt costs more than they do
# Of the canary's limit, for the rows of a step. In 22 right jobs their mean is at most 0.006 times
# the limit in fp32, and in 16 bits 1.6 times (at five times the usual learning rate).
TIMES_IN_A_STEP = 10


def longest(engine: Engine) -> int:
    """Tokens that a prompt can have."""
    return engine.llm.vllm_config.model_config.max_model_len - CANARY_NEW_TOKENS


def length(engine: Engine) -> int:
    """Tokens of a prompt: past a block of the KV cache and past a sliding window.

    It is never longer than the run's rows. With V1's own prefix cache it stays below a block,
    because the prompts are the same at each load, so the canary would read stale blocks, which
    are the fault under study.
    """
    if engine.wanted["enable_prefix_caching"] and not engine.parity.uncached_runtime:
        return CANARY_PROMPT_TOKENS
    config = engine.llm.vllm_config
    spans = config.cache_config.block_size, config.model_config.get_sliding_window() or 0
    return max([CANARY_PROMPT_TOKENS, *(span + 1 for span in spans if span < longest(engine))])


class Compared(NamedTuple):
    """The canary's tokens, and their log-probabilities (B, T) on both sides."""

    rollouts: list[Rollout]
    trainer: Tensor
    engine: Tensor


@torch.no_grad()
def logprobs_of(rollouts: list[Rollout], policy: Policy) -> Tensor:
    """Log-probabilities at temperature 1, with the weights that the engine gets: (B, T).

    All prompts have one length, and so have the responses. One row at a time: the KV cache takes
    memory now.
    """
    at_1 = policy.with_(head=replace(policy.head, temperature=1.0))
    with policy.using(policy.send.engine_parameters()):
        rows = [at_1.logprobs(make_batch([rollout], policy.device))[0] for rollout in rollouts]
    return torch.stack(rows)[:, len(rollouts[0].prompt_ids) - 1 :].cpu()


def compared(
    engine: Engine, policy: Policy, of_length: int, prompt_seed: int = 0,
    max_new_tokens: int = CANARY_NEW_TOKENS,
) -> Compared:
    """Sample a few tokens, and compute their log-probabilities on both sides.

    At temperature 1, where raw and processed values agree. The prompt has `of_length` tokens; 0:
    the canary's own prompts.
    """
    shape = (1, of_length) if of_length else (CANARY_PROMPTS, length(engine))
    generator = torch.Generator().manual_seed(prompt_seed)
    prompts = torch.randint(engine.vocab_size, shape, generator=generator).tolist()
    room = engine.llm.vllm_config.model_config.max_model_len - shape[1]
    rollouts = engine.sample_beside(prompts, min(max_new_tokens, room))
    reported = torch.tensor([rollout.logprobs for rollout in rollouts])
    return Compared(rollouts, logprobs_of(rollouts, policy), reported)


def scaled_length(engine: Engine) -> int:
    """Length of a prompt that passes the model's original context; 0 if none can.

    Beyond this context rotary angles or scores are scaled. The prompt leaves room for a response.
    """
    config = engine.llm.vllm_config.model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma has a dictionary of them.
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    originals = [one.get("original_max_position_embeddings") for one in ropes]
    passed = [original for original in originals if original and longest(engine) > original]
    return max(max(passed) + 1, longest(engine) - 6) if passed else 0


def attempted(compute: Callable[[], Tensor]) -> Tensor | None:
    """What needs float32; None, with a notice, if a kernel takes 16 bits alone."""
    try:
        return compute()
    except Exception as error:  # of the library whose kernel it is
        print(f"notice: the trainer's own noise is NOT MEASURED, {error!r}: the limit is"
              f" {UNMEASURED} nats")
        return None


def precise_body(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `rl.row_by_row`, in twice the precision."""
    with twice_as_precise(policy.model):
        return policy.hidden(batch.inputs)[response]


class Canary:
    """The canary of one engine, and the limits that it has measured.

    `nats`: the limit that the user gives; else it is NATS in fp32, and measured in 16 bits.
    """

    def __init__(self, engine: Engine, nats: float | None = None):
        self.engine = engine
        # The limit of a load; 0 until the first load has measured it.
        self.nats = nats or (NATS if engine.dtype == torch.float32 else 0.0)
        if any(setting.moves_canary and setting.flag in engine.parity.off()
               for setting in SETTINGS):
            self.nats = inf
        self.measures_limit = not self.nats
        self.loads = 0  # that have passed
        self.limit = NATS  # the largest of all its limits: of a step's rows

    def check(self, policy: Policy) -> None:
        """Raises: WeightLoadError if both sides differ by more than the limit; ValueError if the
        trainer's head is at fault.
        """
        limit = self._compare(policy)
        if not self.loads:
            if beyond := scaled_length(self.engine):
                self._compare(policy, beyond)
            self.nats = limit
        self.loads += 1

    def _compare(self, policy: Policy, of_length: int = 0) -> float:
        """Compare both sides, and return the limit in nats.

        In 16 bits the first load measures the limit, and a later load that exceeds it measures a
        new one, because rounding grows with the logits.
        """
        engine, limit, first = self.engine, self.nats, not self.loads
        # Rounding can send a token of a mixture to another expert, and one such token can differ by
        # several nats. In 16 bits a few tokens do, so the median is taken; in fp32 it is rare, so
        # other prompts are tried.
        is_mixture = bool(expert_layers(engine))
        average = Tensor.median if is_mixture and engine.dtype != torch.float32 else Tensor.mean
        # `_measure` has other prompts.
        attempts = 2 if is_mixture and not self.measures_limit else 1
        for prompt_seed in range(attempts):
            both = compared(engine, policy, of_length, prompt_seed)
            difference = average((both.trainer - both.engine).abs()).item()
            if difference <= limit:
                break
        if self.measures_limit and not difference <= limit:
            difference, limit = self._measure(policy, both, of_length, average)
            limit = max(NATS, limit)
        ties = UNMEASURED * is_mixture  # in fp32 too: they widen a step's mean
        self.limit = max(self.limit, limit, ties)
        if first:
            where = f"canary after {of_length} tokens" if of_length else "canary"
            engine.settings[where] = (
                f"{difference:.1e} nats, {difference / limit:.2f} of the limit {limit:.1e}")
        if difference <= limit:
            return limit
        fault = "the engine does not hold the trainer's weights"
        if first:  # or one of the two sides computes this model wrongly
            check_head(policy)
            beyond = f" after {of_length} tokens, beyond its original context" if of_length else ""
            fault += f", or vLLM computes {engine.config.model_type} differently{beyond}"
        raise WeightLoadError(
            f"after load {engine.weight_version} {fault}: the canary's {average.__name__}"
            f" |trainer - engine| is {difference:.2e} nats, more than {limit:.1e}")

    def _measure(
        self, policy: Policy, both: Compared, of_length: int, average: Callable[[Tensor], Tensor]
    ) -> tuple[float, float]:
        """The average |trainer - engine| and its limit, in nats.

        More tokens are sampled after other prompts: at the first load, and at a later load that
        exceeds the limit, because figures of few tokens vary. If the engine's head has 16 bits, its
        rounding is noise too.
        """
        engine, first = self.engine, not self.loads
        times = TIMES_LATER
        if first:
            times = TIMES_ON_GPU if engine.on_gpu else TIMES
        head = replace(policy.head, dtype=getattr(torch, engine.settings["head_dtype"]))
        precise_policy = policy.with_(body=precise_body, head=head)
        differences, noises = [], []
        while True:
            differences.append((both.trainer - both.engine).abs().flatten())
            difference = average(torch.cat(differences)).item()
            precise = attempted(partial(logprobs_of, both.rollouts, precise_policy))
            if precise is None:
                return difference, UNMEASURED
            noises.append((both.trainer - precise).abs().flatten())
            limit = times * average(torch.cat(noises)).item()
            needed = MOST_TOKENS
            if difference <= limit:
                needed = TOKENS if first else 0
            if sum(map(len, noises)) >= needed:
                return difference, limit
            both = compared(engine, policy, of_length, len(noises), RESPONSE)

    def check_step(self, metrics: dict[str, Any]) -> None:
        """The mismatch of a step's rows that are not stale: a source, a metric's function or a
        later change of the trainer can spoil what the canary, which has prompts of its own, has
        found right.

        Raises: AuditError if it is far beyond the canary's limit.
        """
        difference = metrics.get("current_mismatch_abs_mean", 0.0)
        if difference > TIMES_IN_A_STEP * self.limit:
            raise AuditError(
                f"the mismatch is {difference:.2e} nats, more than {TIMES_IN_A_STEP} times the"
                f" canary's limit of {self.limit:.1e}, and no fix is off: the trainer scores other"
                " tokens than the engine sampled (a changed prompt, say), or with other weights; an"
                " option that means it adds to run.not_stated; for vLLM's noise alone, try a larger"
                " --canary-nats")
