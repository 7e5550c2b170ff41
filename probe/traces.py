"""Traces of sampled tokens and their files.

vLLM need not be installed to read a trace. Log-probabilities in nats.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from engine_adapter import Rollout
from extras.shared.masks import MaskedSampling
from report.errors import stage
from verify.parity import NEUTRAL

VALUES = ("logprobs", "trainer_logprobs")  # columns of a group beside its tokens
FORMAT = 1  # version of the trace format (docs/audit.md); a file without one is read as 1


@dataclass(frozen=True)
class Trace:
    """Sequences sampled with one `sampling`, with the reported log-probabilities; `meta` is free.

    `trainer_logprobs`, if recorded, are those of the trainer that used the tokens, by rollout.
    """

    name: str
    rollouts: list[Rollout]
    sampling: MaskedSampling
    meta: dict[str, Any] = field(default_factory=dict)
    trainer_logprobs: list[list[float]] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return self.meta.get("dtype", "float32")


def save_trace(path: str, trace: Trace) -> None:
    """Write an engine's trace as JSON with one group; docs/audit.md has the layout."""
    sampling = {name: getattr(trace.sampling, name) for name in NEUTRAL}
    columns = {"tokens": "token_ids", "logprobs": "logprobs"}
    group = {name: [getattr(each, of_rollout) for each in trace.rollouts]
             for name, of_rollout in columns.items()}
    record = {"meta": {"format": FORMAT} | trace.meta,
              "prompt_ids": [each.prompt_ids for each in trace.rollouts],
              "groups": {trace.name: {"sampling": sampling} | group}}
    Path(path).write_text(json.dumps(record))


def load_traces(path: str) -> list[Trace]:
    """Every group of a trace, npz or JSON. Raises: ValueError naming the field that is wrong."""
    with stage(f"reading the trace {path} (docs/audit.md has the layout)"):
        record = json.loads(Path(path).read_text()) if path.endswith(".json") else _read_npz(path)
        meta = record["meta"]
        if meta.get("format", FORMAT) != FORMAT:
            raise ValueError(f"meta.format must be {FORMAT} (newer ones need a newer probe), got"
                             f" {meta['format']!r}")
        if meta.get("dtype", "float32") not in ("float32", "bfloat16", "float16"):
            raise ValueError("meta.dtype must be float32, bfloat16 or float16, got"
                             f" {meta['dtype']!r}")
        prompts = _ids(record["prompt_ids"], "prompt_ids")
        return [_trace(name, group, prompts, meta) for name, group in record["groups"].items()]


def _read_npz(path: str) -> dict[str, Any]:
    """The archive's arrays in the layout of a JSON trace."""
    with numpy.load(path) as archive:
        arrays = dict(archive)
    meta = json.loads(str(arrays["meta"]))
    groups = {}
    for name, sampling in meta["groups"].items():
        columns = {column: arrays[f"{name}/{column}"] for column in ("tokens", *VALUES)
                   if f"{name}/{column}" in arrays}
        groups[name] = {"sampling": sampling} | columns
    return {"meta": meta, "prompt_ids": arrays["prompt_ids"], "groups": groups}


def _trace(name: str, group: dict[str, Any], prompts: list[list[int]],
           meta: dict[str, Any]) -> Trace:
    tokens = _ids(group["tokens"], f"{name}/tokens")
    if len(tokens) != len(prompts):
        raise ValueError(f"{name}/tokens must have a row for each row of prompt_ids")
    columns = {column: _values(group[column], f"{name}/{column}", group["tokens"])
               for column in VALUES if column in group}
    rollouts = [Rollout(prompt, None, *response) for prompt, *response
                in zip(prompts, tokens, columns["logprobs"], strict=True)]
    given = group["sampling"]
    if others := given.keys() - NEUTRAL.keys():
        raise ValueError(f"sampling must have no {', '.join(sorted(others))}")
    top_k = max(0, given.get("top_k", 0))  # -1 is vLLM's word for none
    # The end of a response is not in a trace.
    sampling = MaskedSampling(**given | {"top_k": top_k, "max_new_tokens": 1})
    return Trace(name, rollouts, sampling, meta, columns.get("trainer_logprobs", []))


def _ids(padded: Any, name: str) -> list[list[int]]:
    rows = []
    for index, row in enumerate(map(numpy.asarray, padded)):
        count = (row >= 0).sum()
        if row.ndim != 1 or row.dtype.kind not in "iu" or not count or (row[:count] < 0).any():
            raise ValueError(f"{name}, row {index} must be token ids, padded with -1 on the right")
        rows.append(row[:count].tolist())
    return rows


def _values(padded: Any, name: str, tokens: Any) -> list[list[float]]:
    rows = []
    for index, (row, ids) in enumerate(zip(padded, tokens, strict=True)):
        values, real = numpy.asarray(row, float), numpy.asarray(ids) >= 0
        if values.shape != real.shape or not numpy.isfinite(values[real]).all():
            raise ValueError(f"{name}, row {index} must have a finite number for each token")
        rows.append(values[real].tolist())
    return rows
