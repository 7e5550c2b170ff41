"""lab.bench: the bare work computes each row once, and no more than the products that it needs."""

from dataclasses import replace

import pytest
import torch
from helpers import close_live_engine, command, config_of, qwen2, rows, train_here
from torch.utils.flop_counter import FlopCounterMode

from engine_adapter import Rollout
from lab import profile
from lab.bench import bare_training, main
from lab.cells import METRICS, STUDIES
from rl import Policy, make_batch


def test_the_bare_work_has_the_products_of_prompts_once_and_of_responses():
    """Of three groups the second has no signal, and 120 positions are at most two groups."""
    config = config_of(num_prompts=3, group_size=4, num_minibatches=1, micro_batch_tokens=120)
    groups = [(5, 6), (5, 4), (9, 6)]  # length of the prompt, of a response
    rollouts = [Rollout([5 + place] * prompt, 0, [6] * tokens, [-1.0] * tokens)
                for place, (prompt, tokens) in enumerate(groups) for _ in range(4)]  # fmt: skip
    advantages = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(4)[:, None]
    batch, model = replace(make_batch(rollouts), advantages=advantages), Policy(qwen2()).model
    body = sum(each.weight.numel() for each in model.model.modules() if isinstance(each, torch.nn.Linear))
    head = model.lm_head.weight.numel()
    work = [2 * body * (prompt + 4 * (tokens - 1)) + 2 * head * 4 * tokens for prompt, tokens in groups]
    for backward, expected in ((False, sum(work)), (True, sum(work) + 2 * (work[0] + work[2]))):
        with FlopCounterMode(display=False) as counter:
            bare_training(model, batch, config, backward)
        counts = counter.get_flop_counts()["Global"]
        products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
        assert products == pytest.approx(expected, rel=1e-6)


@pytest.mark.engine
def test_each_step_of_a_benchmark_has_the_seconds_of_its_bare_work(good, tmp_path):
    """In bfloat16 the bare gradients go to the fp32 masters, so they must not reach the next step."""
    words, found = "--task {root}/task.py --steps 3 --lr 1e-12 --dtype bfloat16", []
    for program, name in (main, "bench"), (train_here, "train"):
        close_live_engine()
        program(command(good, words, "--out", str(tmp_path / name)))
        found.append(rows(tmp_path / name))
    steps, without = found
    assert [row["grad_norm"] for row in steps] == [row["grad_norm"] for row in without if row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3]
    names = *STUDIES["bench"].metrics, "start_s", "wake_s", "freed", "generate_formula", "update_formula"
    assert None not in [METRICS[name].measure(steps) for name in names]
    for row in steps:
        program, vllm, bare = (row[f"{name}_us"] * row["tokens"] / 1e6 for name in ("program", "vllm", "bare"))
        assert min(program, vllm, bare) > 0 and program + vllm < row["generate_s"] and bare < row["bare_generate_s"]


@pytest.mark.engine
def test_a_profile_names_operations_and_functions_of_decode_steps_and_an_update(good, tmp_path):
    close_live_engine()
    profile.main(command(good, f"--task {{root}}/task.py --out {tmp_path}/run --max-new-tokens 24 --temperature 2"))
    text = (tmp_path / "run" / "profile.txt").read_text()
    for part in ("8 decode steps of 8: ", "unified_attention", "update_from_output", "an update: ", "AdamW"):
        assert part in text
