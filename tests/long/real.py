"""SmolLM2-135M-Instruct, its weights rounded to 4 bits, in train.py, the probe and a fresh vLLM.

    .venv/bin/python -m examples.smollm2          # once
    .venv/bin/python tests/long/real.py           # pytest's options can follow

The packages are those of examples/requirements-real.txt.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m-instruct-4bit"
SMALL = ("--num-prompts", "8", "--max-new-tokens", "24", "--eval-problems", "4", "--no-eval-with-trainer",
         "--task", "examples/arithmetic.py", "--reward-limit-s", "60", "--lr", "1e-5")  # fmt: skip


def run(*words: str, status: int = 0) -> str:
    result = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout if status == 0 else result.stderr


def steps(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_workload_is_parity(tmp_path, dtype):
    """With a limit of 1.3 floors in float32 the clean engine was called unexplained."""
    trace = tmp_path / "trace.npz"
    run("-m", "probe", "record", "--model", MODEL, "--dtype", dtype, "--out", trace, "--num-prompts", "24",
        "--max-new-tokens", "32")  # fmt: skip
    said = run("-m", "probe", "diagnose", "--model", MODEL, "--dtype", dtype, "--brief", trace)
    assert ": parity. " in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_is_within_its_noise_floor(dtype):
    size = ("--num-prompts", "4", "--max-new-tokens", "24")
    said = run("-m", "probe", "layers", "--model", MODEL, "--dtype", dtype, *size)
    assert said.strip().endswith("all layers are within their noise floors")


def test_the_exact_engine_is_exact(tmp_path):
    run("train.py", "--out", tmp_path, "--model", MODEL, *SMALL, "--steps", "2", "--engine", "shared", "--exact")
    rows = steps(tmp_path)
    assert [row["exact_tokens"] for row in rows] == [row["tokens"] for row in rows]
    assert all(row["mismatch_max"] == 0 and row["updates"] for row in rows)


def test_the_saved_policy_is_the_trained_one_in_a_fresh_vllm(tmp_path):
    """And it is not the model of the start."""
    out, trace = tmp_path / "run", tmp_path / "trace.npz"
    run("train.py", "--out", out, "--model", MODEL, *SMALL, "--steps", "2")
    assert all(row["mismatch_abs_mean"] < 1e-5 and row["updates"] for row in steps(out))
    engine = {"dtype": "float32", "max_model_len": 128, "logprobs_mode": "processed_logprobs", "enforce_eager": True,
              "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**29}  # fmt: skip
    run("examples/record_vllm.py", "--model", out / "policy", "--out", trace, "--new-tokens", "16",
        "--engine-args", json.dumps(engine))  # fmt: skip
    words = ("--dtype", "float32", "--brief", trace)
    assert ": parity. " in run("-m", "probe", "diagnose", "--model", out / "policy", *words)
    refused = run("-m", "probe", "diagnose", "--model", MODEL, *words, status=2)
    assert "are not those that it names" in refused


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
