"""A task file's process: whatever the file's code does is a number or a sentence, and the next call is answered."""

import math
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, parametrize, python, value_error

from engine_adapter import Rollout
from tasks import Problem, Task, exact_match
from tasks.task_file import TaskFile
from tasks.toys import toy_tokenizer

BODY = """
import collections, ctypes, fractions, itertools, math, os, sys

def sample(rng):
    return str(rng.random()), "a"

def reward(problem, response):  # runs the response
    space = {}
    exec("def body():\\n " + response, globals(), space)
    return space["body"]()
"""
FAILURES = {  # None: the reward is 1
    "raise KeyError('no such thing')": "KeyError: 'no such thing'", "sys.exit(0)": "SystemExit: 0",
    "ctypes.string_at(0)": "ended with status -11",
    "collections.deque(itertools.repeat(0), maxlen=0)": "no answer within 0.5 s",  # in C: no signal handler is run
    "os.write(int(sys.argv[1]), b'\\x80\\4')\n while True: pass": "no answer within 0.5 s",  # half a message
    "return math.nan": "it returned nan", "return '1.0'": "it returned '1.0'",
    "return {'a': 1.0, 'b': None}": "it returned None, not a finite number",
    "return fractions.Fraction(1)": None, "print('printed'); return 1": None,
    "if os.fork() == 0: sys.exit()\n return 1": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "body.py"
    path.write_text(BODY)
    return TaskFile(str(path), seed=0, limit_s=60)


@parametrize("code", FAILURES)
def test_a_reward_is_a_number_or_a_sentence_whatever_its_code_does(file, code, monkeypatch):
    error, problem = FAILURES[code], Problem("1+1=", "2", "line 1")
    if error is None:
        assert file.reward(problem, code) == 1.0
    else:
        with monkeypatch.context() as patch, value_error(r"^the reward fails \(") as failed:
            patch.setattr(file, "limit_s", 0.5 if "0.5" in error else 60)
            file.reward(problem, code)
        assert error in str(failed.value)
    assert file.reward(problem, "return 1.0") == 1.0


def test_the_answer_to_a_call_that_was_interrupted_is_not_that_to_the_next_one(file):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        file.reward(Problem("", "", ""), "__import__('time').sleep(1)\n return 1")
    assert file.reward(Problem("", "", ""), "return 2") == 2


ENDS = {  # what the first reward does, and how the run ends
    "os.kill(os.getppid(), signal.SIGKILL)\n while True: pass": -signal.SIGKILL,
    "os.kill(os.getppid(), signal.SIGINT)\n time.sleep(60)": -signal.SIGINT,
    "subprocess.Popen(['sleep', '600'])": 0,
}


@parametrize("code", ENDS)
def test_no_process_of_a_file_outlives_the_run_and_a_signal_does_not_wait_for_rewards(tmp_path, code):
    (tmp_path / "mine.py").write_text("import os, signal, subprocess, time\ndef reward(problem, response):\n"
                                      f" if response == 'first': {code}\n return 1.0")  # fmt: skip
    program = """if True:
        import signal
        from tasks.task_file import TaskFile
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        file = TaskFile("mine.py", 0, 60)
        for response in ["first", *"later"]:
            file.reward(None, response)
    """
    # It returns when nobody can write to its output any more.
    python("-c", program, folder=tmp_path, status=ENDS[code], PYTHONPATH=str(ROOT))


def test_the_seed_decides_what_a_file_draws_without_rng_and_the_order_of_its_sets(loaded):
    text = "import random\nproblems = {(f'{n}{random.random()}', '1') for n in 'abcdef'}\ndef reward(*_): return 1.0"
    assert len({loaded(text, seed).fingerprint for seed in (0, 0, 1)}) == 2


def test_a_process_that_is_started_again_runs_the_text_of_the_digest_with_the_same_modules(tmp_path, loaded):
    text, prints = "import os\nfrom beside import grade\nproblems = [('1', '1'), ('2', '1')]\n", set()
    text += "def reward(problem, response): return grade() if response else os._exit(3)"
    for value in (1, 2):
        (tmp_path / "beside.py").write_text(f"def grade(): return {value}")
        task = loaded(text)
        prints.add(task.fingerprint)
        (tmp_path / "task.py").write_text("")
        with value_error("ended with status 3"):
            task.reward(task.train[0], "")
        assert task.reward(task.train[0], "x") == value
    assert len(prints) == 2
    (tmp_path / "beside.py").write_text("def grade(): return 33")
    task.reward.__self__.kill()
    with value_error("what it imports from its folder must stay the same in a run"):
        task.reward(task.train[0], "x")


GRADED = """
def sample(rng):
    return str(rng.randint(1, 9)), "1"

def reward(problem, response, rollout):
    return rollout.token_ids[0] + sum(rollout.logprobs) / (rollout.versions[0] == 1 and rollout.finish_reason == "stop")
"""


def test_rewards_of_a_batch_know_the_rollout_and_a_failure_stops_the_run_or_is_left_out(loaded, capsys):
    task = replace(loaded(GRADED, reward_limit_s=60), tokenizer=toy_tokenizer(), reward_errors="leave-out")
    rollouts = [Rollout([1], 0, [token], [-0.5], [version], "stop") for token, version in ((5, 1), (6, 0), (7, 1))]
    rows, failed = task.score(task.train[:3], rollouts), task.train[1]
    assert [row["reward"] for row in rows] == [4.5, None, 6.5]
    assert [each.score for each in rollouts] == pytest.approx([4.5, math.nan, 6.5], nan_ok=True)
    said = capsys.readouterr().out
    assert "REWARD FAILED, one of 1: the reward fails (ZeroDivisionError" in said
    assert f"on {failed.source}, question {failed.question!r}, response '3'" in said
    rollouts[1].reward = None
    with value_error("; to go on without such responses, --reward-errors leave-out"):
        replace(task, reward_errors="stop").score(task.train[:3], rollouts)


# ------------------------------------------------------------------------------------------------ terms, none, groups
@pytest.fixture
def scored(loaded, tmp_path):
    """Rewards and terms of a file for these responses, in groups of two."""
    def score(text, *responses, **options):
        (tmp_path / "mine.py").write_text(text)
        tokenizer, rows = toy_tokenizer(), [{"question": each, "answer": 2} for each in ("1+1=", "2")]
        task = loaded(rows, reward=str(tmp_path / "mine.py"), **options)
        rollouts = [Rollout([1], 0, tokenizer(each, add_special_tokens=False)["input_ids"]) for each in responses]
        rows = replace(task, tokenizer=tokenizer).score(task.train * (len(responses) // 2), rollouts)
        return [(row["reward"], *row["terms"].items()) for row in rows]

    return score


def test_a_reward_is_a_sum_of_named_terms_or_none(scored):
    text = "def reward(problem, response): return {'a': 1, 'b': len(response)} if response else None"
    assert scored(text, "12", "") == [(3.0, ("a", 1.0), ("b", 2.0)), (None,)]


def test_a_file_that_grades_whole_groups_sees_them(scored):
    text = """def rewards(problem, responses, rollouts):
    assert all(len(each.token_ids) >= len(text) for each, text in zip(rollouts, responses))
    return [float(response == min(responses, key=len)) for response in responses]
"""
    assert scored(text, "12", "1", "1", "123") == [(0,), (1,), (1,), (0,)]
    for returned in ("[1.0]", "{1: 1.0, 2: 1.0}"):  # a list of the second has its keys
        with value_error(rf"returned {re.escape(returned)}, not a list of 2 rewards.* on .*line"):
            scored(f"def rewards(problem, responses): return {returned}", "1", "2")
    assert scored("def rewards(*_): return []", "1", "2", reward_errors="leave-out") == [(None,), (None,)]


@parametrize("method", ["spawn", "forkserver"])  # the second is the default of Python 3.14
def test_a_process_that_a_file_starts_can_import_it(scored, tmp_path, method):
    text = f"""import multiprocessing
def length(response): return len(response)
def rewards(problem, responses):
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        return pool.map(length, responses)
"""
    (tmp_path / "other").mkdir()
    (tmp_path / "mine.py").symlink_to("other/of_others.py")
    assert scored(text, "1", "12", reward_limit_s=30) == [(1,), (2,)]


def test_a_task_to_evaluate_on_gives_its_own_rewards_and_is_part_of_the_fingerprint(tmp_path, loaded):
    text, digests = "problems = [(str(n), '2') for n in range(%s)]\ndef reward(problem, response): return %s", set()
    for value in ("1.0", "2.0 if response == '2' else 1 / 0"):
        (tmp_path / "held_out.py").write_text(text % ("9", value))
        task = loaded(text % ("10, 19", 0.5), eval_task=str(tmp_path / "held_out.py"))
        digests.add(task.fingerprint)
    assert len(digests) == 2
    task = replace(task, tokenizer=toy_tokenizer(), stop_token_ids=(2,))

    def reward(evaluates, token=5, of_source=None):
        rollout = Rollout([1], 0, [token, 2], reward=of_source)
        return task.score(task.held_out[:1], [rollout], evaluates)[0]["reward"]

    assert [reward(False), reward(True)] == [0.5, 2.0]
    with value_error("a source's `answer` must give no rewards with eval_task"):
        reward(True, of_source=0.5)
    with value_error(r"ZeroDivisionError.* on .*held_out.py, problem .*, response '3'"):
        reward(True, token=6)


def test_a_reward_is_finite_a_tensor_is_a_number_and_nothing_is_graded_where_all_have_a_reward():
    def score(reward):
        task = Task([], [], exact_match, grade=lambda *_: 1 / 0, tokenizer=SimpleNamespace(decode=str))
        return task.score([Problem("q", "a", "s")], [Rollout([1], 0, [5], reward=reward)])[0]["reward"]

    assert [type(score(torch.tensor(0.5))), score(2), score(math.nan)] == [float, 2, None]
    with value_error("a reward must be finite, got inf on s"):
        score(math.inf)
