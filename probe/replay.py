"""The trainer's values of a trace's tokens, in its own arithmetic and in twice its precision.

All values are flat: N response tokens of B sequences, row after row. Log-probabilities in nats.
"""

from dataclasses import replace

import torch
from torch import Tensor

from extras.sampling_mask import masked_logits
from probe.noise import precisely
from probe.traces import Trace
from rl import Policy, at_targets, make_batch
from rollouts import Sampling

MICRO_BATCH_TOKENS = 16_384  # per forward pass, so that memory does not grow with the trace
NO_PENALTIES = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
Weights = dict[str, Tensor]  # a version of the trainer's weights, by parameter name


class Replay:
    """Forward passes of the trainer over a trace's tokens, with any version of its weights.

    Raises: ValueError if a token id is outside the model's vocabulary.
    """

    def __init__(self, policy: Policy, trace: Trace):
        self.policy = policy
        self.trace = trace
        self.device = policy.device
        self.batch = batch = make_batch(trace.rollouts, self.device)
        self.inputs = batch.inputs  # (B, L)
        self.response = batch.mask > 0  # (B, L)
        vocabulary = policy.head.weight.shape[0]
        largest = max(max(r.prompt_ids + r.token_ids) for r in trace.rollouts)
        if largest >= vocabulary:
            raise ValueError(f"tokens must be below the model's vocabulary of {vocabulary},"
                             f" {trace.name} has {largest}")
        self.rows, columns = self.response.nonzero(as_tuple=True)  # (N,) row of each token
        self.prompt_lengths = batch.prompt_lengths.to(self.device)
        self.positions = columns - self.prompt_lengths[self.rows] + 1  # (N,) from 0 in the response
        self.targets = batch.targets[self.response]  # (N,)
        # Not from the batch, whose log-probabilities are float32.
        values = [value for rollout in trace.rollouts for value in rollout.logprobs]
        self.reported = torch.tensor(values, dtype=torch.float64, device=self.device)  # (N,)
        self.lengths = self.response.sum(dim=1)  # (B,)
        self.rows_per_pass = max(1, MICRO_BATCH_TOKENS // self.inputs.shape[1])

    # ------------------------------------------------------------------------------ hidden states
    def as_trained(self) -> Tensor:
        """Last hidden states at the response tokens, as the policy's own body has them: (N, H)."""
        parts = torch.arange(len(self.inputs)).split(self.rows_per_pass)
        batches = [self.batch.select(rows) for rows in parts]
        return torch.cat([self.policy.body(self.policy, each, each.mask > 0) for each in batches])

    def hidden(self, weights: Weights, old: Weights | None = None,
               num_old: Tensor | None = None) -> Tensor:
        """Hidden states in the precision of `weights`: (N, H).

        With `old`, the KV cache of row b's first `num_old[b]` inputs, (B,), is that of old weights.
        These inputs are a part of the prompt.
        """
        from transformers import DynamicCache

        if num_old is None:
            num_old = torch.zeros_like(self.lengths)
        model = self.policy.model
        name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
        kind = next(iter(weights.values())).dtype
        hidden = torch.zeros(*self.inputs.shape, self.policy.head.weight.shape[1], dtype=kind,
                             device=self.device)
        with precisely(self.policy, weights):
            for prefix in num_old.unique().tolist():
                for rows in (num_old == prefix).nonzero()[:, 0].split(self.rows_per_pass):
                    ids = self.inputs[rows]
                    cached = {"use_cache": False}
                    if prefix:
                        cached = {name: DynamicCache(config=model.config), "use_cache": True}
                        with self.policy.using(old):
                            model.base_model(input_ids=ids[:, :prefix], **cached)
                    states = model.base_model(input_ids=ids[:, prefix:], **cached)
                    hidden[rows, prefix:] = states.last_hidden_state
        return hidden[self.response]

    # ------------------------------------------------------------------------- log-probabilities
    def logprobs(self, logits: Tensor, sampling: Sampling, chunk: slice) -> Tensor:
        """What vLLM's sampler draws from: penalties, temperature, min-p, top-k, top-p.

        Shapes: logits (n, V) of a chunk of the tokens -> (n,), of the sampled ids.
        Source: vLLM's v1/sample/sampler.py.
        """
        if replace(sampling, **NO_PENALTIES) != sampling:
            logits = self._penalized(logits, sampling, chunk)
        if sampling.temperature > 0:  # greedy: no temperature, no mask
            logits = masked_logits(logits / sampling.temperature, sampling)
        return at_targets(logits.log_softmax(dim=-1), self.targets[chunk])

    def _penalized(self, logits: Tensor, sampling: Sampling, chunk: slice) -> Tensor:
        """(n, V) -> (n, V), by the ids before each token: those of the prompt and those sampled."""
        rows = self.rows[chunk]
        ids = self.inputs[rows]  # (n, L)
        first = self.prompt_lengths[rows, None]  # (n, 1)
        columns = torch.arange(ids.shape[1], device=self.device)
        before = columns < first + self.positions[chunk, None]
        sampled = before & (columns >= first)
        zeros = torch.zeros_like(logits)
        seen = zeros.scatter_add(1, ids, before.to(logits.dtype)) > 0
        counts = zeros.scatter_add(1, ids, sampled.to(logits.dtype))
        repetition = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - sampling.frequency_penalty * counts
        return logits - sampling.presence_penalty * (counts > 0).to(logits.dtype)

    # ------------------------------------------------------------------------------ per sequence
    def row_means(self, values: Tensor) -> Tensor:
        """Means of (N,) over the tokens of each row without NaN: (B,)."""
        known = ~values.isnan()
        means = values.new_zeros(len(self.lengths))
        return means.scatter_reduce(0, self.rows[known], values[known], "mean", include_self=False)
