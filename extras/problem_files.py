"""`--task`: problems from a JSONL file, from a dataset, or from a user's Python file.

What is wrong with a file is a ValueError that names it.
"""

import json
import os
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from extras.model_folder import reach_hub
from extras.task_file import TaskFile
from records import stage
from tasks import Problem, Reward, Task, split

# The last digits of a text if they are a plain number, not the 2 of 3/2, 10^-2, 3,2, 3:2, 5-2, x_2,
# and not the 000 of 5 000.
NUMBER = (r"(?<![a-zA-Z\d_.,/^√%)÷\u2044\]])(?<![/^}_]{)(?<!qrt{)(?<!\d[:\u00a0\u2009\u202f])"
          r"(?<!(?<!\d\d\d)\d (?=\d{3}(?!\d)))(?<![/^][-+\u2212$ ])(?<![\w.%)][-+\u2212\u2013])"
          r"[-+\u2212]?\\?[$€£]?"  # "-$5" is -5
          r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+\u2212]?\d{1,8})?"
          r"(?!\s?[½¼¾]|[\d_a-zA-Z²³¹⁰-⁹/^÷\u2044])(?=\D*\Z)")
MATH_ANSWERS = str(Path(__file__).with_name("math_answers.py"))


def load_task(name: str, seed: int, eval_path: str | None = None, limit_s: float = 10) -> Task:
    """A Python file, a JSONL file, or a dataset; `eval_path`: a JSONL file of held-out problems."""
    if name.endswith(".py"):
        file = TaskFile(name, seed, limit_s)
        task = split(name, file.reward, seed, draw_problems(file))
        return replace(task, takes_rollout=file.takes_rollout, text=str(file.text))
    if os.path.isfile(name) or name.endswith((".jsonl", ".json")):
        train, held_out = read_jsonl(name), []
    else:
        train, held_out = read_dataset(name)
    if eval_path is not None:
        held_out = read_jsonl(eval_path)
    reward = find_reward([*held_out, *train], limit_s)
    same = same_number if reward is numeric_match else str.__eq__
    return split(name, reward, seed, train, held_out, same)


def numeric_match(problem: Problem, response: str) -> float:
    """1.0 if both end in equal numbers ("so 1,200.0" and "1200"), else 0.0."""
    return float(same_number(response, problem.answer))


def same_number(one: str, other: str) -> bool:
    number = last_number(one)
    return number is not None and number == last_number(other)


def last_number(text: str) -> Decimal | None:
    """42 in GSM8K's "... #### 42"; None if the last digits of a text are something else."""
    found = re.search(NUMBER, text)
    return found and Decimal(re.sub(r"[\\$€£,]", "", found[0]).replace("\u2212", "-"))


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is a plain number, or that ends in one after "####", as in GSM8K."""
    return last_number(text) if re.search(r"(\A|####)\s*" + NUMBER + r"\s*\Z", text) else None


def find_reward(problems: list[Problem], limit_s: float) -> Reward:
    """`numeric_match`, and math-verify's comparison for answers that are no plain numbers."""
    file = None
    for problem in problems:
        if plain_number(problem.answer) is None:
            with stage(f"{problem.source} has the answer {problem.answer!r:.40}, no plain number;"
                       " comparing it with math-verify (pip install math-verify, or write a task"
                       " file with a reward of its own)"):
                file = file or TaskFile(MATH_ANSWERS, 0, limit_s)
                file.reward(problem, "")

    def reward(problem: Problem, response: str) -> float:
        if plain_number(problem.answer) is None:
            return file.reward(problem, response)
        return numeric_match(problem, response)

    return reward if file else numeric_match


def draw_problems(file: Any) -> list[Problem]:
    """10,000 different problems of a TaskFile such as examples/countdown.py.

    There are fewer problems if 1,000 calls of `sample` in a row bring nothing new.
    """
    problems, misses = {}, 0
    while len(problems) < 10_000 and misses < 1_000:
        question, answer, family = drawn = file.sample()
        misses = misses + 1 if drawn in problems else 0
        source = f"{file.path}, problem {len(problems) + 1}"
        problems.setdefault(drawn, Problem(question, answer, source, family=family))
    return list(problems.values())


def read_dataset(name: str) -> tuple[list[Problem], list[Problem]]:
    """The splits train, and test or validation, of a folder, or of NAME or NAME:CONFIG on a hub."""
    import datasets

    path, _, config = name.partition(":")
    reach_hub(path)
    with stage(f"loading the dataset {name} (task must be toy, digits, countdown, a .py file, a"
               " JSONL file, or a dataset: a folder or a reachable hub name)"):
        splits = datasets.load_dataset(path, config or None)
    if "train" not in splits:
        raise ValueError(f"task must have a split train, {name} has {', '.join(splits)}")

    def problems(part: str) -> list[Problem]:
        rows = enumerate(splits.get(part, []), 1)
        return [_problem(row, f"{name}, {part} {number}") for number, row in rows]

    return problems("train"), problems("test" if "test" in splits else "validation")


def read_jsonl(path: str) -> list[Problem]:
    """The problem of each line that is not blank."""
    if not os.path.isfile(path):
        raise ValueError(f"{path} must be a regular file, and exist (a pipe can be endless)")
    with stage(f"reading the task file {path} as UTF-8"):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines cuts at U+2028
    problems = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            source = f"{path}, line {number}"
            with stage(f"reading {source} as JSON"):
                row = json.loads(line)
            problems.append(_problem(row, source))
    if not problems:
        raise ValueError(f"task must have problems, {path} has none")
    return problems


def _problem(row: Any, source: str) -> Problem:
    """The problem in a row of a dataset or a file."""
    match row:
        case {"question": str(question), "answer": str() | int() | float() as answer}:
            if question.strip():
                return Problem(question, str(answer), source)
    raise ValueError(f'{source} must be an object with a non-empty string "question" and an'
                     f' "answer", a string or a number, got {row!s:.80}')
