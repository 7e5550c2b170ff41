"""Rows as other people have them: formats, columns, what cannot be read, and the order in which problems come."""

import gzip
import json
import random
from collections import Counter

import datasets
import pandas
import pytest

from extras.problem_files import load_task
from tasks import Problem, Task, exact_match

ROWS = [{"problem": f"{n} + 1?", "answer": n + 1, "level": {"name": "easy", "digits": len(str(n))}} for n in range(20)]


def write(folder, kind: str) -> str:
    """A file, or a folder, of this kind with ROWS."""
    path = folder / kind.replace(" ", "-")
    kind, packed, _ = kind.partition(".gz")
    plain, frame = folder / kind, pandas.DataFrame(ROWS)
    if kind.startswith("folder"):
        plain.mkdir()
        frame.to_parquet(plain / "train-00000-of-00001.parquet")
    elif kind.startswith("saved"):
        datasets.Dataset.from_list(ROWS).save_to_disk(str(plain))
    elif kind.endswith("jsonl"):
        plain.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind.endswith("json"):
        plain.write_text(json.dumps(ROWS, indent=1))
    elif kind.endswith("parquet"):
        frame.to_parquet(plain)
    else:
        frame.drop(columns="level").to_csv(plain, index=False, sep="\t" if kind.endswith("tsv") else ",")
    if packed:
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return str(path)


KINDS = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "folder", "saved"]


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind}.gz" for kind in KINDS if "." in kind)])
def test_each_kind_of_file_gives_the_same_problems_and_the_reward_reads_the_row(tmp_path, kind):
    task = load_task(write(tmp_path, kind), 0)
    problems = sorted(task.train + task.held_out, key=lambda problem: int(problem.answer))
    assert [(problem.question, problem.answer) for problem in problems] == [
        (row["problem"], str(row["answer"])) for row in ROWS]  # fmt: skip
    assert problems[3].row == (ROWS[3] if "sv" not in kind else {"problem": "3 + 1?", "answer": "4"})
    assert task.columns == f"{tmp_path}/{kind}: questions are in column problem, answers in answer"
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
    "dots": ({"a": {"b": {"q": "1+1"}}, "a.b": 2}, {"question_column": "a.b.q", "answer_column": "a.b"},
             ("1+1", 0, "2")),
    "the first usual name": ({"input": "x", "prompt": "1+1", "target": 3, "final_answer": ["2"]}, {}, ("1+1", 0, "2")),
    "nested and not given": ({"prompt": CHAT, "reward_model": {"ground_truth": 2}}, {},
                             "answer_column must be a column of .*, got none of .*; it has prompt, reward_model, "
                             "reward_model.ground_truth$"),
    "an image": ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 2}, {},
                 "line 1: its question must be a text, or chat messages with role and"),
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


BAD = [{"question": "1", "answer": "diverges"}, {"question": "2", "answer": "x ="}, {"question": "3"},
       {"question": " ", "answer": 1}, {"question": "5", "answer": "1 1/2"}]  # fmt: skip
GOOD = [{"question": f"q{n}", "answer": n} for n in range(10)]
HALVES = [{"question": "half", "answer": "1/2"}, {"question": "half", "answer": r"\frac{1}{2}"}]


OTHERS = [{"question": "q3 ", "answer": 5}, {"question": "q3", "answer": 6}]


@pytest.mark.parametrize("rows, complaint, left, repeated", [
    ([*GOOD, *BAD, *HALVES], r"^5 of 17 rows of .* readable answer: .*line 11: its answer 'diverges' is no .*;"
                             r" .*line 12: .*; .*line 13: .*; to leave them out, --unreadable-an", 11, 1),
    ([*GOOD, *OTHERS], "^1 of 10 questions have two answers: .*line 4 has '3' and .*line 11 has '5'", 9, 2),
])  # fmt: skip
def test_rows_that_cannot_be_read_or_contradict_each_other_are_counted_and_can_be_dropped(
        loaded, rows, complaint, left, repeated, capsys):
    with pytest.raises(ValueError, match=complaint):
        loaded(rows)
    task = loaded(rows, unreadable_answers="drop")
    questions = {problem.question.strip() for problem in task.train + task.held_out}
    assert (len(questions), task.num_repeated) == (left, repeated)
    assert ("q3" in questions) == (left == 11)
    assert capsys.readouterr().out.count(": DROPPED\n") == 1


# ------------------------------------------------------------------------------------------------ two tasks
def test_the_task_to_evaluate_on_is_of_any_kind(tmp_path, good):
    rows = write(tmp_path, "a.parquet")
    task = load_task(str(good / "task.py"), 0, eval_task=rows)
    assert (len(task.train), len(task.held_out)) == (60, 20)
    for name, count in (("toy", 2_000), ("digits", 256), (str(good / "task.py"), 60)):
        assert len(load_task(rows, 0, eval_task=name).held_out) == count
    assert len(load_task("toy", 0, eval_task=rows).train) == len(load_task("toy", 0).train) == 18_000


def test_a_dataset_with_a_test_split_alone_can_be_evaluated_on(tmp_path):
    (tmp_path / "math").mkdir()
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "math" / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"must have a split train, .*math has test; --eval-task takes any"):
        load_task(str(tmp_path / "math"), 0)
    assert len(load_task("digits", 0, eval_task=str(tmp_path / "math")).held_out) == 20


# ------------------------------------------------------------------------------------------------ passes
def test_each_problem_comes_once_in_a_pass_in_a_new_order_and_none_twice_in_a_step():
    """As many independent draws as there are problems miss 37 % of them."""
    problems = [Problem(str(number), "", "") for number in range(10)]
    task, rng, left, drawn = Task(problems, [], exact_match, in_passes=True), random.Random(0), [], []
    for _ in range(40):
        step = [int(problem.question) for problem in task.sample(rng, 4, left)]
        assert len({*step}) == 4
        drawn += step
    for end in range(10, 161, 10):
        assert {*Counter(drawn[:end]).values()} == {end // 10}
    orders = {tuple(drawn[start : start + 10]) for start in range(0, 160, 10)}
    assert len(orders) == 16
    free = Task(problems, [], exact_match)
    assert free.sample(random.Random(1), 4, []) == random.Random(1).sample(problems, 4)  # as it was


PROBLEMS = """
problems = [("%d + 1?" % n, str(n + 1), "even" if n % 2 == 0 else "") for n in range(40)]
def reward(problem, response): return problem.row["question"] == problem.question
"""


TUPLE, ROW = '("%d + 1?" % n, str(n + 1), "even" if n % 2 == 0 else "")', '{"question": "%d + 1?" % n, "target": n}'


@pytest.mark.parametrize("text", [PROBLEMS, PROBLEMS.replace("problems = ", "def problems(): return "),
                                  PROBLEMS.replace(TUPLE, ROW)])
def test_a_task_file_can_list_its_problems(loaded, text):
    task = loaded(text)
    assert task.in_passes and len(task.train + task.held_out) == 40
    if "even" in text:
        assert len({"even" in {problem.family for problem in part} for part in (task.train, task.held_out)}) == 2
    assert task.reward(task.train[0], "") == 1.0
