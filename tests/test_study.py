"""lab.study: which runs a record has, what its table says, and real runs that crash, are killed and go on."""

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from math import sqrt

import psutil
import pytest
from helpers import PYTHON, ROOT, contents, parametrize, read_json, refusal, rewrite

from lab.cells import METRICS, STUDIES
from lab.study import MARK, RECORDS, Options, identity_of, main, paired, runs_of, text_of
from report.files import append_rows

STEPS = [{"step": 0, "eval_reward_greedy": 0.1}, {"step": 1, "reward": 0.25, "eval_reward": 0.5}]


def write_run(root, out, name, seed):
    """A finished run of the ladder, as train.py and the study leave it."""
    job = f"--model {root}/model --task {root}/task.jsonl"
    run, = runs_of(Options("ladder", cells=(name,), seeds=(seed,), steps=1, train_args=job), out)
    run.folder.mkdir(parents=True)
    record = {"device": "a CPU", "commit": "abc", "dirty": False, "versions": {"torch": "1"}, "audit": {}}
    record |= identity_of(replace(run.config, steps=0)) | {"config": run.config.flat()}
    rewrite("config.json", **record)(run.folder)
    append_rows(run.folder / "metrics.jsonl", STEPS)
    (run.folder / MARK).touch()
    return run.folder


def words_of(root, out, more):
    return [*f"ladder --steps 1 --out {out} {more}".split(),
            f"--train-args=--model {root}/model --task {root}/task.jsonl"]  # fmt: skip


# ------------------------------------------------------------------------------------------------ which runs
def cut(path):
    path.write_text(path.read_text().rpartition("\n")[0])


# What is done to a root with a task and a finished run, and what is said of the run. The rest of what makes a run
# another one is in test_resume.py and test_prompts.py.
OTHERS = {
    "options": (lambda _, run: rewrite("config.json", config=read_json(run / "config.json")["config"] | {"lr": 1})(run),
                "its options, changed are lr; try"),
    "rows": (lambda root, _: cut(root / "task.jsonl"), "model and its task, changed are {root}/task.jsonl; try"),
    "cut": (lambda _, run: cut(run / "metrics.jsonl"), "the steps 0 to 1 in metrics.jsonl, it has 1;"),
    "no table": (lambda _, run: (run / "metrics.jsonl").unlink(), "the steps 0 to 1 in metrics.jsonl, it has 0;"),
}  # fmt: skip


@parametrize("kind", OTHERS)
def test_a_finished_run_of_another_job_or_without_a_row_is_named_before_another_one_starts(
        good, tmp_path, kind, capsys):
    root, (spoil, complaint) = shutil.copytree(good, tmp_path / "root"), OTHERS[kind]
    folder = write_run(root, tmp_path, "parity", 0)
    spoil(root, folder)
    before = contents(folder)
    said = refusal(words_of(root, tmp_path, "--cells parity --seeds 0 1"), capsys, main)
    assert f"the finished run {folder} " in said
    assert complaint.format(root=root) in said
    assert contents(folder) == before
    assert [*tmp_path.glob("runs/*")] == [folder]


def test_a_task_that_draws_from_its_own_generator_is_refused(good, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"import random\n{PYTHON.replace('rng.', 'random.Random().')}")
    words = ["ladder", "--out", str(tmp_path), f"--train-args=--model {good}/model --task {tmp_path}/mine.py"]
    assert f"the same problems in each run, {tmp_path}/mine.py draws others; try" in refusal(words, capsys, main)


def test_a_record_has_the_runs_that_are_named_and_its_table_what_they_have_measured(good, tmp_path, capsys):
    for name, seed in product(("parity", "transformers"), range(3)):
        write_run(good, tmp_path, name, seed)
    words = words_of(good, tmp_path, "--cells parity trans* --seeds 1 0 1 --metrics reward eval_trainer_alone")
    assert main(words) == 0
    assert "| parity | 2 | transformers | 0.25 (0.25 to 0.25); +0.00 ± 0.00 |\n" in capsys.readouterr().out
    record = read_json(tmp_path / "ladder.json")
    cells = record["cells"]
    assert [(name, cells[name]["seeds"]) for name in cells] == [("parity", [1, 0]), ("transformers", [1, 0])]
    metrics = cells["parity"]["metrics"]
    assert (metrics["eval_reward"], metrics["eval_trainer_alone"]) == ([0.5, 0.5], [None, None])
    assert [record[name] for name in ("device", "commit", "dirty", "crashed")] == ["a CPU", "abc", False, {}]
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert main(f"mine --narrow --metrics reward --print {tmp_path}/ladder.json".split()) == 0
    narrow = capsys.readouterr().out
    assert "\n\nreward: reward, last 5 steps\n\n| cell         | seeds | baseline     | reward |\n" in narrow
    assert "\n| parity       | 2     | transformers | 0.25   |\n" in narrow


@parametrize("words, complaint", [
    (["ladder", "--cells", "v2"], "cells must be names or patterns of transformers, v1-defaults,"),
    (["ladder", "--metrics", "step_s"], "metrics must be names or patterns of reward, eval_reward,"),
    (["real"], "one of ladder, own (others are in the commit of their record, gpu and bench in 4d0d4e9), got real"),
    (["ladder", "--print", "docs/records/claims.json"], "reading the record docs/records/claims.json failed: KeyError"),
])  # fmt: skip
def test_bad_options_are_refused_in_a_sentence(tmp_path, words, complaint, capsys):
    assert complaint in refusal([*words, "--out", str(tmp_path)], capsys, main)


# ------------------------------------------------------------------------------------------------ the cells
@parametrize("name", STUDIES)
def test_each_cell_differs_from_all_others_and_train_accepts_its_options(name, tmp_path):
    runs, (_, cells) = runs_of(Options(name), tmp_path), STUDIES[name]
    assert len({repr(run.config.experiment) for run in runs}) == len(cells)
    assert {cell.baseline for cell in cells.values()} <= cells.keys()


# ------------------------------------------------------------------------------------------------ the table
def test_a_paired_difference_has_the_interval_of_students_t():
    ours, theirs = {0: 1.0, 1: 3.0, 2: 5.0, 9: 100.0}, {0: 0.0, 1: 1.0, 2: 2.0, 8: -100.0}
    assert text_of(".2f", ours, theirs) == "27.25 (1.00 to 100.00); +2.00 ± 2.48"  # 4.303 / sqrt(3), of 1, 2 and 3
    assert (paired({0: 3.0}, theirs), paired({7: 3.0}, theirs)) == ((3.0, None), (None, None))
    many = {seed: float(seed % 2) for seed in range(30)}
    assert paired(many, dict.fromkeys(many, 0.0))[1] == pytest.approx(2.262 * sqrt(0.25 / 29))


def test_metrics_skip_steps_without_a_value():
    rewards = [{"reward": float(step)} for step in range(10)]
    assert METRICS["reward"].measure([{}, *rewards, {"reward": None}]) == 7.0  # of steps 5 to 9
    assert METRICS["eval_trainer_alone"].measure(rewards) is None
    for verdicts, named in ((["head: a", "parity", "cache: b", "head: a"], "head: a; cache: b"), (["x", "y"], "y")):
        assert METRICS["probe"].measure([{"probe": verdict} for verdict in verdicts]) == named


def test_each_stored_record_is_printed_whole(capsys):
    """Also if its study is gone."""
    for path in RECORDS.glob("*.json"):
        record = read_json(path)
        if "study" in record:
            assert main([path.stem, "--print"]) == 0
            printed = capsys.readouterr().out
            cells = [f"| {name} | {len(cell['seeds'])} | " for name, cell in record["cells"].items()]
            titles = [f"| {title} |" for title, _ in record["columns"].values()]
            assert [text for text in cells + titles if text not in printed] == [], path


# ------------------------------------------------------------------------------------------------ real runs
@pytest.mark.engine
def test_a_killed_study_takes_its_run_along_and_a_second_call_repeats_what_has_not_finished(tmp_path, good, capsys):
    size = "--num-prompts 4 --group-size 4 --inflight-groups 2 --eval-problems 2 --dtype float32"
    runs = tmp_path / "out" / "runs"
    small = words_of(good, runs.parent, "--cells v1-defaults parity --jobs 1")
    small[-1] += f" {size} --no-eval-trainer-alone"
    log, crashing = runs / "v1-defaults-seed0.log", runs / "parity-seed0"
    with subprocess.Popen([sys.executable, "-m", "lab.study", *small, "--steps", "1000"], cwd=ROOT,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as study:  # fmt: skip
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
    for line in (f"v1-defaults-seed0 starts; its lines go to {log}\n",
                 "    fp32_head is WITHOUT EFFECT: the model's dtype is float32", "[1/2] v1-defaults-seed0: finished",
                 "[2/2] parity-seed0: CRASHED, exit status 2: error: out must be a writable folder",
                 "**Crashed**\n\n- parity-seed0: exit status 2"):  # fmt: skip
        assert line in printed
    assert printed.index("[1/2]") < printed.index("parity-seed0 starts")
    record = read_json(runs.parent / "ladder.json")
    (finished,), (crashed,) = record["cells"].values(), record["crashed"]
    assert (finished["engine"]["logprobs_mode"], crashed) == ("raw_logprobs", "parity-seed0")

    finished = runs / "v1-defaults-seed0" / "metrics.jsonl"
    stamp = finished.stat().st_mtime_ns
    crashing.unlink()
    assert main([*small, "--steps", "2"]) == 0
    assert finished.stat().st_mtime_ns == stamp
    assert "| v1-defaults | 1 |" in capsys.readouterr().out
