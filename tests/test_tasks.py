"""Tasks: the toys, files and data sets as a user may bring them, and the rewards that compare answers."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

from helpers import parametrize, task_of

from tasks import Problem, Task, exact_match
from tasks.problem_files import drawn
from tasks.split import split
from tasks.toys import addition, digits


# ------------------------------------------------------------------------------------------------ the toys
@parametrize("toy, sizes, right", [
    (addition, (18_000, 2_000), lambda a, b: f"{int(a) + int(b):04}"[::-1]),
    (digits, (64, 256), lambda a, b: "".join(map(max, a, b)).rstrip("=")),  # the larger digit at each place
])  # fmt: skip
def test_a_toy_is_right_split_without_overlap_and_decided_by_the_seed(toy, sizes, right):
    task = toy(0)
    assert (len(task.train), len(task.held_out)) == sizes
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    assert task.train == toy(0).train != toy(1).train
    assert len({p.question for p in task.sample(random.Random(3), 64, [])}) == 64
    assert all(problem.answer == right(*problem.question[:-1].split("+")) for problem in task.problems)


def test_exact_match():
    responses = "42", " 42\n", "042", "42.", "4 2", ""
    assert [exact_match(Problem("", "42", ""), each) for each in responses] == [1, 1, 0, 0, 0, 0]


# ------------------------------------------------------------------------------------------------ files
def test_jsonl_is_split_by_question_or_takes_its_held_out_problems_from_a_second_file(tmp_path, loaded):
    """40 questions twice, one copy with another solution of the same number and a space: merged before the split."""
    rows = [{"question": f"{i}+1={end}", "answer": answer.format(i)}
            for end, answer in (("", "{}"), (" ", "so #### {}.0")) for i in range(40)]
    task = loaded(rows)
    assert (len(task.train), len(task.held_out), task.num_repeated) == (36, 4, 40)
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows[-5:])))
    task = loaded(rows, eval_task=str(tmp_path / "eval.jsonl"))
    assert {p.question for p in task.held_out} == {row["question"] for row in rows[-5:]}
    assert len({p.key for p in task.problems}) == len(task.train) + 5 == 40


def test_an_evaluations_first_problems_are_a_sample_that_the_seed_draws_and_a_toys_stay_as_they_are(tmp_path):
    test = tmp_path / "mine" / "test.jsonl"
    test.parent.mkdir()
    test.write_text("\n".join(json.dumps({"question": str(n), "answer": n // 100}) for n in range(400)))  # by subject
    (tmp_path / "mine" / "train.jsonl").write_text(json.dumps({"question": "one", "answer": 1}))
    one, again, other = (task_of("toy", seed, eval_task=str(test)).held_out for seed in (0, 0, 1))
    assert one == again != other
    for held_out in (one, task_of(test.parent).held_out):
        assert {problem.answer for problem in held_out[:20]} == {"0", "1", "2", "3"}
        assert len({problem.question for problem in held_out}) == 400
    assert task_of("digits", 3).held_out == digits(3).held_out


def test_problems_of_one_family_are_held_out_together_and_the_seed_decides_which(loaded):
    text = """pairs = [(a, b) for a in range(10) for b in range(10)]
problems = [("%d + %d" % pair, str(sum(pair)), str(sorted(pair))) for pair in pairs]
def reward(problem, response):
    return float(response == problem.answer)
"""
    zero = loaded("problems = [(str(n), '', n // 25) for n in range(100)]\ndef reward(*_): return 1")
    assert {len({problem.row["family"] for problem in part}) for part in (zero.train, zero.held_out)} == {3, 1}
    task, again, other = (loaded(text, seed) for seed in (0, 0, 1))
    train, held_out = ({problem.family for problem in part} for part in (task.train, task.held_out))
    assert (len(task.train) + len(task.held_out), len(held_out), len(train)) == (100, 6, 49)
    assert not train & held_out
    assert task.train == again.train != other.train
    given = split(replace(task, train=task.train[20:], held_out=task.train[:20]), "", 0)
    assert not {problem.family for problem in given.train} & {problem.family for problem in given.held_out}


def test_the_fingerprint_has_the_columns_that_only_a_reward_reads():
    one, other = (Task([Problem("", "", "", row={"tests": each})], [], exact_match).fingerprint for each in "ab")
    assert one != other


@parametrize("there_are, found", [(10**6, 10_000), (50, 50)])
def test_a_task_that_draws_has_ten_thousand_problems_or_all_there_are(there_are, found):
    rng = random.Random(0)
    assert len(drawn(SimpleNamespace(sample=lambda: rng.randrange(there_are)))) == found
