"""lab.study: whose runs count, what the table says of them, and real runs that crash, are killed and go on."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import atan, pi, sqrt
from pathlib import Path

import numpy
import pytest
import torch
from helpers import KERNELS, ROOT, forked, qwen2, refusal, timeless, train_here

from examples.toys import toy_tokenizer
from lab.cells import ALONE, METRICS, RUNGS, STUDIES
from lab.products import widen
from lab.study import MARK, RECORDS, STUDENT, Options, Plan, by_seed, main, paired, text_of
from records import locked

STEPS = [{"step": 0, "eval_reward_greedy": 0.1},
         {"step": 1, "reward": 0.25, "tokens": 9, "step_s": 3.0, "eval_reward": 0.5}]  # fmt: skip


def write_run(out: Path, name: str, seed: int) -> Path:
    """A finished run of the ladder, as train.py and the study leave it."""
    run = Plan(Options("ladder", out=str(out))).run(name, seed)
    run.folder.mkdir(parents=True)
    config = {"device": "a CPU", "commit": "abc", "dirty": False, "versions": {"torch": "1"}, "audit": {}}
    (run.folder / "config.json").write_text(json.dumps(config))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))
    mark = {"command": f"study of {name}", "commit": "of the study", "options": run.options}
    (run.folder / MARK).write_text(json.dumps(mark))
    return run.folder


# ------------------------------------------------------------------------------------------------ whose runs count
@pytest.mark.parametrize("other, named", [
    ("--train-args=--lr 1e-4", "lr 0.002 instead of 0.0001"), ("--steps=7", "steps 40 instead of 7")])
def test_a_run_of_other_options_is_named_and_stays_as_it_is(tmp_path, other, named, capsys):
    folder = write_run(tmp_path, "parity", 0)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = refusal(["ladder", "--out", str(tmp_path), "--cells", "parity", other], capsys, main)
    assert f"{folder} has " in said
    assert named in said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_with_an_option_that_is_gone_is_named(tmp_path, capsys):
    mark = write_run(tmp_path, "parity", 0) / MARK
    mark.write_text(mark.read_text().replace('"lr": ', '"gone": 1, "lr": '))
    assert "gone 1 instead of None" in refusal(["ladder", "--out", str(tmp_path), "--cells", "parity"], capsys, main)


def test_all_finished_runs_are_in_the_record_and_what_none_has_measured_is_left_out(tmp_path, capsys):
    for name, seed in (("parity", 0), ("parity", 1), ("transformers", 1), ("transformers", 4)):
        write_run(tmp_path, name, seed)
    asked = ["--metrics", "reward", "eval_trainer_alone", "updates", "tokens_s"]  # updates: not in the rows
    assert main(["ladder", "--out", str(tmp_path), "--cells", "parity", "--seeds", "0", "1", *asked]) == 0
    table = capsys.readouterr().out
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert {name: cell["seeds"] for name, cell in record["cells"].items()} == {"transformers": [1, 4], "parity": [0, 1]}
    metrics = record["cells"]["parity"]["metrics"]
    assert (metrics["reward"], metrics["eval_trainer_alone"]) == ([0.25, 0.25], [None, None])
    assert record["cells"]["parity"]["curves"]["reward"] == [[0.25], [0.25]]
    assert [record[name] for name in ("command", "device", "commit", "versions", "crashed")] == [
        "study of transformers, study of parity", "a CPU", "of the study", {"torch": "1"}, {}]
    assert "| parity | 2 | transformers | 0.25 (0.25 to 0.25); +0.00 |" in table
    assert "held out, trainer alone" not in table
    assert "\n| transformers |" not in table  # it was not asked for
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert main(["ladder", "--out", str(tmp_path), "--cells", "parity", "--seeds", "0", "1", "--narrow", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["        reward  eval_trainer_alone  updates  tokens_s",
                          "parity    0.25                                      3"]  # fmt: skip
    assert (tmp_path / "ladder-means.png").stat().st_size > 10_000


@pytest.mark.parametrize("words, complaint", [
    (["ladder", "--cells", "v2"], "cells must be names of cells or patterns, got v2; there are transformers,"),
    (["dose"], "study must be one of ladder, real, bench, gpu (a record can only be printed), got dose; try --print"),
    (["ladder", "--jobs", "0"], "jobs must be in [1, 2147483647]"),
    (["ladder", "--print", "absent.json"], "reading the record absent.json failed"),
    (["ladder", "--print", "docs/records/claims.json"], "KeyError")])  # fmt: skip
def test_bad_options_are_refused_in_a_sentence(tmp_path, words, complaint, capsys):
    assert complaint in refusal([*words, "--out", str(tmp_path)], capsys, main)


# ------------------------------------------------------------------------------------------------ the cells
@pytest.mark.parametrize("name", STUDIES)
def test_each_cell_is_a_job_of_train_and_differs_from_its_baseline(name):
    plan = Plan(Options(name))
    plan.rehearsal = ""  # as on a GPU
    run = cache(lambda cell: plan.run(cell, 0))
    for cell in plan.cells:
        base = plan.study.cells[cell].baseline
        assert run(cell).config.job.steps > 1
        assert base == cell or base not in plan.cells or run(cell).options != run(base).options
        assert base in plan.study.cells or name == "bench"


def test_the_ladder_adds_one_fix_at_a_time_and_ends_at_parity():
    switched_off = [set(words.split()) for words in RUNGS.values()]
    assert [len(flags) for flags in switched_off] == [4, 3, 2, 1, 0]
    assert all(fewer < more for more, fewer in pairwise(switched_off))
    assert switched_off[0] == set(ALONE.values())


# ------------------------------------------------------------------------------------------------ the table
def test_a_paired_difference_has_the_interval_of_students_t():
    ours, theirs = {0: 1.0, 1: 3.0, 2: 5.0, 9: 100.0}, {0: 0.0, 1: 1.0, 2: 2.0, 8: -100.0}
    assert paired(ours, theirs) == (2.0, pytest.approx(4.303 / sqrt(3)))  # of 1, 2 and 3
    assert paired({0: 3.0}, theirs) == (3.0, None)
    assert paired({7: 3.0}, theirs) == (None, None)
    many = {seed: float(seed % 2) for seed in range(30)}
    assert paired(many, dict.fromkeys(many, 0.0))[1] == pytest.approx(2.262 * sqrt(0.25 * 30 / 29) / sqrt(30))
    assert text_of(METRICS["reward"], ours, theirs) == "27.25 (1.00 to 100.00); +2.00 ± 2.48"
    assert text_of(METRICS["probe"], {0: "parity", 1: "parity"}, {}) == "parity"


def test_the_quantiles_hold_95_percent_of_students_t():
    # t = sqrt(freedom) tan(angle), and the density of the angle is cos(angle)^(freedom - 1).
    angle = (numpy.arange(1e6) + 0.5) * pi / 2e6
    for freedom, quantile in enumerate(STUDENT, 1):
        density = numpy.cos(angle) ** (freedom - 1)
        inside = angle < atan(quantile / sqrt(freedom))
        assert density[inside].sum() / density.sum() == pytest.approx(0.95, abs=6e-5)


def test_metrics_skip_steps_without_a_value():
    rewards = [{"reward": float(step)} for step in range(10)]
    assert METRICS["reward"].measure(rewards) == 7.0  # of steps 5 to 9
    assert METRICS["mismatch_max"].measure([{"mismatch_max": 1.0}, {}, {"mismatch_max": 3.0}]) == 3.0
    assert METRICS["eval_trainer_alone"].measure(rewards) is None
    assert METRICS["eval_greedy_before"].measure(STEPS) == 0.1
    assert METRICS["tokens_s"].measure(STEPS) == 3.0
    times = [{"update_s": 9.0, "bare_update_s": 1.0}] * 2 + [{"update_s": 4.0, "bare_update_s": 2.0}, {}]
    assert (METRICS["update_s"].measure(times), METRICS["update_bare"].measure(times)) == (4.0, 2.0)


STORED = sorted(path for path in RECORDS.glob("*.json") if "study" in json.loads(path.read_text()))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_record_is_printed_whole(path, capsys):
    """Also if its study is gone; then with the columns that it has."""
    record = json.loads(path.read_text())
    assert main([path.stem, "--print"]) == 0
    printed = capsys.readouterr().out
    for name, cell in record["cells"].items():
        assert f"| {name} | {len(cell['seeds'])} | " in printed
        assert all(len(values) == len(cell["seeds"]) for values in cell["metrics"].values())
        if record["study"] not in STUDIES:
            measured = [METRICS[each].title for each in cell["metrics"] if each in METRICS and by_seed(cell, each)]
            assert [title for title in measured if f"| {title} |" not in printed] == []


# ------------------------------------------------------------------------------------------------ real runs
@pytest.fixture
def small(tmp_path) -> list[str]:
    """Words that replace the ladder's workload by a tiny model and 12 short problems."""
    folder, task = tmp_path / "model", tmp_path / "task.jsonl"
    qwen2(tied=False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    task.write_text("\n".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) for n in range(12)))
    size = "--num-prompts 4 --group-size 4 --inflight-groups 2 --eval-problems 2 --lr 1e-3 --dtype float32"
    train_args = f"--train-args=--model {folder} --task {task} {size} --no-eval-trainer-alone"
    return ["ladder", "--cells", "parity", "v1-defaults", "--seeds", "0", "--jobs", "1", "--out", str(tmp_path / "out"),
            train_args]  # fmt: skip


def is_free(folder: Path) -> bool:
    """Whether no run holds the folder."""
    with suppress(ValueError), locked(str(folder)):
        return True
    return False


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.engine
def test_a_killed_study_takes_its_run_along_and_a_second_call_repeats_what_has_not_finished(tmp_path, small, capsys):
    log, folder = (tmp_path / "out" / "runs" / name for name in ("v1-defaults-seed0.log", "v1-defaults-seed0"))
    program = [sys.executable, "-m", "lab.study", *small, "--steps", "1000"]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as study:
        wait_until(lambda: log.exists() and "step   1/" in log.read_text(), 900)
        assert not is_free(folder)
        study.kill()
    wait_until(lambda: is_free(folder), 120)
    shutil.rmtree(tmp_path / "out")

    crashing = tmp_path / "out" / "runs" / "parity-seed0"
    crashing.parent.mkdir(parents=True)
    crashing.touch()  # a file where the folder of this run should be
    assert main([*small, "--steps", "2"]) == 1
    printed = capsys.readouterr().out
    assert "[1/2] v1-defaults-seed0: finished" in printed
    assert "[2/2] parity-seed0: CRASHED, exit status 2: error: out must be a writable folder" in printed
    record = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert set(record["cells"]) == {"v1-defaults"}
    assert set(record["crashed"]) == {"parity-seed0"}
    assert record["cells"]["v1-defaults"]["engine"]["logprobs_mode"] == "raw_logprobs"

    finished = tmp_path / "out" / "runs" / "v1-defaults-seed0" / "metrics.jsonl"
    stamp = finished.stat().st_mtime_ns
    crashing.unlink()
    assert main([*small, "--steps", "2"]) == 0
    assert finished.stat().st_mtime_ns == stamp
    assert "| v1-defaults | 1 |" in capsys.readouterr().out

    # A forked run is the same as one in this process, unless kernels are changed in this one alone.
    plan = Plan(Options("ladder", out=str(tmp_path / "out"), steps=2, train_args=small[-1].partition("=")[2]))
    train_here([*plan.run("parity", 0).words, "--out", str(tmp_path / "here")])
    assert KERNELS or timeless(crashing) == timeless(tmp_path / "here")


# ---------------------------------------------------------------------------------------------------- 16-bit products
def check_products(dtype: str):
    narrow = getattr(torch, dtype)
    single, left = torch.randn(5, 300), torch.randn(5, 7, 300).to(narrow)
    right, layer = torch.randn(5, 300, 9).to(narrow).requires_grad_(), torch.nn.Linear(300, 9).to(narrow)
    before = single @ single.T
    widen(dtype)
    assert torch.equal(single @ single.T, before)
    for one, other in (left, right), (left[0], right[0]):
        assert torch.equal(one @ other, (one.float() @ other.float()).to(narrow))
    wide = torch.addmm(layer.bias.float(), left[0].float(), layer.weight.float().T)
    assert torch.equal(layer(left[0]), wide.to(narrow))
    (left[0] @ right[0]).sum().backward()
    assert torch.equal(right.grad[0, :, 0], left[0].float().sum(dim=0).to(narrow))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_products_are_those_of_float32_rounded_once(dtype):
    process = forked(check_products, dtype)
    process.join()
    assert process.exitcode == 0
