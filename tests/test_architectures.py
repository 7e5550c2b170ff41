"""Each architecture as a small random model of its real configuration class: trainer and live engine agree."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import (
    ARCHITECTURES,
    AT_PARITY,
    MATRIX_PROMPTS,
    MATRIX_SAMPLING,
    MULTIMODAL,
    PATCHED,
    RECURRENT,
    ROUNDING,
    SIXTEEN,
    drawn_ids,
    dtypes_of,
    flip_a_bit,
    floors,
    forked,
    load_into,
    move,
    parametrize,
    policy_of,
    small_model,
    started,
)
from packaging import version

from engine_adapter import ParityFlags, Rollout
from extras.prompts_once import policy_options
from extras.sampling_mask import kept_sets
from model_folder import attention_for
from rl import Policy, make_batch
from verify import canary
from verify.parity import Widened, twice_as_precise
from verify.proof import differing
from vllm_cases import WeightLoadError

BY_LAYERS = "GraniteMoeHybrid, attention only"  # its Mamba layers are refused in 16 bits: layers count
# Name, whether the head is tied, dtype, device. Each class in float32; what 16 bits or a tied head change, which is how
# vLLM packs linear layers, experts and the head; texts of multimodal models. Of Lfm2 and DeepseekV3 queries have the
# shape (tokens, heads, head), which vLLM's CPU kernel for rotary angles cannot take. vLLM renames the A_log of Granite.
CASES = [(name, False, torch.float32, "cpu") for name in (*ARCHITECTURES, "Lfm2", "GraniteMoeHybrid, no experts")
         if name not in PATCHED]
CASES += [(name, False, torch.bfloat16, "cpu") for name in (
    BY_LAYERS, "Llama, biases", "Qwen3", "Phi3", "GPT2", "Cohere", "Mixtral", "Qwen2Moe", "Qwen3Moe, padded experts")]
CASES += [(name, False, dtypes_of(name)[-1], "cpu") for name in MULTIMODAL]
CASES += [(name, True, dtypes_of(name)[0], "cpu") for name in ("Qwen2", "GPT2", "Mixtral", "FalconH1", "Qwen3_5")]
CASES += [("Gemma2", True, torch.float32, "cpu"), ("Qwen2", True, torch.float16, "cpu")]
GPU = pytest.param("Qwen2", False, torch.bfloat16, "cuda", marks=[pytest.mark.gpu, pytest.mark.own_process])


def check_agreement(folder, *case):
    """|trainer - engine| before and after a changed load; the proof of a load that misses one bit of each tensor."""
    name, *_ = case
    policy = policy_of(folder, *case)
    with started(folder, policy, verify_loads=1) as engine:
        derived = engine.settings["not_proven"]  # by vLLM, from tensors that are proven
        assert all(".mla_attn.W_U" in each for each in derived) and bool(derived) == (name == "DeepseekV3")
        for seed in range(2):
            assert floors(policy, engine, MATRIX_SAMPLING, MATRIX_PROMPTS) < AT_PARITY, name
            move(policy, 0.02, seed)
            load_into(engine, policy)
        before = {name: tensor.clone() for name, tensor in policy.weights().items()}
        parameters = [*policy.model.parameters()]
        for parameter in parameters:
            flip_a_bit(parameter.data)
        changed = {name for name, tensor in policy.weights().items() if not torch.equal(tensor, before[name])}
        assert len(changed) >= len(parameters)
        found = changed ^ {*differing(engine.llm, policy.weights()).differing}
        assert found <= {"lm_head.weight"}  # a tied head may be the embedding


@pytest.mark.engine
@parametrize("name, tied, dtype, device", [*CASES, GPU])
def test_trainer_and_engine_agree_and_every_tensor_that_misses_one_bit_is_named(name, tied, dtype, device, tmp_path):
    check_agreement(tmp_path, name, tied, dtype, device)


@pytest.mark.engine
@parametrize("tiles", [True, False])
def test_latent_attention_agrees_whether_or_not_vllm_finds_amx_tiles(tiles, tmp_path, monkeypatch):
    from vllm.v1.attention import selector

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    selector._cached_get_attn_backend.cache_clear()
    check_agreement(tmp_path, "DeepseekV3")


@pytest.mark.engine
def test_trainer_and_engine_agree_where_vllm_patches_the_models_python_class(tmp_path):
    # Of GPT-2's names, untransposed; a buffer that is loaded; a head with a bias
    for name in (*PATCHED, "Starcoder2", "Dots1", "Phi"):
        process = forked(check_agreement, tmp_path / name, name)
        process.join()
        assert process.exitcode == 0


@parametrize("name", [name for name in (*ARCHITECTURES, "Phi") if name not in RECURRENT])
def test_both_bodies_and_the_head_have_the_values_and_gradients_of_the_models_own_logits(monkeypatch, name):
    """Prompts of 1 to 40 tokens, so that a window of 16 cuts; responses of 1 to 30 tokens with kept sets; one prompt
    has one response, one row is masked. Phi's head has a bias, Gemma 2's a soft cap, Granite's and Cohere's a scale.
    """
    model, seen = small_model(name), []
    model.set_attn_implementation(attention_for(model.config))
    model.set_experts_implementation("eager")  # torch has no grouped float64 product
    for each in model.parameters():  # biases, too
        each.data += 0.02 * torch.randn_like(each)
    model.double()
    # Tokens 95 are an environment's.
    groups = {40: (28, 7, 1), 1: (5, 20), 13: (9,), 27: (30, 30)}  # the longest row has not the longest response
    rollouts = [Rollout(prompt, None, ids, [0.0] * len(ids), trained=[token != 95 for token in ids])
                for size, lengths in groups.items() for prompt in [drawn_ids(size)] for ids in map(drawn_ids, lengths)]
    batch = make_batch(rollouts).mask_rows([True] * 7 + [False])
    batch = replace(batch, mask=batch.mask.double())
    kept = torch.rand(*batch.mask.shape, 96) < 0.3
    kept.scatter_(2, batch.targets[..., None], True)
    for rollout, of_row in zip(rollouts, kept, strict=True):
        of_response = of_row[len(rollout.prompt_ids) - 1 :][: len(rollout.token_ids)]
        rollout.kept = [each.nonzero()[:, 0].numpy() for each in of_response]
    weights, ours = torch.randn(batch.mask.shape).double(), []
    graph = lambda logprobs: (logprobs, *torch.autograd.grad(  # noqa: E731
        logprobs, [*model.parameters()], weights, materialize_grads=True))  # fmt: skip
    model.get_input_embeddings().register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with Widened(torch.float64):  # also what transformers computes in float32, such as norms
        for options in ({}, policy_options(model)):
            policy = Policy(model, temperature=0.7, head_dtype=model.dtype, restrict=kept_sets, **options)
            policy = policy.with_(head=replace(policy.head, chunk_elements=96 * 20))
            seen.clear()
            ours.append(graph(policy.logprobs(batch)))
        assert seen == [(4, 40), (8, 29)]  # the responses without their last tokens
        logits = model(input_ids=batch.inputs, use_cache=False).logits / 0.7
        logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
        expected = graph(logprobs.gather(-1, batch.targets[..., None])[..., 0] * batch.mask)
    for values in ours:
        torch.testing.assert_close(values, expected, atol=1e-12, rtol=1e-12)


@parametrize("name", [*RECURRENT, "Qwen3_5Text"])
def test_a_recurrent_state_sees_neither_padding_nor_other_rows(name):
    policy = Policy(small_model(name))
    assert policy_options(policy.model) == {}
    rollouts = [Rollout([0, 95, 7, 0], 0, drawn_ids(length), [0.0] * length) for length in (5, 36, 13, 21, 36, 29)]
    for rollout, together in zip(rollouts, policy.logprobs(make_batch(rollouts)), strict=True):
        (alone,) = policy.logprobs(make_batch([rollout]))
        torch.testing.assert_close(together[: len(alone)], alone, atol=ROUNDING, rtol=0)


@pytest.mark.engine
def test_the_canary_bears_a_token_that_rounding_sends_to_another_expert_but_no_stale_expert(tmp_path):
    """With this seed one of the canary's 12 tokens differs by 0.5 nats in fp16, the mean by 0.12 (allowed: 0.05)."""
    for dtype, faulty, word in ((torch.float16, "experts.", "median"), (torch.float32, "0.mlp.experts.1.down", "mean")):
        policy = policy_of(tmp_path, "Qwen3Moe", dtype=dtype)
        with started(tmp_path, policy) as engine:
            stale = {name: tensor.clone() for name, tensor in policy.weights().items() if faulty in name}
            move(policy, 0.02, seed=26)
            load_into(engine, policy)
            move(policy, 0.02, seed=27)
            weights = dict(policy.weights()) | stale
            with pytest.raises(WeightLoadError, match=f"the canary's {word} "):
                load_into(engine, policy, weights)


@pytest.mark.engine
@parametrize("name, dtype, flags", [
    ("Qwen2", torch.float16, {}), ("Qwen2", SIXTEEN, dict(fp32_head=False)), ("Mixtral", SIXTEEN, {}),
])  # fmt: skip
def test_the_canary_in_16_bits_bears_logits_that_grow(tmp_path, name, dtype, flags):
    """The noise of the last load is more than 4 times that of the first one. The logits of a token have a common part,
    which a 16-bit head rounds.
    """
    policy = policy_of(tmp_path, name, dtype=dtype)
    head = policy.model.get_output_embeddings().weight.data
    head += 4 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    with started(tmp_path, policy, ParityFlags(**flags)) as engine:
        for seed in range(8):
            head *= 1.3
            move(policy, 0.005, seed)
            load_into(engine, policy)
        difference, ratio, limit = map(float, re.fullmatch(
            r"(\S+) nats, (\S+) of the limit (\S+)", engine.settings["canary"]).groups())
        assert 0 < difference <= limit
        assert ratio == pytest.approx(difference / limit, rel=0.1)


@parametrize("on_gpu, load, times", [(False, 1, 2), (True, 1, 3), (True, 2, 4)])
def test_the_canarys_limit_in_16_bits_is_a_multiple_of_the_noise(monkeypatch, on_gpu, load, times):
    ours = torch.ones(4, 72)
    monkeypatch.setattr(canary, "logprobs_of", lambda *_: ours - 0.5)  # the precise values
    one = canary.Canary(SimpleNamespace(
        on_gpu=on_gpu, dtype=SIXTEEN, parity=ParityFlags(), settings={"head_dtype": "float32"}))  # fmt: skip
    one.loads = load - 1
    both = canary.Compared([], ours, ours - 0.75)
    assert one._measure(Policy(small_model("Qwen2")), both, 0, torch.mean) == (0.75, 0.5 * times)


@pytest.mark.engine
def test_the_canary_has_a_constant_limit_beside_a_kernel_that_takes_16_bits_alone(tmp_path, capsys):
    policy = policy_of(tmp_path, "Qwen2", dtype=SIXTEEN)

    def kernel(_module, inputs):
        assert inputs[0].dtype == SIXTEEN, "16 bits alone"

    policy.model.base_model.layers[0].mlp.register_forward_pre_hook(kernel)
    with started(tmp_path, policy) as engine:
        assert engine.settings["canary"].endswith("of the limit 1.5e-01")
        assert "noise is NOT MEASURED, AssertionError('16 bits alone" in capsys.readouterr().out


@pytest.mark.engine
@parametrize("name, window, longest, length", [
    ("Mistral", 16, 32, 17), ("Mistral", 4096, 32, canary.CANARY_PROMPT_TOKENS),
    ("Ministral3, beyond its original context", None, 67, 33),  # which is refused with a longer row: below
])  # fmt: skip
def test_the_canary_passes_the_window_or_the_original_context_if_the_runs_rows_do(
        tmp_path, name, window, longest, length):
    policy = policy_of(tmp_path, name, sliding_window=window)
    with started(tmp_path, policy, max_model_len=longest, block_size=32) as engine:
        assert canary.length(engine) == length


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU build's fault, or untried on a GPU")
UNGROUPED_NORM = pytest.mark.skipif(version.parse(transformers.__version__) >= version.parse("5.23"),
                                    reason="this transformers computes Mamba 2's groups as vLLM does")
REFUSED = [
    ("Qwen2", dict(num_attention_heads=4, num_key_value_heads=2), "float32", "cannot start qwen2 .*head_dim=16"),
    pytest.param("FalconH1", {}, "bfloat16", "cannot start falcon_h1 .*: its Mamba layers differ", marks=CPU_ONLY),
    pytest.param("GptOss", {}, "float32", "its weight load does not reach the experts of gpt_oss", marks=CPU_ONLY),
    pytest.param("Mamba2", dict(n_groups=2), "float32",
                 "after load 1 .*, or vLLM computes mamba2 differently: the canary", marks=UNGROUPED_NORM),
    ("HunYuanMoEV1", {}, "float32", r"refused the weights.*: AssertionError\(\) in /.*\.py, line \d+: assert "),
    # vLLM ignores Ministral 3's llama_4_scaling_beta, which counts from there on.
    ("Ministral3, beyond its original context", {}, "float32",
     r"or vLLM computes ministral3 differently after \d+ tokens, beyond its original context: the canary's"),
    *(pytest.param(name, {}, dtype, "after load 1 .*, or vLLM computes .* differently: the canary", marks=CPU_ONLY)
      for name, dtype in (("HrmText", "bfloat16"), ("Cohere2Moe, beyond its window", "float16"),
                          ("Cohere2, beyond its window", "bfloat16"))),
]  # fmt: skip


@pytest.mark.engine
@parametrize("name, changes, dtype, sentence", REFUSED)
def test_a_model_that_vllm_cannot_run_or_computes_differently_is_refused_by_name(
    name, changes, dtype, sentence, tmp_path, monkeypatch
):
    """By a GPU's limit, which is wider than a CPU's."""
    monkeypatch.setattr(canary, "TIMES", canary.TIMES_ON_GPU)
    policy = policy_of(tmp_path, name, dtype=getattr(torch, dtype), **changes)
    with pytest.raises((ValueError, WeightLoadError), match=sentence), started(tmp_path, policy, block_size=32):
        pass


@parametrize("dtype", [torch.float16, torch.bfloat16])
@parametrize("name", ARCHITECTURES)
def test_twice_the_precision_leaves_little_of_the_models_own_noise(name, dtype):
    policy, ids = Policy(small_model(name).to(dtype)), torch.tensor(MATRIX_PROMPTS)
    policy.model.set_attn_implementation(attention_for(policy.model.config))
    policy.model.set_experts_implementation("eager")
    with torch.no_grad():
        ours = policy.hidden(ids)
        with twice_as_precise(policy.model):
            precise = policy.hidden(ids)
        policy.model.double()
        exact = policy.hidden(ids)
    # Rounding sends a few tokens of a 16-bit mixture to another expert; a lost window changes a third of the tokens
    noise, left = ((each - exact).norm(dim=-1).quantile(0.9).item() for each in (ours, precise))
    assert left < noise / 4
