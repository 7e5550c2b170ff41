"""The engine under pressure on purpose: `python -m probe record --stress`.

The KV cache has room for a third of the running requests, so that vLLM preempts some. The token
budget of a step is smaller than the prompts, so that prompts are computed in chunks. Requests are
aborted and submitted again, their KV blocks pass on to others, and other weights are loaded and
used in between. Every recorded token is sampled under the model's own weights, so a healthy engine
gives a trace at parity.
"""

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from engine_adapter import Engine, Rollout, Sampling, reseed
from rl import Policy

SLOTS = 12  # requests that may run at once
ROOM = 4  # requests for which the KV cache has room at their full length
LEAST_BUDGET = 24  # tokens of a step; the canary's four prompts must fit, their requests have seeds
LOADS, DECOY_STEPS = 2, 6  # loads of other weights in between; engine steps under them
# Steps between forced preemptions, beside those in which the preempted requests are computed again.
FORCED_EVERY = 50
BY_CHANCE = 1e-6  # probability below which a kind of pressure is named as the wrong requests' own
# Kinds of pressure, by the fields of Events.
KINDS = {"chunks": "several prompt chunks", "single": "first chunks of one token",
         "preempted": "preemptions", "recycled": "recycled blocks", "restarted": "aborts",
         "loads": "loads of other weights before"}


@dataclass
class Events:
    """The pressure on one request since its last submission; `restarted` counts all aborts."""

    chunks: int = 0  # steps that computed its prompt; more than 1: the token budget was exhausted
    single: int = 0  # times that the first such step computed one token, like a decode (vllm#32118)
    preempted: int = 0
    recycled: int = 0  # KV blocks (a recurrent state is one) that an earlier request had held
    restarted: int = 0  # times that it was aborted and submitted again
    loads: int = 0  # of other weights, before it

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not (isinstance(value, int) and value >= 0):
                raise ValueError(f"meta.stress.requests must have counts, got {value!r} for {name}")

    @property
    def met(self) -> dict[str, int]:
        """The counts of the kinds of pressure that the request has met."""
        return {KINDS[name]: count for name, count in asdict(self).items()
                if count > (name == "chunks")}

    def __str__(self) -> str:
        return ", ".join(f"{kind}: {count}" for kind, count in self.met.items()) or "no pressure"


class Comparison(NamedTuple):
    """A kind of pressure, its chance, whether all wrong requests met it, and a sentence."""

    kind: str
    chance: float
    all_of_them: bool
    sentence: str


def compare(events: list[Events], wrong: list[int]) -> list[Comparison]:
    """Whether wrong requests met each kind of pressure more often; the least likely first.

    The chance is the hypergeometric tail: the wrong requests as a random choice of all.
    """
    found = []
    for kind in KINDS.values():
        rows = {row for row, each in enumerate(events) if kind in each.met}
        hits, others = len(rows & set(wrong)), len(events) - len(rows)
        ways = sum(math.comb(len(rows), k) * math.comb(others, len(wrong) - k)
                   for k in range(hits, len(wrong) + 1))
        chance = ways / math.comb(len(events), len(wrong))
        sentence = (f"wrong among requests with {kind}: {hits} of {len(rows)}, among others"
                    f" {len(wrong) - hits} of {others} (by chance: {chance:.0e})")
        found.append(Comparison(kind, chance, hits == len(wrong), sentence))
    return sorted(found, key=lambda each: each.chance)


# ---------------------------------------------------------------------------------- the engine
def start_engine(start: Callable[..., Engine], longest_prompt: int, longest: int) -> Engine:
    """An engine with a small KV cache and token budget; `longest`: a prompt with its response.

    It starts twice, because vLLM chooses the block sizes of a model while it starts.
    """
    options = dict(max_model_len=longest, max_num_seqs=SLOTS,
                   token_budget=max(LEAST_BUDGET, longest_prompt // 3),
                   block_size=None if torch.cuda.is_available() else 32)
    engine = start(**options)
    blocks = num_blocks(engine, longest)
    engine.close()
    return start(**options, kv_blocks=1 + ROOM * blocks)  # vLLM keeps one block empty


def num_blocks(engine: Engine, num_tokens: int) -> int:
    """KV blocks of a request of this length, over all groups of layers."""
    groups = engine.core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    return sum(math.ceil(num_tokens / group.kv_cache_spec.block_size) for group in groups)


def other_weights(policy: Policy, seed: int) -> AbstractContextManager[None]:
    """The policy with noise on all weights, then with its own weights again, bit by bit."""
    weights, generator = policy.copied_weights(), torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor.add_(max(0.1 * tensor.float().pow(2).mean().sqrt().item(), 0.01) * noise)
    return policy.using(weights)


# ---------------------------------------------------------------------------------- the run
@dataclass
class Watched:
    """A request in the engine, and what was known of it after the step before."""

    request: Any  # vLLM's
    rollout: Rollout
    events: Events
    computed: int = 0  # tokens in its cache
    chunks: int = 0  # of the prompt, since it was last preempted

    @property
    def started(self) -> bool:
        return self.computed > 0 or self.events.preempted > 0


class StressRun:
    """One response per prompt from a live engine under pressure; row i belongs to prompt i.

    The engine must hold the policy's weights. The same arguments give the same run.
    """

    def __init__(self, engine: Engine, policy: Policy, prompts: list[list[int]],
                 sampling: Sampling, seed: int):
        self.engine, self.policy = engine, policy
        self.prompts, self.sampling, self.seed = prompts, sampling, seed
        self.rows: list[Watched] = []
        # Over the run, attempts that were aborted included.
        self.totals = dict.fromkeys(("steps", "preemptions", "aborted", "recycled", "loads"), 0)
        self.chance = random.Random(seed)
        self.owners: dict[int, str] = {}  # of each KV block the request that held it last
        self.own_versions = {engine.weight_version}  # of the policy's own weights
        longest = engine.settings["max_model_len"]
        budget = engine.core.scheduler.max_num_scheduled_tokens
        # A request whose cache does not grow (a recurrent state alone) waits for room and is never
        # preempted. So vLLM's own call preempts all running requests at once, now and then.
        grows = num_blocks(engine, 1) < num_blocks(engine, longest)
        self.forced_every = math.inf if grows else FORCED_EVERY + math.ceil(ROOM * longest / budget)

    def run(self, alone: bool = False) -> list[Rollout]:
        """The responses; `alone`: without pressure, for a replay.

        The requests have no seeds, because the CPU cannot compute the prompt of a request with a
        seed in chunks. Raises: ValueError names the kinds of pressure that none has met.
        """
        reseed(self.seed, "stress")
        self.rows = [self._submit(prompt, Events()) for prompt in self.prompts]
        while self.engine.num_unfinished:
            self._step(self.rows)
            if not alone:
                self._press()
        missing = {*KINDS.values()} - {kind for each in self.rows for kind in each.events.met}
        if missing and not alone:
            raise ValueError("pressure must be of every kind, no request has met:"
                             f" {', '.join(sorted(missing))}; try more --num-prompts, longer"
                             " --prompt-tokens or a larger --max-new-tokens")
        # Each load has its own version; all loads of the policy's weights get the last one's.
        for each in self.rows:
            versions = set(each.rollout.versions)
            assert versions <= self.own_versions, f"{versions=} {self.own_versions=}"
            each.rollout.versions = [self.engine.weight_version] * len(each.rollout.token_ids)
        return [each.rollout for each in self.rows]

    def meta(self) -> dict[str, Any]:
        """For the trace: counts over the run, and the events of each request."""
        return {"totals": self.totals, "requests": [asdict(each.events) for each in self.rows]}

    def _press(self) -> None:
        """Between two steps: a load of other weights, an abort or a preemption, if it is time."""
        unfinished = [row for row, each in enumerate(self.rows)
                      if each.rollout.finish_reason is None]
        finished, loads = len(self.rows) - len(unfinished), self.totals["loads"]
        started = [row for row in unfinished if self.rows[row].started]
        if loads < LOADS and finished * (LOADS + 1) >= len(self.rows) * (loads + 1):
            self._load_in_between(unfinished)
        elif (started and self.totals["aborted"] < len(self.rows) // 4
              and self.chance.random() < 0.2):
            self._abort_and_submit([self.chance.choice(started)])
        if self.totals["steps"] % self.forced_every == 0:
            self.engine.llm.reset_prefix_cache(reset_running_requests=True)

    def _submit(self, prompt: list[int], events: Events) -> Watched:
        (rollout,) = self.engine.submit(prompt, 1, self.sampling)
        *_, request = self.engine.core.scheduler.requests.values()
        return Watched(request, rollout, events)

    def _abort_and_submit(self, rows: list[int]) -> None:
        """Queue the requests of these rows again; only one that had started counts as aborted."""
        self.engine.abort([self.rows[row].rollout for row in rows])
        for row in rows:
            each = self.rows[row]
            self.totals["aborted"] += each.started
            events = Events(restarted=each.events.restarted + each.started,
                            loads=self.totals["loads"])
            self.rows[row] = self._submit(self.prompts[row], events)

    def _load_in_between(self, rows: list[int]) -> None:
        """Let the same prompts run under other weights, then load the policy's again."""
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

    def _step(self, watched: list[Watched]) -> None:
        self.engine.step()
        self.totals["steps"] += 1
        for each in watched:
            self._watch(each)

    def _watch(self, each: Watched) -> None:
        """Read from vLLM's request what the step did to it."""
        request, events = each.request, each.events
        if request.num_preemptions > events.preempted:
            self.totals["preemptions"] += request.num_preemptions - events.preempted
            events.preempted, each.computed, each.chunks = request.num_preemptions, 0, 0
        if each.computed < min(request.num_computed_tokens, request.num_prompt_tokens):
            each.chunks += 1
            events.single += each.computed == 0 and request.num_computed_tokens == 1
            events.chunks = max(events.chunks, each.chunks)
        each.computed = request.num_computed_tokens
        manager = self.engine.core.scheduler.kv_cache_manager
        for block in chain(*manager.get_block_ids(request.request_id)):
            recycled = self.owners.get(block, request.request_id) != request.request_id
            events.recycled += recycled
            self.totals["recycled"] += recycled
            self.owners[block] = request.request_id
