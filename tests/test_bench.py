"""`lab.bench phases`: the bare work computes each row once, and the bound counts the products of the bare work."""

from math import inf
from types import SimpleNamespace

import pytest
import torch
from helpers import qwen2
from torch.utils.flop_counter import FlopCounterMode

from config import Config
from engine_adapter import Rollout
from lab.bench import bare_training, bounds, machine_peaks, whole_groups
from rl import Batch, Policy, make_batch

GROUP_SIZE, RESPONSE = 4, 6


def batch_of(prompts: list[int], signal: list[bool]) -> Batch:
    """A group for each prompt length; those without signal have advantages of 0, and shorter responses."""
    rollouts, advantages = [], []
    for length, learns in zip(prompts, signal, strict=True):
        response = RESPONSE if learns else RESPONSE - 2
        prompt = torch.randint(3, 90, (length,)).tolist()
        for place in range(GROUP_SIZE):
            ids = torch.randint(3, 90, (response,)).tolist()
            rollouts.append(Rollout(prompt, 0, ids, [-1.0] * response, [1] * response, "stop"))
            advantages.append((-1.0) ** place * learns)
    return make_batch(rollouts, torch.tensor(advantages))


def products(model: torch.nn.Module, batch: Batch, config: Config, backward: bool) -> int:
    """Operations of the products with weight matrices, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        bare_training(model, batch, config, backward)
    counts = counter.get_flop_counts()["Global"]
    return counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)


@pytest.mark.parametrize("signal", [[True] * 4, [False] * 4, [True, False, False, True]])
@pytest.mark.parametrize("prefix_cache", ["off", "versioned"])
def test_the_bound_is_the_number_of_operations_of_the_bare_work(signal, prefix_cache):
    config = Config.of(num_prompts=4, group_size=GROUP_SIZE, prefix_cache=prefix_cache, block_size=16)
    model, batch = Policy(qwen2(tied=False)).model, batch_of([5, 9, 9, 5], signal)
    run = SimpleNamespace(config=config)
    found = bounds(run, model, batch, (1.0, inf))  # one operation a second: seconds are operations
    assert found["old_logprobs_s"] == products(model, batch, config, backward=False)
    assert found["update_s"] == pytest.approx(products(model, batch, config, backward=True), rel=1e-6)
    again = 2 * sum(each.weight.numel() for each in model.model.modules() if isinstance(each, torch.nn.Linear))
    again *= 0 if prefix_cache == "versioned" else 28 * (GROUP_SIZE - 1)  # prompts that the engine computes again
    assert found["generate_s"] == found["old_logprobs_s"] + again
    assert found["step_s"] == sum(found[name] for name in ("generate_s", "old_logprobs_s", "update_s"))


def test_sampling_takes_at_least_one_reading_of_the_weights_for_each_token():
    model, batch = Policy(qwen2(tied=False)).model, batch_of([5], [True])
    run = SimpleNamespace(config=Config.of(num_prompts=1, group_size=GROUP_SIZE))
    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    read = bounds(run, model, batch, (inf, 1.0))["generate_s"]
    assert read == RESPONSE * 4 * sum(weight.numel() for weight in weights)


def test_the_bare_work_takes_each_row_once_with_prompts_of_one_length_and_one_kind_of_signal():
    lengths, signal = [5, 9, 5, 2, 9, 5, 2, 5], [True, False, True, True, True, False, True, True]
    config = Config.of(num_prompts=8, group_size=GROUP_SIZE, micro_batch_tokens=100)
    batch = batch_of(lengths, signal)
    parts = [*whole_groups(batch, config.grpo)]
    assert torch.cat(parts).sort().values.tolist() == list(range(8 * GROUP_SIZE))
    for part in parts:
        rows = batch.rows(part)
        assert len(rows.prompt_lengths.unique()) == 1
        groups = rows.inputs[:, : rows.prompt_lengths[0]].unflatten(0, (-1, GROUP_SIZE))
        assert (groups == groups[:, :1]).all()  # each group is whole: its first row has the prompt of all
        assert rows.advantages.bool().view(-1, GROUP_SIZE).any(dim=1).unique().numel() == 1
        assert rows.inputs.numel() <= 100
        minibatches = {int(row) // (4 * GROUP_SIZE) for row in part}  # two of them, four groups each
        assert len(minibatches) == 1


def test_a_group_that_is_larger_than_a_micro_batch_is_still_whole():
    config = Config.of(num_prompts=2, group_size=GROUP_SIZE, micro_batch_tokens=1)
    parts = [*whole_groups(batch_of([5, 9], [True, True]), config.grpo)]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_peaks_are_operations_and_bytes_a_second():
    operations, bytes_read = machine_peaks(torch.ones(1))
    assert 1e9 < operations < 1e15
    assert 1e8 < bytes_read < 1e14
