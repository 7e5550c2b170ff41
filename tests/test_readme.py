"""The README's links lead where they say."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_link_to_a_function_points_at_its_definition():
    links = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 15
    for name, file, number in links:
        lines = (ROOT / file).read_text().splitlines()[: int(number)]
        owner, _, last = name.rpartition(".")
        assert re.match(rf"{'    ' * bool(owner)}(def|class) {last}\b", lines[-1]), f"{file}:{number} is not {name}"
        classes = [line for line in lines if re.match(r"(def|class) ", line)]
        assert not owner or re.match(rf"class {owner}\b", classes[-1]), f"{file}:{number} is in {classes[-1]}"
