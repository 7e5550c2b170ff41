"""A model's folder: tokenizer, stop tokens, export. And what a toy is taught."""

import json
import math
import os
import shutil

import pytest
import torch
from helpers import qwen2
from transformers.utils import logging

from examples.toys import EOS, TOYS, teach, toy_config, toy_tokenizer
from extras.model_folder import describe_model, load_tokenizer
from models import load_model, save_model
from rollouts import Rollout, Sampling


def test_the_seed_alone_decides_what_a_toy_is_taught():
    toy, config = TOYS["digits"]._replace(steps=2), toy_config("digits")
    first, again, other = ([*teach(toy, config, seed).parameters()] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first[:3], other[:3]))


def test_an_exported_folder_has_the_umasks_mode_and_the_sampling_of_the_training_without_its_length(tmp_path):
    usual, mask = os.umask(0o027), dict(top_k=5, top_p=0.9, min_p=0.02)
    try:
        save_model(qwen2(tied=True), toy_tokenizer(), Sampling(0.7, 4, (EOS, 0), **mask), tmp_path / "policy")
    finally:
        os.umask(usual)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mode == 0o100640
    found = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert found.pop("transformers_version")
    asked = {"do_sample": True, "temperature": 0.7, "eos_token_id": [EOS, 0], "pad_token_id": 0}
    assert found == asked | mask


def test_a_load_leaves_transformers_as_talkative_as_it_was(good):
    usual = logging.get_verbosity()
    for verbosity in (logging.DEBUG, usual):
        logging.set_verbosity(verbosity)
        load_model(str(good / "model"), torch.float32)
        assert logging.get_verbosity() == verbosity


def test_a_value_that_is_no_number_among_several_is_refused_and_nothing_is_kept():
    for logprobs in ([-1.0, math.nan], [-math.inf, -1.0]):
        rollout = Rollout([0], None)
        with pytest.raises(FloatingPointError, match=r"log-probabilities are .* for prompt \[0\]"):
            rollout.append([5, 0], logprobs, 1)
        assert rollout == Rollout([0], None)


def test_stop_tokens_are_those_of_the_tokenizer_and_of_both_configurations(good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    text = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 7}
    multimodal = {"model_type": "gemma3", "text_config": text, "eos_token_id": 5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    for changes, stop in (({"eos_token_id": [5, 6]}, (EOS, 5, 6, 8)), (multimodal, (EOS, 5, 7, 8))):
        (folder / "config.json").write_text(json.dumps(text | changes))
        assert describe_model(str(folder))[2] == stop


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
