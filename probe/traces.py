"""The trainer's half of the probe: a trace of sampled tokens, and what the trainer would have reported for each.

A trace needs no engine to be read. All per-token values here are flat: N response tokens of B sequences, row after row.
Log-probabilities in nats, float64.
"""

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache

from engine_adapter import Rollout, Sampling
from probe.noise import rounded_otherwise
from rl import Policy, make_batch

MICRO_TOKENS = 16_384  # per forward: memory does not grow with the trace
FLOOR_PADDING = 5  # columns of left padding in the pass that measures the floor
Weights = dict[str, Tensor]  # by parameter name, of another version of the trainer


# ------------------------------------------------------------------------------------------------ trace
@dataclass(frozen=True)
class Trace:
    """Sequences sampled under one `sampling`, with the log-probabilities their engine reported; `meta` is free."""

    name: str
    rollouts: list[Rollout]
    sampling: Sampling
    meta: dict[str, Any] = field(default_factory=dict)


def save_trace(path: str, trace: Trace) -> None:
    """Write the npz layout of the README, one group."""
    columns = {
        "prompt_ids": ([r.prompt_ids for r in trace.rollouts], -1, numpy.int32),
        f"{trace.name}/tokens": ([r.token_ids for r in trace.rollouts], -1, numpy.int32),
        f"{trace.name}/logprobs": ([r.logprobs for r in trace.rollouts], 0.0, numpy.float32),
        f"{trace.name}/versions": ([r.versions for r in trace.rollouts], -1, numpy.int32),
    }
    arrays = {f"{trace.name}/seeds": numpy.array([r.seed for r in trace.rollouts], numpy.int64)}
    for name, (rows, padding, dtype) in columns.items():
        longest = max(map(len, rows))
        arrays[name] = numpy.array([[*row, *[padding] * (longest - len(row))] for row in rows], dtype)
    meta = trace.meta | {"groups": {trace.name: asdict(trace.sampling)}}
    numpy.savez_compressed(path, meta=numpy.array(json.dumps(meta)), **arrays)


def load_traces(path: str) -> list[Trace]:
    """Every group of an npz or JSON trace (the layout is in the README).

    Raises: ValueError naming the field that is missing or malformed.
    """
    read = _read_json if path.endswith(".json") else _read_npz
    try:
        meta, columns, samplings = read(path)
        if not samplings:
            raise ValueError("groups must name at least one group")
        return [_trace(name, sampling, meta, columns) for name, sampling in samplings.items()]
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing (the README has the layout)") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: meta, prompt_ids and groups must be as in the README: {error}") from error
    except (OSError, ValueError, EOFError, RecursionError, OverflowError, zlib.error, BadZipFile) as error:
        raise ValueError(f"{path}: {error} (the README has the layout)") from error


def _read_npz(path: str) -> tuple[dict, dict[str, list], dict]:
    with numpy.load(path, allow_pickle=False) as archive:
        columns = {name: archive[name] for name in archive.files}
    meta = json.loads(str(columns.pop("meta")))
    return meta, columns, meta["groups"]


def _read_json(path: str) -> tuple[dict, dict[str, list], dict]:
    record = json.loads(Path(path).read_text())
    columns = {"prompt_ids": record["prompt_ids"]}
    for name, group in record["groups"].items():
        columns |= {f"{name}/{key}": group[key] for key in ("tokens", "logprobs", "versions", "seeds") if key in group}
    return record["meta"], columns, {name: group["sampling"] for name, group in record["groups"].items()}


def _trace(name: str, sampling: dict, meta: dict, columns: dict[str, Any]) -> Trace:
    prompts = _ids(columns["prompt_ids"], "prompt_ids")
    tokens = _ids(columns[f"{name}/tokens"], f"{name}/tokens")
    if len(prompts) != len(tokens) or not all(prompts) or not all(tokens):
        raise ValueError(f"{name}/tokens must have a non-empty row for each non-empty row of prompt_ids")

    def per_token(field_name: str, kind: type) -> list[list]:
        """A value for each token; what stands at the padding of the tokens is cut off."""
        table = columns[f"{name}/{field_name}"]
        if list(map(len, table)) != list(map(len, columns[f"{name}/tokens"])):
            raise ValueError(f"{name}/{field_name} must have the shape of {name}/tokens")
        try:
            return [list(map(kind, row[: len(ids)])) for row, ids in zip(table, tokens, strict=True)]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}/{field_name} must be numbers: {error}") from error

    logprobs = per_token("logprobs", float)
    versions = per_token("versions", int) if f"{name}/versions" in columns else [[]] * len(tokens)
    seeds = map(int, columns.get(f"{name}/seeds", range(len(tokens))))
    if unknown := sampling.keys() - {each.name for each in fields(Sampling)}:
        raise ValueError(f"groups.{name} has {', '.join(sorted(unknown))}, which the probe does not reproduce")
    settings = {"max_new_tokens": max(map(len, tokens)), "stop_token_ids": meta.get("stop_token_ids", ())} | sampling
    settings |= {"stop_token_ids": tuple(settings["stop_token_ids"]), "top_k": max(0, settings.get("top_k", 0))}
    try:
        rollouts = [Rollout(*row) for row in zip(prompts, seeds, tokens, logprobs, versions, strict=True)]
        return Trace(name, rollouts, Sampling(**settings), meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"groups.{name}: {error}") from error


def _ids(table: Any, field_name: str) -> list[list[int]]:
    """Rows of token ids, their padding of -1 cut off."""
    try:
        rows = [list(row) for row in table]
        whole = all(int(value) == value >= -1 for row in rows for value in row)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{field_name} must be rows of token ids, padded with -1")
    return [list(map(int, row[: row.index(-1)] if -1 in row else row)) for row in rows]


def process_logits(logits: Tensor, sampling: Sampling, in_prompt: Tensor, counts: Tensor) -> Tensor:
    """The logits vLLM's sampler draws from, in its order: penalties, temperature, min-p, top-k, top-p.

    Shapes: logits (N, V); in_prompt (N, V) bool; counts (N, V), how often each token has been sampled so far -> (N, V),
    -inf where cut off. The last two are not looked at without penalties.
    Source: vLLM's v1/sample/sampler.py and ops/topk_topp_sampler.py; V0 applied min-p last.
    """
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
        repetition, counts = sampling.repetition_penalty, counts.to(logits.dtype)
        sampled = (counts > 0).to(logits.dtype)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_prompt | (counts > 0), repeated, logits)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * sampled
    if sampling.temperature == 0:  # greedy: no temperature, no mask
        return logits
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        ratios = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        logits = logits.masked_fill(ratios < sampling.min_p, -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -math.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        cut[:, -1] = False  # the likeliest token stays whatever top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -math.inf)
    return logits


# ------------------------------------------------------------------------------------------------ replay
class Replay:
    """The trace's tokens, and the trainer's forward passes over them under one hypothesis or another.

    Raises: ValueError if a token id is outside the model's vocabulary.
    """

    def __init__(self, policy: Policy, trace: Trace):
        self.policy, self.trace, self.device = policy, trace, policy.device
        batch = make_batch(trace.rollouts, torch.zeros(len(trace.rollouts)), self.device)
        self.inputs, self.response = batch.inputs, batch.mask > 0  # (B, L)
        vocabulary = policy.head.weight.shape[0]
        largest = max(max(r.prompt_ids + r.token_ids) for r in trace.rollouts)
        if largest >= vocabulary:
            raise ValueError(f"tokens must be below the model's vocabulary of {vocabulary}, {trace.name} has {largest}")
        self.rows, columns = self.response.nonzero(as_tuple=True)  # (N,) row of each token
        self.prompt_lengths = torch.tensor([len(r.prompt_ids) for r in trace.rollouts], device=self.device)
        self.positions = columns - self.prompt_lengths[self.rows] + 1  # (N,) place in the response, from 0
        self.targets = batch.targets[self.response]  # (N,)
        self.reported = torch.tensor([v for r in trace.rollouts for v in r.logprobs], dtype=torch.float64,
                                     device=self.device)  # (N,), not from the batch: float32 there, NaN here allowed
        self.lengths = torch.bincount(self.rows, minlength=len(trace.rollouts))  # (B,)
        self.is_last = self.positions == self.lengths[self.rows] - 1  # (N,)
        self.forwards = 0  # passes over the whole trace, for the record

    # ---------------------------------------------------------------------------------------------- weights
    @contextmanager
    def holding(self, weights: Weights | None) -> Iterator[None]:
        """The policy with other values in its parameters; the tensors themselves are swapped, nothing is copied."""
        held = {name: parameter.data for name, parameter in self.policy.model.named_parameters()}
        parameters = dict(self.policy.model.named_parameters())
        try:
            for name, tensor in (weights or {}).items():
                parameters[name].data = tensor
            yield
        finally:
            for name, tensor in held.items():
                parameters[name].data = tensor

    # ---------------------------------------------------------------------------------------------- bodies
    def micros(self, size: int | None = None) -> Iterator[slice]:
        """Rows of one forward each."""
        size = size or max(1, MICRO_TOKENS // self.inputs.shape[1])
        return (slice(start, start + size) for start in range(0, len(self.inputs), size))

    def body(self, weights: Weights | None = None) -> Tensor:
        """Last hidden states at the response tokens: (N, H)."""
        self.forwards += 1
        with self.holding(weights):
            return torch.cat([self._hidden(rows)[self.response[rows]] for rows in self.micros()])

    def _hidden(self, rows: slice) -> Tensor:
        return self.policy.model.base_model(input_ids=self.inputs[rows], use_cache=False).last_hidden_state

    def other_arithmetic(self) -> Tensor:
        """The same hidden states along another path of the same arithmetic: the difference is the floor.

        Other attention kernel, other micro-batch size, other padding. Padding and size alone are not enough: on a CPU
        they change nothing at all, while the kernels of two engines differ.
        """
        self.forwards += 1
        hidden = []
        with rounded_otherwise(self.policy):
            for rows in self.micros(max(1, MICRO_TOKENS // self.inputs.shape[1] // 3)):
                ids = torch.nn.functional.pad(self.inputs[rows], (FLOOR_PADDING, 0))
                real = torch.ones_like(ids)
                real[:, :FLOOR_PADDING] = 0
                places = (real.cumsum(dim=1) - 1).clamp(min=0)
                states = self.policy.model.base_model(input_ids=ids, attention_mask=real, position_ids=places,
                                                      use_cache=False).last_hidden_state
                hidden.append(states[:, FLOOR_PADDING:][self.response[rows]])
        return torch.cat(hidden)

    def body_over_kv(self, earlier: Weights, num_earlier: Tensor) -> Tensor:
        """Hidden states where the first `num_earlier[b]` inputs of row b left their KV cache under earlier weights.

        Shapes: (B,) -> (N, H); tokens predicted from within that prefix have zeros: they are the earlier version's.
        """
        self.forwards += 2
        hidden = torch.zeros(*self.inputs.shape, self.policy.head.weight.shape[1], dtype=self.policy.model.dtype,
                             device=self.device)
        for prefix in num_earlier.unique().tolist():
            if prefix >= self.inputs.shape[1]:
                continue
            group = (num_earlier == prefix).nonzero()[:, 0]
            for rows in group.split(max(1, MICRO_TOKENS // self.inputs.shape[1])):
                hidden[rows, prefix:] = self._over_cache(self.inputs[rows], prefix, earlier)
        return hidden[self.response]

    def _over_cache(self, ids: Tensor, prefix: int, earlier: Weights | None) -> Tensor:
        """Hidden states from `prefix` on, over the prefix's KV cache under (earlier) weights."""
        cache = DynamicCache(config=self.policy.model.config)
        if prefix:
            with self.holding(earlier):
                self.policy.model.base_model(input_ids=ids[:, :prefix], past_key_values=cache, use_cache=True)
        return self.policy.model.base_model(input_ids=ids[:, prefix:], past_key_values=cache,
                                            use_cache=True).last_hidden_state

    # ---------------------------------------------------------------------------------------------- heads
    def read(
        self, hidden: Tensor, samplings: dict[str, Sampling], head_dtype: torch.dtype, weights: Weights | None = None
    ) -> dict[tuple[str, str], Tensor]:
        """What would have been reported, by (sampling, token): the sampled token's and the likeliest token's value.

        Shapes: (N, H) -> {(name, "sampled" or "top-1"): (N,)}; N may also be a part of the trace from its start.
        """
        values: dict[tuple[str, str], list[Tensor]] = {(n, t): [] for n in samplings for t in ("sampled", "top-1")}
        with self.holding(weights):
            for chunk, logits in self.logits(hidden, head_dtype):
                for name, sampling in samplings.items():
                    logprobs = torch.log_softmax(self.process(logits, sampling, chunk), dim=-1)
                    values[name, "sampled"].append(logprobs.gather(-1, self.targets[chunk, None])[:, 0])
                    values[name, "top-1"].append(logprobs.amax(dim=-1))
        return {name: torch.cat(parts).double() for name, parts in values.items()}

    def logits(self, hidden: Tensor, head_dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """(N, H) -> chunks of (indices of tokens, logits (N_chunk, V) in fp32), the head's product in `head_dtype`."""
        rows = max(1, self.policy.chunk_elements // self.policy.head.weight.shape[0])
        for chunk in torch.arange(len(hidden), device=self.device).split(rows):
            yield chunk, self.head(hidden[chunk], head_dtype)

    def head(self, hidden: Tensor, head_dtype: torch.dtype) -> Tensor:
        weight, bias = self.policy.head.weight, getattr(self.policy.head, "bias", None)
        return self.policy.logits(hidden, weight.to(head_dtype), None if bias is None else bias.to(head_dtype))

    def process(self, logits: Tensor, sampling: Sampling, chunk: Tensor) -> Tensor:
        in_prompt = counts = logits
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            in_prompt, counts = self._seen(chunk, logits.shape[1])
        return process_logits(logits, sampling, in_prompt, counts)

    def _seen(self, chunk: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Tokens seen before each of the chunk's tokens: in the prompt (n, V) bool, and sampled so far (n, V)."""
        def counted(sequences: list[list[int]], known: Tensor) -> Tensor:
            """How often each id is among the first `known[n]` of each chunk token's sequence."""
            longest = max(map(len, sequences))
            table = torch.tensor([row + [vocabulary] * (longest - len(row)) for row in sequences], device=self.device)
            before = (torch.arange(longest, device=self.device) < known[:, None]).float()  # (n, longest)
            zeros = torch.zeros(len(chunk), vocabulary + 1, device=self.device)
            return zeros.scatter_add(1, table[self.rows[chunk]], before)[:, :vocabulary]

        in_prompt = counted([r.prompt_ids for r in self.trace.rollouts], self.prompt_lengths[self.rows[chunk]]) > 0
        return in_prompt, counted([r.token_ids for r in self.trace.rollouts], self.positions[chunk])

    # ---------------------------------------------------------------------------------------------- per sequence
    def row_means(self, values: Tensor) -> Tensor:
        """Means of (N,) over the tokens of each row, NaN left out: (B,), NaN for a row without any."""
        known = ~values.isnan()
        zeros = torch.zeros(len(self.lengths), dtype=values.dtype, device=self.device)
        sums = zeros.index_add(0, self.rows[known], values[known])
        return sums / zeros.index_add(0, self.rows[known], torch.ones_like(values[known]))

    def neighbours(self, values: Tensor, shift: int) -> Tensor:
        """Each token's value taken from `shift` tokens earlier in its own sequence, NaN where there is none."""
        moved = torch.full_like(values, math.nan)
        if shift > 0:
            moved[shift:] = values[:-shift]
            moved[self.positions < shift] = math.nan
        else:
            moved[:shift] = values[-shift:]
            moved[self.positions >= self.lengths[self.rows] + shift] = math.nan
        return moved
