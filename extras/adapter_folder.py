"""`--adapter`: training starts from the adapters in a folder of PEFT.

What a folder can contain that would have no effect here is refused by its name.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from report.errors import printable, stage
from report.files import digest_of
from report.log import shown
from tasks.model_folder import load_tokenizer
from tasks.prompts import first_encoded

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Entries of CONFIG that are read here, or have no effect on adapters that are already trained.
KNOWN = {"r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
         "layers_to_transform", "layers_pattern", "base_model_name_or_path", "lora_dropout",
         "auto_mapping", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
         "revision", "task_type"}
# Every other entry must be empty or one of these. PiSSA, say, also changes the model's weights.
ALLOWED = {"peft_type": ["LORA"], "bias": ["none"],
           "init_lora_weights": [True, "gaussian", "orthogonal"]}


@dataclass(frozen=True)
class Options:
    """Adapters of PEFT."""

    # A folder with adapter_config.json and adapter_model.safetensors: training starts from these
    # adapters, on the model of --model, with their rank, alpha and layers.
    adapter: str | None = None

    def __post_init__(self):
        printable(self, "adapter")


def check_task(run: Any, options: Options) -> Any:
    """The run with the folder's rank and alpha. Raises: ValueError if they are given, too."""
    folder, config = options.adapter, run.config
    if not folder:
        return None
    if not hasattr(config, "lora"):
        raise ValueError("adapter must not be given without extras/lora.py, which is not there")
    entries, _ = read(folder)
    if given := sorted(config.given & {"lora_rank", "lora_alpha"}):
        raise ValueError(f"{' and '.join(given)} must not be given with adapter ({folder} has R ="
                         f" {entries['r']} and alpha = {entries['lora_alpha']:g})")
    refuse_other_prompts(folder, run)
    print(f"notice: the adapters in {folder} were trained on"
          f" {entries.get('base_model_name_or_path')} with a dropout of"
          f" {entries.get('lora_dropout', 0)}; here they are on {config.model}, without dropout")
    lora = replace(config.lora, lora_rank=entries["r"], lora_alpha=entries["lora_alpha"])
    return replace(run, config=replace(config, lora=lora))


def refuse_other_prompts(folder: str, run: Any) -> None:
    """Raises: ValueError if a tokenizer in the folder, with its chat template, makes another first
    prompt than the model's."""
    if not Path(folder, "tokenizer_config.json").exists():
        return
    task = run.task
    with stage(f"encoding a question with the tokenizer in {folder}"):
        other = first_encoded(load_tokenizer(folder), task, run.config.data)
    if other.prompts[0] != task.prompts[0]:
        made, theirs = shown(task.prompts_record["first"]), shown(other.prompts_record["first"])
        raise ValueError(f"adapter must be for the model's prompts (the first is {made}), the"
                         f" tokenizer in {folder} makes {theirs}; copy its files into the model's"
                         " folder, or move them away")


def install(run: Any, options: Options, parts: Any) -> None:
    folder = options.adapter
    if not folder:
        return
    parts.identity["files"].update({f"{folder}/{name}": digest_of(Path(folder, name))
                                    for name in (CONFIG, TENSORS)})
    # lora.py has set what is sent. The check of gradient_checkpointing.py, which is installed
    # before this file, needs an adapter in each layer.
    parts.with_model.append(lambda model: load_into(parts.send, *read(folder)))


def read(folder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The entries of CONFIG, with alpha as of a scale alpha / R, and the tensors by their names.

    Raises: ValueError if a file cannot be read, or if an entry would have no effect here.
    """
    from safetensors.torch import load_file

    with stage(f"reading the adapters in {folder}"):
        config = dict(json.loads(Path(folder, CONFIG).read_text()))
        tensors = load_file(Path(folder, TENSORS))
        config |= {"r": int(config["r"]), "lora_alpha": float(config["lora_alpha"])}
        if config.get("use_rslora"):
            config["lora_alpha"] *= config["r"] ** 0.5  # its scale is alpha / sqrt(R)
    ignored = {name: value for name, value in config.items()
               if value and name not in KNOWN and value not in ALLOWED.get(name, [])}
    if ignored:
        raise ValueError("adapter must contain plain LoRA of linear layers (the rest would have no"
                         f" effect), {folder} has {ignored}; try --model with a merged model"
                         " (PEFT: merge_and_unload)")
    return config, tensors


def load_into(adapters: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give a lora.Adapters the folder's values. Raises: ValueError if they do not fit."""
    adapters.keep_only({name for name in adapters.layers
                        if targets(config, adapters.in_base(name))})
    adapters.load(tensors)


def targets(config: dict[str, Any], name: str) -> bool:
    """Whether PEFT gives the linear layer of this name an adapter."""
    def fits(names: str | list[str] | None) -> bool:
        if isinstance(names, str):
            return names == "all-linear" or re.fullmatch(names, name) is not None
        return any(f".{name}".endswith(f".{end}") for end in names or [])

    chosen = config.get("layers_to_transform")  # None, one number or a list
    if chosen is not None:
        number = re.search(r"\.(\d+)\.", name)
        chosen = [chosen] if isinstance(chosen, int) else chosen
        if number is None or int(number[1]) not in chosen:
            return False
    return fits(config["target_modules"]) and not fits(config.get("exclude_modules"))
