"""Runs against the stored ones under docs/reference."""

import json
from pathlib import Path

import pytest

from lab.compare import STORED, main


def write_run(folder: Path, stored: dict, seed: int, change=lambda row: row, **options) -> str:
    folder.mkdir(parents=True)
    record = {name: stored[name] for name in ("versions", "commit", "device")}
    config = stored["options"] | {"seed": seed, "out": str(folder)} | options
    (folder / "config.json").write_text(json.dumps(record | {"config": config}))
    rows = [json.dumps(change(dict(row))) + "\n" for row in stored["runs"][seed]]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return str(folder)


@pytest.mark.parametrize("job, seeds", [("default", 5), ("ladder-parity", 3), ("ladder-reference", 3)])
def test_a_stored_run_is_within_its_spread_and_a_worse_one_is_not(job, seeds, tmp_path, capsys):
    stored = json.loads((STORED / f"{job}.json").read_text())
    assert len(stored["runs"]) == seeds
    assert main([write_run(tmp_path / "same", stored, 1)]) == 0
    out = capsys.readouterr().out
    assert f"compared with {seeds} runs of {job}\n" in out
    assert out.count("inside (") == 8
    assert out.endswith("within the spread of the stored runs; furthest: reward, last 5 steps, 0.00 seed ranges\n")
    worse = write_run(tmp_path / "worse", stored, 1, lambda row: row | {"reward": 0.9 * row.get("reward", 0.0)})
    assert main([str(tmp_path / "same"), worse]) == 1
    out = capsys.readouterr().out
    assert "reward, last 5 steps: 0.9" in out or "reward, last 5 steps: 0.8" in out
    assert "NOT within the spread of the stored runs; furthest: reward, last 5 steps, " in out


def test_other_options_are_named(tmp_path, capsys):
    stored = json.loads((STORED / "default.json").read_text())
    main([write_run(tmp_path / "run", stored, 0, lr=0.5, objective="gspo")])
    assert "compared with 5 runs of default; other options: lr, objective\n" in capsys.readouterr().out


def test_an_unfinished_run_is_refused(tmp_path, capsys):
    stored = json.loads((STORED / "default.json").read_text())
    folder = write_run(tmp_path / "run", stored, 0, steps=1000)
    with pytest.raises(SystemExit):
        main([folder])
    assert "it has 60 of 1000 steps" in capsys.readouterr().err


@pytest.mark.parametrize("words, complaint", [([], "at least one folder"), (["absent"], "reading the run in absent")])
def test_bad_input_is_one_sentence(words, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_runs_are_stored_without_seconds_and_only_of_one_job(tmp_path, capsys):
    stored = json.loads((STORED / "default.json").read_text())
    timed = lambda row: row | {"step_s": 1.0, "memory_gib": 2.0}  # noqa: E731
    folders = [write_run(tmp_path / f"run{seed}", stored, seed, timed) for seed in range(2)]
    elsewhere = ["--stored", str(tmp_path / "reference")]
    with pytest.raises(SystemExit):
        main([folders[0], *elsewhere])
    assert "has none; try --store NAME" in capsys.readouterr().err
    assert main([*folders, *elsewhere, "--store", "mine"]) == 0
    assert main([folders[0], *elsewhere]) == 0
    again = json.loads((tmp_path / "reference" / "mine.json").read_text())
    assert again["runs"] == stored["runs"][:2]
    assert again["options"] == stored["options"]
    other = write_run(tmp_path / "other", stored, 2, steps=3)
    with pytest.raises(SystemExit) as stop:
        main([folders[0], other, *elsewhere, "--store", "mixed"])
    assert stop.value.code == 2
    assert "must be of one job" in capsys.readouterr().err
