"""Adapters (--lora-rank): identities, gradients, loads, a run with its checkpoints and exports, and what is refused."""

import shutil
import weakref
from collections import Counter
from copy import deepcopy

import pytest
import torch
from helpers import (
    RECURRENT,
    at,
    command,
    outcome,
    qwen2,
    small_model,
    started,
    train_here,
)
from transformers import AutoModelForCausalLM

from config import LoraConfig
from extras.gradient_checkpointing import checkpoint_layers
from extras.lora import AdaptedLinear, Adapters
from proof import differing
from rl import Policy, make_batch
from rollouts import Rollout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCH = make_batch([Rollout([5 + row, 6, 7], None, [8, 9 + row, 10], [0.0] * 3) for row in range(4)])
logprobs = lambda policy: at(policy, 0.7).logprobs(BATCH)  # noqa: E731


def adapted(model: torch.nn.Module, ratio: float = 0.0, **options) -> Policy:
    policy = Policy(model, send=Adapters(model, LoraConfig(4, **options), 1))
    if ratio:
        grow(policy, ratio)
    return policy


@torch.no_grad()
def grow(policy: Policy, ratio: float, seed: int = 0) -> None:
    """A random B of each layer, such that |s B A| = ratio |W|."""
    generator = torch.Generator().manual_seed(seed)
    for layer in policy.send.layers.values():
        b = torch.randn(layer.lora_B.shape, generator=generator)
        layer.lora_B.copy_(b * ratio * layer.weight.float().norm() / (layer.scale * b @ layer.lora_A).norm())


# ------------------------------------------------------------------------------------------------ identities
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forward", ["merged", "added"])
def test_adapters_at_their_start_are_the_base_bit_by_bit_also_as_kl_reference(dtype, forward):
    expected = logprobs(Policy(qwen2(tied=False, dtype=dtype)))
    policy = adapted(qwen2(tied=False, dtype=dtype), lora_forward=forward)
    reference = policy.copied_weights()
    assert all(".lora_" in name for name in reference)
    assert torch.equal(logprobs(policy), expected)
    grow(policy, 0.05)
    assert (logprobs(policy) - expected).abs().max() > 1e-2
    with policy.using(reference):
        assert torch.equal(logprobs(policy), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama, biases", "Phi3", "GPTNeoX", "Gemma2", *RECURRENT, "Qwen3_5Text"])
def test_the_merged_forward_is_a_plain_model_of_the_sent_tensors_and_its_gradients_are_those_of_dw(name, dtype):
    plain = Policy(small_model(name, name == "Gemma2").to(dtype))
    policy = adapted(deepcopy(plain.model), 0.05)
    plain.model.load_state_dict(dict(policy.weights()), strict=False)  # a head may have another name in checkpoints
    assert torch.equal(logprobs(policy), logprobs(plain))
    logprobs(plain).sum().backward()
    modules = dict(plain.model.named_modules())
    for count in (1, 2):  # the gradients of both passes add up
        if count == 2:
            checkpoint_layers(policy.model)
        logprobs(policy).sum().backward()
        for module, layer in policy.send.layers.items():
            full = count * layer.scale * modules[module].weight.grad.float()  # (out, in)
            for found, expected in ((layer.lora_A.grad, layer.lora_B.T @ full),
                                    (layer.lora_B.grad, full @ layer.lora_A.T)):  # fmt: skip
                error = (found - expected).norm() / expected.norm()
                assert error < (1e-5 if dtype == torch.float32 else 4e-2)  # dW is rounded to 16 bits
    assert policy.head.weight.grad is None


# ------------------------------------------------------------------------------------------------ the engine
@pytest.mark.engine
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_three_loads_arrive_bit_by_bit_and_merge_a_layer_at_a_time(engine_folder, monkeypatch, dtype):
    policy = adapted(qwen2(tied=False, dtype=dtype))
    usual, alive, sizes = AdaptedLinear.merged, Counter(), []

    def watched(layer: AdaptedLinear) -> torch.Tensor:
        tensor = usual(layer)
        alive["bytes"] += tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), alive.subtract, {"bytes": tensor.nbytes})
        sizes.append(alive["bytes"])
        return tensor

    with started(engine_folder, policy, max_model_len=64) as engine:
        for load in range(3):
            grow(policy, 0.05, load)
            assert len(differing(engine.llm, policy.weights()).differing) == 14
            monkeypatch.setattr(AdaptedLinear, "merged", watched)
            engine.load(policy.weights(), policy.response_logprobs)
            monkeypatch.undo()
            assert not differing(engine.llm, policy.weights()).differing
    # Each load merges a layer once, and once more for each copy that it compares: some CPUs have a packed one too.
    assert 3 * 14 < len(sizes) <= 3 * 3 * 14
    assert max(sizes) <= sum(layer.weight.nbytes for layer in policy.send.layers.values()) / 2  # of two layers


# ------------------------------------------------------------------------------------------------ a run
def job(root, out) -> list[str]:
    return command(root, f"--out {out} --lora-rank 4 --engine transformers --dtype float16 --kl-coef 0.1"
                   " --gradient-checkpointing --max-new-tokens 4 --eval-problems 4 --checkpoint-every 1 --steps 4"
                   " --lr 1e-2 --task {root}/task.py --group-size 8 --temperature 2")  # fmt: skip


def test_a_run_resumes_bit_by_bit_from_its_adapters_alone_and_saves_an_ordinary_model(good, tmp_path):
    whole = tmp_path / "whole"
    train_here(job(good, whole))
    state = torch.load(next(whole.glob("checkpoints/step_000004.pt")))
    assert state["policy"].keys() == adapted(qwen2(tied=True)).copied_weights().keys()
    assert state["optimizer"]["scaler"]["scale"] > 1  # float16 is scaled, although the adapters are in float32
    assert outcome(whole)[0][-1]["updates"] == 2
    copy = shutil.copytree(whole, tmp_path / "run")
    next(copy.glob("checkpoints/step_000004.pt")).unlink()
    train_here([*job(good, copy), "--resume"])
    assert outcome(copy) == outcome(whole)
    saved, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).state_dict()
                   for path in (whole / "policy", good / "model"))  # fmt: skip
    assert saved.keys() == base.keys()
    for name, tensor in base.items():
        a, b = (state["policy"].get(name.replace("weight", each)) for each in ("lora_A", "lora_B"))
        expected = tensor if a is None else (tensor.float() + 32 / 4 * b @ a).half()
        assert torch.allclose(saved[name], expected, atol=1e-7, rtol=2**-10)  # another order of the product


# ------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize("name", ["Mixtral", "GPT2"])
def test_a_model_with_matrices_outside_linear_layers_is_refused(name):
    with pytest.raises(ValueError, match="lora_rank must be 0 for models with experts or GPT-2's Conv1D"):
        Adapters(small_model(name, False), LoraConfig(4), 0)
