"""Which problems are trained on and which are held out: each question once, in one of both."""

import random
from collections.abc import Collection
from dataclasses import replace

from tasks import Problem, Task


def split(task: Task, name: str, seed: int, drop: bool = False) -> Task:
    """Each question once, in one split. Without held-out problems the seed chooses a tenth of the
    families.

    Raises: ValueError if a question has two answers, unless `drop`: then it is left out.
    """
    by_key: dict[str, Problem] = {}
    conflicts = {}
    for problem in (*task.held_out, *task.train):
        known = by_key.setdefault(problem.key, problem)
        if not task.same(problem.answer, known.answer):
            conflicts.setdefault(problem.key, f"{known.source} has {known.answer!r:.40} and"
                                              f" {problem.source} has {problem.answer!r:.40}")
    refuse_or_drop(conflicts.values(), f"of {len(by_key)} questions have two answers", drop)
    num_repeated = len(task.problems) - len(by_key)
    problems = [problem for key, problem in by_key.items() if key not in conflicts]
    held_out_families = set(map(family_of, task.held_out))
    if not held_out_families:
        problems = random.Random(seed).sample(problems, len(problems))
        families = list(dict.fromkeys(map(family_of, problems)))
        held_out_families = set(families[: max(1, round(0.1 * len(families)))])
    training = [problem for problem in problems if family_of(problem) not in held_out_families]
    if not training:
        raise ValueError(f"task must have problems left to train on, {name} has {len(problems)}"
                         " without repeats, all of them held out")
    held_out = [problem for problem in problems if family_of(problem) in held_out_families]
    return replace(task, train=training, held_out=held_out, num_repeated=num_repeated)


def family_of(problem: Problem) -> str:
    return problem.family or problem.key


def refuse_or_drop(
    faults: Collection[str], what: str, drop: bool, option: str = "--unreadable-answers"
) -> None:
    """Raises: ValueError with the number of the faults and the first three, unless `drop`."""
    if not faults:
        return
    first = "; ".join([*faults][:3])
    if not drop:
        raise ValueError(f"{len(faults)} {what} (to leave them out, {option} drop): {first}")
    print(f"{len(faults)} {what}: {first}: DROPPED")
