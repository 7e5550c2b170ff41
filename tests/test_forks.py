"""Ideas of papers as patches: each is applied to a copy, run for three steps and checked for what the paper says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORKS = ROOT / "examples" / "forks"
JOB = "--steps 3 --num-prompts 16 --eval-problems 8 --lr 3e-3"
OPTIONS = {  # what a patch changes on the trainer's side needs no vLLM
    "dynamic_sampling": "",
    "overlong_penalty": "--engine transformers",
    "two_turns": "--max-new-tokens 12",
    "rewards_to_go": "--objective to_go --engine transformers",
    "kl_in_reward": "--objective kl_reward --engine transformers",
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
    for row, rollout in enumerate(done.batch.rollouts):
        said = rollout.trained.index(False)
        assert sum(rollout.trained) == len(rollout.token_ids) - 1
        column = len(rollout.prompt_ids) + said - 1
        assert done.batch.mask[row, column] == 0 and done.batch.mask[row, column - 1] == 1
    assert done.batch.mask.sum() == done.metrics["tokens"]
    assert 0 < done.metrics["mismatch_max"] < 1e-4


def check_rewards_to_go(done):
    """Token by token: the group's advantage times 0.9 for each token that follows."""
    for row, rollout in enumerate(done.batch.rollouts):
        group = [each.reward for each in done.batch.rollouts[row // 8 * 8 :][:8]]
        mean = sum(group) / 8
        std = (sum((each - mean) ** 2 for each in group) / 7) ** 0.5
        advantage = (rollout.reward - mean) / (std + 1e-4)
        for token in reversed(range(len(rollout.token_ids))):
            seen = done.batch.advantages[row, len(rollout.prompt_ids) + token - 1].item()
            assert seen == pytest.approx(advantage, abs=1e-5)
            advantage *= 0.9


def check_kl_in_reward(done):
    """By hand in Python's floats. At the first step the policy is the reference, later it is not."""
    log_ratios = done.batch.old_logprobs - done.batch.ref_logprobs
    assert (log_ratios.abs().max() > 1e-3) == (done.metrics["step"] > 1)
    pairs = zip(done.batch.rollouts, log_ratios.tolist(), strict=True)
    scores = [rollout.reward - 0.05 * sum(row) for rollout, row in pairs]
    for row, score in enumerate(scores):
        group = scores[row // 8 * 8 :][:8]
        mean = sum(group) / 8
        std = (sum((each - mean) ** 2 for each in group) / 7) ** 0.5
        assert done.batch.advantages[row, 0].item() == pytest.approx((score - mean) / (std + 1e-4), rel=1e-3, abs=1e-3)


@pytest.mark.engine
@pytest.mark.parametrize("name", OPTIONS)
def test_a_fork_does_what_its_paper_says(name, tmp_path):
    copy = copy_of_the_code(tmp_path / "copy", name)
    job = [sys.executable, __file__, name, "--out", str(tmp_path / "run"), *JOB.split(), *OPTIONS[name].split()]
    done = subprocess.run(job, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked 3 steps" in done.stdout


@pytest.mark.engine
def test_the_page_with_a_higher_clip_and_a_replayed_batch(tmp_path):
    copy = copy_of_the_code(tmp_path / "copy", "page_clip_higher")
    program = f"import sys; sys.path[:0] = ['.', {str(ROOT / 'tests')!r}]; import test_forks; test_forks.check_page()"
    subprocess.run([sys.executable, "-m", "examples.toys", "runs/page"], cwd=copy, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def check_page():
    """A ratio of 1.25 passes the upper bound, one of 1.3 and one of 0.75 do not; the second pass has moved."""
    import torch
    from transformers import AutoModelForCausalLM

    import grpo

    options = grpo.Options(steps=3, num_minibatches=1)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    ids = torch.arange(12).view(3, 4)
    batch = ids, ids, torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(3, 4), torch.zeros(3, 4)
    with torch.no_grad():
        now = grpo.token_logprobs(model, batch, torch.arange(3), options.temperature)
    ratios, advantages = torch.tensor([[1.25], [1.3], [0.75]]), torch.tensor([[1.0], [1.0], [-1.0]])
    adamw = torch.optim.AdamW(model.parameters(), lr=0.0)
    done = grpo.update(model, adamw, batch, advantages, now - ratios.log(), batch[2], options)
    assert done["loss"] == pytest.approx(-(1.25 + 1.28 - 0.8) / 3, rel=1e-5)
    assert done["clip_rate"] == pytest.approx(2 / 3)
    steps = [metrics for metrics, _ in grpo.train(options)]
    assert steps[-1]["clip_rate"] > 0  # in a first pass all ratios are 1


def copy_of_the_code(folder, name):
    """The product's files with the patch applied."""
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.json")
    folder.mkdir()
    for source in [*ROOT.glob("*.py"), ROOT / "extras", ROOT / "examples"]:
        target = folder / source.name
        shutil.copytree(source, target, ignore=ignored) if source.is_dir() else shutil.copy(source, target)
    (folder / ".cache").symlink_to(ROOT / ".cache")
    patch = (FORKS / f"{name}.patch").read_bytes()
    subprocess.run(["patch", "--strip", "1", "--fuzz", "0"], cwd=folder, input=patch, check=True, capture_output=True)
    return folder


def main(name, arguments):
    """In the copy: train, and check each step."""
    sys.path.insert(0, os.getcwd())
    import train

    step, checked = train.train_step, []

    def checked_step(*given):
        done = step(*given)
        globals()[f"check_{name}"](done)
        checked.append(done)
        return done

    train.train_step = checked_step
    train.main(arguments)
    print(f"checked {len(checked)} steps")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
