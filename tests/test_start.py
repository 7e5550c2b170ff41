"""The first minute: what is missing is said in a sentence, what is harmless is not, and who else gets the numbers."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, SMALL, command, refusal, train_here

from extras.tracker import Tracker
from verify import start
from verify.start import check_vllm_version

WRITES = """
import os, sys
from report.quiet import harmless_left_out
with harmless_left_out():
    os.write(2, b"[W] NUMA binding: Using MEMBIND policy\\n")
    os.write(2, b"\\0\\xff\\n")  # not text
    print("a new warning", file=sys.stderr, flush=True)
    {}
print("after it", file=sys.stderr)
"""
ROWS = [{"step": 0, "eval_reward": 0.5}, {"step": 1, "reward": 0.25, "probe": "parity", "grad_norm": None}]


def run_code(code: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          errors="replace", check=False)


@pytest.mark.parametrize("last, status, lines", [
    ("", 0, ["\0\ufffd", "a new warning", "after it"]),
    ("os.abort()", -signal.SIGABRT, ["\0\ufffd", "a new warning"]),  # what came before a crash is not lost
])  # fmt: skip
def test_harmless_lines_of_other_libraries_are_left_out_and_all_others_come_through(last, status, lines):
    done = run_code(WRITES.format(last))
    assert (done.returncode, done.stderr.splitlines()) == (status, lines)


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    done = run_code("import train", "-S")  # a Python without site-packages
    assert done.returncode == 1
    assert done.stderr.startswith("error: this Python has no torch, transformers, tyro, einops: install")
    assert len(done.stderr.splitlines()) == 1


def test_a_vllm_that_was_built_for_another_torch_is_refused_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(start, "version", lambda name: "2.14.0+cpu")
    with pytest.raises(ValueError, match=r"torch must be ==2\.13\.0\+cpu, for which vLLM 0\.32\.0 was built, got"):
        check_vllm_version()
    assert check_vllm_version(allow_untested=True) == "0.32.0"


def track(library: str, out: Path, rows: list[dict]) -> None:
    tracker = Tracker(library, out, {"lr": 0.5}, first_step=1)  # as a run that is resumed after step 0
    for row in rows:
        tracker.log(row)
    tracker.close()


def test_a_tracker_gets_every_number_of_each_row_under_its_name(tmp_path, monkeypatch):
    """With a module in place of trackio and wandb, which have these three functions."""
    given = []
    library = SimpleNamespace(init=lambda **options: given.append(options), finish=lambda: given.append("finished"),
                              log=lambda numbers, step: given.append((step, numbers)))  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_DIR", "")
    track("wandb", tmp_path / "mine", ROWS)
    assert given == [{"project": "grpo", "name": "mine", "config": {"lr": 0.5}}, (0, {"eval_reward": 0.5}),
                     (1, {"reward": 0.25}), "finished"]


def test_a_missing_tracker_is_refused_and_a_run_closes_the_one_that_it_has(good, tmp_path, monkeypatch, capsys):
    logged, closed = [], []
    library = SimpleNamespace(init=lambda **_: None, log=lambda _, step: logged.append(step), __spec__="is installed",
                              finish=lambda: closed.append([*logged]))  # fmt: skip
    arguments = command(good, "--engine transformers --steps 1 --tracker wandb --out", str(tmp_path), *SMALL)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "tracker must be installed, wandb is not: pip install wandb" in refusal(arguments, capsys)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_DIR", "")
    train_here(arguments)
    assert closed == [[0, 1]]


def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track("tensorboard", tmp_path, ROWS)
    track("tensorboard", tmp_path, ROWS[1:])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("eval_reward", "reward")}
    assert found == {"eval_reward": [(0, 0.5)], "reward": [(1, 0.25)]}
