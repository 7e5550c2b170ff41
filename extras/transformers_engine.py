"""`--engine transformers`: the trainer's own modules sample, token by token, with a KV cache.

It is slow, and by construction it has no mismatch: there is one set of weights and one head. It is
the plainest statement of what an engine must do for the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

import verify
from engine_adapter import Engine, ParityFlags, Rollout, Sampling, Source
from extras import Extra
from extras.shared.kv_cache import left_padded, states_after
from extras.shared.masks import collect_kept_sets
from report import metrics
from rl import Policy, at_targets
from verify.canary import UNMEASURED, Canary
from verify.head import check_head
from verify.settings import of_trainer


class Options(Extra):
    """The trainer's own modules as a sampler."""

    # transformers: the trainer's own module alone, slow, without mismatch, the known-good curve.
    engine: Literal["vllm", "transformers"] = "vllm"
    eval_trainer_alone: bool = False  # Also sample with the trainer's own modules; slow.

    def check(self, config: Any) -> None:
        if self.engine == "vllm":
            return
        faults = {*config.parity.off()} - {"sampling_mask"}
        if "both-heads" in config.flat().get("variants", ()):  # a 16-bit head here needs no vLLM
            faults -= {"fp32_head"}
        if faults:
            raise ValueError(f"engine must be vllm without {', '.join(sorted(faults))} (only vLLM"
                             " has that fault)")
        if of_vllm := config.given & OF_VLLM:
            raise ValueError(f"{', '.join(sorted(of_vllm))} must not be given with engine"
                             " transformers (they are vLLM's)")

    def install(self, run: Any) -> None:
        if self.engine == "transformers":
            run.engine_kind, run.checks_kind = TransformersEngine, NothingToCompare
        if self.eval_trainer_alone:
            run.at_begin.append(add_evaluation)
            run.endings |= ENDINGS
        if self.engine == "transformers" or self.eval_trainer_alone:
            run.with_model.append(refuse_recurrent)


ENDINGS = {
    "eval_reward_trainer_alone": " | trainer alone {eval_reward_trainer_alone:.3f}",
    "eval_reward_trainer_alone_left_out": " | {eval_reward_trainer_alone_left_out} LEFT OUT of it",
}
OF_VLLM = {"prefix_cache", "cuda_graphs", "block_size", "canary_nats", "verify_loads"}


def refuse_recurrent(model: torch.nn.Module) -> None:
    """Before any file is written. Raises: ValueError if the KV cache cannot serve the model."""
    if model._is_stateful:
        raise ValueError("engine must be vllm and eval_trainer_alone off with recurrent layers"
                         " (transformers cannot drop a row of their state);"
                         " try --engine vllm --no-eval-trainer-alone")


def add_evaluation(sides: Any, record: dict[str, Any]) -> None:
    """Add an evaluation whose answers the trainer's own modules sample."""
    run = sides.run
    engine = engine_for(run, sides.policy)
    engine.load({})
    source = Source(engine, run.task, run.sampling, 1, 1, 0)

    def evaluate(answers: Callable) -> dict[str, Any]:
        _, rows = answers(source, mode="trainer_alone", num_samples=run.config.eval_samples,
                          temperature=run.config.temperature)
        return metrics.of_answers("eval_reward_trainer_alone", rows)

    run.evaluations.append(evaluate)


@torch.no_grad()
def engine_for(run: Any, policy: Policy) -> "TransformersEngine":
    """With as many sequences at once as kv_cache_gib holds; `run` is a train.Run.

    Raises: ValueError if the model's head is another one than the policy's.
    """
    check_head(policy)
    token = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    cache = policy.model.base_model(input_ids=token, use_cache=True).past_key_values
    # Keys and values of a rollout; with sliding windows an upper bound.
    of_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    fitting = int(run.config.kv_cache_gib * 2**30 / (of_token * run.max_model_len))
    return TransformersEngine(policy, min(run.config.max_num_seqs, max(1, fitting)))


class TransformersEngine(Engine):
    """The interface and the states of `Engine` over a live `Policy`, without vLLM.

    `load` copies nothing: the optimizer has changed the weights in place. Rollouts are queued or
    finished, never half sampled: each belongs to one set of weights.
    """

    vllm_version = None
    holds_unfinished = True  # in its queue
    copies_weights = False
    on_gpu = _memory_released = False  # sleep has nothing to release
    state = "awake"
    weight_version = 0

    @classmethod
    def start(cls, run: Any, policy: Policy) -> "TransformersEngine":
        """Raises: ValueError if an option has set an argument of vLLM."""
        if run.further:
            raise ValueError("engine must be vllm with an option that sets an argument of vLLM, got"
                             f" {run.further}")
        return engine_for(run, policy)

    def __init__(self, policy: Policy, max_num_seqs: int = 256):
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.counters = dict(tokens_wasted=0, kv_lost=0)
        self._queue: list[Rollout] = []
        self.dtype, self.parity = policy.model.dtype, ParityFlags()
        # The trainer's own dtype, head and attention.
        self.settings = {"engine": "transformers"} | of_trainer(policy)

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def _submit(self, rollouts: list[Rollout]) -> list[Rollout]:
        assert rollouts[0].seed is None, "only vLLM has seeds of its requests; call reseed"
        self._queue += rollouts
        return rollouts

    @torch.no_grad()
    def step(self) -> None:
        """Sample N queued rollouts with one `Sampling` to their end, at most `max_num_seqs`."""
        from transformers import DynamicCache

        head, sampling = self.policy.head, self._queue[0].sampling
        alike = takewhile(lambda rollout: rollout.sampling == sampling, self._queue)
        rollouts = list(islice(alike, self.max_num_seqs))  # N
        del self._queue[: len(rollouts)]
        prompts = left_padded([rollout.prompt_ids for rollout in rollouts]).to(self.policy.device)
        ids, real = prompts.clamp(min=0), prompts >= 0  # (N, S)
        cache = DynamicCache(config=self.policy.model.config)
        while rollouts:
            states = states_after(cache, self.policy.model, ids, real)
            logits = head.scaled(head.affine(states[:, -1]))  # (N, V)
            tokens, logprobs = _draw(logits, sampling)  # (N,), (N, V)
            chosen = at_targets(logprobs, tokens).tolist()
            for rollout, token, logprob in zip(rollouts, tokens.tolist(), chosen, strict=True):
                rollout.append([token], [logprob], self.weight_version)
                if token in sampling.stop_token_ids or sampling.ends(rollout):
                    rollout.finish_reason = "stop"
                elif len(rollout.token_ids) == sampling.max_new_tokens:
                    rollout.finish_reason = "length"
            if getattr(sampling, "max_kept", 0):
                vocabulary = numpy.arange(logprobs.shape[1], dtype=numpy.int32)[None]  # (1, V)
                for rollout, row in zip(rollouts, logprobs.cpu().numpy(), strict=True):
                    collect_kept_sets(rollout, vocabulary, row[None])
            left = [row for row, each in enumerate(rollouts) if each.finish_reason is None]
            if len(left) < len(rollouts):
                rollouts = [rollouts[row] for row in left]
                cache.batch_select_indices(tokens.new_tensor(left))
            ids = tokens[left, None]  # (N, 1)
            real = torch.cat([real[left], real.new_ones(len(left), 1)], dim=1)  # (N, S + 1)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """What is queued waits while others run."""
        queue, self._queue = self._queue, []
        yield
        self._queue = queue

    def load(self, weights: Any, is_new_version: bool = True) -> None:
        """Count one weight version up if the weights, which are the policy's, have changed."""
        self._require("load", "awake", "ready")
        self.weight_version += is_new_version
        self.state = "ready"

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's."""


class NothingToCompare(verify.Checks):
    """The checks of an engine that has the trainer's own weights and head."""

    def __init__(self, engine: TransformersEngine, options: verify.Options):
        self.canary = Canary(engine)  # for the limit of a step's rows
        if engine.dtype != torch.float32:
            self.canary.limit = UNMEASURED

    def prove(self, weights: Any) -> None: ...

    def run_canary(self, policy: Policy) -> None: ...

    def compare_with_stated(self, *_: Any) -> None: ...


def _draw(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens (N,), the likeliest at temperature 0, and all log-probabilities (N, V), masked."""
    if not sampling.temperature:
        return logits.argmax(dim=-1), logits.log_softmax(dim=-1)
    logprobs = sampling.shaped(logits).log_softmax(dim=-1)  # (N, V)
    # Argmax of p / noise draws from p, if the noise is exponential.
    noise = torch.empty_like(logprobs).exponential_()
    noise = noise.clamp(min=torch.finfo(noise.dtype).tiny)
    return (logprobs - noise.log()).argmax(dim=-1), logprobs
