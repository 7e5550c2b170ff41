"""Each distinct prompt of a micro-batch is computed once for all its responses: the default."""

import torch
from torch import Tensor
from transformers import DynamicCache

from objectives import Batch
from rl import Policy


def compute_prompts_once(policy: Policy) -> None:
    """Set the policy's body, if its layers allow it.

    A recurrent state would see the padding, transformers' cache keeps all keys of a window of 1,
    and a checkpointed layer has no cache.
    """
    layers = DynamicCache(config=policy.model.config).layers
    kinds = {type(layer).__name__ for layer in layers}
    known = kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"} and not policy.model._is_stateful
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if known and 1 not in windows and not policy.model.is_gradient_checkpointing:
        policy.own_body = policy.body = PromptsOnce(policy)


class PromptsOnce:
    """`Policy.plain_body` with each distinct prompt computed once, gradients included."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def __call__(self, batch: Batch, response: Tensor) -> Tensor:
        """(B, T) bool -> (N, H). Prompts are padded on the left: all P end in one column."""
        device, lengths = self.policy.device, batch.prompt_lengths
        last = batch.inputs.shape[1] - 1
        starts = lengths.to(device)[:, None]  # (B, 1), where the responses begin
        # (B, S), the prompts' columns, < 0 for padding
        before = starts + torch.arange(-int(lengths.max()), 0, device=device)
        # (B, R), the responses' columns
        after = starts + torch.arange(int((batch.lengths - lengths).max()), device=device)
        prompts = batch.inputs.gather(1, before.clamp(min=0)).where(before >= 0, -1)
        prompts, rows = prompts.unique(dim=0, return_inverse=True)  # (P, S), (B,)
        if len(prompts) == len(rows):
            return self.policy.plain_body(batch, response)  # nothing to share

        cache = DynamicCache(config=self.policy.model.config)
        real = prompts >= 0  # (P, S)
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        ends = self._states(prompts.clamp(min=0), real, positions, cache)[:, -1:]  # (P, 1, H)
        hidden = ends.index_select(0, rows)  # (B, 1, H)
        if after.shape[1]:
            cache.reorder_cache(rows)  # P rows become B
            real = torch.cat([real[rows], real.new_ones(after.shape)], dim=1)  # (B, S + R)
            responses = batch.inputs.gather(1, after.clamp(max=last))
            # (B, R + 1, H)
            hidden = torch.cat([hidden, self._states(responses, real, after, cache)], dim=1)
        scored = torch.cat([starts - 1, after], dim=1)  # (B, R + 1), the columns of `hidden`
        return hidden[response.gather(1, scored.clamp(max=last)) & (scored <= last)]

    def _states(self, ids: Tensor, real: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Last hidden states of `ids` after what is in the cache; `real` is false at padding."""
        return self.policy.model.base_model(
            input_ids=ids, attention_mask=real, position_ids=positions, past_key_values=cache,
            use_cache=True).last_hidden_state
