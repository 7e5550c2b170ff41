"""Each figure of the findings is computed again from its record. docs/records/claims.json says which it is."""

import re
from functools import cache, reduce
from operator import getitem
from statistics import fmean, median

from helpers import ROOT, parametrize, read_json

from lab.study import RECORDS, by_seed, paired

# By page, in its order: [text, "RECORD CELL METRIC [REFERENCE]"], or [text, [RECORD, KEY, ...]].
CLAIMS = read_json(RECORDS / "claims.json")
# Numbers that are no figures: names, sizes, links, predictions in brackets, and what an example of the log repeats.
NAMES = r"""(?x)\b([vV][01]('s)?|0\.(8\.5|18\.1)|0\.[16]\ million|0\.5(\ billion|B)|bf16|b?float\d\d|fp32(_head)?
    |SmolLM2(-135M)?|Qwen2\.5|H\d00|gpu-h100|(TRL|verl|vLLM|unsloth|prime-rl|OpenRLHF|async)\ [\da-f.]+[\da-f]
    |Python\ \d\S+\d|November\ 2026|24\ GiB|3B|\w+_HEAD=1|temperature\ (is\ not\ )?(1|0\.7)|seeds?\ (\d|10\ to\ 19)
    |\d+[ -]bits?|\d+,\d+\ tokens|20\ steps|2e-5|top-p\ 0\.9|step\ \d+/60|agree\ 1\.000)\b
    |mismatch\ 1\.6e-08|backend\ 0\.0%|"[\d+=]+"|\]\(\S+\)|\[(below\ )?[\d.]+\]|95%"""


def words(text):
    return " ".join(text.split()).replace(" %", "%")


@cache
def read(record):
    return read_json(RECORDS / f"{record}.json")


def measured(source):
    """The values of a claim and those of its reference, by seed."""
    if isinstance(source, list):
        record, *keys = source
        return {0: reduce(getitem, keys, read(record))}, {}
    record, cell, metric, *reference = source.split()
    other, _, base = "".join(reference).rpartition(":")  # CELL, or RECORD:CELL
    theirs = by_seed(read(other or record)["cells"][base], metric) if base else {}
    return by_seed(read(record)["cells"][cell], metric), theirs


def computed(text, source):
    """The text with the statistics of its source, written as the pages write numbers."""
    ours, theirs = measured(source)
    difference, half = paired(ours, theirs)
    values, apart = list(ours.values()), [abs(ours[seed] - theirs[seed]) for seed in ours.keys() & theirs.keys()]
    mean = fmean(values)
    text = text.format(*values, mean=mean, median=median(values), min=min(values), max=max(values), percent=100 * mean,
                       rest=1 - mean, difference=difference, half=half, loss=-(difference or 0),
                       apart=fmean(apart or [0]), times=mean / fmean(theirs.values() or [1]))
    text = re.sub(r"(e[+-])0", r"\1", text)
    return re.sub(r"(?<!e)-(?=\d)", "\u2212", words(text))


def parted(page):
    """Text, claim, text, ..., text. A claim is the first of its form after the one before it, digit for digit."""
    parts, text = [], words((ROOT / page).read_text())
    for claim in (computed(*each) for each in CLAIMS[page]):
        form = re.sub(r"\d", r"\\d", re.escape(claim))
        found = re.search(rf"(?<![\w.+\u2212]){form}(?![\w%]|\.\d)", text)
        assert found and found[0] == claim, f"{claim}, not {found and found[0]}"
        parts += [text[: found.start()], claim]
        text = text[found.end() :]
    return [*parts, text]


@parametrize("page", CLAIMS)
def test_each_claim_is_what_its_record_says(page):
    assert parted(page)


@parametrize(("page", "form"), [
    ("README.md", r"^.*?## Where to read"), ("docs/findings.md", r"\| finding .*?## Records"),
    ("docs/run.md", r"\*\*Measured with.*?\*\*A GPU has")])
def test_each_number_has_a_record(page, form):
    findings, = re.findall(form, " ".join(parted(page)[::2]))
    assert re.findall(r"\S*\d\S*", re.sub(NAMES, "", findings)) == []
