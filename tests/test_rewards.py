"""A task file's process: whatever the file's code does is a number or a sentence, and the next call is answered."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from statistics import fmean as mean

import pytest
import torch
from helpers import ROOT, built

from examples.toys import toy_tokenizer
from extras.problem_files import load_task, try_reward
from extras.task_file import TaskFile
from objectives import group_advantages
from rollouts import Rollout
from tasks import Problem, encode
from train import train_step

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
    "return math.nan": "it returned nan", "return '1.0'": "it returned '1.0'",
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


def test_a_keyword_of_a_reward_is_no_third_argument(loaded):
    task = loaded("problems = [('1', '1'), ('2', '2')]\n\ndef reward(problem, response, *, k=3): return k")
    assert task.reward(task.train[0], "x") == 3


def test_a_process_that_is_started_again_runs_the_text_of_the_digest(tmp_path, loaded):
    text = ("import os\nproblems = [('1', '1'), ('2', '1')]\n"
            "def reward(problem, text): return {} if text else os._exit(3)")  # fmt: skip
    first, task = (loaded(text.format(value), reward_limit_s=60) for value in (1, 2))
    assert first.fingerprint != task.fingerprint
    (tmp_path / "task.py").write_text("")
    with pytest.raises(ValueError, match="ended with status 3"):
        task.reward(task.train[0], "")
    assert task.reward(task.train[0], "x") == 2


def test_rewards_of_a_batch_know_the_rollout_and_a_failure_stops_the_run_or_is_left_out(loaded, capsys):
    task = loaded(GRADED, reward_limit_s=60)
    task = replace(task, tokenizer=toy_tokenizer(), reward_errors="leave-out", stop_token_ids=(2,))
    rollouts = [Rollout([1], 0, [token], [-0.5], [version], "stop") for token, version in ((5, 1), (6, 0), (7, 1))]
    rows = task.score(task.train[:3], rollouts)
    assert [row["reward"] for row in rows] == [4.5, None, 6.5]
    assert [rollouts[0].score, rollouts[2].score] == [4.5, 6.5] and math.isnan(rollouts[1].score)
    assert [row["error"] is not None for row in rows] == [False, True, False]
    assert task.score(task.train[:3], rollouts) == rows  # of a source that scores, by the loop
    said = capsys.readouterr().out
    question = f"on {task.train[1].source}, question {task.train[1].question!r}, response '3'"
    assert re.search(r"REWARD FAILED, one of 1: the reward fails \(ZeroDivisionError: .*division by zero\) "
                     + re.escape(question), said)
    rollouts[1].reward = None
    with pytest.raises(ValueError, match="; to go on without such responses, --reward-errors leave-out"):
        replace(task, reward_errors="stop").score(task.train[:3], rollouts)


# ------------------------------------------------------------------------------------------------ parts, none, groups
def scored(folder, text: str, *responses: str, groups: int = 1, **options) -> tuple[list[Rollout], list[dict]]:
    """Rollouts of these responses, scored by a file's reward; the problem is `1+1=`, its answer `2`."""
    (folder / "mine.py").write_text(text)
    (folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": 2, "limit": 3}\n{"question": "2", "answer": 2}')
    task = load_task(str(folder / "rows.jsonl"), 0, reward=str(folder / "mine.py"), reward_limit_s=4, **options)
    tokenizer = toy_tokenizer()
    task = replace(encode(tokenizer, task, (2,)), reward_errors=options.get("reward_errors", "stop"))
    try_reward(task)
    assert task.in_passes
    (problem,) = (each for each in task.train + task.held_out if each.question == "1+1=")
    rollouts = [Rollout([1], 0, [*tokenizer(each, add_special_tokens=False)["input_ids"], 2], [-0.5] * (len(each) + 1),
                        [1] * (len(each) + 1), "stop") for each in responses]  # fmt: skip
    return rollouts, task.score([problem] * groups, rollouts)


def test_a_reward_is_a_sum_of_named_parts_or_none(tmp_path):
    text = "def reward(problem, response): return {'a': 1, 'b': len(response)} if response else None"
    rollouts, rows = scored(tmp_path, text, "12", "")
    assert [row["reward"] for row in rows] == [3.0, None]
    assert [row["parts"] for row in rows] == [{"a": 1.0, "b": 2.0}, {}]
    assert math.isnan(rollouts[1].reward) and math.isnan(rollouts[1].score)


def test_a_response_that_is_left_out_has_no_loss_and_is_not_in_its_groups_baseline():
    """As if the group were smaller: at 0 a failure would be better than a wrong answer at -1."""
    nan = math.nan
    groups = [nan, 1, -1, nan], [nan, 0.1, 0.1, 0.1], [nan] * 4, [0, 1, 2, 3]
    scores = torch.tensor(groups, dtype=torch.float64).flatten()
    for divide in (True, False):
        advantages = group_advantages(scores, 4, None, divide)
        alone = group_advantages(scores[1:3], 2, None, divide)
        whole = group_advantages(scores[12:], 4, None, divide)
        expected = [0, *alone.flatten().tolist(), 0] + [0] * 8 + whole.flatten().tolist()
        assert advantages.flatten().tolist() == pytest.approx(expected, abs=1e-7)
        assert not advantages[4:12].any()  # exactly 0, also where 0.1 is not its rounded mean


def test_a_file_that_grades_whole_groups_sees_them(tmp_path):
    text = """def rewards(problem, responses, rollouts):
    assert all(len(each.token_ids) >= len(text) for each, text in zip(rollouts, responses))
    return [float(response == min(responses, key=len)) for response in responses]
"""
    rows = scored(tmp_path, text, "12", "1", "1", "123", groups=2)[1]
    assert [row["reward"] for row in rows] == [0, 1, 1, 0]
    text = "def rewards(problem, responses): return [1.0] if len(responses) < 4 and '=' in problem.question else [0, 0]"
    with pytest.raises(ValueError, match=r"returned 1 rewards for 2 responses.* on .*rows.jsonl, line ., in a trial"):
        scored(tmp_path, text, "1", "2")


def test_rewards_are_computed_at_the_same_time_each_with_its_limit(tmp_path):
    text = """import time
def reward(problem, response):
    if response == '5':
        raise OSError('the judge is away')
    time.sleep(99 if response == '4' else 0.3)
    return len(response)
"""
    responses = ["12" if n % 4 == 3 else "1" for n in range(24)]
    started = time.monotonic()
    rows = scored(tmp_path, text, *responses, reward_workers=8)[1]
    assert [row["reward"] for row in rows] == [1.0 + (n % 4 == 3) for n in range(24)]
    assert time.monotonic() - started < 5  # one after the other: 7.8
    rows = scored(tmp_path, text, "1", "4", "5", "2", reward_workers=2, reward_errors="leave-out")[1]
    assert [row["reward"] for row in rows] == [1, None, None, 1]
    assert ["judge is away" in (row["error"] or "") for row in rows] == [False, False, True, False]
    assert "no answer within 4 s" in rows[1]["error"]


def test_a_signal_ends_the_rewards_that_are_computed(tmp_path):
    """A run must not wait until their limit."""
    (tmp_path / "slow.py").write_text("import time\ndef reward(problem, response): time.sleep(60)")
    program = """if True:
        import os, signal, threading
        from extras.task_file import TaskFile
        from tasks import Problem
        file = TaskFile("slow.py", 0, 60, num_processes=2)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        file.grade([(Problem("", "", ""), ["a"] * 9, [None] * 9)])
    """
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False, timeout=50)  # fmt: skip
    assert "KeyboardInterrupt" in done.stderr
    assert time.monotonic() - started < 30


def test_a_task_to_evaluate_on_gives_its_own_rewards_and_is_part_of_the_fingerprint(tmp_path, loaded):
    held_out, tasks = tmp_path / "held_out.py", []
    text = "problems = [(str(n), '2') for n in range(%s)]\ndef reward(problem, response): return %s"
    for value in (1.0, 2.0):
        held_out.write_text(text % ("9", f"{value} if response == '2' else 1 / 0"))
        task = loaded(text % ("10, 19", 0.5), eval_task=str(held_out))
        tasks.append(encode(toy_tokenizer(), task, (2,)))
    assert len({task.fingerprint for task in tasks}) == 2
    for evaluates, reward in ((False, 0.5), (True, 2.0)):
        rollouts = [Rollout([1], 0, [5, 2], [-0.5] * 2, [1] * 2, "stop")]
        assert tasks[1].score(tasks[1].held_out[:1], rollouts, evaluates)[0]["reward"] == reward
    with pytest.raises(ValueError, match=r"ZeroDivisionError.* on .*held_out.py, problem ., in a trial"):
        try_reward(tasks[1])


def test_a_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7")
    rows = scored(tmp_path, "from beside import value\ndef reward(problem, response): return value", "1")[1]
    assert rows[0]["reward"] == 7


def test_a_reward_is_tried_before_the_engine_starts(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"the reward fails \(ZeroDivisionError.* on .*, line ., in a trial"):
        scored(tmp_path, "def reward(problem, response): return 1 / 0", "1")
    scored(tmp_path, "def reward(problem, response): problem.answer == response", "1")  # without `return`
    assert "notice: such responses are left out: None on " in capsys.readouterr().out


# Public rewards, each as a file of at most twelve lines: file, and rewards of the responses "2", "11", "" and "2=2".
PORTS = {
    "format and accuracy with weights, as in Open-R1": ("""
import re
def reward(problem, response):
    shaped = re.fullmatch(r"[0-9]+", response)
    right = response.rpartition("=")[2] == problem.answer
    return {"accuracy": 1.0 * right, "format": 0.2 * bool(shaped)}
""", [1.2, 0.2, 0.0, 1.0]),
    "an overlong penalty, as in DAPO": ("""
LONGEST, BUFFER = 4, 2
def reward(problem, response, rollout):
    too_long = len(rollout.token_ids) - (LONGEST - BUFFER)
    return {"accuracy": 1.0 if response == problem.answer else -1.0,
            "overlong": min(0.0, -too_long / BUFFER) if too_long > 0 else 0.0}
""", [1.0, -1.5, -1.0, -2.0]),
    "code that is executed, as in verl's code tasks": ("""
import subprocess, sys
def reward(problem, response):
    code = f"assert {response.replace('=', '==') or None} == {problem.answer}"
    done = subprocess.run([sys.executable, "-Ic", code], capture_output=True, timeout=5)
    return float(done.returncode == 0)
""", [1.0, 0.0, 0.0, 1.0]),
    "a judge by rules over the row's columns": ("""
def reward(problem, response):
    if not response:
        return None  # the judge has no opinion
    limit = problem.row.get("limit", 9)
    return {"short": float(len(response) < limit), "answers": float(str(problem.row["answer"]) in response)}
""", [2.0, 1.0, None, 1.0]),
    "relative to the group, as length penalties are": ("""
def rewards(problem, responses):
    lengths = [len(response) for response in responses]
    longest, shortest = max(lengths), min(lengths)
    right = [response.endswith(problem.answer) for response in responses]
    return [r * (1 - 0.5 * (n - shortest) / max(1, longest - shortest)) for r, n in zip(right, lengths)]
""", [5 / 6, 0.0, 0.0, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("kind", PORTS)
def test_public_rewards_are_short_files(tmp_path, kind):
    text, expected = PORTS[kind]
    assert len(text.strip().splitlines()) <= 12
    rows = scored(tmp_path, text, "2", "11", "", "2=2")[1]
    assert [row["reward"] for row in rows] == [each if each is None else pytest.approx(each) for each in expected]


def test_a_step_gives_no_loss_to_what_is_left_out_not_even_that_of_a_kl(good, tmp_path):
    text = "def reward(problem, response): return None if len(response) % 2 else len(response)"
    (tmp_path / "mine.py").write_text(text)
    run, state, _ = built(good, tmp_path / "run", reward=str(tmp_path / "mine.py"), num_prompts=8, group_size=4,
                          max_new_tokens=6, kl_coef=0.1, steps=1)  # fmt: skip
    done = train_step(run, state, 1)
    left_out = [math.isnan(each.score) for each in done.batch.rollouts]
    assert 0 < sum(left_out) == done.metrics["left_out"] < 32
    assert [not row.any() for row in done.batch.mask] == left_out
    assert done.metrics["reward"] == mean(each.reward for each in done.batch.rollouts if not math.isnan(each.reward))
