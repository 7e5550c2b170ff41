"""The tests themselves: what they may import from one another."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
FILES = [*sorted(TESTS.glob("test_*.py")), *sorted((TESTS / "long").glob("*.py"))]
ALONE = {path.stem for path in FILES} | {"conftest"}  # modules that no test file imports


def imported(path: Path) -> set[str]:
    """Modules that a file imports, in its functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def test_no_test_file_imports_another_one():
    assert len(FILES) >= 35
    for path in [*FILES, TESTS / "helpers.py", TESTS / "conftest.py"]:
        assert not imported(path) & ALONE, path.name
