"""The engine under pressure: clean runs, planted faults, the counts of what happened, the replay of one request."""

import math
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import numpy
import pytest
import torch
from helpers import COUNTED, PressureBench, close_live_engine, faulty, qwen2, trace_of

from engine_adapter import EngineStateError
from probe.__main__ import main
from probe.diagnose import diagnose, print_verdict
from probe.stress import LEAST_BUDGET, Events, compare, other_weights
from probe.traces import Trace, load_traces, save_trace
from rl import Policy

DATA = Path(__file__).parent / "data"
REQUESTS = 32  # of a run


def exit_status(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


@pytest.fixture(scope="module")
def bench():
    bench = PressureBench()
    yield bench
    bench.close()


# ------------------------------------------------------------------------------------------------ the live engine
@pytest.mark.engine
def test_the_same_arguments_give_the_same_run_and_a_mild_run_is_an_error_that_names_what_is_missing(bench):
    first = trace_of(bench.run("qwen2", 1, REQUESTS))
    run = bench.run("qwen2", 1, REQUESTS)
    torch.rand(1)  # the state of torch's generator is not one of the arguments
    again = trace_of(run)
    assert [r.token_ids for r in again.rollouts] == [r.token_ids for r in first.rollouts]
    assert again.events == first.events
    with pytest.raises(ValueError, match=r"no request has met: .*preemptions.*; try more --num-prompts"):
        bench.run("qwen2", 0, 3).run()


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen2", "FalconH1"], scope="module")  # all tests of an engine follow each other
class TestUnderPressure:
    def test_a_clean_run_under_every_kind_of_pressure_is_parity(self, bench, name):
        run = bench.run(name, 0, REQUESTS)
        before = bench.policy.copied_weights()
        trace = trace_of(run)
        verdict = diagnose(bench.policy, trace)
        assert verdict.status == "parity", verdict.sentence
        assert verdict.under_pressure == []
        assert all(run.totals[what] > 0 for what in COUNTED), run.totals
        assert {version for rollout in trace.rollouts for version in rollout.versions} == {run.engine.weight_version}
        for events, prompt in zip(trace.events, run.prompts, strict=True):
            assert events.chunks >= math.ceil(len(prompt) / LEAST_BUDGET)
            assert len(prompt) > 1 or events.chunks == 1
        assert sum(events.preempted for events in trace.events) <= run.totals["preemptions"]
        assert sum(events.restarted for events in trace.events) == run.totals["aborted"]
        assert all(torch.equal(before[name], tensor) for name, tensor in bench.policy.copied_weights().items())

    @pytest.mark.parametrize("fault, kind", [("not reset", None), ("chunk skipped", "several prompt chunks")])
    def test_a_planted_fault_is_found_with_exactly_its_requests(self, bench, name, fault, kind):
        """In three requests; or in all that can have it, and then the verdict names what they have met."""
        verdict, spoiled = faulty(bench, name, fault, 100, math.inf if kind else 3, REQUESTS)
        assert spoiled
        assert verdict.requests["wrong"] == spoiled, verdict.sentence
        wrong = "inference path: wrong requests among right ones"
        assert verdict.blamed == (f"{wrong}, all with {kind}" if kind else wrong)


@pytest.mark.engine
def test_the_fault_of_one_token_taken_for_a_decode_is_found(bench):
    """vllm#32118, which AI21 found in Jamba: the first token is added to the state of an earlier request."""
    verdict, spoiled = faulty(bench, "FalconH1", "one token as decode", 100, math.inf)
    assert spoiled
    assert verdict.requests["wrong"] == spoiled
    assert verdict.layers == ["inference path"]
    assert "wrong among requests with first chunks of one token: " in verdict.under_pressure[len(spoiled)]


@pytest.mark.engine
def test_record_with_stress_is_parity_and_one_request_is_replayed_alone(tmp_path, capsys):
    close_live_engine()
    folder, out, one = (str(tmp_path / name) for name in ("model", "trace.npz", "one.npz"))
    qwen2(tied=True).save_pretrained(folder)
    words = ["record", "--model", folder, "--out", out, "--stress", "--num-prompts", "24"]
    assert exit_status(words) == 0
    printed = capsys.readouterr().out
    (trace,) = load_traces(out)
    assert f"{trace.meta['stress']['totals']['preemptions']} preemptions" in printed
    assert exit_status(["diagnose", "--model", folder, out]) == 0
    assert exit_status([*words, "--only", "2", "--out", one]) == 0
    assert f"request 2 alone: several prompt chunks: {math.ceil(len(trace.rollouts[2].prompt_ids) / LEAST_BUDGET)}" in (
        capsys.readouterr().out)
    (alone,) = load_traces(one)[0].rollouts
    assert alone.prompt_ids == trace.rollouts[2].prompt_ids
    assert exit_status(["diagnose", "--model", folder, one]) == 0


# ------------------------------------------------------------------------------------------------ without an engine
def stored() -> Trace:
    return load_traces(str(DATA / "v0_0.8.5_fp32.npz"))[0]


def test_only_outside_the_workload_is_bad_input(tmp_path, capsys):
    words = ["record", "--model", "none", "--out", str(tmp_path / "t.npz"), "--num-prompts", "8", "--only", "8"]
    assert exit_status(words) == 2
    assert "only must be a request of the workload, in [0, 8), got 8" in capsys.readouterr().err


@pytest.mark.parametrize("requests, complaint", [
    ([{}], "meta.stress.requests must have 64 rows, got 1"),
    ([{"chunks": "two"}] * 64, "meta.stress.requests must have counts, got 'two' for chunks"),
    ([{"kept": 1}] * 64, "unexpected keyword argument 'kept'"),
])  # fmt: skip
def test_malformed_events_of_a_trace_are_bad_input(tmp_path, requests, complaint):
    trace = stored()
    save_trace(str(tmp_path / "t.npz"), replace(trace, meta=trace.meta | {"stress": {"requests": requests}}))
    with pytest.raises(ValueError, match=r"t\.npz") as refused:
        load_traces(str(tmp_path / "t.npz"))
    assert complaint in str(refused.value)


def under_pressure(spoiled: list[int], events: dict[int, Events]) -> tuple[Trace, Policy]:
    """A stored clean trace with the tokens of some rows reversed, as if it had been recorded under pressure."""
    trace = stored()
    for row in spoiled:
        trace.rollouts[row].token_ids.reverse()
    requests = [asdict(events.get(row, Events(chunks=1))) for row in range(len(trace.rollouts))]
    meta = trace.meta | {"stress": {"requests": requests}, "command": "record --stress --seed 3"}
    return replace(trace, meta=meta), Policy.load(str(DATA / "tiny-qwen2"), torch.float32, "cpu")


def test_wrong_requests_are_listed_with_what_they_met_and_how_to_replay_one(tmp_path, capsys):
    trace, policy = under_pressure([5, 9], {5: Events(3, 1, 2, 4, 1, 2), 6: Events(2)})
    save_trace(str(tmp_path / "t.npz"), trace)
    verdict = diagnose(policy, load_traces(str(tmp_path / "t.npz"))[0])
    print_verdict(verdict)
    printed = capsys.readouterr().out
    assert "Requests wrong: 5, 9" in printed
    assert ("request 5: several prompt chunks: 3, first chunks of one token: 1, preemptions: 2, recycled blocks: 4,"
            " aborts: 1, loads of other weights before: 2\n") in printed
    assert "request 9: no pressure\n" in printed
    assert "wrong among requests with preemptions: 1 of 1, among others 1 of 63 (by chance: 3e-02)" in printed
    assert "replay one alone: python -m probe record --stress --seed 3 --only 5 --out request_5.npz" in printed
    assert verdict.record()["under_pressure"] == verdict.under_pressure


def test_more_than_a_few_wrong_requests_are_named_under_pressure_alone():
    """40 of 64, all preempted; the others are at the noise floor."""
    preempted = dict.fromkeys(range(10, 50), Events(1, preempted=1))
    trace, policy = under_pressure(list(preempted), preempted)
    verdict = diagnose(policy, trace)
    assert [cause.name for cause in verdict.causes] == ["wrong requests among right ones, all with preemptions"]
    assert verdict.requests["wrong"] == list(preempted)
    plain = {key: value for key, value in trace.meta.items() if key != "stress"}
    assert diagnose(policy, replace(trace, meta=plain)).status == "unexplained"
    nearly_all = list(range(4, 64))
    verdict = diagnose(policy, under_pressure(nearly_all, {})[0])
    assert (verdict.status, verdict.requests["wrong"]) == ("unexplained", nearly_all)


def test_the_chance_of_wrong_requests_is_that_of_enumeration():
    events = [Events(preempted=int(row < 5)) for row in range(9)]
    for wrong in ([0, 1, 2], [0, 1, 8], [6, 7, 8], list(range(6))):
        (met,) = [each for each in compare(events, wrong) if each.kind == "preemptions"]
        draws = list(combinations(range(9), len(wrong)))
        as_many = [sum(row < 5 for row in draw) >= sum(row < 5 for row in wrong) for draw in draws]
        assert met.chance == pytest.approx(numpy.mean(as_many))
        assert met.all_of_them == (max(wrong) < 5)


def test_other_weights_differ_in_every_tensor_and_end_bit_by_bit():
    policy = Policy(qwen2(tied=True))
    own = policy.copied_weights()
    with pytest.raises(EngineStateError), other_weights(policy, 0):
        assert all(not torch.equal(own[name], tensor) for name, tensor in policy.copied_weights().items())
        raise EngineStateError
    assert all(torch.equal(own[name], tensor) for name, tensor in policy.copied_weights().items())
