"""On a GPU: `pytest -m gpu tests` selects these and a few more. Their thresholds are those of 16 bits, not of fp32."""

import json
import os
import subprocess
import sys

import pytest
from helpers import OWN_PROCESS, ROOT, command, rows


# ------------------------------------------------------------------------------------------------ one engine a process
@pytest.mark.engine  # it starts none, but only tests that do have a process of their own
@pytest.mark.own_process
@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="it fails in its own process alone")
def test_a_failure_in_a_process_of_its_own_is_a_failure():
    assert int(os.environ[OWN_PROCESS]) != os.getppid()


def test_each_gpu_test_that_starts_an_engine_in_its_process_has_the_marker(request):
    """The others that start one, below, start it in a child process."""
    found = {item.name for item in request.session.items
             if {"gpu", "engine"} <= {*item.keywords} and "own_process" not in item.keywords}
    assert found <= {"test_a_run_in_bf16_with_offload_sleeps_at_level_2_and_has_no_more_mismatch_than_noise",
                     "test_the_study_for_a_gpu_frees_memory_in_sleep_and_ends_without_an_error"}  # fmt: skip


def run(*program: object) -> None:
    words = [sys.executable, *map(str, program)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.engine
def test_a_run_in_bf16_with_offload_sleeps_at_level_2_and_has_no_more_mismatch_than_noise(good):
    options = ("--dtype bfloat16 --steps 2 --max-new-tokens 16 --kv-cache-gib 1 --offload-optimizer"
               " --gradient-checkpointing --self-noise-every 1 --out {root}/gpu")  # fmt: skip
    run("train.py", *command(good, options))
    steps = rows(good / "gpu")[1:]
    assert len(steps) == 2
    assert all(0 < step["mismatch_abs_mean"] < 3 * step["self_noise_abs_mean"] for step in steps)
    assert json.loads((good / "gpu" / "config.json").read_text())["audit"]["sleep"] == "level 2"


@pytest.mark.gpu
@pytest.mark.engine
def test_the_study_for_a_gpu_frees_memory_in_sleep_and_ends_without_an_error(good, tmp_path):
    size = "--num-prompts 4 --max-new-tokens 8 --kv-cache-gib 2"
    run("-m", "lab.study", "gpu", "--cells", "parity", "--steps", "3", "--out", tmp_path,
        f"--train-args=--model {good / 'model'} {size}")  # fmt: skip
    measured = json.loads((tmp_path / "gpu.json").read_text())["cells"]["parity"]["metrics"]
    assert measured["freed"][0] > 1.9
