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
from types import ModuleType
from typing import Any, NamedTuple

CALL_LIMIT_S = 10.0  # of one call of a user's code
HELD_OUT_SHARE = 0.1  # of the problems, never trained on
TASKS = "toy, digits, countdown, a .py file, a JSONL file, or a dataset (its folder, or a reachable hub name)"
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
    numbers = NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent of twenty digits
        return None


# ------------------------------------------------------------------------------------------------ loaders
def load_task(name: str, seed: int, eval_path: str | None = None, limit_s: float = CALL_LIMIT_S) -> Task:
    """A Python file, a JSONL file, or a hub name; held-out problems from a second JSONL file if given.

    Raises: ValueError that says what is wrong with it.
    """
    if name.endswith(".py"):
        return from_python(name, seed, limit_s)
    if os.path.isfile(name) or name.endswith((".jsonl", ".json")):
        return from_jsonl(name, seed, eval_path)
    if "/" in name or os.path.isdir(name):
        return from_hub(name, seed, eval_path)
    raise ValueError(f"task must be {TASKS}, got {name}")


POOL = 10_000  # problems drawn from a Python task at the start
MISSES = 1_000  # draws in a row without a new problem, after which the task has no more


def from_python(path: str, seed: int, limit_s: float = CALL_LIMIT_S) -> Task:
    """A file with `sample(rng) -> (question, answer)` and `reward(problem, response) -> float`: examples/countdown.py.

    Raises: ValueError if the file cannot be loaded, lacks one of the two, has fewer than two different questions or one
    question with two answers, or if the import or one call of `sample` takes longer than `limit_s` seconds.
    """
    module = _load_module(path, limit_s)
    for name in ("sample", "reward"):
        if not callable(getattr(module, name, None)):
            raise ValueError(f"task must be a file with the functions sample and reward, {path} has no {name}")
    rng, problems, misses = random.Random(seed), {}, 0
    while len(problems) < POOL and misses < MISSES:
        try:
            pair = call_within(limit_s, module.sample, rng)
        except (Exception, SystemExit, OutOfTime) as error:
            raise ValueError(f"sample must return a question and an answer, {path}'s fails: {error!r}") from error
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair) and pair[0]):
            raise ValueError(f"sample must return a question and an answer, two strings, {path}'s returns {pair!r:.80}")
        misses = misses + 1 if pair in problems else 0
        problems.setdefault(pair, Problem(*pair, f"{path}, problem {len(problems) + 1}"))
    return _task(list(problems.values()), None, module.reward, seed, path)


def _load_module(path: str, limit_s: float) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"task_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need it there
    try:
        call_within(limit_s, spec.loader.exec_module, module)
    except (Exception, SystemExit, OutOfTime) as error:
        raise ValueError(f"task must be a Python file that can be loaded, {path} fails: {error!r}") from error
    return module


def from_hub(name: str, seed: int, eval_path: str | None = None) -> Task:
    """A hub's dataset, NAME or NAME:CONFIG ("openai/gsm8k:main"), or a folder of one, with the columns question and
    answer. Its split test or validation is held out, or a tenth of train.

    Raises: ValueError if it cannot be loaded or has other columns.
    """
    import datasets

    path, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset(path, config or None)
    except Exception as error:  # a dozen kinds: no network, no such name, no such configuration, no such format
        raise ValueError(f"task must be {TASKS}, got {name}, which cannot be loaded: {error}") from error
    if "train" not in splits:
        raise ValueError(f"task must have a split train, {name} has {', '.join(splits)}")
    problems = {split: [_problem(record, f"{name}, {split} {number}") for number, record in enumerate(splits[split], 1)]
                for split in ("train", "test", "validation") if split in splits}
    held_out = (problems.get("test") or problems.get("validation")) if eval_path is None else _read_jsonl(eval_path)
    return _task(problems["train"], held_out, numeric_match, seed, name)


def from_jsonl(path: str, seed: int, eval_path: str | None = None) -> Task:
    """Problems from {"question": ..., "answer": ...} lines, held-out ones from `eval_path` or a tenth of `path`.

    Raises: ValueError that names the file and the line if one is malformed, or if there are too few.
    """
    held_out = None if eval_path is None else _read_jsonl(eval_path)
    return _task(_read_jsonl(path), held_out, numeric_match, seed, path)


def _task(train: list[Problem], held_out: list[Problem] | None, reward: Reward, seed: int, path: str) -> Task:
    """Keeps each question once and in one split only. Without `held_out`, a share of the problems is held out.

    Raises: ValueError if a question has two answers, or if too few problems are left.
    """
    first: dict[str, Problem] = {}
    for problem in [*(held_out or ()), *train]:
        known = first.setdefault(problem.question.strip(), problem)
        if problem.answer != known.answer and not (reward is numeric_match and reward(known, problem.answer)):
            raise ValueError(f"a question must have one answer, {known.source} has {known.answer!r:.40} and"
                             f" {problem.source} has {problem.answer!r:.40} to the same question")
    num_repeated, distinct = len(train) + len(held_out or ()) - len(first), list(first.values())
    if held_out is None:
        if len(distinct) < 2:
            raise ValueError(f"task must have at least 2 different problems (one is held out), {path} has"
                             f" {len(distinct)}")
        return replace(split(distinct, reward, seed), num_repeated=num_repeated)
    num_held_out = len({problem.question.strip() for problem in held_out})
    if num_held_out == len(distinct):
        raise ValueError(f"task must have training problems that are not held out, {path} has none")
    return Task(distinct[num_held_out:], distinct[:num_held_out], reward, num_repeated)


def split(problems: list[Problem], reward: Reward, seed: int) -> Task:
    """HELD_OUT_SHARE of the problems is held out; the seed chooses them."""
    shuffled = random.Random(seed).sample(problems, len(problems))
    num_held_out = max(1, round(HELD_OUT_SHARE * len(problems)))
    return Task(shuffled[num_held_out:], shuffled[:num_held_out], reward)


def _read_jsonl(path: str) -> list[Problem]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut JSON at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task must be {TASKS}, got {path}, which is not readable as UTF-8: {error}") from error
    problems = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, deep nesting
                raise ValueError(f"{path}, line {number} must be a JSON object: {error}") from error
            problems.append(_problem(record, f"{path}, line {number}"))
    if not problems:
        raise ValueError(f"task must have problems, {path} has none")
    return problems


def _problem(record: Any, source: str) -> Problem:
    shown = f"{record}"[:80]
    if not isinstance(record, dict) or not isinstance(record.get("question"), str) or not record["question"].strip():
        raise ValueError(f'{source} must be an object with a non-empty string "question", got {shown}')
    answer = str(record.get("answer"))
    if not isinstance(record.get("answer"), str | int | float) or last_number(answer) is None:
        raise ValueError(f'{source} must have an "answer" with a number (rewards compare numbers), got {shown}')
    return Problem(record["question"], answer, source)


# ------------------------------------------------------------------------------------------------ prompts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # above 1 the model is a mixture of experts
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
TRAINABLE = {"F64", "F32", "F16", "BF16"}


def describe_model(path: str) -> tuple[Any, Any, tuple[int, ...]]:
    """Text configuration, tokenizer and stop tokens of a folder or a hub name; of weights only the headers are read.

    Raises: ValueError if something is missing, cannot be read, or cannot be trained here.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig

    weights = [file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern)]
    if os.path.isdir(path) and not weights:
        raise ValueError(f"model must be a folder with weights ({' or '.join(WEIGHT_FILES)}), {path} has none")
    try:
        for file in (file for file in weights if file.suffix == ".safetensors"):
            with safe_open(file, "pt") as tensors:  # reads and checks the header
                names = [name for name in tensors.keys() if name.endswith("weight")]  # noqa: SIM118, it has no iterator
                if others := {tensors.get_slice(name).get_dtype() for name in names} - TRAINABLE:
                    raise ValueError(f"its weights are of type {', '.join(sorted(others))}, which cannot be trained")
        config = AutoConfig.from_pretrained(path)
        if method := getattr(config, "quantization_config", None):
            raise ValueError(f"its weights are quantised ({method!s:.100}), which cannot be trained")
        tokenizer = load_tokenizer(path)
    except Exception as error:  # transformers raises all kinds
        raise ValueError(f"model must be toy, a model folder or a reachable hub name, got {path}: {error}") from error
    config = config.get_text_config()
    if not torch.cuda.is_available() and any(getattr(config, name, None) not in (None, 0, 1) for name in EXPERTS):
        raise ValueError(f"model must not be a mixture of experts without a GPU (vLLM's CPU build packs the experts"
                         f" once, a weight load would corrupt them in silence), got {config.model_type} in {path}; try"
                         " a dense model")
    return config, tokenizer, _stop_token_ids(path, tokenizer)


def _stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Those of the tokenizer and of generation_config.json: chat models name more there."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError as error:
        if (Path(path) / "generation_config.json").exists():  # there, but unreadable
            raise ValueError(f"model must have a generation_config.json that can be read, or none: {error}") from error
        declared = None
    stop = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not stop or not all(type(token) is int and token >= 0 for token in stop):
        raise ValueError(f"model must name an end-of-sequence token (else no rollout ends), {path} has {stop or None}")
    return tuple(sorted(stop))


def load_tokenizer(path: str) -> Any:
    """The folder's own tokenizer.

    If tokenizer_config.json names the generic fast class, that class is loaded: AutoTokenizer would choose Qwen's by
    the model's type and lose characters. Without files AutoTokenizer would make an empty tokenizer.

    Raises: ValueError if the folder has no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if os.path.isdir(path) and not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(f"model must be a folder with a tokenizer, {path} has none")
    settings = Path(path) / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("tokenizer_class") if settings.is_file() else None
    generic = named in ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class; transformers 5 saves the second
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(path)


def encode(tokenizer: Any, task: Task) -> Task:
    """The task with the token ids of every question, in the model's chat template if it has one.

    Raises: ValueError if a question cannot be encoded or has no tokens.
    """

    def encoded(problem: Problem) -> Problem:
        try:
            if tokenizer.chat_template is None:
                ids = tokenizer(problem.question)["input_ids"]
            else:
                messages = [{"role": "user", "content": problem.question}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # tokenizers raise bare Exceptions on text outside their vocabulary
            raise ValueError(f"the tokenizer must encode all prompts, it fails on {problem.source}: {error}") from error
        if not ids:
            raise ValueError(f"the tokenizer must encode all prompts, it makes no token of {problem.source}")
        return problem._replace(prompt_ids=ids)

    return replace(task, train=list(map(encoded, task.train)), held_out=list(map(encoded, task.held_out)))


# ------------------------------------------------------------------------------------------------ rewards
LARGEST_REWARD = 1e15  # its square is still a float32, in which advantages are computed


class RewardError(RuntimeError):
    """A reward raised, returned no finite number or ran out of time; names the problem and the response."""


class OutOfTime(BaseException):
    """A call took too long. Not an Exception, so that a reward's own `except Exception` does not catch it."""


def score(reward: Reward, problem: Problem, response: str, limit_s: float) -> tuple[float, str | None]:
    """The reward of one response and None, or 0.0 and what failed. Numbers of any library count, strings do not."""

    def number() -> float:
        value = reward(problem, response)
        if not hasattr(value, "__float__") or not abs(converted := float(value)) <= LARGEST_REWARD:
            raise TypeError(f"it returned {value!r:.80}, not a finite number of at most {LARGEST_REWARD:g}")
        return converted

    try:
        return call_within(limit_s, number), None
    except (Exception, SystemExit, OutOfTime) as error:  # any failure of a user's code is named and counted
        try:
            why = f"{error}" if isinstance(error, OutOfTime) else f"{type(error).__name__}: {error}"
        except Exception:  # of the error's own __str__
            why = type(error).__name__
    return 0.0, (f"the reward fails ({ascii(why)[1:-1]:.300}) on {problem.source}, question {problem.question!r:.200},"
                 f" response {response!r:.200}")


def call_within(limit_s: float, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, interrupted after `limit_s` seconds. Raises: OutOfTime.

    SIGALRM in the main thread interrupts Python code, sleeps and waits, regular expressions and Python's own long
    integers. It does not interrupt compiled code that does not return to the interpreter (such code must run in a
    process of its own), nor a function that catches BaseException again and again.
    """

    def expire(*_):
        raise OutOfTime(f"no answer within {limit_s:g} s; --reward-limit-s sets the limit")

    previous = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # repeated, in case the first one is caught
        try:
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come just before the line above
        raise
    finally:
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)  # None: a handler that Python has not set
