"""Stop texts (--stop): where responses end, against decoding each of their beginnings, and what the reward sees."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from helpers import (
    AT_PARITY,
    PROMPTS,
    ROUNDING,
    SEEDS,
    command,
    floors_of,
    policy_in,
    published,
    rows,
    started,
    train_here,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine_adapter import Rollout, Sampling
from extras.stop_texts import StopTexts

TEXT = "Question: What is 7 plus 8?\n\nAnswer: it is 15 — d'accord, né à 東京.\n#### 15\n\n\n  Question: é€🙂\n" * 3


@pytest.mark.parametrize("form", ["gpt2", "llama2", "no text"])
def test_a_response_ends_with_the_token_that_completes_a_text_however_its_characters_are_cut(form):
    tokenizer, rng, ended = PreTrainedTokenizerFast(tokenizer_object=published(form)), random.Random(0), 0
    written = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    unk, w, h = tokenizer.convert_tokens_to_ids(["<unk>", "W", "h"])
    cases = [(("Wh",), [w, *[unk] * 20, h])] if unk is not None else []
    for case in range(600):
        ids = rng.choices(range(len(tokenizer)), k=60)
        if case % 2:
            ids = written[rng.randrange(len(written)) :]
        text = rng.choice((TEXT, tokenizer.decode(ids).replace("\ufffd", "") or TEXT))
        start = rng.randrange(len(text))
        cases.append(((text[start : start + rng.choice((1, 1, 2, 5, 12))], "never")[: rng.randint(1, 2)], ids))
    for stops, ids in cases:
        ends = StopTexts(tokenizer, stops)
        found = next((n for n in range(1, len(ids) + 1) if ends(Rollout([], None, ids[:n]))), None)
        texts = (tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1))
        assert found == next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
        ended += found is not None
    assert ended > 100


@pytest.mark.engine
def test_vllm_ends_a_response_there_and_gives_the_tokens_and_values_that_it_gives_without_the_text(engine_folder):
    characters = Tokenizer(models.WordLevel({chr(33 + token): token for token in range(96)}, unk_token="!"))
    characters.decoder = decoders.Fuse()
    policy, tokenizer = policy_in(engine_folder), PreTrainedTokenizerFast(tokenizer_object=characters)
    free, stops = Sampling(0.7, 12, (2,)), [*map(chr, range(33, 129, 10))]
    stopped = replace(free, ends=StopTexts(tokenizer, stops))
    with started(engine_folder, policy) as engine:
        whole = engine.generate(PROMPTS, 16, free, SEEDS)
        rollouts = engine.generate(PROMPTS, 16, stopped, SEEDS)
        assert not engine.num_unfinished
    reasons = Counter()
    for rollout, longer in zip(rollouts, whole, strict=True):
        texts = [tokenizer.decode(longer.token_ids[: n + 1]) for n in range(len(longer.token_ids))]
        ends = [n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)]
        count = min(ends, default=len(texts))
        assert rollout.token_ids == longer.token_ids[:count]
        assert rollout.logprobs == pytest.approx(longer.logprobs[:count], abs=ROUNDING)
        assert rollout.finish_reason == ("stop" if ends else longer.finish_reason)
        reasons[rollout.finish_reason] += bool(ends)
    assert reasons["stop"] > 5 and reasons.total() < len(rollouts)
    assert floors_of(policy, rollouts, 0.7) < AT_PARITY


@pytest.mark.engine
@pytest.mark.parametrize("options", ["--engine transformers", "--inflight-groups 2", "--top-k 40"])
def test_the_reward_gets_the_text_before_the_stop_text_and_such_a_response_is_not_truncated(
        options, good, tmp_path, capsys):  # fmt: skip
    """The model goes on with "============" after each question."""
    out = tmp_path / "run"
    (good / "rewards.py").write_text("def reward(problem, response):\n    return float(response == '')\n")
    words = f"--steps 2 --out {out} --max-new-tokens 12 --reward {good}/rewards.py {options}"
    train_here(command(good, words, "--stop", "=", "--stop", "12"))
    stopped = [step["stop_text_frac"] for step in rows(out)[1:]]
    assert min(stopped) > 0 and stopped == [1 - step["trunc_frac"] for step in rows(out)[1:]]
    said = re.findall(r"(\d+)% ended by a stop text", capsys.readouterr().out)
    assert said == [f"{100 * share:.0f}" for share in stopped]
    answers = {(row["response"], row["reward"], row["finish_reason"], row["tokens"]) for row in rows(out, "samples")}
    assert ("", 1.0, "stop", 1) in answers and not any("=" in response for response, *_ in answers)
