"""What goes into an engine and what comes out: `Sampling`, `Rollout`."""

import math
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class Sampling:
    """All that shapes the sampled distribution; `sampling_arguments` makes the rest neutral.

    Training uses temperature and mask. The probe also uses the penalties:
    `probe.traces.process_logits` reproduces all.
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
        for name, rule, holds in (
            ("temperature", "0 (greedy) or at least 0.01 (vLLM's smallest) and finite",
             self.temperature == 0 or 0.01 <= self.temperature < math.inf),
            ("max_new_tokens", "at least 1", self.max_new_tokens >= 1),
            ("top_k", "a whole number, at least 0 (0 is off)",
             isinstance(self.top_k, int) and self.top_k >= 0),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1)", 0 <= self.min_p < 1),
            ("repetition_penalty", "positive and finite", 0 < self.repetition_penalty < math.inf),
            ("presence_penalty", "finite", math.isfinite(self.presence_penalty)),
            ("frequency_penalty", "finite", math.isfinite(self.frequency_penalty)),
        ):
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    @property
    def has_mask(self) -> bool:
        """Whether top-k, top-p or min-p can cut a token off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


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
    prompt_version: int | None = None  # of its first part, if a load found it half computed

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

    def restart(self) -> None:
        """Forget what has been sampled."""
        self.token_ids, self.logprobs, self.versions, self.kept = [], [], [], []
        self.finish_reason = self.prompt_version = None


def reseed(*stream: int | str) -> None:
    """Seed the generators of all samples without a seed: torch's (V1 runner), numpy's (V2 runner).

    `stream` names what is sampled next, such as (seed of the run, "train", step).
    """
    seed = int.from_bytes(sha256(repr(stream).encode()).digest()[:6], "big")
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def sampling_arguments(sampling: Sampling, seed: int | None, vocab_size: int) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams."""
    return dict(
        seed=seed, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens,
        # Stop where the trainer says and nowhere else; ignore_eos leaves the model's own list out.
        stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True,
        top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
        # Everything else that could change the distribution, at its neutral value.
        min_tokens=0, bad_words=None, logit_bias=None, allowed_token_ids=None, detokenize=False,
        # Of the sampled token; with `max_kept` also of the likeliest, one more than allowed, to see
        # if a set is larger.
        logprobs=min(sampling.max_kept + 1, vocab_size) if sampling.max_kept else 0,
    )
