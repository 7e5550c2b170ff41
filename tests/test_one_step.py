"""docs/one-step.ipynb: what its outputs say follows from each other, and its cells compute such outputs again."""

import base64
import json
import re
import struct
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev

import pytest
from helpers import ROUNDING

from examples.one_step import NOTEBOOK, run

STORED = json.loads(NOTEBOOK.read_text())
BACKENDS = "parity", "raw log-probabilities", "stale prefix cache"


def sources(notebook: dict, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def outputs(notebook: dict) -> list[list[str | tuple]]:
    """By code cell: the printed text, and the size of each picture."""
    found = []
    for cell in notebook["cells"]:
        found.append([])
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                found[-1].append("".join(output["text"]))
            else:
                png = base64.b64decode(output["data"]["image/png"])
                assert png.startswith(b"\x89PNG")
                found[-1].append(struct.unpack(">II", png[16:24]))
    return found


def tables(notebook: dict) -> tuple[list[list[str]], dict[str, list[str]]]:
    """Rows of the responses, and by backend those of the summary."""
    responses, summary = (text for found in outputs(notebook) for text in found if isinstance(text, str))
    names = "|".join(BACKENDS)
    rows = re.findall(rf"^({names}) +(.*)", summary, re.M)
    return [row.split() for row in responses.splitlines()[1:]], {name: values.split() for name, values in rows}


def check(notebook: dict) -> None:
    """A reader's arithmetic on figures that are rounded to two or three digits."""
    responses, summary = tables(notebook)
    advantages = []
    for problem, response, reward, _ in responses:
        answer = list(map(max, *problem.split("+")))
        right = sum(map(str.__eq__, response, answer)) / max(len(response), len(answer))
        assert float(reward) == pytest.approx(right, abs=1e-3)
    for group in (responses[:4], responses[4:]):
        rewards = [float(reward) for _, _, reward, _ in group]
        advantages += [(reward - fmean(rewards)) / (stdev(rewards) + 1e-4) for reward in rewards]
    assert [float(row[3]) for row in responses] == pytest.approx(advantages, rel=0.02, abs=0.01)

    assert tuple(summary) == BACKENDS
    mismatch = {}
    for name, (mean, largest, *clipped, norm, norm_at_1, of_loss, of_no_clip) in summary.items():
        mismatch[name] = float(mean)
        assert mismatch[name] <= float(largest)
        counts = [tuple(map(int, each.split("/"))) for each in clipped]
        assert all(cut <= tokens for cut, tokens in counts)
        if sum(cut for cut, _ in counts) == 0:
            assert of_loss == of_no_clip
        if name == "parity":
            first = [(len(response) + 1, float(advantage)) for _, response, _, advantage in responses[:4]]
            with_signal = sum(length for length, advantage in first if advantage)
            assert [cut for cut, _ in counts] == [0, 0] and sum(tokens for _, tokens in counts) == with_signal
            assert float(norm) == pytest.approx(float(norm_at_1), rel=0.01)
            assert float(of_loss) == pytest.approx(1 if with_signal else 0, abs=2e-3)
        assert all(-1.001 <= float(cosine) <= 1.001 for cosine in (of_loss, of_no_clip))
    assert mismatch.pop("parity") < ROUNDING < 10 * ROUNDING < min(mismatch.values())


def test_the_outputs_follow_from_each_other():
    check(STORED)


def test_the_text_says_what_the_outputs_show():
    text = " ".join(" ".join(sources(STORED, "markdown")).split())
    responses, summary = tables(STORED)
    assert set(re.findall(r"`(\d+)`", text)) <= {response for _, response, *_ in responses}
    _, _, *clipped, norm, norm_at_1, _, _ = summary["raw log-probabilities"]
    assert "a single clipped token takes away almost half of the norm" in text
    assert sum(int(each.split("/")[0]) for each in clipped) == 1
    assert 0.5 < float(norm) / float(norm_at_1) < 0.6
    assert "without it the gradients keep most of their norm and direction" in text
    assert min(float(row[-1]) for row in summary.values()) > 0.9


def test_the_notebook_is_one_that_was_executed():
    """Fields of nbformat 4.5, executed in order and small enough for a repository's web page."""
    assert (STORED["nbformat"], STORED["nbformat_minor"]) == (4, 5)
    code = [cell for cell in STORED["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in STORED["cells"]}) == len(STORED["cells"])
    assert len(NOTEBOOK.read_bytes()) < 400_000
    if find_spec("nbformat"):
        import nbformat

        nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))


@pytest.mark.engine
def test_the_cells_compute_such_outputs(tmp_path, monkeypatch):
    """The figures depend on the machine that taught the model; their form and the arithmetic do not."""
    from examples.toys import write_page

    monkeypatch.chdir(tmp_path)
    write_page(Path("runs/page"))  # teaches the model, and prints so, outside the notebook
    computed = json.loads(NOTEBOOK.read_text())
    steps = run(computed)["steps"]
    check(computed)

    def form(notebook: dict) -> list:
        return [[re.sub(r"-?\d\S*", "0", each).split() if isinstance(each, str) else each for each in found]
                for found in outputs(notebook)]

    assert form(computed) == form(STORED)
    _, summary = tables(computed)
    for name, step in steps.items():  # the gradient of the notebook and that of the trainer's update
        assert step.gradients["loss"].norm().item() == pytest.approx(step.metrics[0]["grad_norm"], rel=1e-3)
        cut = sum(int(each.split("/")[0]) for each in summary[name][2:4])
        tokens = step.batch.mask[:4].sum().item()
        assert step.metrics[0]["clip_rate"] == pytest.approx(cut / tokens, abs=1e-6)
