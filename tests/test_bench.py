"""lab.bench: the bare work computes each row once, and no more than the products that it needs."""

from dataclasses import replace

import pytest
import torch
from helpers import close_live_engine, command, config_of, qwen2, rows, train_here
from torch.utils.flop_counter import FlopCounterMode

from lab.bench import bare_training, main
from lab.cells import METRICS, STUDIES
from rl import Batch, Policy, make_batch
from rollouts import Rollout

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
    return replace(make_batch(rollouts), advantages=torch.tensor(advantages)[:, None])


@pytest.mark.parametrize("signal", [[True] * 4, [False] * 4, [True, False, False, True]])
def test_the_bare_work_has_the_products_of_prompts_once_and_of_responses(signal):
    """Also in parts: 120 positions are at most two groups."""
    grpo = config_of(num_prompts=4, group_size=GROUP_SIZE, num_minibatches=1, micro_batch_tokens=120).grpo
    model, prompts = Policy(qwen2(tied=False)).model, [5, 5, 5, 9]
    body = sum(each.weight.numel() for each in model.model.modules() if isinstance(each, torch.nn.Linear))
    tokens = [GROUP_SIZE * (RESPONSE if learns else RESPONSE - 2) for learns in signal]
    groups = [2 * body * (prompt + count - GROUP_SIZE) + 2 * model.lm_head.weight.numel() * count
              for prompt, count in zip(prompts, tokens, strict=True)]
    learnt = sum(group for group, learns in zip(groups, signal, strict=True) if learns)
    for backward, expected in ((False, sum(groups)), (True, sum(groups) + 2 * learnt)):
        with FlopCounterMode(display=False) as counter:
            bare_training(model, batch_of(prompts, signal), grpo, backward)
        counts = counter.get_flop_counts()["Global"]
        found = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["vllm", "shared"])
def test_each_step_of_a_benchmark_has_the_seconds_of_its_bare_work(good, engine):
    """In bfloat16 the bare gradients go to the fp32 masters, so they must not reach the next step."""
    words, found = f"--task {{root}}/task.py --steps 3 --lr 1e-12 --engine {engine} --dtype bfloat16", []
    for program, name in ((main, f"bench-{engine}"), (train_here, f"train-{engine}")):
        close_live_engine()
        program(command(good, words, "--out", str(good / name)))
        found.append(rows(good / name))
    steps, without = found
    assert [row["grad_norm"] for row in steps] == [row["grad_norm"] for row in without if row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3]
    names = *STUDIES["bench"].metrics, "start_s", "wake_s", "freed", "generate_formula", "update_formula"
    assert None not in [METRICS[name].measure(steps) for name in names]
