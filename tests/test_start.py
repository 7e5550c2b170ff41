"""What is missing is said in a sentence; who else gets the numbers, and that no run ends because nobody gets them."""

import errno
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, command, parametrize, python, read_json, rows, train_here

from vllm_cases import check_machine, reason


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    said = python("-S", "-c", "import train", status=1).stderr  # a Python without site-packages
    assert said.startswith("error: this Python has no torch, transformers, tyro, einops, matplotlib: install")
    assert len(said.splitlines()) == 1


def test_a_resumed_run_goes_on_in_one_run_of_its_tracker_and_ends_well_if_that_fails(
        good, tmp_path, monkeypatch, capsys):
    """With a module in place of wandb. What a run needs is written before it is reported. In another shell."""
    given, out = [], tmp_path / "mine"
    checkpoint, policy = out / "checkpoints" / "step_000001", out / "policy"

    def finish():
        given.append(policy.exists())
        raise SystemExit("its process has ended")

    library = SimpleNamespace(init=lambda **named: given.append(json.loads(json.dumps(named))), finish=finish,
                              log=lambda row, step: given.append((row, step, checkpoint.exists())))
    arguments = command(good, f"--engine transformers --steps 1 --probe-every 1 --tracker wandb --out {out}", *SMALL)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    train_here(arguments)
    numbers = [{name: value for name, value in row.items() if value not in (None, "parity")} for row in rows(out)]
    first = [(row | {"at_step": step}, step, step == 1) for row in numbers if (step := row.pop("step")) is not None]
    started, *others = given
    assert others == [*first, True]
    assert (started["project"], started["name"], started["resume"]) == ("ours", f"mine-{started['id']}", "allow")
    monkeypatch.delenv("WANDB_PROJECT")
    train_here([*arguments, "--resume"])
    assert given[4:] == [started | {"config": read_json(out / "config.json")}, True]
    assert capsys.readouterr().out.count("goes on without it: SystemExit: its process has ended") == 2


def test_a_run_whose_output_nobody_reads_goes_on_and_a_full_disk_is_an_error():
    code = """
import os, sys
from report.errors import print_each_line_at_once
for _ in range(2): print_each_line_at_once()
for stream in (sys.stdout, sys.stderr):
    read, write = os.pipe()
    os.dup2(write, stream.fileno())
    os.close(read)
    print("nobody reads this", file=stream)
    os.write(stream.fileno(), b"nor this")
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
try: print("no place for this")
except OSError as error: os._exit(error.errno)
"""
    python("-c", code, status=errno.ENOSPC)


def test_of_three_signals_the_first_ends_the_process():
    """The second comes while the first one is unwound, the third while Python ends."""
    code = """
import atexit, os, signal
from report.errors import exit_with_message, stop_on_signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
stop_on_signals()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
with exit_with_message(2):
    try: os.kill(os.getpid(), signal.SIGINT)
    finally: os.kill(os.getpid(), signal.SIGINT)
"""
    said = python("-c", code, status=130).stderr
    assert said.startswith("stopped by a signal") and len(said.splitlines()) == 1


@pytest.mark.engine
@parametrize("build, said", [
    (None, "one is a CPU build: make a fresh"), ("13.0", "torch says: No CUDA GPUs are .*_VISIBLE_DEVICES is ''"),
])  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_refused_with_torchs_own_reason(monkeypatch, build, said):
    """vLLM's CUDA build finds it by its driver."""
    from vllm import platforms

    def init():
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=said):
        check_machine(False)


def test_vllms_advice_names_our_options_and_leaves_out_the_slots_of_the_canary():
    said = reason(ValueError("lower max_num_seqs to at most 300 or increase `gpu_memory_utilization`."))
    assert said == "lower --max-num-seqs to at most 296 or increase --kv-cache-gib."
