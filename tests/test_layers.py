"""`verify.layers`: faults in one layer of the live vLLM."""

import math
import re

import pytest
import torch
from helpers import (
    SIXTEEN,
    checks_of,
    close_live_engine,
    drawn_ids,
    exit_status,
    load_into,
    parametrize,
    policy_in,
    policy_of,
    refusal,
    small_model,
    started,
    value_error,
)

from verify.layers import _row, compare_layers, main, report

draw = torch.Generator().manual_seed(0)
REQUESTS = [drawn_ids(length, draw) for length in (50, 70, 90)], 40


def test_a_value_that_is_no_number_is_beyond_any_noise_floor():
    assert _row("head", torch.tensor([1e-9, math.nan]), torch.ones(2))["beyond"]


# ------------------------------------------------------------------------------------------------ faults in layer 2
def scale_norm(model, weights, patch):
    weights["model.layers.2.post_attention_layernorm.weight"].mul_(1.01)


def leave_stale(model, weights, patch):
    for name, tensor in weights.items():
        tensor.add_((".layers.2." in name) * 0.01 * torch.randn_like(tensor))


def shorten_window(model, weights, patch):
    implementation = model.model.layers[2].self_attn.attn.impl
    patch.setattr(implementation, "sliding_window", implementation.sliding_window - 1)


def shift_positions_from_64_on(model, weights, patch):
    usual = model.forward
    patch.setattr(model, "forward", lambda *given, positions, **more: usual(
        *given, positions=positions + (positions >= 64), **more))  # fmt: skip


def named(rows):
    """The halves beyond the noise floor."""
    titles = {row["title"].replace("input of ", "").replace("output", "MLP") for row in rows if row["beyond"]}
    return titles - {"final norm"}


ATTENTION, MLP = "layer 2, attention", "layer 2, MLP"
@pytest.mark.engine
@parametrize("name, dtype, faults", [
    ("GPT2", torch.float32, {shift_positions_from_64_on: {"embedding"}}),
    ("Mixtral", SIXTEEN, {scale_norm: {MLP}, shorten_window: {ATTENTION}}),
    ("Gemma2", torch.float32, {leave_stale: {ATTENTION, MLP}}),
    # In vLLM its layers return the stream and a second tensor, others return two that are to be added.
    ("Cohere", torch.float32, {}),
])  # fmt: skip
def test_a_fault_in_one_layer_of_the_live_engine_is_named_by_layer_and_half(tmp_path, name, dtype, faults):
    model = small_model(name, num_hidden_layers=4, n_layer=4)  # GPT-2 reads the second
    for parameter in model.parameters():
        if parameter.dim() == 1:  # transformers starts with 1 and 0
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    policy = policy_in(tmp_path, dtype)
    with started(tmp_path, policy) as engine:
        rows = compare_layers(policy, engine, *REQUESTS)
        assert named(rows) == set(), report(rows, "")
        checks_of(engine).canary.nats = 100
        for fault, halves in faults.items():
            weights = {name: tensor.detach().clone() for name, tensor in policy.weights().items()}
            with pytest.MonkeyPatch.context() as patch:
                fault(engine.vllm_model, weights, patch)
                load_into(engine, policy, weights)
                rows = compare_layers(policy, engine, *REQUESTS)
            text = report(rows, "vLLM")
            assert named(rows) == halves, text
            assert re.search(f"=> vLLM: {min(halves)[:7]}", text), text


@pytest.mark.engine
def test_the_command_prints_each_place_and_the_first_beyond_its_noise_floor(tmp_path, capsys):
    """A difference that nobody planted: vLLM's class does not read `use_parallel_residual`."""
    close_live_engine()
    small_model("StableLm", use_parallel_residual=True).save_pretrained(tmp_path)
    assert exit_status(main, f"--model {tmp_path}".split()) == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert next(row for row in rows if row.endswith("*")).startswith("layer 0, input of MLP ")
    assert re.search("float32: layer 0, input of MLP: .*, noise floor ", last)


def test_recurrent_layers_are_refused_in_a_sentence(tmp_path):
    policy = policy_of(tmp_path, "FalconH1")
    with value_error("must have no recurrent layers"):
        compare_layers(policy, None, *REQUESTS)


def test_a_folder_that_is_not_there_is_refused_in_a_sentence(tmp_path, capsys):
    said = refusal(["--model", f"{tmp_path}/none"], capsys, main)
    assert f"error: loading the model in {tmp_path}/none failed" in said
