"""The first minute: what is missing is said in a sentence, what is harmless is not, and who else gets the numbers."""

import json
import sys
from types import SimpleNamespace

from helpers import SMALL, command, python, refusal, rows, train_here


def test_missing_packages_are_named_in_one_sentence_before_anything_is_imported():
    said = python("-S", "-c", "import train", status=1).stderr  # a Python without site-packages
    assert said.startswith("error: this Python has no torch, transformers, tyro, einops, matplotlib: install")
    assert len(said.splitlines()) == 1


def test_a_tracker_that_is_missing_is_refused_and_one_that_fails_ends_no_run(good, tmp_path, monkeypatch, capsys):
    """With a module in place of wandb. The resumed run goes on in the same run of the library, in another shell."""
    given, out = [], tmp_path / "mine"

    def log(numbers, step):
        given.append((numbers, step))
        if step:
            raise BrokenPipeError("its process has ended")

    def finish():
        raise RuntimeError("no upload")

    library = SimpleNamespace(init=lambda **named: given.append(json.loads(json.dumps(named))), log=log, finish=finish)
    arguments = command(good, f"--engine transformers --steps 1 --probe-every 1 --tracker wandb --out {out}", *SMALL)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "tracker must be an installed library with init, log and finish, such as" in refusal(arguments, capsys)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    train_here(arguments)
    said = capsys.readouterr().out
    assert said.count("notice: wandb.log failed, the run goes on") == 1 and "no upload" not in said
    assert (out / "policy").exists() and (out / "checkpoints").exists()
    monkeypatch.delenv("WANDB_PROJECT")
    train_here([*arguments, "--resume"])
    started, (first, _), (second, step), resumed = given
    assert {name: resumed[name] for name in ("project", "name", "id", "resume")} == {
        "project": "ours", "name": f"mine-{started['id']}", "id": started["id"], "resume": "allow"}  # fmt: skip
    assert step == second["at_step"] == rows(out)[1]["step"]
    assert second["reward"] == rows(out)[1]["reward"]
    assert "reward" not in first and "probe" not in second


def test_a_run_whose_output_nobody_reads_goes_on():
    """Standard output is a pipe whose reader ends, as a terminal that is closed."""
    code = """
import os
from report.errors import exit_with_message
read, write = os.pipe()
os.dup2(write, 1)
with exit_with_message(2):
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
