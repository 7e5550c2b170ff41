"""Adapters (--lora-rank): identities, gradients, folders that PEFT and vLLM load.

Models that are refused are in test_rounded_weights.py, a resumed run in test_resume.py.
"""

from copy import deepcopy

import pytest
import torch
from helpers import (
    IDS,
    RECURRENT,
    ROUNDING,
    ROWS,
    at,
    built,
    close_live_engine,
    parametrize,
    policy_in,
    qwen2,
    small_model,
    tensors,
    value_error,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM

from extras.lora import Options
from extras.shared.adapters import TENSORS, Adapters, factors
from report.files import checkpoints, save_checkpoint
from rl import Optimizer, Policy
from train import train_step

logprobs = lambda policy, temperature=0.7: at(policy, temperature).logprobs(ROWS)  # noqa: E731


def adapted(model, **options):
    return Policy(model, send=Adapters(model, Options(4, **options), 1))


def grow(policy):
    """A random B of each layer, such that |s B A| = 0.05 |W|."""
    for layer in policy.send.layers.values():
        a, b, scale = factors(layer)
        b.data.normal_()
        b.data *= 0.05 * layer.weight.float().norm() / (scale * b @ a).norm()


@parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@parametrize("forward", ["merged", "added"])
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


@parametrize("name, dtype", [
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
        a, b, scale = factors(layer)
        full = scale * modules[module].weight.grad.float()  # (out, in)
        for found, expected in ((a.grad, b.T @ full), (b.grad, full @ a.T)):  # dW is rounded to 16 bits
            assert (found - expected).norm() < (1e-5 if dtype == torch.float32 else 4e-2) * expected.norm()
    assert policy.head.weight.grad is None


# ------------------------------------------------------------------------------------------------ folders
@torch.no_grad()
def of_peft(model, adapter):
    """Log-probabilities of IDS after the first column, (4, 5)."""
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    return loaded(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def of_vllm(model, adapter):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    close_live_engine()
    llm = LLM(str(model), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="float32",
              kv_cache_memory_bytes=2**24, enable_prefix_caching=False, enable_lora=True, max_lora_rank=8)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in IDS.tolist()]
    answers = llm.generate(prompts, sampling, lora_request=LoRARequest("trained", 1, str(adapter)), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return torch.tensor([[column[token].logprob for column, token in zip(
        answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True)] for answer in answers])


@pytest.mark.engine
def test_a_run_leaves_adapters_that_peft_and_vllm_load_and_does_not_go_on_from_a_damaged_file(good, tmp_path):
    model, out = good / "model", tmp_path / "run"
    options = dict(engine="vllm", lora_rank=4, lora_alpha=8.0, kl_coef=0.1, task=str(good / "task.py"), lr=1e-2,
                   max_new_tokens=4, group_size=8, num_minibatches=1, temperature=2.0, gradient_checkpointing=True)
    trainer = built(good, out, **options)
    policy = trainer.policy
    first = logprobs(policy, 1.0).detach()
    to_first = [train_step(trainer, step).metrics["kl_ref"] for step in (1, 2, 3)]
    assert to_first[0] == 0 < to_first[2]
    trainer.run.save_policy(trainer.run, policy.model, out / "policy")
    save_checkpoint(trainer, 3)
    last = logprobs(policy, 1.0).detach()
    assert (last - first).abs().max() > 100 * ROUNDING
    assert (last - logprobs(policy_in(out / "policy"), 1.0)).abs().max() < ROUNDING
    for load in of_peft, of_vllm:
        assert (last - load(model, *checkpoints(out))).abs().max() < ROUNDING
    tensors(lambda table: table.popitem()[1].add_(1), TENSORS)(*checkpoints(out))
    with value_error(f"a checkpoint must be as it was written, .*/{TENSORS} is damaged"):
        built(good, out, resume=True, **options)
