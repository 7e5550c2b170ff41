"""The README's links lead where they say."""

import json
import re
from pathlib import Path

from lab.ablate import ARMS, BACKEND, LEARNING, MARKERS, cell, spreads
from tasks import load_task

ROOT = Path(__file__).parents[1]


def test_the_ladder_in_the_readme_is_the_commands_own_output():
    """Its figures are those of docs/ablation.json, which ablate.py wrote beside them."""
    text, record = (ROOT / "README.md").read_text(), json.loads((ROOT / "docs" / "ablation.json").read_text())
    section = text.split(MARKERS[0])[1].split(MARKERS[1])[0]
    assert f"`{record['command']}` on {record['device']}" in section
    assert set(record["arms"]) == set(ARMS)
    for arm, entry in record["arms"].items():
        row = spreads(entry["runs"])
        for names in (LEARNING, BACKEND):
            line = f"| {arm} | {' | '.join(cell(name, row) for name in names)} |"
            assert line in section, line


def test_each_link_to_a_function_points_at_its_definition():
    links = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 15
    for name, file, number in links:
        lines = (ROOT / file).read_text().splitlines()[: int(number)]
        owner, _, last = name.rpartition(".")
        assert re.match(rf"{'    ' * bool(owner)}(def|class) {last}\b", lines[-1]), f"{file}:{number} is not {name}"
        classes = [line for line in lines if re.match(r"(def|class) ", line)]
        assert not owner or re.match(rf"class {owner}\b", classes[-1]), f"{file}:{number} is in {classes[-1]}"


def test_the_readmes_own_task_can_be_trained_on(tmp_path):
    """The lines a reader copies, loaded as the command loads them."""
    code = re.search(r"```python\n(# sorting.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) <= 15
    (tmp_path / "sorting.py").write_text(code)
    task = load_task(str(tmp_path / "sorting.py"), seed=0)
    assert (len(task.train), len(task.held_out)) == (9000, 1000)
    problem = task.held_out[0]
    assert sorted(problem.answer) == list(problem.answer)
    assert [task.reward(problem, text) for text in (f"It is {problem.answer}.", "hgfedcba", "")] == [1.0, 0.0, 0.0]
