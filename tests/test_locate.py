"""The verdict "exact", and `python -m probe locate`: what each part of the backend adds to the mismatch."""

import json
import re
import shutil

import pytest
import torch
from helpers import SMALL, close_live_engine, command, move, qwen2, small_model, timeless, train_here

from config import ParityFlags
from engine_adapter import Sampling
from extras.shared_engine import SharedEngine
from lab.ablate import ARMS
from probe.__main__ import main
from probe.diagnose import diagnose, sample_trace
from probe.locate import _sentence, locate
from rl import Policy


# ------------------------------------------------------------------------------------------------ exact
@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_is_exact_until_a_weight_changes(tmp_path, dtype):
    close_live_engine()
    qwen2(tied=False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), dtype, "cpu")
    engine = SharedEngine(policy, str(tmp_path), ParityFlags(), exact=True, max_model_len=64)
    try:
        engine.load(policy.weights(), policy.response_logprobs)
        prompts = [list(range(5, 8 + index)) for index in range(24)]
        trace = sample_trace(engine, prompts, Sampling(0.7, 24, top_k=20), [*range(24)])
        verdict, earlier = diagnose(policy, trace), policy.copied_weights()
        assert verdict.status == "exact", verdict.sentence
        assert verdict.sentence.startswith("exact: all 576 tokens are equal bit for bit")
        assert verdict.record()["mismatch"]["max"] == 0 < verdict.start.floor.mean
        assert policy.body == engine.kernel_body  # the measurement of the floor has put it back
        move(policy, 0.02, seed=1)
        verdict = diagnose(policy, trace, [earlier])
        assert "1 update(s)" in verdict.blamed, verdict.sentence
        policy.body = policy.own_body
        assert diagnose(policy, trace, [earlier]).blamed == verdict.blamed
    finally:
        engine.close()


@pytest.mark.engine
@pytest.mark.filterwarnings("error:Data has no positive values")
def test_a_live_probe_of_an_exact_run_is_exact_and_tis_then_changes_nothing(good, tmp_path):
    """Three policies with and without TIS: at a mismatch of 0 the weights are 1 and all metrics are equal."""
    runs, more = {}, ("--dtype", "bfloat16", "--steps", "2", "--lr", "1e-2", "--probe-every", "1",
                      "--self-noise-every", "1")
    for arm in ("exact+three", "exact+tis"):
        model = shutil.copytree(good / "model", tmp_path / "models" / arm)
        own = ("--out", str(tmp_path / arm), "--model", str(model))
        train_here(command(good, "--task {root}/task.py", *SMALL, *own, *more, *ARMS[arm]))
        runs[arm] = timeless(tmp_path / arm)
    without, with_tis = runs.values()
    for row in with_tis[1:]:
        assert (row["probe"], row["mismatch_max"], row["ess"], row["tis_clip_frac"]) == ("exact", 0, 1, 0)
        assert row["self_noise_abs_mean"] > 0
        assert row["grad_norm"] > 0
    assert [row | {"tis_clip_frac": None} for row in with_tis] == [row | {"tis_clip_frac": None} for row in without]


# ------------------------------------------------------------------------------------------------ locate
def located(capsys, folder, *options: str) -> tuple[list[list[str]], str]:
    """The table's figures, and the sentence."""
    close_live_engine()
    with pytest.raises(SystemExit) as stop:
        main(["locate", "--model", str(folder), "--num-prompts", "9", "--max-new-tokens", "16", *options])
    assert stop.value.code == 0
    *table, sentence = capsys.readouterr().out.strip().splitlines()[-5:]
    return [line.split()[-3:] for line in table], sentence


@pytest.mark.engine
def test_a_fault_of_the_ordinary_engine_alone_is_located_in_the_models_code(tmp_path):
    model, other = tmp_path / "model", tmp_path / "engine"
    qwen2(tied=False).save_pretrained(model)
    for folder, epsilon in ((model, 1e-6), (other, 1e-2)):
        folder.mkdir(exist_ok=True)
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": epsilon}))
    policy = Policy.load(str(model), torch.bfloat16, "cpu")
    prompts, seeds = [[*range(5, 9 + index)] for index in range(9)], [*range(9)]
    close_live_engine()
    # Only the ordinary engine computes with the folder's epsilon: the shared one has the policy's modules.
    steps, sentence = locate(policy, str(other), ParityFlags(), prompts, seeds, Sampling(0.7, 16), max_model_len=64)
    share = int(re.search(r": (\d+) % from the model's code", sentence)[1])
    assert share > 50, sentence
    assert [*steps.values()][-1].max() == 0
    assert sentence.endswith("remaining 0 (exact)")


@pytest.mark.engine
def test_where_exact_is_refused_the_sentence_says_why(tmp_path, capsys):
    small_model("Qwen3Moe", False).save_pretrained(tmp_path)
    _, sentence = located(capsys, tmp_path)
    assert "(a product of few rows is rounded differently (qwen3_moe, torch.float32" in sentence


def test_the_sentence_gives_each_part_its_share_of_the_mean():
    assert _sentence([1e-2, 8e-3, 5e-5, 0.0], "") == (
        "mean |mismatch| 1.0e-02: 20 % from the model's code, 80 % from attention, less than 1 % from batching;"
        " remaining 0 (exact)")
    found = _sentence([1e-2, 1.1e-2, 1e-3, 1e-3], "")  # rounding of another kind is not less rounding
    assert ": 0 % from the model's code, 90 % from attention, 0 % from batching; remaining 1.0e-03 (not exact)" in found
    assert "0 % from attention" in _sentence([0.0] * 4, "")
