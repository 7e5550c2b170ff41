"""One rotary table for a run, as in vLLM, for the rope types longrope and dynamic.

For these types transformers chooses the table by the longest position of a forward pass. A row
would then depend on the rows beside it, and cached keys would have another table than later
tokens. The file imports nothing of ours.
"""

import re
from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch


def one_table(config: Any, longest: int | None) -> dict[str, Any]:
    """The changes of a configuration: longrope keeps only the factors for rows of `longest` tokens.

    If `longest` is None, those for rows as long as the context. Both sides get the changes: vLLM
    itself chooses the same factors by its max_model_len, but not in its Transformers backend, and
    it ignores `factor` and `attention_factor`.
    """
    ropes = getattr(config, "rope_parameters", None)
    if not re.search("longrope|dynamic", str(ropes)):
        return {}
    return {"rope_parameters": _with_one(config, ropes, longest)}


def _with_one(
    config: Any, rope: Any, longest: int | None, layer_type: str | None = None
) -> Any:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not isinstance(rope, dict):
        return rope
    if rope.get("rope_type") != "longrope":  # another type, or a rope for each type of layer
        return {name: _with_one(config, each, longest, name) for name, each in rope.items()
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
    config = deepcopy(model.config)
    changes = one_table(config, longest)
    if changes:
        config.update(changes)
        for name, module in [*model.named_modules(remove_duplicate=False)]:
            if hasattr(module, "rope_type"):  # transformers' name in each class
                table = type(module)(config).to(model.device)
                table.rope_type = defaultdict(str)  # so its forward pass chooses no other table
                model.set_submodule(name, table)
