"""On a GPU: `pytest -m gpu tests` selects these and a few more. Their thresholds are those of 16 bits, not of fp32."""

import os
from pathlib import Path

import pytest
import torch
from helpers import ROOT, command, python, read_json, rows

from lab import study
from lab.models import SHAPES, write_model
from rl import Folder
from tasks.toys import toy_tokenizer


@pytest.mark.gpu
@pytest.mark.engine
def test_a_run_in_bf16_with_offload_sleeps_at_level_2_and_has_no_more_mismatch_than_noise(good):
    options = ("--dtype bfloat16 --steps 2 --max-new-tokens 16 --kv-cache-gib 1 --offload-optimizer"
               " --gradient-checkpointing --self-noise-every 1 --out {root}/gpu")  # fmt: skip
    python("train.py", *command(good, options))
    steps = rows(good / "gpu")[1:]
    assert len(steps) == 2
    assert all(0 < step["mismatch_abs_mean"] < 3 * step["self_noise_abs_mean"] for step in steps)
    assert read_json(good / "gpu" / "config.json")["audit"]["sleep"] == "level 2"


@pytest.mark.gpu
@pytest.mark.engine
def test_the_study_for_a_gpu_frees_memory_in_sleep_and_ends_without_an_error(good, tmp_path):
    size = "--num-prompts 4 --max-new-tokens 8 --kv-cache-gib 2"
    python(*f"-m lab.study gpu --cells parity --steps 3 --out {tmp_path}".split(),
        f"--train-args=--model {good / 'model'} {size}")  # fmt: skip
    measured = read_json(tmp_path / "gpu.json")["cells"]["parity"]["metrics"]
    assert measured["freed"][0] > 1.9


# ------------------------------------------------------------------------------------------------ in ten minutes
PROGRAM = '''
import json, os, signal, subprocess, threading
from pathlib import Path

def main(words):
    out = Path(words[words.index("--out") + 1])
    out.mkdir(parents=True)
    if "raises" in out.name:  # before its first step, as an engine that cannot start
        raise ValueError("planted")
    (out / "config.json").write_text(json.dumps({"audit": {}, "device": "a CPU", "dirty": False, "versions": {}}))
    (out / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\\n{"step": 2, "rew')  # as a kill leaves it
    if "hangs" in out.name:
        (out / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        threading.Event().wait()
    if "killed" in out.name:
        os.kill(os.getpid(), signal.SIGKILL)
'''
DRIVER = '''
import sys, time
import lab
from lab import study
from multiprocessing import get_context

if __name__ == "__main__":
    study.IMPORTED[:] = ["lab.study"]  # no vllm
    study.RESERVE = 2.0
    context = get_context("forkserver")
    context.set_forkserver_preload(study.IMPORTED)
    first = context.Process(target=print)
    first.start()
    first.join()
    cells = {name: study.Cell("", name, "planted", share=share, expected="this") for name, share in {
        "first": 1, "hangs": 0.2, "killed": 1, "raises": 1, "hangs to the end": 1, "late": 1}.items()}
    study.STUDIES["gpu"] = study.STUDIES["gpu"]._replace(cells=cells)
    lab.STARTED = time.monotonic()
    assert study.main(["gpu", "--minutes", "0.15", "--out", sys.argv[1]]) == 1
    assert time.monotonic() - lab.STARTED < 9
'''
KILLED = "exit status -9 at the time limit: ; expected: this"
OUTCOMES = {
    "first": "finished; expected: this", "hangs": KILLED, "killed": "exit status -9: ; expected: this",
    "raises": "exit status 1: ValueError: planted; expected: this", "hangs to the end": KILLED,
    "late": "not started; expected: this",
}  # fmt: skip


def is_running(process: str) -> bool:
    status = Path("/proc", process, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_run_that_hangs_dies_or_raises_costs_itself_alone_and_the_study_ends_in_time(tmp_path):
    """7 seconds: the second run may take 1.8 of them, and the fifth all that are left."""
    (tmp_path / "planted.py").write_text(PROGRAM)
    (tmp_path / "driver.py").write_text(DRIVER)
    path = f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"
    printed = python(tmp_path / "driver.py", tmp_path / "out", PYTHONPATH=path).stdout
    assert printed.count("    reward, last 5 steps 0.50; ") == 4  # after each run that made a step
    record = read_json(tmp_path / "out" / "gpu.json")
    assert {name: cell["metrics"]["reward"][0] for name, cell in record["cells"].items()} == dict.fromkeys(
        ["first", "hangs", "killed", "hangs to the end"], 0.5)  # fmt: skip
    assert record["outcomes"] == {f"{name}-seed0": outcome for name, outcome in OUTCOMES.items()}
    assert all(f"\n- {run}: {outcome}" in printed for run, outcome in record["outcomes"].items())
    assert not any(is_running(child.read_text()) for child in tmp_path.glob("out/runs/hangs*/child"))


def test_a_model_is_written_once_just_before_the_first_run_that_needs_it_and_a_gpu_has_one_run(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(study, "in_processes", lambda tasks, jobs, *_: found.extend(
        [jobs, *(task[2].name for task in tasks)]))  # fmt: skip
    monkeypatch.setattr(study, "GPU", True)  # a rehearsal has another model
    options = study.Options("gpu", str(tmp_path), ("parity", "1.5b", "float16"), seeds=(0, 1), jobs=2)
    study.run_all(study.Plan(options))
    assert found == [1, *(f"{each}-seed{seed}" for seed in (0, 1) for each in (
        "qwen2.5-0.5b", "parity", "qwen2.5-1.5b", "1.5b", "float16"))]  # fmt: skip


def test_a_random_model_of_a_real_shape_follows_the_digits_and_is_unsure(tmp_path, monkeypatch):
    """A certain one gives equal answers, so all groups are flat and there is no update."""
    tiny = dict(vocab_size=len(toy_tokenizer()), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    write_model(tmp_path / "tiny", "tiny", seed=0)
    model = Folder(str(tmp_path / "tiny")).load(torch.float32)
    digits = torch.arange(10)
    with torch.no_grad():
        logits = model(3 + digits[:, None]).logits[:, -1]  # (10, V), each digit alone
    assert torch.equal(logits.argmax(dim=-1), 3 + (digits + 1) % 10)
    assert torch.distributions.Categorical(logits=logits).entropy().min() > 1  # 1.7 nats are taught
