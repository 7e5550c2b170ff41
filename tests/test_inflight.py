"""Groups in flight over weight updates: none is lost or used twice, and each fix does to the KV cache what it says."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from helpers import (
    AT_PARITY,
    PYTHON,
    ROUNDING,
    command,
    drawn_ids,
    floors,
    floors_of,
    move_and_load,
    over_a_kept_state,
    qwen2,
    rows,
    small_model,
    started,
    train_here,
)

from engine_adapter import ParityFlags, Sampling
from extras.inflight import Group, GroupsInFlight
from extras.transformers_engine import TransformersEngine
from rl import Policy
from tasks import Problem, Task, exact_match
from verify import canary

KEEP, ABORT = ParityFlags(), ParityFlags(inflight_keep=False)
RECOMPUTE = replace(ABORT, variants=("recompute",))
# Lengths differ as in practice: one token in eight of a flat distribution ends the response.
LONG_TAIL = Sampling(temperature=1.0, max_new_tokens=48, stop_token_ids=tuple(range(2, 12)))
ENDLESS = Sampling(temperature=1.0, max_new_tokens=100)
HALF = drawn_ids(136, torch.Generator().manual_seed(0))  # a prompt of two chunks


def named(value) -> str:
    return value.inflight_update if isinstance(value, ParityFlags) else str(value)


@contextmanager
def backend(kind: str, engine_folder, parity: ParityFlags = KEEP, room: int = 64, **options):
    """A live policy and an engine of either kind that holds its weights and accepts groups for `room` rollouts."""
    policy = Policy(qwen2(tied=False))
    if kind == "transformers":
        engine = TransformersEngine(policy, room)
        engine.load(policy.weights(), policy.response_logprobs)
        yield policy, engine
        return
    with started(engine_folder, policy, parity, in_flight=True, **options) as engine:
        engine.counters = dict.fromkeys(engine.counters, 0)  # of an earlier test
        usual, engine.max_num_seqs = engine.max_num_seqs, room
        yield policy, engine
        engine.max_num_seqs = usual


def in_flight(engine, group_size: int, sampling: Sampling, max_staleness: int) -> GroupsInFlight:
    """A source without problems: the tests have their own groups."""
    return GroupsInFlight(engine, Task([], [], exact_match), sampling, 0, group_size, 0, num_waiting=1,
                          max_staleness=max_staleness)


def numbered_groups() -> Iterator[Group]:
    """Groups with consecutive numbers, as their questions."""
    for number in count():
        yield Group(Problem(str(number), "0", "test", [12 + number % 80] * (3 + number % 7)))


def questions(groups) -> list[int]:
    return [int(group.problem.question) for group in groups]


# ------------------------------------------------------------------------------------------------ groups
def vllm(parity: ParityFlags, room: int, **changes):
    return pytest.param("vllm", replace(parity, **changes), room, marks=pytest.mark.engine)


@pytest.mark.parametrize("kind, parity, room", [
    ("transformers", KEEP, 4), vllm(KEEP, 64), vllm(RECOMPUTE, 4), vllm(ABORT, 64),
    vllm(KEEP, 4, uncached_runtime=False),  # asynchronous scheduling
], ids=named)  # fmt: skip
def test_every_group_is_trained_on_once_or_in_flight(engine_folder, kind, parity, room):
    """None becomes too old: without the wait for groups that are due, `after_update` stops this run."""
    taken, spans, groups_of = [], 0, numbered_groups()
    with backend(kind, engine_folder, parity, room) as (policy, engine):
        flight = in_flight(engine, 3, LONG_TAIL, max_staleness=1)
        for step in range(8):
            flight.groups += islice(groups_of, 4 + 3 - len(flight.groups))
            submitted = max(questions(taken + flight.groups)) + 1
            groups = flight.take(4)
            assert questions(groups) == sorted(questions(groups))
            newest = max(questions(groups))
            assert not any(group.complete and number < newest for group, number in
                           zip(flight.groups, questions(flight.groups), strict=True))  # fmt: skip
            taken += groups
            spans += sum(len(set(r.versions)) > 1 for group in groups for r in group.rollouts)
            move_and_load(policy, engine, seed=step)
            assert flight.after_update()["groups_in_flight"] == len(flight.groups)
            left = questions(flight.groups)
            assert submitted == len(taken) + len(left)
            assert not set(left) & set(questions(taken))
            unfinished = [each for group in flight.groups for each in group.rollouts if each.finish_reason is None]
            assert engine.num_unfinished == len(unfinished)
            assert all(engine.weight_version - v <= 1 for g in flight.groups for r in g.rollouts for v in r.versions)
    assert len(set(questions(taken))) == len(taken) == 32
    for group in taken:
        for rollout in group.rollouts:
            assert rollout.finish_reason in ("stop", "length")
            assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions) > 0
            assert rollout.versions == sorted(rollout.versions)
            assert rollout.prompt_ids == group.problem.prompt_ids
    whole = kind == "transformers" or parity.inflight_update == "abort"  # the first samples a rollout in one call
    assert (spans == 0) == whole


@pytest.mark.engine
def test_a_checkpoint_brings_back_every_group_in_flight_by_its_prompt(engine_folder):
    with backend("vllm", engine_folder, room=8) as (policy, engine):
        flight = in_flight(engine, 2, LONG_TAIL, max_staleness=8)
        flight.groups += islice(numbered_groups(), 9)
        problems = [group.problem for group in flight.groups]
        flight.task = replace(flight.task, train=problems)
        flight.take(3)
        move_and_load(policy, engine)
        engine.counters["kv_lost"] = 7
        state = flight.state_dict()
        engine.abort()  # as if the process had died
        engine.counters["kv_lost"] = 0
        restored = in_flight(engine, 2, LONG_TAIL, max_staleness=8)
        restored.task = flight.task
        restored.load_state_dict(state)
        assert restored.after_update() == {"groups_in_flight": 6, "tokens_wasted": 0, "kv_lost": 7}
        assert [each.problem for each in restored.take(6)] == [each.problem for each in flight.groups]


# ------------------------------------------------------------------------------------------------ what a load does
@pytest.mark.engine
@pytest.mark.parametrize("name, parity", [
    ("Qwen2", KEEP), ("Qwen2", RECOMPUTE), ("Qwen2", ABORT), ("FalconH1", KEEP), ("Mamba2", RECOMPUTE),
], ids=named)  # the last two have recurrent states
@torch.no_grad()
def test_an_update_keeps_recomputes_or_aborts_what_was_computed(tmp_path, name, parity):
    """Against caches of the old and the new weights in transformers, token by token."""
    model = qwen2(tied=False) if name == "Qwen2" else small_model(name, False)
    model.save_pretrained(tmp_path)
    policy, update = Policy(model), parity.inflight_update
    with started(str(tmp_path), policy, parity, in_flight=True) as engine:
        rollouts = [rollout for size in (2, 24, 70)  # shorter than the convolution, and over several chunks
                    for rollout in engine.submit(list(range(6, 6 + size)), 2, Sampling(0.7, 24), size)]  # fmt: skip
        for _ in range(12):
            engine.step()
        version, wasted, old = engine.weight_version, engine.counters["tokens_wasted"], deepcopy(policy)
        move_and_load(policy, engine, scale=0.03)
        while engine.num_unfinished:
            engine.step()
        assert floors(policy, engine) < AT_PARITY  # the engine is clean again
    aborted = update == "abort"
    assert engine.counters["tokens_wasted"] - wasted == (12 * 6 if aborted else 0)
    for rollout in rollouts:
        assert rollout.versions == [version + 1] * 24 if aborted else [version] * 12 + [version + 1] * 12
        kept, own = over_a_kept_state(policy if aborted else old, policy, rollout)
        same, other = (kept, own) if update == "keep" else (own, kept)
        found = torch.tensor(rollout.logprobs).double()
        assert (found - same).abs().max() <= 10 * ROUNDING
        assert aborted or (found - other)[12:].abs().mean() > 100 * ROUNDING


@pytest.mark.engine
def test_a_rollout_is_as_old_as_the_part_of_its_prompt_that_was_computed_first(engine_folder, monkeypatch):
    """128 prompt tokens to an engine step: the load finds half of the first request's prompt computed."""
    in_chunks = dict(enable_chunked_prefill=True, max_num_batched_tokens=128)
    monkeypatch.setattr(canary, "length", lambda _: canary.PROMPT_TOKENS)  # a CPU splits no seeded prompt
    with backend("vllm", engine_folder, seed=1, further=in_chunks) as (policy, engine):
        flight = in_flight(engine, 2, Sampling(temperature=1.0, max_new_tokens=8), max_staleness=1)
        flight.groups = [group := Group(Problem("0", "0", "test", HALF))]
        flight._fill()
        engine.step()
        assert [rollout.token_ids for rollout in group.rollouts] == [[], []]
        old = engine.weight_version
        move_and_load(policy, engine, scale=0.05)
        flight.after_update()
        (taken,) = flight.take(1)
        first, second = taken.rollouts
        assert first.versions == second.versions == [old + 1] * 8
        assert [first.oldest_version, second.oldest_version] == [old, old + 1]
        stale, fresh = (floors_of(policy, [each] * 2, 1.0) for each in (first, second))
        assert fresh < AT_PARITY < 100 * AT_PARITY < stale


@pytest.mark.engine
@pytest.mark.parametrize("options", [dict(), dict(block_size=32, kv_cache_gib=0.0006)], ids=str)
def test_a_kept_cache_that_is_lost_to_preemption_is_counted_and_computed_again(engine_folder, options):
    """The small cache holds about half of the running rollouts, so vLLM preempts some."""
    with backend("vllm", engine_folder, **options) as (policy, engine):
        prompts = [[5, 6, 7 + number] for number in range(8)]
        rollouts = [each for n, prompt in enumerate(prompts) for each in engine.submit(prompt, 2, ENDLESS, n)]
        kept, lost = [], 0  # a cache is lost once, however often it is looked at
        while engine.num_unfinished:
            for _ in range(20):
                engine.step()
            lost += sum(request.num_preemptions > before for request, before in kept)
            kept = [(request, request.num_preemptions) for request in engine.core.scheduler.running]
            move_and_load(policy, engine)
        assert all(rollout.finish_reason == "length" for rollout in rollouts)
        assert engine.counters["kv_lost"] == lost
        assert (lost > 0) == bool(options)
        again = engine.generate(prompts, 2, ENDLESS, list(range(8)))  # preempted, without an update
        assert floors_of(policy, again, 1.0) < AT_PARITY


@pytest.mark.engine
def test_steps_without_a_signal_waste_no_token_and_a_resumed_run_submits_its_groups_again(good, tmp_path):
    """The reward is constant, so that no step has a signal; V1's abort would throw unfinished work away."""
    (tmp_path / "task.py").write_text(PYTHON.replace("float(len(response) % 3)", "1.0"))
    arguments = command(good, f"--out {tmp_path}/run --task {tmp_path}/task.py --steps 4 --inflight-groups 3"
                              " --max-num-seqs 12 --checkpoint-every 2 --eval-problems 4"
                              " --max-new-tokens 40 --temperature 2 --parity.no-inflight-keep")  # fmt: skip
    train_here(arguments)
    steps = rows(tmp_path / "run")[1:]
    assert [(row["updates"], row["skipped_updates"]) for row in steps] == [(0, 2)] * 4
    assert all(row["tokens_wasted"] == row["staleness_max"] == 0 for row in steps)
    (newest,) = tmp_path.glob("run/checkpoints/step_000004*")
    newest.unlink()  # as if the run had been killed in step 4
    train_here([*arguments, "--resume"])
    again = rows(tmp_path / "run")[1:]
    assert [(row["step"], row["groups_in_flight"]) for row in again] == [(step, 3) for step in (1, 2, 3, 4)]
