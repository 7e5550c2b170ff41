"""Measurements: most modules print tables; lab.compare judges a run."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch


def table_lines(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table line by line, so that each row can be printed as soon as it is measured."""
    return (f"| {' | '.join(cells)} |" for cells in chain((titles, ["---"] * len(titles)), rows))


def table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(table_lines(titles, rows))


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
