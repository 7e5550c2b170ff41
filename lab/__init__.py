"""Measurements: most modules print tables; lab.compare judges a run."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def origin(command: str, record: dict[str, Any]) -> str:
    """Where figures come from: the command, then the figures of `records.provenance`."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    commit = f"commit {str(record['commit'])[:10]}{' with changes' if record['dirty'] else ''}"
    return f"`{command}` on {record['device']}; {versions}; {commit}"


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds of one call; on a GPU until its kernels have finished."""
    started = time.perf_counter()
    function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
