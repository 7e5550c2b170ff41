"""Groups in flight: an evaluation leaves them as they are."""

import pytest
from helpers import (
    ROUNDING,
    command,
    policy_of,
    qwen2,
    rows,
    started,
    timeless,
    train_here,
)

from engine_adapter import Sampling
from rl import Policy
from verify import canary
from verify.errors import EngineStateError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("options", ["", "--parity.no-inflight-keep"])
def test_a_run_that_evaluates_after_each_step_is_the_same_as_one_that_evaluates_at_its_end(good, tmp_path, options):
    words = ("--task {root}/task.py --steps 6 --inflight-groups 6 --max-num-seqs 12 --max-new-tokens 24 --lr 1e-2"
             f" --eval-problems 3 --eval-samples 2 --temperature 1.3 --max-staleness 20 {options}")  # fmt: skip
    found = []
    for every in (1, 6):
        out = tmp_path / str(every)
        train_here(command(good, words, "--eval-every", str(every), "--out", str(out)))
        found.append([{name: value for name, value in row.items() if not name.startswith("eval_")}
                      for row in timeless(out)[1:]])  # fmt: skip
    assert found[0] == found[1]
    assert sum(row["updates"] > 0 and row["staleness_max"] > 0 for row in found[0]) > 2


def test_with_async_scheduling_an_evaluation_leaves_no_wrong_token(good, tmp_path):
    """A step is under way when it begins. The policy does not change, so that any mismatch is a wrong token."""
    words = ("--task {root}/task.py --steps 4 --inflight-groups 6 --max-num-seqs 12 --max-new-tokens 24 --lr 1e-12"
             " --eval-every 1 --eval-problems 3 --parity.no-uncached-runtime --parity.variants async-scheduling")
    train_here(command(good, words, "--out", str(tmp_path / "run")))
    found = rows(tmp_path / "run")[1:]
    assert max(row["staleness_max"] for row in found) > 0
    assert max(row["mismatch_max"] for row in found) < ROUNDING


def test_without_memory_for_one_more_row_an_evaluation_is_refused_and_nothing_is_lost(tmp_path):
    """Gemma 2's layers with a window are a group of their own, with blocks of the same pool."""
    policy = policy_of(tmp_path, "Gemma2")
    with started(str(tmp_path), policy, in_flight=True, block_size=32, kv_cache_gib=0.0006) as engine:
        # Of different lengths, so that few rows need a new block in the same step.
        rollouts = [engine.submit([5, 6, 7 + n] + [9] * 4 * n, 2, Sampling(1.0, 120), n)[0] for n in range(8)]
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        while pool.get_num_free_blocks() >= 2 * 5:  # a row has 160 tokens
            engine.step()
        assert pool.get_num_free_blocks() >= 5
        with pytest.raises(EngineStateError, match="more --kv-cache-gib or fewer --inflight-groups"), engine.holding():
            raise AssertionError("not reached")
        while engine.num_unfinished:
            engine.step()
        assert all(len(rollout.token_ids) == 120 for rollout in rollouts)


def test_where_held_requests_keep_their_places_fewer_others_run_beside_them(engine_folder, monkeypatch):
    """As with model runner V2, which a GPU has. A scheduler that gave all places away would find none free there."""
    monkeypatch.setattr("extras.inflight.keeps_places", lambda runner: True)
    with started(engine_folder, Policy(qwen2(tied=False)), in_flight=True, max_num_seqs=8) as engine:
        held = [rollout for n in range(2) for rollout in engine.submit([5, 6, 7 + n], 5, Sampling(1.0, 60), n)]
        engine.step()
        with engine.holding():
            others = engine.submit([9, 9], 4, Sampling(1.0, 5), 1)
            most = 0
            while not all(rollout.finish_reason for rollout in others):
                engine.step()
                most = max(most, len(engine.core.scheduler.running))
        assert most == 8 + canary.PROMPTS - 10
        engine.submit([5, 6], 2, Sampling(1.0, 60), 3)
        engine.step()
        with pytest.raises(EngineStateError, match="or no place, for an evaluation"), engine.holding():
            raise AssertionError("not reached")
        while engine.num_unfinished:
            engine.step()
        assert all(len(rollout.token_ids) == 60 for rollout in held)
