"""A folder that transformers 5 has written gets what transformers 4 reads.

The file imports nothing of ours. tests/README.md says how the tests run version 4.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any


def install(run: Any, options: None, parts: Any) -> None:
    parts.after_save.append(lambda model, folder: add_old_names(folder, run.task.tokenizer))


GENERIC = "PreTrainedTokenizerFast"  # version 5 writes TokenizersBackend, new in 5
TWO_ROPES = "gemma3_text", "gemma3n_text", "olmo3"  # of version 4, by kind of layer


def add_old_names(folder: Path, tokenizer: Any) -> None:
    """Complete config.json and tokenizer_config.json.

    The label of the tokenizer's source stays if this transformers makes the same tokens with it.
    """
    import transformers

    file = folder / "config.json"
    # Mamba's time_step_limit can be Infinity.
    text = re.sub(r'{\s*"__float__": "(\S+)"\s*}', r"\1", file.read_text())
    if re.search('"model_type": "(granitemoehybrid|zamba2?)"', text):
        text = text.replace('"linear_attention"', '"mamba"')
        text = text.replace('"full_attention"', '"attention"')
    config = json.loads(text)
    write(file, old_names(config) | config)
    if not (folder / "tokenizer.json").exists():
        return
    file = folder / "tokenizer_config.json"
    pipeline, special = tokenizer.backend_tokenizer, tokenizer.all_special_ids
    # All tokens, each before a special one, and side by side, where a class can split otherwise.
    ids = [each for token in range(len(tokenizer)) for each in (token, *special[:1])]
    sequences = ids, [token for token in range(len(tokenizer)) if token not in special]
    texts = [tokenizer.decode(each) for each in sequences]
    right = [tokenizer(text)["input_ids"] for text in texts]
    config = json.loads(file.read_text()) | {
        # Without these entries classes of version 4 take their own defaults.
        "add_bos_token": right[1][0] == tokenizer.bos_token_id,
        "add_eos_token": right[1][-1] == tokenizer.eos_token_id,
        "add_prefix_space": getattr(pipeline.pre_tokenizer, "add_prefix_space", None),
        "additional_special_tokens": tokenizer.extra_special_tokens,
    }
    for name in ("extra_special_tokens", "from_slow"):  # version 4 cannot read these
        config.pop(name, None)
    source = tokenizer.init_kwargs.get("tokenizer_class", config["tokenizer_class"])
    if source == "TokenizersBackend" or not hasattr(transformers, source or GENERIC):
        source = GENERIC
    for label in (source, GENERIC):
        write(file, config | {"tokenizer_class": label})
        with suppress(Exception):  # a label can belong to another kind of tokenizer
            other = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            same = str(other.backend_tokenizer.normalizer) == str(pipeline.normalizer)
            same &= right == [other(text)["input_ids"] for text in texts]
            if same and texts == [other.decode(each) for each in sequences]:
                return
    print(f"AutoTokenizer reads other tokens in {folder}; {GENERIC}.from_pretrained reads the right"
          " ones")


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def old_names(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that version 5 has renamed, or moved to `rope_parameters`."""
    old = {"torch_dtype": config.get("dtype")}
    if "num_local_experts" in config:
        old["num_experts"] = config["num_local_experts"]
    tables = config.get("rope_parameters")
    if not tables or ("rope_type" not in tables and config["model_type"] not in TWO_ROPES):
        return old  # version 4 does not know the class, and 5 would read a table without a base
    scaling = dict(tables.get("full_attention", tables))  # one table, or one for each kind of layer
    names = {}
    if config["model_type"] == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for key in {"rope_theta", "partial_rotary_factor"} & scaling.keys():
        old[names.get(key, key)] = scaling.pop(key)
    if "sliding_attention" in tables:
        old["rope_local_base_freq"] = tables["sliding_attention"]["rope_theta"]
    kind, original = scaling.pop("rope_type"), "original_max_position_embeddings"
    if kind == "longrope":
        old[original] = scaling[original]
        if config["model_type"] == "phi3":
            del scaling[original]
    if config["model_type"] != "phi3":  # version 4 refuses a fourth key there
        scaling["rope_type"] = kind
    old["rope_scaling"] = None if kind == "default" else scaling | {"type": kind}
    return old
