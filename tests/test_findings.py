"""Each figure of the README's findings is computed again from its record. docs/records/claims.json says which it is."""

import json
import re
from statistics import fmean

import pytest
from helpers import ROOT

from lab.study import RECORDS, by_seed, paired

CLAIMS = json.loads((RECORDS / "claims.json").read_text())  # by page: [text, "RECORD CELL METRIC [REFERENCE]"]
# Numbers that are no figures.
NAMES = r"\b([vV][01]('s)?|0\.(8\.5|18\.1)|0\.1 million|b?float\d\d|fp32|SmolLM2|seeds 10 to 19)\b|95 %"


def words(text: str) -> str:
    return " ".join(text.split())


def cells(record: str) -> dict:
    return json.loads((RECORDS / f"{record}.json").read_text())["cells"]


def computed(text: str, source: str) -> str:
    """The text with the statistics of its source, written as the pages write numbers."""
    record, cell, metric, *reference = source.split()
    ours = by_seed(cells(record)[cell], metric)
    theirs = {}
    if reference:  # CELL, or RECORD:CELL
        other, _, base = reference[0].rpartition(":")
        theirs = by_seed(cells(other or record)[base], metric)
    common = ours.keys() & theirs.keys()
    difference, half = paired(ours, theirs)
    values = list(ours.values())
    text = text.format(*values, mean=fmean(values), min=min(values), max=max(values), count=len(values),
                       difference=difference, half=half, lower=sum(ours[seed] < theirs[seed] for seed in common),
                       apart=fmean([abs(ours[seed] - theirs[seed]) for seed in common] or [0]))
    text = re.sub(r"(e[+-])0", r"\1", text)
    return re.sub(r"(?<!e)-(?=\d)", "\u2212", text)


def without_claims(page: str) -> str:
    """The page without its claims, each of which must be there, in their order."""
    kept, rest = [], words((ROOT / page).read_text())
    for text, source in CLAIMS[page]:
        claim = words(computed(text, source))
        before, found, rest = rest.partition(claim)
        assert found, f"{claim} ({source})"
        kept.append(before)
    return " ".join([*kept, rest])


@pytest.mark.parametrize("page", CLAIMS)
def test_each_claim_is_what_its_record_says(page):
    without_claims(page)


def test_each_number_of_the_readmes_findings_has_a_record():
    parts = re.findall(r"\*\*One switch.*?## Two|## Findings.*?## Your", without_claims("README.md"))
    assert len(parts) == 2
    assert re.findall(r"\S*\d\S*", re.sub(NAMES, "", " ".join(parts))) == []
