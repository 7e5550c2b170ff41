"""Two traces of one workload, before and after a change of the engine."""

from dataclasses import replace
from typing import Any

from probe.diagnose import Verdict
from probe.traces import SECTIONS, Trace

ORDER = ("exact", "parity", "mismatch", "unexplained")  # of a verdict's status, the best first
GREW = 1.5  # times the floor, or the tokens that one side rules out; below is noise
FIRST = ("vllm", "engine", "logprobs_mode", "head", "head_dtype", "enable_prefix_caching",
         "prefix_caching", "async_scheduling", "dtype", "torch", "transformers")
NOT_COMPARED = ("groups", "format", "args", "engine_args", "workload", "not_read", "seeds", "v0",
                "model", "stress", "command")


def change(one: Verdict, two: Verdict) -> dict[str, Any]:
    """The verdicts on one group of two traces as JSON values, with a sentence."""
    larger = two.start.noise.mean > one.start.noise.mean
    only_named = one.status == "unexplained" and larger
    word = "unchanged"
    if is_worse(one, two):
        word = "worse"
    elif is_worse(two, one) and not only_named:
        word = "better"
    became = one.blamed if one.blamed == two.blamed else f"{one.blamed} became {two.blamed}"
    grew = " grew" if two.start.floor.mean > GREW * one.start.floor.mean else ""
    figures = [f"{getattr(one.start, kind).mean:.1e} -> {getattr(two.start, kind).mean:.1e}"
               for kind in ("noise", "floor")]
    broken = ""
    if num_broken(one) or num_broken(two):
        broken = f", values that are not finite {num_broken(one)} -> {num_broken(two)}"
    settings = differing(one.trace.meta, two.trace.meta)
    differ = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in settings.items())
    sentence = (f"{word}: {became}, mean |mismatch| {figures[0]} nats (noise floor{grew}"
                f" {figures[1]}){broken}; with it changed"
                f" {differ or 'no setting that the traces name'}.")
    return {"change": word, "sentence": sentence, "settings": settings,
            "before": one.record(), "after": two.record()}


def num_broken(verdict: Verdict) -> int:
    """Values that are not finite; 0 if only stop tokens have none, a cause of its own."""
    return int((~verdict.replay.reported.isfinite()).sum()) if verdict.requests["not finite"] else 0


def is_worse(one: Verdict, two: Verdict) -> bool:
    """Whether `two` has a worse status, a new cause, more broken values, or a larger mean."""
    before, after = one.start, two.start.noise
    known = {each.name for each in one.causes}
    new = one.status != "unexplained" and any(each.name not in known for each in two.causes)
    allowed = max(each.allowed_mean(max(1, after.tokens)) for each in (before.noise, before.floor))
    return (ORDER.index(two.status) > ORDER.index(one.status) or new
            or num_broken(two) > num_broken(one)
            or after.infinite > GREW * before.noise.infinite or after.mean > allowed)


def same_workload(before: list[Trace], after: list[Trace],
                  group: str | None) -> list[tuple[Trace, Trace]]:
    """The groups of both traces in pairs. Raises: ValueError if the workloads differ."""
    other = {trace.name: trace for trace in after if group in (None, trace.name)}
    pairs = [(trace, other[trace.name]) for trace in before if trace.name in other]
    if not pairs:
        names = (", ".join(trace.name for trace in traces) for traces in (before, after))
        wanted = f" named {group}" if group else ""
        raise ValueError(f"the traces must have a group in common{wanted}, the first has"
                         f" {next(names)}, the second {next(names)}")
    for one, two in pairs:
        if [each.prompt_ids for each in one.rollouts] != [each.prompt_ids for each in two.rollouts]:
            raise ValueError("the traces must be of one workload, the prompts of"
                             f" {one.name} differ")
        if replace(one.sampling, max_new_tokens=1) != replace(two.sampling, max_new_tokens=1):
            raise ValueError("the traces must be of one workload, the sampling of"
                             f" {one.name} differs")
    weights = [traces[0].meta.get("model", {}).get("weights") for traces in (before, after)]
    if None not in weights and weights[0] != weights[1]:
        raise ValueError("the traces must be of one model, their weight files differ")
    for which, traces in (("first", before), ("second", after)):
        if not {"versions", "vllm", "engine"} & traces[0].meta.keys():
            raise ValueError("meta.versions must name the engine's version (else a comparison says"
                             f" nothing), the {which} trace has none")
    return pairs


def differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Versions and settings that are not equal in two traces' meta, the decisive ones first."""

    def flat(meta: dict[str, Any]) -> dict[str, Any]:
        values = {name: meta[name] for name in meta.keys() - {*SECTIONS, *NOT_COMPARED}}
        for section in SECTIONS:
            values |= meta.get(section, {})
        return values

    one, two = flat(before), flat(after)
    names = dict.fromkeys([*FIRST, *sorted(one.keys() | two.keys())])
    return {name: (one.get(name, "absent"), two.get(name, "absent")) for name in names
            if (one.get(name) or None) != (two.get(name) or None)}
