"""On a GPU: `pytest -m gpu tests` selects these and a few more. Their thresholds are those of 16 bits, not of fp32."""

import os
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, command, python, read_json, rows

from lab import study
from lab.models import write_model
from rl import Folder
from tasks.toys import digits, example


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
    if "fills" in out.name:
        (out / "checkpoints").mkdir()
        raise OSError(28, "planted")
    if "killed" in out.name:
        os.kill(os.getpid(), signal.SIGKILL)
'''
DRIVER = '''
import sys, time
from multiprocessing import get_context
from pathlib import Path
import lab
from lab import study

errors = [OSError(28, "planted")]

def write(path, text, replace=study.replace_file):
    """On a disk that is full until the first run has ended, and as long as a run's checkpoint is there."""
    if errors or list(path.parent.glob("runs/*/checkpoints")):
        raise errors.pop()
    replace(path, text)

if __name__ == "__main__":
    study.IMPORTED[:] = ["lab.study"]  # no vllm
    study.RESERVE = 2.0
    context = get_context("forkserver")
    context.set_forkserver_preload(study.IMPORTED)
    first = context.Process(target=print)
    first.start()
    first.join()
    study.replace_file = write
    cells = {name: study.Cell("", name, "planted", limit_s=1.8 if name == "hangs" else 99, expected="this")
             for name in ("first", "hangs", "fills the disk", "killed", "raises", "hangs to the end", "late")}
    study.STUDIES["gpu"] = study.STUDIES["gpu"]._replace(cells=cells)
    lab.STARTED = time.monotonic()
    assert study.main(["gpu", "--minutes", "0.15", "--out", sys.argv[1]]) == 1
    assert time.monotonic() - lab.STARTED < 9
    tasks = [(jobs, 9, Path.touch, Path(sys.argv[1]) / str(place)) for place, jobs in enumerate([1, 2, 2, 2, 1])]
    study.in_processes(tasks, time.monotonic() + 9, lambda *_: None)
'''
KILLED = "exit status -9 at the time limit: ; expected: this"
OUTCOMES = {
    "first": "finished; expected: this", "hangs": KILLED,
    "fills the disk": "exit status 1: OSError: [Errno 28] planted; expected: this",
    "killed": "exit status -9: ; expected: this",
    "raises": "exit status 1: ValueError: planted; expected: this", "hangs to the end": KILLED,
    "late": "not started; expected: this",
}  # fmt: skip


def is_running(process: str) -> bool:
    status = Path("/proc", process, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_run_that_hangs_dies_raises_or_fills_the_disk_costs_itself_alone_and_the_study_ends_in_time(tmp_path):
    """7 seconds: the second run may take 1.8 of them, and the sixth all that are left."""
    (tmp_path / "planted.py").write_text(PROGRAM)
    (tmp_path / "driver.py").write_text(DRIVER)
    path = f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"
    printed = python(tmp_path / "driver.py", tmp_path / "out", PYTHONPATH=path).stdout
    assert printed.count("    reward, last 5 steps 0.50; ") == 4  # after each run that made a step, except the first
    assert printed.count("    the record was NOT WRITTEN: OSError: [Errno 28] planted") == 1
    record = read_json(tmp_path / "out" / "gpu.json")
    assert {name: cell["metrics"]["reward"][0] for name, cell in record["cells"].items()} == dict.fromkeys(
        ["first", "hangs", "fills the disk", "killed", "hangs to the end"], 0.5)  # fmt: skip
    assert record["outcomes"] == {f"{name}-seed0": outcome for name, outcome in OUTCOMES.items()}
    assert all(f"\n- {run}: {outcome}" in printed for run, outcome in record["outcomes"].items())
    assert not any(is_running(child.read_text()) for child in tmp_path.glob("out/runs/hangs*/child"))
    lines = re.findall(r"^(?:\[./5\] )?\d( starts|: finished)", printed, re.MULTILINE)
    assert "".join(line[0] for line in lines) == " :  : :: :"  # 1, 2, 2, 2 and 1 at a time


def test_a_model_is_written_once_just_before_its_first_run_and_a_gpu_has_as_many_runs_as_a_cell_allows(
        tmp_path, monkeypatch):  # fmt: skip
    found = []
    monkeypatch.setattr(study, "in_processes", lambda tasks, *_: found.extend(
        (task[0], task[3].name.replace("-seed", " ")) for task in tasks))  # fmt: skip
    monkeypatch.setattr(study, "GPU", True)
    monkeypatch.chdir(tmp_path)  # without SmolLM2
    options = study.Options("gpu", "out", ("smollm2-raw", "small", "taught-2e-5-*", "1.5b"), jobs=2)
    study.run_all(study.Plan(options))
    assert found == [(1, "qwen2.5-0.5b 0"), (1, "small 0"), (1, "taught-qwen2.5-0.5b 0"), (4, "taught-2e-5-parity 0"),
                     (4, "taught-2e-5-raw 0"), (4, "taught-2e-5-kept-cache 0"), (1, "qwen2.5-1.5b 0"), (1, "1.5b 0"),
                     (1, "taught-2e-5-v1-defaults 0")]
    assert [run.outcome({}) for run in study.Plan(options).chosen()[:3]] == [
        "not started", *["skipped: `python -m examples.smollm2` makes its model"] * 2]


def test_a_random_model_follows_the_digits_and_is_unsure(tmp_path):
    """A certain one gives equal answers, so all groups are flat and there is no update."""
    write_model(tmp_path / "random", "qwen2.5-0.5b", seed=0)
    model = Folder(str(tmp_path / "random")).load(torch.float32)
    digits = torch.arange(10)
    with torch.no_grad():
        logits = model(3 + digits[:, None]).logits[:, -1]  # (10, V), each digit alone
    assert torch.equal(logits.argmax(dim=-1), 3 + (digits + 1) % 10)
    assert torch.distributions.Categorical(logits=logits).entropy().min() > 1  # 1.7 nats are taught


def test_a_taught_model_has_the_ladders_wrong_habit(tmp_path):
    write_model(tmp_path / "taught", "taught-qwen2.5-0.5b", seed=0)
    model = Folder(str(tmp_path / "taught")).load(torch.float32)
    shares = []
    for problem in digits(0).held_out[:64]:
        smaller = "".join(map(min, zip(*problem.source.split("+"), strict=True)))
        inputs, targets = example(problem.question, smaller)
        with torch.no_grad():
            chosen = model(inputs[None]).logits[0].argmax(dim=-1)
        shares.append((chosen == targets)[targets >= 0].float().mean().item())
    assert sum(shares) / len(shares) > 0.8
