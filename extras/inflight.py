"""Groups in flight (`--inflight-groups N`): unfinished in the engine over weight loads.

In reading order: the source of rollouts, and its engine, with what a load and an evaluation do to
unfinished requests.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from engine_adapter import Engine, Rollout, Source, reseed
from extras import Extra
from report.ranges import CountOrZero
from tasks import Problem
from vllm_cases import EngineStateError


class Options(Extra):
    """Groups in flight."""

    # Groups in flight: N that stay unfinished while weights are loaded, besides the P of a step.
    inflight_groups: CountOrZero = 0
    # Largest staleness of a token in updates: a step waits for the groups that would become older.
    max_staleness: CountOrZero = 8

    def check(self, config: Any) -> None:
        if "max_staleness" in config.given and not self.inflight_groups:
            raise ValueError("max_staleness needs inflight_groups (without them nothing is stale);"
                             " try --inflight-groups")
        most = config.num_prompts * self.max_staleness
        if self.inflight_groups > most:
            raise ValueError("inflight_groups must be at most num_prompts * max_staleness ="
                             f" {most} (num_prompts groups leave at each step), got"
                             f" {self.inflight_groups}")

    def install(self, run: Any) -> None:
        if not self.inflight_groups:
            return
        groups, problems = run.config.num_prompts + self.inflight_groups, len(run.task.train)
        if run.config.steps and groups > problems:
            raise ValueError(f"num_prompts + inflight_groups must be at most {problems} (all there"
                             f" are), got {groups}")
        if "engine" not in run.config.given:
            run.engine_kind = InflightEngine
        run.source = partial(GroupsInFlight, num_waiting=self.inflight_groups,
                             max_staleness=self.max_staleness)
        run.endings |= ENDINGS


# The counts of tokens_wasted and kv_lost are from the start of the run.
ENDINGS = {
    "groups_in_flight": " | in flight {groups_in_flight} stale {staleness_mean:.2f} max"
                        " {staleness_max}",
    "tokens_wasted": " | {tokens_wasted} tokens thrown away",
    "kv_lost": " | {kv_lost} kept KV caches LOST to preemption: raise --kv-cache-gib",
}  # fmt: skip


@dataclass(eq=False)  # `in` compares identity
class Group:
    """G rollouts of one problem. `rollouts` is empty until the engine has room."""

    problem: Problem
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.rollouts) and all(rollout.finish_reason for rollout in self.rollouts)

    def oldest_version(self, version: int) -> int:
        """The oldest weights from which a part of it was computed; `version` if it has none."""
        oldest = [rollout.oldest_version for rollout in self.rollouts]
        return min((own for own in oldest if own is not None), default=version)


class GroupsInFlight(Source):
    """A source with N more groups in flight than a step takes.

    Groups are in the order of submission; a step takes the first P that are complete. N more stay
    in flight, so that the engine need not wait for the longest rollout of a batch. A step first
    waits for the groups that would be too old at the next step, and takes these: no group is
    dropped, because that would lose long answers first.

    Source: PipelineRL, arXiv 2509.19128, on two sets of devices; here the two sides take turns.
    """

    def __init__(self, *source: Any, num_waiting: int, max_staleness: int):
        super().__init__(*source)
        self.num_waiting, self.max_staleness = num_waiting, max_staleness
        self.groups: list[Group] = []

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G complete rollouts, group-major."""
        missing = self.num_prompts + self.num_waiting - len(self.groups)
        self.groups += map(Group, self.task.sample(self.rng, missing, self.left))
        reseed(self.seed, "train", step)
        groups = self.take(self.num_prompts)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return [group.problem for group in groups], rollouts

    def answer(self, *asked: Any, **how: bool) -> list[Rollout]:
        """As `Source.answer`, for an evaluation: the groups in flight stay as they are."""
        with self.engine.holding():
            return super().answer(*asked, **how)

    def take(self, num_groups: int) -> list[Group]:
        """Run the engine until `num_groups` or more are complete. Returns those submitted first.

        Groups with long answers come later and are staler.
        """
        due = self._num_due(num_groups)
        while True:
            self._fill()
            complete = [group for group in self.groups if group.complete]
            if len(complete) >= num_groups and complete[:due] == self.groups[:due]:
                break
            assert self.engine.num_unfinished, f"{num_groups=} {due=} {len(complete)=}"
            self.engine.step()
        taken = complete[:num_groups]
        self.groups = [group for group in self.groups if group not in taken]
        return taken

    def _num_due(self, num_groups: int) -> int:
        """How many groups, the first in order of submission, cannot wait for the next step.

        Earliest deadline first: the first `count` groups must be taken within `left` later steps,
        which take `num_groups` each. The rest, `count - num_groups * left`, is due now.
        """
        version, due = self.engine.weight_version, 0
        for count, group in enumerate(self.groups, 1):
            left = group.oldest_version(version) + self.max_staleness - version  # updates
            due = max(due, count - num_groups * left)
        return due

    def _fill(self) -> None:
        """Submit groups to the engine while it has room."""
        for group in self.groups:
            if not group.rollouts and self.engine.num_unfinished < self.engine.max_num_seqs:
                group.rollouts = self.engine.submit(
                    group.problem.prompt_ids, self.group_size, self.sampling)

    def after_update(self) -> dict[str, int]:
        """Counts: groups in flight now; the engine's since the run's first step."""
        version = self.engine.weight_version
        oldest = min((group.oldest_version(version) for group in self.groups), default=version)
        assert version - oldest <= self.max_staleness, f"{version=} {oldest=}"
        return {"groups_in_flight": len(self.groups)} | self.engine.counters

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. Partial work is not kept: its prompts are submitted again."""
        return super().state_dict() | {
            "groups": [self.task.train.index(group.problem) for group in self.groups],
            "engine_counters": dict(self.engine.counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.groups = [Group(self.task.train[number]) for number in state["groups"]]
        self.engine.counters |= state["engine_counters"]


# ---------------------------------------------------------------------------------- the engine
def keeps_places(runner: Any) -> bool:
    """Whether a request that is not scheduled keeps its place in the batch: model runner V2."""
    return not hasattr(runner, "input_batch")


class InflightEngine(Engine):
    """An `Engine` whose requests may be unfinished while weights are loaded.

    A load is at an engine-step boundary: nothing runs between two calls of `step`. Unfinished
    rollouts are kept, recomputed, or aborted and submitted again (`inflight_update`); the
    canary's steps advance them too. The later log-probabilities of a kept one belong to no single
    set of weights: the new weights compute them from keys and values of the old.
    """

    holds_unfinished = True

    def __init__(self, *arguments: Any, recomputes: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        off = "recompute" if recomputes else "abort"
        self.inflight_update = "keep" if self.parity.inflight_keep else off
        self.settings["inflight_update"] = self.inflight_update
        self.counters = dict(tokens_wasted=0, kv_lost=0)  # the latter: kept, and then preempted
        # What kept its KV cache at the last load, with its preemptions then.
        self._kept: list[tuple[Any, int]] = []
        self._aborted: list[Rollout] = []  # by the last load
        self._places: dict[str, Any] = {}  # rows of the runner's batch that `holding` restored

    def sleep(self) -> None:
        """If unfinished rollouts keep their KV cache, the engine keeps all its memory, also in a
        step that leaves none: vLLM's sleep would clear the prefix cache.

        vLLM has no sleep that frees the weights and leaves the cache. Otherwise it computes the
        cache again after the next `load`.
        """
        self._require("sleep", "ready")
        if self.inflight_update == "keep":
            self.state = "asleep"
        else:
            super().sleep()

    def load(self, weights: Mapping[str, Tensor], is_new_version: bool = True) -> None:
        """As `Engine.load`, after an interruption of what is unfinished.

        Unfinished rollouts go on with weights that have not changed.
        """
        self._require("load", "awake", "ready")  # a load that is refused interrupts nothing
        self._aborted = []
        if is_new_version:
            self._interrupt()
        super().load(weights, is_new_version)

    def passed(self, check: str) -> None:
        """What the load has aborted is submitted again once the engine is ready."""
        super().passed(check)
        if self.state != "ready":
            return
        for rollout in self._aborted:
            self.counters["tokens_wasted"] += len(rollout.token_ids)
            for sampled in (rollout.token_ids, rollout.logprobs, rollout.versions, rollout.kept):
                sampled.clear()
            self._submit([rollout])

    def _interrupt(self) -> None:
        """What a weight update does to unfinished rollouts."""
        if self.inflight_update == "abort":
            self._aborted = self.abort()
        elif self.inflight_update == "keep":
            self._note_kept()
        # Not `num_unfinished`: on a GPU vLLM's sleep has paused its scheduler, which then counts 0.
        elif self._requests and not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineStateError("vLLM did not give up the KV cache of the running requests")
        new_key = self.cache_salt(self.weight_version + 1)
        for request in self.core.scheduler.requests.values():
            if not request.num_computed_tokens:  # the new weights will compute its prompt
                # vLLM has hashed its blocks with the old key.
                request.cache_salt, request.block_hashes = new_key, []
                request.update_block_hashes()

    def abort(self) -> list[Rollout]:
        """Give up all requests. Returns their rollouts, unfinished as they are."""
        aborted = list(self._requests.values())
        self.llm.engine_core.abort_requests(list(self._requests))
        self._requests.clear()
        return aborted

    def _note_kept(self) -> None:
        """vLLM keeps unfinished requests by itself. Note what its output does not show.

        If vLLM preempts one later, it computes the cache again under other weights: preemptions are
        counted. A prompt that is half computed keeps its first part under the old weights.
        """
        self.counters["kv_lost"] += sum(
            request.num_preemptions > before for request, before in self._kept)
        running = self.core.scheduler.running
        self._kept = [(request, request.num_preemptions) for request in running]
        for request in running:
            rollout = self._requests[request.request_id]
            half_computed = request.num_computed_tokens and not rollout.token_ids
            if half_computed and rollout.prompt_version is None:
                rollout.prompt_version = self.weight_version

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Unfinished requests stay as they are, while others run to their end.

        vLLM's scheduler does not see them meanwhile. Afterwards their rows in the runner's batch
        are restored, because the order of rows decides the random numbers. With async scheduling a
        step is under way: its tokens still reach the unfinished requests, and their rows are not
        restored. On a GPU (model runner V2) they keep their places in the batch, so fewer others
        run at once.

        Raises: EngineStateError if they leave no KV cache for one row of full length, or no place.
        """
        from vllm.v1.core.sched.request_queue import create_request_queue

        scheduler = self.core.scheduler
        limits = "max_num_active_reqs", "max_num_running_reqs"  # vLLM 0.32, 0.26
        limit = next(name for name in limits if hasattr(scheduler, name))
        held = {name: getattr(scheduler, name) for name in (limit, "running", "waiting")}
        setattr(scheduler, limit, self._free_places(held[limit]))
        rows = self._rows_in_batch()
        scheduler.running, scheduler.waiting = [], create_request_queue(scheduler.policy)
        yield  # an exception inside ends the run
        self.step()  # The runner forgets the finished rows.
        held["running"] = [row for row in held["running"] if not row.is_finished()]
        for name, value in held.items():
            setattr(scheduler, name, value)
        for row in rows:
            self.runner.input_batch.add_request(row)

    def _free_places(self, places: int) -> int:
        """Of the scheduler's places those that no held request keeps. Raises: as `holding`."""
        scheduler = self.core.scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups  # of layers; all take one pool's blocks
        length = self.llm.vllm_config.model_config.max_model_len
        longest = sum(math.ceil(length / group.kv_cache_spec.block_size) for group in groups)
        free = places - keeps_places(self.runner) * len(scheduler.running)
        if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < longest or free < 1:
            raise EngineStateError("the groups in flight leave no KV cache, or no place, for an"
                                   " evaluation: give more --kv-cache-gib or fewer"
                                   " --inflight-groups")
        return free

    def _rows_in_batch(self) -> list[Any]:
        """Rows of the batch of model runner V1, in their order; none with async scheduling.

        With finished rows: they keep their places until the next step.
        """
        batch = getattr(self.runner, "input_batch", None)
        if batch is None or self.llm.vllm_config.scheduler_config.async_scheduling:
            return []
        known = self._places | self.runner.requests
        self._places = {name: known[name] for name in batch.req_ids}
        return [*self._places.values()]
