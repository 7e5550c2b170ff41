"""Each load is proven: a tensor that the engine holds otherwise than it was sent is named, by one bit, in any dtype."""

import gc
import re
from contextlib import contextmanager

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    MULTIMODAL,
    PATCHED,
    close_live_engine,
    dtypes_of,
    load_into,
    move,
    policy_of,
    qwen2,
    rewrite,
    started,
)
from safetensors.torch import save_file

from rl import Policy
from verify.errors import WeightLoadError
from verify.proof import differing, same_bits, unpacked
from verify.start import prepare_environment

pytestmark = pytest.mark.engine
# Each class in one dtype; then what a dtype or a tied head changes: how vLLM packs linear layers, experts and the head.
CASES = [(name, False, dtypes_of(name)[-1], "cpu")
         for name in (*ARCHITECTURES, *MULTIMODAL) if name not in PATCHED]
CASES += [(name, True, dtypes_of(name)[0], "cpu") for name in ("Qwen2", "GPT2", "Mixtral", "FalconH1", "Qwen3_5")]
CASES += [("Gemma2", True, torch.float32, "cpu"), ("Qwen2", True, torch.float16, "cpu")]
CASES += [("GraniteMoeHybrid, no experts", False, torch.float32, "cpu")]  # vLLM renames its A_log
GPU = pytest.param("Qwen2", False, torch.bfloat16, "cuda", marks=[pytest.mark.gpu, pytest.mark.own_process])


def copied(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights().items()}


@contextmanager
def sending(engine, sent: dict[str, torch.Tensor]):
    """While it is open, a load transfers these tensors in place of the trainer's."""
    transfer = engine._transfer
    engine._transfer = lambda weights: transfer(dict(weights) | sent)
    yield
    engine._transfer = transfer


@torch.no_grad()
def flip_a_bit(tensor: torch.Tensor) -> None:
    """The last bit of the largest value."""
    number = {4: torch.int32, 2: torch.int16}[tensor.itemsize]
    tensor.view(-1).view(number)[tensor.abs().argmax()] ^= 1


@pytest.mark.parametrize("name, tied, dtype, device", [*CASES, GPU])
def test_every_tensor_that_misses_a_change_of_one_bit_is_named(tmp_path, name, tied, dtype, device):
    policy = policy_of(tmp_path, name, tied, dtype, device)
    with started(tmp_path, policy, verify_loads=1) as engine:
        assert engine.settings["not_proven"] == []
        old = copied(policy)
        for parameter in policy.model.parameters():
            flip_a_bit(parameter.data)
        changed = {name for name, tensor in policy.weights().items() if not torch.equal(tensor, old[name])}
        with sending(engine, old), pytest.raises(WeightLoadError, match="holds other values than were sent") as refused:
            load_into(engine, policy)
        engine.state = "ready"  # the test alone may go on with this engine
        found = set(re.split(r" sent in |, ", str(refused.value))[1:])
        assert found | {"lm_head.weight"} == changed | {"lm_head.weight"}  # a tied head may be the embedding
        assert len(changed) >= len(list(policy.model.parameters()))
        load_into(engine, policy)


def test_each_tensor_is_compared_within_the_stated_number_of_loads_and_good_loads_pass(tmp_path):
    policy = policy_of(tmp_path, "Qwen2", dtype=torch.bfloat16)
    with started(tmp_path, policy, verify_loads=4, canary_nats=100.0) as engine:
        seen = []
        for load in range(9):
            move(policy, 0.001, load)
            assert load_into(engine, policy)["proof_s"] > 0
        for name, stale in copied(policy).items():
            with sending(engine, {name: stale}):
                for load in range(1, 5):
                    move(policy, 0.01, load)  # by less, a norm's weight of 1 may stay in bf16
                    try:
                        load_into(engine, policy)
                    except WeightLoadError as refused:
                        assert str(refused).endswith(f" in {name}")
                        seen.append(load)
                        engine.state = "ready"
                        break
            load_into(engine, policy)
        assert len(seen) == len(policy.weights())
        assert {1, 4} <= {*seen}


def test_the_packed_copy_of_a_convolution_is_compared_beside_the_unpacked_one(tmp_path):
    policy = policy_of(tmp_path, "Qwen3_5", dtype=torch.bfloat16)
    with started(tmp_path, policy) as engine:
        name = "model.layers.0.linear_attn.conv1d"
        layer = engine.vllm_model.get_submodule(name)
        if not hasattr(layer, "_cpu_unpacked_conv_weight"):
            pytest.skip("without BF16 instructions, and on a GPU, vLLM does not pack it")
        flip_a_bit(layer.weight.data)
        assert differing(engine.llm, policy.weights()).differing == [f"{name}.weight"]


@pytest.mark.parametrize("name, dtype", [
    ("Qwen3Moe, padded experts", torch.float32), ("Qwen2Moe", torch.bfloat16)])  # fmt: skip
def test_a_swapped_expert_is_named_where_state_dict_has_all_of_a_layer_in_one_tensor(tmp_path, name, dtype):
    policy = policy_of(tmp_path, name, dtype=dtype)
    with started(tmp_path, policy) as engine:
        weights = policy.model.state_dict()
        assert differing(engine.llm, weights) == ([], [], [])
        up, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
        for packed in (up, down):
            weights[packed][[0, 3]] = weights[packed][[3, 0]]
        named = [f"{packed}[{number}]" for packed in (up, down) for number in (0, 3)]
        assert differing(engine.llm, weights) == (named, [], [])
        del weights[down]
        held = [f"model.layers.1.mlp.experts.routed_experts.{each}_weight" for each in ("w13", "w2")]
        assert differing(engine.llm, weights) == (named[:2], [down.replace("down", "gate_up")], held)


def test_an_expert_of_more_than_2_16_values_comes_back_from_its_packing():
    from vllm._custom_ops import cpu_prepack_moe_weight

    values = torch.arange(96 * 1024.0).view(96, 1024)
    assert torch.equal(unpacked(cpu_prepack_moe_weight(values[None], "vec")[0], (96, 1024), "vec"), values)


@pytest.mark.parametrize("name, missing, layer, alone", [
    ("Qwen2", "self_attn.k_proj.weight", "self_attn.qkv_proj.weight", 2),
    ("Qwen3Moe", "mlp.experts.3.up_proj.weight", "mlp.experts.routed_experts.w13_weight", 11),
])  # fmt: skip
def test_a_tensor_of_another_length_is_named_and_a_layer_that_is_sent_in_part_is_not_compared(
        tmp_path, name, missing, layer, alone):
    policy, layers = policy_of(tmp_path, name), "model.layers.0."
    with started(tmp_path, policy) as engine:
        weights = policy.weights()
        for other in (layers + "self_attn.v_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
            assert differing(engine.llm, {**weights, other: weights[other][:-3]}).differing == [other]
        found = differing(engine.llm, {each: weights[each] for each in weights if each != layers + missing})
        assert (found.differing, len(found.not_compared)) == ([], alone)
        assert all(each.startswith(layers + missing[:9]) for each in found.not_compared)
        assert layers + layer in found.not_given


def test_a_quantised_layer_is_not_compared_and_all_others_are(tmp_path):
    """Of AWQ, with 32 values to a scale. A layer of it has no `weight`."""
    close_live_engine()
    model = qwen2(hidden_size=128, dtype=torch.bfloat16)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    linear = {name for name in weights if "proj" in name}
    held = {name: weights[name] for name in weights.keys() - linear}
    for name in linear:
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            height, width = weights[name].shape
            shapes = {"qweight": (width, height // 8), "qzeros": (width // 32, height // 8)}
            held |= {f"{path}.{each}": torch.zeros(shape, dtype=torch.int32) for each, shape in shapes.items()}
            held[f"{path}.scales"] = torch.ones(width // 32, height).half()
        else:
            held[name] = weights[name]
    model.save_pretrained(tmp_path)
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    awq = dict(quant_method="awq", bits=4, group_size=32, zero_point=True)
    rewrite("config.json", quantization_config=awq)(tmp_path)
    prepare_environment()
    from vllm import LLM

    llm = LLM(str(tmp_path), dtype="bfloat16", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**24,
              skip_tokenizer_init=True)  # fmt: skip
    norm = "model.norm.weight"
    assert differing(llm, weights)[:2] == ([], sorted(linear))
    assert differing(llm, weights | {norm: weights[norm] + 1}).differing == [norm]
    del llm
    gc.collect()


def test_equal_bits_are_those_of_equal_values_and_of_nan():
    values = torch.tensor([1.0, 1.0 + 2**-23, torch.nan, torch.inf, torch.finfo(torch.float32).max])
    assert [[same_bits(one, other) for other in values] for one in values] == torch.eye(5, dtype=bool).tolist()
    assert not same_bits(torch.zeros(2), torch.zeros(3))
