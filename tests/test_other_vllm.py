"""The vLLM of another environment as the sampler: here this environment's own in a process of its own; V0 0.8.5 and V1
0.18.1 where VLLM_085_PYTHON and VLLM_0181_PYTHON name their Python."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ABORT, KEEP, command, mismatch, move, move_and_load, over_a_kept_state, qwen2, refusal, rows

from config import Config, ParityFlags
from engine_adapter import AuditError, EngineStateError, Sampling, check_vllm_version, reseed
from lab.other_vllm import OtherEngine, main
from lab.worker import logits_in_fp32
from rl import Policy
from train import load_policy, prepare

HERE = [sys.executable, check_vllm_version()]


def old(variable: str, version: str):
    """A parameter that is skipped without that environment."""
    absent = pytest.mark.skipif(variable not in os.environ, reason=f"{variable} is not set")
    return pytest.param([os.environ.get(variable), version], id=version, marks=absent)


EACH = pytest.mark.parametrize("other", [
    pytest.param(HERE, id="here"), old("VLLM_085_PYTHON", "0.8.5"), old("VLLM_0181_PYTHON", "0.18.1")])  # fmt: skip
BYTES_OF_A_ROW, SOCKET_BUFFER = 48, 212_992  # of a sampled token in an answer; Linux's default
MIXED_LENGTHS = Sampling(temperature=0.7, max_new_tokens=40, stop_token_ids=(2, 3, 4, 5))


def start(other: list[str], good: Path, out: Path, parity: ParityFlags = KEEP, **options) -> tuple[Policy, OtherEngine]:
    """A policy and an engine of the other environment."""
    run = prepare(Config.of(parity, out=str(out), model=str(good / "model"), task=str(good / "task.jsonl"),
                            max_new_tokens=40, num_prompts=4, **{"kv_cache_gib": 0.05} | options))  # fmt: skip
    policy = load_policy(run)
    return policy, OtherEngine(*other, run, policy)


living: dict[str, OtherEngine] = {}  # by version


def test_the_replaced_head_of_a_16_bit_model_with_a_bias_is_computed_in_fp32():
    head = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    states = torch.randn(2, 4, dtype=torch.bfloat16)
    logits = logits_in_fp32(SimpleNamespace(org_vocab_size=2), states, head, head.bias)
    assert torch.equal(logits, head.float()(states.float())[:, :2])


@pytest.fixture(scope="module", autouse=True)
def end_all():
    yield
    for engine in living.values():
        engine.close()


@contextmanager
def live(other: list[str], good: Path, tmp_path: Path, parity: ParityFlags = KEEP):
    """The same in fp32, with the weights loaded. The engine stays alive for the next test if this one leaves it so."""
    policy = Policy(qwen2(tied=True))
    if other[1] not in living or living[other[1]].state != "ready":
        if other[1] in living:
            living[other[1]].close()
        living[other[1]] = start(other, good, tmp_path)[1]
    engine = living[other[1]]
    engine.parity = parity  # the settings of vLLM are those of the start
    engine.abort(list(engine._requests.values()))
    engine.load(policy.weights(), policy.response_logprobs)
    engine.counters = dict.fromkeys(engine.counters, 0)
    yield policy, engine


@pytest.fixture
def job(good, tmp_path):
    """A function: the words of a small job, more options after them."""
    size = "--task {root}/task.py --eval-problems 2 --max-new-tokens 40 --steps 2 --kv-cache-gib 0.05"
    return lambda *more: command(good, size, "--out", str(tmp_path / "run"), *more)


def alive(process: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def workers_of(process: int) -> list[int]:
    """The child processes that run worker.py."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children if b"worker.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def within_seconds(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------ it samples
@pytest.mark.engine
@EACH
def test_tokens_have_the_trainers_logprobs_before_and_after_loads(other, good, tmp_path):
    with live(other, good, tmp_path) as (policy, engine):
        assert engine.settings["vllm"] == engine.version == other[1]
        assert engine.settings["generation"] == ("V0" if other[1] == "0.8.5" else "V1")
        for seed in range(3):
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5  # at temperature 0.7: processed values
            version = engine.weight_version
            move_and_load(policy, engine, seed=seed)
            assert engine.weight_version == version + 1
        move(policy)
        assert mismatch(policy, engine)["mismatch_abs_mean"] > 1e-2  # weights that it does not have


@pytest.mark.engine
@EACH
def test_samples_follow_reseed_and_seeds(other, good, tmp_path):
    with live(other, good, tmp_path) as (_, engine):
        def sample(*stream) -> list[list[int]]:
            reseed(*stream)
            return [each.token_ids for each in engine.generate([[5, 6, 7]], 4, MIXED_LENGTHS)]

        assert sample(0, "train", 1) == sample(0, "train", 1) != sample(0, "train", 2)
        alone, beside = (engine.generate(prompts, 2, MIXED_LENGTHS, seeds)[:2]
                         for prompts, seeds in (([[8, 9]], [7]), ([[8, 9], [5, 6, 7]], [7, 90])))
        assert [each.token_ids for each in alone] == [each.token_ids for each in beside]
        assert {each.finish_reason for each in alone + beside} <= {"stop", "length"}


@pytest.mark.engine
@EACH
def test_kept_requests_go_on_from_old_keys_and_values(other, good, tmp_path):
    with live(other, good, tmp_path) as (policy, engine):
        before = Policy(qwen2(tied=True))
        before.model.load_state_dict(policy.model.state_dict())
        rollouts = engine.submit([5, 6, 7, 8], 4, Sampling(temperature=0.7, max_new_tokens=30))
        for _ in range(12):
            engine.step()
        move_and_load(policy, engine, 0.1)
        while engine.num_unfinished:
            engine.step()
        assert engine.counters == dict(tokens_wasted=0, rollouts_restarted=0, kv_lost=0)
        for rollout in rollouts:
            assert set(rollout.versions) == {engine.weight_version - 1, engine.weight_version}
            kept, own = (torch.tensor(rollout.logprobs) - each for each in over_a_kept_state(before, policy, rollout))
            assert kept.abs().max() < 1e-4
            assert own.abs().max() > 1e-2  # a cache that is computed again under the new weights


@pytest.mark.engine
@EACH
def test_aborted_requests_start_again_under_the_new_weights(other, good, tmp_path):
    with live(other, good, tmp_path, ABORT) as (policy, engine):
        rollouts = engine.submit([5, 6, 7, 8], 4, Sampling(temperature=0.7, max_new_tokens=30))
        for _ in range(12):
            engine.step()
        wasted = sum(len(each.token_ids) for each in rollouts)
        move_and_load(policy, engine)
        while engine.num_unfinished:
            engine.step()
        assert engine.counters == dict(tokens_wasted=wasted, rollouts_restarted=4, kv_lost=0)
        assert wasted >= 40
        assert [set(each.versions) for each in rollouts] == [{engine.weight_version}] * 4
        assert [len(each.token_ids) for each in rollouts] == [30] * 4


@pytest.mark.engine
@EACH
def test_v1_has_its_defaults_and_v0_refuses_what_it_cannot_be_given(other, good, tmp_path):
    defaults = ParityFlags(processed_logprobs=False, explicit_runtime=False, inflight_keep=False, fp32_head=False)
    if other[1] == "0.8.5":
        before, defaults = workers_of(os.getpid()), ParityFlags(processed_logprobs=False)
        with pytest.raises(AuditError, match=r"not in force .*: logprobs_mode is processed_logprobs, not raw_logprobs"):
            start(other, good, tmp_path, defaults)
        assert workers_of(os.getpid()) == before
        return
    policy, engine = start(other, good, tmp_path, defaults, dtype="bfloat16")
    engine.load(policy.weights(), policy.response_logprobs)
    assert engine.settings.items() >= dict(
        logprobs_mode="raw_logprobs", enable_prefix_caching=True, generation_config="auto", head_dtype="bfloat16",
        async_scheduling=False).items()  # asked for, but a CPU build forces it off
    assert mismatch(policy, engine)["mismatch_abs_mean"] > 0.05
    engine.close()


# ------------------------------------------------------------------------------------------------ it trains
@pytest.mark.engine
@EACH
def test_a_run_of_train_with_groups_in_flight_stores_the_version_of_the_worker(other, job, tmp_path):
    before = workers_of(os.getpid())
    main([*other, *job("--inflight-groups", "4", "--max-num-seqs", "8", "--probe-every", "2", "--dtype", "bfloat16")])
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["versions"]["vllm"] == record["audit"]["vllm"] == other[1]
    assert record["audit"]["head_dtype"] == "float32"
    steps = rows(tmp_path / "run")[1:]
    assert [step["groups_in_flight"] for step in steps] == [4, 4]
    assert steps[0]["current_mismatch_abs_mean"] < 0.03  # bf16
    assert list((tmp_path / "run" / "probe").glob("*.json"))
    assert workers_of(os.getpid()) == before


# ------------------------------------------------------------------------------------------------ faults
@pytest.mark.engine
def test_frames_larger_than_the_pipe_go_both_ways(good, tmp_path):
    policy, engine = start(HERE, good, tmp_path, max_num_seqs=8_000, block_size=32, kv_cache_gib=0.2)
    engine.load(policy.weights(), policy.response_logprobs)
    rollouts = engine.submit([5], 24_000, Sampling(temperature=0.7, max_new_tokens=1), seed=2**61)
    assert len(pickle.dumps([rollout.seed for rollout in rollouts])) > SOCKET_BUFFER
    engine.step()
    answered = sum(rollout.finish_reason == "length" for rollout in rollouts)
    assert answered * BYTES_OF_A_ROW > SOCKET_BUFFER
    engine.abort(rollouts)  # the ids of all others
    assert engine.num_unfinished == 0
    engine.close()


@pytest.mark.engine
@pytest.mark.parametrize("call", ["step", "load"])
def test_a_killed_worker_is_one_sentence_and_no_process(good, tmp_path, call):
    with live(HERE, good, tmp_path) as (policy, engine):
        engine.submit([5, 6, 7], 2, MIXED_LENGTHS)
        engine.step()
        worker, calls = engine._process.pid, {
            "step": engine.step, "load": lambda: engine.load(policy.weights(), policy.response_logprobs)}  # fmt: skip
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"failed at '{call}': its process ended with status -9"):
            calls[call]()
        assert not alive(worker)
        with pytest.raises(EngineStateError, match="broken: build a new one"):
            engine.submit([5, 6, 7], 2, MIXED_LENGTHS)


@pytest.mark.engine
@EACH
def test_a_crash_inside_vllm_is_one_sentence_and_no_process(other, good, tmp_path):
    with live(other, good, tmp_path) as (_, engine):
        worker = engine._process.pid
        with pytest.raises(RuntimeError, match=r"in another process failed at '(submit|step)': .*; see "):
            engine.generate([[5, 10**6]], 1, MIXED_LENGTHS)  # a token that the model does not have
        assert not alive(worker)


@pytest.mark.engine
@pytest.mark.parametrize("words, sentence", [
    ([HERE[0], "0.8.5"], f"ValueError: vLLM must be 0.8.5 in the environment of {HERE[0]}, got {HERE[1]}"),
    (["/bin/true", "0.8.5"], "failed at 'start': its process ended with status 0, it last wrote ''"),
    (["nothing", "0.8.5"], "the first two words must be the other environment's Python and its version of vLLM, got"),
    ([*HERE, "--engine", "transformers"], "engine must be vllm, prefix_cache off"),
    ([*HERE, "--parity.no-inflight-keep", "--parity.inflight-otherwise", "recompute"], "must be abort in another"),
])  # fmt: skip
def test_another_version_and_unfit_options_are_refused_in_a_sentence(job, words, sentence, capsys):
    before = workers_of(os.getpid())
    said = refusal([*words[:2], *job(*words[2:])], capsys, main)
    assert sentence in said
    assert said.count("error:") == 1
    assert workers_of(os.getpid()) == before


@pytest.mark.engine
@pytest.mark.parametrize("which", ["trainer", "worker"])
def test_a_killed_process_of_a_run_takes_the_other_along(job, which):
    program = [sys.executable, "-m", "lab.other_vllm", *HERE, *job("--steps", "1000", "--eval-every", "1000")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parents[1]) as trainer:
        for line in trainer.stdout:
            if line.startswith("step   1/"):
                break
        worker, = workers_of(trainer.pid)
        os.kill(trainer.pid if which == "trainer" else worker, signal.SIGKILL)
        said = trainer.communicate(timeout=30)[1]
        assert within_seconds(5, lambda: not alive(worker))
    if which == "worker":
        assert trainer.returncode == 1
        assert said.strip().rpartition("\n")[2].startswith(f"error: RuntimeError: vLLM {HERE[1]} in another process")
