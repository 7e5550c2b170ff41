"""`python -m probe place` on logs of TRL and of train.py, on rows as verl and prime-rl write them, and on bad input."""

import json
import re
from pathlib import Path

import pytest
from helpers import DATA, ROOT, SMALL, command, exit_status, refusal, rewrite, train_here

from probe.__main__ import main
from probe.place import METRICS, ROWS


def place(capsys, log: Path, *dtype: str) -> tuple[int, dict[str, str]]:
    """The exit status, and what is printed of each metric."""
    capsys.readouterr()
    status = exit_status(main, ["place", str(log), *(f"--dtype={each}" for each in dtype)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("next: python -m probe diagnose ")
    return status, dict(line.split(": ", 1) for line in lines[:-2])


@pytest.mark.parametrize("name, status, placed", [
    ("", 0, "mean 0.00305, last 0.00346, largest 0.00346; normal for bfloat16 (limits (0.02, 0.049)), most like: par"),
    ("_raw", 1, "mean 0.0345, last 0.034, largest 0.0351; high for bfloat16 (limits (0.02, 0.049)), most like: stale"),
])  # fmt: skip
def test_a_log_of_trl_is_placed(capsys, name, status, placed):
    """The engine rounds to bfloat16 (TRL's own arguments), in the second log with raw log-probabilities too."""
    found, metrics = place(capsys, DATA / f"trl_1.16.0{name}.json", "bfloat16")
    difference, ratio = metrics.values()
    assert (found, list(metrics)) == (status, [each for each in METRICS if each.startswith("sampling/")])
    assert difference.startswith(placed)
    assert ratio.endswith("not comparable: after TRL's mask or cap")


def test_a_run_at_parity_is_normal(capsys, good, tmp_path):
    train_here(command(good, f"--out {tmp_path} --steps 2 --engine transformers", *SMALL))
    log = tmp_path / "metrics.jsonl"
    status, metrics = place(capsys, log)  # config.json names the dtype
    assert (status, list(metrics)) == (0, [each for each in METRICS if each.startswith("current_")])
    assert ["; normal for float32" in text for text in metrics.values()] == [True, True]
    assert place(capsys, log, "float32") == (status, metrics)


@pytest.mark.parametrize("beside", [None, {"dtype": "float32"}, {"config": {}}])  # a model's, which TRL writes there
def test_a_log_without_a_known_dtype_is_refused(capsys, tmp_path, beside):
    log = write_log(tmp_path, {"current_mismatch_kl": 1e-5})
    if beside:
        rewrite("config.json", **beside)(tmp_path)
    assert "error: dtype must be given (no config.json of train.py is " in refusal(["place", str(log)], capsys, main)
    assert place(capsys, log, "bfloat16")[0] == 0


def write_log(folder: Path, *rows: dict) -> Path:
    log = folder / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    return log


def test_rows_of_verl_and_prime_rl_and_what_cannot_be_compared(capsys, tmp_path):
    """verl's FileLogger puts the metrics into `data`, prime-rl's FileMonitor beside the step, in one of many rows."""
    verl = {"rollout_corr/kl": -0.01, "training/rollout_probs_diff_mean": 0.004, "actor/lr": None}
    rows = [{"step": step, "data": verl | {"rollout_corr/k3_kl": k3}} for step, k3 in enumerate((1e-4, 0.02))]
    status, metrics = place(capsys, write_log(tmp_path, *rows), "bfloat16")
    assert status == 1
    # The last value counts too.
    assert metrics["rollout_corr/k3_kl"].startswith("mean 0.01, last 0.02, largest 0.02; very high")
    assert all("; not comparable: " in metrics[name] for name in verl if name != "actor/lr")
    for row in ({"sampling/sampling_logp_difference/mean": 0.0}, {"step": 0, "data": verl},
                {"current_mismatch_abs_mean": 0.001, "current_mismatch_kl": 0.5}):  # fmt: skip
        assert place(capsys, write_log(tmp_path, row), "bfloat16")[0] == 1  # TRL logs 0 if it compared nothing
    rows = {"step": 1, "time": 0.5, "optim/lr": 1e-6}, {"step": 1, "time": 0.6, "mismatch_kl/all/mean": 0.0}
    status, metrics = place(capsys, write_log(tmp_path, *rows), "float32")
    assert status == 0
    placed = metrics["mismatch_kl/all/mean"]
    assert placed.startswith("mean 0, last 0, largest 0; normal for float32 (limits (1e-09, 1e-06)), ")


@pytest.mark.parametrize("text, complaint", [
    ('{"reward": 0.5}\n{"reward": 0.6}', "error: log must have one of current_mismatch_abs_mean, "),
    ("step 1 | mismatch_kl 1.0e-03", "as JSON lines or as a trainer_state.json failed: "),
    ('{"current_mismatch_kl": 1e-5}\n{"current_mismatch_kl": NaN}', "error: current_mismatch_kl must be finite"),
])  # fmt: skip
def test_a_file_that_is_no_log_is_refused_in_one_sentence(capsys, tmp_path, text, complaint):
    log = tmp_path / "log"
    log.write_text(text)
    said = refusal(["place", str(log), "--dtype", "bfloat16"], capsys, main)
    assert complaint in said and said.count("error: ") == 1, said


def test_the_table_of_the_page_is_that_of_the_code():
    section = (ROOT / "docs" / "probe.md").read_text().split("\n## Is my mismatch normal?\n")[1].split("\n## ")[0]
    cells = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if line.startswith("| ")][2:]
    assert {label: tuple(map(float, numbers[:2])) for label, *numbers in cells} == ROWS
