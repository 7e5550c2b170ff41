"""The expected gradient of each form under a mismatch, without sampling noise.

    python -m lab.gradients        # prints the tables of docs/dose.md

A policy so small that all its answers can be enumerated, in float64: a table of logits for V = 8
words at each of the S = 73 beginnings (states) of an answer of T = 3 words. The reward is the share
of right words, plus or minus `luck`, which stands for the other tokens of a longer answer. So there
are Y = 1,024 answers, 512 with each luck.
"""

import shlex
from collections.abc import Callable
from functools import partial
from math import inf
from statistics import fmean as mean
from typing import NamedTuple

import torch
import tyro
from torch import Tensor

from config import Config, GrpoConfig
from lab import cells
from lab.study import markdown
from objectives import OBJECTIVES, correct

V, T, S = 8, 3, 73
ANSWERS = torch.cartesian_prod(*[torch.arange(V)] * T).repeat(2, 1)  # (Y, T)
STATES = torch.stack([torch.zeros(len(ANSWERS), dtype=torch.long), 1 + ANSWERS[:, 0],
                      1 + V + V * ANSWERS[:, 0] + ANSWERS[:, 1]], dim=1)  # (Y, T)
RIGHT, WRONG = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])
SHARE = (ANSWERS == RIGHT).double().mean(dim=1)  # (Y,)
SIGN = torch.tensor([1.0, -1.0]).double().repeat_interleave(V**T)  # (Y,)
MASK = torch.ones(len(ANSWERS), T).double()
TEMPERATURE, LUCK, SEEDS = 0.7, 0.5, range(20)
FORMS = {name: tyro.cli(Config, args=shlex.split(f"--old-policy rollout {words}")).grpo
         for name, words in cells.FORMS.items()}


def first_policy(seed: int) -> Tensor:
    """Logits (S, V): the wrong word is the likeliest of each state, the right one the second."""
    logits = 0.5 * torch.randn(S, V, generator=torch.Generator().manual_seed(seed)).double()
    position = torch.tensor([0] + [1] * V + [2] * V**2)
    logits[torch.arange(S), WRONG[position]] += 2.0
    logits[torch.arange(S), RIGHT[position]] += 1.3
    return logits


class Backend(NamedTuple):
    """What samples, and what is said of it: log-probabilities (S, V), and the trainer's divisor."""

    drawn: Tensor
    reported: Tensor
    temperature: float = TEMPERATURE  # of the trainer


def at(logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    return (logits / temperature).log_softmax(dim=1)


def honest(logits: Tensor) -> Backend:
    """A sampler with other logits that reports its own values."""
    return Backend(at(logits), at(logits))


WHOLE = torch.zeros(S, 1)  # the states of the answers that begin with the wrong word
WHOLE[STATES[ANSWERS[:, 0] == WRONG[0], 1:]] = 1
Kind = Callable[[Tensor, Tensor, float], Backend]  # of logits and noise, (S, V), and a size
KINDS: dict[str, Kind] = {
    "rounding": lambda z, noise, size: honest(z + size * noise),
    "whole answers": lambda z, noise, size: honest(z + size * noise * WHOLE),
    "stale policy": lambda z, noise, size: honest(z - size * true_gradient(z)),
    "raw values": lambda z, _, size: Backend(at(z), at(z, TEMPERATURE * (1 + size))),
    "raw on both sides": lambda z, _, size: Backend(
        at(z), at(z, TEMPERATURE * (1 + size)), TEMPERATURE * (1 + size)),
}  # fmt: skip


def of_answers(table: Tensor) -> Tensor:
    """(S, V) -> (Y, T): the values of the words of each answer."""
    return table[STATES, ANSWERS]


def chances(logprobs: Tensor) -> Tensor:
    """(S, V) -> (Y,): the probability of each answer, half of it with luck."""
    return of_answers(logprobs).sum(dim=1).exp() / 2


def nats(logits: Tensor, backend: Backend) -> float:
    """The mean |stated - reported| of the words that are drawn."""
    apart = of_answers(at(logits) - backend.reported).abs()  # (Y, T)
    return (chances(backend.drawn) @ apart.mean(dim=1)).item()


def setting(kind: Kind, wanted: float, seed: int) -> tuple[Tensor, Tensor, float]:
    """Logits, noise, and the size at which the mismatch is `wanted` nats, by bisection."""
    logits, low, high = first_policy(seed), 0.0, 1e-3
    noise = torch.randn(S, V, generator=torch.Generator().manual_seed(1000 + seed)).double()
    while nats(logits, kind(logits, noise, high)) < wanted:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        below = nats(logits, kind(logits, noise, middle)) < wanted
        low, high = (middle, high) if below else (low, middle)
    return logits, noise, high


def true_gradient(logits: Tensor) -> Tensor:
    """Of the expected reward of the stated policy: (S, V)."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(chances(at(logits)) @ SHARE, logits)[0]


def gradient(logits: Tensor, old_logits: Tensor, backend: Backend, form: GrpoConfig,
             luck: float) -> Tensor:
    """The expected gradient: (S, V)."""
    logits = logits.detach().requires_grad_()
    policy, chance = at(logits, backend.temperature), chances(backend.drawn)
    rewards = SIGN if luck == inf else SHARE + luck * SIGN  # (Y,)
    centred = rewards - chance @ rewards
    advantages = (centred / (chance @ centred**2).sqrt().clamp(min=1e-4))[:, None]  # (Y, 1)
    logprobs, behavior = of_answers(policy), of_answers(backend.reported)  # (Y, T)
    old = of_answers(at(old_logits, backend.temperature))  # (Y, T)
    correction = correct(old, behavior, MASK, form.tis, form.tis_cap, form.rejection)
    denominator = behavior if form.old_policy == "rollout" else old
    loss, _ = OBJECTIVES["grpo"].surrogate(logprobs, denominator, advantages, MASK, form.clip)
    gain = -correction.weights * loss  # (Y, T)
    return torch.autograd.grad(chance @ gain.sum(dim=1), logits)[0]


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


def direction(kind: Kind, form: GrpoConfig, wanted: float, luck: float, seed: int) -> tuple:
    """The cosine with the gradient of three policies at parity with this luck."""
    logits, noise, size = setting(kind, wanted, seed)
    ours = gradient(logits, logits, kind(logits, noise, size), form, luck)
    right = gradient(logits, logits, honest(logits), FORMS["three"], luck)
    return (cosine(ours, right),)


def force(kind: Kind, form: GrpoConfig, wanted: float, luck: float, seed: int) -> tuple:
    """With infinite luck: cosine with the descent of KL(policy || reported), and norm."""
    logits, noise, size = setting(kind, wanted, seed)
    backend = kind(logits, noise, size)
    ours = gradient(logits, logits, backend, form, luck)
    moved = logits.clone().requires_grad_()
    distance = chances(at(moved)) @ of_answers(at(moved) - backend.reported).sum(dim=1)
    away, = torch.autograd.grad(distance, moved)
    return cosine(ours, -away), ours.norm().item()


def outcome(kind: Kind, form: GrpoConfig, wanted: float, luck: float, seed: int, renewed=False):
    """Expected reward and entropy (nats a token) after 100 batches of two steps of Adam each.

    The sampler follows. Its error grows with the logits and, unless `renewed`, keeps its direction.
    """
    logits, noise, size = setting(kind, wanted, seed)
    first_scale, generator = logits.std(), torch.Generator().manual_seed(2000 + seed)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(100):
        old = logits.clone()
        if renewed:
            noise = torch.randn(S, V, generator=generator).double()
        backend = kind(old, noise * old.std() / first_scale, size)
        for _ in range(2):
            logits.grad = -gradient(logits, old, backend, form, luck)
            optimizer.step()
    chance = chances(at(logits))
    return (chance @ SHARE).item(), -(chance @ of_answers(at(logits)).mean(dim=1)).item()


def table(measure: Callable[..., tuple], wanted: float, luck: float) -> str:
    rows = [["mismatch", *FORMS]]
    for name, kind in KINDS.items():
        rows.append([name])
        for form in FORMS.values():
            seeds = [measure(kind, form, wanted, luck, seed) for seed in SEEDS]
            rows[-1].append(", ".join(f"{mean(each):.2f}" for each in zip(*seeds, strict=True)))
    return markdown(rows)


MEASURES = {
    "cosine": (direction, 0.0), "the same with luck": (direction, LUCK),
    "of luck alone: cosine with the way to the reported values, norm": (force, inf),
    "with luck: reward, entropy after 100 batches": (outcome, LUCK),
    "the same with an error drawn anew": (partial(outcome, renewed=True), LUCK),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for title, (measure, luck) in MEASURES.items():
        for wanted in (0.03, 0.13, 0.3):
            print(f"{wanted} nats, {title}\n\n{table(measure, wanted, luck)}\n", flush=True)


if __name__ == "__main__":
    main()
