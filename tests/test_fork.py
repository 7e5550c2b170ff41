"""What a fork adds: an objective is a surrogate, an advantage and one row; a backend fix is one row of SETTINGS."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from helpers import PYTHON, close_live_engine, qwen2

from config import Config, ParityFlags
from engine_adapter import SETTINGS, AuditError, Engine, Setting
from objectives import OBJECTIVES, Clip, Measured, Objective, TokenLoss
from rl import Policy
from train import build, load_policy, prepare, start_engine, train_step


def policy_gradient(
    logprobs: torch.Tensor, _old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, _clip: Clip
) -> TokenLoss:
    return TokenLoss(-advantages * logprobs * mask, torch.zeros_like(mask, dtype=torch.bool))


def leave_one_out_less_divergence(scores: torch.Tensor, group_size: int, measured: Measured) -> torch.Tensor:
    """R minus the mean of the other rewards of the group, minus half of log pi_old / pi_ref of each token: (B, T)."""
    groups = scores.view(-1, group_size)
    centred = (groups - groups.mean(dim=1, keepdim=True)) * group_size / (group_size - 1)
    return centred.view(-1, 1) - 0.5 * (measured.old_logprobs - measured.ref_logprobs) * measured.mask


def test_a_new_objective_trains_with_one_row_whose_advantages_use_what_was_measured(good, tmp_path):
    """The rewards are 1e8, 1e8 + 1 and 1e8 + 2, which float32 cannot tell apart."""
    (tmp_path / "task.py").write_text(PYTHON.replace("float(len(response) % 3)", "1e8 + len(response) % 3"))
    OBJECTIVES["mine"] = Objective(policy_gradient, "sequence", leave_one_out_less_divergence)
    try:
        run = prepare(Config.of(
            objective="mine", out=str(tmp_path / "run"), model=str(good / "model"), task=str(tmp_path / "task.py"),
            engine="transformers", num_prompts=4, group_size=2, lr=1e-2, lr_warmup_steps=0, kl_coef=1e-3,
            temperature=2.0, max_new_tokens=6,
        ))  # fmt: skip
        policy = load_policy(run)
        state, _ = build(run, policy, start_engine(run, policy), None)
        steps = [train_step(run, state, step) for step in (1, 2)]
    finally:
        del OBJECTIVES["mine"]
    for number, step in enumerate(steps, 1):
        batch, rollouts = step.batch, step.batch.rollouts
        assert step.metrics["updates"] == 2
        assert step.metrics["flat_frac"] < 1
        difference = (batch.old_logprobs - batch.ref_logprobs) * batch.mask
        assert difference.any() == (number > 1), "the reference is the first policy"
        for row, rollout in enumerate(rollouts):
            of_row = rollout.reward - rollouts[row ^ 1].reward  # in a group of two
            expected = of_row - 0.5 * difference[row]
            torch.testing.assert_close(batch.advantages[row].double(), expected.double(), atol=1e-5, rtol=0)


@dataclass(frozen=True)
class Flags(ParityFlags):
    fcfs: bool = True


ROW = Setting("fcfs", "scheduling_policy", "fcfs", "priority",
              lambda engine: engine.llm.vllm_config.scheduler_config.policy)  # fmt: skip


@contextmanager
def setting(row: Setting) -> Iterator[None]:
    SETTINGS.append(row)
    try:
        yield
    finally:
        SETTINGS.remove(row)


@pytest.mark.engine
def test_a_new_backend_fix_is_one_row_and_is_read_back(folders):
    contract = {name: tensor.shape for name, tensor in Policy(qwen2(tied=False)).weights().items()}
    close_live_engine()
    with setting(ROW):
        engine = Engine(folders[False], contract, Flags(fcfs=False), max_model_len=64)
        assert engine.settings["scheduling_policy"] == "priority"
    close_live_engine()
    not_in_force = ROW._replace(on="priority", read=lambda _: "fcfs")  # as if vLLM had ignored the argument
    with setting(not_in_force), pytest.raises(AuditError, match="scheduling_policy is 'fcfs', not 'priority'"):
        Engine(folders[False], contract, Flags(), max_model_len=64)
    close_live_engine()
