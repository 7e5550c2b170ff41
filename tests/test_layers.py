"""`probe layers`: faults in one layer of the live vLLM; and the mismatch by token in `probe diagnose`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import (
    LAYER_SAMPLING,
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
from probe.diagnose import diagnose
from probe.layers import compare_layers, find_modules
from probe.traces import load_traces
from rl import Policy

DATA = Path(__file__).parent / "data"
MODEL, CLEAN = str(DATA / "tiny-qwen2"), DATA / "v1_0.32.0_fp32_fixes.npz"


# ------------------------------------------------------------------------------------------------ layers
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
        rows, sentence = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
        assert named_layers(rows) == {}, sentence
        assert sentence == "all layers are within their noise floors"
        assert max(row["floors"] for row in rows) < 1.1
        for seed, fault in enumerate(faults):
            with layer_fault(fault, name, engine, policy, 2, seed) as (layer, halves):
                rows, sentence = compare_layers(policy, engine, *layer_requests(seed), LAYER_SAMPLING)
            named = named_layers(rows)
            assert next(iter(named)) == layer, f"{fault}: {sentence}"
            assert named[layer] == halves, f"{fault}: {sentence}"
            # Positions are wrong in every layer that has rope.
            everywhere = fault.startswith("positions") and name != "GPT2"
            assert list(named) == (list(range(4)) if everywhere else [layer]), f"{fault}: {sentence}"
            assert sentence.startswith("embedding: " if layer < 0 else f"layer {layer}, ")


@pytest.mark.engine
def test_the_heat_of_positions_that_are_wrong_from_64_on_begins_at_64(tmp_path):
    policy = layered_policy(tmp_path, "Llama", torch.float32)
    with started(str(tmp_path), policy) as engine, layer_fault("positions + 1 from 64", "Llama", engine, policy, 0, 0):
        rows, sentence = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
    (first,) = [row for row in rows if row["title"] == "layer 0, attention"]
    assert max(first["by_position"][:64]) < 1.3 < 100 < min(first["by_position"][64:])
    assert "decode" in first["beyond"]
    assert first["together"] == first["alone"]  # nothing comes before it
    assert sentence.endswith("; also layer 1, attention; also layer 2, attention; also layer 3, attention")


@pytest.mark.engine
def test_a_layer_that_has_added_its_residual_itself_is_read_as_it_is(tmp_path):
    """Cohere's layers in vLLM return the stream and a second tensor, others return two that are to be added."""
    small_model("Cohere", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    with started(str(tmp_path), policy) as engine:
        rows, sentence = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
    assert sentence == "all layers are within their noise floors"
    assert max(row["together"] for row in rows) < 1e-6


@pytest.mark.engine
def test_the_command_prints_each_place_and_writes_figures_and_picture(tmp_path, capsys):
    close_live_engine()
    layered_model("Qwen2").save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["layers", "--model", str(tmp_path / "model"), "--num-prompts", "3", "--max-new-tokens", "20",
              "--json", str(tmp_path / "layers.json"), "--plot", str(tmp_path / "layers.png")])  # fmt: skip
    assert stop.value.code == 0
    _, _, sentence = capsys.readouterr().out.strip().rpartition("=> ")
    assert sentence.endswith(", float32: all layers are within their noise floors")
    record = json.loads((tmp_path / "layers.json").read_text())
    titles = [row["title"] for row in record["rows"]]
    assert [titles[0], titles[1], titles[-1]] == ["embedding", "layer 0, input of attention", "final norm"]
    assert len(titles) == 1 + 4 * 5 + 1
    assert (tmp_path / "layers.png").stat().st_size > 10_000


@pytest.mark.engine
def test_parallel_residuals_that_vllms_stablelm_computes_in_sequence_give_exit_status_1(tmp_path, capsys):
    """A difference that nobody planted: vLLM's class does not read `use_parallel_residual`."""
    close_live_engine()
    small_model("StableLm", False, use_parallel_residual=True).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["layers", "--model", str(tmp_path), "--num-prompts", "2"])
    assert stop.value.code == 1
    assert re.search(r"float32: layer 0, input of MLP: .* in prefill and decode; also layer 1, input of MLP\n$",
                     capsys.readouterr().out)  # fmt: skip


@pytest.mark.engine
def test_what_hooks_do_not_see_is_refused_in_a_sentence(tmp_path):
    qwen2(tied=False).save_pretrained(tmp_path / "qwen2")
    small_model("FalconH1", False).save_pretrained(tmp_path / "falcon")
    for folder, parity, what in (("qwen2", ParityFlags(explicit_runtime=False), "prefix cache"),
                                 ("falcon", ParityFlags(), "recurrent layers")):  # fmt: skip
        policy = Policy.load(str(tmp_path / folder), torch.float32, "cpu")
        with started(str(tmp_path / folder), policy, parity) as engine:
            with pytest.raises(ValueError, match=f"engine must have no {what}"):
                compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
            engine.settings["cuda_graphs"] = "FULL_DECODE_ONLY"
            with pytest.raises(ValueError, match="engine must have no CUDA graphs"):
                compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
        close_live_engine()
    with pytest.raises(ValueError, match="model must have its 7 decoder layers in a list"):
        find_modules(policy.model, 7)


@pytest.mark.engine
@pytest.mark.own_process
def test_halves_without_a_module_and_the_transformers_backend_are_said(tmp_path):
    """The backend patches the Python class of the trainer's model."""
    small_model("Olmo2", False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    with started(str(tmp_path), policy) as engine:
        for layer in engine.runner.get_model().model.layers:
            layer.feed = layer.mlp  # under a name that is not known
            del layer._modules["mlp"]
            layer.mlp = layer.feed.forward
        rows, sentence = compare_layers(policy, engine, *layer_requests(0), LAYER_SAMPLING)
    assert named_layers(rows) == {}
    # Its `forward` is called without hooks: the final norm is not compared.
    assert [row["title"] for row in rows][-2:] == ["layer 1, attention", "layer 1, output"]
    assert ". Not compared: MLP, which is no module of its own on both sides" in sentence
    assert sentence.endswith("vLLM serves this model through transformers' own classes")


# ------------------------------------------------------------------------------------------------ by token
def test_a_mismatch_that_begins_late_and_one_wild_token_show_by_token():
    policy, (trace, *_) = Policy.load(MODEL, torch.float32, "cpu"), load_traces(str(CLEAN))
    rollouts = [replace(each, logprobs=[value - 0.5 * (place >= 40) for place, value in enumerate(each.logprobs)])
                for each in trace.rollouts]  # fmt: skip
    wild = rollouts[5]
    wild.logprobs[7] -= 60.0
    found = diagnose(policy, replace(trace, rollouts=rollouts)).tokens
    numbers = [number for each in rollouts for number in range(len(each.token_ids))]
    bins = found["tables"]["position"]
    assert sum(each["tokens"] for each in bins) == len(numbers)
    assert len(bins) == 10
    edges = [*(each["from"] for each in bins), 10_000]
    for each, end in zip(bins, edges[1:], strict=True):
        assert each["tokens"] == sum(each["from"] <= number < end for number in numbers)
        late = sum(max(each["from"], 40) <= number < end for number in numbers)
        wilds = 60.0 * (each["from"] <= 7 < end)
        assert each["mismatch"] == pytest.approx((0.5 * late + wilds) / each["tokens"], abs=1e-5)
        assert 0 < each["trainer_error"] < 1e-5
    first, *others = found["worst"]
    assert (first["request"], first["position"], len(others)) == (5, 7, 9)
    assert first["reported"] == pytest.approx(wild.logprobs[7])
    assert first["trainer"] == pytest.approx(wild.logprobs[7] + 60, abs=1e-4)
    assert all(each["position"] >= 40 for each in others)


def test_entropy_probability_and_prompt_length_of_each_bin_are_those_of_the_trainer():
    policy, (trace, *_) = Policy.load(MODEL, torch.float32, "cpu"), load_traces(str(CLEAN))
    trace = replace(trace, rollouts=trace.rollouts[:6])
    tables = diagnose(policy, trace).tokens["tables"]
    entropy, probability = [], []
    for each in trace.rollouts:
        ids = torch.tensor([each.prompt_ids + each.token_ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(each.prompt_ids) - 1 : -1].double() / trace.sampling.temperature
        probabilities = logits.softmax(dim=-1)
        entropy += (-(probabilities * probabilities.log()).sum(dim=-1)).tolist()
        probability += [row[token].item() for row, token in zip(probabilities, each.token_ids, strict=True)]
    for name, values in (("entropy", sorted(entropy)), ("probability", sorted(probability))):
        bins = tables[name]
        assert len(bins) == 10
        before = 0
        for each in bins:
            assert each["from"] == pytest.approx(values[before], abs=1e-5)
            before += each["tokens"]
        assert before == len(values)
        assert max(each["tokens"] for each in bins) - min(each["tokens"] for each in bins) <= 2
    assert [each["from"] for each in tables["prompt length"]] == sorted({len(r.prompt_ids) for r in trace.rollouts})


def test_diagnose_prints_the_tables_and_stores_them(tmp_path, capsys):
    out = tmp_path / "v.json"
    with pytest.raises(SystemExit):
        main(["diagnose", "--model", MODEL, str(CLEAN), "--group", "t0.7", "--json", str(out)])
    printed = capsys.readouterr().out
    for name in ("position", "prompt length", "probability", "entropy"):
        assert f"\nby {name}, from " in printed
    (record,) = json.loads(out.read_text())
    assert len(record["tokens"]["worst"]) == 10
    assert f"{record['tokens']['worst'][0]['trainer']:.4f}" in printed
