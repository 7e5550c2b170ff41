"""Traces of sampled tokens, their files, and `Replay`, the trainer's values of their tokens.

vLLM need not be installed to read a trace. All per-token values are flat: N response tokens of B
sequences, row after row. Log-probabilities in nats, float64.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from engine_adapter import Rollout, Sampling
from extras.masks import masked_logits
from probe.noise import rounded_otherwise
from probe.stress import Events
from rl import Policy, make_batch

MICRO_BATCH_TOKENS = 16_384  # per forward pass, so that memory does not grow with the trace
FLOOR_PADDING = 5  # columns of left padding in the forward pass that measures the noise floor
NO_MASK = dict(top_k=0, top_p=1.0, min_p=0.0)  # fields of a Sampling
SECTIONS = ("versions", "settings", "audit", "environment")  # of meta; compared entry by entry
FORMAT = 1  # version of the trace format (docs/trace-format.md); a file without one is read as 1
NO_PENALTIES = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
Weights = dict[str, Tensor]  # another version of the trainer's weights, by parameter name


# ---------------------------------------------------------------------------------- trace
@dataclass(frozen=True)
class Trace:
    """Sequences sampled with one `sampling`, with the reported log-probabilities; `meta` is free.

    `trainer_logprobs`, if recorded, are those of the trainer that used the tokens, by rollout.
    """

    name: str
    rollouts: list[Rollout]
    sampling: Sampling
    meta: dict[str, Any] = field(default_factory=dict)
    trainer_logprobs: list[list[float]] = field(default_factory=list)

    @property
    def events(self) -> list[Events]:
        """What each request has met, if the engine was under pressure."""
        return [Events(**each) for each in self.meta.get("stress", {}).get("requests", [])]


def save_trace(path: str, trace: Trace) -> None:
    """Write the trace as an npz file with one group; docs/trace-format.md describes the layout."""
    meta = {"format": FORMAT} | trace.meta | {"groups": {trace.name: asdict(trace.sampling)}}
    arrays = {"meta": numpy.array(json.dumps(meta))}
    seeds = [rollout.seed for rollout in trace.rollouts]
    if None not in seeds:
        arrays[f"{trace.name}/seeds"] = numpy.array(seeds, numpy.int64)
    for name, rows, padding, dtype in (
        ("prompt_ids", [each.prompt_ids for each in trace.rollouts], -1, torch.int32),
        (f"{trace.name}/tokens", [each.token_ids for each in trace.rollouts], -1, torch.int32),
        (f"{trace.name}/logprobs", [each.logprobs for each in trace.rollouts], 0.0, torch.float32),
        (f"{trace.name}/versions", [each.versions for each in trace.rollouts], -1, torch.int32),
        (f"{trace.name}/trainer_logprobs", trace.trainer_logprobs, 0.0, torch.float32),
    ):
        if any(rows):  # the last two are optional
            tensors = [torch.tensor(row, dtype=dtype) for row in rows]
            padded = pad_sequence(tensors, batch_first=True, padding_value=padding)
            arrays[name] = padded.numpy()
    numpy.savez_compressed(path, **arrays)


LAYOUT = "docs/trace-format.md has the layout"


def load_traces(path: str) -> list[Trace]:
    """Every group of a trace, npz or JSON. Raises: ValueError naming the field that is wrong."""
    try:
        record = json.loads(Path(path).read_text()) if path.endswith(".json") else _read_npz(path)
        if (version := record["meta"].get("format", FORMAT)) != FORMAT:
            raise ValueError(f"meta.format must be {FORMAT} (newer ones need a newer probe), got"
                             f" {version!r}")
        for place in (*SECTIONS, "model", "model.config"):
            value = record["meta"]
            for name in place.split("."):
                value = value.get(name, {})
            if not isinstance(value, dict):
                raise ValueError(f"meta.{place} must be a JSON object, got {value!r}")
        prompts, groups = _ids(record["prompt_ids"], "prompt_ids"), record["groups"]
        if not groups:
            raise ValueError("groups must name at least one group")
        return [_trace(name, group, prompts, record["meta"]) for name, group in groups.items()]
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing ({LAYOUT})") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: meta, prompt_ids and groups must be as in docs/trace-format.md:"
                         f" {error}") from error
    except Exception as error:  # json, numpy and zipfile raise many types
        raise ValueError(f"{path}: {error} ({LAYOUT})") from error


def _read_npz(path: str) -> dict[str, Any]:
    """The archive's arrays in the layout of a JSON trace."""
    with numpy.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(str(arrays["meta"]))
    groups = {name: {"sampling": sampling} for name, sampling in meta["groups"].items()}
    for name, group in groups.items():
        group |= {path.removeprefix(f"{name}/"): array for path, array in arrays.items()
                  if path.startswith(f"{name}/")}
    return {"meta": meta, "prompt_ids": arrays["prompt_ids"], "groups": groups}


def _trace(name: str, group: dict[str, Any], prompts: list[list[int]],
           meta: dict[str, Any]) -> Trace:
    tokens, sampling = _ids(group["tokens"], f"{name}/tokens"), group["sampling"]
    if len(prompts) != len(tokens) or not all(prompts) or not all(tokens):
        raise ValueError(f"{name}/tokens must have a non-empty row for each non-empty row of"
                         " prompt_ids")

    def per_token(field_name: str, kind: type) -> list[list]:
        """One value per token; values at padding positions are cut off."""
        table = group[field_name]
        if list(map(len, table)) != list(map(len, group["tokens"])):
            raise ValueError(f"{name}/{field_name} must have the shape of {name}/tokens")
        try:
            return [list(map(kind, row[: len(ids)]))
                    for row, ids in zip(table, tokens, strict=True)]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}/{field_name} must be numbers: {error}") from error

    logprobs = per_token("logprobs", float)
    versions = per_token("versions", int) if "versions" in group else [[]] * len(tokens)
    ours = per_token("trainer_logprobs", float) if "trainer_logprobs" in group else []
    seeds = map(int, group.get("seeds", range(len(tokens))))
    if unknown := sampling.keys() - {each.name for each in fields(Sampling)}:
        raise ValueError(f"groups.{name} has {', '.join(sorted(unknown))}, which the probe does not"
                         " reproduce")
    settings = {"max_new_tokens": max(map(len, tokens)),
                "stop_token_ids": meta.get("stop_token_ids", ())} | sampling
    settings |= {"stop_token_ids": tuple(settings["stop_token_ids"]),
                 "top_k": max(0, settings.get("top_k", 0))}
    try:
        rollouts = [Rollout(*row)
                    for row in zip(prompts, seeds, tokens, logprobs, versions, strict=True)]
        trace = Trace(name, rollouts, Sampling(**settings), meta, ours)
        if "stress" in meta and len(trace.events) != len(rollouts):
            raise ValueError(f"meta.stress.requests must have {len(rollouts)} rows, got"
                             f" {len(trace.events)}")
        return trace
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"groups.{name}: {error}") from error


def _ids(table: Any, field_name: str) -> list[list[int]]:
    """Rows of token ids without their padding of -1."""
    try:
        rows = [list(row) for row in table]
        whole = all(int(value) == value >= -1 for row in rows for value in row)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{field_name} must be rows of token ids, padded with -1")
    return [list(map(int, row[: row.index(-1)] if -1 in row else row)) for row in rows]


def has_penalties(sampling: Sampling) -> bool:
    return replace(sampling, **NO_PENALTIES) != sampling


def process_logits(logits: Tensor, sampling: Sampling, in_prompt: Tensor, counts: Tensor) -> Tensor:
    """The logits vLLM's sampler draws from: penalties, temperature, min-p, top-k, top-p.

    Shapes: logits (N, V); in_prompt (N, V) bool; counts (N, V), how often each token has been
    sampled so far -> (N, V), -inf where cut off. `in_prompt` and `counts` are used only with
    penalties.
    Source: vLLM's v1/sample/sampler.py.
    """
    if has_penalties(sampling):
        repetition, counts = sampling.repetition_penalty, counts.to(logits.dtype)
        sampled = (counts > 0).to(logits.dtype)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_prompt | (counts > 0), repeated, logits)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * sampled
    if sampling.temperature == 0:  # greedy: no temperature, no mask
        return logits
    return masked_logits(logits / sampling.temperature, sampling)


# ---------------------------------------------------------------------------------- replay
class Replay:
    """Forward passes of the trainer over a trace's tokens, with any version of its weights.

    Raises: ValueError if a token id is outside the model's vocabulary.
    """

    def __init__(self, policy: Policy, trace: Trace):
        self.policy, self.device = policy, policy.device
        self.batch = batch = make_batch(trace.rollouts, self.device)
        self.inputs, self.response = batch.inputs, batch.mask > 0  # (B, L)
        vocabulary = policy.head.weight.shape[0]
        largest = max(max(r.prompt_ids + r.token_ids) for r in trace.rollouts)
        if largest >= vocabulary:
            raise ValueError(f"tokens must be below the model's vocabulary of {vocabulary},"
                             f" {trace.name} has {largest}")
        self.rows, columns = self.response.nonzero(as_tuple=True)  # (N,) row of each token
        self.prompt_lengths = batch.prompt_lengths.to(self.device)
        self.positions = columns - self.prompt_lengths[self.rows] + 1  # (N,) from 0 in the response
        self.targets = batch.targets[self.response]  # (N,)
        # Not from the batch, whose log-probabilities are float32. NaN is allowed here.
        reported = [value for rollout in trace.rollouts for value in rollout.logprobs]
        self.reported = torch.tensor(reported, dtype=torch.float64, device=self.device)  # (N,)
        self.lengths = torch.bincount(self.rows, minlength=len(trace.rollouts))  # (B,)
        self.rows_per_pass = max(1, MICRO_BATCH_TOKENS // self.inputs.shape[1])
        self.forwards = 0  # forward passes over the whole trace so far

    # ------------------------------------------------------------------------------ hidden states
    def split_rows(self, size: int) -> tuple[Tensor, ...]:
        """The indices of the rows in parts of `size` rows, each for one forward pass."""
        return torch.arange(len(self.inputs), device=self.device).split(size)

    def hidden(self, rows: Tensor, padding: int = 0) -> Tensor:
        """Last hidden states at the response tokens, computed with left padding: -> (n, H)."""
        ids, padded = pad(self.inputs[rows], (padding, 0)), {}
        if padding:
            mask = pad(torch.ones_like(self.inputs[rows]), (padding, 0))
            padded = dict(attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0))
        states = self.policy.model.base_model(input_ids=ids, use_cache=False,
                                              **padded).last_hidden_state
        return states[:, padding:][self.response[rows]]

    def all_hidden(self, weights: Weights | None = None) -> Tensor:
        """Last hidden states at all response tokens, by `weights` or the policy's body: (N, H)."""
        self.forwards += 1
        if weights is None and self.policy.body != self.policy.own_body:
            batches = map(self.batch.rows, self.split_rows(self.rows_per_pass))
            return torch.cat([self.policy.body(self.policy, each, each.mask > 0) for each in batches])
        with self.policy.using(weights):
            return torch.cat([self.hidden(rows) for rows in self.split_rows(self.rows_per_pass)])

    def second_path(self) -> Tensor:
        """`all_hidden` along a second numerical path; the difference is the noise floor: (N, H).

        Attention, micro-batch size and padding are different. Size and padding alone are not
        enough: on a CPU they change no value, while the kernels of two engines differ.
        """
        self.forwards += 1
        with rounded_otherwise(self.policy):
            parts = self.split_rows(max(1, self.rows_per_pass // 3))
            return torch.cat([self.hidden(rows, FLOOR_PADDING) for rows in parts])

    def hidden_over_old_kv(self, old: Weights, num_old: Tensor) -> Tensor:
        """Hidden states with the KV cache of row b's first `num_old[b]` inputs of old weights.

        Shapes: (B,) -> (N, H). Tokens predicted from within these first inputs get zeros.
        """
        from transformers import DynamicCache

        kind = self.policy.model.config.model_type
        name = "cache_params" if kind == "mamba2" else "past_key_values"
        self.forwards += 2
        body, head = self.policy.model.base_model, self.policy.head.weight
        hidden = head.new_zeros(*self.inputs.shape, head.shape[1])
        for prefix in num_old[num_old < self.inputs.shape[1]].unique().tolist():
            for rows in (num_old == prefix).nonzero()[:, 0].split(self.rows_per_pass):
                ids, cache = self.inputs[rows], DynamicCache(config=self.policy.model.config)
                if prefix:
                    with self.policy.using(old):
                        body(input_ids=ids[:, :prefix], **{name: cache}, use_cache=True)
                states = body(input_ids=ids[:, prefix:], **{name: cache},
                              use_cache=True).last_hidden_state
                hidden[rows, prefix:] = states
        return hidden[self.response]

    # ------------------------------------------------------------------------- log-probabilities
    def logits(self, hidden: Tensor,
               head_dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Tensor]]:
        """(N, H) -> chunks of (indices (n,), logits (n, V) in fp32), from a head in a dtype."""
        rows = max(1, self.policy.chunk_elements // self.policy.head.weight.shape[0])
        for chunk in torch.arange(len(hidden), device=self.device).split(rows):
            yield chunk, self.policy.logits(hidden[chunk], head_dtype)

    def logprobs(
        self, logits: Tensor, sampling: Sampling, tokens: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """After `process_logits`: (n, V), indices (n,) -> (n, V), and of the sampled ids (n,)."""
        in_prompt = counts = logits  # not used without penalties
        if has_penalties(sampling):
            in_prompt, counts = self._seen(tokens, logits.shape[1])
        processed = process_logits(logits, sampling, in_prompt, counts)
        logprobs = torch.log_softmax(processed, dim=-1, dtype=dtype)
        return logprobs, logprobs.gather(-1, self.targets[tokens, None])[:, 0]

    def _seen(self, tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Ids before each token: in the prompt (n, V) bool, times sampled so far (n, V)."""
        rows = self.rows[tokens]
        ids, first = self.inputs[rows], self.prompt_lengths[rows, None]  # (n, L), (n, 1)
        columns = torch.arange(ids.shape[1], device=self.device)
        in_prompt = columns < first
        sampled = ~in_prompt & (columns < first + self.positions[tokens, None])
        zeros = torch.zeros(len(tokens), vocabulary, device=self.device)
        seen = zeros.scatter_add(1, ids, in_prompt.float()) > 0
        return seen, zeros.scatter_add(1, ids, sampled.float())

    # ------------------------------------------------------------------------------ per sequence
    def row_sums(self, values: Tensor) -> Tensor:
        """Sums over the tokens of each row: (..., N) -> (..., B)."""
        zeros = values.new_zeros(*values.shape[:-1], len(self.lengths))
        return zeros.index_add(-1, self.rows, values)

    def row_means(self, values: Tensor) -> Tensor:
        """Means of (N,) over the tokens of each row without NaN: (B,), NaN for a row of NaN."""
        known = ~values.isnan()
        counts = self.row_sums(known.to(values.dtype))
        return self.row_sums(values.masked_fill(~known, 0.0)) / counts

    def neighbours(self, values: Tensor, shift: int) -> Tensor:
        """Each token's value from `shift` tokens earlier, NaN where there is none: (N,) -> (N,)."""
        source = self.positions - shift
        outside = (source < 0) | (source >= self.lengths[self.rows])
        return values.roll(shift).masked_fill(outside, math.nan)
