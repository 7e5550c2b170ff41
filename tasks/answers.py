"""When two answers are equal: numbers by value, letters of a choice, all others by math-verify.

Tags, bold type, dollar signs, a final full stop and a unit belong to writing, not to the answer. A
formula is compared as a whole: its last number is no answer.
"""

import re
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

from report.errors import stage
from tasks import Problem
from tasks.choices import chosen, last_match, letter
from tasks.task_file import TaskFile

GLUED = r"(?:[ckm]m|kg|m[gl]|mph|min)(?![a-zA-Z])"  # units without a space: 5cm
TIMES_TEN = r"\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\^"
# The last digits of a text if they are a plain number, not the 2 of 3/2, 10^-2, 3,2, 3:2, 5-2, x_2,
# and not the 000 of 5 000. Its first group is a sign, in "-$5" and in "- 5".
NUMBER = rf"""(?x:(?<![a-zA-Z\d_.,/^√%)÷\u2044\]])(?<![/^}}_]{{)(?<!qrt{{)
    (?<!\d[:\u00a0\u2009\u202f])(?<!(?<!\d\d\d)\d\ (?=\d{{3}}(?!\d)))
    (?<![/^][-+\u2212$\ ])(?<![\w.%)][-+\u2212\u2013])
    ((?:(?:[-+\u2212] | (?<==)\u2013 | (?<==\ )\u2013)(?:(?<!nswer\ -)\s)?)?\\?[$€£]?)
    (?:(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)
    (?:[eE][-+\u2212]?\d{{1,3}}|{TIMES_TEN}\{{?[-+]?\d{{1,3}}\}}?)?
    (?!\s?[½¼¾]|(?!{GLUED})[a-zA-Z]|[\d_²³¹⁰-⁹/^÷\u2044])(?=\D*\Z))"""
VARIABLE = r"(?<![a-zA-Z\\])(?:[b-zB-HJ-Z]|pi)(?![a-zA-Z])"
OPERATOR = r"[-+\u2212*/^\u00d7·÷<>≤≥]"
COMMAND = r"""\\(?:(?:arc)?(?:sin|cos|tan)|log|ln|exp|sqrt|[dt]?frac|binom|cdot|times|div|pm|mp|pi
    |in|[bp]?mod|[gl]eq?(?:slant)?|neq?|[gl]t|cup|cap|l?dots)(?![a-zA-Z])"""
# 2x, x + 1, x^2, - x, \sqrt{x} or \frac{x}{2} left of "=", not f(2), x_1, 6 x 7 or 3 m
UNSOLVED = rf"""(?x:(?:\d(?:\ ?(?!\ [mgshlL]){VARIABLE} | [a-z](?![a-z]))(?!\s*[$(\d])
    | {VARIABLE}\s*(?:[-+\u2212*/!²³] | \^(?!\{{-1) | \}}\{{\d)
    | (?:[-+\u2212*/] | \\sqrt\{{?)\s*{VARIABLE})
    (?:[^a-zA-Z=\n\\,;→⇒] | {VARIABLE} | \\(?:[dt]?frac|cdot|times|left|right)\b)*+=)"""
# In front of a number, in its line, these show that the number is a part.
IN_FRONT = rf"""(?x)(?:
    (?:[\d)\]}}%!²³π∞] | \d\ ?{GLUED} | \\infty | {VARIABLE}
      | (?<![a-zA-Z])[aAI](?=\s*{OPERATOR}))\s*
    (?:{OPERATOR}+ | [±,;≠] | \bx\b | (?<=\s): | ,?\s*\b(?:or|and)\b)\s*  # 5 - 3 or (5, 3)
  | (?<![\w)^])([a-zA-Z])\s*=[^=]*(?:, | \bor\b | \band\b)\s*\1\s*=\s*  # x = 5 or x = 3
  | {COMMAND}\s*\{{? | [a-zA-Z0-9)}}]\(\s* | ±\s*  # \log 3 or f(3)
  | (?i:\b(?:mod|plus|minus|negative|not) | n't)(?:\ equal)?(?:\ to)?\s*  # 5 mod 3, not 3
  | {UNSOLVED}\s* )[-+\u2212]?[\s€£\\]*\Z"""
# Behind a number: 3 \pi, 3{}/{}, 3 n but not 3 m, 3 + n, 3 - \pi
BEHIND = rf"""(?x)[\s$}}]*(?:{COMMAND} | \\end\{{(?:array|\w?matrix|cases) | [π√∞±] | \}}?\s*\{{
  | (?:{OPERATOR}\s*)?{VARIABLE}(?<!\s[gmshlLCFKVWJN]) | {OPERATOR}\s*\\[a-z])"""
NAME = r"\A(?!.*\\sqrt)[\\a-zA-Z{} _'()|]+=(?!=)"  # x = or AB = in a box
# A unit such as dollars, cm^2, \text{ miles per hour} or ° at the end; no factor such as million.
WORDS = r"""
    (?![^}]{0,40}(?:[mbrz]illion|thousand|hundred|dozen|hal[fv]|third|quarter|percent|less
    |plus|minus|(?<!mo)[fhnrx]ths))(?:(?:square|cubic|sq\.?)\ )?(?:[a-zA-Z]{2,20}s|[ckm]m|kg
    |m[gl]|ft|feet|inch|mph|men|women|people|children|dollar|cent|degree|unit|mile|hour|day
    |year|min|hr|sec|mi|yd|lb|oz|gal|in|[kM]?(?:Hz|W|J|V|Pa|N|eV)|rad|mol)
    (?:(?:/|\ per\ |\ of\ )[a-z]{1,20})?"""
IN_BRACES = rf"""\\(?:text|mbox|mathrm)\s?\{{[\s~]*(?:(?![ie]\}})[a-zA-Z](?:/[a-z])? | {WORDS})
    \.?\s?\}}(?:\^\{{?\d\}}?|[²³])?"""
UNIT = rf"""(?x)(?<=[\w}})!])(?:° | (?:\s|~|\\[\ ,;:!])*+(?:\\degree
  | {IN_BRACES}(?:\s*(?:/|\\cdot)\s*{IN_BRACES})* | (?<=[\s~,;:!]){WORDS} | (?<=\d){GLUED}))
    (?:\^\{{?\d\}}?|[²³])?[\s.]*\Z"""
# A unit, and its power
SQUARE = (r"((?:\b|\d)[ckm]m|\bft|\bunits|\\(?:text|mathrm)\{[^{}\d]*?(?:[a-z]{2}|\bm)\})"
          r"\^\{?[23]\}?")
# The last box that is closed: \boxed{...}, \fbox{...} or \boxed 5, with braces in braces.
INSIDE = r"(?:\\.|[^\\{}])*+"
for _ in range(8):
    INSIDE = rf"(?:\\.|[^\\{{}}]|\{{{INSIDE}\}})*+"
BOX = rf"(?s)\\(?:boxed|fbox)(?:\s*\{{(?!\s*\}})({INSIDE})\}}|\s+(-?[\w.,/]*\w))"
TAG = r"</?(?i:(?:final_?)?answer|b|strong|em|i|p)>"
TAGGED = rf"(?is)<(?:final_?)?answer>((?:(?!{TAG}).)*)</(?:final_?)?answer>"
WRITING = rf"\*\*(?:(?<![\w)]\*\*)|(?![a-zA-Z\d(\\]))|{TAG}"  # ** between is a power
DOLLARS = r"(?<!\\)\$([^$]*)\$|\\[()[\]]"
# A formula in a line of text: all between two words.
FORMULA = r"""(?x)(?:
    \\(?:begin|end|text|mathrm|mbox|operatorname)\s*\{[^{}\n]*\} | \\[a-zA-Z]+ | \\[^\s\w]
  | (?<![a-zA-Z\\'])(?![aAI]\ (?:[\d$\\]|[a-z]{2}))
    (?:[a-zA-Z]|or|and|not|pi|sqrt|sin|cos|tan|log|ln|exp)(?![a-zA-Z])
  | (?!(?<=[a-z]{2}\ )(?:[-=]>|→) | (?<=[a-z]{2}\ [-=])> | (?<!\d)\uff1a
      | [⇒⟹\u2600-\u27bf\U0001f000-\U0001ffff])
    [^\w\n\\\#] | [\d_²³π] | (?<=')t\b)++"""
# Other minus signs than - and U+2212; an en dash with a space behind it separates words.
MINUS = r"[\u2010\u2011\ufe63\uff0d]|\u2013(?=[\d.$€£]|\\[$])"
EMPTY_BOX = r"\\(?:boxed|fbox)\s*\{\s*\}"
MATH_ANSWERS = str(Path(__file__).with_name("math_answers.py"))


class Unreadable(ValueError):
    """A row has no question or no readable answer. The text says why."""


class Answers:
    """Rewards for problems that have an answer. The process of math-verify starts when an answer
    first needs it. A response is wrong if it takes the process longer than `limit_s` seconds.
    """

    def __init__(self, limit_s: float):
        self.limit_s, self._math_verify = limit_s, None

    def reward(self, problem: Problem, response: str) -> float:
        """1.0 if the response's last box, else its last <answer>, equals the answer; without both,
        if its last number, letter or formula does.

        Raises: Unreadable if no response can be compared with the answer; ValueError if math-verify
        is needed and cannot be imported.
        """
        gold, right_letter, number = forms(problem.answer)
        # What stands before an empty box is no answer.
        response = re.split(EMPTY_BOX, re.sub(MINUS, "-", response))[-1]
        box = bare(last_match(BOX, response))
        text = box or last_match(TAGGED, response) or response
        if right_letter:
            return float(right_letter == chosen(text))
        if "=" not in gold:
            box = re.sub(NAME, "", box)
        given = plain_number(box.rstrip(r"\%. ")) if box else last_number(text)
        if number is None or (given is None and text != response):
            tagged = bare(text) if text != response else ""
            return self._verify(gold, box or last_formula(text) or tagged)
        if "." in gold and re.search(r"\d\s*(?:\\?%|percent\b)\D*\Z", text):
            return float(given in (number, number * 100))
        return float(number == given)

    def same(self, one: str, other: str) -> bool:
        """Whether two answers of problems mean the same."""
        with suppress(ValueError):  # one of another task may be unreadable here
            return one == other or bool(
                self.reward(Problem("", one, ""), rf"\boxed{{{last_part(other)}}}"))
        return False

    def _verify(self, gold: str, given: str) -> float:
        if self._math_verify is None:
            with stage(f"the answer {gold!r:.40} is no plain number; starting math-verify"
                       " (pip install math-verify)"):
                self._math_verify = TaskFile(MATH_ANSWERS, 0, self.limit_s)
        problem, given = Problem("", gold, ""), given[:1001]  # no longer text is read
        if "=" not in gold and re.search(UNSOLVED + r"[^=]*\Z", given):
            given = ""
        for text in given, "":  # if both fail, it is the gold that cannot be read
            try:
                return self._math_verify.reward(problem, text)
            except ValueError as failed:
                error = failed
        raise Unreadable(f"its answer {gold!r:.40} is no number and no letter (other answers need"
                         f" --reward), and {error}")


@lru_cache(10_000)
def forms(answer: str) -> tuple[str, str, Decimal | None]:
    """What there is to compare with: all of it, its letter or "", its number or None."""
    if re.fullmatch(r"\$?[\d.,]+\s?\u2013\s?[\d.,]+\$?", last_part(answer)):
        raise Unreadable(f"its answer {answer!r:.40} is a range (which needs --reward)")
    gold = bare(last_part(re.sub(MINUS, "-", answer)))
    return gold, letter(gold), plain_number(gold)


def last_part(answer: str) -> str:
    """42 of GSM8K's "... #### 42", or of a solution that ends in a box."""
    return last_match(BOX, answer) or answer.rpartition("####")[2].strip()


def bare(text: str) -> str:
    """An answer without what belongs to writing."""
    text = re.sub(DOLLARS, r"\1", re.sub(WRITING, "", text)).strip("`*_\u3002 \n")
    return re.sub(UNIT, "", text).rstrip(". ")


def last_number(text: str) -> Decimal | None:
    """42 in "so x is 42."; None if the last digits of a text are something else, or a part."""
    text = re.sub(WRITING, "", text)
    if "^" in text:  # most texts have none, and the pattern takes a third of the time
        text = re.sub(SQUARE, r"\1", text)
    match = re.search(NUMBER, text)
    if match is None:
        return None
    in_front = text[: match.end(1)][-100:].rpartition("\n")[2].replace("$", "")
    if re.search(IN_FRONT, in_front) or re.match(BEHIND, text[match.end() :]):
        return None
    digits = re.sub(TIMES_TEN, "e", match[0])
    return Decimal(re.sub("[\u2212\u2013]", "-", re.sub(r"[\\$€£,{}\s]", "", digits)))


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is a plain number and nothing else."""
    return last_number(text) if re.fullmatch(rf"\s*{NUMBER}\s*", text) else None


def last_formula(text: str) -> str:
    """3/4 in "so x = 3/4 of it."; of a list such as "3/4 or 4/3" all."""
    text = re.sub(WRITING, "", text[-2000:].rpartition("</think>")[2]).rstrip(".\u3002 \n")
    for run in reversed(re.findall(FORMULA, text)):
        formula = re.split(r"(?<!\s)[.:;?!]\s+(?!\$*\Z|\\[])])", run)[-1].strip(" ,:;?!=≈“”")
        formula = formula.lstrip(") ").rstrip("( ")  # of "(so) 3/4 (see above)"
        if re.search(r"[\d\\$]|[a-z]\s*[-+*/^=_(]", formula):
            return bare(formula)
    return ""
