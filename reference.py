"""The reference backend: the trainer's own modules sample, token by token, with a KV cache.

Slow, and without mismatch by construction: there is one set of weights and one head. It is the known-good curve beside
vLLM's, and the plainest statement of what an engine owes the loop; it shares the interface with `Engine` and no code.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from engine_adapter import EngineStateError, Rollout, Sampling, TrainerLogprobs, WeightLoadError
from rl import Policy


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers; of models with sliding windows the most it can be."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


@dataclass(frozen=True)
class Request:
    """A rollout in the making; its generator makes it repeatable whatever runs beside it."""

    rollout: Rollout
    sampling: Sampling
    generator: torch.Generator


@dataclass
class Cohort:
    """N requests that were prefilled together and decode together. `mask` (N, S) is 1 but on the left padding."""

    requests: list[Request]
    cache: DynamicCache
    mask: Tensor

    def drop_finished(self) -> None:
        rows = [row for row, each in enumerate(self.requests) if each.rollout.finish_reason is None]
        if len(rows) < len(self.requests):
            kept = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
            self.requests, self.mask = [self.requests[row] for row in rows], self.mask[kept]
            self.cache.batch_select_indices(kept)


class ReferenceEngine:
    """The interface of `engine_adapter.Engine` over a live `Policy`; states as there.

    `load` has nothing to copy: the optimizer has changed the weights in place. What an update does to unfinished
    rollouts has the same three names: keep (their keys and values stay as they are), recompute, abort.
    """

    kv_lost = 0  # a kept cache is never evicted here

    def __init__(self, policy: Policy, inflight_update: Literal["keep", "recompute", "abort"] = "keep",
                 max_num_seqs: int = 256):
        self.policy, self.inflight_update, self.max_num_seqs = policy, inflight_update, max_num_seqs
        self.version = None  # no vLLM takes part
        self.state: Literal["empty", "ready", "asleep"] = "empty"
        self.weight_version = 0
        self._queue: deque[Request] = deque()
        self._cohorts: list[Cohort] = []
        self.settings = self.audit()

    # ---------------------------------------------------------------------------------------------- sampling
    def generate(
        self, prompts: list[list[int]], group_size: int, sampling: Sampling, seeds: list[int]
    ) -> list[Rollout]:
        """Sample `group_size` responses to each of P prompts; sample g of prompt p has the seed `seeds[p] + g`.

        Shapes: P prompts of token ids -> P * group_size rollouts, group-major.
        """
        groups = [self.submit(prompt, group_size, sampling, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        rollouts = [rollout for group in groups for rollout in group]
        while any(rollout.finish_reason is None for rollout in rollouts):
            self.step()
        return rollouts

    def submit(self, prompt_ids: list[int], group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """Queue one group; its rollouts fill up in place as `step` runs."""
        if self.state != "ready":
            raise EngineStateError(f"generate needs an engine that is ready, this one is {self.state}: call load()")
        if sampling != Sampling(sampling.temperature, sampling.max_new_tokens, sampling.stop_token_ids):
            raise ValueError(f"sampling must be by temperature alone in the reference engine, got {sampling}")
        rollouts = [Rollout(prompt_ids, seed + g) for g in range(group_size)]
        self._queue.extend(
            Request(each, sampling, torch.Generator(self.policy.device).manual_seed(each.seed)) for each in rollouts
        )
        return rollouts

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + self._num_running

    @property
    def _num_running(self) -> int:
        return sum(len(cohort.requests) for cohort in self._cohorts)

    @property
    def has_room(self) -> bool:
        return self.num_unfinished < self.max_num_seqs

    @torch.no_grad()
    def step(self) -> None:
        """One token for each running rollout; queued ones start once half of the places are free."""
        self._cohorts = [cohort for cohort in self._cohorts if cohort.requests]
        for cohort in self._cohorts:
            last = torch.tensor([[each.rollout.token_ids[-1]] for each in cohort.requests], device=self.policy.device)
            self._forward(cohort, last)
        free = self.max_num_seqs - self._num_running
        if self._queue and 2 * free >= self.max_num_seqs:
            sampling, admitted = self._queue[0].sampling, []
            while self._queue and len(admitted) < free and self._queue[0].sampling == sampling:
                admitted.append(self._queue.popleft())
            self._prefill(admitted)

    def _prefill(self, requests: list[Request]) -> None:
        rows = [each.rollout.prompt_ids + each.rollout.token_ids for each in requests]  # tokens: of a recomputed one
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=self.policy.device)  # (N, S)
        lengths = torch.tensor(list(map(len, rows)), device=self.policy.device)
        mask = (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()  # (N, S)
        cohort = Cohort(requests, DynamicCache(config=self.policy.model.config), mask)
        self._cohorts.append(cohort)
        self._forward(cohort, ids, first=True)

    def _forward(self, cohort: Cohort, ids: Tensor, first: bool = False) -> None:
        """ids (N, S) or (N, 1) after the cache's content -> one sampled token per request; finished ones leave."""
        if not first:
            cohort.mask = torch.cat([cohort.mask, torch.ones_like(ids)], dim=1)
        positions = (cohort.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        hidden = self.policy.model.base_model(
            input_ids=ids, attention_mask=cohort.mask, position_ids=positions, past_key_values=cohort.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (N, H)
        logits = self.policy.logits(hidden, *self.policy.head_weights())  # (N, V)
        self._sample(cohort.requests, logits)
        cohort.drop_finished()

    def _sample(self, requests: list[Request], logits: Tensor) -> None:
        """Draw from softmax(logits / T), the distribution whose log-probability is reported: N requests, (N, V)."""
        sampling = requests[0].sampling  # a cohort has one
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(dim=-1)  # (N, V)
        race = logprobs  # greedy
        if sampling.temperature:  # argmax of p / noise: the exponential race draws from p
            noise = [torch.empty_like(row).exponential_(generator=each.generator)
                     for row, each in zip(logprobs, requests, strict=True)]
            race = logprobs - torch.stack(noise).clamp(min=torch.finfo(logprobs.dtype).tiny).log()
        tokens = race.argmax(dim=-1)  # (N,)
        drawn = logprobs.gather(1, tokens[:, None])[:, 0]
        if not torch.isfinite(drawn).all():
            raise FloatingPointError(f"the trainer's log-probabilities are {drawn.tolist()}")
        for request, token, logprob in zip(requests, tokens.tolist(), drawn.tolist(), strict=True):
            rollout = request.rollout
            rollout.token_ids.append(token)
            rollout.logprobs.append(logprob)
            rollout.versions.append(self.weight_version)
            if token in sampling.stop_token_ids:
                rollout.finish_reason = "stop"
            elif len(rollout.token_ids) == sampling.max_new_tokens:
                rollout.finish_reason = "length"

    # ---------------------------------------------------------------------------------------------- sleep, wake, load
    def sleep(self) -> None:
        """Only the state changes."""
        if self.state != "ready":
            raise EngineStateError(f"sleep needs an engine that is ready, this one is {self.state}")
        self.state = "asleep"

    def wake(self) -> None:
        if self.state != "asleep":
            raise EngineStateError(f"wake needs an engine that is asleep, this one is {self.state}")
        self.state = "empty"

    def load(
        self, weights: Mapping[str, Tensor], _trainer_logprobs: TrainerLogprobs, changed: bool = True
    ) -> dict[str, float]:
        """Count one weight version up if the weights have `changed`.

        Raises: WeightLoadError if the tensors are not the policy's own.
        """
        if self.state not in ("empty", "ready"):
            raise EngineStateError(f"load needs an engine that is awake, this one is {self.state}: call wake() first")
        own = {name: tensor.data_ptr() for name, tensor in self.policy.weights().items()}
        if {name: tensor.data_ptr() for name, tensor in weights.items()} != own:
            raise WeightLoadError("the reference engine samples from its policy's own tensors and takes no others")
        if changed:
            self._interrupt()
        self.weight_version += changed
        self.state = "ready"
        return {"load_bytes": 0, "load_s": 0.0, "canary_s": 0.0}

    def _interrupt(self) -> None:
        if self.inflight_update == "keep":
            return
        running = [request for cohort in self._cohorts for request in cohort.requests]
        self._cohorts.clear()
        self._queue.extendleft(reversed(running))  # prefilled again, with all their tokens, at the next step
        if self.inflight_update == "abort":
            self.abort([request.rollout for request in self._queue])

    def abort(self, rollouts: list[Rollout]) -> None:
        """Their finish reason becomes "abort"; they keep what they have."""
        for rollout in rollouts:
            rollout.finish_reason = rollout.finish_reason or "abort"
        self._queue = deque(request for request in self._queue if request.rollout.finish_reason is None)
        for cohort in self._cohorts:
            cohort.drop_finished()

    def audit(self) -> dict[str, Any]:
        """What is in force: the trainer's own dtype, head and attention."""
        trainer = self.policy.audit()
        return {
            "engine": f"transformers {transformers.__version__}",
            "model_dtype": trainer["model_dtype"],
            "head_dtype": trainer["head_dtype"],
            "attention_backend": trainer["attention"],
            "inflight_update": self.inflight_update,
        }

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's."""
