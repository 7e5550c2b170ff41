"""Rows as other people have them: formats, columns, what cannot be read, and the order in which problems come."""

import gzip
import json
import random
from copy import deepcopy
from itertools import chain

import datasets
import pandas
import pytest

from extras.problem_files import load_task
from rollouts import Synchronous
from tasks import Problem, Task, exact_match

ROWS = [{"problem": f"{n} + 1?", "answer": n + 1, "level": {"name": "easy", "digits": len(str(n))}} for n in range(20)]


FRAME = pandas.DataFrame(ROWS)
WRITERS = {
    "a.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS, indent=1).encode())),
    "a.csv": lambda path: FRAME.drop(columns="level").to_csv(path, index=False),
    "a.tsv.gz": lambda path: FRAME.drop(columns="level").to_csv(path, index=False, sep="\t"),  # packs it by its name
    "a.parquet": FRAME.to_parquet,
    "a.parquet.gz": lambda path: path.write_bytes(gzip.compress(FRAME.to_parquet())),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(str(path)),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_of_file_gives_the_same_problems_and_the_reward_reads_the_row(tmp_path, kind):
    path = tmp_path / kind
    WRITERS[kind](path)
    task = load_task(str(path), 0)
    problems = sorted(task.train + task.held_out, key=lambda problem: int(problem.answer))
    assert [(problem.question, problem.answer) for problem in problems] == [
        (row["problem"], str(row["answer"])) for row in ROWS]  # fmt: skip
    assert problems[3].row == (ROWS[3] if "sv" not in kind else {"problem": "3 + 1?", "answer": "4"})
    assert task.columns == f"{path}: questions are in column problem, answers in answer"
    assert len(task.held_out) == 2 and task.in_passes


def test_the_cells_of_a_csv_file_stay_texts(tmp_path):
    """As numbers 0870 would be 870, and NA would be missing."""
    (tmp_path / "a.csv").write_text('id,question,answer\n1,"a, ""b""\nc",0870\n2,d,1e5\n3,e,NA\n4,f,\n')
    (tmp_path / "mine.py").write_text("def reward(problem, response): return response == problem.answer")
    task = load_task(str(tmp_path / "a.csv"), 0, reward=str(tmp_path / "mine.py"))
    found = sorted((each.source, each.question, each.answer) for each in task.train + task.held_out)
    assert [each[1:] for each in found] == [('a, "b"\nc', "0870"), ("d", "1e5"), ("e", "NA"), ("f", "")]
    assert found[0][0] == f"{tmp_path}/a.csv, line 3"


CHAT = [{"role": "system", "content": "Count."}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
COLUMNS = {  # a row, options, and question, number of messages and answer; or what is refused
    "verl": ({"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}},
             {"answer_column": "reward_model.ground_truth"}, ("1+1", 2, "2")),
    "the first usual name": ({"input": "x", "prompt": "1+1", "target": 3, "final_answer": ["2"]}, {}, ("1+1", 0, "2")),
    "a single message is a text": ({"prompt": [{"role": "user", "content": "1+1"}], "answer": 2}, {}, ("1+1", 0, "2")),
    "no user": ({"prompt": CHAT[:1], "answer": 2}, {}, "the user's among them"),
    "two answers in one": ({"problem": "1", "answer": ["1", "2"]}, {}, "its answer must be a string or a number, it"),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns(loaded, kind):
    row, options, expected = COLUMNS[kind]
    rows = [row, json.loads(json.dumps(row).replace("1+1", "1+1, or so"))]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            loaded(rows, **options)
        return
    task = loaded(rows, **options)
    (problem,) = (each for each in task.train + task.held_out if each.source.endswith("line 1"))
    assert (problem.question, len(problem.messages), problem.answer) == expected
    assert problem.row == row


GOOD = [{"question": f"q{n}", "answer": n} for n in range(10)]
BAD = [{"question": "1", "answer": "diverges"}, {"question": "3"}, {"question": " ", "answer": 1}]
OTHERS = [{"question": "q3 ", "answer": 5}, {"question": "q3", "answer": 6}]


@pytest.mark.parametrize("rows, complaint, left", [
    ([*GOOD, *BAD], r"^3 of 13 rows of .* readable answer: .*line 11: its answer 'diverges' is no .*; .*line 12: .*;"
                    r" .*line 13: .*; to leave them out, --unreadable-an", 10),
    ([*GOOD, *OTHERS], "^1 of 10 questions have two answers: .*line 4 has '3' and .*line 11 has '5'", 9),
])  # fmt: skip
def test_rows_that_cannot_be_read_or_contradict_each_other_are_counted_and_can_be_dropped(
        loaded, rows, complaint, left, capsys):
    with pytest.raises(ValueError, match=complaint):
        loaded(rows)
    task = loaded(rows, unreadable_answers="drop")
    questions = {problem.question.strip() for problem in task.train + task.held_out}
    assert len(questions) == left
    assert ("q3" in questions) == (left == 10)
    assert capsys.readouterr().out.count(": DROPPED\n") == 1


# ------------------------------------------------------------------------------------------------ two tasks
def test_a_dataset_keeps_its_own_splits_and_with_any_split_it_can_be_evaluated_on(tmp_path, good):
    folder = tmp_path / "math"
    folder.mkdir()
    FRAME[:5].to_parquet(folder / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"must have a split train, .*math has test; --eval-task takes any"):
        load_task(str(folder), 0)
    assert len(load_task("digits", 0, eval_task=str(folder)).held_out) == 5
    assert len(load_task(str(good / "task.jsonl"), 0, eval_task="digits").held_out) == 256
    FRAME[5:].to_parquet(folder / "train-00000-of-00001.parquet")
    task = load_task(str(folder), 0)
    assert (len(task.train), len(task.held_out)) == (15, 5)
    (folder / "test-00000-of-00001.parquet").rename(folder / "validation-00000-of-00001.parquet")
    assert len(load_task(str(folder), 0).held_out) == 5


# ------------------------------------------------------------------------------------------------ passes
def test_each_problem_comes_once_in_a_pass_in_a_new_order_and_none_twice_in_a_step():
    """As many independent draws as there are problems miss 37 % of them."""
    problems = [Problem(str(number), "", "") for number in range(10)]
    task, rng, left = Task(problems, [], exact_match, in_passes=True), random.Random(0), []
    steps = [[problem.question for problem in task.sample(rng, 4, left)] for _ in range(40)]
    assert {len({*step}) for step in steps} == {4}
    drawn = [*chain(*steps)]
    passes = {tuple(drawn[start : start + 10]) for start in range(0, 160, 10)}
    assert len(passes) == 16
    assert {len({*each}) for each in passes} == {10}
    one, resumed = (Synchronous(None, task, None, 4, 2, 0) for _ in range(2))
    task.sample(one.rng, 4, one.left)
    resumed.load_state_dict(deepcopy(one.state_dict()))
    assert task.sample(one.rng, 4, one.left) == task.sample(resumed.rng, 4, resumed.left)


@pytest.mark.parametrize("problems", [
    'def problems(): return [("%d + 1?" % n, str(n + 1), "even" if n % 2 == 0 else "") for n in range(40)]',
    'problems = [{"question": "%d + 1?" % n, "target": n} for n in range(40)]',
])  # fmt: skip
def test_a_task_file_can_list_its_problems(loaded, problems):
    task = loaded(f'{problems}\ndef reward(problem, response): return problem.row["question"] == problem.question')
    assert task.in_passes and len(task.train + task.held_out) == 40
    if "even" in problems:
        assert len({"even" in {problem.family for problem in part} for part in (task.train, task.held_out)}) == 2
    assert task.reward(task.train[0], "") == 1.0
