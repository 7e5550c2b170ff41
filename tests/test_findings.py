"""Each figure of the findings is computed again from its record. docs/records/claims.json says which it is."""

import json
import re
from functools import cache
from statistics import fmean, median

import pytest
from helpers import ROOT

from lab.study import RECORDS, by_seed, paired

# By page, in its order: [text, "RECORD CELL METRIC [REFERENCE]"], or [text, [RECORD, KEY, ...]]; a KEY that is a list
# is a slice.
CLAIMS = json.loads((RECORDS / "claims.json").read_text())
# Numbers that are no figures.
NAMES = r"\b([vV][01]('s)?|0\.(8\.5|18\.1)|0\.1 million|b?float\d\d|fp32|SmolLM2|seeds 10 to 19)\b|95%"


def words(text: str) -> str:
    return " ".join(text.split()).replace(" %", "%")


@cache
def read(record: str) -> dict:
    return json.loads((RECORDS / f"{record}.json").read_text())


def measured(source: str | list) -> tuple[dict, dict]:
    """The values of a claim and those of its reference, by seed."""
    if isinstance(source, list):
        values = [read(source[0])]
        for key in source[1:]:
            values = [each for value in values
                      for each in (value[slice(*key)] if isinstance(key, list) else [value[key]])]
        return dict(enumerate(values)), {}
    record, cell, metric, *reference = source.split()
    ours = by_seed(read(record)["cells"][cell], metric)
    if not reference:  # CELL, or RECORD:CELL
        return ours, {}
    other, _, base = reference[0].rpartition(":")
    return ours, by_seed(read(other or record)["cells"][base], metric)


def computed(text: str, source: str | list) -> str:
    """The text with the statistics of its source, written as the pages write numbers."""
    ours, theirs = measured(source)
    difference, half = paired(ours, theirs)
    common = ours.keys() & theirs.keys()
    values, apart = list(ours.values()), [abs(ours[seed] - theirs[seed]) for seed in common] or [0]
    mean = fmean(values)
    text = text.format(*values, mean=mean, median=median(values), min=min(values), max=max(values), count=len(values),
                       percent=100 * mean, rest=1 - mean, difference=difference, half=half, loss=-(difference or 0),
                       lower=sum(ours[seed] < theirs[seed] for seed in common), apart=fmean(apart),
                       furthest=max(apart), times=mean / fmean(theirs.values() or [1]))
    text = re.sub(r"(e[+-])0", r"\1", text)
    return re.sub(r"(?<!e)-(?=\d)", "\u2212", words(text))


@cache
def claims(page: str) -> list[str]:
    return [computed(*claim) for claim in CLAIMS[page]]


def parted(page: str, text: str) -> list[str]:
    """Text, claim, text, ..., text. A claim is the first of its form after the one before it, digit for digit."""
    parts = []
    for claim in claims(page):
        form = re.sub(r"\d", r"\\d", re.escape(claim))
        found = re.search(rf"(?<![\w.+\u2212]){form}(?![\w%]|\.\d)", text)
        assert found and found[0] == claim, f"{claim}, not {found and found[0]}"
        parts += [text[: found.start()], claim]
        text = text[found.end() :]
    return [*parts, text]


@pytest.mark.parametrize("page", CLAIMS)
def test_each_claim_is_what_its_record_says(page):
    assert parted(page, words((ROOT / page).read_text()))


@pytest.mark.parametrize(("page", "form"), [
    ("README.md", r"## Findings.*?## Where"), ("docs/findings.md", r"\| finding .*?## Records")])
def test_each_number_of_the_findings_has_a_record(page, form):
    text = " ".join(parted(page, words((ROOT / page).read_text()))[::2])
    findings, = re.findall(form, text)
    assert re.findall(r"\S*\d\S*", re.sub(NAMES, "", findings)) == []


def test_the_table_of_the_doses_has_the_means_of_its_record():
    """Training reward / trainer alone, by form; nothing where a form was not run."""
    cells = read("dose")["cells"]
    first_part = (ROOT / "docs/dose.md").read_text().split("## Why")[0]
    rows = re.findall(r"(?m)^\| [\w.-]+ \|.*\d/\d.*\|$", first_part)
    assert len(rows) == 7
    for row in rows:
        kind, nats, *found = [each.strip() for each in row.strip("|").split("|")]
        assert nats == f"{median(cells[f'two.{kind}']['metrics']['mismatch_first']):.2g}"
        forms = ["two", "two-wide", "three", "tis-token", "icepop", "tis-sequence", "mis"]
        for form, text in zip(forms, found, strict=True):
            metrics = cells.get(f"{form}.{kind}", {"metrics": {}})["metrics"]
            means = [f"{fmean(metrics[each]):.2f}" for each in ("reward", "eval_trainer_alone") if metrics]
            assert text == "/".join(means)
