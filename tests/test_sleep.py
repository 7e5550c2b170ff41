"""A sleep that loses what a GPU's level 2 loses: weights and KV cache are overwritten between `sleep` and `wake`."""

from collections.abc import Iterator

import pytest
from gpu_path import lossy_sleep
from helpers import close_live_engine, rows_of_run, timeless


@pytest.fixture
def sleeps(monkeypatch) -> Iterator[dict]:
    """From now on an engine sleeps as on a GPU."""
    close_live_engine()
    yield lossy_sleep.install(monkeypatch.setattr)
    close_live_engine()


IN_FLIGHT = "--inflight-groups 4 --max-num-seqs 12 --max-new-tokens 40 --temperature 2 --parity.no-inflight-keep "
JOBS = {
    "abort": IN_FLIGHT, "recompute": IN_FLIGHT + "--variants recompute",
    "versioned cache": "--prefix-cache versioned --block-size 32",
}  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("job", JOBS)
def test_a_run_whose_sleep_loses_weights_and_cache_has_the_same_metrics_as_one_that_keeps_them(
        good, tmp_path, sleeps, job):
    found = []
    for value in (None, float("nan")):
        sleeps.update(value=value, count=0)
        out = tmp_path / str(value)
        rows_of_run(good, out, "--task {root}/task.py --steps 5 --temperature 1.5 --group-size 4 --max-new-tokens 16"
                               f" --lr 1e-3 --eval-problems 4 {JOBS[job]}")  # fmt: skip
        found.append(timeless(out))
        assert sleeps["count"] == 5
    assert found[0] == found[1]
    assert (found[0][-1].get("tokens_wasted", 0) > 0) == (job == "abort")
    assert sum(row["updates"] for row in found[0][1:]) > 4
