"""On a GPU: `pytest -m gpu tests` selects these and a few more. Their thresholds are those of 16 bits, not of fp32."""

import pytest
from helpers import command, python, read_json, rows

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_a_run_in_bf16_with_offload_sleeps_at_level_2_and_has_no_more_mismatch_than_noise(good):
    options = ("--dtype bfloat16 --steps 2 --max-new-tokens 16 --kv-cache-gib 1 --offload-optimizer"
               " --gradient-checkpointing --probe-every 1 --out {root}/gpu")  # fmt: skip
    python("train.py", *command(good, options))
    for step in rows(good / "gpu")[1:]:
        assert step["mismatch_abs_mean"] > 0 and step["probe"] == "parity"
        assert step["generate_gib"] - step["sleep_gib"] > 0.9  # the cache
    assert read_json(good / "gpu" / "config.json")["audit"]["sleep"] == "level 2"

