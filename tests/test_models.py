"""A model's folder: tokens, stop tokens, what is left out, the text of multimodal models, what is saved.

tests/data/tokenizers.json has published forms of tokenizer.json, with small vocabularies. Folders that are refused are
in test_bad_input.py. And how a folder appears.
"""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    MULTIMODAL,
    PYTHON,
    ROUNDING,
    TOKENIZERS,
    dtypes_of,
    parametrize,
    policy_in,
    published,
    read_json,
    rewrite,
    rows_of_run,
    small_model,
    tensors,
    value_error,
)
from peft import PeftModel
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from extras.shared.masks import MaskedSampling
from model_folder import describe, load, load_tokenizer, read_config, save_policy
from report.files import appears_whole
from tasks.toys import EOS, toy_tokenizer

# ------------------------------------------------------------------------------------------------ tokens
BEGINS = "<|begin|> $A"


def written(folder, form, kind, label, template=BEGINS, **config):
    """A folder without weights, and its tokenizer.json as the Rust library reads it alone."""
    alone = published(form)
    alone.add_special_tokens(["<|begin|>", "<|end|>", "<unk>"])
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    alone.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    alone.save(str(folder / "tokenizer.json"))
    config |= {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": label,
               "additional_special_tokens": ["<unk>"], "clean_up_tokenization_spaces": True}  # fmt: skip
    rewrite("tokenizer_config.json", **config)(folder)
    AutoConfig.for_model(kind).save_pretrained(folder / "policy")
    return alone


def readers(folder):
    """Ours, and two of transformers for what it saves."""
    ours = load_tokenizer(str(folder))
    ours.save_pretrained(folder / "policy")
    return [ours, *(kind.from_pretrained(folder / "policy") for kind in (PreTrainedTokenizerFast, AutoTokenizer))]


@parametrize("form, kind, label", TOKENIZERS["rows"])
def test_tokens_are_those_of_the_file_whatever_the_label_also_in_policy(form, kind, label, tmp_path):
    alone = written(tmp_path, form, kind, label, from_slow=True)
    for each in readers(tmp_path)[: 2 if kind == "qwen2" else 3]:  # AutoTokenizer has one class for this type
        for text in TOKENIZERS["texts"]:
            ids = alone.encode(text).ids
            assert each(text)["input_ids"] == ids
            assert each.decode(ids) == alone.decode(ids, skip_special_tokens=False)
            assert form not in ("llama3", "deepseek", "gpt2") or each.decode(ids[1:]) == text


@parametrize("label, template, asked, begin, end", [
    ("LlamaTokenizerFast", "$A", True, [0], []), ("GemmaTokenizer", BEGINS, False, [], []),
    ("GPT2Tokenizer", "$A", True, [], []), (None, BEGINS, False, [0], []),
    # What the file adds stays if add_bos_token asks for no change.
    ("LlamaTokenizer", "<|begin|> $A <|end|>", True, [0], [1]), ("LlamaTokenizer", "$A <|begin|>", True, [], [0]),
])  # fmt: skip
def test_add_bos_token_is_obeyed_for_labels_whose_class_obeys_it_in_transformers_4(
    label, template, asked, begin, end, tmp_path
):
    alone = written(tmp_path, "llama3", "llama", label, template, add_bos_token=asked)
    ids = [*begin, *alone.encode("0", add_special_tokens=False).ids, *end]
    assert [each("0")["input_ids"] for each in readers(tmp_path)] == [ids] * 3


def test_a_tokenizer_with_other_numbers_or_one_that_draws_its_tokens_is_refused(tmp_path):
    alone = written(tmp_path, "llama3", "llama", None, added_tokens_decoder={500: {"content": "<|more|>"}})
    with value_error(r"<\|more\|> is not token 500 there"):
        load_tokenizer(str(tmp_path))
    alone.model.dropout = 0.1
    alone.save(str(tmp_path / "tokenizer.json"))
    with value_error("must be without dropout"):
        load_tokenizer(str(tmp_path))


def test_stop_tokens_are_those_of_the_tokenizer_and_of_both_configurations(good, tmp_path):
    shutil.copytree(good / "model", tmp_path, dirs_exist_ok=True)
    text = read_json(tmp_path / "config.json") | {"eos_token_id": 7}
    rewrite("generation_config.json", eos_token_id=8)(tmp_path)
    for config, stop in ((text | {"eos_token_id": [5, 6]}, (EOS, 5, 6, 8)),
                         ({"model_type": "gemma3", "text_config": text, "eos_token_id": 5}, (EOS, 5, 7, 8)),
                         # Gemma's class has a default, 1.
                         (text | {"model_type": "gemma", "eos_token_id": None}, (EOS, 8))):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert describe(str(tmp_path))[2] == stop


# ------------------------------------------------------------------------------------------------ what is left out
LACKS = "1 tensors of the checkpoint that {} does not have: {}\n"


@parametrize("name, options, more, said", [
    # The classes ignore them: for multi-token prediction.
    ("Qwen3_5Text", {}, ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], ""),
    ("Glm4Moe", {}, ["model.layers.46.eh_proj.weight", "model.layers.46.self_attn.q_proj.weight"], ""),
    ("Llama", {}, ["model.layers.0.self_attn.rotary_emb.inv_freq"], ""),
    ("Llama", {}, ["value_head.weight"], LACKS),
    ("GPT2", {}, ["h.0.attn.bias"], ""),  # a mask
    ("Mistral3", {}, [], "only the text model is trained, {0}\n15 tensors of the checkpoint that {0} does not"),
])  # fmt: skip
def test_what_the_model_does_not_have_is_said_at_the_load(name, options, more, said, tmp_path, capsys):
    small_model(name, **options).save_pretrained(tmp_path)

    def add(table):
        for each in [*table]:  # as GPT-2 of the hub
            table[each.removeprefix("transformer.")] = table.pop(each)
        table |= {each: torch.ones(2) for each in more}

    tensors(add)(tmp_path)
    kind = type(load(str(tmp_path), torch.bfloat16)).__name__
    found = capsys.readouterr().out
    assert found.startswith(said.format(kind, *more)) and (said or not found)


# ------------------------------------------------------------------------------------------------ multimodal models
@parametrize("head, whole, text, tied", [
    (True, True, False, False),  # Ministral 3 with 8B: the default of the whole is True
    (True, True, True, True), (False, True, False, True), (False, False, False, False),
])  # fmt: skip
def test_head_and_embedding_are_tied_if_both_configurations_say_so_or_there_is_no_head(
    head, whole, text, tied, tmp_path
):
    small_model("Mistral3", not head).save_pretrained(tmp_path)
    of_text = read_json(tmp_path / "config.json")["text_config"] | {"tie_word_embeddings": text}
    rewrite("config.json", tie_word_embeddings=whole, text_config=of_text)(tmp_path)
    assert read_config(str(tmp_path)).tie_word_embeddings is tied


@pytest.mark.engine
@parametrize("name, tied, rank", [
    *((name, False, 4) for name in MULTIMODAL), ("Gemma3", True, 0), ("Qwen3Moe", False, 0), ("FalconH1", False, 0),
])  # fmt: skip
def test_training_stays_at_parity_reaches_every_tensor_and_leaves_folders_that_transformers_and_peft_read(
    name, tied, rank, tmp_path
):
    """policy/ of a multimodal model is its text model, adapter/ is for the whole."""
    source, out, ids = tmp_path / "model", tmp_path / "run", torch.tensor([[5, 6, 7, 8]])
    small_model(name, tied).save_pretrained(source)
    toy_tokenizer().save_pretrained(source)
    (tmp_path / "task.py").write_text(PYTHON)
    dtype = dtypes_of(name)[0]
    limit = {torch.float32: ROUNDING, torch.bfloat16: 0.1}[dtype]
    _, *steps = rows_of_run(
        tmp_path, out, f"--task {tmp_path}/task.py --steps 5 --max-new-tokens 12 --lora-rank {rank} --lr 0.02"
                       f" --eval-problems 2 --dtype {str(dtype).removeprefix('torch.')}")  # fmt: skip
    # A tie within rounding sends a token of a mixture to another expert, in one step of many.
    assert sorted(row["mismatch_abs_mean"] for row in steps)[2 if name == "Qwen3Moe" else 4] < limit
    trained, report = AutoModelForCausalLM.from_pretrained(out / "policy", output_loading_info=True)
    assert not any(report.values()) and trained.config.architectures == [type(trained).__name__]
    if rank:
        whole = AutoModelForImageTextToText.from_pretrained(source)
        apart = lambda model: (model(input_ids=ids).logits - trained(input_ids=ids).logits).abs().max()  # noqa: E731
        moved = apart(whole)
        left = apart(PeftModel.from_pretrained(whole, out / "adapter").eval())
        assert 5 * limit < moved and left < (moved / 4 if dtype == torch.bfloat16 else limit)
    else:
        before, after = (policy_in(folder).weights() for folder in (source, out / "policy"))
        assert all((after[each] != tensor).any() for each, tensor in before.items())  # expert by expert


# ------------------------------------------------------------------------------------------------ what is saved
@parametrize("name, base", [("Qwen2", 2e4), ("Gemma3Text", None), ("Llama, yarn", None)])
def test_a_saved_policy_has_the_umasks_mode_the_runs_sampling_and_a_base_that_transformers_4_finds(
    name, base, tmp_path
):
    """The sampling is without its length."""
    model, folder, mask = small_model(name, rope_theta=2e4), tmp_path / "policy", dict(top_k=5, top_p=0.9, min_p=0.02)
    model.save_pretrained(tmp_path)
    usual = os.umask(0o027)
    sampling, task = MaskedSampling(0.7, 4, (EOS, 0), **mask), SimpleNamespace(tokenizer=toy_tokenizer())
    save_policy(SimpleNamespace(sampling=sampling, task=task), model, folder)
    os.umask(usual)
    assert (folder / "model.safetensors").stat().st_mode == 0o100640
    saved = read_json(folder / "generation_config.json")
    assert saved.pop("transformers_version")
    assert saved == mask | {"do_sample": True, "temperature": 0.7, "eos_token_id": [EOS, 0], "pad_token_id": 0}
    assert read_json(folder / "config.json").get("rope_theta") == base


def test_a_folder_appears_when_it_is_whole_and_the_faster_of_two_processes_wins(tmp_path):
    theirs = tmp_path / "model"
    with appears_whole(theirs) as new:
        for folder in new, theirs:
            assert not theirs.exists()
            folder.mkdir()
            (folder / "file").write_text(folder.parent.name)
    assert (theirs / "file").read_text() == tmp_path.name and [*tmp_path.iterdir()] == [theirs]

