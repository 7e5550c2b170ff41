"""Folders of multimodal models as the hubs have them: their text is trained, sampled and exported."""

import json
import re

import pytest
import torch
from helpers import (
    MULTIMODAL,
    PYTHON,
    ROUNDING,
    TASK,
    config_of,
    dtypes_of,
    read_json,
    rewrite,
    rows_of_run,
    small_model,
    tensors,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import extras
from extras.shared.adapters import factors
from tasks.toys import toy_tokenizer
from train import load_policy, prepare

CASES = [(name, False) for name in MULTIMODAL] + [("Gemma3", True)]


@pytest.mark.engine
@pytest.mark.parametrize("name, tied", CASES)
def test_the_text_of_a_multimodal_folder_is_trained_and_exported_as_a_text_model(name, tied, tmp_path, capsys):
    """Three steps at parity; stock transformers reads policy/."""
    small_model(name, tied).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "task.py").write_text(PYTHON)
    dtype, out = dtypes_of(name)[0], tmp_path / "run"
    _, *steps = rows_of_run(
        tmp_path, out, "--task {root}/task.py --steps 3 --max-new-tokens 12 --lr 1e-3 --eval-problems 2 --dtype "
                       + str(dtype).removeprefix("torch."))  # fmt: skip
    limit = {torch.float32: ROUNDING, torch.bfloat16: 0.1}[dtype]
    assert all(row["mismatch_abs_mean"] < limit for row in steps)
    exported, report = AutoModelForCausalLM.from_pretrained(out / "policy", output_loading_info=True, dtype=dtype)
    assert not any(report.values())
    kind = type(exported).__name__
    assert re.search(rf"only the text model is trained, {kind}: [1-9]\d* tensors are left", capsys.readouterr().out)
    assert read_json(out / "policy" / "config.json")["architectures"] == [kind]
    assert any(row["updates"] for row in steps)


@pytest.mark.engine  # Qwen3.5 imports vllm
@pytest.mark.parametrize("name", MULTIMODAL)
def test_its_adapters_are_those_of_peft_for_the_whole_model(name, tmp_path):
    small_model(name).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    run = prepare(config_of(
        model=str(tmp_path / "model"), task=str(tmp_path / "task.jsonl"), num_prompts=4, lora_rank=4))
    ids = torch.tensor([[5, 6, 7, 8]])
    model = load_policy(run).model
    for layer in run.send.layers.values():
        torch.nn.init.normal_(factors(layer)[1], std=0.1)
    run.save_weights(run, model, tmp_path / "adapter")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    of_peft = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert (of_peft(input_ids=ids).logits - model(ids).logits).abs().max() < ROUNDING


def test_a_text_model_without_its_head_or_with_two_tensors_of_one_name_is_refused(tmp_path):
    small_model("Mistral3").save_pretrained(tmp_path)
    add, remove = {"model.norm.weight": torch.zeros(64)}, ("model.norm.weight", "language_model.lm_head.weight")
    for change, complaint in ((lambda table: table.update(add), "it has two of model.norm.weight"),
                              (lambda table: [*map(table.pop, remove)], r"missing \['lm_head.weight'\]")):  # fmt: skip
        tensors(change)(tmp_path)
        with pytest.raises(ValueError, match=complaint):
            extras.folder(str(tmp_path)).load(torch.float32)


@pytest.mark.parametrize("head, whole, text, tied", [
    (True, True, False, False),  # Ministral 3 with 8B: the default of the whole is True
    (True, True, True, True), (False, True, False, True), (False, False, False, False),
])  # fmt: skip
def test_head_and_embedding_are_tied_if_both_configurations_say_so_or_there_is_no_head(
    head, whole, text, tied, tmp_path
):
    small_model("Mistral3", not head).save_pretrained(tmp_path)
    of_text = read_json(tmp_path / "config.json")["text_config"] | {"tie_word_embeddings": text}
    rewrite("config.json", tie_word_embeddings=whole, text_config=of_text)(tmp_path)
    assert extras.folder(str(tmp_path)).config().tie_word_embeddings is tied
