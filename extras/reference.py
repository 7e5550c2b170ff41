"""The reference backend: the trainer's own modules sample, token by token, with a KV cache.

It is slow, and by construction it has no mismatch: there is one set of weights and one head. It is
the known-good curve beside vLLM's, and the plainest statement of what an engine must do for the
loop.
"""

from collections.abc import Mapping
from itertools import islice, takewhile
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache

from engine_adapter import Engine, Rollout, Sampling, TrainerLogprobs, WeightLoadError
from rl import Policy


def engine_for(run: Any, policy: Policy) -> "ReferenceEngine":
    """With as many sequences at once as kv_cache_gib holds; `run` is train.py's.

    Raises: ValueError.
    """
    backend = run.config.backend
    per_rollout = run.max_model_len * kv_bytes_per_token(policy.model.config.get_text_config(), policy.model.dtype)
    fitting = max(1, int(backend.kv_cache_gib * 2**30 / per_rollout))
    return ReferenceEngine(policy, min(backend.max_num_seqs, fitting))


def check_model(policy: Policy) -> None:
    """Raises: ValueError if transformers' KV cache cannot serve the model."""
    config = policy.model.config
    if policy.model._is_stateful:
        raise ValueError("engine must be vllm and eval_with_trainer off with recurrent layers (transformers cannot drop"
                         " a row of their state); try --engine vllm --no-eval-with-trainer")
    if 1 in [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]:
        raise ValueError("sliding_window must be at least 2 (at 1 transformers' KV cache keeps all keys), got 1;"
                         " try --engine vllm --no-eval-with-trainer")


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers; for models with sliding windows an upper bound.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


class ReferenceEngine(Engine):
    """The interface and the states of `Engine` over a live `Policy`: no vLLM, no second copy of the
    weights.

    `load` copies nothing: the optimizer has changed the weights in place. Rollouts are queued or
    finished, never half sampled: each belongs to one set of weights.
    """

    on_gpu = _memory_released = False  # sleep has nothing to release

    def __init__(self, policy: Policy, max_num_seqs: int = 256):
        check_model(policy)
        self.policy, self.max_num_seqs = policy, max_num_seqs
        self.version = None  # of vLLM
        self.state, self.weight_version = "empty", 0
        self.counters = dict(tokens_wasted=0, rollouts_restarted=0, kv_lost=0)
        self._queue: list[Rollout] = []
        self.settings = self.audit()

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        sampling = rollouts[0].sampling
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0):
            raise ValueError(f"sampling must be without penalties in the reference engine, got {sampling}")
        self._queue += rollouts
        return rollouts

    @torch.no_grad()
    def step(self) -> None:
        """Sample N queued rollouts to their end: at most `max_num_seqs`, all with the sampling of
        the first.
        """
        sampling, device = self._queue[0].sampling, self.policy.device
        alike = takewhile(lambda rollout: rollout.sampling == sampling, self._queue)
        rollouts = list(islice(alike, self.max_num_seqs))  # N
        del self._queue[: len(rollouts)]
        generators = [None if rollout.seed is None else torch.Generator(device).manual_seed(rollout.seed)
                      for rollout in rollouts]
        prompts, longest = [rollout.prompt_ids for rollout in rollouts], max(len(each.prompt_ids) for each in rollouts)
        # (N, S)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)  # (N, S)
        cache = DynamicCache(config=self.policy.model.config)
        while rollouts:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            hidden = self.policy.model.base_model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]  # (N, H)
            # (N,), (N, V)
            tokens, logprobs = _draw(self.policy.logits(hidden), sampling, generators)
            chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
            for rollout, token, logprob in zip(rollouts, tokens.tolist(), chosen, strict=True):
                rollout.append([token], [logprob], self.weight_version)
                if token in sampling.stop_token_ids:
                    rollout.finish_reason = "stop"
                elif len(rollout.token_ids) == sampling.max_new_tokens:
                    rollout.finish_reason = "length"
            if sampling.max_kept:
                _collect(rollouts, logprobs)
            left = [row for row, rollout in enumerate(rollouts) if rollout.finish_reason is None]
            if len(left) < len(rollouts):
                rollouts, generators = [rollouts[row] for row in left], [generators[row] for row in left]
                tokens, mask = tokens[left], mask[left]
                cache.batch_select_indices(torch.tensor(left, dtype=torch.long, device=device))
            # (N, 1), (N, S + 1)
            ids, mask = tokens[:, None], torch.cat([mask, mask.new_ones(len(left), 1)], dim=1)

    def load(
        self, weights: Mapping[str, Tensor], _trainer_logprobs: TrainerLogprobs, changed: bool = True
    ) -> dict[str, float]:
        """Count one weight version up if the weights have `changed`.

        Raises: WeightLoadError if the weights are not the policy's own.
        """
        self._require("load", "empty", "ready")
        # Of fused experts copies, so their addresses would prove nothing.
        own = self.policy.weights()
        if own.keys() != weights.keys() or not all(torch.equal(own[name], weights[name]) for name in own):
            raise WeightLoadError("the reference engine samples with its policy's own weights and takes no others")
        self.weight_version += changed
        self.state = "ready"
        return {"load_bytes": 0, "load_s": 0.0, "canary_s": 0.0}

    def abort(self, rollouts: list[Rollout]) -> None:
        """The finish reason of what is unfinished becomes "abort"."""
        for rollout in rollouts:
            rollout.finish_reason = rollout.finish_reason or "abort"
        self._queue = [rollout for rollout in self._queue if rollout.finish_reason is None]

    def audit(self) -> dict[str, Any]:
        """What is in force: the trainer's own dtype, head and attention."""
        return {"engine": "transformers"} | self.policy.audit()

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's."""


def _draw(logits: Tensor, sampling: Sampling, generators: list[torch.Generator | None]) -> tuple[Tensor, Tensor]:
    """Tokens (N,) from the masked softmax(logits / temperature), or the likeliest at 0; all
    log-probabilities (N, V).

    A row with a generator of its own is repeatable, whatever is sampled beside it.
    """
    if not sampling.temperature:
        return logits.argmax(dim=-1), logits.log_softmax(dim=-1)
    logits = logits / sampling.temperature
    if sampling.has_mask:
        from extras.masks import masked_logits

        logits = masked_logits(logits, sampling)
    logprobs = logits.log_softmax(dim=-1)  # (N, V)
    # Argmax of p / noise draws from p, if the noise is exponential.
    noise = torch.empty_like(logprobs).exponential_()
    for row, generator in enumerate(generators):
        if generator:
            noise[row].exponential_(generator=generator)
    return (logprobs - noise.clamp(min=torch.finfo(noise.dtype).tiny).log()).argmax(dim=-1), logprobs


def _collect(rollouts: list[Rollout], logprobs: Tensor) -> None:
    """The kept sets of one more token of each rollout, from all log-probabilities (N, V)."""
    from extras.masks import collect_kept_sets

    all_ids = numpy.arange(logprobs.shape[1], dtype=numpy.int32)[None]  # (1, V)
    for rollout, row in zip(rollouts, logprobs.cpu().numpy(), strict=True):
        collect_kept_sets(rollout, all_ids, row[None])
