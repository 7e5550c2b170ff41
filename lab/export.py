"""The model's folder of a checkpoint, as the run would have left it in policy/.

    python -m lab.export runs/x/checkpoints/step_000040.pt
"""

from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch import Tensor

import extras
from extras.resume import earlier_run, of_today
from report.errors import exit_with_message, stage
from report.files import save_policy
from tasks.job import model_digests
from tasks.model_folder import describe_model
from train import Config, Parts, Run


def export(checkpoint: tyro.conf.Positional[Path], to: Path | None = None) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder, complete or not at all.

    It needs the run's config.json and the folder of its model, but no task, no engine and no GPU.
    Of the checkpoint it reads the trained tensors alone. On a GPU the run itself may round merged
    adapters differently. Raises: ValueError.

    Args:
        checkpoint: step_NNNNNN.pt in checkpoints/ of a run.
        to: The new folder; if not given, policy_NNNNNN beside policy/.
    """
    try:
        state = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
        step, trained = state["step"], state["policy"]
    except Exception:  # of many kinds, and torch advises to trust the file
        raise ValueError("checkpoint must be a file of checkpoints/ that is there and whole,"
                         f" {checkpoint} is not") from None
    out = checkpoint.absolute().parent.parent
    to = to or out / f"policy_{step:06d}"
    if to.exists():
        raise ValueError(f"to must be a new folder, {to} is there; try another --to")
    record = earlier_run(out)
    record = record.get("resumed", [record])[-1]
    config = options_of(Config, of_today(Config(), record["config"]))
    folder = record["trainer"]["model_path"]
    refuse_other_model(folder, config.model, record["files"])
    _, tokenizer, stop = describe_model(folder, lambda path: extras.folder(path).config())
    task = SimpleNamespace(tokenizer=tokenizer, prompts=[()])
    sampling = SimpleNamespace(**config.flat(), stop_token_ids=stop)
    to.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=to.parent, prefix=f"{to.name}.") as place:
        run = Run(config, Path(place), folder, task, sampling)
        save(run, trained)
        (run.out / "policy").rename(to)
    return to


def options_of(kind: type, flat: dict[str, Any]) -> Any:
    """The inverse of `flat`: options in their groups, from those by their own names."""
    flat, given = flat | flat.get("parity", {}), {}
    for option in fields(kind):
        if is_dataclass(option.default_factory):
            given[option.name] = options_of(option.default_factory, flat)
        elif option.name in flat:
            value = flat[option.name]
            given[option.name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def refuse_other_model(folder: str, name: str, files: dict[str, str]) -> None:
    """Raises: ValueError if the model's folder is not as the run has read it."""
    before = {file: digest for file, digest in files.items() if Path(file).parent == Path(name)}
    changed = {file for file, _ in model_digests(name, folder).items() ^ before.items()}
    if changed:
        raise ValueError(f"the model in {folder} must be as at the run's start, changed or gone are"
                         f" {', '.join(sorted(changed))}")


def save(run: Run, trained: dict[str, Tensor]) -> None:
    """OUT/policy, by what ends a run. Raises: ValueError if the model has other tensors."""
    parts = Parts(run)
    for install in extras.each("install", run.config):
        install(run, parts=parts)
    model = parts.folder.load(getattr(torch, run.config.dtype))
    for change in parts.with_model:
        change(model)
    others = trained.keys() ^ {name for name, each in model.named_parameters()
                               if each.requires_grad}
    if others:
        raise ValueError("checkpoint must have the trained tensors of the run's model, others are"
                         f" {', '.join(sorted(others))}")
    with stage("loading the checkpoint"):  # shapes
        model.load_state_dict(trained, strict=False)
    for finish in parts.at_end:
        finish()
    save_policy(run, model, parts.after_save)


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 bad input."""
    with exit_with_message(2):
        print(tyro.cli(export, args=arguments))


if __name__ == "__main__":
    main()
