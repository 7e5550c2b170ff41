"""The model's folder of a checkpoint, as the run would have left it in policy/.

    python -m lab.export runs/x/checkpoints/step_000040.pt
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import tyro
from torch import Tensor

import extras
from report.errors import exit_with_message, stage
from report.files import appears_whole, read_json, save_policy
from tasks.job import model_digests
from tasks.model_folder import describe_model
from train import Config, Parts, Run


def export(checkpoint: tyro.conf.Positional[Path], to: Path | None = None) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder, complete or not at all.

    It needs the run's config.json, the folder of its model and that of --adapter if it was given,
    but no task, no engine and no GPU. Merged adapters can differ in rounding from a run on a GPU.

    Args:
        checkpoint: step_NNNNNN.pt in checkpoints/ of a run.
        to: The new folder; if not given, policy_NNNNNN beside policy/.
    """
    try:
        state = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
        step, trained = state["step"], state["policy"]
    except Exception:  # of many kinds, and torch advises to trust the file
        raise ValueError("checkpoint must be a complete file of a run's checkpoints/, got"
                         f" {checkpoint}") from None
    out = checkpoint.absolute().parent.parent
    to = to or out / f"policy_{step:06d}"
    if to.exists():
        raise ValueError(f"to must be a new folder, {to} is there; try another --to")
    record = read_json(out / "config.json")
    record = record.get("resumed", [record])[-1]
    with stage(f"reading {out}/config.json"):
        config = Config.from_flat(record["config"])
        folder, files = record["trainer"]["model_path"], record["files"]
    refuse_other_model(folder, config.model, files)
    _, tokenizer, stop = describe_model(folder, lambda path: extras.folder(path).config())
    task = SimpleNamespace(tokenizer=tokenizer, prompts=[()], fingerprint="")
    sampling = SimpleNamespace(**config.flat(), stop_token_ids=stop)
    with appears_whole(to) as new:
        # An empty `out`: options would look into that of the run.
        run = Run(config, new.parent, folder, task, sampling)
        save(run, trained, new)
    return to


def refuse_other_model(folder: str, name: str, files: dict[str, str]) -> None:
    """Raises: ValueError if the model's folder is not as the run has read it."""
    before = {file: digest for file, digest in files.items() if Path(file).parent == Path(name)}
    differ = model_digests(name, folder).items() ^ before.items()
    changed = sorted({file for file, _ in differ})
    if changed:
        raise ValueError(f"the model in {folder} must be as at the run's start, changed or missing"
                         f" are {', '.join(changed)}")


def save(run: Run, trained: dict[str, Tensor], to: Path) -> None:
    """Load the checkpoint's tensors and write the model, as at the end of a run.

    Raises: ValueError if the model has other tensors.
    """
    parts = Parts(run)
    for install in extras.each("install", run.config):
        if install.func.__module__ != "extras.memory_check":  # nothing is trained here
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
    save_policy(run, model, parts, to)


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 bad input."""
    with exit_with_message(2):
        print(tyro.cli(export, args=arguments))


if __name__ == "__main__":
    main()
