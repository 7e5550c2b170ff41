"""`python -m probe compare` on the stored traces of three versions of vLLM, and on bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from examples.record_vllm import weights_of
from probe.__main__ import main
from probe.search import Probe, Readout
from probe.traces import load_traces
from rl import Policy

DATA = Path(__file__).parent / "data"
MODEL, RAW = str(DATA / "tiny-qwen2"), "semantics: raw log-probabilities"
V0, DEFAULT, FIXED, TODAY = (str(DATA / f"{name}.npz") for name in (
    "v0_0.8.5_fp32", "v1_0.18.1_fp32_default", "v1_0.18.1_fp32_fixes", "v1_0.32.0_fp32_fixes"))  # fmt: skip


def compare(before: str, after: str, options: tuple[str, ...] = ("--group", "t0.7")) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", before, after, "--model", MODEL, *options])
    return stop.value.code


@pytest.mark.parametrize("before, after, status, sentence", [
    (V0, DEFAULT, 1, f"=> worse: parity became {RAW}, mean |mismatch| SMALL -> 3.7e-01 nats"),
    (DEFAULT, FIXED, 0, f"=> better: {RAW} became parity, mean |mismatch| 3.7e-01 -> SMALL nats"),
    (FIXED, TODAY, 0, "=> unchanged: parity, mean |mismatch| SMALL -> SMALL nats"),
    (V0, TODAY, 0, "=> unchanged: parity, mean |mismatch| SMALL -> SMALL nats"),
])  # fmt: skip
def test_the_story_of_the_migration_in_four_sentences(before, after, status, sentence, capsys):
    assert compare(before, after) == status
    printed = re.sub(r"\d\.\de-0[5-7]", "SMALL", capsys.readouterr().out)  # the digits depend on the CPU
    assert sentence in printed
    assert ("logprobs_mode raw_logprobs -> processed_logprobs" in printed) == (before == DEFAULT)


def test_a_16_bit_head_alone_is_worse_than_parity_and_better_than_two_faults(capsys):
    both, head, fixed = (str(DATA / f"v1_0.32.0_bf16_{name}.npz") for name in ("default", "fixes", "fixes_headovr"))
    assert compare(both, head) == 0
    assert compare(fixed, head) == 1
    printed = capsys.readouterr().out
    assert "=> worse: parity became numerics: head in 16 bits in the engine, mean |mismatch| " in printed
    assert "; with it changed head hf_overrides -> model.\n" in printed


def changed(path: Path, source: str = FIXED, drop: str = "", **changes) -> str:
    """A copy of a stored trace with one group, some arrays replaced, and keys of meta changed or dropped."""
    with numpy.load(source) as archive:
        arrays = {name: archive[name] for name in ("prompt_ids", "t0.7/tokens", "t0.7/logprobs")}
        meta = json.loads(str(archive["meta"]))
    meta |= {"groups": {"t0.7": {"temperature": 0.7}}} | changes.pop("meta", {})
    meta = {key: value for key, value in meta.items() if key not in drop}
    arrays |= changes | {"meta": numpy.array(json.dumps(meta))}
    numpy.savez(path, **{name: array for name, array in arrays.items() if name != drop})
    return str(path)


# ------------------------------------------------------------------------------------------------ worse and better
def logprobs(policy: Policy, trace) -> torch.Tensor:
    probe = Probe(policy, trace, [])
    return probe.now.rounded[Readout()]


BF16 = str(DATA / "v1_0.32.0_bf16_fixes_headovr.npz")


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory):
    """A copy of 16 rows of a stored trace whose values are `change(reported, the trainer's)`, both (16, 64) float64."""
    policies = {name: Policy.load(MODEL, getattr(torch, name), "cpu") for name in ("float32", "bfloat16")}

    def write(change=lambda reported, _: reported, source: str = FIXED) -> str:
        (trace,) = [each for each in load_traces(source) if each.name == "t0.7"]
        trace = replace(trace, rollouts=trace.rollouts[:16])
        ours = logprobs(policies[trace.meta["dtype"]], trace).reshape(16, 64).numpy()
        with numpy.load(source) as archive:
            prompts, tokens = (archive[name][:16] for name in ("prompt_ids", "t0.7/tokens"))
        values = change(numpy.array([rollout.logprobs for rollout in trace.rollouts]), ours)
        path = tmp_path_factory.mktemp("rewritten") / "trace.npz"
        return changed(path, source, prompt_ids=prompts, **{"t0.7/tokens": tokens, "t0.7/logprobs": values})

    with torch.no_grad():
        yield write


def nan_at(number: int):
    """The first values of the trace are NaN."""
    return lambda reported, _: numpy.where(numpy.arange(reported.size).reshape(reported.shape) < number, numpy.nan,
                                           reported)  # fmt: skip


def test_parity_in_bfloat16_is_worse_than_parity_in_float32(capsys):
    assert compare(FIXED, BF16) == 1
    assert "=> worse: parity, mean |mismatch| " in capsys.readouterr().out
    assert compare(BF16, FIXED) == 0
    assert "=> better: parity, mean |mismatch| " in capsys.readouterr().out


def test_a_fault_in_tokens_that_the_second_trace_no_longer_has_is_no_improvement(rewritten, tmp_path, capsys):
    """The values are wrong from token 40 on; the second trace ends before."""
    late = rewritten(lambda reported, _: reported + 0.5 * (numpy.arange(64) >= 40))
    with numpy.load(late) as archive:
        prompts, tokens, values = (archive[name] for name in ("prompt_ids", "t0.7/tokens", "t0.7/logprobs"))
    short = changed(tmp_path / "short.npz", late, prompt_ids=prompts,
                    **{"t0.7/tokens": tokens[:, :32], "t0.7/logprobs": values[:, :32]})  # fmt: skip
    for pair, left in (((late, short), "512 of the first, 0 of the second"),
                       ((short, late), "0 of the first, 512 of the second")):  # fmt: skip
        assert compare(*pair) == 0
        printed = capsys.readouterr().out
        assert "=> unchanged: parity" in printed
        assert f"Left out are tokens that only one of them has: {left}." in printed
    assert compare(rewritten(), late) == 1


@pytest.mark.parametrize("before, after, word", [
    (100, 101, "worse"), (2, 2, "unchanged"), (0, 1, "worse"), (1, 0, "better"), (1, 1024, "worse"),
])
def test_more_values_that_are_not_finite_are_worse(rewritten, capsys, before, after, word):
    assert compare(rewritten(nan_at(before)), rewritten(nan_at(after))) == int(word == "worse")
    printed = capsys.readouterr().out
    assert f"=> {word}: " in printed
    assert f", values that are not finite {before} -> {after};" in printed


@pytest.mark.parametrize("share, status, word", [(0.7, 1, "worse"), (0.9, 0, "unchanged"), (1.2, 0, "better")])
def test_a_cause_for_an_unexplained_mismatch_is_no_improvement_if_the_mismatch_grew(
    rewritten, capsys, share, status, word
):
    """`share` of the distance from the processed to the raw log-probabilities is reported: no hypothesis has that."""
    unexplained, raw = rewritten(lambda raw, ours: ours + share * (raw - ours), DEFAULT), rewritten(source=DEFAULT)
    assert compare(unexplained, raw) == status
    assert f"=> {word}: unexplained became {RAW}" in capsys.readouterr().out


def test_exact_is_better_than_parity_and_parity_worse_than_exact(rewritten, capsys):
    exact, parity = rewritten(lambda _, ours: ours), rewritten()
    for pair, status, text in (((exact, parity), 1, "worse: exact became parity"),
                               ((exact, exact), 0, "unchanged: exact"),
                               ((parity, exact), 0, "better: parity became exact")):  # fmt: skip
        assert compare(*pair) == status
        assert f"=> {text}, mean |mismatch| " in capsys.readouterr().out


def test_the_same_cause_with_a_larger_mismatch_is_worse(rewritten, capsys):
    few, many = (rewritten(lambda reported, _, rows=rows: reported + 0.05 * (numpy.arange(16)[:, None] < rows))
                 for rows in (1, 3))  # fmt: skip
    for pair, status, word in ((few, many), 1, "worse"), ((many, few), 0, "better"):
        assert compare(*pair) == status
        assert f"=> {word}: inference path: wrong requests among right ones, mean |mism" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ bad input
def other(name: str, kind=numpy.roll) -> numpy.ndarray:
    with numpy.load(FIXED) as archive:
        return kind(archive[name], 1, 0)


@pytest.mark.parametrize("change, complaint", [
    (dict(prompt_ids=other("prompt_ids")),
     "the traces must be of one workload, the prompts or the sampling of t0.7 differ"),
    (dict(meta={"groups": {"t0.7": {"temperature": 0.8}}}),
     "the traces must be of one workload, the prompts or the sampling of t0.7 differ"),
    (dict(drop="t0.7/logprobs"), "{path}: 'logprobs' is missing (docs/audit.md has the layout)"),
    (dict(meta={"format": 2}), "{path}: meta.format must be 1 (newer ones need a newer probe), got 2"),
    (dict(meta={"dtype": "float8"}), "loading the model in {model} failed: AttributeError: module 'torch' has no"),
    (dict(meta={"model": {"weights": "b"}}),
     "model must be that of the trace, the weight files in {model} are not those that it names"),
])  # fmt: skip
def test_bad_input_is_one_sentence(tmp_path, capsys, change, complaint):
    before = changed(tmp_path / "before.npz", meta={"model": {"weights": weights_of(MODEL)}})
    path = changed(tmp_path / "after.npz", **change)
    assert compare(before, path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {complaint.format(model=MODEL, path=path)}")
    assert error.count("\n") == 1


def test_a_truncated_trace_and_a_group_of_one_trace_alone_are_one_sentence(tmp_path, capsys):
    whole, cut = Path(FIXED).read_bytes(), tmp_path / "cut.npz"
    for size in (0, 100, len(whole) - 10):
        cut.write_bytes(whole[:size])
        assert compare(FIXED, str(cut)) == 2
        error = capsys.readouterr().err
        assert re.match(rf"error: {cut}: .*has the layout\)\n$", error), error
    assert compare(FIXED, TODAY, ("--group", "t2")) == 2
    assert "both traces must have t2, the first has t0.7, t1," in capsys.readouterr().err
    assert compare(FIXED, changed(tmp_path / "one.npz"), ()) == 2
    assert ", the second t0.7; try --group" in capsys.readouterr().err
