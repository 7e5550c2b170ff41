"""A run's folder: held by one process, resumed from what is whole, left whole by a full disk and by signals."""

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import command, refusal, train_here, train_process

from records import locked

# The reference engine: what is tested here is the same for both, and it starts at once.
SMALL = ("--engine transformers --max-new-tokens 4 --eval-problems 4 --eval-every 2 --checkpoint-every 1 --steps 4"
         " --num-minibatches 1 --lr 1e-2 --task {root}/task.py --group-size 8 --temperature 2")  # fmt: skip


def timeless(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not re.search("_s$|_gib$", name)} for row in rows]


def options(root: Path, out: Path) -> list[str]:
    return command(root, f"{SMALL} --out {out}")


@pytest.fixture(scope="module")
def whole(good, tmp_path_factory) -> Path:
    """A finished run; its checkpoints are those of steps 3 and 4."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_here(options(good, out))
    assert all(row["updates"] == 1 for row in timeless(out)[1:])
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint(out: Path, step: int) -> Path:
    return next(out.glob(f"checkpoints/step_{step:06d}-*.pt"))


DAMAGE = {
    "cut off": half, "one bit": flip, "empty": lambda path: path.write_text(""),
    "another state": lambda path: torch.save({}, path),
    "the one before it": lambda path: shutil.copy(checkpoint(path.parents[1], 3), path),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(good, whole, copy, kind, capsys):
    DAMAGE[kind](checkpoint(copy, 4))
    train_here([*options(good, copy), "--resume"])
    printed = capsys.readouterr().out
    assert re.search(r"checkpoint DAMAGED, trying the one before it: .*step_000004-\w+\.pt\n", printed)
    assert "resumed at step 4" in printed
    assert timeless(copy) == timeless(whole)
    assert (copy / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert sorted(path.name[:11] for path in copy.glob("checkpoints/*")) == ["step_000003", "step_000004"]
    assert all(path.stat().st_size > 10_000 for path in copy.glob("checkpoints/*"))


def test_a_folder_with_a_runs_files_and_no_config_is_not_taken_for_a_new_one(good, copy, capsys):
    (copy / "config.json").unlink()
    before = sorted(path.name for path in copy.rglob("*"))
    assert "has a run's files without config.json" in refusal(options(good, copy), capsys)
    assert sorted(path.name for path in copy.rglob("*")) == before


OTHERS = {"another seed": "--seed 5", "another rate": "--lr 5e-3", "another temperature": "--temperature 1.5"}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(good, copy, tmp_path, kind, capsys):
    out = tmp_path / "other"
    train_here([*options(good, out), *OTHERS[kind].split()])
    checkpoint(copy, 4).unlink()
    stranger = checkpoint(out, 4).rename(copy / "checkpoints" / checkpoint(out, 4).name)
    before = {path: path.read_bytes() for path in copy.glob("*.jsonl")}
    assert f"{stranger} is of another run or step" in refusal([*options(good, copy), "--resume"], capsys)
    assert {path: path.read_bytes() for path in copy.glob("*.jsonl")} == before


def test_a_checkpoint_under_the_name_of_another_step_is_refused(good, copy, capsys):
    whole = checkpoint(copy, 3)
    checkpoint(copy, 4).unlink()
    renamed = whole.rename(whole.with_name(whole.name.replace("step_000003", "step_000004")))
    assert f"{renamed} is of another run or step" in refusal([*options(good, copy), "--resume"], capsys)


def test_checkpoints_that_are_all_damaged_are_refused(good, copy, capsys):
    for path in copy.glob("checkpoints/*"):
        half(path)
    assert f"{copy} has none; try another --out" in refusal([*options(good, copy), "--resume"], capsys)


def without_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: number - 1] + lines[number:]))


def twice(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], *lines[2:]]))


def broken_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[: number - 1], lines[number - 1][:9] + "\n", *lines[number:]]))


TABLES = {
    "a step missing": lambda f: without_line(f / "metrics.jsonl", 3), "cut off": lambda f: half(f / "metrics.jsonl"),
    "a step twice": lambda f: twice(f / "metrics.jsonl"), "no samples": lambda f: (f / "samples.jsonl").unlink(),
    "a broken line": lambda f: broken_line(f / "samples.jsonl", 2),
    "bytes": lambda f: (f / "metrics.jsonl").write_bytes(bytes(range(256))),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_damaged_tables_are_written_again_from_the_checkpoint(good, whole, copy, kind):
    TABLES[kind](copy)
    checkpoint(copy, 4).unlink()
    train_here([*options(good, copy), "--resume"])
    assert timeless(copy) == timeless(whole)
    assert (copy / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


RECORDS = {
    "no config": (lambda f: (f / "config.json").unlink(), "has a run's files without config.json"),
    "no checkpoints": (lambda f: shutil.rmtree(f / "checkpoints"), "must have a readable checkpoint"),
    "an empty config": (lambda f: (f / "config.json").write_text(""), "config.json failed: json.decoder.JSON"),
    "another config": (lambda f: (f / "config.json").write_text("{}"), "config.json failed: KeyError: 'config'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
def test_a_run_that_cannot_be_resumed_is_refused_and_its_tables_are_left_alone(good, copy, kind, capsys):
    spoil, complaint = RECORDS[kind]
    spoil(copy)
    before = {path: path.read_bytes() for path in copy.glob("*.jsonl")}
    assert complaint in refusal([*options(good, copy), "--resume"], capsys)
    assert {path: path.read_bytes() for path in copy.glob("*.jsonl")} == before


# ------------------------------------------------------------------------------------------------ other processes
STOPPED = "stopped by a signal; a run goes on from its newest checkpoint with --resume\n"
IN_STEP_2 = 60  # a call of the reward: step 0 makes 8 of them, each step 32


def test_one_process_holds_a_run_and_sigterm_ends_it_with_a_sentence(good, whole, tmp_path, capsys):
    out = tmp_path / "run"
    process = train_process(options(good, out), signal.SIGSTOP, IN_STEP_2)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for again in ([], ["--resume"]):
        complaint = refusal([*options(good, out), *again], capsys)
        assert f"{out} is held by process {process.pid} on {os.uname().nodename}" in complaint
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.endswith(STOPPED)
    assert "Traceback" not in said
    train_here([*options(good, out), "--resume"])
    assert timeless(out) == timeless(whole)


def test_sigint_ends_a_run_with_a_sentence(good, whole, tmp_path):
    out, handler = tmp_path / "run", signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    process = train_process(options(good, out), signal.SIGINT, IN_STEP_2)
    signal.signal(signal.SIGINT, handler)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.endswith(STOPPED)
    assert "Traceback" not in said
    train_here([*options(good, out), "--resume"])
    assert timeless(out) == timeless(whole)


def test_the_lock_file_of_a_dead_process_is_ignored(tmp_path):
    (tmp_path / "lock").write_text("process 1 on a machine long gone\n")
    with locked(str(tmp_path)):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


def test_a_full_disk_ends_in_a_sentence_and_the_run_can_be_resumed(good, whole, tmp_path, capsys):
    """Files of at most 400 kB stand for the disk: the weights fit, the optimizer's state does not."""
    out, limit, (usual, hard) = tmp_path / "run", 400_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    assert (whole / "policy" / "model.safetensors").stat().st_size < limit
    assert checkpoint(whole, 4).stat().st_size > limit
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(SystemExit) as stop:
            train_here(options(good, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, hard))
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert re.search(r"^error: writing a checkpoint in .* failed: RuntimeError: .*fail", said, re.M)
    assert "Traceback" not in said
    train_here([*options(good, out), "--resume"])
    assert timeless(out) == timeless(whole)
