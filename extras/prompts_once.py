"""`--prompts-once`, on by default: the body computes each prompt once for all its responses.

Micro-batches then keep answers to one prompt together. A test holds values and gradients equal to
those of rows that are computed whole.
"""

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from extras import Extra
from extras.shared.kv_cache import left_padded, states_after
from rl import Batch, Policy, longest_first, row_by_row


class Options(Extra):
    """The trainer's forward pass."""

    prompts_once: bool = True  # Compute each prompt once for all its responses: it is only faster.

    def install(self, run: Any) -> None:
        if self.prompts_once:
            run.with_model.append(lambda model: run.policy.update(policy_options(model)))


def policy_options(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of `Policy`, none if the model's layers do not allow it.

    A recurrent state would see the padding, and a checkpointed layer has no cache. With a window of
    1 transformers' cache keeps all keys, by the slice [-(1 - 1):].
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if model._is_stateful or model.is_gradient_checkpointing:
        return {}
    for layer in DynamicCache(config=model.config).layers:
        is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not is_plain or getattr(layer, "sliding_window", None) == 1:
            return {}
    return {"body": prompts_once, "pack": siblings_together}


# ---------------------------------------------------------------------------------- micro-batches
def siblings_together(batch: Batch, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """As `longest_first`, or with answers to one prompt together if fewer positions are computed.
    """
    by_length = longest_first(batch, rows, micro_batch_tokens)
    siblings = defaultdict(list)
    for row in map(int, chain(*by_length)):
        siblings[tuple(batch.rollouts[row].prompt_ids)].append(row)
    ordered = torch.tensor([*chain(*siblings.values())], dtype=torch.long)
    by_prompt = batch.cut(ordered, micro_batch_tokens)

    def num_positions(micro_batches: list[Tensor]) -> int:
        """Positions that `prompts_once` computes: each prompt, and each response."""
        total = 0
        for micro in micro_batches:
            prompts = {tuple(batch.rollouts[row].prompt_ids) for row in micro.tolist()}
            starts = batch.prompt_lengths[micro]
            responses = batch.input_lengths[micro] - starts
            total += len(prompts) * int(starts.max()) + len(micro) * int(responses.max())
        return total

    return min(by_length, by_prompt, key=num_positions)


# ---------------------------------------------------------------------------------- body
def prompts_once(policy: Policy, batch: Batch, response: Tensor) -> Tensor:
    """As `row_by_row`, with each distinct prompt computed once for all its responses.

    Two passes with one KV cache. The first computes the D prompts, padded on the left to S columns,
    so that all end in one column. The second has B rows of R columns, the responses without their
    last tokens: a row of the cache is then [padding, prompt, response, padding]. The last state of
    a prompt predicts the first token of the response. Gradients are included.
    """
    # The prompts, with -1 at padding, and which of them each row has: (D, S), (B,).
    from transformers import DynamicCache

    prompts, rows = left_padded(rollout.prompt_ids for rollout in batch.rollouts).unique(
        dim=0, return_inverse=True)
    if len(prompts) == len(rows):
        return row_by_row(policy, batch, response)  # nothing to share
    prompts, rows = prompts.to(policy.device), rows.to(policy.device)
    cache, is_prompt = DynamicCache(config=policy.model.config), prompts >= 0  # (D, S)
    of_prompts = states_after(cache, policy.model, prompts.clamp(min=0), is_prompt)  # (D, S, H)
    hidden = of_prompts[:, -1:].index_select(0, rows)  # (B, 1, H)

    starts = batch.prompt_lengths.to(policy.device)[:, None]  # (B, 1), where the responses begin
    longest = int((batch.input_lengths - batch.prompt_lengths).max())
    # (B, R + 1), the columns of `hidden` in the batch: the prompt's last one, and the response's.
    columns = starts - 1 + torch.arange(longest + 1, device=policy.device)
    # Row by row, which is the order of `[response]` in row_by_row.
    wanted = pad(response, (0, longest)).gather(1, columns)
    if longest:
        cache.reorder_cache(rows)  # D rows become B
        of_responses = starts + torch.arange(longest, device=policy.device)  # (B, R), columns
        ids = pad(batch.inputs, (0, longest)).gather(1, of_responses)  # (B, R)
        # Padding after a response counts as real: only other padding attends to it.
        real = torch.cat([is_prompt[rows], torch.ones_like(ids, dtype=torch.bool)], dim=1)
        further = states_after(cache, policy.model, ids, real)  # (B, R, H)
        hidden = torch.cat([hidden, further], dim=1)  # (B, R + 1, H)
    return hidden[wanted]
