"""Small real models in real folders; one live vLLM engine at a time (its parallel groups are global to a process)."""

import os
import sys
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
