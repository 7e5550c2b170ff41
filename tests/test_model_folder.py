"""The tokens of a folder, and what its export is for transformers 4 and 5.

tests/data/tokenizers.json has published forms of tokenizer.json, with small vocabularies.
"""

import inspect
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import ROUNDING, TOKENIZERS, published, python, read_json, small_model
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from extras.transformers4 import add_old_names
from report.files import write_folder
from tasks import Problem, Task, exact_match
from tasks.model_folder import check_tokens, load_tokenizer
from tasks.toys import toy_tokenizer

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


def exported(tokenizer: PreTrainedTokenizerFast, folder: Path, **config) -> None:
    AutoConfig.for_model(**config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_old_names(folder, tokenizer)


@pytest.mark.parametrize("form, kind, label, kept", TOKENIZERS["rows"])
def test_tokens_are_those_of_the_file_whatever_the_label_also_in_the_export(
    form, kind, label, kept, tmp_path, capsys
):
    alone = source(tmp_path / "source", form, kind, label, from_slow=True)
    tokenizer = load_tokenizer(str(tmp_path / "source"))
    exported(tokenizer, tmp_path / "policy", model_type=kind)
    written = read_json(tmp_path / "policy" / "tokenizer_config.json")
    assert (written["tokenizer_class"], written["additional_special_tokens"]) == (kept, ["<unk>"])
    assert written["add_prefix_space"] == {"gpt2": False, "prefix": True}.get(form)
    assert not {"extra_special_tokens", "from_slow"} & written.keys()  # version 4 takes no list, and has no slow class
    readers = [tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path / "policy")]
    named = "reads other tokens" in capsys.readouterr().out
    assert named == (kind == "qwen2" and form != "qwen")  # transformers 5 has one class for this type
    if not named:
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
    exported(tokenizer, tmp_path / "policy", model_type="llama")
    ids = [*begin, *alone.encode("0", add_special_tokens=False).ids, *end]
    assert tokenizer("0")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path / "policy")("0")["input_ids"] == ids
    written = read_json(tmp_path / "policy" / "tokenizer_config.json")
    assert (written["add_bos_token"], written["add_eos_token"]) == (bool(begin), end == [1])


def check(folder: Path, *questions: str) -> None:
    problems = [Problem(each, "", "") for each in questions]
    check_tokens(str(folder), Task(problems, problems[:1], exact_match, tokenizer=load_tokenizer(str(folder))))


def test_questions_are_compared_with_the_file_itself(tmp_path):
    flags = {"content": "<|end|>", "lstrip": True, "normalized": False, "special": True}
    alone = source(tmp_path, "llama3", "llama", GENERIC, added_tokens_decoder={1: flags}, split_special_tokens=True)
    alone.enable_truncation(3)  # as an embedding model's
    alone.enable_padding(length=9)
    alone.save(str(tmp_path / "tokenizer.json"))
    check(tmp_path, *TEXTS[:-1], "<|end|>")
    with pytest.raises(ValueError, match=r"makes \(\[.*\], 'a<\|end\|>'\) of 'a <\|end\|>', and not \(\["):
        check(tmp_path, "a", "a <|end|>")
    source(tmp_path, "llama3", "llama", GENERIC, added_tokens_decoder={500: flags | {"content": "<|more|>"}})
    with pytest.raises(ValueError, match=r"<\|more\|> is not token 500 there"):
        load_tokenizer(str(tmp_path))
    alone = source(tmp_path, "llama3", "llama", GENERIC)
    alone.model.dropout = 0.1
    alone.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must be without dropout"):
        check(tmp_path, "a")
    source(tmp_path, "wordpiece", "gpt2", "BertTokenizer")  # lower case, no spaces: the file's own text
    check(tmp_path, *TEXTS)


def without_json(folder: Path, *described: str) -> Path:
    source(folder, "gpt2", *described)
    (folder / "tokenizer.json").unlink()
    return folder


def test_without_tokenizer_json_the_questions_must_come_back(tmp_path):
    model = TOKENIZERS["models"]["bytes"]
    folder = without_json(tmp_path, "gpt2", "Qwen2Tokenizer")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    check(folder, *TEXTS)
    with pytest.raises(ValueError, match=r"'é'.*, and not"):
        check(folder, "e\u0301")  # the class composes letters


def test_without_tokenizer_json_tokens_are_those_of_tokenizer_model(tmp_path):
    """transformers 5 leaves out the first space for a Llama tokenizer of a model of type mistral."""
    for kind, right in (("llama", True), ("mistral", False)):
        folder = without_json(tmp_path / kind, kind, "LlamaTokenizer")
        SentencePieceTrainer.train(sentence_iterator=iter(TEXTS[:2] * 9), model_prefix=f"{folder}/tokenizer",
                                   vocab_size=320, model_type="bpe", byte_fallback=True, minloglevel=2)  # fmt: skip
        with nullcontext() if right else pytest.raises(ValueError, match="must make the tokens of its file"):
            check(folder, TEXTS[0])
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id]  # as in transformers 4
    (folder / "tokenizer.model").write_text("IQ== 0\n")  # tiktoken's form
    with pytest.raises(ValueError, match=r"tokenizer\.model as SentencePiece's failed"):
        check(folder, TEXTS[0])


@pytest.mark.parametrize("options, old", TOKENIZERS["old_names"])
def test_config_json_has_the_old_names_beside_the_new_ones(options, old, tmp_path):
    exported(toy_tokenizer(), tmp_path, **options, dtype=torch.float32)
    written = read_json(tmp_path / "config.json")
    assert {name: written[name] for name in old} == old
    AutoConfig.from_pretrained(tmp_path)  # version 5 bears them, also where 4 does not know the class


# ------------------------------------------------------------------------------------------------ both versions
PLACE_OF_4 = os.environ.get("TRANSFORMERS_4")
WITH_4 = pytest.mark.skipif(not PLACE_OF_4, reason="TRANSFORMERS_4 names no folder with transformers 4 (README.md)")


# What a version of transformers computes, in a process of its own: the source of `outputs`, folders, texts, a file.
READ = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
{}
seen = dict(version=__version__)
for folder in {}:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen[folder] = outputs(model, AutoTokenizer.from_pretrained(folder), {})
torch.save(seen, {!r})"""


def outputs(model, tokenizer, texts: list[str]) -> tuple:
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        logits = model(input_ids=torch.arange(90)[None], use_cache=False).logits
    return logits, ids, [tokenizer.decode(each) for each in ids]


@pytest.mark.parametrize("version", ["5", pytest.param("4", marks=WITH_4)])
def test_an_exported_folder_has_the_same_logits_and_tokens_in_both_versions(version, tmp_path):
    written = {}
    for name, (form, label) in TOKENIZERS["classes"].items():
        model = small_model(name, rope_theta=1e6)
        source(tmp_path / "source", form, model.config.model_type, label)
        tokenizer = load_tokenizer(str(tmp_path / "source"))
        write_folder(model, tokenizer, tmp_path / name)
        add_old_names(tmp_path / name, tokenizer)
        written[str(tmp_path / name)] = outputs(model, tokenizer, TEXTS)
    script = READ.format(inspect.getsource(outputs), [*written], TEXTS, str(tmp_path / "seen.pt"))
    python("-c", script, folder=tmp_path, **{"PYTHONPATH": PLACE_OF_4} if version == "4" else {})
    seen = torch.load(tmp_path / "seen.pt")
    assert seen.pop("version").startswith(version)
    for folder, (logits, *tokens) in written.items():
        torch.testing.assert_close(seen[folder][0], logits, atol=ROUNDING, rtol=0)
        assert [*seen[folder][1:]] == tokens, folder
