"""Problems, prompts and rewards: what a task is, its held-out problems, a model's prompts.

`--task` names one of examples/toys.py, or a file or dataset that tasks/problem_files.py reads.
"""

import hashlib
import json
import math
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from report.errors import one_line, stage


class Problem(NamedTuple):
    """`source` names the line of a file, for messages; `prompt_ids` come from `encode`.

    Problems of one family, such as 4 + 7 and 7 + 4, are held out together. A problem without a
    family is its own.
    """

    question: str  # of chat messages: the user's last
    answer: str
    source: str
    prompt_ids: list[int] = []
    family: str = ""
    messages: list[dict[str, Any]] = []  # the prompt, if it is a chat and no single question
    row: dict[str, Any] = {}  # of a data file: all its columns

    @property
    def key(self) -> str:
        """Equal for two problems that ask the same."""
        return json.dumps(self.messages, default=str) if self.messages else self.question.strip()

    @property
    def split_by(self) -> str:
        return self.family or self.key


# Of a problem and a response: a number, a dictionary of named parts whose sum is the reward, or
# None, which leaves the response out of the loss and of its group's baseline.
Reward = Callable[..., float | dict[str, float] | None]


# A problem, the texts of its responses, and their engine_adapter.Rollout.
Answered = tuple[Problem, list[str], Sequence[Any]]


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems to evaluate on, and their reward.

    A reward that fails raises a ValueError. `grade` computes the rewards of many groups at once and
    returns an exception for each that fails; without it `reward` is called for each response.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Reward
    num_repeated: int = 0  # left out, because an equal question came before
    num_dropped: int = 0  # left out, because the prompt is too long
    grade: Callable[[list[Answered]], list[list[Any]]] | None = None
    evaluation: "Task | None" = None  # of --eval-task: it gives the rewards of `held_out`
    same: Callable[[str, str], bool] = str.__eq__  # whether two answers mean the same
    in_passes: bool = False  # each problem once before any comes twice
    text: str = ""  # of a task file
    tokenizer: Any = None  # this field and the next are set by `encode`
    stop_token_ids: tuple[int, ...] = ()
    reward_errors: Literal["stop", "leave-out"] = "stop"  # if a reward fails

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of all problems."""
        return [problem.prompt_ids for problem in (*self.train, *self.held_out)]

    @property
    def fingerprint(self) -> str:
        """Digest of all problems in their order, and of the texts of task files."""
        problems = [(each.key, each.answer, each.row) for each in (*self.train, *self.held_out)]
        files = [self.text, self.evaluation.text if self.evaluation else ""]
        return digest([len(self.train), problems, files])

    def sample(self, rng: random.Random, num_prompts: int, left: list[int]) -> list[Problem]:
        """P different training problems; a checkpoint has the state of `rng`, and `left`.

        `left` is for a task that is read in passes: the numbers of the problems that this pass has
        not used yet, in their order. The list is changed in place.
        """
        if not self.in_passes:
            return rng.sample(self.train, num_prompts)
        if len(left) < num_prompts:  # a new pass, and no problem twice in a step
            order, had = rng.sample(range(len(self.train)), len(self.train)), {*left}
            first = [number for number in order if number not in had][: num_prompts - len(left)]
            now = {*first}
            left += first + [number for number in order if number not in now]
        taken = left[:num_prompts]
        del left[:num_prompts]
        return [self.train[number] for number in taken]

    def score(
        self, problems: list[Problem], rollouts: Sequence[Any], evaluates: bool = False
    ) -> list[dict[str, Any]]:
        """Give a reward to each rollout that has none, and a score where none is set: the reward.

        `rollouts` are Rollouts: G of each problem, group-major. The reward of a response
        that is left out is NaN. `evaluates`: the problems are held out. Returns a row for each, as
        in samples.jsonl. Raises: ValueError if a reward fails, unless such responses are left out.
        """
        size = len(rollouts) // len(problems)
        assert size * len(problems) == len(rollouts), f"{len(problems)=} {len(rollouts)=}"
        groups = []
        for number, problem in enumerate(problems):
            members = rollouts[number * size : (number + 1) * size]
            groups.append((problem, [self.text_of(each) for each in members], members))
        task = (evaluates and self.evaluation) or self
        new = [group for group in groups if None in [each.reward for each in group[2]]]
        for (problem, texts, members), results in zip(new, task.results(new), strict=True):
            for text, rollout, result in zip(texts, members, results, strict=True):
                if rollout.reward is None:
                    self._reward(problem, text, rollout, result)
        for rollout in rollouts:
            if rollout.score is None:
                rollout.score = rollout.reward
        rows = [row_of(problem, text, rollout) for problem, texts, members in groups
                for text, rollout in zip(texts, members, strict=True)]
        errors = [row["error"] for row in rows if row["error"]]
        if errors:
            print(f"REWARD FAILED, one of {len(errors)}: {errors[0]}", flush=True)
        return rows

    def text_of(self, rollout: Any) -> str:
        """A response without its stop token; other special tokens, such as </think>, are text."""
        ids = rollout.token_ids
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def results(self, groups: list[Answered]) -> list[list[Any]]:
        """For each response its reward, or the exception that it has raised."""
        if self.grade:
            return self.grade(groups)
        return [[attempt(self.reward, problem, text) for text in texts]
                for problem, texts, _ in groups]

    def _reward(self, problem: Problem, text: str, rollout: Any, result: Any) -> None:
        if isinstance(result, Exception):
            error = (f"{one_line(result).removeprefix('ValueError: ')} on {problem.source},"
                     f" question {problem.question!r:.200}, response {text!r:.200}")
            if self.reward_errors == "stop":
                raise ValueError(f"{error}; to go on without such responses, --reward-errors"
                                 " leave-out")
            rollout.reward_error, result = error, None
        if isinstance(result, dict):
            rollout.parts, result = result, sum(result.values())
        rollout.reward = math.nan if result is None else result


def row_of(problem: Problem, text: str, rollout: Any) -> dict[str, Any]:
    """A scored rollout as samples.jsonl has it."""
    return {
        "reward": None if math.isnan(rollout.reward) else rollout.reward,
        "response": text, "question": problem.question, "answer": problem.answer,
        "source": problem.source, "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.token_ids), "error": rollout.reward_error, "parts": rollout.parts,
    }


def attempt(reward: Reward, problem: Problem, text: str) -> Any:
    """The reward, or the exception that it has raised."""
    try:
        return reward(problem, text)
    except Exception as failed:
        return failed


def prompts_record(task: Task) -> dict[str, str]:
    """A digest of all prompts, and the first one with its special tokens: what the model sees."""
    first = task.tokenizer.decode(task.train[0].prompt_ids)
    return {"digest": digest(task.prompts), "first": first}


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()


def exact_match(problem: Problem, response: str) -> float:
    """1.0 if the response, without white space around it, equals the answer, else 0.0."""
    return float(response.strip() == problem.answer)


# ---------------------------------------------------------------------------------- the split
def split(task: Task, name: str, seed: int, drop: bool = False) -> Task:
    """Each question once, in one split. Without held-out problems the seed chooses a tenth of the
    families.

    Raises: ValueError if a question has two answers, unless `drop`: then it is left out.
    """
    by_key: dict[str, Problem] = {}
    conflicts = {}
    for problem in (*task.held_out, *task.train):
        known = by_key.setdefault(problem.key, problem)
        if problem is not known and not task.same(problem.answer, known.answer):
            conflicts.setdefault(problem.key, f"{known.source} has {known.answer!r:.40} and"
                                              f" {problem.source} has {problem.answer!r:.40}")
    refuse_or_drop(conflicts.values(), f"of {len(by_key)} questions have two answers", drop)
    num_repeated = len(task.held_out) + len(task.train) - len(by_key)
    problems = [problem for key, problem in by_key.items() if key not in conflicts]
    held_out_families = {problem.split_by for problem in task.held_out}
    if not held_out_families:
        problems = random.Random(seed).sample(problems, len(problems))
        families = list(dict.fromkeys(problem.split_by for problem in problems))
        held_out_families = set(families[: max(1, round(0.1 * len(families)))])
    training = [each for each in problems if each.split_by not in held_out_families]
    if not training:
        raise ValueError(f"task must have problems left to train on, {name} has {len(problems)}"
                         " without repeats, all of them held out")
    held_out = [each for each in problems if each.split_by in held_out_families]
    return replace(task, train=training, held_out=held_out, num_repeated=num_repeated)


def refuse_or_drop(
    faults: Sequence[str], what: str, drop: bool, option: str = "--unreadable-answers"
) -> None:
    """Raises: ValueError with the number of the faults and the first three, unless `drop`."""
    if not faults:
        return
    said = f"{len(faults)} {what}: {'; '.join([*faults][:3])}"
    if not drop:
        raise ValueError(f"{said}; to leave them out, {option} drop")
    print(f"{said}: DROPPED", flush=True)


# ---------------------------------------------------------------------------------- prompts
def encode(
    tokenizer: Any, task: Task, stop_token_ids: tuple[int, ...] = (), limit_s: float = 10,
    system_prompt: str | None = None, template_args: dict[str, Any] | None = None,
    use_template: bool = True,
) -> Task:
    """The task with the token ids of every prompt, in the model's chat template if it has one.

    `template_args` are variables of the template. Raises: ValueError.
    """
    template = tokenizer.chat_template if use_template else None
    template_args = template_args or {}
    if template is None and (system_prompt or template_args):
        raise ValueError("system_prompt and chat_template_args need a chat template, the model has"
                         " none or --chat-template is off")
    unknown = [name for name in template_args if not re.search(rf"\b{name}\b", str(template))]
    if unknown:
        raise ValueError("chat_template_args must be variables of the model's chat template, it has"
                         f" no {', '.join(unknown)}")

    def token_ids(problem: Problem) -> list[int]:
        messages = problem.messages or [{"role": "user", "content": problem.question}]
        if template is None:
            if len(messages) > 1:
                raise ValueError(f"{len(messages)} chat messages need a chat template")
            return tokenizer(problem.question)["input_ids"]
        if system_prompt:
            if messages[0]["role"] == "system":
                raise ValueError("system_prompt must not be given, the messages have their own")
            messages = [{"role": "system", "content": system_prompt}, *messages]
        # The beginning of a response follows the generation prompt to the character. Templates
        # trim it, or put a closed thought before it: extras/notices.py shows both texts.
        beginning = ""
        if messages[-1]["role"] == "assistant":
            *messages, last = messages
            beginning = last["content"]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **template_args)
        return tokenizer(text + beginning, add_special_tokens=False)["input_ids"]

    def encoded(problem: Problem) -> Problem:
        # A chat template is a program and may not end.
        with stage(f"encoding the question of {problem.source}"), time_limit(limit_s):
            ids = token_ids(problem)
            if not ids:
                raise ValueError("the tokenizer makes no token of it")
        return problem._replace(prompt_ids=ids)

    return replace(task, train=list(map(encoded, task.train)),
                   held_out=list(map(encoded, task.held_out)), tokenizer=tokenizer,
                   stop_token_ids=stop_token_ids)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError. For the main thread, and not for compiled code that does not return."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s; try --reward-limit-s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fitting(
    task: Task, context: float, max_new_tokens: int, longest_prompt: float, drop: bool
) -> Task:
    """The task without the problems whose prompts are too long, if these are to be dropped.

    `context`, the model's, and the other limits are in tokens; infinity is no limit.
    Raises: ValueError.
    """
    if max_new_tokens >= context:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got"
                         f" {max_new_tokens}")
    limit, name = longest_prompt, "--max-prompt-tokens"
    if context - max_new_tokens < limit:
        limit, name = context - max_new_tokens, f"the context of {context} less --max-new-tokens"
    problems = sorted(task.train + task.held_out, key=lambda each: -len(each.prompt_ids))
    overlong = [f"{each.source} has {len(each.prompt_ids)}" for each in problems
                if len(each.prompt_ids) > limit]
    what = f"of {len(problems)} prompts are longer than {limit} tokens ({name})"
    refuse_or_drop(overlong, what, drop, "--overlong-prompts")
    train = [each for each in task.train if len(each.prompt_ids) <= limit]
    held_out = [each for each in task.held_out if len(each.prompt_ids) <= limit]
    if not train or not held_out:
        raise ValueError(f"{len(overlong)} {what}, all of the"
                         f" {'held-out' if train else 'training'} problems")
    return replace(task, train=train, held_out=held_out, num_dropped=len(overlong))
