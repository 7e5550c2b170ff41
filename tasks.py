"""Problems, prompts and rewards: files of questions, a user's own task, and how a model wants its prompts.

A task is two lists of problems and a reward.
"""

import hashlib
import importlib.util
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

from records import one_line, stage

CALL_LIMIT_S = 10.0  # of one call of a user's code
# A minus sign counts where it does not join two numbers: "10-12" ends in 12, "x = -3" in -3.
NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class Problem(NamedTuple):
    """`source` says where the problem stands (a line of a file), for messages; `prompt_ids` come from `encode`."""

    question: str
    answer: str
    source: str
    prompt_ids: list[int] = []


Reward = Callable[[Problem, str], float]


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems to evaluate on, and `reward(problem, response text) -> float`.

    `num_repeated` counts the problems that were left out because their question was there already.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Reward
    num_repeated: int = 0

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of all problems."""
        return [problem.prompt_ids for problem in (*self.train, *self.held_out)]

    @property
    def fingerprint(self) -> str:
        """Digest of all problems in their order, without the reward."""
        texts = [[problem.question, problem.answer] for problem in (*self.train, *self.held_out)]
        return hashlib.sha256(json.dumps([len(self.train), texts]).encode()).hexdigest()

    def sample(self, rng: random.Random, num_prompts: int) -> list[Problem]:
        """P different training problems. All randomness is in `rng`, whose state is part of the checkpoint."""
        return rng.sample(self.train, num_prompts)


def exact_match(problem: Problem, response: str) -> float:
    """1.0 if the response equals the answer (white space around it aside), else 0.0."""
    return float(response.strip() == problem.answer)


def numeric_match(problem: Problem, response: str) -> float:
    """1.0 if the last number in the response equals the answer's: "so 1,200.0" matches "1200"; no number, no reward."""
    given = last_number(response)
    return float(given is not None and given == last_number(problem.answer))


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without thousands separators; a GSM8K answer ("... #### 42") ends in it."""
    try:
        return Decimal(NUMBER.findall(text)[-1].replace(",", ""))
    except (IndexError, InvalidOperation):  # no number, or an exponent of twenty digits
        return None


# ------------------------------------------------------------------------------------------------ loaders
def load_task(name: str, seed: int, eval_path: str | None = None, limit_s: float = CALL_LIMIT_S) -> Task:
    """A Python file, a JSONL file, or a dataset; held-out problems from a second JSONL file if given.

    Raises: ValueError that says what is wrong with it.
    """
    held_out, reward = None, numeric_match
    if name.endswith(".py"):
        train, reward = read_python(name, seed, limit_s)
    elif os.path.isfile(name) or name.endswith((".jsonl", ".json")):
        train = read_jsonl(name)
    elif "/" in name or os.path.isdir(name):
        train, held_out = read_dataset(name)
    else:
        raise ValueError(f"task must be toy, digits, countdown, a .py file, a JSONL file, or a dataset (a folder or a"
                         f" reachable hub name), got {name}")
    if eval_path is not None:
        held_out = read_jsonl(eval_path)
    return split(name, reward, seed, train, held_out)


def read_python(path: str, seed: int, limit_s: float) -> tuple[list[Problem], Reward]:
    """A file with `sample(rng) -> (question, answer)` and `reward(problem, response) -> float`: examples/countdown.py.

    It gives 10,000 different problems, or fewer if 1,000 calls of `sample` in a row bring nothing new.

    Raises: ValueError if the file lacks one of the two, or if its import or a call of `sample` fails.
    """
    spec = importlib.util.spec_from_file_location(f"task_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it there
    call_within(limit_s, f"the import of {path}", spec.loader.exec_module, module)
    for name in ("sample", "reward"):
        if not callable(getattr(module, name, None)):
            raise ValueError(f"task must be a file with the functions sample and reward, {path} has no {name}")
    rng, problems, misses = random.Random(seed), {}, 0
    while len(problems) < 10_000 and misses < 1_000:
        pair = call_within(limit_s, f"sample of {path}", module.sample, rng)
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair) and pair[0]):
            raise ValueError(f"sample must return a question and an answer, two strings, {path}'s returns {pair!r:.80}")
        misses = misses + 1 if pair in problems else 0
        problems.setdefault(pair, Problem(*pair, f"{path}, problem {len(problems) + 1}"))
    return list(problems.values()), module.reward


def read_dataset(name: str) -> tuple[list[Problem], list[Problem] | None]:
    """A hub's dataset, NAME or NAME:CONFIG ("openai/gsm8k:main"), or a folder of one, with the columns question and
    answer: its split train, and test or validation if there is one.

    Raises: ValueError if it cannot be loaded or has other columns.
    """
    import datasets

    path, _, config = name.partition(":")
    with stage(f"loading the dataset {name}"):
        splits = datasets.load_dataset(path, config or None)
    if "train" not in splits:
        raise ValueError(f"task must have a split train, {name} has {', '.join(splits)}")

    def problems(part: str) -> list[Problem]:
        return [_problem(row, f"{name}, {part} {number}") for number, row in enumerate(splits[part], 1)]

    held_out = next((part for part in ("test", "validation") if part in splits), None)
    return problems("train"), problems(held_out) if held_out else None


def read_jsonl(path: str) -> list[Problem]:
    """Problems from lines {"question": ..., "answer": ...}.

    Raises: ValueError that names the file, and the line if one is malformed.
    """
    with stage(f"reading {path} as UTF-8"):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut JSON at U+2028
    problems = [_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise ValueError(f"task must have problems, {path} has none")
    return problems


def _problem(row: dict[str, Any] | str, source: str) -> Problem:
    """The problem in a row of a dataset, or in a line of JSON."""
    with stage(f"reading {source} as JSON"):
        record = json.loads(row) if isinstance(row, str) else row
    match record:
        case {"question": str(question), "answer": str() | int() | float() as answer}:
            if question.strip() and last_number(str(answer)) is not None:
                return Problem(question, str(answer), source)
    raise ValueError(f'{source} must be an object with a non-empty string "question" and an "answer" with a number'
                     f" (rewards compare numbers), got {record!s:.80}")


def split(name: str, reward: Reward, seed: int, train: list[Problem], held_out: list[Problem] | None = None) -> Task:
    """Keeps each question once and in one split only. Without `held_out`, the seed chooses a tenth to hold out.

    Raises: ValueError if a question has two answers, or if no problem is left to train on.
    """
    given: list[Problem] = [*(held_out or ()), *train]
    first: dict[str, Problem] = {}
    for problem in given:
        known = first.setdefault(problem.question.strip(), problem)
        if problem.answer != known.answer and not (reward is numeric_match and reward(known, problem.answer)):
            raise ValueError(f"a question must have one answer, {known.source} has {known.answer!r:.40} and"
                             f" {problem.source} has {problem.answer!r:.40} to the same question")
    distinct = list(first.values())
    if held_out:
        num_held_out = len({problem.question.strip() for problem in held_out})
    else:
        distinct = random.Random(seed).sample(distinct, len(distinct))
        num_held_out = max(1, round(0.1 * len(distinct)))
    if num_held_out >= len(distinct):
        raise ValueError(f"task must have problems left to train on, {name} has {len(distinct)} without repeats and"
                         f" {num_held_out} held out")
    return Task(distinct[num_held_out:], distinct[:num_held_out], reward, len(given) - len(distinct))


# ------------------------------------------------------------------------------------------------ prompts
def encode(tokenizer: Any, task: Task) -> Task:
    """The task with the token ids of every question, in the model's chat template if it has one.

    Raises: ValueError if a question cannot be encoded or has no tokens.
    """

    def encoded(problem: Problem) -> Problem:
        with stage(f"encoding the question of {problem.source}"):
            if tokenizer.chat_template is None:
                ids = tokenizer(problem.question)["input_ids"]
            else:
                messages = [{"role": "user", "content": problem.question}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            if not ids:
                raise ValueError("the tokenizer makes no token of it")
        return problem._replace(prompt_ids=ids)

    return replace(task, train=list(map(encoded, task.train)), held_out=list(map(encoded, task.held_out)))


# ------------------------------------------------------------------------------------------------ rewards
def score(reward: Reward, problem: Problem, response: str, limit_s: float) -> tuple[float, str | None]:
    """The reward of one response and None, or 0.0 and what failed. Numbers of any library count, strings do not."""

    def number() -> float:
        value = reward(problem, response)
        converted = float(value) if hasattr(value, "__float__") else float("nan")
        if not abs(converted) <= 1e15:  # its square is still a float32, in which advantages are computed
            raise TypeError(f"it returned {value!r:.80}, not a finite number of at most 1e15")
        return converted

    try:
        return call_within(limit_s, "the reward", number), None
    except ValueError as error:
        return 0.0, f"{error} on {problem.source}, question {problem.question!r:.200}, response {response!r:.200}"


class OutOfTime(BaseException):
    """A call took too long. Not an Exception, so that a reward's own `except Exception` does not catch it."""


def call_within(limit_s: float, name: str, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, a user's code, interrupted after `limit_s` seconds.

    SIGALRM in the main thread interrupts Python code, sleeps and waits, regular expressions and Python's own long
    integers. It does not interrupt compiled code that does not return to the interpreter (such code must run in a
    process of its own), nor a function that catches BaseException again and again.

    Raises: ValueError that names the function if it raises, exits or takes too long.
    """

    def call():
        return function(*arguments)

    def expire(_, frame):
        # Only during the call: an exception before or after it would skip the clean-up.
        if any(each.f_code is call.__code__ for each, _ in walk_stack(frame)):
            raise OutOfTime(f"no answer within {limit_s:g} s; --reward-limit-s sets the limit")

    previous = signal.signal(signal.SIGALRM, expire)
    try:
        # Repeated, in case the first one is caught; at shorter intervals the handler would interrupt itself.
        signal.setitimer(signal.ITIMER_REAL, limit_s, max(limit_s, 0.01))
        return call()
    except (Exception, SystemExit, OutOfTime) as error:
        raise ValueError(f"{name} fails ({one_line(error):.300})") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)  # None: a handler that Python has not set
