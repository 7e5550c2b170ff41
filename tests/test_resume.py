"""A run's folder: held by one process, resumed from what is whole, left whole by kills and by a full disk; the folder
of the best policy.

tests/long/kills.py of commit aae883d kills whole jobs with a real engine at random moments.
"""

import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import built, command, contents, forked, outcome, parametrize, read_json, refusal, train_here, value_error

import train
from engine_adapter import Rollout, Sampling
from report.files import checkpoints, save_checkpoint

# The transformers engine: what is tested here is the same for both, and it starts at once.
SMALL = ("--engine transformers --max-new-tokens 4 --eval-problems 4 --eval-every 2 --checkpoint-every 1 --steps 4"
         " --num-minibatches 1 --lr 1e-2 --lr-decay none --task {root}/task.py --group-size 8 --temperature 2")


def options(root, out, *more):
    return command(root, f"{SMALL} --out {out}", *more)


@pytest.fixture(scope="module")
def root(good, tmp_path_factory):
    """A finished run in run/, beside its model and task; its checkpoints are those of steps 3 and 4."""
    root = shutil.copytree(good, tmp_path_factory.mktemp("resume") / "root")
    train_here(options(root, root / "run"))
    assert [row.get("updates", 1) for row in outcome(root / "run")[0]] == [1] * 5
    return root


def checkpoint(out, step):
    return out / "checkpoints" / f"step_{step:06d}"


def change(path, edit):
    path.write_bytes(edit(path.read_bytes()))


# ------------------------------------------------------------------------------------------------ damaged, still whole
@parametrize("value", [  # each Rollout has a Sampling, and with it a lambda, which cannot be written
    numpy.float64(1.5), Rollout([1], None, sampling=Sampling(1.0, 1))], ids=["numpy", "rollout"])
def test_a_state_that_no_resumed_run_could_read_is_refused_by_its_class_as_it_is_saved(tmp_path, value):
    states = [[value], [1, "a", (2.0, None), {3}]]
    run = SimpleNamespace(out=tmp_path, save_weights=lambda run, model, folder: None, identity={})
    trainer = SimpleNamespace(run=run, policy=SimpleNamespace(model=None), state_dict=lambda: {"mine": states.pop()})
    save_checkpoint(trainer, 1)
    with value_error(r"a state_dict must have .*, got (numpy|another: .*Sampling)\."):
        save_checkpoint(trainer, 2)


def torn(out):
    """As a kill in step 4 leaves it: rows of a later step, and a part of one; a checkpoint without its name. And as an
    earlier version leaves it, which has fewer options."""
    checkpoint(out, 4).rename(out / "checkpoints" / "unfinished")
    for name in ("metrics.jsonl", "samples.jsonl"):
        change(out / name, lambda content: content[:-9])
    change(out / "config.json", lambda content: content.replace(b'"lr_warmup_steps": 5,', b""))


def test_a_run_goes_on_from_what_is_whole_and_leaves_a_users_files_alone(root, tmp_path, capsys):
    copy = shutil.copytree(root / "run", tmp_path / "run")
    torn(copy)
    users = [copy / "checkpoints" / name for name in ("best.pt", "step_12abc.pt")]
    for path in users:
        path.write_text("mine")
    train_here(options(root, copy, "--resume"))
    assert "resumed at step 4" in capsys.readouterr().out
    assert outcome(copy) == outcome(root / "run")
    assert all(path.read_text() == "mine" for path in users)
    assert {*copy.glob("checkpoints/*")} == {checkpoint(copy, 3), checkpoint(copy, 4), *users}


# ------------------------------------------------------------------------------------------------ what is refused
def test_a_hub_model_is_that_of_one_commit(good, tmp_path, monkeypatch, capsys):
    """A run reads its snapshot in the cache. It cannot be resumed after the hub has got other weights."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = command(good, SMALL.replace("--steps 4", f"--steps 1 --model org/name --out {tmp_path}/run"))
    cache = tmp_path / "models--org--name"
    first, second = (shutil.copytree(good / "model", cache / "snapshots" / (40 * digit)) for digit in "ab")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(first.name)
    train_here(words)
    assert read_json(tmp_path / "run" / "config.json")["trainer"]["model_path"] == str(first)
    flip(second / "model.safetensors")
    (cache / "refs" / "main").write_text(second.name)
    assert "changed are org/name/model.safetensors; try" in refusal([*words, "--resume"], capsys)


def flip(path):
    """Change one bit."""
    change(path, lambda content: content[:9999] + bytes([content[9999] ^ 1]) + content[10000:])


def another_seed(out):
    state = torch.load(checkpoint(out, 4) / "state.pt")
    state["run"]["config"]["seed"] += 1
    torch.save(state, checkpoint(out, 4) / "state.pt")


# What is changed, and the complaint; `f` is the run's folder, its parent holds model/ and task.py.
REFUSED = {
    "no config": (lambda f: (f / "config.json").unlink(), "run/config.json failed: FileNotFoundError"),
    "no checkpoints": (lambda f: shutil.rmtree(f / "checkpoints"), "must have its checkpoints"),
    "a bit": (lambda f: flip(checkpoint(f, 4) / "state.pt"),
              "step_000004/state.pt is damaged, missing or of another version; move {root}"),
    "lost rows": (lambda f: change(f / "metrics.jsonl", lambda c: c[: c.index(b"\n") + 1]),
                  "metrics.jsonl of a resumed run must have the steps 0 to 4, {root}/run has 1 of them"),
    "a weight": (lambda f: flip(checkpoint(f, 4) / "model.safetensors"), "step_000004/model.safetensors is damaged"),
    "another run": (another_seed, "step_000004 failed: ValueError: a resumed run must keep its options, changed are s"),
    "a broken line": (lambda f: change(f / "samples.jsonl", lambda c: c[9:]), "run/samples.jsonl failed: json.decoder"),
    "a gone file": (lambda f: (f.parent / "model" / "generation_config.json").unlink(),
                    "changed are {root}/model/generation_config.json; try"),
    "reward": (lambda f: change(f.parent / "task.py", lambda c: c.replace(b"% 3", b"% 2")),
               "changed are {root}/task.py; try"),
}  # fmt: skip


@pytest.fixture
def spoilable(root):
    """The run's folder, which is whole again after the test."""
    kept = shutil.copytree(root, root.with_name("kept"))
    yield root / "run"
    shutil.rmtree(root)
    kept.rename(root)


@parametrize("kind", REFUSED)
def test_what_cannot_be_resumed_is_refused_and_no_file_is_changed(root, spoilable, kind, capsys):
    spoil, complaint = REFUSED[kind]

    def files():
        """Except for a traceback."""
        paths = {path for path in root.rglob("*.*") if path.is_file()} - {spoilable / "error.txt"}
        return {path: path.read_bytes() for path in paths}

    spoil(spoilable)
    before = files()
    assert complaint.format(root=root) in refusal(options(root, spoilable, "--resume"), capsys)
    assert files() == before


def killed_save(trainer, number):
    """Save checkpoint 2, and be killed at this call of Python's that has to do with its files."""
    calls = itertools.count(1)

    def kill(event, arguments):
        if "unfinished" in str(arguments[:1]) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    save_checkpoint(trainer, 2)


def test_a_kill_between_any_two_files_leaves_the_checkpoint_before(good, tmp_path):
    trainer = built(good, tmp_path)
    save_checkpoint(trainer, 1)
    for number in itertools.count(1):
        process = forked(killed_save, trainer, number)
        process.join()
        if process.exitcode == 0:
            break
        assert checkpoints(tmp_path) == [checkpoint(tmp_path, 1)]
    assert checkpoints(tmp_path) == [checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)]
    assert number > len([*checkpoint(tmp_path, 2).iterdir()])


def test_with_a_constant_rate_a_run_goes_on_for_more_steps(root, tmp_path, capsys):
    out = tmp_path / "run"
    train_here(options(root, out, "--steps", "2"))
    assert "steps must be at least 2" in refusal(options(root, out, "--steps", "1", "--resume"), capsys)
    for _ in range(2):  # the second time there is nothing left to do
        train_here(options(root, out, "--resume"))
    assert outcome(out) == outcome(root / "run")
    record = read_json(out / "config.json")
    assert record["config"]["steps"] == 2
    assert [(again["step"], again["config"]["steps"]) for again in record["resumed"]] == [(3, 4), (5, 4)]


# ------------------------------------------------------------------------------------------------ folders of a model
@parametrize("more, last", [
    ("--dtype float16", "policy"), ("--lora-rank 4 --dtype bfloat16 --top-p 0.9 --kl-coef 0.1", "adapter"),
])  # fmt: skip
def test_the_best_policy_is_a_checkpoints_and_the_run_is_that_without(root, tmp_path, more, last, monkeypatch):
    evaluate, values = train.evaluate, [None, 0.5, math.nan, 0.6, 0.6]  # of steps 0 to 4
    monkeypatch.setattr("train.evaluate", lambda *where: evaluate(*where) | {"eval_agree": values[where[1]]})
    words = options(root, tmp_path / "usual", "--eval-every", "1", *more.split())
    train_here(words)
    out = tmp_path / "run"
    words = [*words, "--out", str(out), "--keep-best", "eval_agree"]
    train_here(words)
    for _ in range(2):
        assert repr(outcome(out)) == repr(outcome(tmp_path / "usual"))  # NaN
        best, *newest = map(contents, (out / "best", *checkpoints(out)))
        assert json.loads(best.pop("best.json")) == {"step": 3, "metric": "eval_agree", "value": 0.6}
        assert all(each.pop("state.pt") for each in newest)
        assert newest == [best, contents(out / last)]
        assert not {*out.glob("best.*")}
        torn(out)
        train_here([*words, "--resume"])


def test_a_best_policy_by_an_unknown_metric_or_of_another_one_is_refused(root, tmp_path, capsys):
    out = tmp_path / "run"
    words = options(root, out, "--steps", "1", "--keep-best")
    assert "must be a metric of evaluations (a" in refusal([*words, "reward"], capsys)
    with pytest.raises(SystemExit):
        train_here([*words, "eval_rewards"])
    assert "must be one of eval_agree, eval_reward, eval_reward_greedy, eval_reward_" in capsys.readouterr().err
    train_here([*words, "eval_reward", "--resume"])
    of_another = f"{out}/best has one of eval_reward; move it away"
    assert of_another in refusal([*words, "eval_agree", "--resume"], capsys)
    (out / "config.json").unlink()  # of another run
    assert of_another in refusal([*words, "eval_reward"], capsys)



# ------------------------------------------------------------------------------------------------ other processes
def signalled_run(words, number, said):
    """A run that its task stops or kills in step 2: set-up calls the reward twice, step 0 8 times, the others 32."""
    os.environ |= {"SIGNAL": str(int(number)), "SIGNAL_IN_CALL": "62"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    with said.open("w") as sys.stderr:
        train.main(words)


@parametrize("number, first_checkpoint", [(signal.SIGTERM, "9"), (signal.SIGINT, "1")])
def test_one_process_holds_a_run_and_a_signal_leaves_it_whole(root, tmp_path, number, first_checkpoint, capsys):
    out, said = tmp_path / "run", tmp_path / "said"
    words = options(root, out, "--checkpoint-every", first_checkpoint)
    process = forked(signalled_run, words, signal.SIGSTOP, said)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert f"out must not be in use, another process holds {out}" in refusal([*words, "--resume"], capsys)
    os.kill(process.pid, number)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 130
    assert "a run goes on from its newest checkpoint, or begins anew if it has none;" in said.read_text()
    train_here([*words, "--resume"])  # a dead process holds nothing
    assert ("there was no checkpoint" in capsys.readouterr().out) == (first_checkpoint == "9")
    assert outcome(out) == outcome(root / "run")


def test_a_run_under_nohup_ignores_sighup(capsys):
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    refusal(["--steps", "-1"], capsys)
    assert signal.signal(signal.SIGHUP, usual) == signal.SIG_IGN


@pytest.mark.engine
def test_a_run_with_the_real_engine_that_is_killed_and_resumed_is_bit_for_bit_the_run_that_was_not(
        good, tmp_path, capsys):
    """So is its best policy."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = options(good, killed, "--engine", "vllm", "--steps", "3", "--lr-decay", "linear", "--eval-every", "1")
    best = "--keep-best", "eval_reward"
    train_here([*words, *best, "--out", str(whole)])
    process = forked(signalled_run, [*words, *best], signal.SIGKILL, tmp_path / "said")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    train_here([*words, *best, "--resume"])
    assert outcome(killed) == outcome(whole)
    assert contents(killed / "best") == contents(whole / "best")
    said = refusal([*words, "--resume", "--steps", "5"], capsys)
    assert "a resumed run must keep its options, changed are steps; try another --out" in said


def test_a_librarys_error_has_its_traceback(good, tmp_path, capsys, monkeypatch):
    """That a refused command changes no file: above, and in test_bad_input.py."""
    monkeypatch.setattr("train.find_job", lambda *_: {}["absent"])
    with pytest.raises(SystemExit):
        train_here(options(good, tmp_path / "run"))
    said = capsys.readouterr().err
    assert re.search(r"^Traceback .* in complete_run\b.*\nerror: KeyError: 'absent'", said, re.DOTALL | re.M)


def test_a_full_disk_ends_in_a_sentence_and_the_run_can_be_resumed(root, tmp_path, capsys):
    """Files of at most 400 kB stand for the disk: the weights fit, the optimizer's state does not."""
    out, (usual, hard) = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(SystemExit, match=r"^1$"):
            train_here(options(root, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, hard))
    said = capsys.readouterr().err
    assert re.search(r"^error: writing .*/step_000001 failed: OSError: \[Errno 27\] File too large", said, re.M)
    assert f"(traceback: {out}/error.txt)" in said and "Traceback" not in said
    assert "in train\n" in (out / "error.txt").read_text()
    assert (out / "checkpoints" / "unfinished" / "model.safetensors").exists()
    train_here(options(root, out, "--resume"))
    assert outcome(out) == outcome(root / "run")
