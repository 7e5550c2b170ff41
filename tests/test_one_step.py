"""docs/one-step.ipynb: what its outputs say follows from each other, and its cells compute such outputs again."""

import re
from pathlib import Path

import pytest
from helpers import ROOT, ROUNDING, read_json

CELLS = read_json(ROOT / "docs" / "one-step.ipynb")["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
BACKENDS = "parity", "raw log-probabilities", "stale prefix cache"
PRINTED = ["".join(output["text"]) for cell in CODE for output in cell["outputs"] if "text" in output]


def checked(printed):
    """The rows of the summary, by backend."""
    rows = re.findall(rf"^({'|'.join(BACKENDS)}) +(.*)", printed[-1], re.M)
    summary = {name: values.split() for name, values in rows}
    assert tuple(summary) == BACKENDS
    parity, *others = (float(row[0]) for row in summary.values())
    assert parity < ROUNDING < 10 * ROUNDING < min(others)
    _, _, *clipped, norm, norm_at_1, _, _ = summary["parity"]
    assert all(share.startswith("0/") for share in clipped)
    assert float(norm) == pytest.approx(float(norm_at_1), rel=0.01)
    return summary


def test_the_stored_outputs_follow_from_each_other_and_show_what_the_text_says():
    """With raw values a single clipped token takes away almost half of the norm; without the clip most is kept."""
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))  # in order
    summary = checked(PRINTED)
    _, _, *clipped, norm, norm_at_1, _, _ = summary["raw log-probabilities"]
    assert sum(int(share.partition("/")[0]) for share in clipped) == 1
    assert 0.5 < float(norm) / float(norm_at_1) < 0.6
    assert min(float(row[-1]) for row in summary.values()) > 0.9


@pytest.mark.engine
def test_the_cells_compute_such_outputs(tmp_path, monkeypatch, capsys):
    """The figures depend on the machine that taught the model; their form and the arithmetic do not."""
    import matplotlib.pyplot as plt

    from tasks.toys import write_page

    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    write_page(Path("runs/page"))  # teaches the model, and prints so, outside the notebook
    capsys.readouterr()
    namespace, printed = {}, []
    for cell in CODE:
        exec(compile("".join(cell["source"]), "one-step.ipynb", "exec"), namespace)
        printed.append(capsys.readouterr().out)
    plt.close("all")
    printed = [*filter(None, printed)]
    checked(printed)
    ours, stored = ([re.sub(r"-?\d\S*", "0", text).split() for text in texts] for texts in (printed, PRINTED))
    assert ours == stored
    for step in namespace["steps"].values():  # the gradient of the notebook and that of the trainer's update
        assert step.gradients["loss"].norm().item() == pytest.approx(step.metrics[0]["grad_norm"] or 0, rel=1e-3)
