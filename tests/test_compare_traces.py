"""`python -m probe compare` on the stored traces of three versions of vLLM, and on bad input."""

import json
import re
from pathlib import Path

import numpy
import pytest

from examples.record_vllm import weights_of
from probe.__main__ import main

DATA = Path(__file__).parent / "data"
MODEL, RAW = str(DATA / "tiny-qwen2"), "semantics: raw log-probabilities"
V0, DEFAULT, FIXED, TODAY = (str(DATA / f"{name}.npz") for name in (
    "v0_0.8.5_fp32", "v1_0.18.1_fp32_default", "v1_0.18.1_fp32_fixes", "v1_0.32.0_fp32_fixes"))  # fmt: skip


def compare(before: str, after: str, *more: str, model: str = MODEL, group: str = "t0.7") -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", before, after, "--model", model, "--group", group, *more])
    return stop.value.code


@pytest.mark.parametrize("before, after, status, sentence", [
    (V0, DEFAULT, 1, f"=> worse: parity became {RAW}, mean |mismatch| 2.3e-06 -> 3.7e-01 nats"),
    (DEFAULT, FIXED, 0, f"=> better: {RAW} became parity, mean |mismatch| 3.7e-01 -> 2.4e-06 nats"),
    (FIXED, TODAY, 0, "=> unchanged: parity, mean |mismatch| 2.4e-06 -> 2.3e-06 nats"),
    (V0, TODAY, 0, "=> unchanged: parity, mean |mismatch| 2.3e-06 -> 2.3e-06 nats"),
])  # fmt: skip
def test_the_story_of_the_migration_in_four_sentences(before, after, status, sentence, capsys):
    assert compare(before, after) == status
    printed = capsys.readouterr().out
    assert sentence in printed
    assert ("logprobs_mode raw_logprobs -> processed_logprobs" in printed) == (before == DEFAULT)


def test_a_16_bit_head_alone_is_worse_than_parity_and_better_than_two_faults(tmp_path, capsys):
    both, head, fixed = (str(DATA / f"v1_0.32.0_bf16_{name}.npz") for name in ("default", "fixes", "fixes_headovr"))
    assert compare(both, head) == 0
    assert compare(fixed, head, "--json", str(tmp_path / "out.json")) == 1
    (record,) = json.loads((tmp_path / "out.json").read_text())
    assert (record["change"], record["before"]["status"], record["after"]["status"]) == ("worse", "parity", "mismatch")
    assert record["settings"] == {"head": ["hf_overrides", "model"]}
    assert "became numerics: head in 16 bits in the engine" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ bad input
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


def other(name: str, kind=numpy.roll) -> numpy.ndarray:
    with numpy.load(FIXED) as archive:
        return kind(archive[name], 1, 0)


@pytest.mark.parametrize("change, complaint", [
    (dict(meta={"model": {"config": {"hidden_size": 64}}}),
     "model must be that of the trace, whose hidden_size is 64; {model} has 128"),
    (dict(prompt_ids=other("prompt_ids")), "the traces must be of one workload, the prompts of t0.7 differ"),
    (dict(meta={"groups": {"t0.7": {"temperature": 0.8}}}),
     "the traces must be of one workload, the sampling of t0.7 differs"),
    (dict(drop="t0.7/logprobs"), "{path}: 'logprobs' is missing (docs/trace-format.md has the layout)"),
    (dict(drop=("vllm", "engine")),
     "meta.versions must name the engine's version (else a comparison says nothing), the second trace has none"),
    (dict(meta={"format": 2}), "{path}: meta.format must be 1 (newer ones need a newer probe), got 2"),
    (dict(meta={"dtype": "float8"}), "meta.dtype of a trace must be one of float32, bfloat16, float16, got float8"),
    (dict(meta={"model": {"weights": "b"}}), "the traces must be of one model, their weight files differ"),
])  # fmt: skip
def test_bad_input_is_one_sentence(tmp_path, capsys, change, complaint):
    before = changed(tmp_path / "before.npz", meta={"model": {"weights": weights_of(MODEL)}})
    path = changed(tmp_path / "after.npz", **change)
    assert compare(before, path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {complaint.format(model=MODEL, path=path)}")
    assert error.count("\n") == 1


def test_other_weights_of_the_same_size_are_refused(tmp_path, capsys):
    traces = [changed(tmp_path / name, meta={"model": {"weights": "b"}}) for name in ("one.npz", "two.npz")]
    assert compare(*traces) == 2
    assert f"the weight files in {MODEL} are not those that it names" in capsys.readouterr().err


def test_a_truncated_trace_and_an_unknown_group_are_one_sentence(tmp_path, capsys):
    whole, cut = Path(FIXED).read_bytes(), tmp_path / "cut.npz"
    for size in (0, 100, len(whole) - 10):
        cut.write_bytes(whole[:size])
        assert compare(FIXED, str(cut)) == 2
        error = capsys.readouterr().err
        assert re.match(rf"error: {cut}: .*has the layout\)\n$", error), error
    assert compare(FIXED, TODAY, group="t2") == 2
    assert "the traces must have a group in common named t2, the first has t0.7, t1," in capsys.readouterr().err
