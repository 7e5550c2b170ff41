"""Two traces of one workload, before and after a change of the engine."""

from typing import Any

from probe.diagnose import Verdict
from probe.search import TIMES
from probe.traces import SECTIONS, Trace

ORDER = ("parity", "mismatch", "unexplained")  # of a verdict's status, the best first


def change(one: Verdict, two: Verdict) -> tuple[str, str]:
    """Whether the second verdict on a group is worse, better or unchanged, and the details."""
    word = "unchanged"
    if is_worse(one, two):
        word = "worse"
    elif is_worse(two, one):
        word = "better"
    became = one.blamed if one.blamed == two.blamed else f"{one.blamed} became {two.blamed}"
    settings = changed_settings(flat(one.probe.trace.meta), flat(two.probe.trace.meta))
    return word, f"{became}; with it changed {settings}."


def is_worse(one: Verdict, two: Verdict) -> bool:
    """Whether `two` has a worse status, a new cause, or a larger error."""
    before = one.probe.start
    after = two.probe.start
    new = one.status != "unexplained" and not set(two.causes) <= set(one.causes)
    return (ORDER.index(two.status) > ORDER.index(one.status) or new
            or after.mean > max(before.allowed, TIMES * before.mean))


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The values that differ, by name."""
    differ = [f"{name} {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
              for name in sorted(before.keys() | after.keys())
              if (before.get(name) or None) != (after.get(name) or None)]
    return ", ".join(differ) or "no setting that the traces name"


def flat(meta: dict[str, Any]) -> dict[str, Any]:
    """The plain values of meta and of its sections."""
    values = {name: value for name, value in meta.items() if not isinstance(value, (dict, list))}
    for section in SECTIONS:
        values |= meta.get(section, {})
    return values


def check_same_workload(before: list[Trace], after: list[Trace]) -> None:
    """Raises: ValueError if the groups of both traces have not the same names and workloads."""
    first, second = ([trace.name for trace in traces] for traces in (before, after))
    if first != second:
        raise ValueError(f"both traces must have the same groups, the first has {', '.join(first)},"
                         f" the second {', '.join(second)}; try --group")
    for one, two in zip(before, after, strict=True):
        if one.workload != two.workload:
            raise ValueError("the traces must be of one workload, the prompts or the sampling of"
                             f" {one.name} differ")
