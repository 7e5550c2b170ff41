"""The first minute: what is missing is said in a sentence, what is harmless is not, and who else gets the numbers."""

import json
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
from helpers import SMALL, command, python, read_json, refusal, rows, train_here

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


@pytest.mark.parametrize("last, status, lines", [
    ("", 0, ["\0\ufffd", "a new warning", "after it"]),
    ("os.abort()", -signal.SIGABRT, ["\0\ufffd", "a new warning"]),  # what came before a crash is not lost
])  # fmt: skip
def test_harmless_lines_of_other_libraries_are_left_out_and_all_others_come_through(last, status, lines):
    assert python("-c", WRITES.format(last), status=status).stderr.splitlines() == lines


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    said = python("-S", "-c", "import train", status=1).stderr  # a Python without site-packages
    assert said.startswith("error: this Python has no torch, transformers, tyro, einops, matplotlib: install")
    assert len(said.splitlines()) == 1


def test_a_missing_tracker_is_refused_and_a_resumed_run_goes_on_in_one_run_of_it(good, tmp_path, monkeypatch, capsys):
    """With a module in place of wandb. The run is resumed before its first checkpoint, in another shell."""
    given, out = [], tmp_path / "mine"
    library = SimpleNamespace(
        init=lambda **options: given.append(json.loads(json.dumps(options))), finish=lambda: given.append("finished"),
        log=given.append, define_metric=lambda *names, **options: None, __spec__="is installed")  # fmt: skip
    arguments = command(good, f"--engine transformers --steps 1 --probe-every 1 --tracker wandb --out {out}", *SMALL)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "tracker must be installed, wandb is not: pip install wandb" in refusal(arguments, capsys)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    train_here(arguments)
    monkeypatch.delenv("WANDB_PROJECT")
    shutil.rmtree(out / "checkpoints")
    assert "wandb replaces no row" not in capsys.readouterr().out
    train_here([*arguments, "--resume"])
    assert "wandb replaces no row: its rows from step 0 on stay" in capsys.readouterr().out
    numbers = [{name: value for name, value in row.items() if value not in (None, "parity")} for row in rows(out)]
    started, *first, resumed = given[:5]
    assert resumed == started | {"config": read_json(out / "config.json"), "resume": "allow"}
    assert (started["project"], started["name"], len(started["id"])) == ("ours", "mine", 8)
    assert first[2:] + given[5:] == ["finished", *numbers, "finished"]
    assert "grad_norm" not in numbers[1] and "probe" not in numbers[1]


def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (0, 1):
        tracker = Tracker("tensorboard", tmp_path, {}, first)
        for step in range(first, 2):
            tracker.log({"step": step, "reward": 0.25})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward")] == [(0, 0.25), (1, 0.25)]
