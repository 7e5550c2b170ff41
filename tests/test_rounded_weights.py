"""Rollouts from rounded weights: the engine gets them, exactly; the trainer keeps its own."""

import pytest
import torch
from helpers import ROUNDING, load_into, mismatch, move, parametrize, small_model, started, value_error

from extras.rounded_weights import LARGEST, RoundedWeights, rounded
from rl import Policy


@parametrize("kind", LARGEST)
def test_each_value_is_the_nearest_multiple_of_the_scale(kind):
    """The oracle tries all levels in float64."""
    levels = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn) if kind == "fp8" else torch.arange(
        2 ** (int(kind[3:]) - 1))  # fmt: skip
    weight, levels = torch.randn(5, 40), levels.double()
    sizes = weight.double().abs()
    grids = levels / levels.max() * sizes.amax(dim=1, keepdim=True)  # (5, L)
    nearest = grids.gather(1, (sizes[..., None] - grids[:, None]).abs().argmin(dim=2)) * weight.sign()
    torch.testing.assert_close(rounded(weight, kind).double(), nearest, atol=1e-6, rtol=1e-6)


@pytest.mark.engine
@parametrize("name, dtype", [
    ("Llama, biases", torch.float32), ("Llama, biases", torch.bfloat16),
    ("FalconH1", torch.float32), ("NemotronH", torch.float32)])  # fmt: skip
def test_the_engine_holds_what_is_sent_bit_by_bit_and_the_canary_scores_with_it(tmp_path, name, dtype):
    model = small_model(name).to(dtype)
    model.save_pretrained(tmp_path)
    own = {name: tensor.clone() for name, tensor in Policy(model).weights().items()}
    policy = Policy(model, send=RoundedWeights(model, "int3"))
    with started(tmp_path, policy, verify_loads=1) as engine:
        sent = policy.weights()
        assert all(torch.equal(sent[name], own[name]) != ("_proj.weight" in name) for name in own)
        for load in range(2):
            move(policy, 0.01, load)
            load_into(engine, policy)  # the proof, and in float32 a canary of 1e-4
        assert mismatch(policy, engine)["mismatch_abs_mean"] > 100 * ROUNDING


def test_a_convolution_before_a_recurrent_state_is_not_rounded_and_the_audit_says_so():
    assert RoundedWeights(small_model("Mamba2"), "int8").name == "4 linear layers (not Conv1d) rounded to int8"


@parametrize("name", ["Qwen3Moe", "GPT2"])
def test_a_model_with_other_matrices_is_refused(name):
    with value_error("rollout_weights must be own for models with"):
        RoundedWeights(small_model(name), "int8")
