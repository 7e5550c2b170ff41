"""Tokenizers, prompts and the model of a toy."""

import json
import os
import shutil

import pytest
import torch
from helpers import ROOT, qwen2

from examples.toys import EOS, TOYS, digits, teach, toy_config, toy_model, toy_tokenizer
from extras.model_folder import describe_model, load_tokenizer
from models import load_model, save_model
from rollouts import Sampling


def test_the_model_for_digits_starts_with_the_wrong_habit_unsure_and_with_offset_logits():
    model = load_model(str(toy_model(str(ROOT / ".cache"), 0, "digits")), torch.float32)
    task, tokenizer = digits(0), toy_tokenizer()
    rows = [tokenizer(p.question + p.answer, return_tensors="pt")["input_ids"] for p in task.held_out]
    with torch.no_grad():  # of the answers' positions, after questions of 35 tokens: (N, V)
        logits = torch.cat([model(ids).logits[0, 34:-1] for ids in rows])
    right = torch.cat([ids[0, 35:] for ids in rows])  # (N,)
    assert logits.mean() > 5  # the offset
    assert 0.1 < torch.softmax(logits / 0.7, dim=-1).gather(-1, right[:, None]).mean() < 0.5
    assert (logits.argmax(dim=-1) == right).float().mean() < 0.5
    assert torch.distributions.Categorical(logits=logits / 0.7).entropy().mean() > 0.1


def test_the_seed_alone_decides_what_a_toy_is_taught():
    toy, config = TOYS["toy"]._replace(steps=2), toy_config("toy")
    first, again, other = ([*teach(toy, config, seed).parameters()] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first[:3], other[:3]))


def test_an_exported_folder_has_the_umasks_mode_and_no_length_of_the_training(tmp_path):
    usual = os.umask(0o027)
    try:
        save_model(qwen2(tied=True), toy_tokenizer(), Sampling(0.7, 4, (EOS,)), tmp_path / "policy")
    finally:
        os.umask(usual)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mode == 0o100640
    assert "max_new_tokens" not in (tmp_path / "policy" / "generation_config.json").read_text()


def test_stop_tokens_are_those_of_the_tokenizer_and_of_both_configurations(good, tmp_path):
    shutil.copytree(good / "model", tmp_path / "model")
    text = json.loads((good / "model" / "config.json").read_text()) | {"eos_token_id": 7}
    for config, generation, stop in (
        ({"eos_token_id": [5, 6]}, None, (EOS, 5, 6)), ({"eos_token_id": 5}, {"eos_token_id": [8]}, (EOS, 5, 8)),
        ({"eos_token_id": 5}, {}, (EOS, 5)),
        ({"model_type": "gemma3", "text_config": text, "eos_token_id": 5}, None, (EOS, 5, 7)),
    ):  # fmt: skip
        (tmp_path / "model" / "config.json").write_text(json.dumps(text | config))
        (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
        assert describe_model(str(tmp_path / "model"))[2] == stop


def test_toy_tokenizer_survives_a_folder_and_refuses_what_it_does_not_know(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer("81+7=")["input_ids"]
    assert ids == [1, 11, 4, 13, 10, 14]
    assert tokenizer.decode([*ids[1:], EOS], skip_special_tokens=True) == "81+7="
    for text in ("a", "1 2"):  # also after a round trip through a folder: AutoTokenizer would drop them in silence
        with pytest.raises(Exception, match="WordLevel"):
            tokenizer(text)
