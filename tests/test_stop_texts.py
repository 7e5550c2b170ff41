"""Stop texts (--stop): where responses end, against decoding each of their beginnings, and what the reward sees."""

import random

import pytest
from helpers import ROUNDING, parametrize, published, rows, rows_of_run
from transformers import PreTrainedTokenizerFast

from engine_adapter import Rollout
from extras.stop_texts import StopTexts

TEXT = "Question: What is 7 plus 8?\n\nAnswer: it is 15, né à 東京.\n#### 15\n\n\n  Question: é€🙂\n🙂🙂🙂🙂\n" * 3


@parametrize("form", ["gpt2", "llama2", "no text"])
def test_a_response_ends_with_the_token_that_completes_a_text_however_its_characters_are_cut(form):
    """Also after tokens without text, and after a byte that is no character."""
    tokenizer, rng, ended = PreTrainedTokenizerFast(tokenizer_object=published(form)), random.Random(0), 0
    vocabulary, written = range(len(tokenizer)), tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for case in range(150):
        start = rng.randrange(len(written))
        ids = rng.choices(vocabulary, k=60) if case % 2 else written[start : start + 5] + [0] * 9 + written[start:]
        text = tokenizer.decode(ids).replace("\ufffd", "") or TEXT
        start = rng.randrange(len(text))
        stop = text[start : start + rng.choice((1, 1, 2, 5, 12))]
        ends = StopTexts(tokenizer, ("never", stop))
        for beginning in (ids[: n + 1] for n in range(len(ids))):
            completed = stop in tokenizer.decode(beginning)
            assert ends(Rollout([], None, beginning)) == completed
            if completed:
                ended += 1
                break
    assert ended > 30


@pytest.mark.engine
@parametrize("options", ["--engine transformers", "--inflight-groups 2", "--top-k 40"])
def test_the_reward_gets_the_text_before_the_stop_text_and_such_a_response_is_not_truncated(
        options, good, tmp_path):  # fmt: skip
    """The model goes on with "============" after each question. The tokens are those that the trainer scores."""
    out = tmp_path / "run"
    (good / "rewards.py").write_text("def reward(problem, response):\n    return float(response == '')\n")
    words = f"--steps 2 --max-new-tokens 12 --reward {good}/rewards.py {options} --stop = --stop 12"
    _, *steps = rows_of_run(good, out, words)
    assert max(step["trunc_frac"] for step in steps) < 1
    assert all((step["current_mismatch_abs_mean"] or 0) < ROUNDING for step in steps)
    answers = {(row["response"], row["reward"], row["finish_reason"], row["tokens"]) for row in rows(out, "samples")}
    assert ("", 1.0, "stop", 1) in answers and not any("=" in response for response, *_ in answers)
