"""Groups in flight over weight updates and evaluations: none is lost or used twice, and each fix does to the KV cache
what it says."""

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from helpers import (
    AT_PARITY,
    ROUNDING,
    VERSIONED,
    command,
    drawn_ids,
    floors,
    floors_of,
    load_into,
    move_and_load,
    parametrize,
    policy_of,
    qwen2,
    read_json,
    rows_of_run,
    scored,
    small_model,
    started,
    timeless,
    train_here,
)
from transformers import DynamicCache

from engine_adapter import Engine, ParityFlags, Sampling
from extras.inflight import Group, GroupsInFlight
from extras.shared.masks import MaskedSampling
from rl import Policy
from tasks import Problem, Task, exact_match
from verify import canary
from verify.batch import check_rollouts
from vllm_cases import EngineStateError

pytestmark = pytest.mark.engine
ABORT = {"parity": ParityFlags(inflight_keep=False)}
UPDATES = {"keep": {}, "recompute": ABORT | {"recomputes": True}, "abort": ABORT}
# Lengths differ as in practice: one token in eight of a flat distribution ends the response.
LONG_TAIL = MaskedSampling(1.0, 48, tuple(range(2, 12)), top_k=90, max_kept=96)
ENDLESS = Sampling(temperature=1.0, max_new_tokens=100)
HALF = drawn_ids(136, torch.Generator().manual_seed(0))  # a prompt of two chunks


@contextmanager
def backend(engine_folder, room=64, **options):
    """A live policy and an engine that holds its weights and accepts groups for `room` rollouts."""
    policy = Policy(qwen2())
    with started(engine_folder, policy, in_flight=True, **options) as engine:
        engine.counters = dict.fromkeys(engine.counters, 0)  # of an earlier test
        usual, engine.max_num_seqs = engine.max_num_seqs, room
        yield policy, engine
        engine.max_num_seqs = usual


def test_an_engine_that_keeps_requests_keeps_its_memory_also_in_a_step_that_leaves_none(engine_folder, monkeypatch):
    """On a GPU vLLM's sleep would clear the prefix cache there, and the stale cache with it."""
    with backend(engine_folder) as (policy, engine):
        monkeypatch.setattr(Engine, "sleep", lambda engine: pytest.fail("it sleeps"))
        engine.sleep()
        engine.wake()
        load_into(engine, policy)


def finish(engine):
    while engine.num_unfinished:
        engine.step()


def in_flight(engine, group_size, sampling, max_staleness):
    """A source without problems: the tests have their own groups."""
    return GroupsInFlight(engine, Task([], [], exact_match), sampling, 0, group_size, 0, num_waiting=1,
                          max_staleness=max_staleness)


def numbered(number):
    """A group whose question is its number."""
    return Group(Problem(number, "0", "test", [12 + number % 80] * (3 + number % 7)))


def questions(groups):
    return [group.problem.question for group in groups]


# ------------------------------------------------------------------------------------------------ groups
@parametrize("options, room", [  # the last one has asynchronous scheduling
    (UPDATES["recompute"], 4), (ABORT, 64), ({"parity": ParityFlags(uncached_runtime=False)}, 4)],
    ids=["recompute-4", "abort-64", "keep-4"])  # fmt: skip
def test_every_group_is_trained_on_once_or_in_flight(engine_folder, options, room):
    """None becomes too old: without the wait for groups that are due, `after_update` stops this run."""
    taken, submitted = [], 0
    with backend(engine_folder, room, **options) as (policy, engine):
        flight = in_flight(engine, 3, LONG_TAIL, max_staleness=1)
        for step in range(8):
            waiting, submitted = submitted, submitted + 4 + 3 - len(flight.groups)
            flight.groups += map(numbered, range(waiting, submitted))
            newest = flight.take(4)
            taken += newest
            assert all(engine.weight_version - group.oldest_version(9) <= 1 for group in newest)
            assert questions(newest) == sorted(questions(newest))
            later = questions(group for group in flight.groups if group.complete)
            assert min(later, default=999) > questions(newest)[-1]
            move_and_load(policy, engine, seed=step)
            assert flight.after_update()["groups_in_flight"] == len(flight.groups)
            assert sorted(questions(taken + flight.groups)) == [*range(submitted)]
            assert engine.num_unfinished == sum(
                not rollout.finish_reason for group in flight.groups for rollout in group.rollouts)
    rollouts = [rollout for group in taken for rollout in group.rollouts]
    check_rollouts([group.problem for group in taken], rollouts, 32, 3, engine.weight_version)
    assert any(len({*rollout.versions}) > 1 for rollout in rollouts) == (options != ABORT)
    assert all(len(each.kept) == len(each.versions) and each.versions == sorted(each.versions) for each in rollouts)


def test_a_checkpoint_brings_back_every_group_in_flight_and_what_is_left_of_a_pass(engine_folder):
    with backend(engine_folder, room=8) as (policy, engine):
        flight = in_flight(engine, 2, LONG_TAIL, max_staleness=8)
        flight.groups += map(numbered, range(9))
        flight.task.train.extend(group.problem for group in flight.groups)
        flight.take(3)
        move_and_load(policy, engine)
        engine.counters["kv_lost"], flight.left = 7, [5, 3]
        state, problems = flight.state_dict(), [each.problem for each in flight.groups]
        engine.abort()  # as if the process had died
        engine.counters["kv_lost"], flight.left, flight.groups = 0, [], []
        flight.load_state_dict(state)
        assert flight.after_update() == {"groups_in_flight": 6, "tokens_wasted": 0, "kv_lost": 7}
        assert [each.problem for each in flight.take(6)] == problems and flight.left == [5, 3]


# ------------------------------------------------------------------------------------------------ what a load does
@parametrize("name, update", [
    ("Qwen2", "keep"), ("Qwen2", "recompute"), ("Qwen2", "abort"), ("FalconH1", "keep"), ("FalconH1", "recompute"),
])  # the last two have recurrent states
@torch.no_grad()
def test_an_update_keeps_recomputes_or_aborts_what_was_computed(tmp_path, name, update):
    """Against a cache in transformers, token by token, and against each policy that computes all by itself."""
    model = qwen2() if name == "Qwen2" else small_model(name)
    model.save_pretrained(tmp_path)
    policy = Policy(model)
    with started(tmp_path, policy, in_flight=True, **UPDATES[update]) as engine:
        rollouts = [rollout for size in (2, 24, 70)  # shorter than the convolution, and over several chunks
                    for rollout in engine.submit(list(range(6, 6 + size)), 2, Sampling(0.7, 24), size)]  # fmt: skip
        for _ in range(12):
            engine.step()
        version, old = engine.weight_version, deepcopy(policy)
        load_into(engine, policy, is_new_version=False)  # interrupts nothing
        assert engine.counters["tokens_wasted"] == 0
        before = len(rollouts[0].token_ids)  # the load's checks advance them
        move_and_load(policy, engine, scale=0.03)
        finish(engine)
        assert floors(policy, engine) < AT_PARITY  # the engine is clean again
    aborted = update == "abort"
    assert engine.counters["tokens_wasted"] == 6 * before * aborted
    before *= not aborted
    for rollout in rollouts:
        assert rollout.versions == [version] * before + [version + 1] * (24 - before)
        ids, first = torch.tensor([rollout.prompt_ids + rollout.token_ids]), len(rollout.prompt_ids) - 1
        cut = first + before  # the token sampled last is not in the cache yet
        # `old` computes the caches (the recurrent state, and keys and values), and `policy` goes on from them.
        cache, logits = DynamicCache(config=model.config), []
        for each, inputs in ((old, ids[:, :cut]), *((policy, ids[:, t : t + 1]) for t in range(cut, ids.shape[1] - 1))):
            logits.append(each.model(input_ids=inputs, use_cache=True, past_key_values=cache).logits[0])
        kept = torch.log_softmax(torch.cat(logits) / 0.7, dim=-1).gather(1, ids[0, 1:, None])[first:, 0]  # (N,)
        of_old, of_new = (scored(each, [rollout], 0.7).old_logprobs[0, first:] for each in (old, policy))
        own = torch.cat([of_old[:before], of_new[before:]])
        same, other = (kept, own) if update == "keep" else (own, kept)
        found = torch.tensor(rollout.logprobs).double()
        assert (found - same).abs().max() <= 10 * ROUNDING
        assert aborted or (found - other)[before:].abs().mean() > 100 * ROUNDING


def test_a_rollout_is_as_old_as_the_part_of_its_prompt_that_was_computed_first(engine_folder, monkeypatch):
    """128 prompt tokens to an engine step: the load finds half of the first request's prompt computed."""
    monkeypatch.setattr(canary, "length", lambda _: canary.CANARY_PROMPT_TOKENS)  # a CPU splits no seeded prompt
    with backend(engine_folder) as (policy, engine):
        scheduler = engine.core.scheduler
        monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 128)
        monkeypatch.setattr(scheduler.scheduler_config, "enable_chunked_prefill", True)
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


@parametrize("cache", [{}, VERSIONED])
def test_a_kept_cache_that_is_lost_to_preemption_is_counted_and_computed_again(engine_folder, cache):
    """The small cache holds about half of the running rollouts, so vLLM preempts some."""
    with backend(engine_folder, block_size=32, kv_cache_gib=0.0006, **cache) as (policy, engine):
        prompts = [[5, 6, 7 + number] for number in range(8)]
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, 2, ENDLESS, number)
        kept, lost = [], 0  # a cache is lost once, however often it is looked at
        while engine.num_unfinished:
            for _ in range(20):
                engine.step()
            lost += sum(request.num_preemptions > before for request, before in kept)
            kept = [(request, request.num_preemptions) for request in engine.core.scheduler.running]
            move_and_load(policy, engine)
        assert engine.counters["kv_lost"] == lost > 0
        again = engine.generate(prompts, 2, ENDLESS, list(range(8)))  # preempted, without an update
        assert floors_of(policy, again, 1.0) < AT_PARITY


# ------------------------------------------------------------------------------------------------ an evaluation
EVALUATED = "--task {root}/task.py --inflight-groups 6 --max-num-seqs 12 --max-new-tokens 64 --eval-problems 3"


@parametrize("options", ["", "--parity.no-inflight-keep"])
def test_a_run_that_evaluates_after_each_step_is_the_same_as_one_that_evaluates_at_its_end(good, tmp_path, options):
    words = f"{EVALUATED} --steps 6 --lr 1e-2 --eval-samples 2 --temperature 1.3 --max-staleness 20 {options}"

    def trained(every):
        train_here(command(good, f"{words} --eval-every {every} --out {tmp_path}/{every}"))
        return [{name: value for name, value in row.items() if not name.startswith("eval_")}
                for row in timeless(tmp_path / f"{every}")[1:]]  # fmt: skip

    found = trained(1)
    assert found == trained(6)
    assert sum(row["updates"] > 0 and row["staleness_max"] > 0 for row in found) > 2


@parametrize("options, is_stale", [
    # A step is under way when an evaluation begins. The policy does not change, so any mismatch is a wrong token.
    # With at most 2 updates between them a lost request would stop the run.
    (f"{EVALUATED} --max-staleness 2 --temperature 2 --steps 4 --lr 1e-12 --eval-every 1 --parity.no-uncached-runtime"
     " --variants async-scheduling", True),
    ("--schedule-ahead --task {root}/task.py --steps 3 --lr 1e-2 --eval-problems 4", False)],
    ids=["in flight", "alone"])  # fmt: skip
def test_with_async_scheduling_no_token_is_wrong_or_has_other_weights(good, tmp_path, options, is_stale):
    _, *found = rows_of_run(good, tmp_path, options)
    assert read_json(tmp_path / "config.json")["audit"]["async_scheduling"] is True
    assert any(row["staleness_max"] for row in found) == is_stale and found[0]["updates"] > 0
    assert max(row["mismatch_max"] for row in found) < ROUNDING


def test_without_memory_for_one_more_row_an_evaluation_is_refused_and_nothing_is_lost(tmp_path):
    """Gemma 2's layers with a window are a group of their own, with blocks of the same pool."""
    policy = policy_of(tmp_path, "Gemma2")
    with started(tmp_path, policy, in_flight=True, block_size=32, kv_cache_gib=0.0006) as engine:
        # Of different lengths, so that few rows need a new block in the same step.
        rollouts = [engine.submit([5, 6, 7 + n] + [9] * 4 * n, 2, Sampling(1.0, 120), n)[0] for n in range(8)]
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        while pool.get_num_free_blocks() >= 2 * 5:  # a row has 160 tokens
            engine.step()
        assert pool.get_num_free_blocks() >= 5
        with pytest.raises(EngineStateError, match="more --kv-cache-gib or fewer --inflight-groups"), engine.holding():
            pass
        finish(engine)
        assert all(len(rollout.token_ids) == 120 for rollout in rollouts)


def test_where_held_requests_keep_their_places_fewer_others_run_beside_them(engine_folder, monkeypatch, policy):
    """As with model runner V2, which a GPU has. A scheduler that gave all places away would find none free there."""
    monkeypatch.setattr("extras.inflight.keeps_places", lambda runner: True)
    with started(engine_folder, policy, in_flight=True, max_num_seqs=8) as engine:
        held = engine.submit([5, 6, 7], 10, Sampling(1.0, 60), 0)
        engine.step()
        with engine.holding():
            others = engine.submit([9, 9], 4, Sampling(1.0, 5), 1)
            most = 0
            while not all(rollout.finish_reason for rollout in others):
                engine.step()
                most = max(most, len(engine.core.scheduler.running))
        assert most == 8 + canary.CANARY_PROMPTS - 10
        engine.submit([5, 6], 2, Sampling(1.0, 60), 3)
        engine.step()
        with pytest.raises(EngineStateError, match="or no place, for an evaluation"), engine.holding():
            pass
        finish(engine)
        assert floors_of(policy, held, 1.0) < AT_PARITY
