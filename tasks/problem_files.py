"""`--task` and `--eval-task`: problems from a file, from a dataset, or from a user's Python file.

What is wrong with a file is a ValueError that names it.
"""

import json
import os
import random
import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from model_folder import reach_hub
from report.errors import stage
from tasks import Problem, Task
from tasks.answers import Answers, Unreadable, last_part
from tasks.options import Options
from tasks.split import refuse_or_drop, split
from tasks.task_file import TaskFile

BUILT_IN = ("toy", "digits")  # tasks in toys.py
# The usual names of columns, also with capitals: of those that a file has the first is taken. The
# texts of `body` and `question`, say, are joined.
COLUMNS = {
    "question_column": ("body+question", "question", "problem", "prompt", "query",
                        "instruction+input", "input", "instruction"),
    "answer_column": ("answer", "final_answer", "ground_truth", "target", "expected_answer",
                      "reward_model.ground_truth", "solution", "output", "response"),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
# A text of chat messages, not a question that begins with other JSON.
MESSAGES = r"""(?s)\s*\[\s*\{.*["'](?:role|from)["']\s*:.*\}\s*\]\s*"""
LOSSY = r"float(?:16|32)(?='(?!:))|ClassLabel(?=\()"  # in the type of a column, at any depth
Rows = list[tuple[str, Any]]  # each with its source, such as a file and the number of a line


def load_task(name: str, seed: int, data: Options) -> Task:
    """The task `name`, split by the seed. Raises: ValueError that says what is wrong with it."""
    for option in ("reward", "question_column", "answer_column"):
        if getattr(data, option) and is_program(name) and is_program(data.eval_task or name):
            raise ValueError(f"{option} must be given with a data file only, {name} has its own")
    task = read_task(name, seed, data)
    evaluation, held_out = None, task.held_out
    if data.eval_task:
        evaluation = read_task(data.eval_task, seed, data)
        held_out = evaluation.held_out or evaluation.train
    if data.eval_task or name not in BUILT_IN:
        # An evaluation has the first of them, and a file may be sorted by subject.
        held_out = random.Random(seed).sample(held_out, len(held_out))
    task = replace(task, held_out=held_out, evaluation=evaluation, reward_errors=data.reward_errors)
    task = split(task, name, seed, data.unreadable_answers == "drop")
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED")
    return task


def is_program(name: str) -> bool:
    return name in BUILT_IN or name.endswith(".py")


def read_task(name: str, seed: int, data: Options) -> Task:
    """The task `name`. Its problems are all in `train`, unless it says itself which to hold out."""
    if name in BUILT_IN:
        from tasks.toys import TASKS

        return TASKS[name](seed)
    path = name if is_program(name) else data.reward
    file = TaskFile(path, seed, data.reward_limit_s) if path else None
    answers = None if file else Answers(data.reward_limit_s)
    held_out, in_passes = [], True
    if path == name:
        listed = file.problems()
        in_passes = listed is not None
        train = rows_of(name, listed if in_passes else drawn(file))
    else:
        train, held_out = read_rows(name)
    problems = problems_of(name, held_out + train, data, answers)
    train, held_out = ([problems[source] for source, _ in rows if source in problems]
                       for rows in (train, held_out))
    if answers:
        return Task(train, held_out, answers.reward, same=answers.same, in_passes=True)
    text = "".join(map(str, file.files))
    return Task(train, held_out, file.reward, file.rewards, file.whole_groups, text=text,
                in_passes=in_passes)


def problems_of(
    name: str, rows: Rows, data: Options, answers: Answers | None
) -> dict[str, Problem]:
    """The problems of the rows, by their sources. `answers`: None if a file gives the rewards.

    Raises: ValueError.
    """
    columns = list(dict.fromkeys(column for _, row in rows for column in flat(row)))
    question, answer = None, None
    if rows:
        question = choose_column("question_column", name, columns, data, True)
        answer = choose_column("answer_column", name, columns, data, answers is not None)
    problems, faults, unsaid = {}, [], []
    for source, row in rows:
        try:
            problem = problem_of(source, row, question, answer, any_answer=answers is None)
            said = f"The answer is {last_part(problem.answer)}."
            if answers and not answers.reward(problem, said):
                unsaid.append(problem.answer)
        except Unreadable as fault:
            faults.append(f"{source}: {fault}")
            continue
        family = row.get("family") if is_program(name) else None
        problems[source] = problem._replace(family="" if family is None else str(family))
    refuse_or_drop(faults, f"of {len(rows)} rows of {name} have no question or no readable answer",
                   data.unreadable_answers == "drop")
    if not problems:
        raise ValueError(f"task must have problems, {name} has none")
    if not is_program(name):
        name_columns(name, columns, question, answer, problems.values())
    if unsaid:
        print(f"notice: {len(unsaid)} answers, such as {unsaid[0]!r:.40}, are found in \\boxed{{}}"
              " or <answer> alone, not in a sentence: ask for one of them in the prompt")
    return problems


def drawn(file: TaskFile) -> list[Any]:
    """10,000 different results of its `sample`, as in examples/arithmetic.py.

    There are fewer if 1,000 calls of `sample` in a row bring nothing new.
    """
    problems, misses = {}, 0
    while len(problems) < 10_000 and misses < 1_000:
        problem = file.sample()
        misses = misses + 1 if str(problem) in problems else 0
        problems[str(problem)] = problem
    return [*problems.values()]


def rows_of(path: str, problems: list[Any]) -> Rows:
    """The problems of a task file as rows with columns."""
    rows = []
    for number, problem in enumerate(problems, 1):
        row = problem
        if isinstance(problem, tuple | list) and len(problem) in (2, 3):
            row = dict(zip(("question", "answer", "family"), problem, strict=False))
        if not isinstance(row, dict):
            raise ValueError(f"a problem of {path} must be a question, an answer and perhaps a"
                             f" family, or a row with columns, it is {row!r:.80}")
        rows.append((f"{path}, problem {number}", row))
    return rows


# ---------------------------------------------------------------------------------- rows
class Written(float):
    """A JSON number with a fraction or exponent. Its `str` is as in the file: 0.50, not 0.5."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple:  # the process of a reward gets a plain number
        return float, (float(self),)


def read_rows(name: str) -> tuple[Rows, Rows]:
    """Of a file, a folder, or NAME or NAME:CONFIG on a hub: its rows, and those to hold out.

    Without a split train all are held out, for --eval-task. The library `datasets` finds the files
    of a folder and their splits. It does not read JSON: it would guess a date's type, for example.
    """
    if os.path.isfile(name) or (
            not os.path.exists(name) and re.search(r"\.(jsonl?|parquet)$", name)):
        return read_file(name), []
    from huggingface_hub import snapshot_download

    path, _, config = (name, "", "") if os.path.exists(name) else name.partition(":")
    with stage(f"loading the dataset {name} (task must be toy, digits, a .py file such as"
               " examples/arithmetic.py, a file of rows, or a dataset: a folder or a reachable hub"
               " name; pip install datasets)"):
        import datasets

        reach_hub(path)
        if not os.path.exists(path):
            path = snapshot_download(path, repo_type="dataset")
        if re.search(r"[][?*]", os.path.realpath(path)):
            raise ValueError("a folder's path must have no [ ] ? * (datasets reads the folders"
                             f" that match it), got {path}; rename the folder")
        builder = datasets.load_dataset_builder(path, config or None)
        files = {str(part): paths for part, paths in builder.config.data_files.items()}
        told = [option for option, value in vars(builder.config).items()
                if not hasattr(datasets.BuilderConfig, option)
                and value != getattr(type(builder.config), option, value)]
        if told:
            raise ValueError(f"its README.md must not say how files are read ({', '.join(told)});"
                             " rewrite the files as JSON lines")
        name_unread(path, {os.path.realpath(file) for paths in files.values() for file in paths})
        refuse_lossy(path, builder.info.features or {})
        train = files.get("train", [])
        held_out = files.get("test") or files.get("validation") or []
        if not train and not held_out:
            held_out = next(iter(files.values()))
        return [*chain(*map(read_file, train))], [*chain(*map(read_file, held_out))]


def name_unread(folder: str, read: set[str]) -> None:
    """Print which files of rows in a folder are in no split: `datasets` infers splits from names,
    and reads files of one kind.
    """
    rows = re.compile(r"(?i)(?!dataset_infos?\.json).*\.(jsonl?|[ct]sv|parquet|arrow)(\.gz)?")
    unread = sorted(str(file) for file in Path(folder).rglob("*")
                    if rows.fullmatch(file.name) and os.path.realpath(file) not in read)
    if unread:
        print(f"notice: NOT READ in {folder} are {len(unread)} files, such as {unread[0]}: all"
              " files must be of one kind, and all names must have a split (train, test), or none")


def read_file(path: str) -> Rows:
    if not path.lower().endswith(".parquet"):
        return read_text(path)
    with stage(f"reading {path} (pip install datasets)"), open(path, "rb") as file:
        import datasets
        from pyarrow import parquet

        table = parquet.read_table(file)
        refuse_lossy(path, datasets.Features.from_arrow_schema(table.schema))
        rows = table.to_pylist()
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def refuse_lossy(name: str, features: dict[str, Any]) -> None:
    """Raises: ValueError that names a column whose values are not those that were written."""
    for column, kind in features.items():
        if lossy := re.search(LOSSY, str(kind)):
            raise ValueError(f"column {column} of {name} must have texts, whole numbers or float64"
                             " (0.1 is 0.10000000149 in float32, and a class label is a number),"
                             f" got {lossy[0]}; store its values as texts, or leave it out")


def read_text(path: str) -> Rows:
    """A JSON array, or JSON lines that are not blank."""
    what = (f"reading {path} (rows that are no text must be .parquet: unpack .gz, convert .arrow)"
            " as UTF-8")
    with stage(what), open(path, encoding="utf-8-sig", newline="") as file:
        text = file.read()
    parse = partial(json.loads, parse_float=Written, object_pairs_hook=without_twins)
    if text.lstrip().startswith("["):
        with stage(f"reading {path} as a JSON array"):
            return [(f"{path}, row {number}", row) for number, row in enumerate(parse(text), 1)]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines cuts at U+2028
        if line.strip():
            with stage(f"reading {path} (of a table: pandas.read_csv(PATH, dtype=str,"
                       " keep_default_na=False).to_json('rows.jsonl', orient='records',"
                       f" lines=True)), line {number} as JSON"):
                rows.append((f"{path}, line {number}", parse(line)))
    return rows


def without_twins(columns: list[tuple[str, Any]]) -> dict[str, Any]:
    """A row. Raises: ValueError for a name that comes twice, because one value would be lost."""
    row = dict(columns)
    if len(row) < len(columns):
        names = [name for name, _ in columns]
        raise ValueError(f"a row must have each column once, got two {max(names, key=names.count)}")
    return row


# ---------------------------------------------------------------------------------- columns
def choose_column(
    option: str, name: str, there: list[str], data: Options, needed: bool
) -> str | None:
    """The column of an option. In a task file it has one of the usual names."""
    known = {column.lower(): column for column in there} | {column: column for column in there}
    given = None if is_program(name) else getattr(data, option)
    usual = COLUMNS[option]
    for names in [given] if given else usual:
        columns = [known.get(column) for column in names.split("+")]
        if None not in columns:
            return "+".join(columns)
    if given or needed:
        raise ValueError(f"{option} must be a column of {name}, got"
                         f" {given or f'none of {usual}'}; it has {', '.join(there)}"
                         " (with --reward no answer is needed)")
    return None


def name_columns(
    name: str, there: list[str], question: str, answer: str | None, problems: Collection[Problem]
) -> None:
    """Print which columns are read and which are not."""
    read = {*question.split("+"), answer, *(column.rpartition(".")[0] for column in there)}
    others = ", ".join(column for column in there if column not in read)
    said = f"{name}: questions are in column {question}, answers in {answer or 'no column'}"
    if others:
        said += f"; in no prompt: {others} (--question-column A+B joins two columns of text)"
    if empty := sum(not problem.answer.strip() for problem in problems):
        said += f"\nnotice: {empty} answers are empty; --answer-column names another column"
    print(said)


def flat(row: Any, prefix: str = "") -> dict[str, Any]:
    """The columns of a row, of a nested one both `outer` and `outer.inner`."""
    columns = {}
    for name, value in row.items() if isinstance(row, dict) else ():
        columns |= {prefix + name: value} | flat(value, f"{prefix}{name}.")
    return columns


def problem_of(
    source: str, row: Any, question_column: str, answer_column: str | None, any_answer: bool
) -> Problem:
    """The problem in a row. Raises: Unreadable."""
    columns = flat(row)
    texts = [columns[name] for name in question_column.split("+") if columns.get(name)]
    question, messages = as_prompt(texts)
    answer = columns.get(answer_column) if answer_column else ""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if type(answer) is float and answer.is_integer():  # of parquet, beside an empty cell
        answer = int(answer)
    is_missing = answer is None or answer != answer  # NaN
    if is_missing or not (any_answer or isinstance(answer, str | int | float)):
        raise Unreadable(f"its answer must be a string or a number, it is {answer!r:.80}; several"
                         " need --reward, a part of one --answer-column OUTER.INNER")
    if isinstance(answer, bool | list | dict):
        answer = json.dumps(answer, default=str, ensure_ascii=False)
    return Problem(question, str(answer), source, messages=messages, row=row)


def as_prompt(texts: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """A question, and no messages, also of a single message; or the user's last message, and all
    chat messages. Raises: Unreadable.
    """
    question, messages = "", []
    if {*map(type, texts)} == {str}:
        question = "\n".join(texts)
    elif len(texts) == 1 and isinstance(texts[0], list):
        for turn in texts[0]:  # flat: no dictionary has no columns
            message = {name: value for name, value in flat(turn).items() if value is not None}
            messages.append(message)
        if all(map(is_message, messages)):
            for message in messages:
                if message["role"] == "user":
                    question = message["content"]
    if not question.strip() or re.fullmatch(MESSAGES, question):
        raise Unreadable("its question must be a text, or a list of chat messages with role"
                         f" ({', '.join(ROLES)}) and content (a text) alone, the user's among them"
                         f" (write calls of tools into the content), it is {texts!r:.80}")
    return question, messages if messages[1:] else []


def is_message(entries: dict[str, Any]) -> bool:
    return (entries.keys() == {"role", "content"} and entries["role"] in ROLES
            and isinstance(entries["content"], str))
