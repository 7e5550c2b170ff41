"""`--stop`: a response ends with the token that completes one of these texts.

For base models, which go on after their answer. vLLM checks stop strings where it decodes tokens,
which this program leaves out, so the check is here. The reward gets the text before the stop text,
and the loss all tokens, because they are what was sampled.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import tyro

from extras import Extra


class Options(Extra):
    """Where a response ends besides its stop tokens."""

    # A text that ends a response, such as `Question:`; the reward does not see it. In bash a line
    # break is $'\n'. May be given several times.
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()

    def check(self, config: Any) -> None:
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

    First only the last two tokens are decoded, because that is fast. Two, because some tokenizers
    omit the space at the beginning of a text; a part of a character's bytes decodes to U+FFFD.
    """

    def __init__(self, tokenizer: Any, texts: tuple[str, ...]):
        self.decode, self.texts = tokenizer.decode, texts
        self.last = {"\ufffd"} | {text[-1] for text in texts}

    def __call__(self, rollout: Any) -> bool:
        if self.last.isdisjoint(self.decode(rollout.token_ids[-2:])):
            return False
        text = self.decode(rollout.token_ids)
        return any(stop in text for stop in self.texts)


def before(stops: tuple[str, ...], text: str) -> str:
    """The text up to the first of the stop texts."""
    return min((text.partition(stop)[0] for stop in stops), key=len)
