"""The engine under pressure on purpose: `python -m probe record --stress`.

The KV cache has room for a third of the running requests, so that vLLM preempts some of them. The token budget of a
step is smaller than the prompts, so that prompts are computed in chunks. Requests are aborted and submitted again,
their KV blocks pass on to others, and other weights are loaded and used in between. Every recorded token is sampled
under the model's own weights, so a healthy engine gives a trace at parity.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from engine_adapter import Engine, Rollout, Sampling, reseed
from rl import Policy

SLOTS = 12  # requests that may run at once
ROOM = 4  # requests for which the KV cache has room at their full length
LEAST_BUDGET = 24  # tokens of a step; the canary's four prompts must fit, since their requests have seeds
LOADS = 2  # of other weights, in between
DECOY_STEPS = 6  # engine steps under other weights
FORCED_EVERY = 50  # steps between forced preemptions, beside those in which the preempted requests are computed again
BY_CHANCE = 1e-6  # probability below which a kind of pressure is named with the wrong requests
RETRY = "try more --num-prompts, longer --prompt-tokens or a larger --sampling.max-new-tokens"


@dataclass
class Events:
    """What happened to one request of the trace, since it was last submitted; `restarted` counts all its aborts."""

    chunks: int = 0  # steps over which its prompt was computed; more than 1: the token budget was exhausted
    preempted: int = 0
    recycled: int = 0  # KV blocks (a recurrent state is one) that an earlier request had held
    restarted: int = 0  # times that it was aborted and submitted again
    loads: int = 0  # loads of other weights before it

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not (isinstance(value, int) and value >= 0):
                raise ValueError(f"meta.stress.requests must have counts, got {value!r} for {name}")

    def __str__(self) -> str:
        shown = {
            f"prompt in {self.chunks} chunks": self.chunks > 1, f"preempted {_times(self.preempted)}": self.preempted,
            f"recycled blocks: {self.recycled}": self.recycled,
            f"aborted and submitted again {_times(self.restarted)}": self.restarted,
            f"loads of other weights before: {self.loads}": self.loads,
        }  # fmt: skip
        return ", ".join(text for text, happened in shown.items() if happened) or "no event"


# Kind of pressure -> has a request met it?
KINDS: dict[str, Callable[[Events], bool]] = {
    "with prompts in chunks": lambda events: events.chunks > 1,
    "preempted": lambda events: events.preempted > 0,
    "with recycled blocks": lambda events: events.recycled > 0,
    "aborted and submitted again": lambda events: events.restarted > 0,
    "after other weights": lambda events: events.loads > 0,
}


class Met(NamedTuple):
    """A kind of pressure and the wrong requests: `hits` of the `met` requests that met it, `missed` of the others."""

    kind: str
    hits: int
    met: int
    missed: int
    others: int

    @property
    def chance(self) -> float:
        """P(so many hits or more) if the wrong requests were a random choice: the hypergeometric distribution."""
        wrong, total = self.hits + self.missed, self.met + self.others
        ways = sum(math.comb(self.met, hits) * math.comb(self.others, wrong - hits)
                   for hits in range(self.hits, min(self.met, wrong) + 1))  # fmt: skip
        return ways / math.comb(total, wrong)

    @property
    def line(self) -> str:
        return (f"wrong among those {self.kind}: {self.hits} of {self.met}, among the others {self.missed} of"
                f" {self.others} (by chance: {self.chance:.0e})")


def compare(events: list[Events], wrong: list[int]) -> list[Met]:
    """How often requests that met a kind of pressure are wrong; first the kind that chance explains least."""
    counts = []
    for kind, is_met in KINDS.items():
        rows = {row for row, each in enumerate(events) if is_met(each)}
        hits = len(rows & set(wrong))
        counts.append(Met(kind, hits, len(rows), len(wrong) - hits, len(events) - len(rows)))
    return sorted(counts, key=lambda each: each.chance)


def likely(events: list[Events], wrong: list[int]) -> str:
    """What all wrong requests have met, if chance does not explain it."""
    first, *_ = compare(events, wrong) if events and wrong else [None]
    return f"all of them {first.kind}" if first and first.chance < BY_CHANCE and not first.missed else ""


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


# ------------------------------------------------------------------------------------------------ the engine
def start_engine(start: Callable[..., Engine], longest_prompt: int, longest: int) -> Engine:
    """An engine with a small KV cache and token budget. `longest`: tokens of the longest prompt with its response.

    It starts twice, because vLLM chooses the block sizes of a model while it starts.
    """
    options = dict(max_model_len=longest, max_num_seqs=SLOTS, token_budget=max(LEAST_BUDGET, longest_prompt // 3),
                   block_size=None if torch.cuda.is_available() else 32)  # fmt: skip
    engine = start(**options)
    blocks = num_blocks(engine, longest)
    engine.close()
    return start(**options, kv_blocks=1 + ROOM * blocks)  # vLLM keeps one block empty


def num_blocks(engine: Engine, num_tokens: int) -> int:
    """KV blocks of a request of this length, over all groups of layers."""
    groups = engine.core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    return sum(math.ceil(num_tokens / group.kv_cache_spec.block_size) for group in groups)


@contextmanager
def other_weights(policy: Policy, seed: int) -> Iterator[None]:
    """The policy with noise on all weights, a tenth of each tensor's RMS; then its own weights again, bit by bit."""
    own, generator = policy.copied_weights(), torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                rms = parameter.float().pow(2).mean().sqrt().item()
                parameter.add_(max(0.1 * rms, 0.01) * noise)  # biases are often zeros
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(own[name])


# ------------------------------------------------------------------------------------------------ the run
@dataclass
class Watched:
    """A request in the engine, and what was known of it after the step before."""

    request: Any  # vLLM's
    rollout: Rollout
    events: Events
    computed: int = 0  # tokens in its cache
    chunks: int = 0  # of the prompt, since it was last preempted


@dataclass
class StressRun:
    """One response per prompt from a live engine under pressure; row i of everything belongs to prompt i.

    The engine must hold the policy's weights. The same arguments give the same run.
    """

    engine: Engine
    policy: Policy
    prompts: list[list[int]]
    sampling: Sampling
    seed: int
    rows: list[Watched] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)  # over the run, attempts that were aborted included

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.owners: dict[int, str] = {}  # of each KV block the request that held it last
        self.own_versions = {self.engine.weight_version}  # under which the engine holds the policy's weights
        self.totals = dict.fromkeys(("steps", "preemptions", "aborted", "recycled", "loads"), 0)
        longest, budget = self.engine.settings["max_model_len"], self.engine.core.scheduler.max_num_scheduled_tokens
        # A request whose cache does not grow (a recurrent state alone) waits for room and is never preempted. So all
        # running requests are preempted at once, now and then, by vLLM's own call.
        grows = num_blocks(self.engine, 1) < num_blocks(self.engine, longest)
        self.forced_every = math.inf if grows else FORCED_EVERY + math.ceil(ROOM * longest / budget)
        reseed(self.seed, "stress")  # no seeds of single requests: the CPU cannot chunk the prompt of such a request

    def run(self) -> list[Rollout]:
        """The responses under pressure. Raises: ValueError that names each kind of pressure that did not happen."""
        self.rows = [self._submit(prompt, Events()) for prompt in self.prompts]
        while self.engine.num_unfinished:
            self._step()
            finished = sum(each.rollout.finish_reason is not None for each in self.rows)
            if self.totals["loads"] < LOADS and finished * (LOADS + 1) >= len(self.rows) * (self.totals["loads"] + 1):
                self._load_in_between()
            elif self.totals["aborted"] < len(self.rows) // 4 and self.chance.random() < 0.2:
                started = [row for row in self._unfinished() if _started(self.rows[row])]
                self._abort_and_submit(self.chance.sample(started, min(1, len(started))))
            if self.totals["steps"] % self.forced_every == 0:
                self.engine.llm.reset_prefix_cache(reset_running_requests=True)
        missing = [kind for kind, met in KINDS.items() if not any(met(each.events) for each in self.rows)]
        if missing:
            raise ValueError(f"pressure must be of every kind, no request has met: {', '.join(missing)}; {RETRY}")
        return self._rollouts()

    def run_alone(self) -> list[Rollout]:
        """The responses one after the other, without pressure of others: for a replay."""
        for prompt in self.prompts:
            self.rows.append(self._submit(prompt, Events()))
            while self.engine.num_unfinished:
                self._step()
        return self._rollouts()

    def meta(self) -> dict[str, Any]:
        """For the trace: counts over the run, and the events of each request."""
        return {"totals": self.totals, "requests": [asdict(each.events) for each in self.rows]}

    def _rollouts(self) -> list[Rollout]:
        """Every load has its own version. All loads of the policy's weights get the label of the last one."""
        for each in self.rows:
            assert set(each.rollout.versions) <= self.own_versions, f"{each.rollout.versions=} {self.own_versions=}"
            each.rollout.versions = [self.engine.weight_version] * len(each.rollout.token_ids)
        return [each.rollout for each in self.rows]

    # ---------------------------------------------------------------------------------------------- requests
    def _submit(self, prompt: list[int], events: Events) -> Watched:
        (rollout,) = self.engine.submit(prompt, 1, self.sampling)
        *_, request = self.engine.core.scheduler.requests.values()
        return Watched(request, rollout, events)

    def _unfinished(self) -> list[int]:
        return [row for row, each in enumerate(self.rows) if each.rollout.finish_reason is None]

    def _abort_and_submit(self, rows: list[int]) -> None:
        """Give up the requests of these rows and queue them again; only one that had started counts as aborted."""
        self.engine.abort([self.rows[row].rollout for row in rows])
        for row in rows:
            each = self.rows[row]
            self.totals["aborted"] += _started(each)
            events = Events(restarted=each.events.restarted + _started(each), loads=self.totals["loads"])
            self.rows[row] = self._submit(self.prompts[row], events)

    def _load_in_between(self) -> None:
        """Abort all, let the same prompts run under other weights, abort these too, and load the policy's weights."""
        rows = self._unfinished()
        self.engine.abort([self.rows[row].rollout for row in rows])
        with other_weights(self.policy, self.seed):
            self.engine.load(self.policy.weights(), self.policy.response_logprobs)
            decoys = [self._submit(self.prompts[row], Events()) for row in rows]
            for _ in range(DECOY_STEPS):
                self._step(decoys)
        self.engine.abort([decoy.rollout for decoy in decoys])
        self.engine.load(self.policy.weights(), self.policy.response_logprobs)
        self.own_versions.add(self.engine.weight_version)
        self.totals["loads"] += 1
        self._abort_and_submit(rows)

    def _step(self, decoys: list[Watched] | None = None) -> None:
        self.engine.step()
        self.totals["steps"] += 1
        for each in self.rows if decoys is None else decoys:
            self._watch(each)

    def _watch(self, each: Watched) -> None:
        """Read from vLLM's request what the step did to it."""
        request, events = each.request, each.events
        if request.num_preemptions > events.preempted:
            self.totals["preemptions"] += request.num_preemptions - events.preempted
            events.preempted, each.computed, each.chunks = request.num_preemptions, 0, 0
        if each.computed < min(request.num_computed_tokens, request.num_prompt_tokens):
            each.chunks += 1
            events.chunks = max(events.chunks, each.chunks)
        each.computed = request.num_computed_tokens
        for block in chain(*self.engine.core.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            if self.owners.setdefault(block, request.request_id) != request.request_id:
                events.recycled += 1
                self.totals["recycled"] += 1
            self.owners[block] = request.request_id


def _started(each: Watched) -> bool:
    return each.computed > 0 or each.events.preempted > 0
