"""What a fork adds: an objective is a surrogate, an advantage and one row; a backend fix is one row of SETTINGS."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import tyro
from fixes import wanted_settings, with_settings
from helpers import close_live_engine, command, qwen2

from config import Config, ParityFlags
from engine_adapter import SETTINGS, AuditError, Engine, Setting
from objectives import OBJECTIVES, Clip, Objective, TokenLoss
from rl import Batch, Policy
from train import build, prepare, train_step


def masked_sequences(logprobs: torch.Tensor, _old: torch.Tensor, batch: Batch, clip: Clip) -> TokenLoss:
    """-sg(r) A logprobs with r to the engine's policy, without rows whose geometric mean of r is above the bound."""
    log_ratio = (logprobs - batch.behavior_logprobs).detach() * batch.mask  # (B, T)
    length = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    outside = (log_ratio.sum(dim=1, keepdim=True) / length > math.log1p(clip[1])).expand_as(batch.mask)
    loss = -log_ratio.exp() * batch.advantages[:, None] * logprobs * batch.mask
    return TokenLoss(loss.masked_fill(outside, 0.0), outside)


def leave_one_out(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """R minus the mean of the other rewards of the group."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(dim=1, keepdim=True)) * group_size / (group_size - 1)).flatten()


@pytest.mark.parametrize("row", [
    Objective(masked_sequences), Objective(OBJECTIVES["grpo"].surrogate, "sequence", leave_one_out),
], ids=["a surrogate of the behaviour policy", "an advantage of its own"])  # fmt: skip
def test_a_new_objective_trains_with_one_row(row, good, tmp_path):
    OBJECTIVES["mine"] = row
    words = command(good, f"--out {tmp_path}/run --engine transformers --task {good}/task.py --lr 1e-2 --temperature 2")
    try:
        run = prepare(tyro.cli(Config, args=words).but(objective="mine"))
        live, step = build(run)
        before = live.policy.copied_weights()
        metrics, batch, _ = train_step(run, live, step)
    finally:
        del OBJECTIVES["mine"]
    assert metrics["updates"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in live.policy.copied_weights().items())
    rewards = torch.tensor([float(a) for a in batch.advantages.view(-1, 2).sum(dim=1)])  # groups of two
    assert rewards.abs().max() < 1e-5  # both advantages sum to 0 in a group


@dataclass(frozen=True)
class Flags(ParityFlags):
    fcfs: bool = True


ROW = Setting("fcfs", "scheduling_policy", "fcfs", "priority",
              lambda engine: engine.llm.vllm_config.scheduler_config.policy)  # fmt: skip


def test_a_setting_in_a_dictionary_keeps_the_other_entries_of_the_dictionary():
    row = Setting("fcfs", "compilation_config.cudagraph_num_of_warmups", 2, None, lambda _engine: 2)
    given = {"compilation_config": {"mode": 0}, "seed": 1}
    SETTINGS.append(row)
    try:
        arguments = with_settings(given, wanted_settings(Flags(), torch.float32))
    finally:
        SETTINGS.remove(row)
    assert arguments["compilation_config"] == {"mode": 0, "cudagraph_num_of_warmups": 2}
    assert (arguments["seed"], arguments["logprobs_mode"]) == (1, "processed_logprobs")
    assert given == {"compilation_config": {"mode": 0}, "seed": 1}


@contextmanager
def setting(row: Setting) -> Iterator[None]:
    close_live_engine()
    SETTINGS.append(row)
    try:
        yield
    finally:
        SETTINGS.remove(row)
        close_live_engine()


@pytest.mark.engine
def test_a_new_backend_fix_is_one_row_and_is_read_back(folders):
    contract = {name: tensor.shape for name, tensor in Policy(qwen2(tied=False)).weights().items()}
    for on, value in ((True, "fcfs"), (False, "priority")):
        with setting(ROW):
            engine = Engine(folders[False], contract, Flags(fcfs=on), max_model_len=64)
            assert engine.settings["scheduling_policy"] == value
    not_in_force = ROW._replace(on="priority", read=lambda _: "fcfs")  # as if vLLM had ignored the argument
    with setting(not_in_force), pytest.raises(AuditError, match="scheduling_policy is 'fcfs', not 'priority'"):
        Engine(folders[False], contract, Flags(), max_model_len=64)
