"""An evaluation leaves the groups in flight as they are, bit for bit."""

import pytest
from helpers import command, qwen2, rows, started, train_here

from engine_adapter import EngineStateError
from rl import Policy
from rollouts import Sampling


@pytest.mark.engine
@pytest.mark.parametrize("options", [
    "--engine vllm", "--engine shared", "--engine vllm --parity.no-inflight-keep",
    "--engine vllm --parity.no-inflight-keep --parity.variants recompute",
])  # fmt: skip
def test_a_run_that_evaluates_after_each_step_is_the_same_as_one_that_evaluates_at_its_end(good, tmp_path, options):
    words = ("--task {root}/task.py --steps 6 --inflight-groups 6 --max-num-seqs 12 --max-new-tokens 24 --lr 1e-2"
             f" --eval-problems 3 --eval-samples 2 --temperature 1.3 --max-staleness 20 {options}")  # fmt: skip
    found = []
    for every in (1, 3, 6):
        out = tmp_path / str(every)
        train_here(command(good, words, "--eval-every", str(every), "--out", str(out)))
        found.append([{name: value for name, value in row.items() if not name.startswith("eval_")
                       and not name.endswith(("_s", "_gib"))} for row in rows(out)[1:]])  # fmt: skip
    assert found[0] == found[1] == found[2]
    assert sum(row["updates"] > 0 and row["staleness_max"] > 0 for row in found[0]) > 2


@pytest.mark.engine
def test_without_memory_for_one_more_row_an_evaluation_is_refused_and_nothing_is_lost(tmp_path):
    model = qwen2(tied=False)
    model.save_pretrained(tmp_path)
    with started(str(tmp_path), Policy(model), block_size=32, kv_cache_gib=0.0006) as engine:
        rollouts = [engine.submit([5, 6, 7 + n], 2, Sampling(1.0, 150), n)[0] for n in range(8)]
        while engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= 5:  # 160 tokens
            engine.step()
        with pytest.raises(EngineStateError, match="more --kv-cache-gib or fewer --inflight-groups"), engine.holding():
            raise AssertionError("not reached")
        while engine.num_unfinished:
            engine.step()
        assert all(len(rollout.token_ids) == 150 for rollout in rollouts)
