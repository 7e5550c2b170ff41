"""The trainer's values of sampled tokens, in its own arithmetic and in twice its precision.

All values are flat: N response tokens of B sequences, row after row. Log-probabilities in nats.
"""

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from engine_adapter import Rollout, Sampling
from rl import Policy

Weights = dict[str, Tensor]  # a version of the trainer's weights, by parameter name


class Replay:
    """Forward passes of the trainer over the tokens of rollouts, with any version of its weights.
    """

    def __init__(self, policy: Policy, rollouts: list[Rollout]):
        self.policy = policy
        # Of each prompt and its response.
        self.tokens = [torch.tensor(each.prompt_ids + each.token_ids, device=policy.device)
                       .tensor_split([len(each.prompt_ids)]) for each in rollouts]
        values = chain(*(each.logprobs for each in rollouts))
        self.reported = torch.tensor([*values], dtype=torch.float64, device=policy.device)  # (N,)
        self.rows = torch.cat([torch.full_like(response, row) for row, (_, response)
                               in enumerate(self.tokens)])  # (N,), of each token

    def hidden(self, old: Weights | None, block: int) -> list[Tensor]:
        """Last hidden states of each response with the present weights, in their precision: (n, H).

        With `old`, the KV cache of each prompt's full blocks, of `block` tokens, is that of old
        weights.
        """
        body = self.policy.model.base_model
        states = []
        for prompt, response in self.tokens:
            ids = torch.cat([prompt, response])[None, :-1]
            # A full hit leaves one token to compute.
            cached = (len(prompt) - 1) // block * block if old else 0
            cache = {}  # Mamba 2 has another name for its cache
            if cached:
                with self.policy.using(old):
                    cache = dict(body(input_ids=ids[:, :cached], use_cache=True))
                del cache["last_hidden_state"]
            after = body(input_ids=ids[:, cached:], use_cache=cached > 0, **cache)
            states.append(after.last_hidden_state[0, -len(response):])
        return states

    def logprobs(self, states: list[Tensor], head_dtype: torch.dtype,
                 sampling: Sampling) -> Tensor:
        """Of the sampled ids in the distribution of `sampling`: (N,)."""
        if head_dtype != torch.float32:
            states = [hidden.to(head_dtype) for hidden in states]
        dtype = torch.promote_types(states[0].dtype, head_dtype)
        head = replace(self.policy.head, temperature=1.0, dtype=dtype)
        logprobs = []
        for hidden, (_, response) in zip(states, self.tokens, strict=True):
            of_row = head.logprobs(hidden, response, lambda logits, _: sampling.shaped(logits))
            logprobs.append(of_row.double())
        return torch.cat(logprobs)

    def row_means(self, values: Tensor) -> Tensor:
        """Means of (N,) over the tokens of each row without NaN: (B,)."""
        known = ~values.isnan()
        means = values.new_zeros(len(self.tokens))
        return means.scatter_reduce(0, self.rows[known], values[known], "mean", include_self=False)
