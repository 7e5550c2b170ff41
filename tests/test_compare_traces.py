"""`python -m probe compare` on the stored traces of three versions of vLLM, and on bad input."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from examples.record_vllm import weights_of
from probe.__main__ import main
from probe.traces import Trace, load_traces, save_trace

DATA = Path(__file__).parent / "data"
MODEL = str(DATA / "tiny-qwen2")
RAW, HALF = "semantics: raw log-probabilities", "numerics: head in 16 bits in the engine"
V0, DEFAULT, FIXED, TODAY, BOTH, HEAD, BF16 = (str(DATA / f"{name}.npz") for name in (
    "v0_0.8.5_fp32", "v1_0.18.1_fp32_default", "v1_0.18.1_fp32_fixes", "v1_0.32.0_fp32_fixes",
    "v1_0.32.0_bf16_default", "v1_0.32.0_bf16_fixes", "v1_0.32.0_bf16_fixes_headovr"))  # fmt: skip


def compare(before: str, after: str, options: tuple[str, ...] = ("--group", "t0.7")) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["compare", before, after, "--model", MODEL, *options])
    return stop.value.code


def sixteen_rows(source: str) -> Trace:
    (trace,) = [each for each in load_traces(source) if each.name == "t0.7"]
    return replace(trace, rollouts=trace.rollouts[:16])


# ------------------------------------------------------------------------------------------------ worse and better
# Copies of 16 rows of a stored trace: a factor of the reported values, which no hypothesis has, and how many rows are
# wrong.
COPIES = {
    "raw": (DEFAULT, 1.0, 0), "far": (FIXED, 0.8, 0), "near": (FIXED, 0.9, 0),
    "1 wrong": (FIXED, 1.0, 1), "3 wrong": (FIXED, 1.0, 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The path of a stored trace, or of a copy."""
    @cache
    def write(name: str) -> str:
        if name not in COPIES:
            return name
        source, factor, wrong = COPIES[name]
        trace = sixteen_rows(source)
        rollouts = [replace(rollout, logprobs=[factor * each + 0.05 * (row < wrong) for each in rollout.logprobs])
                    for row, rollout in enumerate(trace.rollouts)]  # fmt: skip
        path = str(tmp_path_factory.mktemp("copy") / "trace.npz")
        save_trace(path, replace(trace, rollouts=rollouts))
        return path

    return write


@pytest.mark.parametrize("before, after, word, details", [
    # The story of the migration.
    (V0, DEFAULT, "worse", f"parity became {RAW}, mean |mismatch| SMALL -> 3.7e-01 nats"),
    (DEFAULT, FIXED, "better", f"{RAW} became parity, mean |mismatch| 3.7e-01 -> SMALL nats, error ..."
                               " logprobs_mode raw_logprobs -> processed_logprobs"),
    (FIXED, TODAY, "unchanged", "parity, mean |mismatch| SMALL -> SMALL nats"),
    # A 16-bit head alone is worse than parity and better than two faults.
    (BOTH, HEAD, "better", f"{RAW}; and {HALF} became {HALF}, mean"),
    (BF16, HEAD, "worse", f"parity became {HALF}, mean ...; with it changed head hf_overrides -> model.\n"),
    (BF16, FIXED, "better", "parity, mean"),
    # The same cause with a larger mismatch.
    ("1 wrong", "3 wrong", "worse", "inference path: wrong requests among right ones, mean"),
    # A name for an unexplained mismatch is no improvement if the mismatch grew by more than 1.3 times.
    ("near", "raw", "worse", f"unexplained became {RAW}"),
    ("far", "raw", "better", f"unexplained became {RAW}"),
    ("raw", "far", "worse", f"{RAW} became unexplained"),
])  # fmt: skip
def test_the_second_trace_is_worse_better_or_unchanged(stored, capsys, before, after, word, details):
    assert compare(stored(before), stored(after)) == int(word == "worse")
    printed = re.sub(r"\d\.\de-0[5-7]", "SMALL", capsys.readouterr().out)  # the digits depend on the CPU
    assert re.search(f"=> {word}: " + ".*".join(map(re.escape, details.split("..."))), printed), printed


# ------------------------------------------------------------------------------------------------ bad input
WHOLE, DIFFERENT = Path(FIXED).read_bytes(), "of one workload, the prompts or the sampling of t0.7 differ"
GROUP = ("--group", "t0.7")
BAD = [  # what the second trace is, a file or how a trace is changed; the options; the complaint
    ({"rollouts": lambda rollouts: rollouts[::-1]}, GROUP, DIFFERENT),
    ({"sampling": lambda sampling: replace(sampling, temperature=0.8)}, GROUP, DIFFERENT),
    ({"meta": lambda meta: meta | {"dtype": "float8"}}, GROUP,
     "after.npz: meta.dtype must be float32, bfloat16 or float16"),
    ({"meta": lambda meta: meta | {"model": {"weights": "b"}}}, GROUP,
     f"model must be that of the trace, the weight files in {MODEL} are not those that it names"),
    (b"", GROUP, "has the layout)"), (WHOLE[:-10], GROUP, "has the layout)"),
    (WHOLE, ("--group", "t2"), "group must be one of those in "), ({}, (), ", the second t0.7; try --group"),
]  # fmt: skip


@pytest.mark.parametrize("second, options, complaint", BAD)
def test_bad_input_is_one_sentence(tmp_path, capsys, second, options, complaint):
    trace, after, before = sixteen_rows(FIXED), tmp_path / "after.npz", FIXED
    trace.meta["model"] = {"weights": weights_of(MODEL)}
    if isinstance(second, bytes):
        after.write_bytes(second)
    else:
        changed = {name: change(getattr(trace, name)) for name, change in second.items()}
        save_trace(str(after), replace(trace, **changed))
    if second and isinstance(second, dict):
        before = str(tmp_path / "before.npz")
        save_trace(before, trace)
    assert compare(before, str(after), options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert complaint in error
    assert error.count("\n") == 1
