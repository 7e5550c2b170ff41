"""Groups in flight over weight updates, on the real vLLM and on the reference backend: none is lost or used twice."""

import json
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import (
    ABORT,
    KEEP,
    RECOMPUTE,
    RECURRENT,
    command,
    mismatch_of,
    move_and_load,
    over_a_kept_state,
    qwen2,
    small_model,
    started,
    train_here,
)

from config import Config, ParityFlags
from engine_adapter import Sampling
from extras.inflight import GroupsInFlight
from extras.reference import ReferenceEngine
from probe.diagnose import diagnose, sample_trace
from probe.traces import Trace
from rl import Policy
from tasks import Problem

KINDS = [pytest.param("vllm", marks=pytest.mark.engine), "transformers"]
CASES = [("transformers", KEEP), *(pytest.param("vllm", parity, marks=pytest.mark.engine)
                                   for parity in (KEEP, RECOMPUTE, ABORT))]  # fmt: skip
NAMED = dict(ids=lambda value: value if isinstance(value, str) else value.inflight_update, scope="module")
PARITIES = pytest.mark.parametrize("parity", [KEEP, RECOMPUTE, ABORT], **NAMED)  # module: equal flags share an engine
# Lengths differ as in practice: one token in eight of a flat distribution ends the response.
LONG_TAIL = Sampling(temperature=1.0, max_new_tokens=48, stop_token_ids=tuple(range(2, 12)))


@contextmanager
def backend(kind: str, engine_folders, parity: ParityFlags = KEEP, room: int = 64, **options):
    """A live policy and an engine of either kind that holds its weights and accepts groups for `room` rollouts."""
    policy = Policy(qwen2(tied=False))
    if kind == "vllm":
        with started(engine_folders[False], policy, parity, **options) as engine:
            engine.counters = dict.fromkeys(engine.counters, 0)  # of an earlier test
            usual, engine.max_num_seqs = engine.max_num_seqs, room
            yield policy, engine
            engine.max_num_seqs = usual
    else:
        engine = ReferenceEngine(policy, room)
        engine.load(policy.weights(), policy.response_logprobs)
        yield policy, engine


def in_flight(engine, group_size: int, sampling: Sampling, max_staleness: int) -> GroupsInFlight:
    """Without a task: the tests submit their own problems."""
    config = Config.of(group_size=group_size, max_staleness=max_staleness)
    return GroupsInFlight(None, engine, sampling, config)


def steps_of(flight: GroupsInFlight, count: int) -> None:
    for _ in range(count):
        flight._fill()
        flight.engine.step()


def submit(flight: GroupsInFlight, count: int) -> None:
    """Groups with consecutive numbers, as their questions."""
    first = flight.counters["groups_submitted"]
    numbers = range(first, first + count)
    prompts = [torch.randint(12, 96, (3 + number % 7,), generator=torch.Generator().manual_seed(number)).tolist()
               for number in numbers]  # fmt: skip
    flight.submit([Problem(str(number), "0", "test", ids) for number, ids in zip(numbers, prompts, strict=True)])


def numbers(groups) -> list[int]:
    return [int(group.problem.question) for group in groups]


@pytest.mark.parametrize("room", [64, 4])
@pytest.mark.parametrize("kind, parity", CASES, **NAMED)
def test_every_group_is_trained_on_once_dropped_or_in_flight(engine_folders, kind, parity, room):
    check_every_group(engine_folders, kind, parity, room)


def check_every_group(engine_folders, kind: str, parity: ParityFlags, room: int) -> None:
    taken, spans = [], 0
    with backend(kind, engine_folders, parity, room) as (policy, engine):
        flight = in_flight(engine, 3, LONG_TAIL, max_staleness=2)
        for step in range(12):
            submit(flight, 4 + 3 - len(flight.groups))
            groups = flight.take(4)
            assert numbers(groups) == sorted(numbers(groups))
            taken += groups
            spans += sum(len(set(r.versions)) > 1 for group in groups for r in group.rollouts)
            if step == 5:  # an evaluation in between lets what is in flight advance, and no more
                before = numbers(flight.groups)
                assert len(engine.generate([[20, 21]], 2, Sampling(1.0, 1))) == 2
                assert numbers(flight.groups) == before
                assert engine.num_unfinished > 0 or all(group.complete or not group.rollouts for group in flight.groups)
            move_and_load(policy, engine, seed=step)
            counts = flight.after_update()
            left = numbers(flight.groups)
            assert counts["groups_submitted"] == len(taken) + counts["groups_dropped"] + len(left)
            assert not set(left) & set(numbers(taken))
            assert all(engine.weight_version - v <= 2 for g in flight.groups for r in g.rollouts for v in r.versions)
    assert len(set(numbers(taken))) == len(taken) == counts["groups_trained"] == 48
    rollouts = [rollout for group in taken for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} <= {"stop", "length"}
    assert all(len(r.token_ids) == len(r.logprobs) == len(r.versions) > 0 for r in rollouts)
    assert all(r.versions == sorted(r.versions) for r in rollouts)
    assert all(r.prompt_ids == group.problem.prompt_ids for group in taken for r in group.rollouts)
    if kind == "transformers":  # a rollout is sampled whole
        assert spans == counts["rollouts_restarted"] == 0
    elif parity.inflight_update == "abort":
        assert spans == 0
        assert min(counts["tokens_wasted"], counts["rollouts_restarted"]) > 0
    else:
        assert spans > 0
        assert counts["rollouts_restarted"] == 0


@pytest.mark.engine
@pytest.mark.parametrize("parity", [KEEP, RECOMPUTE], **NAMED)
def test_the_probe_tells_kept_from_recomputed_caches(engine_folders, parity):
    word, sampling = {KEEP: "KV kept", RECOMPUTE: "recomputed"}[parity], Sampling(temperature=0.7, max_new_tokens=40)
    with backend("vllm", engine_folders, parity) as (policy, engine):
        flight = in_flight(engine, 2, sampling, max_staleness=9)
        submit(flight, 8)
        steps_of(flight, 20)
        earlier = policy.copied_weights()
        move_and_load(policy, engine, scale=0.05)
        flight.after_update()
        rollouts = [rollout for group in flight.take(8) for rollout in group.rollouts]
    meta = {"dtype": "float32", "audit": engine.settings}
    verdict = diagnose(policy, Trace("flight", rollouts, sampling, meta), [earlier], engine.weight_version)
    assert verdict.status == "mismatch"
    assert word in verdict.sentence, verdict.sentence


@pytest.mark.engine
@pytest.mark.parametrize("parity", [KEEP, RECOMPUTE], **NAMED)
def test_the_probe_finds_parity_with_a_versioned_prefix_cache_over_updates_and_in_flight(engine_folders, parity):
    """While requests with the same prompts, sampled before the update, are unfinished."""
    generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature=0.7, max_new_tokens=30)
    prompts = torch.randint(12, 96, (8, 70), generator=generator).tolist()  # of two blocks and a part
    with backend("vllm", engine_folders, parity, block_size=32, prefix_cache="versioned") as (policy, engine):
        for seed in range(3):
            unfinished = [engine.submit(prompt, 2, Sampling(1.0, 60)) for prompt in prompts]
            steps_of(in_flight(engine, 2, sampling, max_staleness=9), 5)
            earlier = policy.copied_weights()
            move_and_load(policy, engine, scale=0.05, seed=seed)
            trace = sample_trace(engine, prompts * 2, sampling, list(range(16)))
            verdict = diagnose(policy, trace, [earlier], engine.weight_version)
            assert verdict.status == "parity", verdict.sentence
            engine.abort([rollout for group in unfinished for rollout in group])


@pytest.mark.engine
@PARITIES
def test_a_load_of_unchanged_weights_is_no_version_and_disturbs_no_rollout(engine_folders, parity):
    with backend("vllm", engine_folders, parity) as (policy, engine):
        whole = engine.generate([[20, 21, 22]], 4, LONG_TAIL, [7])
        group, version = engine.submit([20, 21, 22], 4, LONG_TAIL, 7), engine.weight_version
        for _ in range(3):
            engine.step()
        engine.sleep()
        engine.wake()
        engine.load(policy.weights(), policy.response_logprobs, changed=False)
        while engine.num_unfinished:
            engine.step()
        assert engine.weight_version == version
        assert [rollout.token_ids for rollout in group] == [rollout.token_ids for rollout in whole]
        assert {rollout.finish_reason for rollout in group} <= {"stop", "length"}


@pytest.mark.engine
@pytest.mark.parametrize("room", [64, 4])
@PARITIES
def test_every_group_is_accounted_for_with_asynchronous_scheduling_too(engine_folders, parity, room):
    check_every_group(engine_folders, "vllm", replace(parity, explicit_runtime=False), room)


@pytest.mark.engine
@PARITIES
def test_a_rollout_is_as_old_as_the_part_of_its_prompt_that_was_computed_first(engine_folders, parity):
    """Prompts of 136 tokens, 128 to an engine step: the load finds half of the first request's prompt computed."""
    prompt = torch.randint(12, 96, (136,), generator=torch.Generator().manual_seed(0)).tolist()
    with backend("vllm", engine_folders, parity, token_budget=128) as (policy, engine):
        flight = in_flight(engine, 2, Sampling(temperature=1.0, max_new_tokens=8), max_staleness=0)
        flight.submit([Problem("0", "0", "test", prompt)])
        steps_of(flight, 1)
        assert [rollout.token_ids for rollout in flight.groups[0].rollouts] == [[], []]
        old = engine.weight_version
        move_and_load(policy, engine, scale=0.05)
        group, new = flight.groups[0], engine.weight_version
        flight.config = flight.config.but(max_staleness=1)
        flight.after_update()
        first, second = (rollout for each in flight.take(1) for rollout in each.rollouts)
        assert first.versions == second.versions == [new] * 8
        kept = parity == KEEP
        assert [first.oldest_version, second.oldest_version] == [old if kept else new, new]
        assert group.oldest_version == first.oldest_version
        mismatches = [mismatch_of(policy, [each] * 2, 1.0)["mismatch_abs_mean"] for each in (first, second)]
        assert mismatches[1] < 1e-5
        assert (mismatches[0] > 0.01) == kept, mismatches


@pytest.mark.engine
def test_a_group_whose_half_computed_prompt_is_too_old_is_dropped(engine_folders):
    prompt = torch.randint(12, 96, (136,), generator=torch.Generator().manual_seed(0)).tolist()
    with backend("vllm", engine_folders, token_budget=128) as (policy, engine):
        flight = in_flight(engine, 2, Sampling(temperature=1.0, max_new_tokens=8), max_staleness=0)
        flight.submit([Problem("0", "0", "test", prompt)])
        steps_of(flight, 1)
        move_and_load(policy, engine)
        assert flight.after_update()["groups_dropped"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_old_is_dropped_and_counted(engine_folders, kind):
    endless = Sampling(temperature=1.0, max_new_tokens=100)
    with backend(kind, engine_folders) as (policy, engine):
        flight = in_flight(engine, 2, endless, max_staleness=1)
        submit(flight, 3)
        steps_of(flight, 1)
        for seed, left in ((0, 3), (1, 0)):  # one update old: allowed; two: not
            move_and_load(policy, engine, seed=seed)
            counts = flight.after_update()
            assert len(flight.groups) == left
        assert (counts["groups_dropped"], counts["groups_submitted"]) == (3, 3)
        assert counts["tokens_wasted"] >= 6
        assert engine.num_unfinished == 0
        assert len(engine.generate([[5, 6]], 2, LONG_TAIL)) == 2  # the engine is free again


@pytest.mark.engine
def test_groups_in_flight_need_fewer_engine_steps_where_lengths_have_a_long_tail(engine_folders):
    """Counts engine steps, not seconds: a step costs about the same however few rollouts run."""
    steps = {0: 0, 8: 0}
    for groups_in_flight in steps:
        with backend("vllm", engine_folders) as (policy, engine):
            flight = in_flight(engine, 4, LONG_TAIL, max_staleness=8)
            for seed in range(8):
                submit(flight, 8 + groups_in_flight - len(flight.groups))
                while sum(group.complete for group in flight.groups) < 8:
                    steps_of(flight, 1)
                    steps[groups_in_flight] += 1
                flight.take(8)  # without a further step
                move_and_load(policy, engine, seed=seed)
                flight.after_update()
    assert steps[0] > 1.3 * steps[8]


@pytest.mark.engine
def test_a_request_that_vllm_has_lost_is_an_error_at_the_next_update(engine_folders):
    with backend("vllm", engine_folders) as (policy, engine):
        flight = in_flight(engine, 2, Sampling(1.0, 100), max_staleness=8)
        submit(flight, 1)
        steps_of(flight, 1)
        engine.llm.engine_core.abort_requests(list(engine._requests))  # behind the adapter's back
        move_and_load(policy, engine)
        with pytest.raises(RuntimeError, match="2 rollouts are in flight, the engine runs 0"):
            flight.after_update()


@pytest.mark.engine
def test_a_kept_cache_that_is_lost_to_preemption_is_counted(engine_folders):
    """The small cache holds about half of the running rollouts, so vLLM preempts some and recomputes their cache."""
    endless = Sampling(temperature=1.0, max_new_tokens=100)
    for options, lost in ((dict(), False), (dict(block_size=32, kv_cache_gib=0.0006), True)):
        with backend("vllm", engine_folders, **options) as (policy, engine):
            before = engine.counters["kv_lost"]
            rollouts = [engine.submit([5, 6, 7 + n], 2, endless, 10 * n) for n in range(8)]
            for _ in range(20):
                engine.step()
            move_and_load(policy, engine)
            while engine.num_unfinished:
                engine.step()
            move_and_load(policy, engine)
            assert all(rollout.finish_reason == "length" for group in rollouts for rollout in group)
            assert (engine.counters["kv_lost"] > before) == lost


@pytest.mark.engine
def test_a_checkpoint_brings_back_every_group_in_flight_by_its_prompt(engine_folders):
    with backend("vllm", engine_folders, room=8, max_num_seqs=8) as (policy, engine):
        flight = in_flight(engine, 2, LONG_TAIL, max_staleness=8)
        submit(flight, 9)
        flight.take(3)
        move_and_load(policy, engine)
        flight.after_update()
        state, before = flight.state_dict(), flight.groups
        tokens = sum(len(rollout.token_ids) for group in before for rollout in group.rollouts)
        engine.abort([rollout for group in before for rollout in group.rollouts])  # as if the process had died
        restored = in_flight(engine, 2, LONG_TAIL, max_staleness=8)
        engine.counters = dict.fromkeys(engine.counters, 0)
        restored.load_state_dict(state)
        same = lambda groups: [group.problem for group in groups]  # noqa: E731
        assert same(restored.groups) == same(before)
        assert engine.counters["tokens_wasted"] == tokens > 0
        assert same(restored.take(6)) == same(before)
        assert restored.after_update()["groups_trained"] == 9


def test_rollouts_that_belong_to_no_group_stop_the_run(engine_folders):
    with backend("transformers", engine_folders) as (_, engine):
        flight = in_flight(engine, 2, Sampling(1.0, 100), max_staleness=8)
        submit(flight, 4)
        flight._fill()
        engine.submit([5, 6], 2, LONG_TAIL)
        with pytest.raises(RuntimeError, match="8 rollouts are in flight, the engine runs 10"):
            flight.after_update()


@pytest.mark.engine
def test_a_step_without_a_signal_changes_no_version_and_wastes_no_token(good, tmp_path):
    """No answer of this model is right, so that no step has a signal; V1's abort would throw its work away."""
    train_here(command(good, f"--out {tmp_path}/run --steps 4 --inflight-groups 3 --max-num-seqs 8"
                       " --eval-problems 4 --parity.no-inflight-keep"))  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [(row["updates"], row["skipped_updates"]) for row in rows] == [(0, 2)] * 4
    assert all(row["groups_in_flight"] == 3 for row in rows)
    assert all(row["tokens_wasted"] == row["rollouts_restarted"] == row["staleness_max"] == 0 for row in rows)


# ------------------------------------------------------------------------------------------------ recurrent states
@pytest.mark.engine
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("parity", [KEEP, RECOMPUTE, ABORT], **NAMED)
@torch.no_grad()
def test_an_update_keeps_recomputes_or_aborts_a_recurrent_state_as_it_does_a_kv_cache(tmp_path, parity, name):
    small_model(name, False).save_pretrained(tmp_path)
    policy, sampling = Policy.load(str(tmp_path), torch.float32, "cpu"), Sampling(temperature=0.7, max_new_tokens=24)
    with started(str(tmp_path), policy, parity) as engine:
        rollouts = [rollout for size in (2, 24, 70)  # shorter than the convolution, and over several chunks
                    for rollout in engine.submit(list(range(6, 6 + size)), 2, sampling, size)]
        for _ in range(12):
            engine.step()
        old = deepcopy(policy)
        move_and_load(policy, engine, scale=0.03)
        while engine.num_unfinished:
            engine.step()
    for rollout in rollouts:
        kept, own = over_a_kept_state(old, policy, rollout)
        found, aborted = torch.tensor(rollout.logprobs).double(), parity.inflight_update == "abort"
        assert len(set(rollout.versions)) == (1 if aborted else 2)
        if aborted:
            own = over_a_kept_state(policy, policy, rollout)[1]
        same, other = (kept, own) if parity.inflight_update == "keep" else (own, kept)
        assert (found - same).abs().max() <= 5e-5
        assert aborted or (found - other)[12:].abs().mean() > 0.05
    trace = Trace("in flight", rollouts, sampling, {"dtype": "float32"})
    word = {"keep": "KV kept", "recompute": "recomputed", "abort": "parity"}[parity.inflight_update]
    sentence = diagnose(policy, trace, [old.copied_weights()], engine.weight_version).sentence
    assert word in sentence, sentence


@pytest.mark.engine
def test_a_preempted_recurrent_request_gets_its_state_computed_again(tmp_path):
    """The cache holds 15 blocks of 128 tokens; a request needs one for its state and, beyond 128 tokens, two more."""
    small_model("FalconH1", False).save_pretrained(tmp_path)
    policy, sampling = Policy.load(str(tmp_path), torch.float32, "cpu"), Sampling(temperature=0.7, max_new_tokens=40)
    with started(str(tmp_path), policy, kv_cache_gib=0.001) as engine:
        groups = [engine.submit(list(range(6, 90)) + [size] * 20, 1, sampling, size) for size in range(12)]
        preemptions: dict[str, int] = {}
        while engine.num_unfinished:
            engine.step()
            preemptions |= {name: each.num_preemptions for name, each in engine.core.scheduler.requests.items()}
    assert sum(preemptions.values()) > 0
    assert mismatch_of(policy, [rollout for group in groups for rollout in group], 0.7)["mismatch_max"] <= 5e-5
