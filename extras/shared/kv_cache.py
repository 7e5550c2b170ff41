"""Which models have a KV cache alone; prompts padded on the left; a body that goes on from a cache.

Shared by extras/cuda_graphs.py, prefix_cache.py, prompts_once.py and transformers_engine.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

RECURRENT = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}  # of transformers' layer_types


def has_recurrent_layers(model: torch.nn.Module) -> bool:
    """Whether a layer keeps a state in place of keys and values, or beside them."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return model._is_stateful or bool(RECURRENT & {*kinds})


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
