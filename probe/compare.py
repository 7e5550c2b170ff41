"""Two traces of one workload, before and after a change of the engine: what changed, and is the second worse."""

from dataclasses import dataclass
from typing import Any

from probe.diagnose import Verdict
from probe.traces import Trace

GREW = 1.5  # times the mean mismatch before; smaller differences are noise (docs/probe.md, false alarms)
SECTIONS = ("versions", "settings", "audit", "environment")  # of meta; their entries are compared one by one
FIRST = ("vllm", "engine", "logprobs_mode", "head", "head_dtype", "enable_prefix_caching", "prefix_caching",
         "async_scheduling", "dtype", "torch", "transformers")  # fmt: skip
NOT_COMPARED = ("groups", "format", "args", "engine_args", "workload", "not_read", "seeds", "v0", "model", "stress",
                "command")  # fmt: skip


@dataclass(frozen=True)
class Change:
    """The verdicts on one group of two traces."""

    before: Verdict
    after: Verdict
    settings: dict[str, tuple[Any, Any]]  # versions and settings that differ

    @property
    def new(self) -> set[str]:
        """What is at fault now and was not before; nothing if the mismatch before was unexplained."""
        if self.before.status == "unexplained":
            return set()
        now = {"unexplained"} if self.after.status == "unexplained" else {cause.name for cause in self.after.causes}
        return now - {cause.name for cause in self.before.causes}

    @property
    def word(self) -> str:
        before, after = self.before.start.noise.mean, self.after.start.noise.mean
        if self.after.status not in ("exact", "parity") and (self.new or after > GREW * before):
            return "worse"
        return "unchanged" if named(self.before) == named(self.after) else "better"

    @property
    def sentence(self) -> str:
        one, two = named(self.before), named(self.after)
        figures = [f"{getattr(self.before.start, kind).mean:.1e} -> {getattr(self.after.start, kind).mean:.1e}"
                   for kind in ("noise", "floor")]  # fmt: skip
        differ = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.settings.items())
        return (f"{self.word}: {one if self.word == 'unchanged' else f'{one} became {two}'}, mean |mismatch|"
                f" {figures[0]} nats (noise floor {figures[1]}); with it changed"
                f" {differ or 'no setting that the traces name'}.")  # fmt: skip

    def record(self) -> dict[str, Any]:
        return {"change": self.word, "sentence": self.sentence, "settings": self.settings,
                "before": self.before.record(), "after": self.after.record()}  # fmt: skip


def named(verdict: Verdict) -> str:
    return verdict.blamed or verdict.status


def same_workload(before: list[Trace], after: list[Trace], group: str | None) -> list[tuple[Trace, Trace]]:
    """The groups of both traces in pairs. Raises: ValueError if they are not two traces of one workload."""
    other = {trace.name: trace for trace in after if group in (None, trace.name)}
    pairs = [(trace, other[trace.name]) for trace in before if trace.name in other]
    if not pairs:
        names = (", ".join(trace.name for trace in traces) for traces in (before, after))
        raise ValueError(f"the traces must have a group in common{f' named {group}' if group else ''}, the first has"
                         f" {next(names)}, the second {next(names)}")  # fmt: skip
    for one, two in pairs:
        if [each.prompt_ids for each in one.rollouts] != [each.prompt_ids for each in two.rollouts]:
            raise ValueError(f"the traces must be of one workload, the prompts of {one.name} differ")
        distributions = [{name: value for name, value in vars(each.sampling).items() if name != "max_new_tokens"}
                         for each in (one, two)]  # fmt: skip
        if distributions[0] != distributions[1]:
            raise ValueError(f"the traces must be of one workload, the sampling of {one.name} differs")
    models = [traces[0].meta.get("model") for traces in (before, after)]
    weights = [model.get("weights") if isinstance(model, dict) else None for model in models]
    if None not in weights and weights[0] != weights[1]:
        raise ValueError("the traces must be of one model, their weight files differ")
    for which, traces in (("first", before), ("second", after)):
        if not {"versions", "vllm", "engine"} & traces[0].meta.keys():
            raise ValueError(f"meta.versions must name the engine's version (else a comparison says nothing), the"
                             f" {which} trace has none")  # fmt: skip
    return pairs


def differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Versions and settings that are not equal in two traces' meta, the decisive ones first."""
    flat = []
    for meta in (before, after):
        sections = [meta.get(name, {}) for name in SECTIONS]
        flat.append({name: value for name, value in meta.items() if name not in (*SECTIONS, *NOT_COMPARED)}
                    | {name: value for section in sections for name, value in section.items()})  # fmt: skip
    one, two = flat
    names = sorted(one.keys() | two.keys(), key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return {name: (one.get(name, "absent"), two.get(name, "absent")) for name in names
            if (one.get(name) or None) != (two.get(name) or None)}  # fmt: skip
