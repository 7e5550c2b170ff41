"""Adapters (--lora-rank, --adapter): identities, gradients, folders that PEFT and vLLM write and load, refusals.

Models that are refused are in test_rounded_weights.py, a resumed run in test_resume.py.
"""

import shutil
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
    command,
    parametrize,
    policy_in,
    qwen2,
    refusal,
    rewrite,
    small_model,
    tensors,
    value_error,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from extras.lora import CONFIG, TENSORS, Options
from extras.shared.adapters import Adapters, factors
from report.files import checkpoints, save_checkpoint
from rl import Optimizer, Policy
from tasks.toys import toy_tokenizer
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


@pytest.fixture(scope="module")
def tuned(good, tmp_path_factory):
    """PEFT's folder of adapters that have grown: rsLoRA with a dropout and patterns, on two layers of 14."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(good / "model"), LoraConfig(
        r=3, lora_alpha=8, use_rslora=True, lora_dropout=0.1, target_modules=["q_proj", "down_proj"],
        layers_to_transform=[1], task_type="CAUSAL_LM",
        rank_pattern={"q_proj": 5}, alpha_pattern={"down_proj": 30}))  # fmt: skip
    for parameter in model.parameters():
        parameter.data += 0.03 * parameter.requires_grad * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("tuned")
    model.save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_a_run_starts_from_adapters_of_peft_and_leaves_some_that_peft_and_vllm_load(good, tuned, tmp_path):
    model, out, begun = good / "model", tmp_path / "run", shutil.copytree(tuned, tmp_path / "tuned")
    options = dict(engine="vllm", adapter=str(begun), kl_coef=0.1, task=str(good / "task.py"), max_new_tokens=4,
                   lr=1e-2, group_size=8, num_minibatches=1, temperature=2.0, gradient_checkpointing=True)  # fmt: skip
    trainer = built(good, out, **options)
    policy = trainer.policy
    first = logprobs(policy, 1.0).detach()
    assert (first - of_peft(model, begun)).abs().max() < ROUNDING
    to_first = [train_step(trainer, step).metrics["kl_ref"] for step in (1, 2, 3)]
    assert to_first[0] == 0 < to_first[2]  # the reference is the policy that PEFT has trained
    trainer.run.save_policy(trainer.run, policy.model, out / "policy")
    save_checkpoint(trainer, 3)
    last = logprobs(policy, 1.0).detach()
    assert (last - first).abs().max() > 100 * ROUNDING
    assert (last - logprobs(policy_in(out / "policy"), 1.0)).abs().max() < ROUNDING
    for load in of_peft, of_vllm:
        assert (last - load(model, *checkpoints(out))).abs().max() < ROUNDING
    tensors(lambda table: table.popitem()[1].add_(1), TENSORS)(begun)
    with value_error(f"changed are {begun}/{TENSORS};"):
        built(good, out, resume=True, **options)


A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
ECHO = "={{ messages[0].content }}="  # a template that a fine-tuning has added
HEAD = "base_model.model.lm_head.weight"  # of modules_to_save
REFUSED = {
    "entry_of_a_newer_peft": rewrite(CONFIG, entry_of_a_newer_peft=1),
    "another peft_type or init_lora_weights; try": rewrite(CONFIG, init_lora_weights="pissa", use_rslora=False),
    "{folder} trains model.layers.1.self_attn.q_proj.lora_": rewrite(CONFIG, use_dora=True),
    "{folder} trains model.layers.0.self_attn.q_proj.bias": rewrite(CONFIG, bias="all"),
    "{folder} trains model.embed_tokens": rewrite(CONFIG, target_modules=["embed_tokens"], layers_to_transform=None),
    "embeddings have no adapters), see lm_head": tensors(lambda table: table.update({HEAD: torch.ones(3)}), TENSORS),
    "see model.layers.1.mlp.down_proj.lora_A.default.weight": tensors(lambda table: table.pop(A), TENSORS),
    f"adapters), see {A}": tensors(lambda table: table[A].fill_(torch.nan), TENSORS),
    "size mismatch for model.layers.1.mlp.down_proj.lora_A": rewrite(CONFIG, r=4),
    "failed: FileNotFoundError": lambda folder: (folder / TENSORS).unlink(),
    "lora_rank and lora_alpha must not be given with adapter": "--lora-rank 3",
    """the tokenizer in {folder} makes "=32+1=="; copy its files""": lambda folder: [
        toy_tokenizer().save_pretrained(folder), (folder / "chat_template.jinja").write_text(ECHO)],
    "probe_every and probe_on_alarm must be off with lora_rank": "--lora-forward added --probe-every 1",
}


@parametrize("complaint", REFUSED, ids=lambda complaint: complaint[-30:])
def test_what_is_not_supported_or_does_not_fit_is_refused_by_its_name(good, tuned, tmp_path, complaint, capsys):
    folder, spoil = shutil.copytree(tuned, tmp_path / "tuned"), REFUSED[complaint]
    options = f"--engine transformers --adapter {folder} --out {tmp_path}/run "
    if isinstance(spoil, str):
        options += spoil
    else:
        spoil(folder)
    said = refusal(command(good, options), capsys)
    assert complaint.replace("{folder}", str(folder)) in said
