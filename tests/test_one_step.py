"""docs/one-step.md and `python -m examples.one_step`: every number follows from the others by hand."""

import math
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

import pytest
from helpers import ROOT, ROUNDING


def tables_of_the_page() -> list[list[list[str]]]:
    lines = (ROOT / "docs" / "one-step.md").read_text().splitlines()
    tables = [list(group) for is_table, group in groupby(lines, lambda line: line.startswith("|")) if is_table]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]] for table in tables]


def check(tables: list) -> None:
    """A reader's arithmetic on figures that are rounded to three digits."""
    responses, *of_tokens, summary = tables
    advantages, lengths = [], []
    for group in (responses[:4], responses[4:]):
        rewards = [float(reward) for _, _, reward, _ in group]
        advantages += [(reward - fmean(rewards)) / (stdev(rewards) + 1e-4) for reward in rewards]
        lengths += [sum(len(response) + 1 for _, response, *_ in group)]  # with the end of the sequence
    assert [float(row[3]) for row in responses] == pytest.approx(advantages, rel=0.02, abs=0.01)
    assert len(of_tokens) == len(summary) == 5
    for tokens, (_, mismatch, largest, *_) in zip(of_tokens, summary, strict=True):
        for _, behavior, old, now, difference, ratio, advantage, weight, clipped in tokens:
            assert float(difference) == pytest.approx(float(old) - float(behavior), abs=0.01 * abs(float(old)) + 1e-5)
            assert float(ratio) == pytest.approx(math.exp(float(now) - float(behavior)), rel=0.02)
            signed = math.copysign(1, float(advantage)) * (float(ratio) - 1)
            if abs(signed - 0.2) > 0.01:  # not at the bound
                assert str(clipped) == str(float(advantage) != 0 and signed > 0.2)
            assert abs(float(difference)) <= float(largest) * 1.01
            assert 0 < float(weight) <= 1 / 8
        assert float(mismatch) <= float(largest)
    parity, raw, stale, *_ = (float(mismatch) for _, mismatch, *_ in summary)
    assert parity < ROUNDING < 10 * ROUNDING < min(raw, stale)
    weights = [float(row[7]) for row in of_tokens[0]]  # of parity's two rows, one in each minibatch
    assert {round(1 / weight) for weight in weights} == set(lengths)


def test_the_figures_of_the_page_follow_from_each_other():
    check(tables_of_the_page())


@pytest.mark.engine
def test_the_command_computes_the_tables_of_the_page(tmp_path, monkeypatch):
    """The figures depend on the machine that taught the model; the arithmetic does not."""
    from examples.one_step import tables
    from examples.toys import write_page

    monkeypatch.chdir(tmp_path)
    write_page(Path("runs/page"))
    computed = tables()
    check(computed)
    shapes = [[len(row) for row in table] for table in (*tables_of_the_page(), *computed)]
    assert shapes[: len(computed)] == shapes[len(computed) :]
