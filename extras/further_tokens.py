"""Tensors for multi-token prediction: no class of the trainer has them, so an export copies them.

They are not trained, but config.json may promise them to an engine. The file imports nothing of
ours.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from shutil import copymode
from typing import Any


def for_further_tokens(names: Iterable[str], config: Any) -> set[str]:
    """Names of such tensors: of a module mtp, or of layers that `config` promises at the end."""
    promised = [value for key, value in vars(config).items()
                if re.search("mtp|nextn", key) and type(value) is int]
    first = config.num_hidden_layers
    layers = range(first, first + max(promised, default=0))
    return {name for name in names if "mtp" in name
            or any(int(number) in layers for number in re.findall(r"\blayers\.(\d+)\.", name))}


def files_of_tensors(folder: str | Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint, which has one file or several."""
    from safetensors import safe_open

    files = {}
    for file in Path(folder).glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    return files


def copy_untrained(path: str, config: Any, folder: Path) -> None:
    """Add the tensors of the model in `path` to its export in `folder`, as one more file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    files, tensors = files_of_tensors(path), {}
    for name in for_further_tokens(files, config):
        with safe_open(files[name], "pt") as opened:
            tensors[name] = opened.get_tensor(name)
    if not tensors:
        return
    whole = folder / "model.safetensors"
    if whole.exists():  # an index beside it would not be read
        whole.rename(whole.with_stem("model-trained"))
    untrained = whole.with_stem("model-untrained")
    save_file(tensors, untrained, {"format": "pt"})
    copymode(folder / "config.json", untrained)
    names = {name: file.name for name, file in files_of_tensors(folder).items()}
    index = json.dumps({"metadata": {}, "weight_map": names}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index)
