"""The recorders of examples/, the worked example of docs/trace-format.md, and the verdicts on their traces."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy
import pytest
import torch
from helpers import qwen2

from examples import record_prime_rl, record_trl, record_verl
from probe.__main__ import main
from probe.diagnose import diagnose
from probe.traces import load_traces
from rl import Policy

ROOT, DATA = Path(__file__).parents[1], Path(__file__).parent / "data"
MODEL = str(DATA / "tiny-qwen2")
RECORDERS = sorted(ROOT.glob("examples/record_*.py"))


def verdict_of(path: Path, model: str = MODEL, dtype: torch.dtype = torch.float32):
    (trace,) = load_traces(str(path))
    return diagnose(Policy.load(model, dtype, "cpu"), trace)


@pytest.mark.parametrize("path", RECORDERS, ids=lambda path: path.name)
def test_a_recorder_is_one_file_and_those_of_trainers_are_short(path):
    text = path.read_text()
    ours = {file.stem for file in ROOT.glob("*.py")} | {"probe", "lab", "examples"}
    assert not ours & set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.M))
    assert path.name == "record_vllm.py" or len(text.splitlines()) <= 60


def test_the_worked_example_of_the_trace_format_is_parity(tmp_path):
    page = (ROOT / "docs" / "trace-format.md").read_text()
    code = re.search(r"```python\n(# record_transformers.py.*?)```", page, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) <= 26
    for name, text in (("plain", code), ("raw", code.replace("scores", "logits"))):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        subprocess.run([sys.executable, script, MODEL, tmp_path / f"{name}.npz"], check=True)
    assert verdict_of(tmp_path / "plain.npz").status == "parity"
    assert verdict_of(tmp_path / "raw.npz").blamed == "semantics: raw log-probabilities"


# ------------------------------------------------------------------------------------------------ record_vllm.py
TWO_WAYS_IN = """
import sys
from record_vllm import main, record
if __name__ == "__main__":
    assert main() == 0
    from vllm import LLM
    llm = LLM(sys.argv[2], dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**28,
              skip_tokenizer_init=True, gpu_memory_utilization=0.1, logprobs_mode="processed_logprobs")
    record(llm, "fixed.npz", {"temperature": 0.8, "top_k": 20}, new_tokens=32)
"""


@pytest.mark.engine
def test_record_vllm_from_a_folder_of_its_own_in_both_ways(tmp_path):
    """Default settings give raw log-probabilities; a running LLM with processed ones is parity."""
    qwen2(tied=False).save_pretrained(tmp_path / "model")
    shutil.copy(ROOT / "examples" / "record_vllm.py", tmp_path)
    (tmp_path / "both.py").write_text(TWO_WAYS_IN)
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True,
              "kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.1, "hf_token": "secret"}  # fmt: skip
    quick = {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "both.py", "--model", str(tmp_path / "model"), "--out", "default.npz", "--new-tokens", "32",
         "--engine-args", json.dumps(engine)],
        cwd=tmp_path, env=os.environ | quick | {"VLLM_API_KEY": "secret"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not read: nothing" in done.stdout
    default, fixed = (load_traces(str(tmp_path / f"{name}.npz"))[0] for name in ("default", "fixed"))
    assert (default.name, fixed.name) == ("t0.7", "t0.8_top_k20")
    assert [len(r.token_ids) for r in fixed.rollouts] == [32] * 64
    assert default.meta["settings"]["logprobs_mode"] == "raw_logprobs"
    assert default.meta["settings"]["enable_prefix_caching"] is True
    assert default.meta["engine_args"] == {name: value for name, value in engine.items() if name != "hf_token"}
    assert default.meta["versions"]["vllm"].startswith("0.")
    assert "secret" not in json.dumps(default.meta)
    assert [r.prompt_ids for r in default.rollouts] == [r.prompt_ids for r in fixed.rollouts]
    policy = Policy.load(str(tmp_path / "model"), torch.float32, "cpu")
    assert diagnose(policy, default).blamed == "semantics: raw log-probabilities"
    assert diagnose(policy, fixed).status == "parity"


@pytest.mark.parametrize("words, complaint", [
    (["--engine-args", "{dtype"], "--engine-args must be JSON: "),
    (["--engine-args", "[]"], "--engine-args must be a JSON object, got []"),
    (["--sampling", '{"logit_bias": 1}'], "--sampling has logit_bias, which a trace cannot describe"),
    (["--prompts", "absent.json"], "No such file or directory: 'absent.json'"),
    (["--out", "trace.json"], "--out must be a new .npz file in a folder that can be written, got trace.json"),
    (["--out", "no/folder.npz"], "--out must be a new .npz file in a folder that can be written, got no/folder.npz"),
])  # fmt: skip
def test_record_vllm_refuses_bad_input_before_vllm_is_imported(tmp_path, words, complaint):
    words = ["--model", "x", *(words if "--out" in words else [*words, "--out", "t.npz"])]
    done = subprocess.run([sys.executable, ROOT / "examples" / "record_vllm.py", *words], cwd=tmp_path, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------ trainers
@pytest.fixture(scope="module")
def rows() -> dict[str, list]:
    """A clean trace of vLLM 0.32.0, as rows of unequal length."""
    (trace,) = [each for each in load_traces(str(DATA / "v1_0.32.0_fp32_fixes.npz")) if each.name == "t0.7"]
    cut = [64 - index % 5 for index in range(64)]
    return {"prompts": [r.prompt_ids for r in trace.rollouts],
            "tokens": [r.token_ids[:n] for r, n in zip(trace.rollouts, cut, strict=True)],
            "logprobs": [r.logprobs[:n] for r, n in zip(trace.rollouts, cut, strict=True)]}  # fmt: skip


def padded(table: list[list], width: int, left: bool = False, value: float = 0) -> torch.Tensor:
    return torch.tensor([[value] * (width - len(row)) * left + row + [value] * (width - len(row)) * (not left)
                         for row in table])  # fmt: skip


def ones(table: list[list]) -> list[list[int]]:
    return [[1] * len(row) for row in table]


def is_the_trace(path: Path, rows: dict[str, list], name: str) -> None:
    (trace,) = load_traces(str(path))
    assert trace.name == name
    assert [r.prompt_ids for r in trace.rollouts] == rows["prompts"]
    assert [r.token_ids for r in trace.rollouts] == rows["tokens"]
    assert verdict_of(path).status == "parity"


def verl_batch(rows: dict[str, list], jagged: bool) -> dict[str, torch.Tensor]:
    """As verl 0.9.1 lays out a batch: padded in AgentLoopManager._postprocess, jagged in the TransferQueue."""
    tables = {"prompts": rows["prompts"], "responses": rows["tokens"], "response_mask": ones(rows["tokens"]),
              "rollout_log_probs": rows["logprobs"], "old_log_probs": rows["logprobs"]}  # fmt: skip
    if jagged:
        return {name: torch.nested.as_nested_tensor([torch.tensor(row) for row in table], layout=torch.jagged)
                for name, table in tables.items()}  # fmt: skip
    batch = {name: padded(table, 10 if name == "prompts" else 70, left=name == "prompts")
             for name, table in tables.items()}  # fmt: skip
    masks = padded(ones(rows["prompts"]), 10, left=True), batch["response_mask"]
    return batch | {"attention_mask": torch.cat(masks, dim=1)}


@pytest.mark.parametrize("jagged", [False, True])
def test_the_recorder_for_verl_reads_padded_and_jagged_batches(rows, jagged, tmp_path, capsys):
    record_verl.record(verl_batch(rows, jagged), tmp_path / "t.json", {"temperature": 0.7}, "float32", step=7)
    is_the_trace(tmp_path / "t.json", rows, "verl")
    (trace,) = load_traces(str(tmp_path / "t.json"))
    assert trace.rollouts[0].versions == [7] * 64
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", "--model", MODEL, str(tmp_path / "t.json")])
    assert stop.value.code == 0
    assert "own log-probabilities: mean |difference| 0.0e+00 nats to the reported" in capsys.readouterr().out


def test_the_recorder_for_verl_leaves_tool_turns_out_and_names_what_is_missing(rows, tmp_path, capsys):
    batch = verl_batch(rows, jagged=False)
    batch["response_mask"][3, 5:9] = 0
    batch["response_mask"][4] = 0
    record_verl.record(batch, tmp_path / "t.json", {"temperature": 0.7}, "float32")
    assert "62 responses; 2 left out" in capsys.readouterr().out
    del batch["rollout_log_probs"]
    with pytest.raises(ValueError, match=r"rollout_log_probs is missing; set .*calculate_log_probs=True"):
        record_verl.record(batch, tmp_path / "t.json", {"temperature": 0.7}, "float32")


def prime_rl_file(path: Path, rows: dict[str, list], flat: bool) -> Path:
    """As FileSystemTrainingBatchSender writes it: [[sample, ...], step], each sample an array of its fields."""
    samples = []
    for prompt, tokens, logprobs in zip(rows["prompts"], rows["tokens"], rows["logprobs"], strict=True):
        context, sampled, warm = [False] * len(prompt), [True] * len(tokens), [0.7] * len(tokens)
        flat_sample = [prompt + tokens, context + sampled, [0.0] * len(prompt) + logprobs, [0.7] * len(prompt) + warm]
        samples.append([*flat_sample, "env"] if flat else
                       [prompt, context, tokens, sampled, logprobs, warm, "env", None, 0.5])  # fmt: skip
    path.write_bytes(msgspec.msgpack.encode([samples, 7]))
    return path


@pytest.mark.parametrize("flat", [False, True])
def test_the_recorder_for_prime_rl_reads_both_layouts(rows, flat, tmp_path):
    record_prime_rl.record(prime_rl_file(tmp_path / "rollouts.bin", rows, flat), tmp_path / "t.json", "float32")
    is_the_trace(tmp_path / "t.json", rows, "prime-rl")
    assert load_traces(str(tmp_path / "t.json"))[0].meta["step"] == 7


def test_the_recorder_for_prime_rl_refuses_another_layout(rows, tmp_path):
    (tmp_path / "text").write_text("no msgpack")
    old = msgspec.msgpack.encode([[[[1], [False], [4], [True], [-0.5], 0.3]], 0.7, 3])  # one temperature for the batch
    (tmp_path / "old").write_bytes(old)
    for name in ("text", "old"):
        with pytest.raises(ValueError, match="must be a TrainingBatch in a layout that this recorder knows"):
            record_prime_rl.record(tmp_path / name, tmp_path / "t.json", "float32")


@pytest.mark.parametrize("name, words", [
    ("verl", ["absent", "t.json", "{}", "float32"]), ("verl", ["text", "t.json", "{}", "float32"]),
    ("verl", ["text", "t.json", "{}"]), ("prime_rl", ["absent", "t.json", "float32"]),
    ("prime_rl", ["text", "t.json", "float32"]), ("prime_rl", ["right", "t.json", "float32", "{"]),
    ("prime_rl", ["right", "no/t.json", "float32"]), ("prime_rl", ["right"]),
])  # fmt: skip
def test_a_recorder_for_files_ends_with_one_sentence_on_bad_input(rows, tmp_path, name, words):
    (tmp_path / "text").write_text("no batch")
    prime_rl_file(tmp_path / "right", rows, flat=True)
    done = subprocess.run([sys.executable, ROOT / "examples" / f"record_{name}.py", *words], cwd=tmp_path, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "absent" in done.stderr or words[0] != "absent"
    assert not (tmp_path / "t.json").exists()


def test_the_recorder_for_trl_writes_the_buffered_batch_once_with_its_weights(rows, tmp_path):
    """The attributes of TRL 1.16's trainer that the callback reads; docs/audit.md has the run with TRL itself."""
    logprobs = padded(rows["logprobs"], 70)
    batch = {"prompt_ids": padded(rows["prompts"], 10, left=True),
             "prompt_mask": padded(ones(rows["prompts"]), 10, left=True), "completion_ids": padded(rows["tokens"], 70),
             "completion_mask": padded(ones(rows["tokens"]), 70), "sampling_per_token_logps": logprobs,
             "old_per_token_logps": logprobs}  # fmt: skip
    halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(32), slice(32, 64))]
    trainer = SimpleNamespace(
        _buffered_inputs=halves, save_model=lambda folder: Path(folder).mkdir(parents=True), vllm_generation=None,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=SimpleNamespace(dtype=torch.float32),
        temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)  # fmt: skip
    callback, versions = record_trl.TraceRecorder(trainer, tmp_path, steps=2), record_trl.import_module
    record_trl.import_module = lambda name: SimpleNamespace(__version__="1.16.0")  # TRL is not installed here
    try:
        for step in (0, 1):  # two optimizer steps on one batch
            callback.on_pre_optimizer_step(None, SimpleNamespace(global_step=step, is_world_process_zero=True), None)
    finally:
        record_trl.import_module = versions
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000", "step_000000.json"]
    is_the_trace(tmp_path / "step_000000.json", rows, "trl")
    assert numpy.allclose(load_traces(str(tmp_path / "step_000000.json"))[0].trainer_logprobs[5], rows["logprobs"][5])
    trainer._buffered_inputs = [{name: batch[name] for name in batch if name != "old_per_token_logps"}]
    with pytest.raises(ValueError, match="needs use_vllm=True and vllm_importance_sampling_correction=True"):
        callback.on_pre_optimizer_step(None, SimpleNamespace(global_step=2, is_world_process_zero=True), None)
