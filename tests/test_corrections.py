"""lab.corrections: a small part of the factorial is real runs; its judgement is checked on curves written by hand."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tyro
from helpers import qwen2, refusal
from transformers import AutoModelForCausalLM

from config import Config
from examples.long_digits import LONGEST, NUM_PROBLEMS, SHORTEST, write_model
from examples.toys import toy_tokenizer
from lab.corrections import (
    BACKENDS,
    CORRECTIONS,
    STALE,
    WORKLOADS,
    Cell,
    Options,
    cells,
    command_of,
    draw,
    main,
    measure,
    report,
)
from tasks import load_task

LONG_TASK = str(Path(__file__).parents[1] / "examples" / "long_digits.py")


@pytest.mark.engine
def test_a_part_of_the_factorial_runs_and_a_second_call_runs_only_what_is_new(tmp_path, capsys):
    """Raw log-probabilities with the geometric rejection and without; then the reference."""
    folder, task, out = tmp_path / "model", tmp_path / "task.jsonl", tmp_path / "out"
    qwen2(tied=False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    task.write_text("\n".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) for n in range(12)))
    size = "--num-prompts 4 --group-size 4 --eval-problems 2 --steps 2 --dtype float32"
    command = ["--out", str(out), "--workloads", "ladder", "--seeds", "0", "--jobs", "1",
               f"--train-args=--model {folder} --task {task} {size}"]  # fmt: skip
    assert main([*command, "--backends", "minus-processed", "--corrections", "none", "geometric"]) == 0
    none, geometric = json.loads((out / "corrections.json").read_text())["cells"]
    assert (none["correction"], geometric["correction"]) == ("none", "geometric")
    assert (none["rejected"], none["ess"], none["gap"], none["seeds"]) == ([0.0], [1.0], None, [0])
    assert 0 < geometric["rejected"][0] <= 1
    assert geometric["ess"][0] == pytest.approx(1 - geometric["rejected"][0], abs=0.2)  # of 0s and 1s, over two steps
    run = out / "runs" / "ladder.minus-processed.geometric-seed0"
    assert json.loads((run / "config.json").read_text())["config"]["reject"] == "geometric"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert all(row["rejected_frac"] == row["rejected_frac_geometric"] for row in rows)
    said = f"{rows[0]['rejected_frac']:.1%} of tokens rejected by geometric"
    assert said in run.with_name(f"{run.name}.log").read_text()

    stamp = (run / "metrics.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert main([*command, "--backends", "reference", "minus-processed", "--corrections", "geometric", "none"]) == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == stamp
    record = json.loads((out / "corrections.json").read_text())
    reference, none, geometric = record["cells"]
    assert (reference["backend"], reference["gap"], reference["mismatch"][0] < 1e-5) == ("reference", 0, True)
    assert geometric["gap"] == geometric["held_out"][0] - reference["held_out"][0]
    assert (out / "corrections.md").read_text() in capsys.readouterr().out
    assert (out / "corrections.png").stat().st_size > 10_000


def test_a_cell_says_how_far_it_is_from_the_reference_and_whether_the_reward_curve_shows_it(tmp_path):
    """A hidden fault has the reference's rewards, but the trainer alone is worse. A visible one has other rewards."""
    def write(cell: Cell, rewards: list[float], held_out: float) -> None:
        for seed in range(2):
            folder = cell.folder(tmp_path, seed)
            folder.mkdir(parents=True)
            usual = {"rejected_frac": 0.25, "weights_ess": 0.5, "mismatch_abs_mean": 0.1, "staleness_mean": 0.0}
            rows = [{"step": step, "reward": reward + 0.02 * seed, **usual} for step, reward in enumerate(rewards, 1)]
            rows[-1]["eval_reward_trainer"] = held_out + 0.1 * seed
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": 0}, *rows])))
            folder.with_name(folder.name + ".json").write_text("[]")

    reference, hidden = Cell("long", "reference", "none"), Cell("long", "v1-defaults", "tis-token")
    visible, stale = Cell("long", "minus-processed", "none"), Cell("long", "stale-4", "none")
    write(reference, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], 0.8)
    write(hidden, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], 0.5)
    write(visible, [0.5, 0.6, 0.6, 0.6, 0.6, 0.6], 0.3)
    write(stale, [0.1] * 6, 0.1)
    entries = [measure(cell, tmp_path) for cell in (reference, hidden, visible, stale)]
    assert [entry["noticed"] for entry in entries] == [None, None, 3, None]  # stale groups have another reference
    assert [entry["gap"] and round(entry["gap"], 6) for entry in entries] == [0.0, -0.3, -0.5, None]
    assert entries[1]["reward"] == pytest.approx([0.8, 0.82])  # of the last five steps
    assert (entries[1]["rejected"], entries[1]["ess"], entries[1]["seeds"]) == ([0.25, 0.25], [0.5, 0.5], [0, 1])
    figure = draw(entries, tmp_path / "p.png")
    shown = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert shown == {"+0.00", "-0.30", "-0.50*"}
    record = {"command": "c", "device": "d", "versions": {}, "commit": "", "dirty": False, "cells": entries}
    text = report(record | {"crashed": {"a-seed0": "exit status 1"}})
    tables = dict(re.findall(r"^\*\*long: (.*?)\*\*\n\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL))
    assert tables["held out, trainer alone"].splitlines()[2:] == [
        f"| {name} | {' | '.join(row)}{' | ' * 8} |" for name, row in (
            ("reference", ("0.85 ± 0.05 (+0.00)", "")), ("v1-defaults", ("", "0.55 ± 0.05 (-0.30)")),
            ("minus-processed", ("0.35 ± 0.05 (-0.50*)", "")), ("stale-4", ("0.15 ± 0.05", "")))]  # fmt: skip
    assert "| v1-defaults |  | 25.0% ± 0.0% |" in tables["rejected tokens"]
    assert "| v1-defaults |  | 0.50 ± 0.00 |" in tables["ESS of the weights"]
    assert "**Crashed**\n\n- a-seed0: exit status 1" in text
    assert "ladder" not in text


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_backend_and_each_correction_is_a_run_that_train_accepts(workload):
    problems = {"ladder": 64, "long": NUM_PROBLEMS * 9 // 10}[workload]
    seen = {}
    for backend, correction in [(name, "none") for name in BACKENDS] + [("v1-defaults", name) for name in CORRECTIONS]:
        command = command_of(Cell(workload, backend, correction), 1, Options())
        config = seen[backend, correction] = tyro.cli(Config, args=command[2:])
        assert config.grpo.old_policy == "recompute"
        assert config.grpo.num_prompts + config.backend.inflight_groups <= problems
    others = [config.but(out="same") for (backend, _), config in seen.items() if backend == "v1-defaults"]
    assert len({json.dumps(config.flat()) for config in others}) == len(CORRECTIONS)
    for name, updates in STALE.items():
        config = seen[name, "none"]
        assert config.backend.inflight_groups == updates * config.grpo.num_prompts
    assert seen["v1-defaults", "icepop"].grpo.rejection.bounds == (0.5, 5.0)
    assert len(cells(Options(workloads=(workload,)))) == 12 * len(CORRECTIONS) + 2


def test_train_args_override_the_workload_and_not_the_cell():
    options = Options(train_args="--num-prompts 4 --dtype float32 --tis off")
    command = command_of(Cell("ladder", "parity-fp16", "tis-token"), 0, options)
    config = tyro.cli(Config, args=command[2:])
    assert (config.grpo.num_prompts, config.run.dtype, config.grpo.tis) == (4, "float16", "token")


@pytest.mark.parametrize("option, complaint", [
    ("--backends v2", "invalid choice 'v2'"), ("--jobs 0", "jobs must be at least 1"),
    ("--seeds -1", "seeds must be in [0, 2^32)"), ("--train-args=--out=x", "must not contain --out"),
])  # fmt: skip
def test_bad_options_are_refused_in_a_sentence(tmp_path, option, complaint, capsys):
    assert complaint in refusal(["--out", str(tmp_path), *shlex.split(option)], capsys, main)


def test_the_long_task_has_long_answers_and_a_model(tmp_path):
    task = load_task(LONG_TASK, seed=0, limit_s=60)
    assert (len(task.train), len(task.held_out)) == (NUM_PROBLEMS * 9 // 10, NUM_PROBLEMS // 10)
    assert {SHORTEST <= len(problem.answer) <= LONGEST for problem in task.train} == {True}
    assert len({len(problem.answer) for problem in task.train}) > 10
    problem = task.held_out[0]
    assert task.reward(problem, problem.answer) == 1.0
    assert 0.8 < task.reward(problem, problem.answer[:-5]) < 1.0
    write_model(str(tmp_path), seed=0, steps=1)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert config.max_position_embeddings >= 1 + len(problem.question) + LONGEST + 4  # <bos>, and max_new_tokens 84
