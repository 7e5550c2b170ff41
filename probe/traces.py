"""Traces of sampled tokens and their files.

vLLM need not be installed to read a trace. Log-probabilities in nats.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from examples.record_vllm import table
from rollouts import Rollout, Sampling

SECTIONS = ("versions", "settings", "audit", "environment")  # of meta; compared entry by entry
FORMAT = 1  # version of the trace format (docs/audit.md); a file without one is read as 1
LAYOUT = "docs/audit.md has the layout"


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


def save_trace(path: str, trace: Trace) -> None:
    """Write the trace as an npz file with one group; docs/audit.md has the layout."""
    meta = {"format": FORMAT} | trace.meta | {"groups": {trace.name: asdict(trace.sampling)}}
    arrays = {"meta": numpy.array(json.dumps(meta))}
    seeds = [rollout.seed for rollout in trace.rollouts]
    if None not in seeds:
        arrays[f"{trace.name}/seeds"] = numpy.array(seeds, numpy.int64)
    for name, rows, padding, kind in (
        ("prompt_ids", [each.prompt_ids for each in trace.rollouts], -1, numpy.int32),
        (f"{trace.name}/tokens", [each.token_ids for each in trace.rollouts], -1, numpy.int32),
        (f"{trace.name}/logprobs", [each.logprobs for each in trace.rollouts], 0.0, numpy.float32),
        (f"{trace.name}/versions", [each.versions for each in trace.rollouts], -1, numpy.int32),
        (f"{trace.name}/trainer_logprobs", trace.trainer_logprobs, 0.0, numpy.float32),
    ):
        if any(rows):  # the last two are optional
            arrays[name] = table(rows, padding, kind)
    numpy.savez_compressed(path, **arrays)


def load_traces(path: str) -> list[Trace]:
    """Every group of a trace, npz or JSON. Raises: ValueError naming the field that is wrong."""
    try:
        record = json.loads(Path(path).read_text()) if path.endswith(".json") else _read_npz(path)
        meta = record["meta"]
        if meta.get("format", FORMAT) != FORMAT:
            raise ValueError(f"meta.format must be {FORMAT} (newer ones need a newer probe), got"
                             f" {meta['format']!r}")
        for place in (*SECTIONS, "model", "model.config"):
            value = meta
            for name in place.split("."):
                value = value.get(name, {})
            if not isinstance(value, dict):
                raise ValueError(f"meta.{place} must be a JSON object, got {value!r}")
        prompts, groups = _ids(record["prompt_ids"], "prompt_ids"), record["groups"]
        if not groups:
            raise ValueError("groups must name at least one group")
        return [_trace(name, group, prompts, meta) for name, group in groups.items()]
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing ({LAYOUT})") from error
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
        rows = group[field_name]
        if list(map(len, rows)) != list(map(len, group["tokens"])):
            raise ValueError(f"{name}/{field_name} must have the shape of {name}/tokens")
        try:
            return [list(map(kind, row[: len(ids)]))
                    for row, ids in zip(rows, tokens, strict=True)]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}/{field_name} must be numbers: {error}") from error

    logprobs = per_token("logprobs", float)
    versions = per_token("versions", int) if "versions" in group else [[]] * len(tokens)
    ours = per_token("trainer_logprobs", float) if "trainer_logprobs" in group else []
    seeds = map(int, group.get("seeds", range(len(tokens))))
    settings = {"max_new_tokens": max(map(len, tokens)),
                "stop_token_ids": meta.get("stop_token_ids", ())} | sampling
    settings |= {"stop_token_ids": tuple(settings["stop_token_ids"]),
                 "top_k": max(0, settings.get("top_k", 0))}
    columns = zip(prompts, seeds, tokens, logprobs, versions, strict=True)
    return Trace(name, [Rollout(*each) for each in columns], Sampling(**settings), meta, ours)


def _ids(given: Any, field_name: str) -> list[list[int]]:
    """Rows of token ids without their padding of -1."""
    try:
        rows = [list(row) for row in given]
        whole = all(int(value) == value >= -1 for row in rows for value in row)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{field_name} must be rows of token ids, padded with -1")
    return [list(map(int, row[: row.index(-1)] if -1 in row else row)) for row in rows]
