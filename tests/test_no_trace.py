"""A measurement leaves no trace: every other figure of a run is bit-equal with and without it."""

from importlib.util import find_spec

import pytest
from helpers import SMALL, command, timeless, train_here

pytestmark = pytest.mark.engine
WORKLOAD = ("--steps", "3", "--lr", "1e-3", "--eval-every", "3", "--max-new-tokens", "7")
# Ten places for groups of four: some rollouts are unfinished at every update.
IN_FLIGHT = ("--inflight-groups", "6", "--max-num-seqs", "10")
MEASUREMENTS = ("--probe-every", "1", "--self-noise-every", "1", "--eval-with-trainer",
                *(["--tensorboard"] if find_spec("tensorboard") else []))
ARMS = {
    "parity": (),
    "in flight": IN_FLIGHT,
    "in flight, stale prefix cache": (*IN_FLIGHT, "--parity.no-explicit-runtime"),
    "V1's defaults": ("--parity.no-explicit-runtime", "--parity.no-processed-logprobs", "--parity.no-fp32-head"),
    "bfloat16, mask": ("--dtype", "bfloat16", "--top-p", "0.9"),
}
OWN = {"probe", "self_noise_abs_mean", "self_noise_max", "eval_reward_trainer", "eval_gap"}


@pytest.mark.parametrize("arm", ARMS)
def test_every_other_figure_is_equal_with_and_without_measurements(good, tmp_path, arm):
    rows = []
    for name, more in (("plain", ()), ("measured", MEASUREMENTS)):
        train_here(command(good, "--task {root}/task.py", *SMALL[:-2], *WORKLOAD, "--out", str(tmp_path / name),
                           *ARMS[arm], *more))  # fmt: skip
        rows.append(timeless(tmp_path / name))
    plain, measured = rows
    assert set().union(*measured) - set().union(*plain) == OWN
    if "in flight" in arm:
        assert max(row["staleness_mean"] for row in plain[1:]) > 0
    for before, after in zip(plain, measured, strict=True):
        differing = {name for name in before if before[name] != after[name]}
        assert not differing, f"step {before['step']}"
