"""A model's folder: its weights are read and written. extras/model_folder.py describes a user's."""

import re
from pathlib import Path
from shutil import copymode
from typing import Any

import torch

# Multimodal models whose text model is trained here, by their type.
MULTIMODAL = "gemma3", "gemma4", "lfm2_vl", "mistral3", "qwen3_5", "qwen3_vl"
# How their checkpoints name its tensors, and how it names them itself.
TEXT_NAMES = {"model.language_model.": "model.", "language_model.model.": "model.",
              "language_model.lm_head.": "lm_head."}


def read_config(path: str) -> Any:
    """The configuration of a folder's language model, which is a part of a multimodal one.

    Raises: ValueError for a multimodal model that is none of MULTIMODAL.
    """
    from transformers import AutoConfig, Qwen3Config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config = whole.get_text_config()
    if config is whole:
        return config
    if whole.model_type not in MULTIMODAL:
        raise ValueError(f"model must be a language model, or one of {', '.join(MULTIMODAL)} (whose"
                         f" text model is trained), {path} is a {whole.model_type}; try a folder"
                         f" with its {config.model_type} alone")
    names = tensor_names(path)  # none where only the configuration is there
    headless = names and not any(name.endswith("lm_head.weight") for name in names)
    tied = whole.tie_word_embeddings and config.tie_word_embeddings
    if config.model_type == "qwen3_vl_text":  # has no class of its own
        # Without pictures the three positions of a token are equal, and what is left is Qwen3.
        options = config.to_dict()
        rope = options["rope_parameters"].items()
        options["rope_parameters"] = {name: each for name, each in rope if "mrope" not in name}
        config = Qwen3Config(**options | {"model_type": "qwen3"})
    either = whole.tie_word_embeddings or config.tie_word_embeddings
    config.tie_word_embeddings = bool(tied or (headless and either))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def tensor_names(path: str) -> set[str]:
    """Those of the checkpoint in a folder, one file or several."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in Path(path).glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    return names


def load_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The causal language model of a folder, in evaluation mode on the CPU.

    Tensors of the checkpoint that the model does not have are printed. Raises: ValueError if a
    tensor of the model is missing in the checkpoint, not finite, or of another shape there, or if
    the checkpoint has a head of its own and the configuration ties the head to the embedding.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.backends.cuda.enable_cudnn_sdp(False)  # 1 s for each new shape; vLLM does it too
    config, names = read_config(path), tensor_names(path)
    renamed = {f"^{re.escape(old)}": new for old, new in TEXT_NAMES.items()
               if any(name.startswith(old) for name in names)}
    twice = [new + name.removeprefix(old) for old, new in TEXT_NAMES.items() for name in names
             if name.startswith(old) and new + name.removeprefix(old) in names]
    if twice:
        raise ValueError(f"the checkpoint in {path} must have each tensor once, it has two of"
                         f" {', '.join(sorted(twice))}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report is below
    model, report = AutoModelForCausalLM.from_pretrained(
        path, config=config, key_mapping=renamed or None, dtype=dtype,
        attn_implementation=attention_for(config), output_loading_info=True,
        ignore_mismatched_sizes=True, use_safetensors=True, trust_remote_code=False)
    logging.set_verbosity(verbosity)
    # Engine and export get the text model's own names.
    model._weight_conversions = [each for each in model._weight_conversions
                                 if not renamed.keys() & set(each.source_patterns)]
    check_names(path, model, report, names if renamed else set())
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
    path: str, model: torch.nn.Module, report: dict[str, Any], multimodal: set[str]
) -> None:
    """Print what the checkpoint has and the model has not; `multimodal`: names of such a folder.

    Raises: ValueError if a tensor of the model is missing or wrongly shaped.
    """
    missing, mismatched = report["missing_keys"], report["mismatched_keys"]
    if missing or mismatched:
        raise ValueError(f"the checkpoint in {path} must have every tensor of"
                         f" {type(model).__name__}: missing {sorted(missing)}, wrongly shaped"
                         f" {sorted(mismatched)}")
    # Towers for pictures and sound.
    loaded = model.state_dict().keys()
    outside = {name for name in multimodal
               if not name.startswith((*TEXT_NAMES, "lm_head.")) and name not in loaded}
    if outside:
        parts = sorted({name.removeprefix("model.").partition(".")[0] for name in outside})
        print(f"only the text model is trained, {type(model).__name__}: {len(outside)} tensors are"
              f" left out ({', '.join(parts)})", flush=True)
    unexpected = sorted(set(report["unexpected_keys"]) - outside)
    if unexpected:
        print(f"tensors of the checkpoint that {type(model).__name__} does not have:"
              f" {', '.join(unexpected)}", flush=True)


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
