"""`--model`: a user's folder or hub name, described without its weights; what is refused there."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report.errors import stage
from tasks import Task

MODELS = "toy, a folder or a hub name; code from a model's folder is never run"
# Labels of tokenizers that transformers 4 lets add_bos_token change; others follow tokenizer.json.
OBEY_ADD_BOS_TOKEN = "Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX"
BEGIN = "Llama", "CodeLlama", "Gemma"  # begin prompts with bos unless a file says otherwise


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
            "model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"])


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
    A folder without the file has the tokenizer of the named class. Raises: ValueError if the folder
    has no tokenizer, or if the two files number a token differently.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    config, kind, options = get_tokenizer_config(path), AutoTokenizer, {}
    label = config.get("tokenizer_class")
    of_file = (Path(path) / "tokenizer.json").exists()
    if of_file:
        kind = PreTrainedTokenizerFast
        options = dict(clean_up_tokenization_spaces=False, split_special_tokens=False,
                       tokenizer_class=label)  # for the export
    tokenizer = kind.from_pretrained(path, trust_remote_code=False, **options)
    processors = Path(path) / "chat_template.json"  # which transformers leaves to processors
    if tokenizer.chat_template is None and processors.exists():
        tokenizer.chat_template = json.loads(processors.read_text())["chat_template"]
    # Without files AutoTokenizer makes an empty tokenizer for some types.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"model must be a folder with a tokenizer, {path} has none")
    for number, token in config.get("added_tokens_decoder", {}).items():
        if tokenizer.convert_ids_to_tokens(int(number)) != token["content"]:
            raise ValueError(f"tokenizer_config.json in {path} must number tokens as tokenizer.json"
                             f" does, {token['content']} is not token {number} there")
    begins = tokenizer.bos_token_id in tokenizer("")["input_ids"]
    default = begins if of_file else str(label).startswith(BEGIN)
    asked = config.get("add_bos_token", default)
    # Only where it must change: a new post-processor drops all else that the file's own adds.
    if asked != begins and str(label).startswith(OBEY_ADD_BOS_TOKEN):
        tokenizer.add_bos_token = asked
    return tokenizer


def check_tokens(path: str, task: Task) -> None:
    """Compare tokens and texts of the questions with the folder's file, read without transformers.

    Without tokenizer.json and tokenizer.model the text must be the question. Raises: ValueError.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

    rust, pieces = None, None
    if (Path(path) / "tokenizer.json").exists():
        rust = Tokenizer.from_file(f"{path}/tokenizer.json")
        rust.no_truncation()
        rust.no_padding()
        if getattr(rust.model, "dropout", None):
            raise ValueError(f"tokenizer.json in {path} must be without dropout (a text would have"
                             " other tokens each time); set it to null there")
        made = task.tokenizer.backend_tokenizer
        rust.post_processor = made.post_processor  # load_tokenizer may have changed it
        if made.to_str() == rust.to_str():
            return  # the file itself; 10,000 long questions would take minutes
    elif (Path(path) / "tokenizer.model").exists():
        with stage(f"reading {path}/tokenizer.model as SentencePiece's"):
            pieces = SentencePieceProcessor(model_file=f"{path}/tokenizer.model")
    for problem in task.problems:
        text = problem.question
        ids = task.tokenizer(text, add_special_tokens=False)["input_ids"]
        made, right = (ids, task.tokenizer.decode(ids)), (ids, text)
        if rust:
            ids = rust.encode(text, add_special_tokens=False).ids
            right = ids, rust.decode(ids, skip_special_tokens=False)
        elif pieces:
            ids = pieces.encode(text)
            right = ids, pieces.decode(ids)
        if made != right:
            raise ValueError(
                f"model must make the tokens of its file, {path} makes {made!s:.200} of"
                f" {text!r:.80}, and not {right!s:.200}; correct tokenizer_config.json there, or"
                " save a tokenizer.json with the class that is right")
