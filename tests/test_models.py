"""Tokenizers, prompts and the toys."""

import itertools
import json
import time

import pytest
import torch
from conftest import prompt_ids
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, JambaConfig

from examples import toys
from examples.toys import EOS, digits, toy_model, toy_tokenizer
from tasks import Problem, describe_model, load_tokenizer


def test_the_model_for_digits_starts_unsure_and_with_offset_logits(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(toy_model(str(tmp_path), 0, "digits"))
    task, tokenizer = digits(0), toy_tokenizer()
    ids = torch.tensor([prompt_ids(tokenizer, p) + tokenizer(p.answer, add_special_tokens=False)["input_ids"]
                        for p in task.held_out])  # fmt: skip
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, 34:]  # (256, 16, V), the answers' positions
    assert 12 < logits.mean() < 20
    right = torch.softmax(logits / 0.7, dim=-1).gather(-1, ids[:, 35:, None]).mean()
    assert 0.3 < right < 0.45
    entropy = torch.distributions.Categorical(logits=logits / 0.7).entropy().mean()
    assert entropy > 1.5


def test_a_toy_does_not_depend_on_the_speed_of_the_machine(tmp_path, monkeypatch):
    """Taught twice, the second time with a clock that advances an hour at each call: the seed alone decides the end."""
    monkeypatch.setattr(toys, "DIGITS_SHARE", 0.15)  # reached after some 30 steps
    usual = toy_model(str(tmp_path / "usual"), 1, "digits")
    clock = itertools.count(0, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    slow = toy_model(str(tmp_path / "slow"), 1, "digits")
    assert (slow / "model.safetensors").read_bytes() == (usual / "model.safetensors").read_bytes()


def test_toy_tokenizer_survives_a_folder_and_refuses_what_it_does_not_know(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = prompt_ids(tokenizer, Problem("81+7=", "88", ""))
    assert ids == [1, 11, 4, 13, 10, 14]
    assert tokenizer.decode([*ids[1:], EOS], skip_special_tokens=True) == "81+7="
    assert tokenizer.eos_token_id == EOS
    for text in ("a", "1 2"):  # also after a round trip through a folder: AutoTokenizer would drop them in silence
        with pytest.raises(Exception, match="WordLevel"):
            tokenizer(text)


def test_a_folder_without_a_tokenizer_is_refused_where_transformers_makes_an_empty_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    save_file({}, tmp_path / "model.safetensors")
    assert AutoTokenizer.from_pretrained(tmp_path)("1+1=")["input_ids"] == []
    for describe in (load_tokenizer, describe_model):
        with pytest.raises(ValueError, match="a folder with a tokenizer"):
            describe(str(tmp_path))


def test_a_model_with_one_expert_is_no_mixture_of_experts(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    JambaConfig(num_experts=1).save_pretrained(tmp_path)
    assert describe_model(str(tmp_path))[0].num_experts == 1
    if not torch.cuda.is_available():
        JambaConfig(num_experts=2).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"must not be a mixture of experts without a GPU .* got jamba"):
            describe_model(str(tmp_path))


def test_chat_template_is_used_where_there_is_one():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    equals = toy_tokenizer().convert_tokens_to_ids("=")
    assert prompt_ids(tokenizer, Problem("1+1", "2", ""))[-1] == equals
