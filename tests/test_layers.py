"""`probe layers`: faults in one layer of the live vLLM."""

import re
from pathlib import Path

import pytest
import torch
from helpers import (
    LAYER_SAMPLING,
    ROUNDING,
    close_live_engine,
    layer_fault,
    layer_requests,
    layered_model,
    named_layers,
    qwen2,
    small_model,
    started,
)

from config import ParityFlags
from probe.__main__ import main
from probe.layers import compare_layers, find_modules, report
from rl import Policy


def layered_policy(folder: Path, name: str, dtype: torch.dtype) -> Policy:
    layered_model(name).save_pretrained(folder)
    return Policy.load(str(folder), dtype, "cpu")


@pytest.mark.engine
@pytest.mark.parametrize("name, dtype, faults", [
    ("Llama", torch.bfloat16, ("norm x 1.01", "rows of a head swapped", "bias dropped")),
    ("GPT2", torch.float32, ("positions + 1 from 64", "stale layer")),
    ("Mixtral", torch.bfloat16, ("MLP in 8 bits", "window one short", "positions + 1 from 64")),
    ("Gemma2", torch.float32, ("rope base x 1.2", "norm x 1.01")),
])  # fmt: skip
def test_a_fault_in_one_layer_of_the_live_engine_is_named_by_layer_and_half(tmp_path, name, dtype, faults):
    policy = layered_policy(tmp_path, name, dtype)
    with started(str(tmp_path), policy) as engine:
        rows = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
        assert named_layers(rows) == {}, report(rows, "")
        for seed, fault in enumerate(faults):
            with layer_fault(fault, name, engine, policy, 2, seed) as (layer, halves):
                rows = compare_layers(policy, engine, *layer_requests(seed), LAYER_SAMPLING)
            named, text = named_layers(rows), report(rows, fault)
            assert next(iter(named)) == layer, text
            assert named[layer] == halves, text
            # Positions are wrong in every layer that has rope.
            everywhere = fault.startswith("positions") and name != "GPT2"
            assert list(named) == (list(range(4)) if everywhere else [layer]), text
            assert ("=> " + fault + (": embedding: " if layer < 0 else f": layer {layer}, ")) in text


@pytest.mark.engine
def test_a_layer_that_has_added_its_residual_itself_is_read_as_it_is(tmp_path):
    """Cohere's layers in vLLM return the stream and a second tensor, others return two that are to be added."""
    small_model("Cohere", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    with started(str(tmp_path), policy) as engine:
        rows = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
    assert named_layers(rows) == {}
    assert max(row["difference"] for row in rows) < ROUNDING


@pytest.mark.engine
def test_the_command_prints_each_place(tmp_path, capsys):
    close_live_engine()
    layered_model("Qwen2").save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["layers", "--model", str(tmp_path / "model"), "--num-prompts", "3", "--max-new-tokens", "20"])
    assert stop.value.code == 0
    title, *rows, sentence = capsys.readouterr().out.splitlines()[-1 - (1 + 4 * 5 + 1) - 1 :]
    places = [row[:28].rstrip() for row in rows]
    assert [places[0], places[1], places[-1]] == ["embedding", "layer 0, input of attention", "final norm"]
    assert title.split() == ["place", "differs", "floor", "floors"]
    assert sentence.endswith(", float32: all layers are within their noise floors")


@pytest.mark.engine
def test_parallel_residuals_that_vllms_stablelm_computes_in_sequence_give_exit_status_1(tmp_path, capsys):
    """A difference that nobody planted: vLLM's class does not read `use_parallel_residual`."""
    close_live_engine()
    small_model("StableLm", False, use_parallel_residual=True).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["layers", "--model", str(tmp_path), "--num-prompts", "2"])
    assert stop.value.code == 1
    assert re.search(r"float32: layer 0, input of MLP: .* in prefill and decode\n$",
                     capsys.readouterr().out)  # fmt: skip


@pytest.mark.engine
def test_what_hooks_do_not_see_is_refused_in_a_sentence(tmp_path):
    qwen2(tied=False).save_pretrained(tmp_path / "qwen2")
    small_model("FalconH1", False).save_pretrained(tmp_path / "falcon")
    for folder, parity, what in (("qwen2", ParityFlags(uncached_runtime=False), "prefix cache"),
                                 ("falcon", ParityFlags(), "recurrent layers")):  # fmt: skip
        policy = Policy.load(str(tmp_path / folder), torch.float32, "cpu")
        with started(str(tmp_path / folder), policy, parity) as engine, \
                pytest.raises(ValueError, match=f"engine must have no {what}"):
            compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
        close_live_engine()
    with pytest.raises(ValueError, match="model must have its 7 decoder layers in a list"):
        find_modules(policy.model, 7)
