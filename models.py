"""A model's folder: its weights are read and written. tasks/model_folder.py describes a user's."""

import re
from pathlib import Path
from shutil import copymode
from typing import Any

import torch


def read_config(path: str) -> Any:
    """The configuration of a folder's language model, which is a part of a multimodal one.

    Raises: ValueError for a multimodal model whose text model is not known here.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.get_text_config() is config:
        return config
    from extras.multimodal import text_config

    return text_config(path, config)


def load_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The causal language model of a folder, in evaluation mode on the CPU.

    Tensors of the checkpoint that the model does not have are printed. Raises: ValueError if a
    tensor of the model is missing in the checkpoint, not finite, or of another shape there, or if
    the checkpoint has a head of its own and the configuration ties the head to the embedding.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from extras.multimodal import left_out, text_names

    torch.backends.cuda.enable_cudnn_sdp(False)  # 1 s for each new shape; vLLM does it too
    config, renamed = read_config(path), text_names(path)  # of a multimodal folder
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report is below
    logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        path, config=config, key_mapping=renamed or None, dtype=dtype,
        attn_implementation=attention_for(config), output_loading_info=True,
        ignore_mismatched_sizes=True, use_safetensors=True, trust_remote_code=False)
    logging.set_verbosity(verbosity)
    # Engine and export get the text model's own names.
    model._weight_conversions = [each for each in model._weight_conversions
                                 if not renamed.keys() & set(each.source_patterns)]
    check_names(path, model, report, left_out(path, model) if renamed else set())
    # transformers unties a head that differs from the embedding; vLLM does not.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ValueError(f"config.json in {path} must not tie head and embedding (the weights have"
                         " a head of their own); set tie_word_embeddings to false there")
    bad = [name for name, each in model.named_parameters() if not each.isfinite().all()]
    if bad:
        raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
    return model


def check_names(
    path: str, model: torch.nn.Module, report: dict[str, Any], outside: set[str]
) -> None:
    """Print what the checkpoint has and the model has not, except for what is `outside` of it.

    transformers leaves out of its report what the class ignores. Raises: ValueError if a tensor of
    the model is missing, wrongly shaped, or beside a scale of its own.
    """
    from extras.further_tokens import for_further_tokens
    from extras.multimodal import tensor_names

    missing, mismatched = report["missing_keys"], report["mismatched_keys"]
    if missing or mismatched:
        raise ValueError(f"the checkpoint in {path} must have every tensor of"
                         f" {type(model).__name__}: missing {sorted(missing)}, wrongly shaped"
                         f" {sorted(mismatched)}")
    names, held = tensor_names(path), model.state_dict().keys()
    copied = for_further_tokens(names, model.config)
    silent = {name for name in names - held
              if f"{model.base_model_prefix}.{name}" not in held  # a checkpoint may leave it out
              and any(re.search(each, name) for each in model._keys_to_ignore_on_load_unexpected)}
    unexpected = (silent | set(report["unexpected_keys"])) - outside
    unexpected -= for_further_tokens(unexpected, model.config)
    scales = [each for each in unexpected if re.sub("_scale(_inv)?$", "", each) in names - {each}]
    if scales:
        raise ValueError(f"model must not be quantised (it is trained), the checkpoint in {path}"
                         f" has {min(scales)} and {len(scales) - 1} more scales")
    if copied:
        print(f"not trained, and copied to an export: {len(copied)} tensors for multi-token"
              f" prediction, {min(copied)} to {max(copied)}", flush=True)
    if unexpected:
        print(f"tensors of the checkpoint that {type(model).__name__} does not have:"
              f" {', '.join(sorted(unexpected))}", flush=True)


def attention_for(config: Any) -> str:
    """sdpa, but eager where sdpa drops soft-capping and where the class has no sdpa (Mamba 2)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "sdpa" if has_sdpa and not getattr(config, "attn_logit_softcapping", None) else "eager"


def save_model(model: torch.nn.Module, tokenizer: Any, sampling: Any, folder: Path) -> None:
    """`write_folder`, with `sampling` (engine_adapter.Sampling) except for its `max_new_tokens`."""
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
    from transformers.utils import logging

    from extras.transformers4 import add_old_names

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_old_names(folder, tokenizer)
    for weights in folder.glob("*.safetensors"):
        copymode(folder / "config.json", weights)
