"""A task file's process: whatever the file's code does is a number or a sentence, and the next call is answered."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import ROOT

from examples.toys import toy_tokenizer
from extras.problem_files import load_task
from extras.task_file import TaskFile
from rollouts import Rollout
from tasks import Problem

BODY = """
import asyncio, collections, ctypes, itertools, math, os, signal, sys, threading, time

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not even this")

def sample(rng):
    return str(rng.random()), "a"

def reward(problem, response):  # runs the response
    space = {}
    exec("def body():\\n " + response.replace("\\n", "\\n "), globals(), space)
    return space["body"]()
"""
FAILURES = {
    "raise KeyError('no such thing')": "KeyError: 'no such thing'", "raise Mute": "Mute", "return 1": None,
    "raise ValueError('\\ud800')": "ValueError: \ud800", "raise asyncio.CancelledError": "CancelledError",
    "sys.exit(0)": "SystemExit: 0", "os._exit(3)": "ended with status 3", "ctypes.string_at(0)": "with status -11",
    "os.closerange(3, 99)": "ended with status",
    "collections.deque(itertools.repeat(0), maxlen=0)": "no answer within 2 s",  # in C: no signal handler is run
    "signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n try: time.sleep(9)\n except BaseException: pass":
        "no answer within 2 s",
    "signal.alarm(1)\ntime.sleep(9)": "ended with status -14",
    "os.write(int(sys.argv[1]), bytes([0, 0, 0, 9, 1, 2, 3, 4]))\nwhile True: pass": "no answer within 2 s",  # half
    "os.write(int(sys.argv[1]), bytes([0, 0, 0, 1, 9]))\nreturn 1.0": "ended with status -9",
    "return math.nan": "it returned nan", "return": "it returned None", "return '1.0'": "it returned '1.0'",
    "import torch\nreturn torch.ones(2)": "Error", "return 1e300": "1e+300",
    "return 10**5000": "OverflowError", "import torch\nreturn torch.ones(1)": None, "return True": None,
    "print('printed'); os.write(1, bytes(99)); return 1.0": None,
    "signal.alarm(1)\nreturn 1.0": None, "time.sleep(1.2)\nreturn 1.0": None,  # the alarm of the call before
    "if os.fork() == 0: sys.exit()\nreturn 1.0": None,
    "threading.Thread(target=time.sleep, args=(99,)).start()\nreturn 1.0": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> TaskFile:
    path = tmp_path_factory.mktemp("task") / "body.py"
    path.write_text(BODY)
    return TaskFile(str(path), seed=0, limit_s=60)


@pytest.mark.parametrize("code", FAILURES)
def test_a_reward_is_a_number_or_a_sentence_whatever_its_code_does(file, code):
    error, problem = FAILURES[code], Problem("1+1=", "2", "line 1")
    file.limit_s = 2 if error == "no answer within 2 s" else 60
    try:
        value, said = file.reward(problem, code), None
    except ValueError as failed:
        value, said = 1.0, str(failed)
    assert (value, type(value)) == (1.0, float)
    assert said is None if error is None else said.startswith("the reward fails (") and error in said
    file.limit_s = 60
    assert file.reward(problem, "return 1.0") == 1.0


def drawing(tmp_path, sample: str) -> subprocess.Popen:
    """A process that draws one problem of a task file."""
    (tmp_path / "task.py").write_text(f"import subprocess\ndef sample(rng):\n {sample}\n"
                                      "def reward(problem, response): return 0.0")  # fmt: skip
    program = f"from extras.task_file import TaskFile; TaskFile({str(tmp_path / 'task.py')!r}, 0, 600).sample()"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)


def test_a_killed_run_leaves_no_process_behind(tmp_path):
    run = drawing(tmp_path, "print('there', flush=True)\n while True: pass")
    assert run.stdout.readline() == b"there\n"
    run.kill()
    run.communicate(timeout=60)  # returns when nobody can write to its output any more


def test_a_child_of_a_task_ends_with_the_run(tmp_path):
    run = drawing(tmp_path, "subprocess.Popen(['sleep', '600'])\n return '1', '2'")
    run.communicate(timeout=60)
    assert run.returncode == 0


GRADED = """
def sample(rng):
    return str(rng.randint(1, 9)), "1"

def reward(problem, response, rollout):
    return rollout.token_ids[0] + sum(rollout.logprobs) / (rollout.versions[0] == 1 and rollout.finish_reason == "stop")
"""


def test_a_keyword_of_a_reward_is_no_third_argument(tmp_path):
    (tmp_path / "task.py").write_text("def sample(rng): return '1', '2'\n\n"
                                      "def reward(problem, response, *, k=3): return k")  # fmt: skip
    file = TaskFile(str(tmp_path / "task.py"), 0, 10)
    assert not file.takes_rollout
    assert file.reward(Problem("1", "2", ""), "x") == 3


def test_a_process_that_is_started_again_runs_the_text_of_the_digest(tmp_path):
    path, digests = tmp_path / "task.py", set()
    for value in (1, 2):
        path.write_text("import os\ndef sample(rng): return str(rng.randint(1, 9)), '1'\n"
                        f"def reward(problem, text): return {value} if text else os._exit(3)")
        task = load_task(str(path), 0, limit_s=60)
        digests.add(task.fingerprint)
    assert len(digests) == 2
    path.write_text("")
    with pytest.raises(ValueError, match="ended with status 3"):
        task.reward(task.train[0], "")
    assert task.reward(task.train[0], "x") == 2


def test_rewards_of_a_batch_know_the_rollout_and_a_failure_stops_the_run_or_is_counted(tmp_path, capsys):
    (tmp_path / "task.py").write_text(GRADED)
    task = load_task(str(tmp_path / "task.py"), 0, limit_s=60)
    task = replace(task, tokenizer=toy_tokenizer(), reward_errors="count")
    rollouts = [Rollout([1], 0, [token], [-0.5], [version], "stop") for token, version in ((5, 1), (6, 0), (7, 1))]
    rows = task.score(task.train[:3], rollouts)
    assert [row["reward"] for row in rows] == [each.score for each in rollouts] == [4.5, 0.0, 6.5]
    assert [row["error"] is not None for row in rows] == [False, True, False]
    assert task.score(task.train[:3], rollouts) == rows  # of a source that scores, by the loop
    said = capsys.readouterr().out
    question = f"on {task.train[1].source}, question {task.train[1].question!r}, response '3'"
    assert re.search(r"REWARD FAILED, one of 1: the reward fails \(ZeroDivisionError: .*division by zero\) "
                     + re.escape(question), said)
    rollouts[1].reward = None
    with pytest.raises(ValueError, match="; to go on with reward 0, --reward-errors count"):
        replace(task, reward_errors="stop").score(task.train[:3], rollouts)
