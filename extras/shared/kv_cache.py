"""Prompts padded on the left, and a body that goes on from a KV cache.

Shared by extras/prompts_once.py and extras/transformers_engine.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def left_padded(prompts: Iterable[list[int]]) -> Tensor:
    """N prompts, padded with -1 so that all end in one column: (N, S)."""
    return pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True, padding_value=-1,
                        padding_side="left")


def states_after(cache: Any, model: torch.nn.Module, ids: Tensor, real: Tensor) -> Tensor:
    """Last hidden states of `ids` after the S columns in the cache, which gets R more.

    `real` is false at padding. Shapes: ids (N, R), real (N, S + R) -> (N, R, H).
    """
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model.base_model(input_ids=ids, attention_mask=real, position_ids=positions,
                            past_key_values=cache, use_cache=True).last_hidden_state
