"""Two traces of one workload, before and after a change of the engine."""

from dataclasses import replace
from typing import Any

from probe.diagnose import Verdict
from probe.search import TIMES
from probe.traces import SECTIONS, Trace

ORDER = ("exact", "parity", "mismatch", "unexplained")  # of a verdict's status, the best first
NOT_COMPARED = ("groups", "format", "args", "engine_args", "workload", "not_read", "seeds", "v0",
                "model", "stress")


def change(one: Verdict, two: Verdict, whole: tuple[Trace, Trace]) -> tuple[str, str]:
    """Whether the second verdict on a group is worse, better or unchanged, and the details.

    They are of the tokens that both traces have (`cut_alike`); `whole` are the traces themselves.
    """
    only_named = one.status == "unexplained" and two.start.mean > one.start.mean
    word = "unchanged"
    if is_worse(one, two):
        word = "worse"
    elif is_worse(two, one) and not only_named:
        word = "better"
    became = one.blamed if one.blamed == two.blamed else f"{one.blamed} became {two.blamed}"
    figures = {name: f"{one.sizes[name]:.1e} -> {two.sizes[name]:.1e}"
               for name in ("mismatch", "engine_error", "trainer_error")}
    broken = ""
    if one.requests["not finite"] or two.requests["not finite"]:
        broken = (f", values that are not finite {one.sizes['not_finite']} ->"
                  f" {two.sizes['not_finite']}")
    left = [sum(len(each.token_ids) for each in trace.rollouts) - verdict.sizes["num_tokens"]
            for trace, verdict in zip(whole, (one, two), strict=True)]
    cut = ""
    if any(left):
        cut = (f" Left out are tokens that only one of them has: {left[0]} of the first,"
               f" {left[1]} of the second.")
    settings = differing(one.trace.meta, two.trace.meta)
    differ = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in settings.items())
    return word, (f"{became}, mean |mismatch| {figures['mismatch']} nats, error of the engine"
                  f" {figures['engine_error']}, of the trainer {figures['trainer_error']}{broken};"
                  f" with it changed {differ or 'no setting that the traces name'}.{cut}")


def is_worse(one: Verdict, two: Verdict) -> bool:
    """Whether `two` has a worse status, a new cause, more broken values, or a larger error."""
    known = {each.name for each in one.causes}
    new = one.status != "unexplained" and any(each.name not in known for each in two.causes)
    more_broken = (bool(two.requests["not finite"])
                   and two.sizes["not_finite"] > one.sizes["not_finite"])
    allowed = max(one.start.limit.of_mean(), TIMES * one.start.mean)
    return (ORDER.index(two.status) > ORDER.index(one.status) or new or more_broken
            or two.start.mean > allowed)


def cut_alike(one: Trace, two: Trace) -> list[Trace]:
    """Both traces with as many tokens of each request as the shorter response has.

    Otherwise a fault in the last tokens would seem mended in a trace that does not have them.
    """
    lengths = [min(len(ours.token_ids), len(theirs.token_ids))
               for ours, theirs in zip(one.rollouts, two.rollouts, strict=True)]

    def cut(trace: Trace) -> Trace:
        rollouts = [replace(each, token_ids=each.token_ids[:n], logprobs=each.logprobs[:n],
                            versions=each.versions[:n])
                    for each, n in zip(trace.rollouts, lengths, strict=True)]
        return replace(trace, rollouts=rollouts, trainer_logprobs=[
            row[:n] for row, n in zip(trace.trainer_logprobs, lengths, strict=False)])

    return [cut(one), cut(two)]


def same_workload(before: list[Trace], after: list[Trace],
                  group: str | None) -> list[tuple[Trace, Trace]]:
    """The groups of both traces in pairs. Raises: ValueError if the workloads differ."""
    first, second = ({each.name: each for each in traces} for traces in (before, after))
    names = [group] if group else sorted(first.keys() | second.keys())
    if not first.keys() & second.keys() >= set(names):
        raise ValueError(f"both traces must have {', '.join(names)}, the first has"
                         f" {', '.join(first)}, the second {', '.join(second)}; try --group")
    pairs = [(first[name], second[name]) for name in names]
    for pair in pairs:
        prompts, others = ([each.prompt_ids for each in trace.rollouts] for trace in pair)
        sampling, other = (replace(trace.sampling, max_new_tokens=1) for trace in pair)
        if prompts != others or sampling != other:
            raise ValueError("the traces must be of one workload, the prompts or the sampling of"
                             f" {pair[0].name} differ")
    return pairs


def differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Versions and settings that are not equal in two traces' meta."""

    def flat(meta: dict[str, Any]) -> dict[str, Any]:
        values = {name: meta[name] for name in meta.keys() - {*SECTIONS, *NOT_COMPARED}}
        for section in SECTIONS:
            values |= meta.get(section, {})
        return values

    one, two = flat(before), flat(after)
    return {name: (one.get(name, "absent"), two.get(name, "absent"))
            for name in sorted(one.keys() | two.keys())
            if (one.get(name) or None) != (two.get(name) or None)}
