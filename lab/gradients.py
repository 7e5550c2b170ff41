"""The expected gradient of each form under a mismatch, without sampling noise.

    python -m lab.gradients        # prints the tables of docs/dose.md

A policy so small that all its answers can be enumerated: a table of logits, 8 words at each of the
73 beginnings of an answer of 3 words, in float64. An answer's reward is its share of right words,
and the policy prefers a wrong one. `luck` is added to it or taken from it, whatever the words: it
stands for the other tokens of a long answer, which decide most of the reward of each. The losses
are those of objectives.py. Two limits make it exact: a group is infinitely large, and so is a batch.

S = 73 states (beginnings), V = 8 words, T = 3 words in an answer, Y = 1,024 answers: each of the
512 with luck and without.
"""

from collections.abc import Callable
from statistics import fmean as mean
from typing import NamedTuple

import torch
from torch import Tensor

from objectives import NO_REJECTION, OBJECTIVES, REJECTIONS, Clip, Rejection, correct

V, T = 8, 3
ANSWERS = torch.cartesian_prod(*[torch.arange(V)] * T).repeat(2, 1)  # (Y, T)
STATES = torch.stack([torch.zeros(len(ANSWERS), dtype=torch.long), 1 + ANSWERS[:, 0],
                      1 + V + V * ANSWERS[:, 0] + ANSWERS[:, 1]], dim=1)  # (Y, T)
S = 1 + V + V**2
RIGHT, WRONG = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])
SHARE = (ANSWERS == RIGHT).double().mean(dim=1)  # (Y,)
SIGN = torch.tensor([1.0, -1.0]).double().repeat_interleave(V**T)  # (Y,)
TEMPERATURE, LUCK, SEEDS = 0.7, 0.5, range(10)


def first_policy(seed: int) -> Tensor:
    """Logits (S, V): the wrong word is the likeliest, the right one the second.

    Of some states it is nearly sure. It has the entropy of the ladder's first policy, and the same
    mismatch of raw values: 0.13 nats.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 0.5 * torch.randn(S, V, generator=generator).double()
    position = torch.tensor([0] + [1] * V + [2] * V**2)
    logits[torch.arange(S), WRONG[position]] += 2.0
    logits[torch.arange(S), RIGHT[position]] += 1.3
    return logits * 10 ** torch.rand(S, 1, generator=generator).double()


# ---------------------------------------------------------------------------------- mismatches
class Backend(NamedTuple):
    """What samples, and what is said of it: log-probabilities (S, V), and the trainer's divisor."""

    drawn: Tensor
    reported: Tensor
    temperature: float = TEMPERATURE  # of the trainer


# Of logits (S, V), noise (S, V) and a size. A sampler with other logits reports its own values.
Kind = Callable[[Tensor, Tensor, float], Backend]


def at(logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    return (logits / temperature).log_softmax(dim=1)


def sampler(logits: Tensor) -> Backend:
    return Backend(at(logits), at(logits))


def unlikely(logits: Tensor) -> Tensor:
    return at(logits).exp() < 0.1


WHOLE = torch.zeros(S, 1)  # the states of the answers that begin with the wrong word
WHOLE[STATES[ANSWERS[:, 0] == WRONG[0], 1:]] = 1
KINDS: dict[str, Kind] = {
    "rounding": lambda logits, noise, size: sampler(logits + size * noise),
    "unlikely words": lambda logits, noise, size: sampler(logits + size * noise * unlikely(logits)),
    "whole answers": lambda logits, noise, size: sampler(logits + size * noise * WHOLE),
    "stale policy": lambda logits, noise, size: sampler(logits - size * true_gradient(logits)),
    "raw values": lambda logits, noise, size: Backend(
        at(logits), at(logits, TEMPERATURE * (1 + size))),
    "raw on both sides": lambda logits, noise, size: Backend(
        at(logits), at(logits, TEMPERATURE * (1 + size)), TEMPERATURE * (1 + size)),
}  # fmt: skip


def of_answers(table: Tensor) -> Tensor:
    """(S, V) -> (Y, T): the values of the words of each answer."""
    return table[STATES, ANSWERS]


def chances(logprobs: Tensor) -> Tensor:
    """(S, V) -> (Y,): the probability of each answer, half of it with luck."""
    return of_answers(logprobs).sum(dim=1).exp() / 2


def nats(logits: Tensor, backend: Backend) -> float:
    """The mean |trainer - reported| of the words that are drawn, the right temperature in it."""
    difference = of_answers(at(logits) - backend.reported).abs().mean(dim=1)
    return (chances(backend.drawn) @ difference).item()


def size_of(kind: Kind, logits: Tensor, noise: Tensor, wanted: float) -> float:
    """The size at which the mismatch is `wanted` nats, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2 if low else high / 10
        if nats(logits, kind(logits, noise, middle)) < wanted:
            low = middle
        else:
            high = middle
    return high


# ---------------------------------------------------------------------------------- gradients
class Form(NamedTuple):
    old_policy: str = "recompute"
    tis: str = "off"
    rejection: Rejection = NO_REJECTION
    cap: float = 2.0
    clip: Clip = (0.2, 0.2)


FORMS = {
    "two": Form("rollout"), "two, upper clip": Form("rollout", clip=(1.0, 0.2)),
    "two, lower clip": Form("rollout", clip=(0.2, 1e6)),
    "two, no clip": Form("rollout", clip=(1.0, 1e6)), "three": Form(),
    "TIS": Form(tis="token"), "IcePop": Form("recompute", "token",
                                             REJECTIONS["token"]._replace(bounds=(0.5, 5.0)), 5.0),
    "sequence": Form(tis="sequence"),
    "MIS": Form(tis="sequence", rejection=REJECTIONS["sequence"]),
    "geometric": Form(rejection=REJECTIONS["geometric"]),
}  # fmt: skip


def advantages_of(chance: Tensor, luck: float) -> Tensor:
    """(R - mean) / std of the answers that are drawn: (Y,) -> (Y, 1)."""
    rewards = SHARE + luck * SIGN
    centred = rewards - chance @ rewards
    return (centred / (chance @ centred**2).sqrt().clamp(min=1e-4))[:, None]


def true_gradient(logits: Tensor) -> Tensor:
    """Of the expected reward of the policy that should be sampled: (S, V)."""
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(chances(at(logits)) @ SHARE, logits)[0]


def gradient(
    logits: Tensor, old_logits: Tensor, backend: Backend, form: Form, luck: float,
) -> tuple[Tensor, float]:
    """The mean (S, V) and the variance of one answer's gradient, summed over all logits."""
    chance = chances(backend.drawn)
    mask = torch.ones(len(ANSWERS), T).double()
    policy = at(logits, backend.temperature)  # (S, V)
    old, behavior = of_answers(at(old_logits, backend.temperature)), of_answers(backend.reported)
    correction = correct(old, behavior, mask, form.tis, form.cap, form.rejection)
    logprobs = of_answers(policy).requires_grad_()  # (Y, T)
    denominator = behavior if form.old_policy == "rollout" else old
    loss, _ = OBJECTIVES["grpo"].surrogate(
        logprobs, denominator, advantages_of(chance, luck), mask, form.clip)
    slopes = -torch.autograd.grad((correction.weights * loss).sum(), logprobs)[0]  # (Y, T)
    # Of a word's log-probability, by the logits of its state: (one - policy) / temperature.
    weights = torch.zeros(S, V).double()
    weights.index_put_((STATES, ANSWERS), chance[:, None] * slopes, accumulate=True)
    expected = (weights - weights.sum(dim=1, keepdim=True) * policy.exp()) / backend.temperature
    squares = 1 - 2 * of_answers(policy.exp()) + (policy.exp()**2).sum(dim=1)[STATES]  # (Y, T)
    second = (chance[:, None] * slopes**2 * squares).sum() / backend.temperature**2
    return expected, (second - (expected**2).sum()).item()


def setting(kind: Kind, wanted: float, seed: int) -> tuple[Tensor, Tensor, float]:
    logits = first_policy(seed)
    noise = torch.randn(S, V, generator=torch.Generator().manual_seed(1000 + seed)).double()
    return logits, noise, size_of(kind, logits, noise, wanted)


def direction(kind: Kind, form: Form, wanted: float, luck: float, seed: int) -> tuple[float, ...]:
    """Cosine, ratio of the norms and of the variances, against three policies at parity.

    Their expected gradient has the direction of `true_gradient`.
    """
    logits, noise, size = setting(kind, wanted, seed)
    ours, variance = gradient(logits, logits, kind(logits, noise, size), form, luck)
    right, usual = gradient(logits, logits, sampler(logits), Form(), luck)
    cosine = torch.cosine_similarity(ours.flatten(), right.flatten(), dim=0)
    return cosine.item(), (ours.norm() / right.norm()).item(), variance / usual


def outcome(kind: Kind, form: Form, wanted: float, luck: float, seed: int) -> tuple[float, ...]:
    """Expected reward and entropy (nats a token) after 100 batches of two steps of Adam each.

    The sampler follows: it gets the new logits, and its error grows with them.
    """
    logits, noise, size = setting(kind, wanted, seed)
    scale = logits.std()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(100):
        old = logits.clone()
        backend = kind(old, noise * old.std() / scale, size)
        for _ in range(2):
            logits.grad = -gradient(logits, old, backend, form, luck)[0]
            optimizer.step()
    chance = chances(at(logits))
    return (chance @ SHARE).item(), -(chance @ of_answers(at(logits)).mean(dim=1)).item()


def table(measure: Callable[..., tuple[float, ...]], wanted: float, luck: float) -> str:
    rows = [["mismatch", *FORMS], ["---"] * (1 + len(FORMS))]
    for name, kind in KINDS.items():
        means = [map(mean, zip(*(measure(kind, form, wanted, luck, seed) for seed in SEEDS),
                               strict=True)) for form in FORMS.values()]
        rows.append([name, *(", ".join(f"{each:.2f}" for each in figures) for figures in means)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    torch.set_num_threads(1)
    for measure, luck in ((direction, 0.0), (direction, LUCK), (outcome, LUCK)):
        for wanted in (0.03, 0.13, 0.3):
            print(f"{measure.__doc__.splitlines()[0]} {wanted} nats, luck {luck}\n\n"
                  f"{table(measure, wanted, luck)}\n", flush=True)


if __name__ == "__main__":
    main()
