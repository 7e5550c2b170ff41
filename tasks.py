"""Problems and rewards: built-in tasks, files of questions, a user's own task.

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

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # numbers of experts; above 1 the model is a mixture
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
CALL_LIMIT_S = 10.0  # of one call of a user's code
HELD_OUT_SHARE = 0.1  # of the problems, never trained on
DIGITS = 16  # of each number of the task `digits`
# A minus sign counts where it does not join two numbers: "10-12" ends in 12, "x = -3" in -3.
NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Problem:
    """`source` says where it stands (a line of a file), for messages."""

    question: str
    answer: str
    source: str


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems to evaluate on, and `reward(problem, response text) -> float`.

    `num_repeated` counts the problems left out because their question was there already.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Callable[[Problem, str], float]
    num_repeated: int = 0

    @property
    def fingerprint(self) -> str:
        """Of all problems, in their order; the reward is not in it."""
        texts = [[problem.question, problem.answer] for problem in (*self.train, *self.held_out)]
        return hashlib.sha256(json.dumps([len(self.train), texts]).encode()).hexdigest()

    def sample(self, rng: random.Random, num_prompts: int) -> list[Problem]:
        """P different training problems; all randomness is in `rng`, whose state is part of the checkpoint."""
        return rng.sample(self.train, num_prompts)


def exact_match(problem: Problem, response: str) -> float:
    """1.0 if the response is the answer to the letter (surrounding white space aside), else 0.0."""
    return float(response.strip() == problem.answer)


def numeric_match(problem: Problem, response: str) -> float:
    """1.0 if the last number in the response equals the answer's: "so 1,200.0" matches "1200"; no number, no reward."""
    given = last_number(response)
    return float(given is not None and given == last_number(problem.answer))


def last_number(text: str) -> Decimal | None:
    """The last number in a text, thousands separators dropped; a GSM8K answer ("... #### 42") ends in it."""
    numbers = NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:  # an exponent of twenty digits
        return None


# ------------------------------------------------------------------------------------------------ tasks
def addition(seed: int, largest: int = 99) -> Task:
    """All sums a+b= with 0 <= a, b <= largest, a tenth of them held out, chosen by the seed."""
    problems = [Problem(f"{a}+{b}=", str(a + b), f"{a}+{b}") for a in range(largest + 1) for b in range(largest + 1)]
    return _split(problems, exact_match, seed)


def share_of_digits(problem: Problem, response: str) -> float:
    """The share of right characters at their places; what is missing or too much counts as wrong."""
    right = sum(given == expected for given, expected in zip(response, problem.answer, strict=False))
    return right / max(len(response), len(problem.answer))


def digits(seed: int) -> Task:
    """The larger digit at each place of two numbers: "3142...+2718...=" is "3748...". Made for ablations: 64 training
    problems that come back at every step, prompts of 35 tokens, longer than a KV block of 32, answers of 16."""
    problems = larger_digits(torch.randint(10, (64 + 256, 2, DIGITS), generator=torch.Generator().manual_seed(seed)))
    return Task(problems[:64], problems[64:], share_of_digits)


def larger_digits(numbers: torch.Tensor) -> list[Problem]:
    """(N, 2, DIGITS) digits -> N problems."""
    rows = torch.cat([numbers, numbers.amax(dim=1, keepdim=True)], dim=1).tolist()
    texts = [["".join(map(str, number)) for number in row] for row in rows]
    return [Problem(f"{a}+{b}=", larger, f"{a}+{b}") for a, b, larger in texts]


def countdown(seed: int) -> Task:
    """Make the target from the numbers: examples/countdown.py, a task file like any user's."""
    return from_python(str(Path(__file__).parent / "examples" / "countdown.py"), seed)


BUILT_IN = {"toy": addition, "digits": digits, "countdown": countdown}
TASKS = f"{', '.join(BUILT_IN)}, a .py file, a JSONL file or a reachable hub dataset (OWNER/NAME:CONFIG)"


# ------------------------------------------------------------------------------------------------ tasks of users
def load_task(name: str, seed: int, eval_path: str | None = None, limit_s: float = CALL_LIMIT_S) -> Task:
    """A built-in task, a Python file, a JSONL file, or a hub name; held-out problems from a second JSONL file if given.

    Raises: ValueError that says what is wrong with it.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](seed)
    if name.endswith(".py"):
        return from_python(name, seed, limit_s)
    if os.path.isfile(name) or name.endswith((".jsonl", ".json")):
        return from_jsonl(name, seed, eval_path)
    if "/" in name or os.path.isdir(name):
        return from_hub(name, seed, eval_path)
    raise ValueError(f"task must be {TASKS}, got {name}")


POOL = 10_000  # problems drawn from a Python task at the start; what is held out is never trained on
MISSES = 1_000  # draws in a row that bring nothing new: the task has no more


def from_python(path: str, seed: int, limit_s: float = CALL_LIMIT_S) -> Task:
    """A file with `sample(rng) -> (question, answer)` and `reward(problem, response) -> float`.

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
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        call_within(limit_s, spec.loader.exec_module, module)
    except (Exception, SystemExit, OutOfTime) as error:
        raise ValueError(f"task must be a Python file that can be loaded, {path} fails: {error!r}") from error
    return module


def from_hub(name: str, seed: int, eval_path: str | None = None) -> Task:
    """A hub's dataset, NAME or NAME:CONFIG ("openai/gsm8k:main"), or a folder of one, with the columns question and
    answer; held out is its split test or validation, or a tenth of train.

    Raises: ValueError if it cannot be had or has other columns.
    """
    import datasets  # slow to import, and one task in many needs it

    path, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset(path, config or None)
    except Exception as error:  # a dozen kinds: no network, no such name, no such configuration, no such format
        raise ValueError(f"task must be {TASKS}, got {name}, which cannot be loaded: {error}") from error
    if "train" not in splits:
        raise ValueError(f"task must have a split train, {name} has {', '.join(splits)}")
    problems = {split: [_problem(record, f"{name}, {split} {number}") for number, record in enumerate(splits[split], 1)]
                for split in ("train", "test", "validation") if split in splits}
    held_out = problems.get("test") or problems.get("validation") if eval_path is None else _read_jsonl(eval_path)
    return _task(problems["train"], held_out, numeric_match, seed, name)


def from_jsonl(path: str, seed: int, eval_path: str | None = None) -> Task:
    """Problems from {"question": ..., "answer": ...} lines, held-out ones from `eval_path` or a split.

    Raises: ValueError naming the file and the line if one is malformed, or if there are too few.
    """
    held_out = None if eval_path is None else _read_jsonl(eval_path)
    return _task(_read_jsonl(path), held_out, numeric_match, seed, path)


def _task(
    train: list[Problem], held_out: list[Problem] | None, reward: Callable[[Problem, str], float], seed: int, path: str
) -> Task:
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
            raise ValueError("task must have at least 2 different problems (one is held out),"
                             f" {path} has {len(distinct)}")
        return replace(_split(distinct, reward, seed), num_repeated=num_repeated)
    num_held_out = len({problem.question.strip() for problem in held_out})
    if num_held_out == len(distinct):
        raise ValueError(f"task must have training problems that are not held out, {path} has none")
    return Task(distinct[num_held_out:], distinct[:num_held_out], reward, num_repeated)


def _split(problems: list[Problem], reward: Callable[[Problem, str], float], seed: int) -> Task:
    shuffled = random.Random(seed).sample(problems, len(problems))
    num_held_out = max(1, round(HELD_OUT_SHARE * len(problems)))
    return Task(shuffled[num_held_out:], shuffled[:num_held_out], reward)


def _read_jsonl(path: str) -> list[Problem]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut JSON at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task must be {TASKS}, got {path}, which is no readable UTF-8: {error}") from error
    problems = [_read_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise ValueError(f"task must have problems, {path} has none")
    return problems


def _read_problem(line: str, source: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, or nested too deeply
        raise ValueError(f"{source} must be a JSON object: {error}") from error
    return _problem(record, source)


def _problem(record: Any, source: str) -> Problem:
    shown = f"{record}"[:80]
    if not isinstance(record, dict) or not isinstance(record.get("question"), str) or not record["question"].strip():
        raise ValueError(f'{source} must be an object with a non-empty string "question", got {shown}')
    answer = str(record.get("answer"))
    if not isinstance(record.get("answer"), str | int | float) or last_number(answer) is None:
        raise ValueError(f'{source} must have an "answer" with a number (rewards compare numbers), got {shown}')
    return Problem(record["question"], answer, source)


# ------------------------------------------------------------------------------------------------ text <-> token ids
def describe_model(path: str) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, tuple[int, ...]]:
    """Configuration, tokenizer and stop tokens of a folder or a hub name; of weights only the headers are read.

    Raises: ValueError if the folder has no weights, the name cannot be resolved, or no stop token is named.
    """
    text_config, tokenizer = read_model(path, with_weights=True)
    if not torch.cuda.is_available() and any(getattr(text_config, name, None) not in (None, 0, 1) for name in EXPERTS):
        raise ValueError(f"model must not be a mixture of experts without a GPU (vLLM's CPU build packs the experts"
                         f" once, a weight load would corrupt them in silence), got {text_config.model_type} in {path};"
                         " try a dense model")
    try:
        declared = GenerationConfig.from_pretrained(path).eos_token_id  # chat models name more than their tokenizer
    except OSError as error:
        if (Path(path) / "generation_config.json").exists():  # there, but unreadable
            raise ValueError(f"model must have a generation_config.json that can be read, or none: {error}") from error
        declared = None
    stop = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not stop or not all(type(token) is int and token >= 0 for token in stop):
        raise ValueError(f"model must name an end-of-sequence token (else no rollout ends), {path} has {stop or None}")
    return text_config, tokenizer, tuple(sorted(stop))


def read_model(path: str, with_weights: bool) -> tuple[PretrainedConfig, PreTrainedTokenizerBase | None]:
    """Configuration and tokenizer of a folder or a hub name. For a plan, a folder may lack weights and tokenizer.

    Raises: ValueError if something is missing or cannot be read.
    """
    weights = [file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern)]
    if with_weights and os.path.isdir(path) and not weights:
        raise ValueError(f"model must be a folder with weights ({' or '.join(WEIGHT_FILES)}), {path} has none")
    tokenizer = None
    try:
        for file in (file for file in weights if file.suffix == ".safetensors"):
            with safe_open(file, "pt") as tensors:  # reads and checks the header
                names = [name for name in tensors.keys() if name.endswith("weight")]  # noqa: SIM118, it has no iterator
                if integers := {tensors.get_slice(name).get_dtype() for name in names} - {"F64", "F32", "F16", "BF16"}:
                    raise ValueError(f"its weights are of type {', '.join(sorted(integers))}, which cannot be trained")
        config = AutoConfig.from_pretrained(path)
        if method := getattr(config, "quantization_config", None):
            raise ValueError(f"its weights are quantised ({method!s:.100}), which cannot be trained")
        if with_weights or not os.path.isdir(path) or any(any(Path(path).glob(name)) for name in TOKENIZER_FILES):
            tokenizer = load_tokenizer(path)
        return config.get_text_config(), tokenizer
    except Exception as error:  # transformers raises all kinds
        raise ValueError(f"model must be toy, a model folder or a reachable hub name, got {path}: {error}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The folder's own tokenizer. If tokenizer_config.json names the generic fast class, that class is loaded:
    AutoTokenizer would choose Qwen's by the model's type and lose characters. Without files it would make an empty one.

    Raises: ValueError if the folder has no tokenizer.
    """
    if os.path.isdir(path) and not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(f"model must be a folder with a tokenizer, {path} has none")
    settings = Path(path) / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("tokenizer_class") if settings.is_file() else None
    generic = named in ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class; transformers 5 saves the second
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(path)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The question's token ids, in the model's chat template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(problem.question)["input_ids"]
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


# ------------------------------------------------------------------------------------------------ code of users
LARGEST_REWARD = 1e15  # its square still is a float32, in which advantages are computed


class RewardError(RuntimeError):
    """A reward raised, returned no finite number or ran out of time; names the problem and the response."""


class OutOfTime(BaseException):
    """A call took too long. Not an Exception, so that a reward's own `except Exception` lets it through."""


class Scores(NamedTuple):
    """One entry per response; `errors` names each response that could not be scored, its reward is 0."""

    responses: list[str]
    rewards: list[float]
    errors: list[str | None]

    @property
    def num_errors(self) -> int:
        return sum(error is not None for error in self.errors)


def score(
    reward: Callable[[Problem, str], float], problems: list[Problem], responses: list[str], limit_s: float, stop: bool
) -> Scores:
    """The reward of each response, at most `limit_s` seconds each. Raises: RewardError at the first error if `stop`."""
    rewards, errors = [], []
    for problem, response in zip(problems, responses, strict=True):
        value, failure = 0.0, None
        try:
            value = call_within(limit_s, _finite, reward, problem, response)
        except (Exception, SystemExit, OutOfTime) as error:  # whatever it is, it is named, and counted or raised
            try:
                why = f"{error}" if isinstance(error, OutOfTime) else f"{type(error).__name__}: {error}"
            except Exception:  # of the error's own __str__
                why = type(error).__name__
            failure = (f"the reward fails ({ascii(why)[1:-1]:.300}) on {problem.source}, question"
                       f" {problem.question!r:.200}, response {response!r:.200}")
            if stop:
                raise RewardError(f"{failure}; to go on with reward 0, --reward-errors count") from error
        rewards.append(value)
        errors.append(failure)
    return Scores(responses, rewards, errors)


def _finite(reward: Callable[[Problem, str], float], problem: Problem, response: str) -> float:
    """Numbers of any library count (they convert themselves), strings that look like one do not."""
    value = reward(problem, response)
    if not hasattr(value, "__float__") or not abs(number := float(value)) <= LARGEST_REWARD:
        raise TypeError(f"it returned {value!r:.80}, not a finite number of at most {LARGEST_REWARD:g}")
    return number


def call_within(limit_s: float, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, interrupted after `limit_s` seconds. Raises: OutOfTime.

    SIGALRM in the main thread: it stops Python code, sleeps and waits, regular expressions and long integers of
    Python's own; not compiled code that does not come back to the interpreter (that must run in a process of its own),
    and not a function that catches BaseException again and again.
    """

    def expire(*_):
        raise OutOfTime(f"no answer within {limit_s:g} s; --reward-limit-s sets the limit")

    previous = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # again and again, should the first one be swallowed
        try:
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come just before the line above
        raise
    finally:
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)  # None: a handler that Python has not set
