"""Rows as other people have them: formats, columns, what cannot be read, and the order in which problems come."""

import json
import random
import re
import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pandas
from datasets import ClassLabel, Dataset, Features, Value
from helpers import ROOT, parametrize, task_of, value_error

from tasks import Problem, Task, exact_match

ROWS = [{"problem": f"{n} + 1?", "answer": n + 1, "level": {"name": "easy", "digits": len(str(n))}} for n in range(20)]


FRAME = pandas.DataFrame(ROWS)


def test_parquet_gives_the_rows_and_the_start_says_which_columns_are_read(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    FRAME.to_parquet(path)
    task = task_of(path)
    found = {problem.question: (problem.answer, problem.row) for problem in task.problems}
    assert found == {row["problem"]: (str(row["answer"]), row) for row in ROWS}
    assert capsys.readouterr().out.startswith(
        f"{path}: questions are in column problem, answers in answer; in no prompt: level.name, level.digits (")
    assert len(task.held_out) == 2 and task.in_passes


# The characters of answers that a library with types would change. In JSON the last ones are no strings.
WRITTEN = ["007", "0.50", "2024-03-01", "12:30", "NA", "None", "null", "true", "1e5", "", " x ", "\u2028é", "1,5",
           "x" * 140_000,
           'a "b"\nc', "9007199254740993", "1.10", "-0.0", f"{10**20}.50", "false", "[1, null]", '{"é": "x"}']
LINES = [f'{{"question": "q{n}", "answer": {each if n > 14 else json.dumps(each)}}}' for n, each in enumerate(WRITTEN)]
FILES = {
    "data/train/a.jsonl": "\ufeff" + "\r\n".join(LINES), "train.json": f"[{','.join(LINES)}]",
}  # fmt: skip
SAME = """def reward(problem, response):
    assert type(problem.row["answer"]).__name__ in ("str", "int", "float", "bool", "list", "dict")
    return response == problem.answer"""


@parametrize("name", FILES)
def test_an_answer_has_the_characters_of_a_file_also_in_a_folder_or_on_a_hub(tmp_path, monkeypatch, name):
    # What a hub has been asked for before.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = tmp_path / "datasets--me--set"
    folder, refs, content = hub / "snapshots" / "1.jsonl", hub / "refs", FILES[name].encode()
    path = folder / name
    for each in refs, path.parent:
        each.mkdir(parents=True)
    (refs / "main").write_text(folder.name)
    path.write_bytes(content)
    (tmp_path / "mine.py").write_text(SAME)
    for each in ("me/set" if name == "train.json" else folder, folder, path):
        task = task_of(each, reward=str(tmp_path / "mine.py"))
        problems = task.problems
        assert {problem.question: problem.answer for problem in problems} == {
            f"q{n}": answer for n, answer in enumerate(WRITTEN)}  # fmt: skip
        assert {task.reward(problem, WRITTEN[int(problem.question[1:])]) for problem in problems} == {1.0}


# Public forms, a line each: its name, a row, options, and question, number of messages, answer and what is printed; or
# what is refused.
FORMS = (ROOT / "tests" / "data" / "forms.txt").read_text().splitlines()


@parametrize("form", FORMS, ids=lambda form: form.partition(" | ")[0])
def test_columns(tmp_path, monkeypatch, capsys, form):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def reward(problem, response): return 1.0")
    _, row, options, expected = form.split(" | ")
    Path("rows.jsonl").write_text(f"{row}\n{row.replace('1+1', '1+1, or so')}")
    options, expected = json.loads(options), json.loads(expected)
    if isinstance(expected, str):
        with value_error(re.escape(expected)):
            task_of("rows.jsonl", **options)
        return
    task = task_of("rows.jsonl", **options)
    (problem,) = (each for each in task.problems if each.source.endswith("line 1"))
    assert [problem.question, len(problem.messages), problem.answer] == expected[:3]
    assert expected[3] in capsys.readouterr().out
    assert problem.row == json.loads(row)


def test_a_readme_that_says_how_files_are_read_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nconfigs:\n- {config_name: one, data_files: a.json, field: data}\n---\n")
    with value_error(r"README.md must not say how files are read \(field\);"):
        task_of(tmp_path)


def test_a_dataset_needs_the_library_datasets_and_a_file_of_rows_does_not(good, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert task_of(good / "task.jsonl").train
    with value_error(r"^loading the .*pip install datasets\) failed: ModuleNotFoundError"):
        task_of(tmp_path)


GOOD = [{"question": f"q{n}", "answer": n} for n in range(10)]
BAD = [{"question": "1", "answer": "diverges"}, {"question": "3"}, {"question": " ", "answer": 1}]
OTHERS = [{"question": "q3 ", "answer": 5}, {"question": "q3", "answer": 6}]


@parametrize("rows, complaint, dropped, left", [
    (BAD, r"^3 of 13 rows .* \(to leave them out, --unreadable-answers drop\): .*line 11: its answer 'diverges' is no ",
     r"3 of 13 rows of .* readable answer: .*line 11: its .*; .*line 12: .*; .*line 13: .*: DROPPED\n", 10),
    (OTHERS, r"^1 of 10 questions have two answers \(to leave .* drop\): .*line 4 has '3' and .*line 11 has '5'",
     r"1 of 10 questions .*: DROPPED\n", 9),
])  # fmt: skip
def test_rows_that_cannot_be_read_or_contradict_each_other_are_refused_or_dropped(
        loaded, rows, complaint, dropped, left, capsys):
    with value_error(complaint):
        loaded(GOOD + rows)
    task = loaded(GOOD + rows, unreadable_answers="drop")
    assert len({problem.question for problem in task.problems} - {"q3"}) == 9 and len(task.problems) == left
    assert len(re.findall(dropped, capsys.readouterr().out)) == 1


def test_files_of_rows_that_are_in_no_split_are_named(tmp_path, capsys):
    for name in ("train.jsonl", "test.jsonl", "hard.jsonl", "more.csv", "dataset_info.json", "notes.txt"):
        (tmp_path / name).write_text(json.dumps({"question": name, "answer": 1}))
    assert len(task_of(tmp_path).problems) == 2
    assert f"notice: NOT READ in {tmp_path} are 2 files, such as {tmp_path}/hard.jsonl: " in capsys.readouterr().out


@parametrize("kind, value, lossy", [
    (Value("float64"), 0.1, ""), (ClassLabel(names=["0.1"]), 0, "ClassLabel"), (Value("float32"), 0.1, "float32"),
    ({"float32": Value("int64")}, {"float32": 1}, ""), ({"truth": [Value("float16")]}, {"truth": [0.1]}, "float16"),
])  # fmt: skip
def test_types_that_change_a_value_are_refused_in_any_column_at_any_depth(tmp_path, kind, value, lossy):
    rows = {"question": ["1"], "answer": ["0.1"], "value": [value]}
    types = Features(question=Value("string"), answer=Value("string"), value=kind)
    Dataset.from_dict(rows, features=types).to_parquet(tmp_path / "a.parquet")
    for name in (tmp_path / "a.parquet", tmp_path):
        with value_error(f"column value of .* got {lossy}; store its values as texts, or ") if lossy else nullcontext():
            assert [problem.row["value"] for problem in task_of(name, eval_task="digits").train] == [value]


def test_a_folder_whose_name_is_a_pattern_of_another_is_refused(tmp_path):
    for name in ("set1", "set[1]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"question": "1", "answer": 1}')
    with value_error(r"a folder's path must have no .*; rename the folder"):
        task_of(tmp_path / "set[1]")


def test_answers_that_no_sentence_can_give_are_named(loaded, capsys):
    task = loaded([{"question": f"q{n}", "answer": answer} for n, answer in enumerate(("x", "b", "3/4", "2", "C"))])
    assert "notice: 2 answers, such as 'x', are found in \\boxed{} or <answer> alone" in capsys.readouterr().out
    for problem in task.problems:
        assert task.reward(problem, f"<answer>{problem.answer}</answer>") == 1.0


# ------------------------------------------------------------------------------------------------ two tasks
def test_a_dataset_keeps_its_own_splits_and_with_any_split_it_can_be_evaluated_on(tmp_path, good):
    folder = tmp_path / "math"
    folder.mkdir()
    FRAME[:5].to_parquet(folder / "test-00000-of-00001.parquet")
    with value_error(r"^task must have problems left to train on, .*math has 5 .* held out"):
        task_of(folder)
    assert len(task_of("digits", eval_task=str(folder)).held_out) == 5
    assert len(task_of(good / "task.jsonl", eval_task="digits").held_out) == 256
    FRAME[5:].to_parquet(folder / "train-00000-of-00001.parquet")
    task = task_of(folder)
    assert (len(task.train), len(task.held_out)) == (15, 5)
    (folder / "test-00000-of-00001.parquet").rename(folder / "validation-00000-of-00001.parquet")
    assert len(task_of(folder).held_out) == 5


# ------------------------------------------------------------------------------------------------ passes
def test_chats_with_their_entries_in_another_order_are_one_problem():
    one, other = ([dict.fromkeys(names, "x")] for names in (("role", "content"), ("content", "role")))
    assert Problem("", "", "", messages=one).key == Problem("", "", "", messages=other).key


def test_each_problem_comes_once_in_a_pass_in_a_new_order_and_none_twice_in_a_step():
    """As many independent draws as there are problems miss 37 % of them."""
    problems = [Problem(str(number), "", "") for number in range(10)]
    task, rng, left = Task(problems, [], exact_match, in_passes=True), random.Random(0), []
    steps = [task.sample(rng, 4, left) for _ in range(40)]
    assert all(len({problem.question for problem in step}) == 4 for step in steps)
    drawn = [problem.question for problem in chain(*steps)]
    passes = {tuple(drawn[start : start + 10]) for start in range(0, 160, 10)}
    assert len(passes) == 16 and all(len({*each}) == 10 for each in passes)


def test_a_task_file_can_list_its_problems(loaded, capsys):
    task = loaded("""problems = [{"question": "%d + 1?" % n, "target": n} for n in range(40)]
def reward(problem, response): return problem.row["question"] == problem.question""")
    assert task.in_passes and len(task.problems) == 40 and task.reward(task.train[0], "") == 1.0
    assert capsys.readouterr().out == ""  # columns are of rows
