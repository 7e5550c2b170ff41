"""A sleep that loses what a GPU's level 2 loses: weights and KV cache are overwritten between `sleep` and `wake`."""

import pytest
from gpu_path import lossy_sleep
from helpers import parametrize, read_json, rows_of_run, timeless

IN_FLIGHT = "--inflight-groups 4 --max-num-seqs 12 --max-new-tokens 40 --temperature 2 --parity.no-inflight-keep "
JOBS = {
    "abort": IN_FLIGHT, "recompute": IN_FLIGHT + "--variants recompute",
    "versioned cache": "--task {root}/long.py",
}  # fmt: skip


@pytest.mark.engine
@parametrize("job", JOBS)
def test_a_run_whose_sleep_loses_weights_and_cache_has_the_same_metrics_as_one_that_keeps_them(
        good, tmp_path, monkeypatch, job):
    words = ("--task {root}/task.py --steps 5 --temperature 1.5 --group-size 4 --max-new-tokens 16 --lr 1e-3"
             f" --eval-problems 4 {JOBS[job]}")  # fmt: skip
    rows_of_run(good, tmp_path / "keeps", words)
    sleeps = lossy_sleep.install(monkeypatch.setattr)
    rows_of_run(good, tmp_path / "loses", words)
    assert len(sleeps) == 5
    rows = timeless(tmp_path / "keeps")
    assert rows == timeless(tmp_path / "loses")
    assert (rows[-1].get("tokens_wasted", 0) > 0) == (job == "abort")
    assert sum(row["updates"] for row in rows[1:]) > 4
    assert read_json(tmp_path / "loses/config.json")["audit"]["enable_prefix_caching"] == (job == "versioned cache")
