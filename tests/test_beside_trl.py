"""examples/beside_trl.py without TRL: what it asks for, and the rows of this program's side."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, close_live_engine

from examples import beside_trl
from lab.models import write_model

ROW = {"steps": [[900.0, 1.0, 512]], "engine": "", "card": "", "versions": {}}


@pytest.mark.parametrize("python", ["/no/python", "/bin/false"])
def test_without_trl_it_says_how_to_install_it(python, tmp_path):
    with pytest.raises(ValueError, match=r"trl must be .* got /.*; try .*pip install 'trl\[vllm\]==1\.16\.0'"):
        beside_trl.compare(Path(python), tmp_path / "out")


@pytest.mark.engine
def test_every_answer_of_this_program_has_all_its_tokens(tmp_path, monkeypatch, capsys):
    """TRL's process is replaced by a row; this program's runs here."""

    def call(program, **_):
        if program[2] == beside_trl.WRITE:
            write_model(*program[3:], 0)
        elif program[2] == beside_trl.SIDE:
            job = json.loads(program[3])
            close_live_engine()
            if job["side"] == "ours":
                beside_trl.run_side(program[3])
            else:
                Path(f"{job['run']}.json").write_text(json.dumps(job | ROW))

    monkeypatch.setattr(beside_trl, "subprocess", SimpleNamespace(call=call, check_call=call))
    monkeypatch.chdir(ROOT)
    beside_trl.compare(tmp_path, tmp_path / "out", steps=2)
    rows = json.loads((tmp_path / "out" / "record.json").read_text())
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("| ours")]
    for row, text in zip(rows[1::2], lines, strict=True):
        assert [tokens for *_, tokens in row["steps"]] == [4 * 8 * 16] * 2
        assert all(0 < sampling < step for step, sampling, _ in row["steps"])
        step = sum(step for step, *_ in row["steps"]) / 2
        assert text.endswith(f"| {512 / step:.0f} | {900 / step:.2f} |")
