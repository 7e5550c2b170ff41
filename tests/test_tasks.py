"""Tasks, rewards and the tokenizer of the toy."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks import (
    EOS,
    Problem,
    addition,
    digits,
    encode_prompt,
    exact_match,
    from_jsonl,
    load_tokenizer,
    numeric_match,
    share_of_digits,
    toy_model,
    toy_tokenizer,
)


def test_addition_is_right_split_without_overlap_and_decided_by_the_seed():
    task = addition(0)
    assert len(task.train) == 9000
    assert len(task.held_out) == 1000
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    for problem in task.train + task.held_out:
        a, b = problem.question.removesuffix("=").split("+")
        assert int(a) + int(b) == int(problem.answer)
    assert task.train == addition(0).train
    assert task.train != addition(1).train


def test_digits_asks_for_the_larger_digit_at_each_place():
    task = digits(0)
    assert (len(task.train), len(task.held_out)) == (64, 256)
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    tokenizer = toy_tokenizer()
    for problem in task.train + task.held_out:
        a, b = problem.question.removesuffix("=").split("+")
        assert problem.answer == "".join(max(pair) for pair in zip(a, b, strict=True))
        assert len(encode_prompt(tokenizer, problem)) == 35  # longer than a KV block of 32
    problem = Problem("12+03=", "13", "test")
    assert [share_of_digits(problem, r) for r in ("13", "1", "31", "130", "")] == [1, 0.5, 0, 2 / 3, 0]
    assert task.train == digits(0).train != digits(1).train


def test_the_model_for_digits_starts_unsure_and_with_offset_logits(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(toy_model(str(tmp_path), 0, "digits"))
    task, tokenizer = digits(0), toy_tokenizer()
    ids = torch.tensor([encode_prompt(tokenizer, p) + tokenizer(p.answer, add_special_tokens=False)["input_ids"]
                        for p in task.held_out])  # fmt: skip
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, 34:]  # (256, 16, V), the answers' positions
    assert 12 < logits.mean() < 20
    right = torch.softmax(logits / 0.7, dim=-1).gather(-1, ids[:, 35:, None]).mean()
    assert 0.3 < right < 0.45
    entropy = torch.distributions.Categorical(logits=logits / 0.7).entropy().mean()
    assert entropy > 1.5


def test_sample_repeats_with_the_random_state_and_never_repeats_a_problem():
    task = addition(0)
    first, second = (task.sample(random.Random(3), 64) for _ in range(2))
    assert first == second
    assert len({p.question for p in first}) == 64


@pytest.mark.parametrize("response, reward", [("42", 1), (" 42\n", 1), ("042", 0), ("42.", 0), ("4 2", 0), ("", 0)])
def test_exact_match(response, reward):
    assert exact_match(Problem("40+2=", "42", ""), response) == reward


@pytest.mark.parametrize("answer, response, reward", [
    ("1200", "So she has $1,200.00 left.", 1),
    ("6 * 7 = 42\n#### 42", "6 times 7 is 42", 1),
    ("42", "first 42, then 43", 0),
    ("-3", "the result is -3.", 1),
    ("0.5", "0.50", 1),
    ("1e-05", "that is 0.00001", 1),
    ("0.5", "about .5", 1),
    ("12", "pages 10-12", 1),
    ("-2", "x = -2", 1),
    ("2", "7-5=2", 1),
    ("42", "no idea", 0),
    ("42", "", 0),
])  # fmt: skip
def test_numeric_match_compares_last_numbers(answer, response, reward):
    assert numeric_match(Problem("?", answer, ""), response) == reward


def test_toy_tokenizer_survives_a_folder_and_refuses_what_it_does_not_know(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = encode_prompt(tokenizer, Problem("81+7=", "88", ""))
    assert ids == [1, 11, 4, 13, 10, 14]
    assert tokenizer.decode([*ids[1:], EOS], skip_special_tokens=True) == "81+7="
    assert tokenizer.eos_token_id == EOS
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer("a")


def test_chat_template_is_used_where_there_is_one():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    equals = toy_tokenizer().convert_tokens_to_ids("=")
    assert encode_prompt(tokenizer, Problem("1+1", "2", ""))[-1] == equals


@pytest.mark.parametrize("text, complaint", [
    ("", "has none"),
    ("\n\n", "has none"),
    ('{"question": "1+1", "answer": 2}\n{"question": "2+2", "ans', "line 2 must be a JSON object"),
    ('\n[1, 2]', "line 2 must be an object"),
    ('{"answer": "2"}', 'line 1 must be an object with a non-empty string "question"'),
    ('{"question": " ", "answer": "2"}', "line 1"),
    ('{"question": "1+1"}', 'line 1 must have an "answer"'),
    ('{"question": "1+1", "answer": "two"}', 'line 1 must have an "answer" with a number'),
    ('{"question": "1+1", "answer": true}', 'line 1 must have an "answer" with a number'),
    ('{"question": "1+1", "answer": "2"}', "at least 2 problems"),
])  # fmt: skip
def test_malformed_jsonl_is_refused_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "task.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        from_jsonl(str(path), seed=0)


def test_jsonl_is_split_or_takes_its_held_out_problems_from_a_second_file(tmp_path):
    path, held_out = tmp_path / "task.jsonl", tmp_path / "eval.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+1=\u2028", "answer": i + 1}) for i in range(20)))
    held_out.write_text(json.dumps({"question": "q", "answer": "#### 7"}))
    split = from_jsonl(str(path), seed=0)
    assert (len(split.train), len(split.held_out)) == (18, 2)
    given = from_jsonl(str(path), 0, str(held_out))
    assert (len(given.train), given.held_out[0].answer) == (20, "#### 7")
    with pytest.raises(ValueError, match="readable JSONL"):
        from_jsonl(str(tmp_path / "absent.jsonl"), 0)
