"""The first minute: what is missing is said in a sentence, what is harmless is not, and who else gets the numbers."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, SMALL, command, read_json, refusal, rows, train_here

from extras.tracker import Tracker

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


def test_a_missing_tracker_is_refused_and_the_one_of_a_run_gets_every_number(good, tmp_path, monkeypatch, capsys):
    """With a module in place of trackio and wandb, which have these three functions."""
    given, out = [], tmp_path / "mine"
    library = SimpleNamespace(
        init=lambda **options: given.append(json.loads(json.dumps(options))), finish=lambda: given.append("finished"),
        log=lambda numbers, step: given.append((step, numbers)), __spec__="is installed")  # fmt: skip
    arguments = command(good, f"--engine transformers --steps 1 --probe-every 1 --tracker wandb --out {out}", *SMALL)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "tracker must be installed, wandb is not: pip install wandb" in refusal(arguments, capsys)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_DIR", "")
    train_here(arguments)
    numbers = [(row.pop("step"), {name: value for name, value in row.items() if value not in (None, "parity")})
               for row in rows(out)]  # fmt: skip
    record = read_json(out / "config.json")
    assert given == [{"project": "grpo", "name": "mine", "config": record}, *numbers, "finished"]
    assert "grad_norm" not in numbers[1][1] and "probe" not in numbers[1][1]


def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((0, 1), (1,)):
        tracker = Tracker("tensorboard", tmp_path, {}, first_step=1)
        for step in steps:
            tracker.log({"step": step, "reward": 0.25})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward")] == [(0, 0.25), (1, 0.25)]
