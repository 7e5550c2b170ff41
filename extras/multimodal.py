"""What a checkpoint has besides the trained model: towers of a multimodal one, further tokens.

Only the text model of a multimodal folder is trained, and no export has anything else.
docs/models.md has the architectures.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import rl
from extras import Extra

# Multimodal models whose text model is trained here, by their type.
MULTIMODAL = "gemma3", "gemma4", "lfm2_vl", "mistral3", "qwen3_5", "qwen3_vl"
# How their checkpoints name its tensors, and how it names them itself.
TEXT_NAMES = {"model.language_model.": "model.", "language_model.model.": "model.",
              "language_model.lm_head.": "lm_head."}


class Options(Extra):
    """None: it acts in each run."""


class Folder(rl.Folder):
    """Tensors of the checkpoint that the model does not have are printed."""

    def config(self) -> Any:
        """Raises: ValueError for a multimodal model whose text model is not known here."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        if config.get_text_config() is config:
            return config
        return text_config(self.path, config)

    def load(self, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
        renamed = text_names(self.path)
        model = super().load(dtype, key_mapping=renamed or None, **options)
        # Engine and export get the text model's own names.
        model._weight_conversions = [
            conversion for conversion in model._weight_conversions
            if not renamed.keys() & set(conversion.source_patterns)]
        return model

    def check(self, model: torch.nn.Module, report: dict[str, Any]) -> None:
        """Also print what the checkpoint has and the model has not.

        transformers leaves out of its report what the class ignores. Raises: ValueError also if a
        tensor of the model is beside a scale of its own.
        """
        super().check(model, report)
        names, held = names_of_tensors(self.path), model.state_dict().keys()
        outside = set()  # the towers for pictures and sound
        if text_names(self.path):
            inside = *TEXT_NAMES, "lm_head.", "mtp."
            outside = {name for name in names - held if not name.startswith(inside)}
        if outside:
            towers = sorted({name.removeprefix("model.").partition(".")[0] for name in outside})
            print(f"only the text model is trained, {type(model).__name__}: {len(outside)} tensors"
                  f" are left out ({', '.join(towers)})")
        further = for_further_tokens(names, model.config)
        ignored = model._keys_to_ignore_on_load_unexpected
        silent = {name for name in names - held
                  if f"{model.base_model_prefix}.{name}" not in held  # may be left out
                  and any(re.search(pattern, name) for pattern in ignored)}
        unexpected = (silent | set(report["unexpected_keys"])) - outside
        unexpected -= for_further_tokens(unexpected, model.config)
        scales = [name for name in unexpected
                  if re.sub("_scale(_inv)?$", "", name) in names - {name}]
        if scales:
            raise ValueError("model must not be quantised (it is trained), the checkpoint in"
                             f" {self.path} has {min(scales)} and {len(scales) - 1} more scales")
        beside = set(map(module_of, held))
        lost = sorted(name for name in unexpected - silent if module_of(name) in beside)
        if lost:
            raise ValueError("model must have all layers and all tensors of a layer, the checkpoint"
                             f" in {self.path} has {lost[0]} and {len(lost) - 1} more, which"
                             " config.json leaves out (num_hidden_layers, attention_bias or"
                             " num_nextn_predict_layers, say)")
        if further:
            print(f"neither trained nor exported: {len(further)} tensors for multi-token"
                  f" prediction, {min(further)} to {max(further)}; copy them, if an engine needs"
                  " them")
        if unexpected:
            print(f"tensors of the checkpoint that {type(model).__name__} does not have:"
                  f" {', '.join(sorted(unexpected))}")


def names_of_tensors(folder: str) -> set[str]:
    """Those of a checkpoint, which has one file or several."""
    from safetensors import safe_open

    names = set()
    for file in Path(folder).glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def for_further_tokens(names: Iterable[str], config: Any) -> set[str]:
    """Tensors for multi-token prediction: of a module mtp, or of layers that `config` promises at
    the end. No class of the trainer has them.
    """
    promised = [value for key, value in vars(config).items()
                if re.search("mtp|nextn", key) and type(value) is int]
    first = config.num_hidden_layers
    layers = range(first, first + max(promised, default=0))
    return {name for name in names if "mtp" in name
            or any(int(number) in layers for number in re.findall(r"\blayers\.(\d+)\.", name))}


def module_of(name: str) -> str:
    """The module of a tensor, without the numbers of layers and experts."""
    return re.sub(r"\.\d+\b", "", name.rpartition(".")[0])


def text_config(path: str, whole: Any) -> Any:
    """The configuration of the language model in a folder whose own one is `whole`.

    Raises: ValueError if it is none of MULTIMODAL.
    """
    from transformers import Qwen3Config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = whole.get_text_config()
    if whole.model_type not in MULTIMODAL:
        raise ValueError(f"model must be a language model, or one of {', '.join(MULTIMODAL)} (whose"
                         f" text model is trained), {path} is a {whole.model_type}; try a folder"
                         f" with its {config.model_type} alone")
    names = names_of_tensors(path)  # none where only the configuration is there
    headless = names and not any(name.endswith("lm_head.weight") for name in names)
    ties = any if headless else all
    if config.model_type == "qwen3_vl_text":  # has no class of its own
        # Without pictures the three positions of a token are equal, and what is left is Qwen3.
        options = config.to_dict()
        rope = options["rope_parameters"].items()
        options["rope_parameters"] = {name: value for name, value in rope if "mrope" not in name}
        config = Qwen3Config(**options | {"model_type": "qwen3"})
    config.tie_word_embeddings = ties((whole.tie_word_embeddings, config.tie_word_embeddings))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def text_names(path: str) -> dict[str, str]:
    """The prefixes that transformers must replace (regular expressions), and by what.

    Empty for the folder of a text model. Raises: ValueError if two tensors get one name.
    """
    renamed, own = {}, Counter()
    for name in names_of_tensors(path):
        old = next((prefix for prefix in TEXT_NAMES if name.startswith(prefix)), "")
        new = TEXT_NAMES.get(old, "")
        own[new + name.removeprefix(old)] += 1
        if old:
            renamed[f"^{re.escape(old)}"] = new
    twice = sorted(name for name, count in own.items() if count > 1)
    if twice:
        raise ValueError(f"the checkpoint in {path} must have each tensor once, it has two of"
                         f" {', '.join(twice)}")
    return renamed
