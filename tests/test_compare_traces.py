"""`python -m probe compare` on 8 rows of the stored traces of three versions of vLLM."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TINY, exit_status, refusal, stored

from examples.record_vllm import weights_of
from probe.__main__ import main
from probe.traces import save_trace

RAW = "semantics: raw log-probabilities"
WRONG = "inference path: wrong requests among right ones"
FIXED = "v1_0.18.1_fp32_fixes"


def copy_of(path: Path, source: str, factor: str = "1", wrong: str = "0", **changes) -> Path:
    """8 rows of a stored trace, their reported values times a factor, which no hypothesis has, and some rows wrong."""
    trace = stored(source)["t0.7"]
    rollouts = [replace(rollout, logprobs=[float(factor) * value + 0.05 * (row < int(wrong))
                                           for value in rollout.logprobs])
                for row, rollout in enumerate(trace.rollouts[:8])]  # fmt: skip
    trace = replace(trace, rollouts=rollouts, meta=trace.meta | {"model": {"weights": weights_of(TINY)}})
    changed = {name: change(getattr(trace, name)) for name, change in changes.items()}
    save_trace(str(path), replace(trace, **changed))
    return path


# Two stored traces, if changed with factor and number of wrong rows; the word, and parts of the sentence.
STORIES = """v0_0.8.5_fp32 | v1_0.18.1_fp32_default | worse | parity became {RAW}; with it changed ...
v1_0.18.1_fp32_default | v1_0.18.1_fp32_fixes | better | {RAW} became parity; with it changed logprobs_mode \
raw_logprobs -> processed_logprobs
v1_0.18.1_fp32_fixes | v1_0.32.0_fp32_fixes | unchanged | parity; with it
# A new cause whose mismatch is not larger, and the same cause with a larger one.
v1_0.18.1_fp32_default | v1_0.18.1_fp32_default 1 1 | worse | {RAW} became {RAW}; and {WRONG}
v1_0.18.1_fp32_fixes 1 1 | v1_0.18.1_fp32_fixes 1 3 | worse | {WRONG}; with it
# A name for an unexplained mismatch is no improvement if the mismatch grew by more than 1.3 times.
v1_0.18.1_fp32_fixes 0.9 | v1_0.18.1_fp32_default | worse | unexplained became {RAW}
v1_0.18.1_fp32_fixes 0.8 | v1_0.18.1_fp32_default | better | unexplained became {RAW}"""


@pytest.mark.parametrize("story", [line for line in STORIES.splitlines() if line[0] != "#"])
def test_the_second_trace_is_worse_better_or_unchanged(tmp_path, capsys, story):
    *traces, word, details = story.format(RAW=RAW, WRONG=WRONG).split(" | ")
    one, two = (copy_of(tmp_path / f"{name}.npz", *trace.split()) for name, trace in zip("ab", traces, strict=True))
    assert exit_status(main, ["compare", str(one), str(two), "--model", TINY]) == int(word == "worse")
    printed = capsys.readouterr().out
    assert re.search(f"=> {word}: " + ".*".join(map(re.escape, details.split("..."))), printed), printed


DIFFERENT = "of one workload, the prompts or the sampling of t0.7 differ"


@pytest.mark.parametrize("changes, complaint", [
    ({"rollouts": lambda rollouts: rollouts[::-1]}, DIFFERENT),
    ({"meta": lambda meta: meta | {"model": {"weights": "b"}}},
     f"model must be that of the trace, the weight files in {TINY} are not those that it names"),
    ({"name": lambda name: "other"}, "the first has t0.7, the second other; try --group"),
])  # fmt: skip
def test_traces_that_cannot_be_compared_are_refused_in_one_sentence(tmp_path, capsys, changes, complaint):
    before, after = copy_of(tmp_path / "one.npz", FIXED), copy_of(tmp_path / "two.npz", FIXED, **changes)
    assert complaint in refusal(["compare", str(before), str(after), "--model", TINY], capsys, main)
