"""`--task` and `--eval-task`: problems from a file, from a dataset, or from a user's Python file.

What is wrong with a file is a ValueError that names it.
"""

import csv
import gzip
import json
import os
import random
import re
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from models import reach_hub
from report.errors import stage
from tasks import Problem, Task
from tasks.answers import Answers, Unreadable, last_part
from tasks.options import Options
from tasks.split import refuse_or_drop, split
from tasks.task_file import TaskFile

BUILT_IN = ("toy", "digits")  # tasks in toys.py
# The usual names of columns, also with capitals: of those that a file has the first is taken. The
# texts of `body` and `question`, say, are joined.
QUESTIONS = ("body+question", "question", "problem", "prompt", "query", "instruction+input",
             "input", "instruction")
ANSWERS = ("answer", "final_answer", "ground_truth", "target", "expected_answer",
           "reward_model.ground_truth", "solution", "output", "response")
# Other columns without which a question may not be whole.
OF_A_QUESTION = (r"(?i)(.*_)?(choices?|options?|endings|distractor|context|passage|body|images?"
                 r"|tools|system|instruction)(_?\w|_prompt|\..*)?|op[a-d]|sol\d|incorrect.*"
                 r"|(?-i:[A-E])")
# A text of messages, not a question that begins with other JSON.
MESSAGES = r"""(?sx)\s*\[\s*\{\s*["'](?:(?:role|from)["']\s*:.*["'](?:content|value)
    |(?:content|value)["']\s*:.*["'](?:role|from))["']\s*:.*\}\s*\]\s*\Z"""
# Names of roles by ShareGPT, Gemini and others.
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "model", "bot", "assistant"), "assistant")
LOSSY = r"float(?:16|32)(?='(?!:))|ClassLabel(?=\()"  # in the type of a column, at any depth
ENOUGH_FAULTS = 20  # to refuse a file: math-verify needs minutes for the answers of a large one
Rows = list[tuple[str, Any]]  # each with its source, such as a file and the number of a line


def load_task(name: str, seed: int, data: Options) -> Task:
    """The task `name`, split by the seed. Raises: ValueError that says what is wrong with it."""
    names = [name, data.eval_task] if data.eval_task else [name]
    for option in ("reward", "question_column", "answer_column"):
        if getattr(data, option) and all(map(is_program, names)):
            raise ValueError(f"{option} must be given with a data file only, {name} has its own")
    task = read_task(name, seed, data)
    evaluation = None
    if data.eval_task:
        evaluation = read_task(data.eval_task, seed, data, strict=is_program(name))
        held_out = evaluation.held_out or evaluation.train
        task = replace(task, held_out=held_out, evaluation=evaluation)
    if data.eval_task or name not in BUILT_IN:
        # An evaluation has the first of them, and a file may be sorted by subject.
        held_out = random.Random(seed).sample(task.held_out, len(task.held_out))
        task = replace(task, held_out=held_out)
    if data.reward_workers > 1 and not (task.grade or (evaluation and evaluation.grade)):
        raise ValueError("reward_workers must be 1 without a reward of a file, got"
                         f" {data.reward_workers}")
    task = split(task, name, seed, data.unreadable_answers == "drop")
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED")
    return replace(task, reward_errors=data.reward_errors)


def is_program(name: str) -> bool:
    return name in BUILT_IN or name.endswith(".py")


def built_in(name: str, seed: int) -> Task:
    """Raises: ValueError for countdown, which was one."""
    from tasks.toys import TASKS

    if name == "countdown":
        raise ValueError("task must be examples/countdown.py for countdown, which is no longer"
                         " built in")
    return TASKS[name](seed)


def read_task(name: str, seed: int, data: Options, strict: bool = True) -> Task:
    """The task `name`. Its problems are all in `train`, unless it says itself which to hold out.

    `strict`: the columns that are given must be there.
    """
    if name in (*BUILT_IN, "countdown"):
        return built_in(name, seed)
    from_program, file, kinds = is_program(name), None, {}
    path = name if from_program else data.reward
    if path:
        file = TaskFile(path, seed, data.reward_limit_s, data.reward_workers)
    listed = file.problems() if from_program else None
    if from_program:
        train, held_out = rows_of(path, drawn(file) if listed is None else listed), []
    else:
        train, held_out, kinds = read_rows(name)
    rows = held_out + train
    columns = list(dict.fromkeys(column for _, row in rows for column in flat(row)))
    question, answer = None, None
    if rows:
        question, answer = choose_columns(
            name, columns, data, file is None, strict and not from_program)
        refuse_lossy(name, kinds, f"{question}+{answer}".split("+"))
    answers = Answers(data.reward_limit_s)  # without a file it gives the rewards
    problems, faults, unsaid = {}, [], []
    for source, row in rows:
        try:
            problem = problem_of(source, row, question, answer, file is not None)
            if not file and not answers.reward(
                    problem, f"The answer is {last_part(problem.answer)}."):
                unsaid.append(problem.answer)
        except Unreadable as fault:
            faults.append(f"{source}: {fault}")
            if len(faults) == ENOUGH_FAULTS and data.unreadable_answers == "refuse":
                break
            continue
        family = row.get("family") if from_program else None
        problems[source] = problem._replace(family="" if family is None else str(family))
    checked = len(problems) + len(faults)
    refuse_or_drop(faults, f"of {'the first ' if checked < len(rows) else ''}{checked} rows of"
                   f" {name} have no question or no readable answer",
                   data.unreadable_answers == "drop")
    if not problems:
        raise ValueError(f"task must have problems, {name} has none")
    if not from_program:
        empty = sum(not problem.answer.strip() for problem in problems.values())
        name_columns(name, columns, question, answer, empty)
    if unsaid:
        print(f"notice: {len(unsaid)} answers, such as {unsaid[0]!r:.40}, are found in \\boxed{{}}"
              " or <answer> alone, not in a sentence: ask for one of them in the prompt")
    rewards = dict(reward=answers.reward, same=answers.same)
    if file:
        text = "".join(map(str, [file.text, *sorted(file.beside.values())]))
        rewards = dict(reward=file.reward, grade=file.grade, text=text)
    train, held_out = ([problems[source] for source, _ in part if source in problems]
                       for part in (train, held_out))
    return Task(train, held_out, **rewards, in_passes=not from_program or listed is not None)


def try_reward(task: Task) -> None:
    """Raises: ValueError if the reward of a file fails; the trial's response is the prompt."""
    left_out = {}  # a cause is said once
    for problem, tried in ((task.train[0], task), (task.held_out[0], task.evaluation)):
        if tried is None or tried.grade is None:
            continue
        ids = problem.prompt_ids
        rollout = SimpleNamespace(token_ids=ids, logprobs=[0.0] * len(ids),
                                  versions=[1] * len(ids), finish_reason="length")
        for size in (1, 2):
            texts = [task.tokenizer.decode(ids)] * size
            result, *_ = tried.grade([(problem, texts, [rollout] * size)])[0]
            said = (f"{result} on {problem.source}, in a trial with the prompt as the response, of"
                    f" a group of {size}")
            failed = isinstance(result, ValueError)
            if failed and task.reward_errors == "stop":
                raise ValueError(said)
            if failed or result is None:
                left_out.setdefault(str(result), said)
    for said in left_out.values():
        print(f"notice: such responses have no reward and are left out: {said}")


def drawn(file: TaskFile) -> list[Any]:
    """10,000 different results of its `sample`, as in examples/countdown.py.

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


def read_rows(name: str) -> tuple[Rows, Rows, dict[str, Any]]:
    """Of a file, a folder, or NAME or NAME:CONFIG on a hub: its rows, those to hold out, and the
    types of its columns, which a file of text does not have.

    Without a split train all are held out, for --eval-task.
    """
    no_text = os.path.isdir(name) or name.lower().endswith(".parquet")
    if not no_text and (os.path.isfile(name) or re.search(r"\.jsonl?(\.gz)?$", name)):
        return read_text(name), [], {}
    splits, kinds = read_dataset(name)
    train = splits.get("train", [])
    held_out = splits.get("test") or splits.get("validation") or []
    if not train and not held_out:
        held_out = next(iter(splits.values()))
    return train, held_out, kinds


def read_text(path: str, separator: str | None = None, field: str | None = None) -> Rows:
    """CSV, whose cells stay texts, a JSON array, or JSON lines that are not blank; of *.gz too.

    Without a `separator` the name says whether the file is a table. `field` of JSON has the rows.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path} must be a regular file, and exist (a pipe can be endless)")
    with stage(f"reading the task file {path} (rows that are no text must be .parquet: unpack"
               " .parquet.gz, convert .arrow) as UTF-8"):
        content = Path(path).read_bytes()
        if path.lower().endswith(".gz"):
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    if separator is None and (table := re.search(r"\.(csv|tsv)(\.gz)?$", path.lower())):
        separator = "," if table[1] == "csv" else "\t"
    if separator:
        csv.field_size_limit(2**31 - 1)  # a cell can contain all tests of a program
        cells = csv.DictReader(
            StringIO(text, newline=""), restkey="", strict=True, delimiter=separator)
        with stage(f"reading {path} (a quote in a cell must be two, and the cell in quotes) as"
                   " CSV"):
            without_twins([(name, None) for name in cells.fieldnames or () if name])
            return [(f"{path}, line {cells.line_num}", row) for row in cells]
    parse = partial(json.loads, parse_float=Written, object_pairs_hook=without_twins)
    if field or text.lstrip().startswith("["):
        with stage(f"reading {path} as a JSON array"):
            rows = parse(text)[field] if field else parse(text)
        return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines cuts at U+2028
        if line.strip():
            with stage(f"reading {path} (tables end in .csv or .tsv), line {number} as JSON"):
                rows.append((f"{path}, line {number}", parse(line)))
    return rows


def without_twins(columns: list[tuple[str, Any]]) -> dict[str, Any]:
    """A row. Raises: ValueError for a name that comes twice, because one value would be lost."""
    names = [name for name, _ in columns]
    if len({*names}) < len(names):
        raise ValueError(f"a row must have each column once, got two {max(names, key=names.count)}")
    return dict(columns)


def read_dataset(name: str) -> tuple[dict[str, Rows], dict[str, Any]]:
    """The splits of what the library `datasets` reads, and the types of their columns. It would
    guess the types in CSV and JSON, 007 as 7, so of these it only finds the files.
    """
    from huggingface_hub import constants, snapshot_download

    with stage(f"reading {name}, which is no file of rows in text (pip install datasets)"):
        import datasets
        from datasets.packaged_modules.csv.csv import Csv
        from datasets.packaged_modules.json.json import Json
        from pyarrow import parquet
    path, _, config = (name, "", "") if os.path.exists(name) else name.partition(":")
    reach_hub(path)
    with stage(f"loading the dataset {name} (task must be toy, digits, a .py file, a file of rows,"
               " or a dataset: a folder or a reachable hub name)"):
        if name.lower().endswith(".parquet"):
            with open(name, "rb") as file:
                splits = {"train": datasets.Dataset(parquet.read_table(file))}
        elif os.path.exists(f"{name}/state.json"):  # of save_to_disk
            splits = {"train": datasets.load_from_disk(name)}
        else:
            if constants.HF_HUB_OFFLINE and not os.path.exists(path):
                path = snapshot_download(path, repo_type="dataset")  # what was downloaded before
            if os.path.exists(path) and re.search(r"[][?*]", os.path.realpath(path)):
                raise ValueError("a folder's path must have no [ ] ? * (datasets reads the folders"
                                 f" that match it), got {path}; rename the folder")
            builder = datasets.load_dataset_builder(path, config or None)
            if os.path.exists(path):
                name_unread(path, builder.config.data_files)
            if isinstance(builder, Csv | Json):
                # Else the text of an earlier file of this name.
                anew = datasets.DownloadConfig(force_extract=True)
                manager = datasets.DownloadManager(download_config=anew)
                files = manager.download_and_extract(builder.config.data_files)
                splits = {str(part): [row for path in manager.iter_files(paths)
                                      for row in read_as_told(path, builder.config)]
                          for part, paths in files.items()}
            else:
                splits = datasets.load_dataset(path, config or None)
    kinds = {}
    for rows in splits.values():
        kinds |= flat(getattr(rows, "features", {}))
    return {part: [(f"{name}, {part} {number}", row) for number, row in enumerate(rows, 1)]
            for part, rows in splits.items()}, kinds


def name_unread(folder: str, files: dict[Any, list[str]] | None) -> None:
    """Print which files of rows in a folder are in no split: `datasets` infers splits from names,
    and reads files of one kind.
    """
    read = {os.path.realpath(file) for part in (files or {}).values() for file in part}
    rows = re.compile(r"(?i)(?!dataset_infos?\.json).*\.(jsonl?|[ct]sv|parquet|arrow)(\.gz)?")
    unread = sorted(str(file) for file in Path(folder).rglob("*")
                    if rows.fullmatch(file.name) and os.path.realpath(file) not in read)
    if unread:
        print(f"notice: NOT READ in {folder} are {len(unread)} files, such as {unread[0]}: all"
              " files must be of one kind, and all names must have a split (train, test), or none")


def read_as_told(path: str, config: Any) -> list[Any]:
    """The rows of a file of a dataset, whose README can say more than where the files are."""
    if not hasattr(config, "sep"):
        return [row for _, row in read_text(path, "", config.field)]
    import pandas

    told = config.pd_read_csv_kwargs
    if told == type(config)(sep=config.sep).pd_read_csv_kwargs:
        return [row for _, row in read_text(path, config.sep)]
    text = {"dtype": str, "keep_default_na": False, "chunksize": None}
    return pandas.read_csv(path, **told | text).to_dict("records")


# ---------------------------------------------------------------------------------- columns
def refuse_lossy(name: str, kinds: dict[str, Any], used: list[str]) -> None:
    """Raises: ValueError that names a column whose values are not those that were written."""
    for column in used:
        if lossy := re.search(LOSSY, str(kinds.get(column))):
            raise ValueError(f"column {column} of {name} must have texts, whole numbers or float64"
                             " (0.1 is 0.10000000149 in float32, and a class label is a number),"
                             f" got {lossy[0]}; store its values as texts")


def choose_columns(
    name: str, there: list[str], data: Options, answers_needed: bool, strict: bool
) -> list[str | None]:
    """The columns of question and answer; `strict`: those that are given must be `there`."""
    known = {column.lower(): column for column in there} | {column: column for column in there}
    chosen = []
    for option, usual, hint in (
            ("question_column", QUESTIONS, " (in .csv and .tsv the first line names them)"),
            ("answer_column", ANSWERS, "; --reward needs none")):
        given = getattr(data, option)
        names = [given] if given else []
        if not (given and strict):
            names += ["+".join(known.get(part, part) for part in column.split("+"))
                      for column in usual]
        column = next((column for column in names if {*column.split("+")} <= {*there}), None)
        needed = (given and strict) or answers_needed or option == "question_column"
        if needed and column is None:
            raise ValueError(f"{option} must be a column of {name}, got"
                             f" {given or f'none of {usual}'}; it has {', '.join(there)}{hint}")
        chosen.append(column)
    return chosen


def name_columns(
    name: str, there: list[str], question: str, answer: str | None, empty: int
) -> None:
    """Print which columns are read and which are not. `empty`: the number of empty answers."""
    read = {*question.split("+"), answer, *(column.rpartition(".")[0] for column in there)}
    others = [column for column in there if column not in read]
    lost = [column for column in others if re.fullmatch(OF_A_QUESTION, column)]
    said = f"{name}: questions are in column {question}, answers in {answer or 'no column'}"
    if others:
        said += f"; in no prompt: {', '.join(others)}"
    if lost:
        said += (f"\nnotice: no prompt contains {', '.join(lost)}, which a question may need: write"
                 " it into the question (--question-column A+B joins two columns of text)")
    if empty:
        said += (f"\nnotice: {empty} answers are empty; --answer-column names one of"
                 f" {', '.join(there)}")
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
    if isinstance(columns.get(""), list) and any(columns[""]):
        raise Unreadable(f"it has more cells than columns, the last are {columns['']!s:.80}")
    texts = [columns[name] for name in question_column.split("+") if columns.get(name)]
    question, messages = as_prompt(texts)
    answer = "" if any_answer and answer_column is None else columns.get(answer_column)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if type(answer) is float and answer.is_integer():  # of parquet, beside an empty cell
        answer = int(answer)
    if isinstance(answer, bool) or (any_answer and isinstance(answer, list | dict)):
        answer = json.dumps(answer, default=str, ensure_ascii=False)
    is_missing = answer is None or answer != answer  # NaN
    if is_missing or not (any_answer or isinstance(answer, str | int | float)):
        raise Unreadable(f"its answer must be a string or a number, it is {answer!r:.80}; several"
                         " need --reward, a part of one --answer-column OUTER.INNER")
    return Problem(question, str(answer), source, messages=messages, row=row)


def as_prompt(texts: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """A question, and no messages, also of a single message; or the user's last message, and all
    chat messages with all that a template can show of them.
    """
    messages = []
    try:
        prompt = "\n".join(texts) if len(texts) > 1 else texts[0]
        if isinstance(prompt, str) and re.match(MESSAGES, prompt):
            prompt = json.loads(prompt, object_pairs_hook=without_twins)
        if isinstance(prompt, str) and prompt.strip():
            return prompt, []
        for turn in prompt:
            message = {name: value for name, value in turn.items() if value is not None}
            role = turn.get("role") or message.pop("from")
            if "content" in turn or "tool_calls" in message:
                content = turn.get("content")
            else:
                content = message.pop("value")
            if not isinstance(content, str):  # texts in parts, or none beside calls of tools
                content = "".join(part["text"] for part in content or [])
            messages.append(message | {"role": ROLES.get(role.lower(), role), "content": content})
        question = [message["content"] for message in messages if message["role"] == "user"][-1]
        if not question.strip():
            raise LookupError("no question")
    except (AttributeError, LookupError, TypeError, ValueError):
        raise Unreadable("its question must be a text, or chat messages with role and content, the"
                         " user's among them (in a text: as JSON), it is"
                         f" {texts!r:.80}") from None
    return question, messages if messages[1:] or len(messages[0]) > 2 else []
