"""lab.classes: the table of models, its record and what a second call measures."""

import json

import pytest
from helpers import AT_PARITY, ROOT, close_live_engine

from lab.classes import CLASSES, RECORDS, main, small_model, table


@pytest.mark.engine
def test_cases_that_agree_or_are_refused_are_measured_once_and_printed(engine_folder, tmp_path, capsys):
    close_live_engine()
    words = ["Llama, biases", "XGLM", "--dtype", "float32", "--out", str(tmp_path)]
    main(words)
    row = "| Llama, biases | fp32 "
    assert row in capsys.readouterr().out
    path = tmp_path / "classes.json"
    record = json.loads(path.read_text())
    agreeing, refused = record["cases"].values()
    assert agreeing["nats"] < AT_PARITY * agreeing["noise"] < 1e-4
    assert (agreeing["not_proven"], agreeing["served_by"]) == ([], "LlamaForCausalLM")
    assert "['XGLMForCausalLM'] are not supported for now" in refused["refused"]
    assert record["origin"]["versions"]["torch"]

    agreeing["nats"] = 7.0  # a mark
    record["cases"] = {"Llama-biases-float32": agreeing}
    path.write_text(json.dumps(record))
    main(words)
    assert "[1/1] XGLM-float32: " in capsys.readouterr().out
    assert json.loads(path.read_text())["cases"] == {"Llama-biases-float32": agreeing, "XGLM-float32": refused}
    main(["--print", str(path)])
    assert f"{row}7e+00 (" in capsys.readouterr().out
    path.write_text(json.dumps(record | {"origin": "another commit"}))
    folder = tmp_path / "a-0.5b model"
    folder.symlink_to(engine_folder)
    main([str(folder), *words[2:]])
    [case] = json.loads(path.read_text())["cases"].values()
    assert (case["model"], case["tied"], case["nats"] < 1e-4) == (str(folder), False, True)


def test_the_table_groups_classes_that_are_refused_alike(tmp_path):
    good = dict(model="A", tied=False, dtype="float32", nats=1e-6, noise=5e-7, not_proven=["model.layers.N.gate.bias"])
    bad = "ValueError: vLLM 0.32.0 (cpu) cannot start {} (kv_cache_gib 0.25, block_size None): it is recurrent"
    off = ("engine_adapter.WeightLoadError: after load 1 the engine does not hold, or vLLM computes {} differently: the"
           " canary's mean |trainer - engine| is {} nats, more than 1e-4")  # fmt: skip
    near = good | dict(not_proven=[], model="E")
    cases = [good, good | dict(tied=True, nats=3e-6), near, near | dict(model="F", tied=True, nats=2e-6, noise=1e-6),
             *(dict(model=each, tied=False, dtype="bfloat16", refused=bad.format(each.lower())) for each in "AB"),
             *(dict(model=each, tied=False, dtype="float32", refused=off.format(each, ord(each))) for each in "CD")]
    assert table({"command": "it", "origin": {}, "cases": dict(enumerate(cases))}).split("\n")[4:] == [
        "| A T | fp32 3e-06 (6.0) | gate.bias |", "| E; F t | fp32 2e-06 (2.0) |  |",
        "", "Refused:", "", "- it is recurrent: A (bf16); B", "- the canary's mean: C (fp32 67); D (fp32 68)"]


def test_a_multimodal_class_has_the_sizes_in_its_text_model():
    for tied in CLASSES["Gemma3"]["tied"]:
        config = small_model("Gemma3", tied).config
        assert (config.text_config.hidden_size, config.text_config.tie_word_embeddings) == (64, tied)


def test_the_page_has_the_table_of_the_record():
    printed = table(json.loads((RECORDS / "classes.json").read_text()))
    assert printed[printed.index("| classes") :] in (ROOT / "docs" / "models.md").read_text()
