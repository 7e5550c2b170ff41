"""lab.classes: the table of models, its record and what a second call measures."""

import json

import pytest
from helpers import AT_PARITY, ROOT, close_live_engine

from lab.classes import RECORDS, main, table


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


def test_the_page_has_the_table_of_the_record():
    printed = table(json.loads((RECORDS / "classes.json").read_text()))
    assert printed[printed.index("| classes") :] in (ROOT / "docs" / "models.md").read_text()
