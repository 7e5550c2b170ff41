"""`--model`: a user's folder or hub name, described without its weights; what is refused there."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report.errors import stage

MODELS = "toy, a folder or a hub name; code from a model's folder is never run"
# Labels of tokenizers that transformers 4 lets add_bos_token change; others follow tokenizer.json.
OBEY_ADD_BOS_TOKEN = "Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX"


def describe_model(
    path: str, read_config: Callable[[str], Any]
) -> tuple[Any, Any, tuple[int, ...]]:
    """Text configuration, tokenizer and stop tokens, without the weights.

    Raises: ValueError if something is missing, cannot be read, or cannot be trained here.
    """
    from safetensors import safe_open
    from transformers import GenerationConfig, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = Path(path)
    for file in folder.glob("model*.safetensors"):
        with stage(f"reading {file} (cut off, or a pointer that git-lfs has not fetched?)"):
            safe_open(file, "pt")
    with stage(f"reading the model {path} ({MODELS})"):
        text = read_config(path)
        with stage(f"reading {folder / 'tokenizer.json'}"):
            tokenizer = load_tokenizer(path)
        # Of config.json what it says itself: a class has a default of its own, such as 2.
        said, _ = PretrainedConfig.get_config_dict(path)
        levels = said, said.get("text_config", {})
        ends = [tokenizer.eos_token_id, *(level.get("eos_token_id") for level in levels)]
        if (folder / "generation_config.json").exists():
            ends.append(GenerationConfig.from_pretrained(path).eos_token_id)
        stop = set()
        for declared in ends:
            stop |= set(declared if isinstance(declared, list) else [declared])
        stop -= {None}
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError("model must be a causal language model that transformers"
                         f" {version('transformers')} knows, {path} is a {text.model_type}")
    # The second is Gemma 3's: embedding models have them.
    if not getattr(text, "is_causal", True) or (
            getattr(text, "use_bidirectional_attention", None) is True):
        raise ValueError("model must be causal (a token must not attend to later ones), config.json"
                         f" in {path} says that its attention is not")
    quantization = [level["quantization_config"] for level in levels
                    if level.get("quantization_config")]
    if quantization:
        raise ValueError(f"model must not be quantised (it is trained), {path} is:"
                         f" {quantization[0]!s:.100}")
    # transformers reads one file of weights, else those of the index, and ignores all others.
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"model must be without adapters (they would be ignored), {folder} has"
                         " adapter_config.json; merge them (PEFT: merge_and_unload), or move its"
                         " files to another folder for --adapter")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() and index.exists():
        shards = {*json.loads(index.read_text())["weight_map"].values()} - {single.name}
        if shards:
            raise ValueError(f"model must have its weights once, {folder} has {single.name}, which"
                             f" would be read, and {index.name} with {min(shards)}; move one away")
    if not stop or not all(type(token) is int and token >= 0 for token in stop):
        raise ValueError("model must name an end-of-sequence token (else no rollout ends),"
                         f" {path} has {stop or None}")
    return text, tokenizer, tuple(sorted(stop))


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


def local_folder(name: str) -> str:
    """A folder as it is; of a hub name the snapshot in the cache, downloaded first.

    So trainer, tokenizer, engine and the run's digests read the files of one commit.
    """
    from huggingface_hub import snapshot_download

    if os.path.exists(name):
        return name
    reach_hub(name)
    with stage(f"reading the model {name} ({MODELS})"):
        return snapshot_download(name, allow_patterns=[
            "model*.safetensors", "*.json", "*.jinja"])


def reach_hub(name: str, limit_s: float = 5) -> None:
    """Raises: ValueError if `name` is not a folder and the hub does not answer: transformers and
    datasets would try for half a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not os.path.exists(name) and not constants.HF_HUB_OFFLINE:
        with stage(f"{name} is no folder, and reaching {constants.ENDPOINT} (HF_HUB_OFFLINE=1 reads"
                   " what was downloaded before)"):
            get_session().head(constants.ENDPOINT, timeout=limit_s)


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
        tokenizer.chat_template = json.loads(processors.read_text())["chat_template"]
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
