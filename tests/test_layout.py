"""Who may import what: the table of layers, which leaves no room for a circle."""

import ast

import pytest
from helpers import ROOT

# What a file or a folder may import of ours; in addition, what is imported in a function for an option.
CORE = {
    "grpo": "", "objectives": "", "report": "", "config": "engine_adapter objectives report tasks verify", "models": "",
    "tasks": "report",
    "verify": "report", "engine_adapter": "report tasks verify",
    "rl": "config engine_adapter models objectives",
    "run": "config engine_adapter models objectives report rl tasks verify",
    "train": "config engine_adapter objectives report rl run tasks",
}  # fmt: skip
MAY_IMPORT = {name: set(others.split()) for name, others in CORE.items()}
MAY_IMPORT["examples"] = set(CORE) - {"grpo"} | {"extras"}
MAY_IMPORT["extras"] = set(CORE) - {"grpo"}
MAY_IMPORT["probe"] = MAY_IMPORT["extras"] | {"extras", "examples"}
MAY_IMPORT["exercises"] = set()  # a student's functions are his own
MAY_IMPORT["lab"] = MAY_IMPORT["probe"] | {"probe", "exercises"}
# Files of extras/ that import nothing of ours, and who imports them.
RARE_CASES = {"models": {"extras.further_tokens", "extras.multimodal", "extras.transformers4"}}
MAY_IMPORT |= {name: set() for names in RARE_CASES.values() for name in names}
FOR_AN_OPTION = {"run": {"extras", "probe", "examples", "extras.further_tokens", "verify"},
                 "tasks": {"examples", "models"},
                 "extras": {"examples"}} | RARE_CASES  # fmt: skip
VLLM = {"engine_adapter", "verify", "extras", "examples", "lab"}  # in functions: help and refusals do not wait for it
FILES = [*sorted(ROOT.glob("*.py")), *(each for room in ("tasks", "verify", "report", "extras", "probe", "lab",
                                                                "examples", "exercises")
                                       for each in sorted((ROOT / room).rglob("*.py")))]  # fmt: skip


def place(module: str) -> str:
    """Its row in the table: of a few files their own, of all others their first name."""
    return module if module in MAY_IMPORT else module.split(".")[0]


def imported(nodes: list[ast.AST]) -> set[str]:
    """The places of the modules that these statements import."""
    found = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    found += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {*map(place, found)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_what_its_layer_may(path):
    tree, room = ast.parse(path.read_text()), place(".".join(path.relative_to(ROOT).with_suffix("").parts))
    at_the_top, everywhere = imported(tree.body), imported(list(ast.walk(tree)))
    assert at_the_top & MAY_IMPORT.keys() <= MAY_IMPORT[room] | {room}
    assert everywhere & MAY_IMPORT.keys() <= MAY_IMPORT[room] | {room} | FOR_AN_OPTION.get(room, set())
    assert "vllm" not in at_the_top or room == "grpo"
    assert "vllm" not in everywhere or room.split(".")[0] in VLLM | {"grpo"}
