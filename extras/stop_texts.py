"""`--stop`: a response ends with the token that completes one of these texts.

For base models, which go on after their answer. vLLM checks stop strings where it decodes tokens,
which this program leaves out, so the check is here: 0.3 to 1.5 us a token (SmolLM2's tokenizer, one
core). The reward gets the text before the stop text, and the loss all tokens, because they are what
was sampled.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import tyro

from extras import Extra
from report.errors import MANY


class Options(Extra):
    """Where a response ends besides its stop tokens."""

    # A text that ends a response, such as `Question:`; the reward does not see it. In bash a line
    # break is $'\n'. May be given several times.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()

    def __post_init__(self):
        if "" in self.stop:
            raise ValueError("stop must not contain an empty text (each response would end at"
                             f" once), got {self.stop}")

    def install(self, run: Any) -> None:
        """The sampling ends at the texts, and the task reads the text before."""
        if not self.stop:
            return
        for text in self.stop:
            if "\\n" in text:
                print(f"notice: --stop {text!r} has a backslash and an n, which are no line break;"
                      " in bash $'\\n' is one")
        run.task = replace(run.task, readable=partial(before, self.stop))
        ends = StopTexts(run.task.tokenizer, self.stop)
        run.sampling = replace(run.sampling, ends=ends)


class StopTexts:
    """Whether the last token of a rollout completes one of the texts.

    Only the last few tokens are decoded, and only if the last token's own text contains the last
    character of a stop text: this saves time.

    Raises: ValueError for a text that no token can complete.
    """

    def __init__(self, tokenizer: Any, texts: tuple[str, ...]):
        self.tokenizer, self.texts = tokenizer, texts
        # Twice, because some tokenizers omit the space at the beginning of a text.
        largest = max(tokenizer.get_vocab().values())  # there can be holes
        pairs = tokenizer.batch_decode([[token, token] for token in range(largest + 1)])
        self.completing: set[int] = set()
        for text in texts:
            # A token with a part of a character's bytes decodes to U+FFFD.
            characters = {text[-1]} if text.isascii() else {text[-1], "\ufffd"}
            completing = {token for token, pair in enumerate(pairs) if characters & {*pair}}
            if not completing:
                raise ValueError(f"stop must be a text of the tokenizer, which has no {text[-1]!r},"
                                 f" got {text!r}")
            self.completing |= completing
        # A token has at least a byte. Four more, because the first character may be cut off.
        self.window = 4 + max(len(text.encode()) for text in texts)
        if "" in pairs:  # tokens without text: any number of them may be in a stop text
            self.window = MANY

    def __call__(self, rollout: Any) -> bool:
        ids = rollout.token_ids
        if ids[-1] not in self.completing:
            return False
        # A run of tokens that are bytes has no text at all if it begins inside a character.
        starts = {max(0, len(ids) - self.window - more) for more in range(4)}
        # Beside bytes that are no character the whole has another text than its end.
        return any(self.has_stop(ids[start:]) for start in starts) and self.has_stop(ids)

    def has_stop(self, ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.texts)


def before(stops: tuple[str, ...], text: str) -> str:
    """The text up to the first of the stop texts."""
    return min((text.partition(stop)[0] for stop in stops), key=len)
