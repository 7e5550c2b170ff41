"""Problems and rewards: what a task is. How one is found and prepared for a run is in job.py."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from report.errors import one_line


class Problem(NamedTuple):
    """`source` names the line of a file, for messages; `prompt_ids` come from prompts.encode.

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
        if self.messages:
            return json.dumps(self.messages, default=str, sort_keys=True)
        return self.question.strip()


# Of a problem and a response: a number, a dictionary of named terms whose sum is the reward, or
# None, which leaves the response out of the loss and of its group's baseline.
Reward = Callable[..., float | dict[str, float] | None]
# (problem, texts of responses, their engine_adapter.Rollouts) -> a reward for each response.
Grade = Callable[[Problem, list[str], Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems to evaluate on, and their reward.

    A reward that fails raises a ValueError. `grade` is called in place of `reward`, if it is given:
    for each response, or with `whole_groups` once for all responses to a problem.
    """

    train: list[Problem]
    held_out: list[Problem]
    reward: Reward
    grade: Grade | None = None
    whole_groups: bool = False
    num_repeated: int = 0  # left out, because an equal question came before
    num_dropped: int = 0  # left out, because the prompt is too long
    evaluation: "Task | None" = None  # of --eval-task: it gives the rewards of `held_out`
    same: Callable[[str, str], bool] = str.__eq__  # whether two answers mean the same
    readable: Callable[[str], str] = str  # of a response's text what the reward reads
    in_passes: bool = False  # each problem once before any comes twice
    text: str = ""  # of a task file
    tokenizer: Any = None  # this field and the next are set by prompts.encode
    stop_token_ids: tuple[int, ...] = ()
    reward_errors: Literal["stop", "leave-out"] = "stop"  # if a reward fails

    def sample(self, rng: random.Random, num_prompts: int, left: list[int]) -> list[Problem]:
        """P different training problems; a checkpoint has the state of `rng`, and `left`.

        `left` is for a task that is read in passes: the numbers of the problems that this pass has
        not used yet, in their order. The list is changed in place.
        """
        if not self.in_passes:
            return rng.sample(self.train, num_prompts)
        if len(left) < num_prompts:  # a new pass, and no problem twice in a step
            order = rng.sample(range(len(self.train)), len(self.train))
            first = [number for number in order if number not in left][: num_prompts - len(left)]
            left += first + [number for number in order if number not in first]
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
        task = (evaluates and self.evaluation) or self
        rows = []
        for number, problem in enumerate(problems):
            members = rollouts[number * size : (number + 1) * size]
            texts = list(map(self.text_of, members))
            results = [rollout.reward for rollout in members]
            if None in results:
                results = task.results(problem, texts, members)
            elif task is not self:
                raise ValueError("a source's `answer` must give no rewards with eval_task, which"
                                 " has other ones")
            for text, rollout, result in zip(texts, members, results, strict=True):
                if rollout.reward is None:
                    self._set_reward(problem, text, rollout, result)
                rollout.reward = float(rollout.reward)
                if math.isinf(rollout.reward):
                    raise ValueError(f"a reward must be finite, got {rollout.reward} on"
                                     f" {problem.source}, response {text!r:.200}")
                if rollout.score is None:
                    rollout.score = rollout.reward
                assert not math.isinf(rollout.score), f"{rollout.score=}"
                rows.append({
                    "reward": None if math.isnan(rollout.reward) else rollout.reward,
                    "response": text, "question": problem.question, "answer": problem.answer,
                    "source": problem.source, "finish_reason": rollout.finish_reason,
                    "tokens": len(rollout.token_ids), "error": rollout.reward_error,
                    "terms": rollout.terms,
                })
        errors = [row["error"] for row in rows if row["error"]]
        if errors:
            print(f"REWARD FAILED, one of {len(errors)}: {errors[0]}")
        return rows

    def text_of(self, rollout: Any) -> str:
        """A response without its stop token; other special tokens, such as </think>, are text."""
        ids = rollout.token_ids
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.readable(self.tokenizer.decode(ids))

    def results(self, problem: Problem, texts: list[str], rollouts: Sequence[Any]) -> list[Any]:
        """For each response its reward, or the exception that it has raised."""
        size = len(texts) if self.whole_groups else 1  # responses of a call
        results = []
        for start in range(0, len(texts), size):
            members = slice(start, start + size)
            try:
                if self.grade:
                    results += self.grade(problem, texts[members], rollouts[members])
                else:
                    results.append(self.reward(problem, texts[start]))
            except Exception as failed:  # of all responses of the call
                results += [failed] * size
        return results

    def _set_reward(self, problem: Problem, text: str, rollout: Any, result: Any) -> None:
        if isinstance(result, Exception):
            error = (f"{one_line(result).removeprefix('ValueError: ')} on {problem.source},"
                     f" question {problem.question!r:.200}, response {text!r:.200}")
            if self.reward_errors == "stop":
                raise ValueError(f"{error}; to go on without such responses, --reward-errors"
                                 " leave-out")
            rollout.reward_error = error
            rollout.reward = math.nan
        elif isinstance(result, dict):
            rollout.terms = result
            rollout.reward = sum(result.values())
        else:
            rollout.reward = math.nan if result is None else result

    @property
    def problems(self) -> list[Problem]:
        """All of them, those to train on first."""
        return [*self.train, *self.held_out]

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of all problems."""
        return [problem.prompt_ids for problem in self.problems]

    @property
    def prompts_record(self) -> dict[str, str]:
        """A digest of all prompts, and the first one with its special tokens: what the model sees.
        """
        first = self.tokenizer.decode(self.train[0].prompt_ids)
        return {"digest": digest(self.prompts), "first": first}

    @property
    def fingerprint(self) -> str:
        """Digest of all problems in their order, and of the texts of task files."""
        problems = [(problem.key, problem.answer, problem.row) for problem in self.problems]
        files = [self.text, self.evaluation.text if self.evaluation else ""]
        return digest([len(self.train), problems, files])


def exact_match(problem: Problem, response: str) -> float:
    """1.0 if the response, without white space around it, equals the answer, else 0.0."""
    return float(response.strip() == problem.answer)


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()
