"""What is found before a run starts, and how its parts are sized."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import qwen2

from config import Config, ParityFlags
from engine_adapter import Rollout
from examples.toys import toy_tokenizer
from extras.reference import engine_for
from rl import Policy
from train import build, prepare, score_rollouts

ROOT = Path(__file__).parents[1]


def job(tmp_path, **changes) -> Config:
    """20 problems of different lengths for a small model; not the toy: it would be taught on this process's threads."""
    qwen2(tied=True).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    questions = ["1" * (i % 5 + 1) + "+11111="[: 2 + i % 6] for i in range(20)]
    lines = [json.dumps({"question": f"{text}{i}", "answer": i}) for i, text in enumerate(questions)]
    (tmp_path / "task.jsonl").write_text("\n".join(lines))
    names = {"out": "run", "task": "task.jsonl", "model": "model"}
    return Config.of(num_prompts=4, **{name: str(tmp_path / path) for name, path in names.items()} | changes)


def test_overlong_prompts_are_refused_by_name_or_dropped_and_counted(tmp_path, capsys):
    whole = prepare(job(tmp_path))
    lengths = sorted(len(problem.prompt_ids) for problem in whole.task.train + whole.task.held_out)
    limit = lengths[14]
    longer = sum(length > limit for length in lengths)
    assert 0 < longer < 6
    complaint = (rf"{longer} of 20 prompts are longer than {limit} tokens \(--max-prompt-tokens\), .*task.jsonl, line"
                 rf" \d+ has {lengths[-1]}; try --overlong-prompts drop")  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        prepare(job(tmp_path, max_prompt_tokens=limit))
    other = tmp_path / "eval.jsonl"
    other.write_text((tmp_path / "task.jsonl").read_text().replace('"question": "1', '"question": "2'))
    run = prepare(job(tmp_path, max_prompt_tokens=limit, overlong_prompts="drop", eval_task=str(other)))
    assert run.dropped_prompts == 2 * longer
    said = f"{2 * longer} of 40 prompts are longer than {limit} tokens (--max-prompt-tokens): DROPPED"
    assert said in capsys.readouterr().out
    for kept in (run.task.train, run.task.held_out):
        assert len(kept) == 20 - longer
        assert max(len(problem.prompt_ids) for problem in kept) == limit
    assert run.max_model_len == limit + 8
    assert prepare(job(tmp_path, max_prompt_tokens=limit, max_new_tokens=256 - limit, overlong_prompts="drop"))
    context = job(tmp_path, max_new_tokens=256 - limit + 1, overlong_prompts="refuse")
    with pytest.raises(ValueError, match=rf"longer than {limit - 1} tokens \(the context of 256 less"):
        prepare(context)
    with pytest.raises(ValueError, match="none of the training problems is left"):
        prepare(job(tmp_path, max_prompt_tokens=1, overlong_prompts="drop"))


def test_a_failed_reward_stops_the_run_or_is_counted(tmp_path, capsys):
    run = prepare(job(tmp_path))
    run = replace(run, task=replace(run.task, reward=lambda problem, _: 1.0 / (problem.answer != "3")))
    problems = sorted(run.task.train + run.task.held_out, key=lambda problem: int(problem.answer))[2:5]
    rollouts = [Rollout([1], 0, [5], [-0.1], [1], "stop")] * 3
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*; to go on with reward 0, --reward-errors count"):
        score_rollouts(run, problems, rollouts)
    counting = replace(run, config=run.config.but(reward_errors="count"))
    rows = score_rollouts(counting, problems, rollouts)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0]
    assert [row["error"] is not None for row in rows] == [False, True, False]
    assert "REWARD FAILED, one of 1: the reward fails (ZeroDivisionError" in capsys.readouterr().out


def test_a_switch_that_can_change_nothing_is_named(tmp_path, capsys):
    off = ParityFlags(inflight_keep=False, fp32_head=False)
    for changes, named in (({}, ["inflight_keep", "fp32_head"]), ({"inflight_groups": 1}, ["fp32_head"]),
                           ({"dtype": "bfloat16"}, ["inflight_keep"])):  # fmt: skip
        prepare(job(tmp_path, parity=off, **changes))
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if "WITHOUT EFFECT" in line] == named
    prepare(job(tmp_path))
    assert "WITHOUT EFFECT" not in capsys.readouterr().out


def test_a_resumed_run_must_find_its_problems_unchanged(tmp_path):
    config = job(tmp_path)
    run = prepare(config)
    record = {"config": config.flat(), "problems": {"sha256": run.task.fingerprint}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    prepare(config.but(resume=True))
    path = tmp_path / "task.jsonl"
    path.write_text(path.read_text().replace('"answer": 7}', '"answer": 8}'))
    with pytest.raises(ValueError, match="must keep its problems"):
        prepare(config.but(resume=True))


def test_the_trainers_own_engine_holds_no_more_keys_and_values_than_the_engines_cache(tmp_path):
    run = prepare(job(tmp_path))
    policy = Policy.load(run.model_path, torch.float32, "cpu")
    assert engine_for(run, policy).max_num_seqs == 512
    per_token = 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, width, bytes
    small = replace(run, config=run.config.but(kv_cache_gib=10.5 * per_token * run.max_model_len / 2**30))
    assert engine_for(small, policy).max_num_seqs == 10
    none = replace(run, config=run.config.but(kv_cache_gib=1e-9))
    assert engine_for(none, policy).max_num_seqs == 1


def test_a_run_is_built_into_a_folder_that_is_not_there_as_the_benchmarks_do(tmp_path):
    live, first_step = build(prepare(job(tmp_path, engine="transformers")))
    assert first_step == 1
    assert live.engine.state == "ready"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trainer"]["model_dtype"] == "float32"


def test_a_machine_without_git_is_no_error(tmp_path):
    program = "import torch, records; print(records.provenance(torch.device('cpu')))"
    environment = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}  # PATH: a folder without programs
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert "'commit': None, 'dirty': None" in child.stdout
