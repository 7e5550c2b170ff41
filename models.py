"""A model's folder: its weights are read and written. extras/model_folder.py describes a user's."""

from pathlib import Path
from shutil import copymode
from typing import Any

import torch


def load_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The causal language model of a folder, in evaluation mode on the CPU.

    Tensors of the checkpoint that the model does not have are printed. Raises: ValueError if a
    tensor of the model is missing in the checkpoint, not finite, or of another shape there, or if
    the checkpoint has a head of its own and the configuration ties the head to the embedding.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.backends.cuda.enable_cudnn_sdp(False)  # 1 s for each new shape; vLLM does it too
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention_for(config), output_loading_info=True,
        ignore_mismatched_sizes=True, use_safetensors=True, trust_remote_code=False)
    missing, mismatched = report["missing_keys"], report["mismatched_keys"]
    if missing or mismatched:
        raise ValueError(f"the checkpoint in {path} must have every tensor of"
                         f" {type(model).__name__}: missing {sorted(missing)}, wrongly shaped"
                         f" {sorted(mismatched)}")
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        print(f"tensors of the checkpoint that {type(model).__name__} does not have:"
              f" {', '.join(unexpected)}", flush=True)
    # transformers unties a head that differs from the embedding; vLLM does not.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ValueError(f"config.json in {path} must not tie head and embedding (the weights have"
                         " a head of their own); set tie_word_embeddings to false there")
    bad = [name for name, each in model.named_parameters() if not each.isfinite().all()]
    if bad:
        raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
    return model


def attention_for(config: Any) -> str:
    """sdpa, but eager where sdpa drops soft-capping and where the class has no sdpa (Mamba 2)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "sdpa" if has_sdpa and not getattr(config, "attn_logit_softcapping", None) else "eager"


def save_model(model: torch.nn.Module, tokenizer: Any, sampling: Any, folder: Path) -> None:
    """`write_folder`, with `sampling` (rollouts.Sampling) except for its `max_new_tokens`."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p, min_p=sampling.min_p,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=tokenizer.pad_token_id,
    )
    write_folder(model, tokenizer, folder)


def write_folder(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder whose weights have the mode of its other files.

    safetensors writes files that only their owner can read.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        copymode(folder / "config.json", weights)
