"""The memory of a run on one GPU, as a formula: bytes of each term in each phase of a step.

Full training in 16 bits holds 18 bytes a parameter in the update: weights 2, fp32 masters 4, Adam's
moments 8, gradients 4. With --lora-rank R it holds 2 a parameter and 16 for each of the adapters,
which are R times the sum of in + out over its linear layers.

Shared by extras/memory_check.py, lab/memory.py and lab/bench.py.
"""

from typing import Any

import torch
from torch.nn import LayerNorm, Module

from extras.linear_layers import linear_layers, only_linear_layers

GIB = 2**30
CONTEXT = 1.5 * GIB  # estimate: CUDA context, workspaces, vLLM's buffers that sleep does not free
HEAD_CHUNKS = 4  # chunks of logits that the head holds at once, in fp32


def without_memory(model_config: Any) -> Module:
    """The model on torch's meta device: shapes without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config)


def phases(
    config: Any, model: Module, prompt_tokens: int, chunk_elements: int
) -> dict[str, dict[str, float]]:
    """Bytes by term, in the phases with the largest peaks. `model` may be on the meta device.

    Raises: ValueError with adapters if the model has experts.
    """
    given = config.flat()  # an option exists only with its file
    size = getattr(torch, config.dtype).itemsize
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = size * parameters
    adapters = num_adapter_parameters(given, model)
    trained = adapters or parameters
    copied = 4 * adapters or weights  # bytes
    positions = num_positions(config, model, prompt_tokens)
    masters = 0 if adapters or size == 4 else 4 * trained  # adapters are fp32, their own masters
    probed = given.get("probe_every") or given.get("probe_on_alarm")
    copies = bool(config.kl_coef) + 2 * bool(probed)  # a probe needs the earlier weights, too
    always = {"weights": weights + 4 * adapters + copies * copied, "context": CONTEXT}
    optimizer = {"optimizer": masters + 8 * trained}
    # The engine of the trainer's own modules has the trainer's weights.
    engine = {"engine": weights * ("engine" not in config.given) + config.kv_cache_gib * GIB}
    # The sampler's logits, probabilities and noise, (sequences, V) in fp32.
    sampler = {"sampler": 4 * config.max_num_seqs * model.config.vocab_size * 4}
    generate = always | engine | sampler
    if not given.get("offload_optimizer"):
        generate |= optimizer
    head = HEAD_CHUNKS * min(chunk_elements, positions * model.config.vocab_size) * 4
    activations = positions * activation_bytes(given, model, size) + head
    update = always | optimizer | {"gradients": 4 * trained, "activations": activations}
    kept = config.parity.inflight_keep  # sleep would drop the KV cache
    if given.get("inflight_groups") and kept:
        update |= engine
    return {"generate": generate, "update": update}


def num_adapter_parameters(given: dict[str, Any], model: Module) -> int:
    """Of --lora-rank or --adapter, 0 without them. Raises: ValueError if the model has experts."""
    layers, rank = linear_layers(model), given.get("lora_rank")
    if given.get("adapter"):
        from extras.adapter_folder import read, targets

        entries, _ = read(given["adapter"])
        rank = entries["r"]
        layers = {name: layer for name, layer in layers.items()
                  if targets(entries, name.removesuffix(".weight"))}
    if not rank:
        return 0
    only_linear_layers(model, "lora_rank must be 0", "get adapters")
    return rank * sum(sum(layer.weight.shape) for layer in layers.values())


def activation_bytes(given: dict[str, Any], model: Module, size: int) -> float:
    """What backward needs of a position, with `size` bytes a number.

    Of a layer: 16 H for the norms, which compute in fp32, and size (8 H + 4 I) for attention and
    MLP; 2 I in an MLP without a gate. Attention's scores are not kept (flash attention). With
    checkpointing each layer keeps its input, and one layer all of this.
    """
    shape = model.config
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    norms = 16 * hidden
    if any(isinstance(module, LayerNorm) for module in model.modules()):
        norms = 0  # torch's own LayerNorm keeps no more than its input
    # Outputs of the MLPs' first matrices: gate and up, apart or in one, or one without a gate.
    wide = sum(layer.out_features for layer in linear_layers(model).values()
               if layer.out_features in (inner, 2 * inner))
    numbers = 8 * layers * hidden + 2 * (wide or 2 * layers * inner)
    all_layers = layers * norms + size * numbers
    if given.get("gradient_checkpointing"):
        return layers * size * hidden + all_layers / layers
    return all_layers


def num_positions(config: Any, model: Module, prompt_tokens: int) -> float:
    """Positions of the largest micro-batch. A prompt computed once counts once for its rows."""
    given = config.flat()
    longest = prompt_tokens + config.max_new_tokens
    rows = config.num_prompts * config.group_size // config.num_minibatches
    positions = min(max(config.micro_batch_tokens, longest), rows * longest)
    if given.get("prompts_once") and not given.get("gradient_checkpointing"):
        from extras.prompts_once import can_share_prompts

        if can_share_prompts(model):
            siblings = min(config.group_size, positions // longest)
            positions *= (config.max_new_tokens + prompt_tokens / siblings) / longest
    return positions
