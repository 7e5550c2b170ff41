"""On a GPU a run prints the memory that it needs, and is refused if it cannot fit.

Full training in 16 bits holds 18 bytes a parameter in the update: weights 2, fp32 masters 4, Adam's
moments 8, gradients 4. With adapters it holds 2 a parameter, and 16 for each of the adapters.
"""

from functools import partial
from typing import Any

import torch
from torch.nn import Module

from extras import Extra
from rl import head_chunk

GIB = 2**30
GRAPH = 2**20  # bytes, vLLM's own lower bound of a CUDA graph


class Options(Extra):
    """None: it acts in each run on a GPU."""

    def install(self, run: Any) -> None:
        """Note the free memory before the weights are loaded; compare once there are adapters."""
        if torch.cuda.is_available():
            run.with_model.append(partial(compare, run, torch.cuda.mem_get_info()))


def compare(run: Any, memory: tuple[int, int], model: Module) -> None:
    """Print what the run needs of the free and the whole `memory`, in bytes.

    Raises: ValueError if the certain terms exceed what is free.
    """
    config, free = run.config, memory[0] / GIB
    phases = certain(config, model, run.engine_kind.copies_weights)
    # Sleep does not free graphs.
    graphs = GRAPH * len(run.further.get("compilation_config.cudagraph_capture_sizes", ()))
    kept = activations(config, model, run.max_model_len, head_chunk(memory[1] / GIB))
    need = (max(phases.values()) + graphs) / GIB
    about = max(need, (phases["update"] + graphs + kept) / GIB)
    words = f"at least {need:.1f} GiB, about {about:.1f} with activations, of {free:.1f} free"
    if need > free:
        raise ValueError(f"the run must fit into the GPU, it needs {words}; try --lora-rank 16,"
                         " --offload-optimizer or a smaller --kv-cache-gib")
    if about > free:
        words += "; it may NOT fit: try --gradient-checkpointing or a smaller --micro-batch-tokens"
    print(f"memory: {words}")


def certain(config: Any, model: Module, copies_weights: bool) -> dict[str, float]:
    """Bytes in the phases with the largest peaks, without activations, CUDA graphs, workspaces."""
    given = config.flat()  # an option exists only with its file
    parameters = [*model.parameters()]
    trained = sum(each.nbytes for each in parameters if each.requires_grad)
    fp32 = sum(4 * each.numel() for each in parameters if each.requires_grad)
    weights = sum(each.nbytes for each in parameters)
    engine = config.kv_cache_gib * GIB
    if copies_weights:
        engine += (weights - trained) or trained  # adapters are merged into what is frozen
    optimizer = 2 * fp32
    if trained < fp32:  # masters
        optimizer += fp32
    if config.kl_coef:  # a frozen copy
        weights += trained
    generate = weights + engine
    if not given.get("offload_optimizer"):
        generate += optimizer
    update = weights + optimizer + fp32  # the last are the gradients
    if given.get("inflight_groups") and config.parity.inflight_keep:
        update += engine  # sleep would drop the KV cache
    return {"generate": generate, "update": update}


def activations(config: Any, model: Module, longest: int, chunk_elements: int) -> float:
    """Bytes that the largest micro-batch keeps for backward, of blocks like Qwen2's and Llama's.

    A position of a layer: 16 H for the norms, which compute in fp32, and 8 H + 4 I numbers for
    attention and MLP. With checkpointing each layer keeps its input, and one layer all of this. The
    head holds four chunks of logits, and the gradient of its weight, in fp32.
    """
    shape, size = model.config, getattr(torch, config.dtype).itemsize
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    rows = config.num_prompts * config.group_size // config.num_minibatches
    positions = min(max(config.micro_batch_tokens, longest), rows * longest)
    inner = getattr(shape, "intermediate_size", None)
    if type(inner) is not int:  # GPT-2's None
        inner = 4 * hidden
    layer = 16 * hidden + size * (8 * hidden + 4 * inner)
    body = layers * layer
    if config.flat().get("gradient_checkpointing"):
        body = layer + layers * size * hidden
    head = 4 * min(chunk_elements, positions * shape.vocab_size)
    if model.get_output_embeddings().weight.requires_grad:
        head += hidden * shape.vocab_size
    return positions * body + 4 * head
