"""Fixtures, and the rules for the markers `engine`, `gpu` and `own_process`.

A process holds one live engine at a time, because vLLM's parallel groups are global to a process. A test that starts
an engine, in this process or in a child process, has the marker `engine`; `make check` leaves these tests out. On a GPU
vLLM refuses an engine if the process still holds memory of an earlier one: a test that starts one in this process and
needs a GPU has the marker `own_process` too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_path import RUNNER
from helpers import (  # before torch: it sets the number of threads
    LONG,
    OWN_PROCESS,
    PYTHON,
    SHIFT,
    TASK,
    qwen2,
    rewrite,
    task_of,
)
from torch import cuda, manual_seed

from rl import Policy
from tasks import Task
from tasks.toys import toy_tokenizer

collect_ignore = [] if RUNNER == "v2" else ["test_runner_v2.py"]
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the size that an engine is given

# ------------------------------------------------------------------------------------------------ markers
NO_ENGINE = str(Path(__file__).parent / "no_engine")  # its sitecustomize.py refuses the import of vllm


def pytest_configure(config):
    for marker in (
        "engine: starts a vLLM engine, in this process or in a child process",
        "gpu: needs a CUDA device; a GPU machine runs `pytest -m gpu tests`", "own_process: runs in a child process",
        "part: of the tests that `make test` runs on model runner V2 too",
    ):  # fmt: skip
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config, items):
    if RUNNER == "v2":
        mark_part(items)
    for item in items:
        if item.get_closest_marker("gpu") and not cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    # The longest test goes first, beside all others: at the end it would run alone.
    items.sort(key=lambda item: item.name != "test_the_default_job_learns_at_parity")


def mark_part(items):
    from gpu_path.chosen import PART

    unknown = {*PART}
    for item in items:
        named = {name for name in PART if item.nodeid.removeprefix("tests/").startswith(name)}
        unknown -= named
        if named:
            item.add_marker("part")
    if unknown and len(items) > 500:  # all tests were collected
        raise pytest.UsageError(f"tests/gpu_path/chosen.py names no test with {unknown}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test with the marker `own_process` passes if it passes in a child process."""
    if "own_process" not in pyfuncitem.keywords or OWN_PROCESS in os.environ:
        return None
    program = [sys.executable, "-m", "pytest", "-q", "--runxfail", f"{pyfuncitem.path}::{pyfuncitem.name}"]
    environment = os.environ | {OWN_PROCESS: str(os.getpid())}
    child = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=500)
    if child.returncode:
        pytest.fail(f"in a process of its own:\n{child.stdout[-5000:]}{child.stderr[-2000:]}", pytrace=False)
    return True


@pytest.fixture(autouse=True)
def engine_rule(request, monkeypatch):
    """Only a test with the marker `engine` imports vllm, in this process or in a child process."""
    allowed, before = "engine" in request.keywords, sys.modules.get("vllm")
    if not allowed:
        monkeypatch.setenv("PYTHONPATH", NO_ENGINE, prepend=os.pathsep)
    yield
    if not allowed and before is None and sys.modules.get("vllm") is not None:
        pytest.fail("this test starts an engine: mark it @pytest.mark.engine")


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws without a seed of its own does not depend on the tests before it."""
    manual_seed(SHIFT)


# ------------------------------------------------------------------------------------------------ small models
@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory) -> str:
    """The folder of an untied model. Its generation_config.json asks for another distribution in every way it can."""
    traps = {"repetition_penalty": 1.8, "top_k": 3, "top_p": 0.5, "temperature": 0.2, "min_p": 0.3, "eos_token_id": 50}
    root = tmp_path_factory.mktemp("engine")
    qwen2().save_pretrained(root)
    rewrite("generation_config.json", **traps)(root)
    return str(root)


@pytest.fixture
def policy() -> Policy:
    """With the weights of `engine_folder`."""
    return Policy(qwen2())


# ------------------------------------------------------------------------------------------------ a small run
@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A folder with all that a run needs: model/, task.jsonl, task.py, and long.py with long prompts."""
    root = tmp_path_factory.mktemp("good")
    qwen2(tied=True).save_pretrained(root / "model")
    toy_tokenizer().save_pretrained(root / "model")
    (root / "task.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    (root / "task.py").write_text(PYTHON)
    (root / "long.py").write_text(LONG)
    return root


@pytest.fixture
def loaded(tmp_path) -> Callable[..., Task]:
    """Loads the task of a Python text, written to task.py, or of rows, written to rows.jsonl."""
    def load(content, seed=0, **options) -> Task:
        path = tmp_path / ("task.py" if isinstance(content, str) else "rows.jsonl")
        path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
        return task_of(path, seed, **options)

    return load
