"""Who may import what: the table of layers, which leaves no room for a circle."""

import ast
import re

from helpers import ROOT, parametrize, python

# What a file or a folder may import of ours at its top.
MAY_IMPORT = {
    "grpo": "verify", "objectives": "", "report": "objectives", "model_folder": "report", "vllm_cases": "",
    "tasks": "model_folder report", "engine_adapter": "model_folder report tasks vllm_cases",
    "rl": "engine_adapter model_folder objectives", "verify": "engine_adapter model_folder report rl tasks vllm_cases",
    "train": "engine_adapter extras model_folder objectives report rl tasks verify vllm_cases",
    "extras": "engine_adapter model_folder objectives report rl tasks verify vllm_cases",
    "examples": "engine_adapter extras model_folder objectives report rl tasks verify",
    "lab": "engine_adapter exercises extras model_folder objectives report rl tasks train verify vllm_cases",
    "exercises": "",  # a student's functions are his own
}  # fmt: skip
VLLM = {"grpo", "engine_adapter", "verify", "vllm_cases", "extras", "examples", "lab"}  # in functions
FILES = sorted([*ROOT.glob("*.py"), *(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))])


def imported(nodes):
    """The files and folders that these statements import."""
    found = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    found += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {module.split(".")[0] for module in found}


@parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_what_its_layer_may(path):
    tree, room = ast.parse(path.read_text()), path.relative_to(ROOT).with_suffix("").parts[0]
    at_the_top, everywhere = imported(tree.body), imported([*ast.walk(tree)])
    allowed = {room, *MAY_IMPORT[room].split()}
    assert at_the_top & MAY_IMPORT.keys() <= allowed
    assert everywhere & MAY_IMPORT.keys() <= allowed
    assert "vllm" not in at_the_top or room == "grpo"
    assert "vllm" not in everywhere or room in VLLM


def test_the_page_has_at_most_300_lines_and_a_copy_of_it_needs_the_proof_alone(tmp_path):
    """Without verify/__init__.py, and nothing else of ours."""
    page, proof = ((ROOT / name).read_text() for name in ("grpo.py", "verify/proof.py"))
    assert page.count("\n") <= 300
    assert re.findall(r"^ *(?:from|import) +(?:verify|report)\b.*?import", page, re.M) == ["from verify.proof import"]
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify" / "proof.py").write_text(proof)
    python("-c", "from verify.proof import differing", folder=tmp_path)
