"""The recorders of examples/, the worked example of docs/audit.md, and the verdicts on their traces."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, TINY, policy_in, python, qwen2, run_script, stored
from torch.nn.utils.rnn import pad_sequence

from engine_adapter import Rollout
from examples.record_trl import TraceRecorder
from examples.record_vllm import SETTINGS
from probe.diagnose import diagnose
from probe.traces import load_traces


def status_of(path: Path) -> str:
    (trace,) = load_traces(str(path))
    return diagnose(policy_in(TINY), trace).status


def test_the_worked_example_of_the_trace_format_is_parity(tmp_path):
    page = (ROOT / "docs" / "audit.md").read_text()
    script = tmp_path / "record_transformers.py"
    script.write_text(re.search(r"```python\n(# record_transformers.py.*?)```", page, re.DOTALL)[1])
    run_script(str(script), TINY, tmp_path / "trace.npz")
    assert status_of(tmp_path / "trace.npz") == "parity"


# ------------------------------------------------------------------------------------------------ record_vllm.py
TWO_WAYS_IN = """
import sys
from record_vllm import main, record
if __name__ == "__main__":
    main()
    from vllm import LLM
    llm = LLM(sys.argv[2], dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**28,
              skip_tokenizer_init=True, gpu_memory_utilization=0.1, logprobs_mode="processed_logprobs")
    record(llm, "fixed.npz", {"temperature": 0.8, "top_k": 20}, new_tokens=32)
"""


@pytest.mark.engine
def test_record_vllm_from_a_folder_of_its_own_in_both_ways(tmp_path):
    """Default settings give raw log-probabilities; a running LLM with processed ones is parity."""
    qwen2().save_pretrained(tmp_path / "model")
    shutil.copy(ROOT / "examples" / "record_vllm.py", tmp_path)
    (tmp_path / "both.py").write_text(TWO_WAYS_IN)
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True,
              "hf_token": "secret"}  # and no size of the KV cache
    quick = {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
             "VLLM_CPU_KVCACHE_SPACE": "1"}  # by itself the file reserves 4 GiB
    words = f"both.py --model {tmp_path}/model --out default.npz --new-tokens 32 --engine-args".split()
    python(*words, json.dumps(engine), folder=tmp_path, **quick, VLLM_API_KEY="secret")
    default, fixed = (load_traces(str(tmp_path / f"{name}.npz"))[0] for name in ("default", "fixed"))
    assert (default.sampling.temperature, fixed.sampling.top_k) == (0.7, 20)
    assert [len(r.token_ids) for r in fixed.rollouts] == [32] * 64
    assert default.meta["settings"]["model_config.logprobs_mode"] == "raw_logprobs"
    assert set(SETTINGS) - default.meta["settings"].keys() == {
        "scheduler_config.chunked_prefill_enabled", "speculative_config.method", "compilation_config.level"}
    assert "secret" not in json.dumps(default.meta)
    assert [r.prompt_ids for r in default.rollouts] == [r.prompt_ids for r in fixed.rollouts]
    policy = policy_in(tmp_path / "model")
    assert diagnose(policy, default).blamed == "semantics: raw log-probabilities"
    assert diagnose(policy, fixed).status == "parity"


def test_record_vllm_refuses_bad_input_before_vllm_is_imported(tmp_path):
    words = "examples/record_vllm.py", "--model", "x", "--out", tmp_path / "t.npz", "--sampling", '{"min_tokens": 4}'
    assert "error: ValueError: sampling must have no min_tokens" in python(*words, status=2).stderr


# ------------------------------------------------------------------------------------------------ trainers
def test_the_recorder_for_trl_writes_the_buffered_batch_once_with_its_weights(tmp_path):
    """The attributes of TRL 1.16's trainer that the callback reads; docs/audit.md has the run with TRL itself."""
    trace = stored("v1_0.32.0_fp32_fixes")["t0.7"]
    rollouts = [Rollout(each.prompt_ids, None, each.token_ids[:end], each.logprobs[:end])
                for end, each in enumerate(trace.rollouts[:16], 40)]  # fmt: skip
    prompts, tokens, logprobs = (
        pad_sequence([torch.tensor(getattr(each, name)) for each in rollouts], batch_first=True, padding_side=side)
        for name, side in (("prompt_ids", "left"), ("token_ids", "right"), ("logprobs", "right")))  # fmt: skip
    batch = {"prompt_ids": prompts, "prompt_mask": prompts != 0, "completion_ids": tokens,
             "completion_mask": tokens != 0, "sampling_per_token_logps": logprobs, "old_per_token_logps": logprobs}
    trainer = SimpleNamespace(
        _buffered_inputs=[batch], save_model=lambda folder: Path(folder).mkdir(parents=True),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=SimpleNamespace(dtype=torch.float32),
        temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)  # fmt: skip
    callback, state = TraceRecorder(trainer, tmp_path, steps=2), SimpleNamespace(is_world_process_zero=True)
    for state.global_step in (0, 1):  # two optimizer steps on one batch
        callback.on_pre_optimizer_step(None, state, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000", "step_000000.json"]
    (again,) = load_traces(str(tmp_path / "step_000000.json"))
    assert (again.name, again.sampling.temperature) == ("trl", 0.7)
    assert [len(each.token_ids) for each in again.rollouts] == [len(each.token_ids) for each in rollouts]
    assert again.trainer_logprobs[5] == pytest.approx(rollouts[5].logprobs)
    assert status_of(tmp_path / "step_000000.json") == "parity"
    trainer._buffered_inputs = [{name: batch[name] for name in batch if name != "old_per_token_logps"}]
    with pytest.raises(ValueError, match="needs use_vllm=True and vllm_importance_sampling_correction=True"):
        callback.on_pre_optimizer_step(None, state, None)
