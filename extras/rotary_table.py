"""One rotary table for a run, as in vLLM, for the rope types longrope and dynamic.

For these types transformers chooses the table by the longest position of a forward pass. A row
would then depend on the rows beside it, and cached keys would have another table than later
tokens. Both sides get one configuration, made here. The file imports nothing of ours.
"""

import re
from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch


def install(run: Any, options: None, parts: Any) -> None:
    """The table of the run's longest row, on both sides."""
    parts.with_model.append(lambda model: give_one_table(model, run.max_model_len))
    parts.engine["config"] = with_one_table(parts.engine["config"], run.max_model_len)


def with_one_table(config: Any, longest: int | None) -> Any:
    """The configuration, where longrope has only the factors for rows of `longest` tokens.

    If `longest` is None, those for rows as long as the context. vLLM itself chooses the same
    factors by its max_model_len, but not in its Transformers backend, and it ignores `factor` and
    `attention_factor`.
    """
    ropes = getattr(config, "rope_parameters", None)
    if not re.search("longrope|dynamic", str(ropes)):
        return config
    changed = deepcopy(config)
    changed.update({"rope_parameters": _with_one(config, ropes, longest)})
    return changed


def _with_one(
    config: Any, rope: Any, longest: int | None, layer_type: str | None = None
) -> Any:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not isinstance(rope, dict):
        return rope
    if rope.get("rope_type") != "longrope":  # another type, or a rope for each type of layer
        return {name: _with_one(config, value, longest, name) for name, value in rope.items()
                if name != "max_trained_positions"}  # vLLM's option of dynamic
    longest = longest or config.max_position_embeddings
    which = "long" if longest > rope["original_max_position_embeddings"] else "short"
    factors, scale = rope[f"{which}_factor"], rope.get(f"{which}_mscale")
    # vLLM and PhiMoE know short_mscale and long_mscale, other classes attention_factor.
    scale = scale or ROPE_INIT_FUNCTIONS["longrope"](config, layer_type=layer_type)[1]
    return rope | dict(short_factor=factors, long_factor=factors, short_mscale=scale,
                       long_mscale=scale, attention_factor=scale)


def give_one_table(model: torch.nn.Module, longest: int | None) -> None:
    """Give the trainer's model that table. Its configuration stays, because it is exported."""
    config = with_one_table(model.config, longest)
    if config is not model.config:
        for name, module in [*model.named_modules(remove_duplicate=False)]:
            if hasattr(module, "rope_type"):  # transformers' name in each class
                table = type(module)(config).to(model.device)
                table.rope_type = defaultdict(str)  # so its forward pass chooses no other table
                model.set_submodule(name, table)
