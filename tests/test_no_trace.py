"""A measurement leaves no trace: every other figure of a run is bit-equal with and without it."""

from itertools import chain

import pytest
from helpers import parametrize, rows_of_run, timeless

pytestmark = pytest.mark.engine
WORKLOAD = ("--num-prompts 8 --group-size 4 --eval-problems 4 --steps 3 --lr 1e-3 --eval-every 3 --max-new-tokens 7"
            " --task {root}/task.py ")
# Ten places for groups of four: some rollouts are unfinished at every update.
IN_FLIGHT = "--inflight-groups 6 --max-num-seqs 10 "
# Prompts come again in later steps: a request of a measurement leaves blocks that later steps read.
STALE = "--task {root}/long.py --block-size 32 --parity.no-uncached-runtime "
MEASUREMENTS = " --probe-every 1 --eval-trainer-alone"
ARMS = {
    "parity": "",
    "in flight, stale prefix cache": IN_FLIGHT + STALE,
    "V1's defaults, stale prefix cache": STALE + "--parity.no-processed-logprobs --parity.no-fp32-head",
    "bfloat16, mask, versioned cache": "--task {root}/long.py --dtype bfloat16 --top-p 0.9",
}
OWN = {"probe", "eval_reward_trainer_alone", "eval_reward_trainer_alone_left_out"}


@parametrize("arm", ARMS)
def test_every_other_figure_is_equal_with_and_without_measurements(good, tmp_path, capsys, arm):
    options, found = WORKLOAD + ARMS[arm], []
    for name, more in ("plain", ""), ("measured", MEASUREMENTS):
        rows_of_run(good, tmp_path / name, options + more)
        found.append(timeless(tmp_path / name))
    assert "stale" not in arm or "no prompt is longer than a block" not in capsys.readouterr().out
    plain, measured = found
    assert "in flight" not in arm or max(row["staleness_mean"] for row in plain[1:]) > 0
    assert {*chain(*measured)} - {*chain(*plain)} == OWN
    assert arm != "parity" or measured[1]["probe"] == "parity"
    assert plain == [{name: row[name] for name in row if name not in OWN} for row in measured]
