"""The ladder from the outside, on a model of seconds: fresh processes, finished runs kept, crashes reported."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import qwen2

from examples.toys import toy_tokenizer
from lab.ablate import ARMS, MARKERS, METRICS, Run, Spread, cell, execute, over_steps, write_readme

ROOT = Path(__file__).parents[1]


def ablate(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lab.ablate", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, cwd=ROOT)


@pytest.fixture
def small(tmp_path) -> tuple[str, ...]:
    """Options that put a tiny model and 12 short problems in the workload's place."""
    folder, task = tmp_path / "model", tmp_path / "task.jsonl"
    qwen2(tied=False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    task.write_text("\n".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) for n in range(12)))
    size = "--num-prompts 4 --group-size 4 --inflight-groups 2 --eval-problems 2 --lr 1e-3 --dtype float32"
    return f"--train-args=--model {folder} --task {task} {size}", "--steps", "2"


def test_a_crashed_arm_is_reported_the_others_go_on_and_finished_ones_are_kept(tmp_path, small):
    out = tmp_path / "ablation"
    (out / "runs").mkdir(parents=True)
    (out / "runs" / "v1-defaults-seed0").touch()  # a file where this arm's folder should be
    arms = ("--seeds", "1", "--arms", "reference", "v1-defaults", "parity", "parity-minus-fp32-head", "+inflight")
    first = ablate(out, *arms, *small)
    assert first.returncode == 1
    assert "v1-defaults, seed 0: CRASHED, exit status 2: error: out must be a writable folder" in first.stdout
    assert "[4/4]" in first.stdout  # +inflight and parity-minus-fp32-head are one run
    result = json.loads((out / "ablation.json").read_text())
    assert set(result["arms"]) == {"reference", "parity", "parity-minus-fp32-head", "+inflight"}
    assert result["arms"]["parity"]["runs"][0]["probe"] == "parity"
    assert result["arms"]["+inflight"]["runs"] == result["arms"]["parity-minus-fp32-head"]["runs"]
    assert "**Crashed**" in (out / "ablation.md").read_text()

    stamp = (out / "runs" / "parity-seed0" / "metrics.jsonl").stat().st_mtime_ns
    (out / "runs" / "v1-defaults-seed0").unlink()
    second = ablate(out, *arms, *small)
    assert second.returncode == 0, second.stdout + second.stderr
    assert (out / "runs" / "parity-seed0" / "metrics.jsonl").stat().st_mtime_ns == stamp
    result = json.loads((out / "ablation.json").read_text())
    text = (out / "ablation.md").read_text()
    assert "raw log-probabilities" in result["arms"]["v1-defaults"]["runs"][0]["probe"]
    assert all(f"| {arm} | " in text for arm in arms[3:])
    assert (out / "ablation.png").stat().st_size > 10_000
    assert result["device"] in text
    assert result["versions"]["vllm"] in text


def test_unknown_arms_and_unusable_numbers_get_a_sentence(tmp_path):
    for arguments, complaint in ((("--arms", "v2"), "arms must be of reference, v1-defaults"),
                                 (("--seeds", "0"), "seeds must be at least 1"),
                                 (("--arms", "parity", "parity"), "each once"),
                                 (("--train-args=--seed 3",), "must leave --seed to lab.ablate"),
                                 (("--train-args='",), "No closing quotation"),
                                 (("--readme", "none.md"), "none.md")):  # fmt: skip
        result = ablate(tmp_path, *arguments)
        assert result.returncode != 0
        assert complaint in " ".join(result.stderr.split()).replace("│ ", "")
        assert "Traceback" not in result.stderr


def test_the_ladder_mends_one_thing_at_a_time_and_ends_at_parity():
    ladder = ("v1-defaults", "+processed", "+runtime", "+inflight", "parity")
    left = [set(ARMS[arm]) for arm in ladder]
    assert [len(flags) for flags in left] == [4, 3, 2, 1, 0]
    assert all(fewer < more for more, fewer in pairwise(left))
    alone = [arm for arm in ARMS if arm.startswith("parity-minus-") and "+" not in arm]
    assert {ARMS[arm] for arm in alone} == {(flag,) for flag in left[0]}


def test_spread_is_the_range_over_seeds_and_separate_needs_more_than_it():
    narrow, wide, far = Spread((1.0, 1.1, 1.2)), Spread((1.15, 1.3, 1.4)), Spread((2.0, 2.1, 2.2))
    assert narrow.range == pytest.approx(0.2)
    assert far.apart(narrow) == pytest.approx(5.0)
    assert far.separate(narrow)
    assert not wide.separate(narrow)  # seeds overlap
    assert not Spread((1.22, 1.27, 1.32)).separate(narrow)  # they do not, but the means are no further than the range
    assert over_steps("kl", max)([{"kl": 1.0}, {}, {"kl": None}, {"kl": 3.0}]) == 3.0
    assert over_steps("kl")([{}]) is None
    assert METRICS["eval_true"].measure([{"eval_reward": 0.9, "eval_reward_trainer": 0.0}]) == 0.0
    assert cell("reward", {"reward": Spread((0.5,))}) == "0.50, one seed"
    assert cell("reward", {"reward": Spread((0.4, 0.6, 0.5))}) == "0.50 ± 0.10"


def test_a_run_that_was_cut_short_is_never_taken_for_a_finished_one(tmp_path):
    folder = tmp_path / "arm-seed0"
    finished = Run("arm", folder, [sys.executable, "-c", f"import os; os.makedirs({str(folder)!r})"], 1)
    assert execute(finished) is None
    marker = folder / "marker"
    marker.touch()
    assert execute(finished) is None
    assert marker.exists()  # not run again
    died = Run("arm", folder, [sys.executable, "-c", "import sys; sys.exit('died')"], 1)
    assert execute(died) == "exit status 1: died"
    assert not marker.exists()
    assert execute(finished) is None
    assert folder.exists()  # run again, though its options had finished once


def test_readme_text_is_replaced_between_its_markers_and_nowhere_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n")
    write_readme(path, "new")
    write_readme(path, "newer")
    assert path.read_text() == f"before\n{MARKERS[0]}\n\nnewer\n{MARKERS[1]}\nafter\n"
    path.write_text("no markers")
    with pytest.raises(ValueError, match="readme must hold the lines"):
        write_readme(path, "new")
