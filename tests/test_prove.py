"""The examples that prove loads of others: each sync of TRL's trainer, and engines in other processes."""

import os
import re
import sys
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch
from helpers import ROOT, close_live_engine, qwen2, run_script

sys.path.insert(0, str(ROOT / "verify"))  # a stranger has proof.py beside these
from examples.prove_remote import differing
from examples.prove_trl import proven

from verify.start import prepare_environment

pytestmark = pytest.mark.engine
SMALL = dict(dtype="bfloat16", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=2**26,
             skip_tokenizer_init=True, worker_extension_cls="examples.prove_remote.Prover")  # fmt: skip

K, V, OUT, DOWN, UP = (f"model.layers.1.{name}.weight" for name in (
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"))  # fmt: skip


def one_bit(weights: dict[str, torch.Tensor]) -> None:
    rounded = weights[UP].bfloat16()
    rounded.view(torch.int16)[3, 5] ^= 1
    weights[UP] = rounded.float()


FAULTS = {  # of a sync, and what the proof names
    "none": (lambda weights: None, []),
    "k and v exchanged": (lambda weights: weights.update({K: weights[V], V: weights[K]}), [K, V]),
    "one tensor skipped": (lambda weights: weights.pop(DOWN), [DOWN]),
    "one tensor times 1.001": (lambda weights: weights[OUT].mul_(1.001), [OUT]),
    "one bit": (one_bit, [UP]),
    "a tied head without its name": (lambda weights: weights.pop("lm_head.weight"), ["lm_head.weight"]),
}


@pytest.mark.own_process
@pytest.mark.skipif(not find_spec("trl"), reason="needs pip install trl==1.16.0")
def test_each_fault_of_trls_sync_is_named(good, tmp_path, monkeypatch):
    """Prints what TRL's own metric says. TRL's sync is repaired, because vLLM's CPU build refuses it."""
    prepare_environment()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        str(tmp_path), use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=64, max_completion_length=16, learning_rate=1e-3,
        max_steps=3 * len(FAULTS), logging_steps=1, save_strategy="no", report_to="none")  # fmt: skip
    folder = str(good / "model")
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=settings,
        reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(100, 999)]}),
        processing_class=AutoTokenizer.from_pretrained(folder))  # fmt: skip
    generation, faults, reports = trainer.vllm_generation, cycle(FAULTS.values()), []

    def sync():
        weights = {name: tensor.clone() for name, tensor in generation._iter_named_params()}
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        plant, _ = next(faults)
        plant(weights)
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync
    generation.sync_weights = proven(generation, reports.append)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "reward" in row]
    for name, report, row in zip(cycle(FAULTS), reports, steps, strict=False):
        print(name, row["sampling/sampling_logp_difference/mean"], row["sampling/sampling_logp_difference/max"])
        assert sorted(report.differing) == sorted(FAULTS[name][1])
        assert report.not_compared == report.not_given == []
    assert len(reports) == len(steps) == 3 * len(FAULTS)


def test_a_changed_bit_is_named_in_another_process(tmp_path, monkeypatch):
    close_live_engine()
    prepare_environment()
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "verify"), prepend=os.pathsep)
    model = qwen2(tied=True)
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), **SMALL)
    assert not hasattr(llm.llm_engine, "model_executor")  # it is in a child process
    assert differing(llm, model.state_dict()) == ([], [], [])
    assert differing(llm, dict(model.named_parameters())) == ([], [], ["lm_head.weight"])  # a copy, not compared
    model.get_parameter(UP).data.view(torch.int32)[3, 5] ^= 2**16
    assert differing(llm, model.state_dict()) == ([UP], [], [])
    llm.llm_engine.engine_core.shutdown()


def test_the_faults_of_vllms_reload_are_those_of_the_page(tmp_path, capfd):
    """A stale head, and memory that nothing has written."""
    prepare_environment()
    page = (ROOT / "docs" / "audit.md").read_text()
    code = re.search(r"```python\n(# VLLM_ENABLE_V1_MULTI.*?)```", page, re.DOTALL)[1]
    (tmp_path / "reload_faults.py").write_text(code)
    for seed in (0, 1):
        qwen2(tied=True, seed=seed).save_pretrained(tmp_path / str(seed))
    run_script(str(tmp_path / "reload_faults.py"), tmp_path / "0", tmp_path / "1")
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Report")]
    assert printed == [f"Report(differing=['{name}'], not_compared=[], not_given=[])"
                       for name in ("lm_head.weight", "model.layers.0.mlp.gate_proj.weight")]
