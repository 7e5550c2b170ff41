"""A model's folder, read and written: configuration, tokenizer, tensors, and what is refused.

`describe` reads all but the weights, `load` the model, and `save` writes a folder that `load`,
vLLM and transformers read. Of a multimodal model the text model alone is read, and what is saved
has nothing else. Code from a folder is never run. docs/models.md has the architectures.
"""

import json
import os
import re
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from report.errors import stage
from report.files import read_json

KINDS = "toy, a folder or a hub name; code from a model's folder is never run"
# Labels of tokenizers that transformers 4 lets add_bos_token change; others follow tokenizer.json.
OBEY_ADD_BOS_TOKEN = "Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX"
# Multimodal models whose text model is trained here, by their type.
MULTIMODAL = "gemma3", "gemma4", "lfm2_vl", "mistral3", "qwen3_5", "qwen3_vl"
# How their checkpoints name its tensors (regular expressions), and how it names them itself.
TEXT_NAMES = {r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model.",
              r"^language_model\.lm_head\.": "lm_head."}


# ---------------------------------------------------------------------------------- the head
def shape_of_logits(config: Any) -> tuple[float, float | None]:
    """What a model does to its head's product: the scale, and the soft cap or None."""
    # Cohere has logit_scale, Falcon-H1 lm_head_multiplier; Granite divides by logits_scaling.
    multiplier = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    scale = (multiplier or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2's cap


# ---------------------------------------------------------------------------------- places
def local_folder(name: str) -> str:
    """A folder as it is; of a hub name the snapshot in the cache, downloaded first.

    So trainer, tokenizer, engine and the run's digests read the files of one commit.
    """
    from huggingface_hub import snapshot_download

    if os.path.exists(name):
        return name
    reach_hub(name)
    with stage(f"reading the model {name} ({KINDS})"):
        return snapshot_download(name, allow_patterns=[
            "model*.safetensors", "*.json", "*.jinja"])


def reach_hub(name: str, limit_s: float = 5) -> None:
    """Raises: ValueError if `name` is not a folder and the hub does not answer: for a silent one
    its own client waits more than six minutes.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not os.path.exists(name) and not constants.HF_HUB_OFFLINE:
        with stage(f"{name} is no folder, and reaching {constants.ENDPOINT} (HF_HUB_OFFLINE=1 reads"
                   " what was downloaded before)"):
            get_session().head(constants.ENDPOINT, timeout=limit_s)


# ---------------------------------------------------------------------------------- all but weights
def describe(path: str) -> tuple[Any, Any, tuple[int, ...]]:
    """The language model's configuration, the tokenizer and the stop tokens.

    Raises: ValueError if something is missing, cannot be read, or cannot be trained here.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    tensor_names(path)  # an unreadable file is named first
    folder = Path(path)
    with stage(f"reading the model {path} ({KINDS})"):
        config = read_config(path)
        with stage(f"reading {folder / 'tokenizer.json'}"):
            tokenizer = load_tokenizer(path)
        # Of these files what they say themselves: a class has defaults of its own, such as 2.
        said = [read_json(folder / "config.json")]
        said.append(said[0].get("text_config", {}))
        if (folder / "generation_config.json").exists():
            said.append(read_json(folder / "generation_config.json"))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError("model must be a causal language model that transformers"
                         f" {version('transformers')} knows, {path} is a {config.model_type}")
    # The second is Gemma 3's: embedding models have them.
    if not getattr(config, "is_causal", True) or (
            getattr(config, "use_bidirectional_attention", None) is True):
        raise ValueError("model must be causal (a token must not attend to later ones), config.json"
                         f" in {path} says that its attention is not")
    for level in said:
        if level.get("quantization_config"):
            raise ValueError(f"model must not be quantised (it is trained), {path} is:"
                             f" {level['quantization_config']!s:.100}")
    # transformers reads one file of weights, else those of the index, and ignores all others.
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"model must be without adapters (they would be ignored), {folder} has"
                         " adapter_config.json; merge them (PEFT: merge_and_unload), and train new"
                         " ones with --lora-rank")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() and index.exists():
        shards = {*read_json(index)["weight_map"].values()} - {single.name}
        if shards:
            raise ValueError(f"model must have its weights once, {folder} has {single.name}, which"
                             f" would be read, and {index.name} with {min(shards)}; move one away")
    stop = {tokenizer.eos_token_id}
    for level in said:
        declared = level.get("eos_token_id")
        stop |= {*declared} if isinstance(declared, list) else {declared}
    stop -= {None}
    if not stop or not all(type(token) is int and token >= 0 for token in stop):
        raise ValueError("model must name an end-of-sequence token (else no rollout ends),"
                         f" {path} has {stop or None}")
    return config, tokenizer, tuple(sorted(stop))


def read_config(path: str) -> Any:
    """The configuration of the language model, also where it is the text model of a multimodal one.

    Raises: ValueError for a multimodal model whose text model is not known here.
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
    ties = all if not names or "lm_head.weight" in names.values() else any
    if config.model_type == "qwen3_vl_text":  # has no class of its own
        # Without pictures the three positions of a token are equal, and what is left is Qwen3.
        options = config.to_dict()
        rope = options["rope_parameters"].items()
        options["rope_parameters"] = {name: value for name, value in rope if "mrope" not in name}
        config = Qwen3Config(**options | {"model_type": "qwen3"})
    config.tie_word_embeddings = ties((whole.tie_word_embeddings, config.tie_word_embeddings))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def check_rows(config: Any, longest: int) -> None:
    """Raises: ValueError if a row of `longest` tokens passes the original context of longrope:
    transformers then chooses the rotary table by the longest row of a batch.
    """
    table = getattr(config, "rope_parameters", None) or {}
    if table.get("rope_type") == "longrope" and (
            longest > table["original_max_position_embeddings"]):
        raise ValueError(f"a prompt and its response must fit into the model's original context of"
                         f" {table['original_max_position_embeddings']} tokens (beyond it longrope"
                         f" rotates by the other rows of a batch), the longest have {longest}; try"
                         " a smaller --max-new-tokens, or --max-prompt-tokens with"
                         " --overlong-prompts drop")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of the folder's tokenizer.json, whatever class tokenizer_config.json names.

    transformers 5 builds many named classes anew, with a pre-tokenizer and a decoder of their own.
    Raises: ValueError if the folder has no such file, or if the two number a token differently.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if not (Path(path) / "tokenizer.json").exists():
        raise ValueError(f"model must be a folder with tokenizer.json, {path} has none; try"
                         " AutoTokenizer.from_pretrained(...).save_pretrained(...), and compare its"
                         " tokens with the model's own")
    config = get_tokenizer_config(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        path, trust_remote_code=False, clean_up_tokenization_spaces=False,
        split_special_tokens=False)
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise ValueError(f"tokenizer.json in {path} must be without dropout (a text would have"
                         " other tokens each time); set it to null there")
    processors = Path(path) / "chat_template.json"  # which transformers leaves to processors
    if tokenizer.chat_template is None and processors.exists():
        tokenizer.chat_template = read_json(processors)["chat_template"]
    for number, token in config.get("added_tokens_decoder", {}).items():
        if tokenizer.convert_ids_to_tokens(int(number)) != token["content"]:
            raise ValueError(f"tokenizer_config.json in {path} must number tokens as tokenizer.json"
                             f" does, {token['content']} is not token {number} there")
    begins = tokenizer.bos_token_id in tokenizer("")["input_ids"]
    asked = config.get("add_bos_token", begins)
    # Only where it must change: a new post-processor drops all else that the file's own adds.
    if asked != begins and str(config.get("tokenizer_class")).startswith(OBEY_ADD_BOS_TOKEN):
        tokenizer.add_bos_token = asked
    return tokenizer


# ---------------------------------------------------------------------------------- weights
def load(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The language model in evaluation mode on the CPU. Raises: ValueError by `check_loaded`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.backends.cuda.enable_cudnn_sdp(False)  # 1 s for each new shape; vLLM does it too
    config, verbosity = read_config(path), logging.get_verbosity()
    logging.set_verbosity_error()  # `check_loaded` reports
    logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention_for(config),
        key_mapping=TEXT_NAMES, output_loading_info=True, ignore_mismatched_sizes=True,
        use_safetensors=True, trust_remote_code=False)
    logging.set_verbosity(verbosity)
    # Engine and saved folders get the text model's own names.
    model._weight_conversions = [
        conversion for conversion in model._weight_conversions
        if not TEXT_NAMES.keys() & set(conversion.source_patterns)]
    check_loaded(path, model, report)
    return model


def attention_for(config: Any) -> str:
    """sdpa, but eager where sdpa drops soft-capping and where the class has no sdpa (Mamba 2)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "sdpa" if has_sdpa and not getattr(config, "attn_logit_softcapping", None) else "eager"


def tensor_names(path: str) -> dict[str, str]:
    """The tensors of a checkpoint, which has one file or several: how the text model names each.

    Raises: ValueError if a file cannot be read, or if two tensors get one name.
    """
    from safetensors import safe_open

    names = {}
    for file in Path(path).glob("model*.safetensors"):
        with (stage(f"reading {file} (cut off, or a pointer that git-lfs has not fetched?)"),
              safe_open(file, "pt") as opened):
            names |= dict.fromkeys(opened.keys())
    for name in names:
        own = name
        for pattern, replacement in TEXT_NAMES.items():
            own = re.sub(pattern, replacement, own)
        names[name] = own
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    if twice:
        raise ValueError(f"the checkpoint in {path} must have each tensor once, it has two of"
                         f" {', '.join(twice)}")
    return names


def check_loaded(path: str, model: torch.nn.Module, report: dict[str, Any]) -> None:
    """`report`: names of tensors that transformers did not load as they are.

    Raises: ValueError if a tensor of the model is missing in the checkpoint, not finite, or of
    another shape there, if the checkpoint has a head of its own and the configuration ties the
    head to the embedding, or by `check_left_out`.
    """
    missing, mismatched = report["missing_keys"], report["mismatched_keys"]
    if missing or mismatched:
        raise ValueError(f"the checkpoint in {path} must have every tensor of"
                         f" {type(model).__name__}: missing {sorted(missing)}, wrongly shaped"
                         f" {sorted(mismatched)}")
    # transformers unties a head that differs from the embedding; vLLM does not.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ValueError(f"config.json in {path} must not tie head and embedding (the weights have"
                         " a head of their own); set tie_word_embeddings to false there")
    bad = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if bad:
        raise ValueError(f"the checkpoint in {path} must be finite, it is not in {', '.join(bad)}")
    check_left_out(path, model, report["unexpected_keys"])


def check_left_out(path: str, model: torch.nn.Module, unexpected: set[str]) -> None:
    """Print what the checkpoint has and the model has not, such as towers for pictures and sound.

    `unexpected`: as transformers reports them, without what the class ignores, such as layers for
    multi-token prediction. Raises: ValueError if a tensor of the model is beside a scale of its
    own, or if a layer, or a tensor of a layer, would be lost.
    """
    names, kind = tensor_names(path), type(model).__name__
    own = {*names.values()}
    if scales := unexpected & {name + end for name in own for end in ("_scale", "_scale_inv")}:
        raise ValueError("model must not be quantised (it is trained), the checkpoint in"
                         f" {path} has {min(scales)} and {len(scales) - 1} more scales")
    beside = {*map(module_of, model.state_dict())}
    if lost := {name for name in unexpected if module_of(name) in beside}:
        raise ValueError("model must have all layers and all tensors of a layer, the checkpoint"
                         f" in {path} has {min(lost)} and {len(lost) - 1} more, which"
                         " config.json leaves out (num_hidden_layers, attention_bias or"
                         " num_nextn_predict_layers, say)")
    if own != names.keys():
        print(f"only the text model is trained, {kind}")
    if unexpected:
        print(f"{len(unexpected)} tensors of the checkpoint that {kind} does not have:"
              f" {', '.join(sorted(unexpected)):.300}")


def module_of(name: str) -> str:
    """The module of a tensor, without the numbers of layers and experts."""
    return re.sub(r"\.\d+\b", "", name.rpartition(".")[0])


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Give the model the weights of a folder that a run of it has written."""
    model.load_state_dict(load(str(folder), model.dtype).state_dict())


# ---------------------------------------------------------------------------------- saved
def save(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """A Hugging Face folder whose weights have the mode of its other files.

    safetensors writes files that only their owner can read.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def save_policy(run: Any, model: torch.nn.Module, folder: Path) -> None:
    """The policy of a train.Run. generation_config.json has all of its sampling but the length.

    transformers' own top_k would be 50. transformers 4 takes its own default for the base of a
    rotary table unless config.json says it.
    """
    from transformers import GenerationConfig

    tokenizer, sampling = run.task.tokenizer, run.sampling
    masks = {name: getattr(sampling, name, off)
             for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    before, model.generation_config = model.generation_config, GenerationConfig(
        do_sample=True, temperature=sampling.temperature, **masks,
        eos_token_id=list(sampling.stop_token_ids), pad_token_id=tokenizer.pad_token_id)
    save(model, tokenizer, folder)
    model.generation_config = before
    file = folder / "config.json"
    config = read_json(file)
    table = config.get("rope_parameters") or {}
    if table.get("rope_type") == "default":
        file.write_text(json.dumps(config | {"rope_theta": table["rope_theta"]}, indent=2) + "\n")
