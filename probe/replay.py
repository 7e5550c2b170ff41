"""The trainer's values of a trace's tokens, in its own arithmetic and in twice its precision.

All values are flat: N response tokens of B sequences, row after row. Log-probabilities in nats.
"""

import torch
from torch import Tensor

from extras.shared.masks import MaskedSampling, masked_logits
from probe.traces import Trace
from rl import Head, Policy, make_batch

MICRO_BATCH_TOKENS = 16_384  # per forward pass, so that memory does not grow with the trace
NEVER_FULL = 2**40  # tokens: a KV block that no prompt fills
Weights = dict[str, Tensor]  # a version of the trainer's weights, by parameter name


class Replay:
    """Forward passes of the trainer over a trace's tokens, with any version of its weights.

    Raises: ValueError if a token id is outside the model's vocabulary.
    """

    def __init__(self, policy: Policy, trace: Trace):
        self.policy = policy
        self.trace = trace
        self.device = policy.device
        batch = make_batch(trace.rollouts, self.device)
        self.inputs = batch.inputs  # (B, L)
        self.response = batch.mask > 0  # (B, L)
        vocabulary = policy.head.weight.shape[0]
        largest = max(max(r.prompt_ids + r.token_ids) for r in trace.rollouts)
        if largest >= vocabulary:
            raise ValueError(f"tokens must be below the model's vocabulary of {vocabulary},"
                             f" {trace.name} has {largest}")
        self.rows, self.columns = self.response.nonzero(as_tuple=True)  # (N,), of each token
        self.prompt_lengths = batch.prompt_lengths.to(self.device)
        self.targets = batch.targets[self.response]  # (N,)
        # Not from the batch, whose log-probabilities are float32.
        values = [value for rollout in trace.rollouts for value in rollout.logprobs]
        self.reported = torch.tensor(values, dtype=torch.float64, device=self.device)  # (N,)
        self.rows_per_pass = max(1, MICRO_BATCH_TOKENS // self.inputs.shape[1])

    # ------------------------------------------------------------------------------ hidden states
    def hidden(self, old: Weights | None = None, block: int = NEVER_FULL) -> Tensor:
        """Last hidden states with the present weights, in their precision: (N, H).

        With `old`, the KV cache of each prompt's full blocks, of `block` tokens, is that of old
        weights.
        """
        body = self.policy.model.base_model
        weight = self.policy.head.weight  # (V, H)
        hidden = weight.new_zeros(*self.inputs.shape, weight.shape[1])  # (B, L, H)
        # (B,) a full hit leaves one token to compute.
        num_old = (self.prompt_lengths - 1) // block * block
        for prefix in num_old.unique().tolist():
            for rows in (num_old == prefix).nonzero()[:, 0].split(self.rows_per_pass):
                ids = self.inputs[rows]
                cache = {}  # Mamba 2 has another name for its cache
                if prefix:
                    with self.policy.using(old):
                        cache = dict(body(input_ids=ids[:, :prefix], use_cache=True))
                    del cache["last_hidden_state"]
                after = body(input_ids=ids[:, prefix:], use_cache=prefix > 0, **cache)
                hidden[rows, prefix:] = after.last_hidden_state
        return hidden[self.response]

    # ------------------------------------------------------------------------- log-probabilities
    def logprobs(self, hidden: Tensor, head: Head, sampling: MaskedSampling) -> Tensor:
        """Of what vLLM's sampler draws from: penalties, temperature, min-p, top-k, top-p.

        Shapes: hidden (N, H) -> (N,), of the sampled ids. Source: vLLM's v1/sample/sampler.py.
        """
        penalties = (sampling.repetition_penalty, sampling.presence_penalty,
                     sampling.frequency_penalty)

        def drawn_from(logits: Tensor, chunk: slice) -> Tensor:
            if penalties != (1.0, 0.0, 0.0):
                logits = self._penalized(logits, sampling, chunk)
            if sampling.temperature > 0:  # greedy: no temperature, no mask
                logits = masked_logits(logits / sampling.temperature, sampling)
            return logits

        return head.score(hidden, self.targets, drawn_from)["logprobs"]

    def _penalized(self, logits: Tensor, sampling: MaskedSampling, chunk: slice) -> Tensor:
        """(n, V) -> (n, V), by the ids before each token: those of the prompt and those sampled."""
        rows = self.rows[chunk]
        ids = self.inputs[rows]  # (n, L)
        columns = torch.arange(ids.shape[1], device=self.device)
        before = columns <= self.columns[chunk, None]
        sampled = before & (columns >= self.prompt_lengths[rows, None])
        zeros = torch.zeros_like(logits)
        seen = zeros.scatter_add(1, ids, before.to(logits.dtype)) > 0
        counts = zeros.scatter_add(1, ids, sampled.to(logits.dtype))
        repetition = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - sampling.frequency_penalty * counts
        return logits - sampling.presence_penalty * counts.clamp(max=1.0)

    # ------------------------------------------------------------------------------ per sequence
    def row_means(self, values: Tensor) -> Tensor:
        """Means of (N,) over the tokens of each row without NaN: (B,)."""
        known = ~values.isnan()
        means = values.new_zeros(len(self.inputs))
        return means.scatter_reduce(0, self.rows[known], values[known], "mean", include_self=False)
