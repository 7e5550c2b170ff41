"""Whole runs: learning, kill and resume, the live probe, users' models and tasks, the exported policy."""

import json
import math
import re
import signal
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
import tyro
from helpers import (
    SMALL,
    close_live_engine,
    command,
    mismatch_of,
    qwen2,
    refusal,
    rows,
    timeless,
    train_here,
    train_process,
)

from config import Config
from engine_adapter import reseed
from examples.toys import toy_tokenizer
from probe.traces import load_traces
from rl import Policy

SMALL_STEP, SMALL_EVAL = 32, 12  # rewards


# ------------------------------------------------------------------------------------------------ the default job
@pytest.mark.engine
def test_the_default_job_learns_at_parity(tmp_path):
    """The README's figure, one seed of it: thresholds are the project's promise, not this machine's result."""
    options = ["--eval-problems", "1000", "--eval-every", "60"]  # of 256 problems the standard error is 0.016
    process = train_process(["--out", str(tmp_path / "run"), *options])
    text, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, errors[-3000:]
    table = rows(tmp_path / "run")
    steps = table[1:]
    assert [row["step"] for row in table] == list(range(len(table)))
    assert 0.1 < table[0]["eval_reward"] < 0.4  # sampled and greedily: the policy starts with a wrong habit
    assert 0.1 < table[0]["eval_reward_greedy"] < 0.4
    assert table[-1]["eval_reward"] >= 0.93
    assert table[-1]["eval_reward_greedy"] >= 0.97
    assert sum(row["reward"] for row in steps[-5:]) / 5 >= 0.93
    assert max(row["mismatch_abs_mean"] for row in steps) <= 1e-5
    assert max(row["mismatch_max"] for row in steps) <= 1e-3
    assert all(row["staleness_max"] == 0 for row in steps)
    assert abs(table[-1]["eval_gap"]) < 0.08  # engine and trainer answer with different samples of the same policy
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["audit"]["logprobs_mode"] == "processed_logprobs"
    assert record["config"]["temperature"] == 0.7
    assert set(record) >= {"config", "audit", "versions", "commit", "dirty", "seed", "device"}
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert len(re.findall(r"^step +\d+/\d+ \| reward .* \| mismatch_kl .* s", text, re.M)) == len(steps)


# ------------------------------------------------------------------------------------------------ resume
WHOLE = (*SMALL, "--steps", "4", "--checkpoint-every", "2", "--eval-every", "2", "--lr", "3e-3", "--temperature", "2",
         "--num-minibatches", "1")  # fmt: skip


@pytest.fixture(scope="module")
def whole(good, tmp_path_factory) -> Path:
    """A run of four steps that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    train_here(command(good, "--task {root}/task.py", *WHOLE, "--out", str(out)))
    assert all(row["updates"] == 1 for row in rows(out)[1:])
    return out


def kill_in(call: int, arguments: list[str]) -> None:
    process = train_process(arguments, signal.SIGKILL, call)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, errors[-3000:]


@pytest.mark.engine
def test_a_run_killed_and_resumed_has_the_metrics_of_one_that_was_not(good, whole, tmp_path, capsys):
    arguments = command(good, "--task {root}/task.py", *WHOLE, "--out", str(tmp_path))
    kill_in(3 * SMALL_STEP + 2 * SMALL_EVAL + 9, arguments)  # in step 4
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    checkpoint = tmp_path / "checkpoints"
    (checkpoint / "unfinished").write_text("")  # as if it had been killed while writing the next one
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 3, "mode": "greedy"}\n{"step": 3, "mo')  # as if killed in an evaluation after step 3
    train_here([*arguments, "--resume"])
    assert "resumed at step 3" in capsys.readouterr().out
    assert timeless(tmp_path) == timeless(whole)
    assert (tmp_path / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert sorted(path.name[:11] for path in checkpoint.glob("*.pt")) == ["step_000002", "step_000004"]


@pytest.mark.engine
def test_groups_in_flight_survive_kill_and_resume_and_their_counts_add_up(good, tmp_path, capsys):
    """Every group is trained on, dropped or in flight at each step, the killed process's unfinished ones included."""
    arguments = command(good, "--task {root}/task.py", *SMALL, "--out", str(tmp_path), "--steps", "6",
                        "--checkpoint-every", "2", "--max-new-tokens", "12", "--inflight-groups", "5",
                        "--max-num-seqs", "24", "--lr", "1e-2", "--probe-on-alarm")  # fmt: skip
    kill_in(5 * SMALL_STEP + SMALL_EVAL + 9, arguments)  # in step 6
    train_here([*arguments, "--resume"])
    assert "resumed at step 5" in capsys.readouterr().out
    steps = rows(tmp_path)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert row["groups_trained"] == 8 * row["step"]
        assert row["groups_in_flight"] == 5 - row["groups_dropped"] == 5
        assert row["groups_submitted"] == row["groups_trained"] + 5
    assert max(row["staleness_max"] for row in steps) >= 1
    assert steps[4]["rollouts_restarted"] > 0 == steps[3]["rollouts_restarted"]
    assert max(row.get("current_mismatch_abs_mean") or 0 for row in steps) < 1e-5  # as without groups in flight
    assert max(row["mismatch_kl"] for row in steps) > 1e-3  # staleness, which is no alarm
    assert not any("probe" in row for row in steps)


def test_the_reference_backend_runs_the_same_loop_without_vllm(good, tmp_path):
    """In a child process, which cannot import vllm: this test has no marker `engine`."""
    process = train_process(command(
        good, "--task {root}/task.py", *SMALL, "--out", str(tmp_path), "--steps", "3", "--inflight-groups", "3",
        "--engine", "transformers", "--probe-every", "3",
    ))  # fmt: skip
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    steps = rows(tmp_path)[1:]
    assert steps[0]["mismatch_abs_mean"] < 1e-5
    assert max(row.get("current_mismatch_abs_mean") or 0 for row in steps) < 1e-5
    assert steps[0]["probe"] == "parity"
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["versions"]["vllm"] is None
    assert record["audit"]["engine"] == "transformers"


def test_resume_refuses_other_options_and_a_new_run_refuses_an_old_folder(tmp_path, capsys):
    record = {"config": Config().flat(), "problems": {"sha256": ""}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    changed = ["--out", str(tmp_path), "--resume", "--lr", "0.5", "--seed", "3"]
    assert "changed are lr, seed" in refusal(changed, capsys)
    assert "holds a run" in refusal(["--out", str(tmp_path)], capsys)


# ------------------------------------------------------------------------------------------------ the live probe
@pytest.mark.engine
def test_a_probe_after_a_step_stores_its_verdict_and_changes_nothing(good, whole, tmp_path, capsys):
    out, probes = tmp_path / "probed", ("--probe-every", "3", "--probe-on-alarm")
    train_here(command(good, "--task {root}/task.py", *WHOLE, "--out", str(out), *probes))
    assert capsys.readouterr().out.count("(as planned): parity.") == 2
    probed = timeless(out)
    assert [row.pop("probe", None) for row in probed] == [None, "parity", None, None, "parity"]
    assert probed == timeless(whole)  # the probe changes no random state and no weight
    record = json.loads((out / "probe" / "step_000004.json").read_text())
    assert record["status"] == "parity"
    assert record["engine_error"] < 1.5 * record["trainer_error"] + 1e-6
    assert (out / "probe" / "step_000004.npz").exists()


@pytest.mark.engine
def test_an_alarm_starts_the_probe_which_names_the_flag(good, tmp_path, capsys):
    options = ("--steps", "1", "--probe-on-alarm", "--parity.no-processed-logprobs")
    train_here(command(good, "--task {root}/task.py", *SMALL, "--out", str(tmp_path), *options))
    assert "probe after step 1 (alarm of mismatch_kl, mismatch_abs_mean," in capsys.readouterr().out
    record = json.loads((tmp_path / "probe" / "step_000001.json").read_text())
    assert record["layers"] == ["semantics"]
    assert "--parity.processed-logprobs" in record["sentence"]
    tables = record["tokens"]["tables"]
    assert list(tables) == ["position", "prompt length", "probability", "entropy"]
    assert sum(each["tokens"] for each in tables["entropy"]) == record["num_tokens"]


# ------------------------------------------------------------------------------------------------ real models and data
@pytest.mark.engine
def test_a_model_folder_and_a_jsonl_file_are_trained_on_with_gspo_kl_and_tis(tmp_path):
    """Two steps of everything the default job leaves off: GSPO, KL, TIS, untied bf16 model, numeric reward."""
    folder = tmp_path / "model"
    qwen2(tied=False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    problems = [{"question": f"{i}+1=", "answer": f"{i} + 1 = #### {i + 1}"} for i in range(40)]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, problems)))
    out = tmp_path / "run"
    options = ("--out", str(out), "--model", str(folder), "--task", str(tmp_path / "task.jsonl"), "--dtype", "bfloat16")
    train_here([*options, *SMALL, "--steps", "2", "--objective", "gspo", "--kl-coef", "0.05", "--tis", "sequence",
          "--lr", "1e-4"])  # fmt: skip
    steps = rows(out)[1:]
    assert all(0 < row["mismatch_abs_mean"] < 0.1 for row in steps)  # bf16 arithmetic, fp32 heads
    assert all(math.isfinite(row["kl_ref"]) for row in steps)
    record = json.loads((out / "config.json").read_text())
    assert record["audit"]["head_dtype"] == "float32"
    assert record["audit"]["model_dtype"] == "bfloat16"


MINE = """
import time

def sample(rng):
    number = rng.randint(1, 60)
    return (f"{number}+1=", str(number + 1)) if number % 10 else ("1+1=" * 9, "2")

def reward(problem, response):
    if response.startswith("4"):
        return float("nan")
    return float(len(response) % 3)
"""


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_users_task_is_trained_on_in_16_bits_and_failures_are_counted(tmp_path, dtype, capsys):
    out = tmp_path / "run"
    (tmp_path / "mine.py").write_text(MINE)
    train_here(["--out", str(out), "--task", str(tmp_path / "mine.py"), "--num-prompts", "8", "--group-size", "4",
          "--steps", "3", "--max-new-tokens", "5", "--temperature", "2", "--dtype", dtype, "--gradient-checkpointing",
          "--micro-batch-tokens", "64", "--mask-truncated", "--max-prompt-tokens", "10", "--overlong-prompts", "drop",
          "--reward-errors", "count", "--eval-problems", "16", "--eval-samples", "2", "--eval-every", "3",
          "--seed", "1"])  # fmt: skip
    text = capsys.readouterr().out
    steps = rows(out)[1:]
    allowed = {"bfloat16": 0.1, "float16": 0.02}[dtype]
    assert all(0 < row["mismatch_abs_mean"] < allowed for row in steps)
    assert all(0 < row["trunc_frac"] < 1 for row in steps)
    assert sum(row["grad_norm"] is not None for row in steps) >= 2  # fp16 may lose a step until its scale fits
    assert sum(row["reward_errors"] for row in steps) > 0
    assert "rewards FAILED, counted as 0" in text
    assert re.search(r"REWARD FAILED, one of \d+: the reward fails \(TypeError: it returned nan.*response '4", text)
    assert "1 of 55 prompts are longer than 10 tokens (--max-prompt-tokens): DROPPED" in text
    record = json.loads((out / "config.json").read_text())
    assert record["trainer"].pop("model_path")
    assert record["trainer"] == {"attention": "sdpa", "model_dtype": dtype, "head_dtype": "float32",
                                 "gradient_checkpointing": True, "body": "plain_body"}  # fmt: skip
    assert record["problems"]["dropped"] == 1
    assert record["problems"]["train"] + record["problems"]["held_out"] == 54
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    held_out = record["problems"]["held_out"]
    for step in (0, 3):
        modes = Counter(sample["mode"] for sample in samples if sample["step"] == step)
        assert modes == {"greedy": held_out, "sampled": 2 * held_out, "trainer": 2 * held_out}
    sampled = [sample["reward"] for sample in samples if (sample["step"], sample["mode"]) == (3, "sampled")]
    assert sum(sampled) / len(sampled) == pytest.approx(rows(out)[-1]["eval_reward"])
    greedy = {(s["question"], s["response"]) for s in samples if (s["step"], s["mode"]) == (3, "greedy")}
    assert len(greedy) == held_out
    assert {bool(sample["error"]) for sample in samples} == {s["response"].startswith("4") for s in samples}


def test_a_reward_that_fails_stops_the_run_and_is_named(good, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE.replace("return float(len", "time.sleep(9)\n    return float(len"))
    with pytest.raises(SystemExit) as stop:
        train_here(command(good, "--engine transformers --reward-limit-s 0.3", *SMALL, "--out", str(tmp_path / "run"),
                     "--task", str(tmp_path / "mine.py")))  # fmt: skip
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert re.search(r"error: the reward fails \(.*(0.3 s|nan).*\) on .*mine.py, problem \d+, question '", said)


def fresh_vllm(folder: str, dtype: str, requests: list[tuple[list[int], int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of (prompt, seed) from vLLM's own `LLM`, which reads the folder from the disk."""
    from vllm import LLM, SamplingParams

    close_live_engine()
    llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype=dtype,
              logprobs_mode="processed_logprobs", kv_cache_memory_bytes=2**28)
    defaults = llm.get_default_sampling_params()
    params = [SamplingParams(temperature=defaults.temperature, max_tokens=defaults.max_tokens, seed=seed, logprobs=0,
                             detokenize=False, stop_token_ids=[2], ignore_eos=True) for _, seed in requests]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    found = [zip(each.token_ids, each.logprobs, strict=True) for each in answers]
    return [(list(each.token_ids), [table[token].logprob for token, table in pairs])
            for each, pairs in zip(answers, found, strict=True)]


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_policy_has_the_live_engines_logprobs_in_transformers_and_in_a_new_vllm(good, tmp_path, dtype):
    out, allowed = tmp_path / "run", {"float32": 1e-4, "bfloat16": 0.05}[dtype]
    train_here(command(good, "--task {root}/task.py", *SMALL, "--out", str(out), "--steps", "1", "--probe-every", "1",
                 "--lr", "1e-2", "--dtype", dtype, "--max-new-tokens", "18"))  # fmt: skip
    (trace,) = load_traces(str(out / "probe" / "step_000001.npz"))  # by the live engine, with the final weights
    policy = Policy.load(str(out / "policy"), getattr(torch, dtype), "cpu")
    assert mismatch_of(policy, trace.rollouts, 0.7)["mismatch_abs_mean"] < allowed

    answers = fresh_vllm(str(out / "policy"), dtype, [(rollout.prompt_ids, rollout.seed) for rollout in trace.rollouts])
    pairs = zip(answers, trace.rollouts, strict=True)
    same = [(said, rollout) for said, rollout in pairs if said[0] == rollout.token_ids]
    assert len(same) > (0.99 if dtype == "float32" else 0.8) * len(answers)  # the seeds are the same; bf16 has ties
    differences = [abs(a - b) for said, rollout in same for a, b in zip(said[1], rollout.logprobs, strict=True)]
    assert sum(differences) / len(differences) < allowed


# ------------------------------------------------------------------------------------------------ options
def test_a_correction_over_a_broken_backend_needs_the_option_that_says_so():
    arguments = ["--tis", "token", "--parity.no-processed-logprobs", "--tis-over-a-broken-backend"]
    assert tyro.cli(Config, args=arguments).grpo.tis == "token"


def test_the_process_is_seeded_by_run_stream_and_step():
    def drawn(*stream) -> tuple[float, float]:
        reseed(*stream)
        return torch.rand(1).item(), numpy.random.rand()

    streams = [(run, name, step) for run in (0, 1) for name in ("train", "eval") for step in range(50)]
    first = [drawn(*stream) for stream in streams]
    assert first == [drawn(*stream) for stream in streams]
    assert all(len(set(values)) == len(streams) for values in zip(*first, strict=True))


def test_learning_rate_warms_up_and_decays_to_zero():
    config = Config.of(steps=100, lr=1.0, lr_warmup_steps=4)
    rates = [config.lr_at(step) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.2, 0.4 * 0.99, 0.6 * 0.98, 0.8 * 0.97, 0.96])
    assert rates[-1] == pytest.approx(0.01)
    assert rates[4:] == sorted(rates[4:], reverse=True)
