"""When two answers are equal: numbers by value, letters of a choice, all others by math-verify."""

import re
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

from extras.task_file import TaskFile
from records import stage
from tasks import Problem

TIMES_TEN = r"\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\^"
# The last digits of a text if they are a plain number, not the 2 of 3/2, 10^-2, 3,2, 3:2, 5-2, x_2,
# and not the 000 of 5 000.
NUMBER = (r"(?<![a-zA-Z\d_.,/^√%)÷\u2044\]])(?<![/^}_]{)(?<!qrt{)(?<!\d[:\u00a0\u2009\u202f])"
          r"(?<!(?<!\d\d\d)\d (?=\d{3}(?!\d)))(?<![/^][-+\u2212$ ])(?<![\w.%)][-+\u2212\u2013])"
          r"[-+\u2212]?\\?[$€£]?"  # "-$5" is -5
          r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
          r"(?:[eE][-+\u2212]?\d{1,3}|" + TIMES_TEN + r"\{?[-+]?\d{1,3}\}?)?"
          r"(?!\s?[½¼¾]|[\d_a-zA-Z²³¹⁰-⁹/^÷\u2044])(?=\D*\Z)")
# A unit such as dollars, cm^2, \text{ miles per hour} or ° at the end; no factor such as million.
WORDS = (r"(?![^}]{0,40}(?:[mbrz]illion|thousand|hundred|dozen|hal[fv]|third|quarter|percent|less"
         r"|plus|minus|(?<!mo)[fhnrx]ths))(?:(?:square|cubic|sq\.?) )?(?:[a-zA-Z]{2,20}s|[ckm]m|kg"
         r"|m[gl]|ft|feet|inch|mph|men|women|people|children|dollar|cent|degree|unit|mile|hour|day"
         r"|year)(?:(?:/| per | of )[a-z]{1,20})?")
UNIT = (r"(?<=[\w})!])(?:°|(?:\s|~|\\[ ,;:!])*+(?:\\degree|\\(?:text|mbox|mathrm)\s?\{\s?"
        r"(?:[a-zA-Z](?:/[a-z])?|" + WORDS + r")\.?\s?\}|(?<=[\s~,;:!])" + WORDS + r"))"
        r"(?:\^\{?\d\}?|[²³])?[\s.]*\Z")
# The last box that is closed: \boxed{...}, \fbox{...} or \boxed 5, with braces in braces.
INSIDE = r"(?:\\.|[^\\{}])*+"
for _ in range(8):
    INSIDE = rf"(?:\\.|[^\\{{}}]|\{{{INSIDE}\}})*+"
BOX = rf"(?s)\\(?:boxed|fbox)(?:\s*\{{(?!\s*\}})({INSIDE})\}}|\s+(-?[\w.,/]*\w))"
AROUND = r"\\(?:text|math)[a-z]*|[{}$]|\\[ ,;!()[\]]"  # LaTeX around a letter
# A, (A) or [A] as the last line, or all of A) 5 cm, but not A) 5 cm, B) 6 cm
LETTER = (r"(?s)\A\s*[(\[]?([A-Z])[]):.](?!\s+(?:is|can)|.*\b[A-Z][]):.]).*\Z"
          r"|(?:\A|\n)[ (\[*]*([A-Z])[]).* ]*\s*\Z")
# "Answer: A", "the best option is A", "option A is correct", "so A" at the end, but not A or B
SAID = (r"(?i:answer|(?:option|choice)(?=\s*:|\s+is\b))"
        r"(?i:\s|is\b|option|choice|[\[:=*(>\"']){1,20}([A-Z])"
        r"(?!\)?\s*(?:,|/|-|or\b|and\b)\s*\(?[A-Z]\b|\)?\s+(?:is|was|can)\b)"
        r"(?=[]).,:;!?*\"'<]|\s*(?:\Z|\n|\(|[-\u2013\u2014]\s|because\b|since\b))"
        r"|(?i:answer|option|choice) \(?([A-Z])\)? is (?:correct|right)\b"
        r"|(?i:\b(?:so|thus|therefore|hence)),? \(?([A-Z])\)?\.?\s*\Z")
MARKED = r"(?<!\w)(?:[(\[]|\*\*\(?)([A-Z])(?:[]).:]|\*\*)"  # counts if no other letter is marked
DENIED = r"(?i)\bnot\b|n't|cannot|neither|wrong|false|incorrect|rule|exclud|except|eliminat"
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
        """1.0 if the response's last box equals the answer; without a box, if its last number,
        letter or expression does.

        Raises: Unreadable if no response can be compared with the answer; ValueError if math-verify
        is needed and cannot be imported.
        """
        gold, box = last_part(problem.answer), re.sub(UNIT, "", last_match(BOX, response))
        if letter(gold):
            return float(letter(gold) == chosen(box or response))
        number = plain_number(gold)
        found = plain_number(box.rstrip(r"\%. ")) if box else last_number(response)
        if number is None or (box and found is None):
            return self._verify(re.sub(UNIT, "", gold), rf"\boxed{{{box}}}" if box else response)
        return float(number == found)

    def same(self, one: str, other: str) -> bool:
        """Whether two answers of problems mean the same."""
        with suppress(ValueError):  # one of another task may be unreadable here
            return one == other or bool(
                self.reward(Problem("", one, ""), rf"\boxed{{{last_part(other)}}}"))
        return False

    def _verify(self, gold: str, response: str) -> float:
        if self._math_verify is None:
            with stage(f"the answer {gold!r:.40} is no plain number; starting math-verify"
                       " (pip install math-verify)"):
                self._math_verify = TaskFile(MATH_ANSWERS, 0, self.limit_s)
        problem = Problem("", gold, "")
        with suppress(ValueError):
            return self._math_verify.reward(problem, response)
        try:  # was it the gold, or the response?
            return self._math_verify.reward(problem, "")
        except ValueError as failed:
            raise Unreadable(f"its answer {gold!r:.40} is no number and no letter (other"
                             f" answers need --reward), and {failed}") from failed


def last_part(answer: str) -> str:
    """42 of GSM8K's "... #### 42", or of a solution that ends in a box."""
    return last_match(BOX, answer) or answer.rpartition("####")[2].strip()


def last_number(text: str) -> Decimal | None:
    """42 in "so x is 42."; None if the last digits of a text are something else."""
    found = re.search(NUMBER, text)
    if found is None:
        return None
    digits = re.sub(TIMES_TEN, "e", found[0])
    return Decimal(re.sub(r"[\\$€£,{}]", "", digits).replace("\u2212", "-"))


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is a plain number and nothing else."""
    return last_number(text) if re.fullmatch(rf"\s*{NUMBER}\s*", text) else None


def letter(gold: str) -> str:
    r"""The A of A, (A), A) or \text{A}, else ""."""
    return last_match(LETTER, re.sub(AROUND, "", gold))


def chosen(text: str) -> str:
    """The last letter after "answer", else alone in the last line, else the one that is marked."""
    plain = re.sub(AROUND, "", text)
    said = last_match(SAID, plain) or last_match(LETTER, plain)
    if said or re.search(DENIED, plain):
        return said
    return "".join(set(re.findall(MARKED, plain)))  # two letters are no letter of a choice


def last_match(pattern: str, text: str) -> str:
    """The group of the last match, else ""."""
    found = re.findall(pattern, text)
    return "".join(found[-1]) if found else ""
