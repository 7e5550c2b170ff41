"""lab.study: whose runs count, what the table says of them, and real runs that crash, are killed and go on."""

import json
import re
import shutil
import subprocess
import sys
import time
from math import sqrt
from pathlib import Path

import psutil
import pytest
from helpers import PYTHON, ROOT, read_json, refusal, rewrite

from lab.cells import METRICS, STUDIES
from lab.study import MARK, RECORDS, Options, Plan, by_seed, described, job_of, main, paired, text_of
from train import Config

STEPS = [{"step": 0, "eval_reward_greedy": 0.1},
         {"step": 1, "reward": 0.25, "tokens": 9, "step_s": 3.0, "eval_reward": 0.5}]  # fmt: skip


def job_in(root: Path, task: str = "task.jsonl") -> str:
    return f"--model {root}/model --task {root}/{task}"


def write_run(out: Path, name: str, seed: int, job: str) -> Path:
    """A finished run of the ladder, as train.py and the study leave it."""
    run = Plan(Options("ladder", out=str(out), steps=1, train_args=job)).run(name, seed)
    run.folder.mkdir(parents=True)
    files, prompts, _ = run.job
    config = {"device": "a CPU", "commit": "abc", "dirty": False, "versions": {"torch": "1"}, "audit": {},
              "files": files, "prompts": prompts}
    (run.folder / "config.json").write_text(json.dumps(config))
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS))
    mark = {"command": f"study of {name}", "commit": "of the study", "options": run.options}
    (run.folder / MARK).write_text(json.dumps(mark))
    return run.folder


# ------------------------------------------------------------------------------------------------ whose runs count
def test_a_run_of_other_options_is_named_and_stays_as_it_is(good, tmp_path, capsys):
    folder = write_run(tmp_path, "parity", 0, job_in(good))
    mark = folder / MARK
    mark.write_text(mark.read_text().replace('"lr": ', '"gone": 1, "lr": '))  # an option of an earlier version
    before = {path: path.read_bytes() for path in folder.iterdir()}
    words = ["ladder", "--out", str(tmp_path), "--steps", "1", f"--train-args={job_in(good)} --lr 1e-4"]
    assert f"the finished run {folder} must keep its options, changed are gone, lr; try" in refusal(words, capsys, main)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def cut(path: Path) -> None:
    path.write_text(path.read_text().rpartition("\n")[0])


# What is done to a root with a model, a task and a finished run, and what is said of the run.
OTHERS = {
    "rows": (lambda root, _: cut(root / "task.jsonl"), "model and its task, changed are {root}/task.jsonl; try"),
    "model": (lambda root, _: rewrite("generation_config.json", top_k=1)(root / "model"),
              "model and its task, changed are {root}/model/generation_config.json; try"),
    "prompts": (lambda _, run: rewrite("config.json", prompts={"first": "<bos>1", "digest": ""})(run),
                "prompts: the same questions have other tokens now, such as '"),
    "cut": (lambda _, run: cut(run / "metrics.jsonl"), "the steps 0 to 1 in metrics.jsonl, it has 1;"),
    "no table": (lambda _, run: (run / "metrics.jsonl").unlink(), "the steps 0 to 1 in metrics.jsonl, it has 0;"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_finished_run_of_other_files_or_without_a_row_is_named_before_another_one_starts(
        good, tmp_path, kind, capsys):
    root, (spoil, complaint) = shutil.copytree(good, tmp_path / "root"), OTHERS[kind]
    folder = write_run(tmp_path, "parity", 0, job_in(root))
    spoil(root, folder)
    job_of.cache_clear()
    words = f"ladder --cells parity --seeds 0 1 --steps 1 --out {tmp_path}".split()
    said = refusal([*words, f"--train-args={job_in(root)}"], capsys, main)
    assert re.search(f"the finished run {folder} must (keep its|have) {re.escape(complaint.format(root=root))}", said)
    assert [*tmp_path.glob("runs/*")] == [folder]


def test_of_a_task_that_draws_from_its_own_generator_nothing_is_called_paired(good, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"import random\n{PYTHON.replace('rng.', 'random.Random().')}")
    job = f"--model {good}/model --task {tmp_path}/mine.py"
    for name in ("parity", "transformers"):
        write_run(tmp_path, name, 0, job)
    job_of.cache_clear()  # this call draws others
    words = [*f"ladder --cells parity --seeds 0 --steps 1 --out {tmp_path}".split(), f"--train-args={job}"]
    assert main(words) == 0
    assert "95 % interval. The task draws other problems in each run, so nothing is paired." in capsys.readouterr().out
    folder, weights = tmp_path / "runs/parity-seed0", f"{good}/model/model.safetensors"
    rewrite("config.json", files=read_json(folder / "config.json")["files"] | {weights: "others"})(folder)
    assert f"changed are {weights}; try" in refusal(words, capsys, main)


def test_all_finished_runs_are_in_the_record_and_what_none_has_measured_is_left_out(good, tmp_path, capsys):
    for name, seed in (("parity", 0), ("parity", 1), ("transformers", 1), ("transformers", 4)):
        shutil.copytree(write_run(tmp_path, name, seed, job_in(good)), tmp_path / f"runs/{name}-seed{seed} (copy)")
    (write_run(tmp_path, "lora", 0, job_in(good)) / MARK).unlink()  # begun, not finished
    words = f"ladder --out {tmp_path} --cells parity --seeds 0 1 --metrics reward eval_trainer_alone tokens_s".split()
    words += ["--steps", "1", f"--train-args={job_in(good)}"]
    assert main(words) == 0
    table = capsys.readouterr().out
    record = read_json(tmp_path / "ladder.json")
    assert {name: cell["seeds"] for name, cell in record["cells"].items()} == {"transformers": [1, 4], "parity": [0, 1]}
    metrics = record["cells"]["parity"]["metrics"]
    assert (metrics["reward"], metrics["eval_trainer_alone"]) == ([0.25, 0.25], [None, None])
    assert record["cells"]["parity"]["curves"] == {"reward": [[0.25], [0.25]]}  # in a picture all have values
    assert [record[name] for name in ("command", "commit", "crashed")] == [
        "study of transformers, study of parity", "of the study", {}]
    assert "| parity | 2 | transformers | 0.25 (0.25 to 0.25); +0.00 |" in table
    assert "held out, trainer alone" not in table and "nothing is paired" not in table
    assert "\n| transformers |" not in table  # it was not asked for
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert main([*words, "--narrow"]) == 0
    assert "| cell   | seeds | baseline     | reward | tokens_s |" in (narrow := capsys.readouterr().out)
    assert "| parity | 2     | transformers | 0.25   | 3        |" in narrow


@pytest.mark.parametrize("words, complaint", [
    (["ladder", "--cells", "v2"], "cells must be names of cells or patterns, got v2; there are transformers,"),
    (["gpu"], "one of ladder, real, own (others are in the commit of their record, gpu and bench in 4d0d4e9), got gpu"),
    (["ladder", "--print", "docs/records/claims.json"], "reading the record docs/records/claims.json failed: KeyError"),
])  # fmt: skip
def test_bad_options_are_refused_in_a_sentence(tmp_path, words, complaint, capsys):
    assert complaint in refusal([*words, "--out", str(tmp_path)], capsys, main)


# ------------------------------------------------------------------------------------------------ the cells
@pytest.mark.parametrize("name", STUDIES)
def test_each_cell_differs_from_its_baseline_and_train_accepts_every_option(name):
    """A cell whose words other cells have too is not parsed again."""
    plan, parsed = Plan(Options(name)), set()
    for each, cell in plan.study.cells.items():
        assert cell.baseline == each or cell.options != plan.study.cells[cell.baseline].options
        words = set(cell.options.split())
        if not words <= parsed:
            assert plan.run(each, 0).config.steps > 1
            parsed |= words


def test_ones_own_ablation_begins_from_the_defaults_of_train(tmp_path):
    run = Plan(Options("own", out=str(tmp_path), train_args="--model M --lr 1e-6")).run("v1-defaults", 0)
    off = dict.fromkeys(run.config.parity.off(), False)
    changed = {"model": "M", "lr": 1e-6, "out": str(run.folder), "parity": Config().flat()["parity"] | off}
    assert run.config.flat() == Config().flat() | changed
    assert len(off) == 4


# ------------------------------------------------------------------------------------------------ the table
def test_a_paired_difference_has_the_interval_of_students_t():
    ours, theirs = {0: 1.0, 1: 3.0, 2: 5.0, 9: 100.0}, {0: 0.0, 1: 1.0, 2: 2.0, 8: -100.0}
    assert paired(ours, theirs) == (2.0, pytest.approx(4.303 / sqrt(3)))  # of 1, 2 and 3
    assert paired({0: 3.0}, theirs) == (3.0, None)
    assert paired({7: 3.0}, theirs) == (None, None)
    many = {seed: float(seed % 2) for seed in range(30)}
    assert paired(many, dict.fromkeys(many, 0.0))[1] == pytest.approx(2.262 * sqrt(0.25 * 30 / 29) / sqrt(30))
    assert text_of(METRICS["reward"], ours, theirs) == "27.25 (1.00 to 100.00); +2.00 ± 2.48"


def test_metrics_skip_steps_without_a_value():
    rewards = [{"reward": float(step)} for step in range(10)]
    assert METRICS["reward"].measure(rewards) == 7.0  # of steps 5 to 9
    assert METRICS["mismatch_max"].measure([{"mismatch_max": 1.0}, {}, {"mismatch_max": 3.0}]) == 3.0
    assert METRICS["eval_trainer_alone"].measure(rewards) is None
    assert METRICS["tokens_s"].measure(STEPS) == 3.0
    times = [{"update_s": 9.0}] * 2 + [{"update_s": 4.0}, {}]
    assert METRICS["update_s"].measure(times) == 4.0


STORED = sorted(path for path in RECORDS.glob("*.json") if "study" in read_json(path))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_record_is_printed_whole(path, capsys):
    """Also if its study is gone; then with the columns that it has."""
    record = read_json(path)
    assert main([path.stem, "--print"]) == 0
    printed = capsys.readouterr().out
    for name, cell in record["cells"].items():
        assert f"| {name} | {len(cell['seeds'])} | " in printed
        if record["study"] not in STUDIES:
            columns = record.get("columns") or {each: [described(record, each).title] for each in cell["metrics"]}
            measured = [title for each, (title, *_) in columns.items() if by_seed(cell, each)]
            assert [title for title in measured if f"| {title} |" not in printed] == []


# ------------------------------------------------------------------------------------------------ real runs
@pytest.mark.engine
def test_a_killed_study_takes_its_run_along_and_a_second_call_repeats_what_has_not_finished(tmp_path, good, capsys):
    size = "--num-prompts 4 --group-size 4 --inflight-groups 2 --eval-problems 2 --dtype float32"
    runs = tmp_path / "out" / "runs"
    small = [*f"ladder --cells parity v1-defaults --seeds 0 --jobs 1 --out {runs.parent}".split(),
             f"--train-args=--model {good}/model --task {good}/task.jsonl {size} --no-eval-trainer-alone"]  # fmt: skip
    log, crashing = runs / "v1-defaults-seed0.log", runs / "parity-seed0"
    program = [sys.executable, "-m", "lab.study", *small, "--steps", "1000"]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as study:
        while not log.exists() or "step   1/" not in log.read_text():
            assert study.poll() is None
            time.sleep(0.1)
        started = psutil.Process(study.pid).children(recursive=True)
        study.kill()
    assert psutil.wait_procs(started, timeout=120)[1] == []
    shutil.rmtree(runs)

    runs.mkdir()
    crashing.touch()  # a file where the folder of this run should be
    assert main([*small, "--steps", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"v1-defaults-seed0 starts; its lines go to {log}\n" in printed
    assert printed.index("[1/2]") < printed.index("parity-seed0 starts")
    assert "    fp32_head is WITHOUT EFFECT: the model's dtype is float32" in printed
    assert "[1/2] v1-defaults-seed0: finished" in printed
    assert "[2/2] parity-seed0: CRASHED, exit status 2: error: out must be a writable folder" in printed
    record = read_json(runs.parent / "ladder.json")
    assert set(record["cells"]) == {"v1-defaults"}
    assert set(record["crashed"]) == {"parity-seed0"}
    assert record["cells"]["v1-defaults"]["engine"]["logprobs_mode"] == "raw_logprobs"

    finished = runs / "v1-defaults-seed0" / "metrics.jsonl"
    stamp = finished.stat().st_mtime_ns
    crashing.unlink()
    assert main([*small, "--steps", "2"]) == 0
    assert finished.stat().st_mtime_ns == stamp
    assert "| v1-defaults | 1 |" in capsys.readouterr().out
