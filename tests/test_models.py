"""A model's folder: tokenizer, stop tokens, export. And what a toy is taught."""

import json
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import qwen2, read_json, rewrite, small_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import extras
from engine_adapter import Rollout
from extras.export_sampling import declared
from extras.shared.masks import MaskedSampling
from report.files import appears_whole, save_policy, write_folder
from tasks.model_folder import check_rows, describe_model
from tasks.toys import EOS, TOYS, teach, toy_config, toy_tokenizer


def test_the_seed_alone_decides_what_a_toy_is_taught():
    toy, config = TOYS["digits"]._replace(steps=2), toy_config("digits")
    first, again, other = ([*teach(toy, config, seed).parameters()] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first[:3], other[:3]))


def test_an_exported_folder_has_the_umasks_mode_and_the_sampling_of_the_training_without_its_length(tmp_path):
    usual, mask, model = os.umask(0o027), dict(top_k=5, top_p=0.9, min_p=0.02), qwen2(tied=True)
    try:
        task = SimpleNamespace(tokenizer=toy_tokenizer())
        run = SimpleNamespace(sampling=MaskedSampling(0.7, 4, (EOS, 0), **mask), task=task)
        with declared(run, model):
            write_folder(model, run.task.tokenizer, tmp_path / "policy")
    finally:
        os.umask(usual)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mode == 0o100640
    found = read_json(tmp_path / "policy" / "generation_config.json")
    assert found.pop("transformers_version")
    asked = {"do_sample": True, "temperature": 0.7, "eos_token_id": [EOS, 0], "pad_token_id": 0}
    assert found == asked | mask


def test_a_folder_appears_when_it_is_whole_and_the_faster_of_two_processes_wins(tmp_path):
    with appears_whole(tmp_path / "model") as new:
        for folder, text in (new, "mine"), (tmp_path / "model", "theirs"):
            assert not (tmp_path / "model").exists()
            folder.mkdir()
            (folder / "file").write_text(text)
    assert (tmp_path / "model" / "file").read_text() == "theirs"
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]
    with pytest.raises(FileNotFoundError), appears_whole(tmp_path / "other"):
        pass  # nothing is written


def test_a_value_that_is_no_number_among_several_is_refused_and_nothing_is_kept():
    for logprobs in ([-1.0, math.nan], [-math.inf, -1.0]):
        rollout = Rollout([0], None)
        with pytest.raises(FloatingPointError, match=r"log-probabilities are .* for prompt \[0\]"):
            rollout.append([5, 0], logprobs, 1)
        assert rollout == Rollout([0], None)


def test_stop_tokens_are_those_of_the_tokenizer_and_of_both_configurations(good, tmp_path):
    folder = shutil.copytree(good / "model", tmp_path / "model")
    text = read_json(folder / "config.json") | {"eos_token_id": 7}
    multimodal = {"model_type": "gemma3", "text_config": text, "eos_token_id": 5}
    rewrite("generation_config.json", eos_token_id=8)(folder)
    for changes, stop in (({"eos_token_id": [5, 6]}, (EOS, 5, 6, 8)), (multimodal, (EOS, 5, 7, 8)), (None, (EOS, 8))):
        if changes:
            rewrite("config.json", **changes)(folder)
        else:  # Gemma's class has a default, 1
            del text["eos_token_id"]
            (folder / "config.json").write_text(json.dumps(text | {"model_type": "gemma"}))
        assert describe_model(str(folder), lambda path: extras.folder(path).config())[2] == stop


@pytest.mark.parametrize("name, changes, after", [
    ("Qwen3_5Text", {"mtp_num_hidden_layers": 1}, "mtp.layers.0."),  # the class ignores them
    ("Glm4Moe", {"num_nextn_predict_layers": 1}, "model.layers.2."),  # transformers reports them
])  # fmt: skip
def test_tensors_for_multi_token_prediction_are_said_at_the_load_beside_others(name, changes, after, tmp_path, capsys):
    last = "model.layers.1."
    small_model(name, **changes).save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")
    more = {after + each.removeprefix(last): tensor + 1 for each, tensor in table.items() if each.startswith(last)}
    others = {"model.layers.3.mlp.weight": torch.ones(2), "value_head.weight": torch.ones(2)}
    save_file(table | more | others, tmp_path / "model.safetensors", {"format": "pt"})
    extras.folder(str(tmp_path)).load(torch.bfloat16)
    said = capsys.readouterr().out.splitlines()
    assert f"neither trained nor exported: {len(more)} tensors for multi-token" in said[-2]
    assert said[-1].endswith(f"does not have: {', '.join(others)}")


@pytest.mark.parametrize("name, base", [("Qwen2", 2e4), ("Gemma3Text", None), ("Llama, yarn", None)])
def test_transformers_4_finds_the_base_of_a_plain_rotary_table_or_the_run_says_that_it_cannot(
    name, base, tmp_path, capsys
):
    task = SimpleNamespace(tokenizer=toy_tokenizer())
    model, run = small_model(name, rope_theta=2e4), SimpleNamespace(task=task, while_saved=[], after_save=[])
    model.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    save_policy(run, model, tmp_path)
    assert read_json(tmp_path / "config.json").get("rope_theta") == base
    assert ("transformers 4 would read" in capsys.readouterr().out) == (base is None)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() | {"rope_theta": 0} == before | {"rope_theta": 0}


def test_rows_may_fill_the_original_context_of_longrope_also_where_the_key_has_its_old_place():
    old = dict(rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16})
    config = AutoConfig.for_model("phi3", hidden_size=64, num_attention_heads=2, pad_token_id=0,
                                  original_max_position_embeddings=13, **old)  # fmt: skip
    check_rows(config, 13)
    with pytest.raises(ValueError, match="the longest have 14"):
        check_rows(config, 14)


@pytest.mark.parametrize("name, more, said", [
    ("Llama", "model.layers.0.self_attn.rotary_emb.inv_freq", ""), ("GPT2", "transformer.wte.weight", ""),
    ("GPT2", "h.0.attn.bias", "GPT2LMHeadModel does not have: h.0.attn.bias\n"),  # a mask, which the class ignores
])  # fmt: skip
def test_no_tensor_that_the_model_has_or_computes_is_said_to_be_lost(name, more, said, tmp_path, capsys):
    small_model(name).save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")
    table = {more: torch.ones(16)} | table
    table = {each.removeprefix("transformer."): tensor for each, tensor in table.items()}  # as GPT-2 of the hub
    save_file(table, tmp_path / "model.safetensors", {"format": "pt"})
    extras.folder(str(tmp_path)).load(torch.float32)
    assert capsys.readouterr().out.partition("checkpoint that ")[2] == said


@pytest.mark.parametrize("option, left, lost", [
    ("attention_bias", False, r"0\.self_attn\.k_proj\.bias and 7"),
    ("num_hidden_layers", 1, r"1\.input_layernorm\.weight and 12"),
])  # fmt: skip
def test_no_layer_and_no_tensor_beside_those_of_a_layer_is_left_out(option, left, lost, tmp_path):
    small_model("Llama", attention_bias=True).save_pretrained(tmp_path)
    rewrite("config.json", **{option: left})(tmp_path)
    with pytest.raises(ValueError, match=rf"has model\.layers\.{lost} more, which config"):
        extras.folder(str(tmp_path)).load(torch.float32)
