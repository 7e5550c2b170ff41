"""lab/gradients.py against one answer at a time, finite differences and closed forms."""

import math
import re
from statistics import fmean

import pytest
import torch
from helpers import ROOT, SHIFT

from lab import gradients, pictures
from lab.gradients import ANSWERS, FORMS, KINDS, S, T, V, at, chances, direction, first_policy, gradient, honest


def test_the_true_gradient_is_that_of_finite_differences():
    logits, ours = first_policy(0), gradients.true_gradient(first_policy(0))
    right = (torch.tensor([0, 1, 2]) == ANSWERS).double().sum(dim=1) / T
    for state, word in [(0, 0), (0, 5), (6, 6), (3, 2), (40, 2)]:
        ends = []
        for step in (1e-5, -1e-5):
            moved = logits.clone()
            moved[state, word] += step
            ends.append(chances(at(moved)) @ right)
        assert ours[state, word].item() == pytest.approx(((ends[0] - ends[1]) / 2e-5).item(), abs=1e-9)


@pytest.mark.parametrize("kind", ["rounding", "raw values", "raw on both sides"])
@pytest.mark.parametrize("form, bounds", [("two", (0.8, 1.2)), ("two-upper", (0, 1.2)), ("two-wide", (0, 1e9))])
def test_the_expected_gradient_is_that_of_all_answers_taken_one_at_a_time(kind, form, bounds):
    logits, noise, size = gradients.setting(KINDS[kind], 0.2, 1)
    backend = KINDS[kind](logits, noise, size)
    policy, drawn = (logits / backend.temperature).softmax(dim=1), backend.drawn.exp()
    answers = [[(0, a), (1 + a, b), (9 + 8 * a + b, c)] for a, b, c in ANSWERS.tolist()]  # (state, word) of each token
    weights = torch.tensor([math.prod(drawn[token].item() for token in answer) / 2 for answer in answers]).double()
    rewards = (torch.tensor([0, 1, 2]) == ANSWERS).double().mean(dim=1)
    rewards += torch.tensor([0.5, -0.5]).double().repeat_interleave(V**T)  # luck
    centred = rewards - weights @ rewards
    advantages = centred / (weights @ centred**2).sqrt()
    expected = torch.zeros(S, V).double()
    for answer, weight, advantage in zip(answers, weights, advantages, strict=True):
        for state, word in answer:
            ratio = policy[state, word] / backend.reported[state, word].exp()
            if ratio < bounds[1] if advantage > 0 else ratio > bounds[0]:
                one = torch.eye(V).double()[word]
                expected[state] += weight * ratio * advantage * (one - policy[state]) / backend.temperature
    ours = gradient(logits, logits, backend, FORMS[form], 0.5)
    torch.testing.assert_close(ours, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("luck", [0.0, 0.5])
def test_at_parity_each_form_has_the_direction_of_the_true_gradient(luck):
    logits = first_policy(3)
    right = gradients.true_gradient(logits).flatten()
    for form in FORMS.values():
        ours = gradient(logits, logits, honest(logits), form, luck).flatten()
        assert torch.cosine_similarity(ours, right, dim=0) > 1 - 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_mismatch_that_was_asked_for(kind):
    logits, noise, size = gradients.setting(KINDS[kind], 0.13, 2)
    assert gradients.nats(logits, KINDS[kind](logits, noise, size)) == pytest.approx(0.13, rel=1e-6)


def test_luck_alone_moves_the_policy_only_with_a_clip_and_then_towards_the_reported_values():
    """A small step along it lowers KL(policy || reported)."""
    for kind in (KINDS["rounding"], KINDS["raw values"]):
        logits, noise, size = gradients.setting(kind, 0.13, 1)
        backend = kind(logits, noise, size)
        for name in ("two", "two-wide", "three"):
            ours = gradient(logits, logits, backend, FORMS[name], math.inf)
            assert (ours.norm() > 1e-3) == (name == "two")
        cosine, _ = gradients.force(kind, FORMS["two"], 0.13, math.inf, 1)
        assert cosine > 0.6
        moved = logits + 1e-4 * gradient(logits, logits, backend, FORMS["two"], math.inf)
        before, after = (chances(at(each)) @ gradients.of_answers(at(each) - backend.reported).sum(dim=1)
                         for each in (logits, moved))  # fmt: skip
        assert after < before


def test_an_error_that_is_drawn_anew_does_not_accumulate():
    kept, renewed = (gradients.outcome(KINDS["rounding"], FORMS["two"], 0.3, 0.5, 1, each)[0] for each in (False, True))
    assert kept < 0.6 < 0.9 < renewed


def test_the_page_has_the_records_rows_and_the_gradients_cosines():
    page = (ROOT / "docs/dose.md").read_text()
    rows = [line for line in page.splitlines() if re.search(r"\d\.\d\d/\d\.\d\d", line) and line.count("|") == 11]
    assert len(rows) == 8
    cells = pictures.read_cells(ROOT / "docs/records/dose.json")
    assert not set(rows) - set(pictures.dose_table(cells).splitlines())
    kinds = [name for name in KINDS if name != "raw on both sides"]
    if SHIFT:  # the page has the policies of the seeds 0 to 19
        return
    for kind, name, nats in [*((kind, kind, 0.13) for kind in kinds), ("raw values", "raw values at 0.3 nats", 0.3)]:
        found = re.search(rf"\n\| (?:a )?{name} \| (\S+) \| (\S+) \| (\S+) \|", page)
        for text, form, luck in zip(found.groups(), ("two", "two", "two-wide"), (0.0, 0.5, 0.5), strict=True):
            ours = fmean(direction(KINDS[kind], FORMS[form], nats, luck, seed)[0] for seed in gradients.SEEDS)
            assert float(text.replace("\u2212", "-")) == pytest.approx(ours, abs=0.006)
