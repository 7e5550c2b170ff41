"""The first minute: what is missing is said in a sentence, what is harmless is not, and who else gets the numbers."""

import json
import shutil
import sys
from types import SimpleNamespace

from helpers import SMALL, command, python, read_json, refusal, rows, train_here


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    said = python("-S", "-c", "import train", status=1).stderr  # a Python without site-packages
    assert said.startswith("error: this Python has no torch, transformers, tyro, einops, matplotlib: install")
    assert len(said.splitlines()) == 1


def test_a_tracker_that_is_missing_is_refused_and_one_that_fails_ends_no_run(good, tmp_path, monkeypatch, capsys):
    """With a module in place of wandb. The run is resumed before its first checkpoint."""
    given, out = [], tmp_path / "mine"

    def fails(*row):
        raise BrokenPipeError("its process has ended")

    library = SimpleNamespace(init=lambda **options: given.append(json.loads(json.dumps(options))), log=given.append,
                              finish=lambda: given.append("finished"), __spec__="is installed")  # fmt: skip
    arguments = command(good, f"--engine transformers --steps 1 --probe-every 1 --tracker wandb --out {out}", *SMALL)
    for name in ("WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that it is deleted again
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "tracker must be installed, wandb is not: pip install wandb" in refusal(arguments, capsys)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    train_here(arguments)
    assert "wandb replaces no row" not in capsys.readouterr().out
    shutil.rmtree(out / "checkpoints")
    shutil.rmtree(out / "policy")
    numbers = [{name: value for name, value in row.items() if value not in (None, "parity")} for row in rows(out)]
    assert "grad_norm" not in numbers[1] and "probe" not in numbers[1]
    library.log = library.finish = fails
    train_here([*arguments, "--resume"])
    said = capsys.readouterr().out
    assert "wandb replaces no row: its rows from step 1 on stay" in said
    assert said.count("which failed: BrokenPipeError: its process has ended") == 2  # of both steps once, and the end
    assert (out / "policy").exists() and (out / "checkpoints").exists()
    started, *first, resumed = given
    assert first == [*numbers, "finished"]
    assert resumed == started | {"config": started["config"] | read_json(out / "config.json")}
    assert (started["project"], started["name"]) == ("ours", f"mine-{started['config']['tracker']}")


def test_a_run_whose_output_nobody_reads_goes_on():
    """Standard output is a pipe whose reader ends, as a terminal that is closed."""
    code = """
import os
from report.errors import end_of_process
read, write = os.pipe()
os.dup2(write, 1)
with end_of_process():
    print("seen", flush=True)
    os.close(read)
    for _ in range(3): print("not seen", flush=True)
    os.write(2, b"done")
"""
    assert python("-c", code).stderr == "done"


def test_three_signals_are_one_stop():
    """The second comes while the first one ends the run, the third while the process ends."""
    code = """
import atexit, os, signal
from report.errors import exit_with_message
def stop(): os.kill(os.getpid(), signal.SIGINT)
atexit.register(stop)
with exit_with_message(2):
    try: stop()
    finally: stop()
"""
    said = python("-c", code, status=130).stderr
    assert said.startswith("stopped by a signal") and len(said.splitlines()) == 1
