"""The tokens of a folder and of its export.

tests/data/tokenizers.json has published forms of tokenizer.json, with small vocabularies.
"""

import json
from pathlib import Path

import pytest
from helpers import TOKENIZERS, published
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from tasks.model_folder import load_tokenizer

TEXTS = TOKENIZERS["texts"]
GENERIC = "PreTrainedTokenizerFast"


BEGINS = "<|begin|> $A"


def source(folder: Path, form: str, kind: str, label: str | None, template: str = BEGINS, **config) -> Tokenizer:
    """A model's folder without weights, and its tokenizer.json as the Rust library reads it alone."""
    alone = published(form)
    alone.add_special_tokens(["<|begin|>", "<|end|>", "<unk>"])
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    alone.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    AutoConfig.for_model(kind).save_pretrained(folder)
    alone.save(str(folder / "tokenizer.json"))
    config |= {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": label,
               "additional_special_tokens": ["<unk>"], "clean_up_tokenization_spaces": True}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return alone


def exported(tokenizer: PreTrainedTokenizerFast, folder: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("form, kind, label", TOKENIZERS["rows"])
def test_tokens_are_those_of_the_file_whatever_the_label_also_in_the_export(form, kind, label, tmp_path):
    alone = source(tmp_path / "source", form, kind, label, from_slow=True)
    tokenizer = load_tokenizer(str(tmp_path / "source"))
    exported(tokenizer, tmp_path / "policy", kind)
    readers = [tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path / "policy")]
    if kind != "qwen2":  # transformers 5 has one class for this type
        readers.append(AutoTokenizer.from_pretrained(tmp_path / "policy"))
    for text in TEXTS:
        ids = alone.encode(text).ids
        for each in readers:
            assert each(text)["input_ids"] == ids
            assert each.decode(ids) == alone.decode(ids, skip_special_tokens=False)
        if form in ("llama3", "deepseek", "gpt2"):
            assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize("label, template, asked, begin, end", [
    ("LlamaTokenizerFast", "$A", True, [0], []), ("LlamaTokenizer", BEGINS, False, [], []),
    ("GemmaTokenizer", BEGINS, True, [0], []), (GENERIC, BEGINS, False, [0], []), ("GPT2Tokenizer", "$A", True, [], []),
    (None, BEGINS, False, [0], []),
    # What the file adds stays if add_bos_token asks for no change.
    ("LlamaTokenizer", "<|begin|> $A <|end|>", True, [0], [1]), ("LlamaTokenizer", "$A <|begin|>", True, [], [0]),
])  # fmt: skip
def test_add_bos_token_is_obeyed_for_labels_whose_class_obeys_it_in_transformers_4(
    label, template, asked, begin, end, tmp_path
):
    alone = source(tmp_path, "llama3", "llama", label, template, add_bos_token=asked)
    tokenizer = load_tokenizer(str(tmp_path))
    exported(tokenizer, tmp_path / "policy", "llama")
    ids = [*begin, *alone.encode("0", add_special_tokens=False).ids, *end]
    assert tokenizer("0")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path / "policy")("0")["input_ids"] == ids


def test_two_files_that_number_a_token_differently_are_refused(tmp_path):
    source(tmp_path, "llama3", "llama", GENERIC, added_tokens_decoder={500: {"content": "<|more|>"}})
    with pytest.raises(ValueError, match=r"<\|more\|> is not token 500 there"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_draws_its_tokens_is_refused(tmp_path):
    alone = source(tmp_path, "llama3", "llama", GENERIC)
    alone.model.dropout = 0.1
    alone.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must be without dropout"):
        load_tokenizer(str(tmp_path))
