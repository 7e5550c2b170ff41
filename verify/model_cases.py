"""What single architectures need of vLLM: faults of its kernels and loads, and scaled contexts.

"""

from typing import Any

import torch

from verify.proof import renaming


def import_classes(config: Any) -> None:
    """Import vLLM's classes here: it would hide an ImportError, and start a process (13 s).

    A folder may name no class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    for name in ModelRegistry.models.keys() & set(config.architectures):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def refuse_or_repair(model: Any, dtype: torch.dtype, tensor_names: set[str]) -> None:
    """For vLLM's live `model`, which gets the tensors of these names.

    Raises: ValueError for one that this vLLM computes or loads wrongly.
    """
    on_cpu = not torch.cuda.is_available()
    recurrent = {layer.mamba_type.name for layer in model.modules() if hasattr(layer, "mamba_type")}
    if on_cpu and dtype != torch.float32 and recurrent & {"MAMBA1", "MAMBA2"}:
        raise ValueError("its Mamba layers differ by 0.04 to 7 nats in 16 bits on a CPU;"
                         " try float32")
    if "lm_head.bias" in tensor_names and model.lm_head.bias is None:
        # vLLM's Transformers backend makes the bias of a head when a load brings one. It drops this
        # bias again unless the weight has come before and fills the padded vocabulary.
        with torch.device(model.lm_head.weight.device):
            model.lm_head._register_bias()
        model.lm_head.bias.data.zero_()
    if on_cpu:
        _rotate_natively(model)


def latent_attention(config: Any, on_gpu: bool) -> Any:
    """vLLM's backend for latent attention on a CPU, None for another model.

    With AMX tiles vLLM would pick one that drops the raw weights, which a load and the proof need.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    latent = getattr(config.get_text_config(), "kv_lora_rank", None)
    # vLLM 0.26 has no such backend.
    return AttentionBackendEnum.__members__.get("CPU_MLA") if latent and not on_gpu else None


def _rotate_natively(model: Any) -> None:
    """vLLM's CPU kernel is wrong for queries of shape (tokens, heads, head): LFM2, DeepSeek.

    Each layer is looked at once, in the first canary.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    hooks = {}

    def look(module: Any, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        hooks.pop(module).remove()
        query = arguments[1] if len(arguments) > 1 else by_name["query"]
        if query.ndim == 3:
            module._forward_method = module.forward_native  # vLLM's name for what it calls

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            hooks[module] = module.register_forward_pre_hook(look, with_kwargs=True)


def tied_heads(engine: Any) -> set[str]:
    """The names of a head that is the embedding, which the trainer sends too."""
    config = engine.llm.vllm_config.model_config.hf_text_config
    return {name for name in engine.tensor_names
            if config.tie_word_embeddings and name.endswith("lm_head.weight")}


def heads_without_a_name(engine: Any) -> set[str]:
    """Tied heads that cannot be sent: vLLM has no such tensor. Where it has one (its CPU build
    packs a copy), it must be sent."""
    own = dict(engine.vllm_model.named_parameters(remove_duplicate=False))
    rename = renaming(engine.vllm_model)
    return {head for head in tied_heads(engine) if rename(head) not in own}


def scaled_length(engine: Any, longest: int) -> int:
    """Length of a prompt that passes the model's original context; 0 if `longest` tokens do not.

    Beyond this context rotary angles or scores are scaled. The prompt leaves room for a response.
    """
    config = engine.llm.vllm_config.model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma has a dictionary of them.
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    originals = [one.get("original_max_position_embeddings") for one in ropes]
    passed = [original for original in originals if original and longest > original]
    return max(max(passed) + 1, longest - 6) if passed else 0
