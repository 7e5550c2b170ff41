"""Traces of sampled tokens and their files.

vLLM need not be installed to read a trace. Log-probabilities in nats.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from engine_adapter import Rollout
from report.errors import stage
from verify.parity import sampling_of

FORMAT = 1  # version of the trace format (docs/audit.md); a file without one is read as 1


@dataclass(frozen=True)
class Trace:
    """Sequences sampled with one `sampling`, with the log-probabilities that a side reported."""

    name: str
    rollouts: list[Rollout]
    sampling: dict[str, float]  # by the names of verify.parity.NEUTRAL
    dtype: str = "float32"  # of the model


def save_trace(path: str, trace: Trace, meta: dict[str, Any]) -> None:
    """Write an engine's trace as JSON with one group; docs/audit.md has the layout."""
    columns = [(each.prompt_ids, each.token_ids, each.logprobs) for each in trace.rollouts]
    prompts, tokens, logprobs = zip(*columns, strict=True)
    group = {"sampling": trace.sampling, "tokens": tokens, "logprobs": logprobs}
    record = {"meta": meta | {"format": FORMAT, "dtype": trace.dtype}, "prompt_ids": prompts,
              "groups": {trace.name: group}}
    Path(path).write_text(json.dumps(record))


def load_traces(path: str) -> list[Trace]:
    """Every group of a trace, npz or JSON. What a trainer recorded is a trace of its own.

    Raises: ValueError naming the field that is wrong.
    """
    with stage(f"reading the trace {path} (docs/audit.md has the layout)"):
        record = json.loads(Path(path).read_text()) if path.endswith(".json") else _read_npz(path)
        meta = {"format": FORMAT, "dtype": "float32"} | record["meta"]
        dtype = meta["dtype"]
        if meta["format"] != FORMAT:
            raise ValueError(f"meta.format must be {FORMAT} (newer ones need a newer probe), got"
                             f" {meta['format']!r}")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"meta.dtype must be float32, bfloat16 or float16, got {dtype!r}")
        prompts = _unpadded("prompt_ids", record["prompt_ids"], record["prompt_ids"], *IDS)
        traces = []
        for name, group in record["groups"].items():
            traces += _traces(name, group, prompts, dtype)
        return traces


def _read_npz(path: str) -> dict[str, Any]:
    """The archive's arrays in the layout of a JSON trace."""
    with numpy.load(path) as archive:
        arrays = {name: array.tolist() for name, array in archive.items()}
    meta = json.loads(arrays["meta"])
    groups = {name: {"sampling": sampling} for name, sampling in meta["groups"].items()}
    for name, rows in arrays.items():
        group, _, column = name.rpartition("/")
        if group:
            groups[group][column] = rows
    return {"meta": meta, "prompt_ids": arrays["prompt_ids"], "groups": groups}


def _traces(name: str, group: dict[str, Any], prompts: list[list[int]], dtype: str) -> list[Trace]:
    padded = group["tokens"]
    tokens = _unpadded(f"{name}/tokens", padded, padded, *IDS)
    if len(tokens) != len(prompts):
        raise ValueError(f"{name}/tokens must have a row for each row of prompt_ids")
    given = group["sampling"]
    if given["temperature"] == 0:  # greedy has no temperature and no mask
        given = {each: value for each, value in given.items() if each.endswith("penalty")}
    sampling = sampling_of(given)
    traces = []
    for column in "logprobs", *group.keys() & {"trainer_logprobs"}:
        values = _unpadded(f"{name}/{column}", group[column], padded, *NUMBERS)
        rollouts = [Rollout(prompt, None, *response) for prompt, *response
                    in zip(prompts, tokens, values, strict=True)]
        title = name if column == "logprobs" else f"{name}/{column}"
        traces.append(Trace(title, rollouts, sampling, dtype))
    return traces


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


IDS = _is_id, "be token ids, padded with -1 on the right"
NUMBERS = math.isfinite, "have a finite number for each token"


def _unpadded(name: str, padded: list[list], ids: list[list[int]],
              is_right: Callable[[Any], bool], rule: str) -> list[list]:
    """The part of each row that has token ids. Raises: ValueError by `rule`."""
    rows = []
    for index, (row, tokens) in enumerate(zip(padded, ids, strict=True)):
        real = row[:len(tokens) - tokens.count(-1)]
        if len(row) != len(tokens) or not real or not all(map(is_right, real)):
            raise ValueError(f"{name}, row {index} must {rule}")
        rows.append(real)
    return rows
