"""Small real models in real folders; one live vLLM engine at a time (its parallel groups are global to a process)."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small lose more by waking threads than they gain
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a hub: what asks for one fails at once

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
logging.disable_progress_bar()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def qwen2(tied: bool, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> Qwen2ForCausalLM:
    """Random, with logits wide enough (std about 2) that temperature, head dtype and staleness show."""
    torch.manual_seed(seed)
    options = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    model = Qwen2ForCausalLM(Qwen2Config(**options | changes))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[bool, str]:
    """Model folders by `tied`."""
    root = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        qwen2(tied).save_pretrained(root / str(tied))
    return {tied: str(root / str(tied)) for tied in (False, True)}


def prompt_ids(tokenizer, problem) -> list[int]:
    from tasks import Task, encode, exact_match

    return encode(tokenizer, Task([problem], [], exact_match)).train[0].prompt_ids


# ------------------------------------------------------------------------------------------------ a small run
TASK = [{"question": f"{i}+1=", "answer": i + 1} for i in range(40)]
PYTHON = '''
import time
def sample(rng):
    number = rng.randint(1, 60)
    return f"{number}+1=", str(number + 1)
def reward(problem, response):
    return float(len(response) % 3)
'''


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A folder with all that a run needs: model/, task.jsonl, task.py."""
    from examples.toys import toy_tokenizer

    root = tmp_path_factory.mktemp("good")
    qwen2(tied=True).save_pretrained(root / "model")
    toy_tokenizer().save_pretrained(root / "model")
    (root / "task.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    (root / "task.py").write_text(PYTHON)
    return root


def command(root: Path, options: str) -> list[str]:
    """The options in place of a good run's own of the same name."""
    usual = {"--out": root / "run", "--model": root / "model", "--task": root / "task.jsonl", "--num-prompts": 4,
             "--group-size": 2, "--reward-limit-s": 0.3}  # fmt: skip
    given = options.format(root=root).split()
    names = [word.partition("=")[0] for word in given]
    return [*(str(word) for name, value in usual.items() if name not in names for word in (name, value)), *given]


def refusal(arguments: list[str], capsys, main: Callable | None = None) -> str:
    """What the command (train.py, if not given) says on stderr as it refuses."""
    import train

    with pytest.raises(SystemExit) as stop:
        (main or train.main)(arguments)
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed
    assert "Traceback" not in printed.err
    assert "toy model" not in printed.out
    return re.sub(r"[╭╮╰╯│─\s]+", " ", printed.err)  # without the box that tyro draws around a message
