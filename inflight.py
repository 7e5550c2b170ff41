"""Groups in flight: some stay unfinished in the engine while the weights change under them.

A step trains on the first P groups that are complete; N more are always on their way, so that the engine never waits
for the longest rollout of a batch. With N = 0 this is the synchronous loop. Source: PipelineRL, arXiv 2509.19128, there
on two sets of devices; here engine and trainer take turns on one.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_adapter import Engine, Rollout, Sampling
from reference import ReferenceEngine
from tasks import Problem


@dataclass(eq=False)
class Group:
    """G rollouts of one problem. `number` counts submissions from 1; `rollouts` is empty until the engine has room."""

    number: int
    problem: Problem
    prompt_ids: list[int]
    seed: int
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.rollouts) and all(rollout.finish_reason for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


class Flight:
    """Every group submitted is trained on, dropped for its age, or in flight, and only one of these."""

    def __init__(self, engine: Engine | ReferenceEngine, group_size: int, sampling: Sampling, max_staleness: int):
        self.engine, self.group_size, self.sampling = engine, group_size, sampling
        self.max_staleness = max_staleness
        self.submitted = self.trained = self.dropped = 0  # groups, since the run's first step
        self.wasted = self.restarted = 0  # tokens thrown away; rollouts begun again
        self.lost_before = 0  # kept caches, by an engine before this one
        self._waiting: deque[Group] = deque()  # not in the engine yet
        self._running: list[Group] = []
        self._complete: list[Group] = []  # in the order of completion

    @property
    def groups(self) -> list[Group]:
        """All in flight, in the order of submission."""
        return sorted([*self._complete, *self._running, *self._waiting], key=lambda group: group.number)

    def submit(self, problems: list[Problem], prompts: list[list[int]], seeds: list[int]) -> None:
        for problem, prompt_ids, seed in zip(problems, prompts, seeds, strict=True):
            self.submitted += 1
            self._waiting.append(Group(self.submitted, problem, prompt_ids, seed))

    def take(self, num_groups: int) -> list[Group]:
        """Run the engine until `num_groups` are complete; the first of them, in the order of submission.

        First come, first trained favours short answers among the groups in flight: the long ones come later and staler.
        """
        self.feed()
        while len(self._complete) < num_groups:
            if not self._running:
                raise RuntimeError(f"{num_groups} groups are wanted, {len(self._complete)} are in flight")
            self.engine.step()
            self.feed()
        taken, self._complete = self._complete[:num_groups], self._complete[num_groups:]
        self.trained += num_groups
        return sorted(taken, key=lambda group: group.number)  # else rows would be sorted by length

    def feed(self) -> None:
        """Give the engine what it has room for; note what it has finished."""
        self._complete += [group for group in self._running if group.complete]
        self._running = [group for group in self._running if not group.complete]
        while self._waiting and self.engine.has_room:
            group = self._waiting.popleft()
            group.rollouts = self.engine.submit(group.prompt_ids, self.group_size, self.sampling, group.seed)
            self._running.append(group)

    def after_update(self) -> None:
        """Submit aborted rollouts again, drop groups that are too old, check that nothing is lost.

        Raises: RuntimeError if the groups do not add up, or the engine runs other rollouts than theirs.
        """
        for group in self._running:
            group.rollouts = [self._restart(group, each) if each.finish_reason == "abort" else each
                              for each in group.rollouts]
        self.feed()
        oldest = self.engine.weight_version - self.max_staleness
        for group in [*self._running, *self._complete]:
            if any(version < oldest for rollout in group.rollouts for version in rollout.versions):
                self._drop(group)
        self._check()

    def _restart(self, group: Group, aborted: Rollout) -> Rollout:
        self.wasted += len(aborted.token_ids)
        self.restarted += 1
        return self.engine.submit(group.prompt_ids, 1, self.sampling, aborted.seed)[0]

    def _drop(self, group: Group) -> None:
        self.engine.abort(group.rollouts)
        (self._complete if group in self._complete else self._running).remove(group)
        self.dropped += 1
        self.wasted += group.num_tokens

    def _check(self) -> None:
        groups, counts = self.groups, self.counts()
        if self.submitted != self.trained + self.dropped + len({group.number for group in groups}):
            raise RuntimeError(f"groups must be trained on, dropped or in flight, got {counts}")
        unfinished = sum(rollout.finish_reason is None for group in self._running for rollout in group.rollouts)
        if unfinished != self.engine.num_unfinished:
            raise RuntimeError(f"{unfinished} rollouts are in flight, the engine runs {self.engine.num_unfinished}")

    def counts(self) -> dict[str, int]:
        """Since the run's first step: groups, tokens thrown away, rollouts begun again, kept caches lost."""
        return {
            "groups_submitted": self.submitted, "groups_trained": self.trained, "groups_dropped": self.dropped,
            "groups_in_flight": len(self.groups), "tokens_wasted": self.wasted, "rollouts_restarted": self.restarted,
            "kv_lost": self.lost_before + self.engine.kv_lost,
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: partial work is not kept, its prompts are submitted again."""
        waste = {"wasted": self.wasted + sum(group.num_tokens for group in self.groups),
                 "restarted": self.restarted + sum(len(group.rollouts) for group in self.groups)}
        groups = [{"number": group.number, "problem": asdict(group.problem), "prompt_ids": group.prompt_ids,
                   "seed": group.seed} for group in self.groups]
        return {"groups": groups, "submitted": self.submitted, "trained": self.trained, "dropped": self.dropped,
                "lost_before": self.lost_before + self.engine.kv_lost} | waste

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting.extend(Group(**group | {"problem": Problem(**group["problem"])}) for group in state["groups"])
        for name in ("submitted", "trained", "dropped", "lost_before", "wasted", "restarted"):
            setattr(self, name, state[name])
