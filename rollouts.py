"""A rollout: what is asked of a sampler, what it answers, and where a step's rollouts come from."""

import math
import random
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy
import torch

from config import LARGEST, MANY, SMALLEST, check_mask, within
from tasks import Problem, Task


@dataclass(frozen=True)
class Sampling:
    """All that shapes the sampled distribution; the rest stays at vLLM's neutral defaults.

    Training uses temperature and mask. The probe also uses the penalties:
    `probe.replay.Replay.logprobs` reproduces all.
    """

    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_kept: int = 0  # Return the ids that the mask kept, at most so many a token; 0: none.

    def __post_init__(self):
        check_mask(self)
        within(self, 1, MANY, "max_new_tokens")
        within(self, SMALLEST, LARGEST, "repetition_penalty")
        within(self, -LARGEST, LARGEST, "presence_penalty", "frequency_penalty")
        if self.temperature:
            within(self, 0.01, 2, "temperature")  # vLLM's range


@dataclass
class Rollout:
    """One sampled response. Lists have one entry per response token, the stop token included."""

    prompt_ids: list[int]
    seed: int | None  # with a seed it can be sampled again alone; without, see `reseed`
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # behaviour log-probabilities, nats
    # The weight version under which each token was sampled. With async scheduling (V1's default)
    # vLLM returns a token one step late: after an in-flight update one token of each unfinished
    # rollout is labelled one version too new.
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while unfinished
    sampling: Sampling | None = None  # None in a trace that was read from a file
    kept: list[numpy.ndarray] = field(default_factory=list)  # by token: ids that the mask kept
    # By token: whether it has a loss. Empty: all have one. An environment's words have none.
    trained: list[bool] = field(default_factory=list)
    # The task's; None until it is scored. NaN: left out, without a loss and without a place in its
    # group's baseline.
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, if it is their sum
    reward_error: str | None = None  # what has failed, if the response is left out for it
    score: float | None = None  # what the policy is trained on: the reward, unless it is shaped
    # Of the prompt's first part, if a load came while the prompt was computed.
    prompt_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version from which any of it was computed, prompt included."""
        of_prompt = [] if self.prompt_version is None else [self.prompt_version]
        return min(of_prompt + self.versions, default=None)

    def append(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Add sampled tokens. Raises: FloatingPointError if a log-probability is not finite."""
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"the sampler's log-probabilities are {logprobs} for prompt"
                                     f" {self.prompt_ids}")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))


def reseed(*stream: int | str) -> None:
    """Seed the generators of all samples without a seed: torch's (V1 runner), numpy's (V2 runner).

    `stream` names what is sampled next, such as (seed of the run, "train", step).
    """
    seed = int.from_bytes(sha256(repr(stream).encode()).digest()[:6], "big")
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


# ------------------------------------------------------------------- where rollouts come from
class Synchronous:
    """A source of rollouts: P problems a step, all responses sampled to their end.

    Training and evaluation both call `answer`. A source may score its rollouts (`Task.score`);
    those without a reward are scored while the engine sleeps. `engine` is an engine_adapter.Engine.
    """

    def __init__(
        self, engine: Any, task: Task, sampling: Sampling, num_prompts: int, group_size: int,
        seed: int,
    ):
        self.engine, self.task, self.sampling = engine, task, sampling
        self.num_prompts, self.group_size, self.seed = num_prompts, group_size, seed
        self.rng = random.Random(seed)
        self.left: list[int] = []  # see Task.sample

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G rollouts, group-major."""
        return self.draw("train", step)

    def draw(self, *stream: int | str) -> tuple[list[Problem], list[Rollout]]:
        """As `next`; each `stream`, such as ("train", step, round), has random samples of its own.
        """
        problems = self.task.sample(self.rng, self.num_prompts, self.left)
        reseed(self.seed, *stream)
        return problems, self.answer(problems, self.group_size, self.sampling)

    def answer(
        self, problems: list[Problem], num_samples: int, sampling: Sampling
    ) -> list[Rollout]:
        """`num_samples` responses to each problem, group-major."""
        return self.engine.generate([each.prompt_ids for each in problems], num_samples, sampling)

    def after_update(self) -> dict[str, int]:
        """After each load: further metrics. Here nothing is in flight."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])
        self.left = state["left"]
