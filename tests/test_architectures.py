"""Each architecture as a small random model of its real configuration class: trainer and live engine agree.

`python tests/test_architectures.py [NAME ...]` prints the README's table.
"""

import json
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from extras.prompts import PromptsOnce, compute_prompts_once
from helpers import (
    MATRIX,
    MATRIX_PROMPTS,
    MATRIX_SAMPLING,
    MIXED,
    MIXTURES,
    RECURRENT,
    command,
    dtypes_of,
    mismatch,
    move,
    small_model,
    started,
    train_here,
)

from config import GrpoConfig
from engine_adapter import Rollout, WeightLoadError
from examples.toys import toy_tokenizer
from models import attention_for
from probe.noise import rounded_otherwise
from rl import Policy, frozen_logprobs, make_batch

# vLLM serves these through its Transformers backend, which leaves their Python class patched: one model of each a
# process.
PATCHED = ("Olmo2", "Olmo3", "SmolLM3", "GPTNeoX")
EXTRAS = {"Gemma2": "soft-capping", "Granite": "logits / 5", "Cohere": "logits x 0.3", "FalconH1": "logits x 0.3"}


@cache
def measure_patched(tied: bool) -> dict[str, dict[str, Any]]:
    """All of PATCHED by name, in a process of their own."""
    result = subprocess.run([sys.executable, __file__, "--patched", str(tied)], check=True, capture_output=True,
                            text=True, timeout=300)  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


def measure(name: str, tied: bool) -> dict[str, Any]:
    """Trainer attention, vLLM's class, mean |trainer - engine| before and after each of three changed loads, nats."""
    with tempfile.TemporaryDirectory() as folder:
        small_model(name, tied).save_pretrained(folder)
        toy_tokenizer().save_pretrained(folder)  # 15 of the model's 96 tokens: the others are sampled too
        return measure_folder(folder)


def measure_folder(folder: str) -> dict[str, Any]:
    policy = Policy.load(folder, torch.float32, "cpu")
    with started(folder, policy) as engine:
        before, after = mismatch(policy, engine, MATRIX_SAMPLING, MATRIX_PROMPTS)["mismatch_abs_mean"], []
        for seed in range(3):
            move(policy, 0.02, seed)
            engine.load(policy.weights(), policy.response_logprobs)
            after.append(mismatch(policy, engine, MATRIX_SAMPLING, MATRIX_PROMPTS)["mismatch_abs_mean"])
        return {"attention": policy.model.config._attn_implementation, "vllm": type(engine.vllm_model).__name__,
                "before": before, "after": after}


@pytest.mark.engine
@pytest.mark.parametrize("name, tied", [case for case in MATRIX if case[0] not in PATCHED])
def test_trainer_and_engine_agree_before_and_after_three_loads(name, tied):
    found = measure(name, tied)
    assert max(found["before"], *found["after"]) <= 2e-5


@pytest.mark.engine
@pytest.mark.parametrize("tied", [True, False])
def test_trainer_and_engine_agree_where_vllm_patches_the_models_python_class(tied):
    found = measure_patched(tied)
    assert found.keys() == set(PATCHED)
    for name, each in found.items():
        assert max(each["before"], *each["after"]) <= 2e-5, name


@pytest.mark.parametrize("name, tied", MATRIX)
def test_the_chunked_head_is_the_models_own_forward(name, tied):
    model = small_model(name, tied)
    policy = Policy(model, chunk_elements=96 * 5)
    prompts = torch.tensor(MATRIX_PROMPTS)  # (4, 24)
    ours = torch.tensor(policy.response_logprobs(prompts.tolist(), 1))  # (4, 23)
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=prompts).logits.double(), dim=-1)  # (4, 24, V)
    expected = torch.stack([theirs[:, t].gather(1, prompts[:, t + 1, None])[:, 0] for t in range(23)], dim=1)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=0)
    assert theirs[:, -1].std() > 0.1


@pytest.mark.parametrize("name, tied", [case for case in MATRIX if case[0] not in RECURRENT])
def test_a_prompt_computed_once_for_its_group_gives_the_same_values_and_gradients(name, tied):
    """Prompts of 1 to 40 tokens, so that a window of 16 cuts; responses of 1 to 30 tokens; one prompt has one response.
    """
    policy, generator = Policy(small_model(name, tied)), torch.Generator().manual_seed(0)
    policy.model.set_attn_implementation(attention_for(policy.model.config))
    draw = lambda count: torch.randint(96, (count,), generator=generator).tolist()  # noqa: E731
    groups = {40: (30, 7, 1), 1: (5, 20), 13: (9,), 27: (30, 30)}
    rows = [(prompt, draw(length)) for size, lengths in groups.items() for prompt in [draw(size)] for length in lengths]
    batch = make_batch([Rollout(prompt, None, ids, [0.0] * len(ids)) for prompt, ids in rows])
    weights, found = torch.randn(batch.mask.shape, generator=generator), []
    compute_prompts_once(policy)
    assert isinstance(policy.body, PromptsOnce)
    for body in (policy.plain_body, policy.own_body):
        policy.body = body
        policy.model.zero_grad()
        logprobs = policy.logprobs(batch, 0.7)
        (logprobs * weights).sum().backward()
        gradients = [each.grad.clone() for each in policy.model.parameters() if each.grad is not None]
        found.append((logprobs.detach(), gradients))
    (alone, alone_gradients), (shared, shared_gradients) = found
    torch.testing.assert_close(shared, alone, atol=2e-5, rtol=0)
    for ours, theirs in zip(shared_gradients, alone_gradients, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm() + 1e-6


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_state_sees_neither_padding_nor_other_rows(name):
    """Rows of several lengths and with one prompt, in micro-batches of several rows, beside each row alone."""
    policy, generator = Policy(small_model(name, False)), torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(96, (count,), generator=generator).tolist()  # noqa: E731
    rows = [[5, 6, 7, 8, *draw(length)] for length in (5, 36, 13, 21, 36, 29)]
    batch = make_batch([Rollout(ids[:4], 0, ids[4:], [0.0] * (len(ids) - 4)) for ids in rows])
    options = GrpoConfig(temperature=1.0, num_minibatches=1, micro_batch_tokens=120)
    together = frozen_logprobs(policy, batch, options)  # (6, 39)
    for index, ids in enumerate(rows):
        alone = torch.tensor(policy.response_logprobs([ids], 4)[0])
        torch.testing.assert_close(together[index][batch.mask[index] > 0], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_that_was_routed_to_and_no_other_gets_its_gradient(name):
    """The oracle is transformers' loop over the experts, in float64."""
    routed, gradients = [], []
    for kernel, dtype in (("grouped_mm", torch.float32), ("eager", torch.float64)):
        model = small_model(name, False, num_experts=16, num_local_experts=16).to(dtype)
        assert model.config._experts_implementation == "grouped_mm"  # the default, which train.py uses
        model.set_experts_implementation(kernel)
        policy, routers = Policy(model), [each for each in model.modules() if type(each).__name__.endswith("Router")]
        hooks = [each.register_forward_hook(lambda _module, _inputs, output: routed.append(output[2].unique()))
                 for each in routers]  # fmt: skip
        batch = make_batch([Rollout([5], None, [6, 7, 8], [0.0, 0.0, 0.0])])
        policy.logprobs(batch, 0.7).sum().backward()
        for hook in hooks:
            hook.remove()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert len(routed) == 4
    assert all(2 <= len(chosen) <= 6 for chosen in routed)  # 3 tokens choose 2 each
    for name_of, ours in gradients[0].items():
        theirs = gradients[1][name_of]
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6
        if ".experts." in name_of:  # (experts, ...)
            layer = int(name_of.split(".")[2])
            assert torch.equal(ours.flatten(1).norm(dim=1).nonzero()[:, 0], routed[layer])


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU build keeps experts in another layout")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consecutive_loads_pack_the_experts_once_each_bit_by_bit(tmp_path, dtype):
    small_model("Qwen3Moe", False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), dtype, "cpu")
    with started(str(tmp_path), policy) as engine:
        from vllm._custom_ops import cpu_prepack_moe_weight as pack

        layers = [each for each in engine.vllm_model.modules() if hasattr(each, "w13_weight")]
        for seed in range(3):
            move(policy, 0.02, seed)
            engine.load(policy.weights(), policy.response_logprobs)
            for layer, ours in zip(layers, policy.model.model.layers, strict=True):
                kernel, experts = layer.quant_method, ours.mlp.experts
                isa = getattr(kernel.moe_kernel, "fused_experts", None) or kernel.cpu_fused_moe  # vLLM 0.32, 0.26
                packed = [pack(weight.data, isa.isa) for weight in (experts.gate_up_proj, experts.down_proj)]
                assert torch.equal(layer.w13_weight, packed[0])
                assert torch.equal(layer.w2_weight, packed[1])
                assert not torch.equal(packed[0], experts.gate_up_proj)


@pytest.mark.engine
def test_the_canary_bears_a_token_that_rounding_sends_to_another_expert_but_no_stale_expert(tmp_path):
    """With this seed one of the canary's 12 tokens differs by 0.5 nats in fp16, the mean by 0.12 (allowed: 0.05)."""
    small_model("Qwen3Moe", False).save_pretrained(tmp_path)
    for dtype, faulty, word in ((torch.float16, "experts.", "median"), (torch.float32, "0.mlp.experts.1.down", "mean")):
        policy = Policy.load(str(tmp_path), dtype, "cpu")
        with started(str(tmp_path), policy) as engine:
            stale = {name: tensor.clone() for name, tensor in policy.weights().items()}
            move(policy, 0.02, seed=26)
            engine.load(policy.weights(), policy.response_logprobs)
            move(policy, 0.02, seed=27)
            weights = {name: (stale if faulty in name else policy.weights())[name] for name in stale}
            with pytest.raises(WeightLoadError, match=f"the canary's {word} "):
                engine.load(weights, policy.response_logprobs)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["Qwen3Moe", *RECURRENT])
def test_ten_steps_of_training_stay_at_parity_and_reach_every_tensor(good, tmp_path, name):
    out, folder, alone = tmp_path / "run", tmp_path / "model", "" if name in MIXTURES else "--no-eval-with-trainer"
    small_model(name, False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    train_here(command(good, f"--model {folder} --task {{root}}/task.py --out {out} --steps 10 --max-new-tokens 12"
                       f" --group-size 4 --lr 1e-3 --num-minibatches 1 --eval-problems 2 {alone}"))  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["updates"] for row in rows] == [1] * 10
    assert max(row["mismatch_abs_mean"] for row in rows) <= 1e-5
    assert max(row["mismatch_max"] for row in rows) <= 1e-4
    trained, first = Policy.load(str(out / "policy"), torch.float32, "cpu").weights(), small_model(name, False)
    assert all((trained[each] != tensor).any() for each, tensor in Policy(first).weights().items())  # expert by expert
    assert json.loads((out / "config.json").read_text())["trainer"]["body"] == (
        "PromptsOnce" if name in MIXTURES else "plain_body")


REFUSED = {
    "Phi": (dict(partial_rotary_factor=0.5), ValueError, "cannot start phi .*: .*drops the bias of the head"),
    "Bamba": (dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, attn_layer_indices=[1]), ValueError,
              r"cannot start bamba .*: Layer 0 \(linear_attention\) does not dispatch"),
    "Jamba": (dict(num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8, use_mamba_kernels=False),
              ValueError, r"\(cpu\) cannot start jamba .*: .* no attribute 'selective_scan_fwd'"),
    "Qwen3_5Text": (dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2,
                         layer_types=["linear_attention", "full_attention"]), ValueError,
                    "cannot start qwen3_5_text .*: No module named 'torchvision'"),
    "XGLM": (dict(d_model=64, ffn_dim=96, num_layers=2, attention_heads=2), ValueError,
             r"cannot start xglm .*: .*\['XGLMForCausalLM'\] are not supported for now"),
    "GptOss": (MIXED | dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2), WeightLoadError,
               "vLLM refused the weights, .*: its weight load does not reach the experts of gpt_oss"),
    "Mamba2": (dict(n_groups=2), WeightLoadError, "after load 1 .*, or vLLM computes mamba2 differently: the canary"),
}  # fmt: skip


CPU_ONLY = ("Jamba", "Qwen3_5Text", "GptOss")  # a GPU build has the operator and torchvision; GPT-OSS is untried on it


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name in REFUSED if name not in CPU_ONLY or not torch.cuda.is_available()])
def test_a_model_that_vllm_cannot_run_or_computes_differently_is_refused_by_name(name, tmp_path):
    changes, kind, sentence = REFUSED[name]
    small_model(name, False, **changes).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    with pytest.raises(kind, match=sentence), started(str(tmp_path), policy):
        pass


@pytest.mark.parametrize("name, tied, dtype", [(*case, dtype) for case in MATRIX for dtype in dtypes_of(case[0])])
def test_the_second_path_of_the_noise_floor_differs_by_rounding_alone(name, tied, dtype):
    """Not at all would be no floor; by more would be another attention: a lost window, cap, scale or group of heads."""
    policy = Policy(small_model(name, tied).to(dtype))
    policy.model.set_attn_implementation(attention_for(policy.model.config))
    ids = torch.tensor(MATRIX_PROMPTS)
    with torch.no_grad():
        ours = policy.hidden(ids).double()
        with rounded_otherwise(policy):
            other = policy.hidden(ids).double()
    # Rounding sends a few tokens of a 16-bit mixture to another expert; a lost window changes a third of the tokens.
    apart = ((ours - other).norm(dim=-1) / ours.norm(dim=-1)).quantile(0.9).item()
    low, high = {torch.float32: (1e-8, 1e-5), torch.bfloat16: (1e-3, 3e-2)}[dtype]
    assert low < apart < high


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU build's fault")
def test_recurrent_layers_are_refused_in_16_bits_where_vllm_computes_something_else(tmp_path):
    small_model("FalconH1", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.bfloat16, "cpu")
    refusal = pytest.raises(ValueError, match=r"cannot start falcon_h1 .*: its recurrent layers differ")
    with refusal, started(str(tmp_path), policy):
        pass


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU splits prompts, as this cache needs")
def test_a_prefix_cache_of_recurrent_layers_is_refused_on_a_cpu(tmp_path):
    small_model("FalconH1", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    refusal = pytest.raises(ValueError, match=r"falcon_h1 \(.* prefix_cache versioned\): .*Chunked prefill is required")
    with refusal, started(str(tmp_path), policy, prefix_cache="versioned"):
        pass


@pytest.mark.engine
def test_fp16_is_refused_by_name_where_a_model_overflows_in_it(tmp_path):
    small_model("Gemma2", True).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float16, "cpu")
    with pytest.raises(ValueError, match="'gemma2' does not support float16"), started(str(tmp_path), policy):
        pass


def test_a_window_soft_capping_and_rope_scaling_change_the_logits_of_these_models():
    """Else the matrix would prove nothing about them."""
    ids, plain = torch.arange(5, 61)[None], {"rope_parameters": dict(rope_type="default", rope_theta=1e4)}
    for name, change in (("Mistral", {"sliding_window": 500}), ("Gemma2", {"attn_logit_softcapping": 0.1}),
                         ("Gemma2", {"final_logit_softcapping": 1.0}), ("Gemma3Text", {"sliding_window": 500}),
                         ("Llama, yarn", plain), ("Llama, llama3 rope", plain)):
        model, other = small_model(name, True), small_model(name, True, **change)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert (model(input_ids=ids).logits - other(input_ids=ids).logits).abs().max() > 1e-3, (name, change)


def main(names: list[str]) -> None:
    print("| architecture | tied | after the head | trainer's attention | in vLLM | before | after three loads |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name, tied in MATRIX:
        if not names or name in names:
            found = measure_patched(tied)[name] if name in PATCHED else measure(name, tied)
            cells = (name, "yes" if tied else "no", EXTRAS.get(name, ""), found["attention"], found["vllm"],
                     f"{found['before']:.1e}", f"{max(found['after']):.1e}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--patched"]:
        print(json.dumps({name: measure(name, sys.argv[2] == "True") for name in PATCHED}))
    else:
        main(sys.argv[1:])
