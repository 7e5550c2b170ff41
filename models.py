"""A model's folder or hub name: how it is read, what is refused there, and how it is written."""

import os
from pathlib import Path
from typing import Any

import torch

from records import stage

MODELS = "toy, a folder or a hub name; code from a model's folder is never run"


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


def describe_model(path: str) -> tuple[Any, Any, tuple[int, ...]]:
    """Text configuration, tokenizer and stop tokens, without the weights.

    Raises: ValueError if something is missing, cannot be read, or cannot be trained here.
    """
    from transformers import AutoConfig

    with stage(f"reading the model {path} ({MODELS})"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        tokenizer = load_tokenizer(path)
        stop = _stop_tokens(path, tokenizer, config)
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise ValueError(f"model must be a language model, {path} is a {config.model_type}")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(f"model must not be quantised (it is trained), {path} is:"
                         f" {quantization!s:.100}")
    if not stop or not all(type(token) is int and token >= 0 for token in stop):
        raise ValueError("model must name an end-of-sequence token (else no rollout ends),"
                         f" {path} has {stop or None}")
    return config.get_text_config(), tokenizer, tuple(sorted(stop))


def local_folder(name: str) -> str:
    """A folder and `toy` as they are; of a hub name the snapshot in the cache, downloaded first.

    So trainer, tokenizer, engine and the run's digests read the files of one commit.
    """
    from huggingface_hub import snapshot_download

    if name == "toy" or os.path.exists(name):
        return name
    reach_hub(name)
    with stage(f"reading the model {name} ({MODELS})"):
        return snapshot_download(name, allow_patterns=[
            "model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"])


def reach_hub(name: str) -> None:
    """Raises: ValueError if `name` is not a folder and the hub does not answer: transformers and
    datasets would try for half a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not os.path.exists(name) and not constants.HF_HUB_OFFLINE:
        with stage(f"{name} is no folder, and reaching {constants.ENDPOINT} (HF_HUB_OFFLINE=1 reads"
                   " what was downloaded before)"):
            get_session().head(constants.ENDPOINT, timeout=5)


def _stop_tokens(path: str, tokenizer: Any, config: Any) -> set[int]:
    """The end-of-sequence tokens of the tokenizer, config.json and generation_config.json."""
    from transformers import GenerationConfig

    sources = [tokenizer, config, config.get_text_config()]
    if (Path(path) / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(path))
    stop = set()
    for source in sources:
        declared = getattr(source, "eos_token_id", None)
        stop |= set(declared if isinstance(declared, list) else [declared])
    return stop - {None}


def load_tokenizer(path: str) -> Any:
    """The folder's own tokenizer, of the generic fast class if tokenizer_config.json names it.

    Raises: ValueError if the folder has no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named, kind = get_tokenizer_config(path).get("tokenizer_class"), AutoTokenizer
    if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):  # transformers 5's new name
        kind = PreTrainedTokenizerFast  # not Qwen's by the type: it loses characters
    tokenizer = kind.from_pretrained(path, trust_remote_code=False)
    # Without files AutoTokenizer makes an empty tokenizer for some types.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"model must be a folder with a tokenizer, {path} has none")
    return tokenizer


def save_model(model: torch.nn.Module, tokenizer: Any, sampling: Any, folder: Path) -> None:
    """A Hugging Face folder: safetensors, tokenizer, and `sampling` (rollouts.Sampling)."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p, min_p=sampling.min_p, max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
