"""Adapters (--lora-rank): identities and gradients.

Loads, and models that are refused, are in test_rounded_weights.py, a resumed run in test_resume.py, and what a run
saves in test_adapter_folder.py.
"""

from copy import deepcopy

import pytest
import torch
from helpers import RECURRENT, at, qwen2, small_model

from engine_adapter import Rollout
from extras.lora import Adapters, Options
from rl import Optimizer, Policy, make_batch

BATCH = make_batch([Rollout([5 + row, 6, 7], None, [8, 9 + row, 10], [0.0] * 3) for row in range(4)])
logprobs = lambda policy: at(policy, 0.7).score(BATCH)["logprobs"]  # noqa: E731


def adapted(model: torch.nn.Module, **options) -> Policy:
    return Policy(model, send=Adapters(model, Options(4, **options), 1))


@torch.no_grad()
def grow(policy: Policy) -> None:
    """A random B of each layer, such that |s B A| = 0.05 |W|."""
    for layer in policy.send.layers.values():
        b = torch.randn(layer.lora_B.shape)
        layer.lora_B.copy_(b * 0.05 * layer.weight.float().norm() / (layer.scale * b @ layer.lora_A).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", ["merged", "added"])
def test_adapters_at_their_start_are_the_base_bit_by_bit_also_as_kl_reference(dtype, forward):
    expected = logprobs(Policy(qwen2(tied=False, dtype=dtype)))
    policy = adapted(qwen2(tied=False, dtype=dtype), lora_forward=forward)
    reference = policy.copied_weights()
    assert torch.equal(logprobs(policy), expected)
    assert Optimizer(policy.model).scaler.is_enabled() == (dtype == torch.float16)  # the adapters are in float32
    # Each is merged when a load asks for it: this needs memory for a layer, and not for a second model.
    assert sum(map(callable, policy.weights().data.values())) == 14
    grow(policy)
    assert (logprobs(policy) - expected).abs().max() > 1e-2
    with policy.using(reference):
        assert torch.equal(logprobs(policy), expected)


@pytest.mark.parametrize("name, dtype", [
    *((name, torch.float32) for name in ["Llama, biases", "GPTNeoX", "Gemma2", *RECURRENT, "Qwen3_5Text"]),
    ("Phi3", torch.bfloat16), ("Phi3", torch.float16),
])  # fmt: skip
def test_the_merged_forward_is_a_plain_model_of_the_sent_tensors_and_its_gradients_are_those_of_dw(name, dtype):
    plain = Policy(small_model(name, name == "Gemma2").to(dtype))
    policy = adapted(deepcopy(plain.model))
    grow(policy)
    plain.model.load_state_dict(dict(policy.weights()), strict=False)  # a head may have another name in checkpoints
    assert torch.equal(logprobs(policy), logprobs(plain))
    logprobs(plain).sum().backward()
    modules = dict(plain.model.named_modules())
    logprobs(policy).sum().backward()
    for module, layer in policy.send.layers.items():
        full = layer.scale * modules[module].weight.grad.float()  # (out, in)
        for found, expected in ((layer.lora_A.grad, layer.lora_B.T @ full),
                                (layer.lora_B.grad, full @ layer.lora_A.T)):  # fmt: skip
            error = (found - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 else 4e-2)  # dW is rounded to 16 bits
    assert policy.head.weight.grad is None
