"""Problems, prompts and rewards: what a task is, its held-out problems, a model's prompts.

`--task` names one of examples/toys.py, or a file or dataset that extras/problem_files.py reads.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from records import one_line, stage


class Problem(NamedTuple):
    """`source` names the line of a file, for messages; `prompt_ids` come from `encode`.

    Problems of one family, such as 4 + 7 and 7 + 4, are held out together. A problem without a
    family is its own.
    """

    question: str
    answer: str
    source: str
    prompt_ids: list[int] = []
    family: str = ""

    @property
    def split_by(self) -> str:
        return self.family or self.question


Reward = Callable[..., float]


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems to evaluate on, and `reward(problem, response) -> float`.

    A reward that fails raises a ValueError.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Reward
    num_repeated: int = 0  # problems that were left out, because their question was there already
    takes_rollout: bool = False  # the reward has a third argument, the Rollout
    text: str = ""  # of a task file
    tokenizer: Any = None  # of `encode`
    reward_errors: Literal["stop", "count"] = "stop"  # if a reward fails

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of all problems."""
        return [problem.prompt_ids for problem in (*self.train, *self.held_out)]

    @property
    def fingerprint(self) -> str:
        """Digest of all problems in their order, and of a task file's text."""
        texts = [problem[:2] for problem in (*self.train, *self.held_out)]
        record = [len(self.train), texts, self.text]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()

    def sample(self, rng: random.Random, num_prompts: int) -> list[Problem]:
        """P different training problems; a checkpoint has the state of `rng`."""
        return rng.sample(self.train, num_prompts)

    def score(self, problems: list[Problem], rollouts: Sequence[Any]) -> list[dict[str, Any]]:
        """Give a reward to each rollout that has none, and a score where none is set: the reward.

        `rollouts` are rollouts.Rollout: G of each problem, group-major. Returns a row for each, as
        in samples.jsonl. Raises: ValueError if a reward fails, unless these are counted.
        """
        asked = [problem for problem in problems for _ in range(len(rollouts) // len(problems))]
        ids = [rollout.token_ids for rollout in rollouts]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rows = []
        for problem, rollout, text in zip(asked, rollouts, texts, strict=True):
            if rollout.reward is None:
                self._reward(problem, rollout, text)
            if rollout.score is None:
                rollout.score = rollout.reward
            rows.append({
                "reward": rollout.reward, "response": text, "question": problem.question,
                "answer": problem.answer, "source": problem.source,
                "finish_reason": rollout.finish_reason, "tokens": len(rollout.token_ids),
                "error": rollout.reward_error,
            })
        errors = [row["error"] for row in rows if row["error"]]
        if errors:
            print(f"REWARD FAILED, one of {len(errors)}: {errors[0]}", flush=True)
        return rows

    def _reward(self, problem: Problem, rollout: Any, text: str) -> None:
        more = [rollout] if self.takes_rollout else []
        try:
            rollout.reward = self.reward(problem, text, *more)
        except Exception as failed:
            error = (f"{one_line(failed).removeprefix('ValueError: ')} on {problem.source},"
                     f" question {problem.question!r:.200}, response {text!r:.200}")
            if self.reward_errors == "stop":
                raise ValueError(f"{error}; to go on with reward 0, --reward-errors count"
                                 ) from None
            rollout.reward, rollout.reward_error = 0.0, error


def exact_match(problem: Problem, response: str) -> float:
    """1.0 if the response, without white space around it, equals the answer, else 0.0."""
    return float(response.strip() == problem.answer)


# ---------------------------------------------------------------------------------- the split
def split(
    name: str, reward: Reward, seed: int, train: list[Problem], held_out: Sequence[Problem] = (),
    same: Callable[[str, str], bool] = str.__eq__,
) -> Task:
    """Each question once, in one split. `same`: whether two answers mean the same.

    Without `held_out` the seed chooses a tenth of the families.
    """
    by_question: dict[str, Problem] = {}
    for problem in (*held_out, *train):
        known = by_question.setdefault(problem.question.strip(), problem)
        if not same(problem.answer, known.answer):
            raise ValueError(f"a question must have one answer, {known.source} has"
                             f" {known.answer!r:.40} and {problem.source} has"
                             f" {problem.answer!r:.40} to the same question")
    problems = list(by_question.values())
    num_repeated = len(held_out) + len(train) - len(problems)
    held_out_families = {problem.split_by for problem in held_out}
    if not held_out_families:
        problems = random.Random(seed).sample(problems, len(problems))
        families = list(dict.fromkeys(problem.split_by for problem in problems))
        held_out_families = set(families[: max(1, round(0.1 * len(families)))])
    training = [each for each in problems if each.split_by not in held_out_families]
    if not training:
        raise ValueError(f"task must have problems left to train on, {name} has {len(problems)}"
                         " without repeats, all of them held out")
    held_out = [each for each in problems if each.split_by in held_out_families]
    return Task(training, held_out, reward, num_repeated)


# ---------------------------------------------------------------------------------- prompts
def encode(tokenizer: Any, task: Task, limit_s: float = 10) -> Task:
    """The task with the token ids of every question, in the model's chat template if it has one."""
    from extras.task_file import time_limit

    def encoded(problem: Problem) -> Problem:
        # A chat template is a program and may not end.
        with stage(f"encoding the question of {problem.source}"), time_limit(limit_s):
            if tokenizer.chat_template is None:
                encoding = tokenizer(problem.question)
            else:
                messages = [{"role": "user", "content": problem.question}]
                encoding = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True)
            ids = encoding["input_ids"]
            if not ids:
                raise ValueError("the tokenizer makes no token of it")
        return problem._replace(prompt_ids=ids)

    return replace(task, train=list(map(encoded, task.train)),
                   held_out=list(map(encoded, task.held_out)), tokenizer=tokenizer)


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
    train = [problem for problem in task.train if len(problem.prompt_ids) <= limit]
    held_out = [problem for problem in task.held_out if len(problem.prompt_ids) <= limit]
    problems = task.train + task.held_out
    num_overlong = len(problems) - len(train) - len(held_out)
    if not num_overlong:
        return task
    counted = f"{num_overlong} of {len(problems)} prompts are longer than {limit} tokens ({name})"
    if not drop:
        worst = max(problems, key=lambda problem: len(problem.prompt_ids))
        raise ValueError(f"{counted}, {worst.source} has {len(worst.prompt_ids)};"
                         " try --overlong-prompts drop")
    if not train or not held_out:
        raise ValueError(f"{counted}, all of the {'held-out' if train else 'training'} problems")
    print(f"{counted}: DROPPED", flush=True)
    return replace(task, train=train, held_out=held_out)
