"""The reference backend: the trainer's own modules sample, token by token, with a KV cache.

It is slow, and by construction it has no mismatch: there is one set of weights and one head. It is the known-good curve
beside vLLM's, and the plainest statement of what an engine must do for the loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_adapter import COUNTERS, Engine, Rollout, Sampling, TrainerLogprobs, WeightLoadError
from rl import Policy


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers; for models with sliding windows an upper bound."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


class Request(NamedTuple):
    """An unfinished rollout. Its own generator makes it repeatable, whatever else is sampled beside it."""

    rollout: Rollout
    generator: torch.Generator


@dataclass
class Cohort:
    """N requests that were prefilled together and decode together. `mask` (N, S) is 0 on left padding, else 1."""

    requests: list[Request]
    cache: Any  # transformers' DynamicCache
    mask: Tensor

    def drop_finished(self) -> None:
        rows = [row for row, each in enumerate(self.requests) if each.rollout.finish_reason is None]
        if len(rows) < len(self.requests):
            kept = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
            self.requests, self.mask = [self.requests[row] for row in rows], self.mask[kept]
            self.cache.batch_select_indices(kept)


class ReferenceEngine(Engine):
    """The interface and the states of `Engine` over a live `Policy`: no vLLM, no second copy of the weights.

    `load` copies nothing: the optimizer has changed the weights in place. Unfinished rollouts keep their keys and
    values, as with `inflight_keep`.
    """

    on_gpu = _memory_released = False  # sleep and wake change the state only

    def __init__(self, policy: Policy, max_num_seqs: int = 256):
        self.policy, self.max_num_seqs = policy, max_num_seqs
        self.version = None  # of vLLM
        self.state, self.weight_version, self.counters = "empty", 0, dict.fromkeys(COUNTERS, 0)
        self._queue: list[Request] = []
        self._cohorts: list[Cohort] = []
        self.settings = self.audit()

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + sum(len(cohort.requests) for cohort in self._cohorts)

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        sampling = rollouts[0].sampling
        if sampling != Sampling(sampling.temperature, sampling.max_new_tokens, sampling.stop_token_ids):
            raise ValueError(f"sampling must be by temperature alone in the reference engine, got {sampling}")
        self._queue += [Request(each, torch.Generator(self.policy.device).manual_seed(each.seed)) for each in rollouts]
        return rollouts

    @torch.no_grad()
    def step(self) -> None:
        """One token for each running rollout. Queued ones start when half of the places are free."""
        self._cohorts = [cohort for cohort in self._cohorts if cohort.requests]
        for cohort in self._cohorts:
            last = torch.tensor([[request.rollout.token_ids[-1]] for request in cohort.requests])
            cohort.mask = torch.cat([cohort.mask, cohort.mask.new_ones(len(last), 1)], dim=1)
            self._forward(cohort, last.to(self.policy.device))
        free = self.max_num_seqs - (self.num_unfinished - len(self._queue))
        if self._queue and 2 * free >= self.max_num_seqs:
            sampling = self._queue[0].rollout.sampling
            alike = takewhile(lambda request: request.rollout.sampling == sampling, self._queue)
            self._prefill(list(islice(alike, free)))

    def _prefill(self, requests: list[Request]) -> None:
        from transformers import DynamicCache

        self._queue = self._queue[len(requests) :]
        prompts = [request.rollout.prompt_ids for request in requests]
        longest, device = max(map(len, prompts)), self.policy.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)  # (N, S)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)  # (N, S)
        self._cohorts.append(Cohort(requests, DynamicCache(config=self.policy.model.config), mask))
        self._forward(self._cohorts[-1], ids)

    def _forward(self, cohort: Cohort, ids: Tensor) -> None:
        """ids (N, S) or (N, 1) after the cache's content -> one sampled token per request; finished ones leave."""
        positions = (cohort.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        hidden = self.policy.model.base_model(
            input_ids=ids, attention_mask=cohort.mask, position_ids=positions, past_key_values=cohort.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]  # (N, H)
        self._sample(cohort.requests, self.policy.logits(hidden))
        cohort.drop_finished()

    def _sample(self, requests: list[Request], logits: Tensor) -> None:
        """Draw from softmax(logits / T), the distribution whose log-probability is reported. N requests, (N, V)."""
        sampling = requests[0].rollout.sampling  # a cohort has one
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(dim=-1)  # (N, V)
        race = logprobs  # greedy
        if sampling.temperature:  # argmax of p / noise draws from p, if the noise is exponential
            noise = [torch.empty_like(row).exponential_(generator=request.generator)
                     for row, request in zip(logprobs, requests, strict=True)]
            race = logprobs - torch.stack(noise).clamp(min=torch.finfo(logprobs.dtype).tiny).log()
        tokens = race.argmax(dim=-1)  # (N,)
        drawn = logprobs.gather(1, tokens[:, None])[:, 0]
        for request, token, logprob in zip(requests, tokens.tolist(), drawn.tolist(), strict=True):
            request.rollout.append([token], [logprob], self.weight_version)
            if token in sampling.stop_token_ids:
                request.rollout.finish_reason = "stop"
            elif len(request.rollout.token_ids) == sampling.max_new_tokens:
                request.rollout.finish_reason = "length"

    def load(
        self, weights: Mapping[str, Tensor], _trainer_logprobs: TrainerLogprobs, changed: bool = True
    ) -> dict[str, float]:
        """Count one weight version up if the weights have `changed`.

        Raises: WeightLoadError if the tensors are not the policy's own.
        """
        self._require("load", "empty", "ready")
        own = {name: tensor.data_ptr() for name, tensor in self.policy.weights().items()}
        if {name: tensor.data_ptr() for name, tensor in weights.items()} != own:
            raise WeightLoadError("the reference engine samples from its policy's own tensors and takes no others")
        self.weight_version += changed
        self.state = "ready"
        return {"load_bytes": 0, "load_s": 0.0, "canary_s": 0.0}

    def abort(self, rollouts: list[Rollout]) -> None:
        """The finish reason of what is unfinished becomes "abort"."""
        for rollout in rollouts:
            rollout.finish_reason = rollout.finish_reason or "abort"
        self._queue = [request for request in self._queue if request.rollout.finish_reason is None]
        for cohort in self._cohorts:
            cohort.drop_finished()

    def audit(self) -> dict[str, Any]:
        """What is in force: the trainer's own dtype, head and attention."""
        return {"engine": "transformers", "inflight_update": "keep"} | self.policy.audit()

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's."""
