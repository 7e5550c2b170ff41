"""Ideas of papers as patches: each is applied to a copy, run for three steps and checked for what the paper says."""

import gc
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import ROOT, ROUNDING, close_live_engine, copied, parametrize, python

from objectives import group_advantages

NO_PATCH = pytest.mark.skipif(shutil.which("patch") is None, reason="there is no program `patch`")
pytestmark = [pytest.mark.engine, NO_PATCH]
JOB = "--steps 3 --num-prompts 16 --eval-problems 8 --lr 3e-3"
OPTIONS = {  # what a patch changes on the trainer's side needs no vLLM
    "dynamic_sampling": "",
    "overlong_penalty": "--overlong-penalty --engine transformers",
    "two_turns": "--two-turns --max-new-tokens 12",
    "rewards_to_go": "--objective to_go --engine transformers",
    "kl_in_reward": "--kl-reward 0.05 --engine transformers",
    "full_kv_cache": "--parity.no-full-kv-cache",
}


def check_dynamic_sampling(done):
    """No flat group is trained on. The job without the patch has some at its first step."""
    groups = done.batch.advantages.view(16, 8)
    assert (groups != 0).any(dim=1).all() and done.metrics["flat_frac"] == 0


def check_overlong_penalty(done):
    """The last 4 of 8 tokens cost a quarter of a reward each; the task's reward does not change."""
    for rollout in done.batch.rollouts:
        longer = max(0, len(rollout.token_ids) - 4)
        assert rollout.score == rollout.reward - longer / 4
    assert done.metrics["score"] < done.metrics["reward"]


def check_two_turns(done):
    """The environment's token has no loss, and the two turns are aligned: the mismatch is rounding."""
    for rollout in done.batch.rollouts:
        assert 0 < rollout.trained.index(False) < sum(rollout.trained) == len(rollout.token_ids) - 1
    assert done.metrics["mismatch_max"] < 100 * ROUNDING


def advantages_of(scores):
    return group_advantages(torch.tensor(scores).double(), 8, None)  # (B, 1)


def check_rewards_to_go(done):
    """Token by token: the group's advantage times 0.9 for each token that follows."""
    advantages = advantages_of([each.reward for each in done.batch.rollouts])
    for row, rollout in enumerate(done.batch.rollouts):
        following = torch.arange(len(rollout.token_ids)).flip(0)
        seen = done.batch.advantages[row, len(rollout.prompt_ids) - 1 :][: len(following)]
        torch.testing.assert_close(seen, (advantages[row] * 0.9**following).float(), atol=1e-5, rtol=0)


def check_kl_in_reward(done):
    """By hand in Python's floats. At the first step the policy is the reference, later it is not."""
    log_ratios = done.batch.old_logprobs - done.batch.ref_logprobs
    assert (log_ratios.abs().max() > 1e-3) == (done.metrics["step"] > 1)
    pairs = zip(done.batch.rollouts, log_ratios.tolist(), strict=True)
    scores = [rollout.reward - 0.05 * sum(row) for rollout, row in pairs]
    torch.testing.assert_close(done.batch.advantages, advantages_of(scores), rtol=1e-3, atol=1e-3)


def check_full_kv_cache(done):
    """The canary would refuse this mismatch, a thousand times that of keys and values in float32."""
    assert 1e-3 < done.metrics["mismatch_abs_mean"] < 1


def apply(name, folder):
    patch = (ROOT / "examples" / "forks" / f"{name}.patch").read_bytes()
    command = ["patch", "--strip", "1", "--fuzz", "0"]
    subprocess.run(command, cwd=folder, input=patch, check=True, capture_output=True)


@contextmanager
def fork(name, folder):
    """The product's files with the patch applied, in place of those that this process has imported."""
    names = {path.stem for path in copied(folder).iterdir()}
    apply(name, folder)

    def imported():
        return {each: sys.modules.pop(each) for each in list(sys.modules) if each.partition(".")[0] in names}

    close_live_engine()
    own = imported()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        imported()
        sys.modules.update(own)
        gc.collect()  # an engine of the page ends here


@parametrize("name", OPTIONS)
def test_a_fork_does_what_its_paper_says(name, tmp_path):
    with fork(name, tmp_path / "fork"):
        import train

        step, steps = train.train_step, []

        def noted_step(*given):
            steps.append(step(*given))
            return steps[-1]

        train.train_step = noted_step
        train.main(["--out", str(tmp_path / "run"), *JOB.split(), *OPTIONS[name].split()])
    assert len(steps) == 3
    for done in steps:
        globals()[f"check_{name}"](done)


def test_the_page_with_a_higher_clip_and_a_replayed_batch(tmp_path, monkeypatch):
    """A ratio of 1.25 passes the upper bound, one of 1.3 and one of 0.75 do not; the second pass has moved."""
    monkeypatch.chdir(tmp_path)
    with fork("page_clip_higher", tmp_path / "fork"):
        import grpo
        from tasks.toys import write_page

        write_page(Path("runs/page"))
        options = grpo.Config(steps=3, num_minibatches=1)
        steps = [metrics for metrics, _ in grpo.train(options)]
        assert any(step.get("clip_rate", 0) > 0 for step in steps)  # in a first pass all ratios are 1
        # The parameters are the log-probabilities themselves, so the ratios are known.
        table, ones = torch.nn.Parameter(torch.tensor([[1.25], [1.3], [0.75]]).log()), torch.ones(3, 1)
        grpo.score = lambda model, batch, rows, temperature: table[rows]
        done = grpo.update(torch.nn.ParameterList([table]), torch.optim.SGD([table]), (None, None, ones),
                           torch.tensor([[1.0], [1.0], [-1.0]]), 0 * ones, ones, options)  # fmt: skip
        assert done["loss"] == pytest.approx(-(1.25 + 1.28 - 0.8) / 3, rel=1e-5)


def test_the_tests_of_tables_that_a_patch_adds_to_pass_in_a_fork_of_all(tmp_path):
    folder = copied(tmp_path / "fork")
    for name in OPTIONS:
        apply(name, folder)
    tests = shutil.copytree(ROOT / "tests", folder / "tests")
    files = [tests / f"test_{name}.py" for name in ("objectives", "config", "rl")]
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, folder=folder).stdout
