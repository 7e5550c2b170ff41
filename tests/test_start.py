"""What is missing is said in a sentence; who else gets the numbers, and that no run ends because nobody gets them."""

import errno
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, command, python, read_json, rows, train_here

from vllm_cases import CANARY_PROMPTS, check_machine, reason


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    said = python("-S", "-c", "import train", status=1).stderr  # a Python without site-packages
    assert said.startswith("error: this Python has no torch, transformers, tyro, einops, matplotlib: install")
    assert len(said.splitlines()) == 1


def test_a_resumed_run_goes_on_in_one_run_of_its_tracker(good, tmp_path, monkeypatch, capsys):
    """With a module in place of wandb. What a run needs is written before it is reported. In another shell."""
    given, out = [], tmp_path / "mine"
    checkpoint, policy = out / "checkpoints" / "step_000001", out / "policy"
    library = SimpleNamespace(
        init=lambda **named: given.append(json.loads(json.dumps(named))), finish=lambda: given.append(policy.exists()),
        log=lambda row, step: given.append((row, step, checkpoint.exists())))  # fmt: skip
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


@pytest.mark.parametrize("broken, error", [("init", SystemExit), ("log", SystemExit), ("finish", BrokenPipeError)])
def test_a_tracker_that_fails_is_named_once_and_ends_no_run(good, tmp_path, monkeypatch, capsys, broken, error):
    def fails(*row, **named):
        raise error("its process has ended")

    library = SimpleNamespace(**dict.fromkeys(("init", "log", "finish"), lambda *row, **named: None) | {broken: fails})
    monkeypatch.setitem(sys.modules, "trackio", library)
    train_here(command(good, f"--engine transformers --steps 2 --tracker trackio --out {tmp_path}/run", *SMALL))
    assert (tmp_path / "run" / "policy").exists()
    said = capsys.readouterr().out
    assert said.count(f"{error.__name__}: its process has ended") == 1


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
@pytest.mark.parametrize("build, said", [
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


@pytest.mark.engine
def test_the_number_of_slots_that_vllm_names_for_recurrent_layers_is_accepted_and_its_option_exists():
    from vllm.config.compilation import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    def start(max_num_seqs):
        config = CompilationConfig(mode=0, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=[1])
        cache = SimpleNamespace(has_mamba_layers=True, num_blocks=300)
        config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.ALWAYS, "", kv_cache_config=cache, max_num_reqs=max_num_seqs + CANARY_PROMPTS)

    with pytest.raises(ValueError, match="max_num_seqs") as refused:
        start(512)
    said = reason(refused.value)
    assert said.endswith("lower --max-num-seqs to at most 296 or increase --kv-cache-gib.")
    start(296)
