"""Answers such as 1/2 or x^2 + 1, compared by math-verify. A task file without problems.

If math-verify needs longer than its limits, 5 s to read and 3 s to compare, a response is wrong.
"""

import logging
import re
from dataclasses import replace
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify

LATEX = LatexExtractionConfig().normalization_config
ALGEBRA = LatexExtractionConfig(normalization_config=replace(LATEX, units=False))  # 2t: no tonnes
COMMAND = (r"\A\s*\\(?:text|mbox|math)[a-z]*\s*\{[^}\d]*\}|\\(?:begin|end)\{[^}]*\}(?:\{[lcr]+\})?"
           r"|\\(?!\w?dots)[a-zA-Z]+")
# Letters in a row are a word, if they are not a product such as xy or abc.
PRODUCT = r"(?:[a-dk-np-t]?[w-z]{1,3}|[a-d]{2}|abc|mn|pqr?|rst?|and|or)(?![a-zA-Z])"
# math-verify reads only a part of these, or a product: "1 1/2", "1_000", "0x1F", "1.2.3", "1e-5".
MISREAD = (r"(?<!#_)\d(?:\s|~|\\[ ,;:!])+\d|\d_\d{3}|\b0[xX]|\.\d*\.|\d[eE][-+]?\d"
           r"|(?<![a-zA-Z])(?!" + PRODUCT + r")[a-zA-Z]{2}")
logging.disable()  # math-verify prints the responses that it cannot read in time


def reward(problem, response: str) -> float:
    """1.0 if the two answers are equal, else 0.0."""
    return equal(problem.answer, response)


@lru_cache(10_000)
def equal(answer: str, response: str) -> float:
    gold = read(answer)
    if not gold:
        raise ValueError("math-verify does not read all of it")
    given = read(response) or read(rf"\text{{{response}}}")  # even is \text{even}
    base, other = (re.findall(r"\d_\{?(\d+)", text) for text in (answer, response))
    if other and base != other:
        return 0.0
    return float(response.strip() == answer or verify(gold, given, timeout_seconds=3))


@lru_cache(10_000)
def read(text: str) -> list:
    """What math-verify reads in a box; nothing if that would be a part."""
    text = re.sub(r"(?<=\d)(?:\\[ ,;:!]|~)(?=\d{3}(?!\d))", "", text)  # 10\,000
    text = re.sub(r"(\d)[eE]([-+]?\d{1,3})(?!\d)", r"\1 \\times 10^{\2}", text)
    text = re.sub("[\u2212\u2013]", "-", text).replace("²", "^2").replace("½", r"\frac12")
    text = re.sub(r"√(\d+|\w)", r"\\sqrt{\1}", text)
    if len(text) > 1000 or re.search(MISREAD, re.sub(COMMAND, "#", text)):
        return []
    return parse(rf"\boxed{{{text}}}", [ALGEBRA], "no_fallback", "first_match")
