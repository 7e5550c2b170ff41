"""Each load is proven. That a tensor is named for one bit, in any dtype of any class: test_architectures.py."""


import pytest
import torch
from helpers import (
    checks_of,
    close_live_engine,
    flip_a_bit,
    load_into,
    move,
    parametrize,
    policy_of,
    started,
    value_error,
)

from verify.proof import differing, unpacked
from vllm_cases import WeightLoadError

pytestmark = pytest.mark.engine


def test_each_tensor_is_compared_within_the_stated_number_of_loads_and_good_loads_pass(tmp_path, monkeypatch):
    policy = policy_of(tmp_path, "Qwen2", dtype=torch.bfloat16)
    with started(tmp_path, policy, verify_loads=4, canary_nats=100.0) as engine:
        seen, lost, transfer = [], {}, engine._transfer
        monkeypatch.setattr(engine, "_transfer", lambda weights: transfer(dict(weights) | lost))
        for load in range(9):
            move(policy, 0.001, load)
            load_into(engine, policy)
        for name, tensor in policy.weights().items():
            lost[name] = tensor.clone()
            for load in range(1, 5):
                move(policy, 0.01, load)  # by less, a norm's weight of 1 may stay in bf16
                try:
                    load_into(engine, policy)
                except WeightLoadError as refused:
                    assert str(refused).endswith(f" in {name}")
                    seen.append(load)
                    engine.state = "ready"  # the test alone may go on with this engine
                    break
            lost.clear()
            load_into(engine, policy)
        assert len(seen) == len(policy.weights())
        assert {1, 4} <= {*seen}


def test_a_load_none_of_whose_names_the_engine_has_is_refused(engine_folder, policy):
    with started(engine_folder, policy) as engine:
        checks_of(engine).proofs = 0  # all modules are compared
        with value_error("the engine has none of the names that were sent"):
            checks_of(engine).prove({"other": torch.zeros(1)})


def test_the_packed_copy_of_a_convolution_is_compared_beside_the_unpacked_one(tmp_path):
    policy = policy_of(tmp_path, "Qwen3_5", dtype=torch.bfloat16)
    with started(tmp_path, policy) as engine:
        name = "model.layers.0.linear_attn.conv1d"
        layer = engine.vllm_model.get_submodule(name)
        if not hasattr(layer, "_cpu_unpacked_conv_weight"):
            pytest.skip("without BF16 instructions, and on a GPU, vLLM does not pack it")
        flip_a_bit(layer.weight.data)
        assert differing(engine.llm, policy.weights()).differing == [f"{name}.weight"]


@parametrize("name, dtype", [
    ("Qwen3Moe, padded experts", torch.float32), ("Qwen2Moe", torch.bfloat16)])  # fmt: skip
def test_a_swapped_expert_is_named_where_state_dict_has_all_of_a_layer_in_one_tensor(tmp_path, name, dtype):
    policy = policy_of(tmp_path, name, dtype=dtype)
    with started(tmp_path, policy) as engine:
        weights = policy.model.state_dict()
        assert differing(engine.llm, weights) == ([], [], [])
        packed = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
        for each in packed:
            weights[each][[0, 3]] = weights[each][[3, 0]]
        named = [f"{each}[{number}]" for each in packed for number in (0, 3)]
        assert differing(engine.llm, weights) == (named, [], [])


def test_an_expert_of_more_than_2_16_values_comes_back_from_its_packing():
    from vllm._custom_ops import cpu_prepack_moe_weight

    values = torch.arange(96 * 1024.0).view(96, 1024)
    assert torch.equal(unpacked(cpu_prepack_moe_weight(values[None], "vec")[0], (96, 1024), "vec"), values)


@parametrize("name, missing, layer, alone", [
    ("Qwen2", "self_attn.k_proj.weight", "self_attn.qkv_proj.weight", 2),
    ("Qwen3Moe", "mlp.experts.3.up_proj.weight", "mlp.experts.routed_experts.w13_weight", 11),
])  # fmt: skip
def test_a_tensor_of_another_length_is_named_and_a_layer_that_is_sent_in_part_is_not_compared(
        tmp_path, name, missing, layer, alone):
    """Nor one that vLLM holds in another form: a quantised layer has no `weight`."""
    policy, layers = policy_of(tmp_path, name), "model.layers.0."
    with started(tmp_path, policy) as engine:
        weights, out = policy.weights(), layers + "self_attn.o_proj"
        for other in (layers + "self_attn.v_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
            assert differing(engine.llm, {**weights, other: weights[other][:-3]}).differing == [other]
        found = differing(engine.llm, {each: weights[each] for each in weights if each != layers + missing})
        assert (found.differing, len(found.not_compared)) == ([], alone)
        assert all(each.startswith(layers + missing[:9]) for each in found.not_compared)
        assert layers + layer in found.not_given
        del engine.vllm_model.get_submodule(out).weight
        assert differing(engine.llm, weights) == ([], [f"{out}.weight"], [])
    close_live_engine()

