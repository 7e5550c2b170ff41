"""The letter of a choice: in an answer, and in a response that says which letter it chooses."""

import re

AROUND = r"\\(?:text|math)[a-z]*|[{}$]|\\[ ,;!()[\]]"  # LaTeX around a letter
# A, (A) or [A] as the last line, or all of A) 5 cm, but not A) 5 cm, B) 6 cm
LETTER = r"""(?xs)\A\s*[(\[]?([A-Z])[]):.](?!\s+(?:is|can) | .*\b[A-Z][]):.]).*\Z
  | (?:\A|\n)[\ (\[*\#`]*([A-Z])[]).*`\ ]*\s*\Z"""
SAID = r"""(?x)(?=[acohprstA-Z(\u0400-\uffff])(?:  # fast: no other letter begins one of these
    # "Answer: A", "the best option is A", but not "answer: A or B", "the answer is A dog"
    (?i:answer | \bans\b | (?:option|choice) (?=\s*: | \s+(?:is|would|must)\b))
    (?i:\s | (?:is|(?:would|must|should|will)\ be)\b | option | choice | [\[:=*(>"'`-]){1,20}([A-Z])
    (?![)"'*`]*\s*(?:,|/|-|or\b|and\b)\s*[("'*`]*[A-Z]\b | \)?\s+(?:is|was|can)\b)
    (?=[]).,:;!?*"'`<。] | \s*(?:\Z|\n|\(|[-\u2013\u2014]\s|because\b|since\b))
    # "option A is correct", and at the end of a line "so A", "Option A"
  | (?i:answer|option|choice)\ \(?([A-Z])\)?\ is\ (?:correct|right)\b
  | (?i:\b(?:so|thus|therefore|hence)),?\ \(?([A-Z])\)?\.?\s*\Z
  | (?:(?<!or\ )(?<!nd\ )(?i:option|choice) | (?i:choose|pick|select))
    [\ (*]+([A-Z])[).!*]*\s*(?:\Z | \n(?!\s*(?i:option)))
    # "A is the answer", but not "B or A is the answer"
  | (?<![\w'-])(?<!or\ )(?<!nd\ )(?<![A-Z],\ )\(?([A-Z])\)?\ (?:is|must\ be|would\ be)
    \ (?:(?:the|my|final|only|best|most|correct|right)\ )*
    (?:answer|option|choice|correct|right)\b(?!\ (?:only|if))
    # "The answer is A" in Chinese, Japanese, Korean, Russian, Spanish and their neighbours
  | (?:答案 | [选選] | 正确 | 答え | 正解 | 정?답
      | (?i:\u043e\u0442\u0432\u0435\u0442|respuesta|resposta|réponse|antwort|risposta))
    (?:[\s:\uff1a(\uff08\[【*"“是为选選择项应该的正确答案は은는]
      | (?i:correcta|correcte|correta|richtige|es|est|ist|la|le|é|è)\b){0,12}
    (?<![a-zA-Z\d])([A-Z])(?=[)\uff09】"”*]*\s*选?项?
    (?:是?(?:正确|对) | です | 입 | \Z | [\n.,;:!?。\uff0c\uff1b\uff0e\uff01]))(?!\uff0c?\s*[A-Z]\b)
  | (?<![a-zA-Z\d、和或与及])([A-Z])选?项?是?(?:正确|对的|答案)
    # and in Arabic, where "option A" and "A is the answer" mean the same
  | (?:الإجابة|الاجابة|إجابة|الجواب|جواب|الخيار|الاختيار|الحل|الحرف)
    (?:[\s:(\["“*] | \u0647[وي]\b | الصحيحة? | الخيار | الحرف){0,12}(?<![a-zA-Z\d])([A-Z])
    (?=[)\]"”*]*\s*(?:\Z | [\n.,:!؟،؛] | \u0647[وي]\ الصحيح | لأن))(?!،?\s*[A-Z]\b)
  | (?<![a-zA-Z\d])([A-Z])\)?\ \u0647[وي]\ (?:الإجابة|الجواب|الخيار|الاختيار|الحل|الصحيح))"""
MARKED = r"(?<!\w)(?:[(\[]|\*\*\(?)([A-Z])(?:[]).:]|\*\*)"  # counts if no other letter is marked
DENIED = r"(?i:\bnot\b|n't|cannot|neither|wrong|false|incorrect|rule|exclud|except|eliminat)"
# In front of a letter that is said, in the same clause, these take it back.
TAKEN_BACK = rf"""(?x)(?:{DENIED} | (?i:\bif\b | whether | unless | likely | doubt)
    | [不非没否错] | 排除 | ليس | \b\u0644\u0627\b | غير | خط[أئ]
    | (?i:\b(?:no|nicht|pas|não|non|\u043d\u0435)\b))
    (?:(?![.,:;!?\n。\uff0c\uff1b\uff1a،؛] | \b(?:but|so|while|hence|therefore|thus)\b).)*\Z"""


def letter(gold: str) -> str:
    r"""The A of A, (A), A) or \text{A}, else ""."""
    return last_match(LETTER, re.sub(AROUND, "", gold))


def chosen(text: str) -> str:
    """The letter that is last said to be the answer, else alone in the last line, else marked."""
    plain, said = re.sub(AROUND, "", text), ""
    for match in re.finditer(SAID, plain):
        if not re.search(TAKEN_BACK, plain[: match.end(match.lastindex)][-200:]):
            said = match[match.lastindex]
    said = said or last_match(LETTER, plain)
    if said or re.search(DENIED, plain):
        return said
    return "".join(set(re.findall(MARKED, plain)))  # two letters are no letter of a choice


def last_match(pattern: str, text: str) -> str:
    """The group of the last match, else ""."""
    matches = re.findall(pattern, text)
    return "".join(matches[-1]) if matches else ""
