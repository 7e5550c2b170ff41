"""Executes docs/one-step.ipynb and writes its outputs anew: `python -m examples.one_step`.

The notebook holds the code. This is a `jupyter execute` without Jupyter, which is no requirement.
"""

import base64
import contextlib
import io
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parents[1] / "docs/one-step.ipynb"


def run_cell(source: str, namespace: dict) -> list[dict]:
    """Runs the code and returns what it prints and draws, as outputs of nbformat 4."""
    outputs, printed = [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, NOTEBOOK.name, "exec"), namespace)
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, dpi=80)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def run(notebook: dict) -> dict:
    """Runs all code cells, writes the outputs into them and returns their namespace."""
    matplotlib.use("agg")
    namespace = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["execution_count"] = number
        cell["outputs"] = run_cell("".join(cell["source"]), namespace)
    return namespace


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    run(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
