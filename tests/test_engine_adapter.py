"""The adapter against the real vLLM V1 in this process. Faults are planted in weights, folders and the live engine.

Tests that need equal engines follow one another, so that they share one (helpers.started).
"""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import helpers
import pytest
import torch
from helpers import PROMPTS, SEEDS, WARM, check_states, close_live_engine, mismatch, mismatch_of, move, qwen2, started
from transformers import Qwen3ForCausalLM

from config import ParityFlags
from engine_adapter import AuditError, Engine, EngineStateError, Sampling, WeightLoadError, reseed
from examples.toys import toy_config
from rl import Policy

ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------------------------------------------ audit
DEFAULTS = {"logprobs_mode": "processed_logprobs", "enable_prefix_caching": False, "async_scheduling": False,
            "generation_config": "vllm", "inflight_update": "keep", "head_dtype": "float32",
            "max_logprobs": -1}  # fmt: skip
WITHOUT = {
    "processed_logprobs": {"logprobs_mode": "raw_logprobs"},
    "explicit_runtime": {"enable_prefix_caching": True, "async_scheduling": True, "generation_config": "auto"},
    "inflight_keep": {"inflight_update": "abort"},
    "fp32_head": {"head_dtype": "bfloat16"},
    "sampling_mask": {"max_logprobs": 20},
}


@pytest.mark.engine
def test_audit_raises_when_the_live_engine_does_something_else(engine_folders):
    policy = Policy(qwen2(tied=False, dtype=torch.bfloat16))
    with started(engine_folders[False], policy) as engine:  # closed if this test fails in between
        sampler, cache = engine.runner.sampler, engine.core.scheduler.kv_cache_manager
        head = engine.vllm_model.logits_processor
        sampler.logprobs_mode, cache.enable_caching = "raw_logprobs", True
        with pytest.raises(AuditError, match=r"logprobs_mode is 'raw_logprobs'.*prefix_caching is True"):
            engine.audit()
        sampler.logprobs_mode, cache.enable_caching = "processed_logprobs", False
        usual, head.head_dtype = head.head_dtype, None  # the head's own switch; the configuration still says float32
        with pytest.raises(AuditError, match="head_dtype is 'bfloat16', not 'float32'"):
            engine.audit()
        head.head_dtype = usual
        engine.audit()


@pytest.mark.engine
def test_a_16_bit_head_of_an_fp32_engine_has_one_name(engine_folders):
    """Some steps' logits fit into both 16-bit types, others into bfloat16 alone: 1e-9 is too small for float16."""
    def in_16_bits(_module, _inputs, logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return torch.full_like(logits, 1.5 if len(calls) % 2 else 1e-9).bfloat16().float()

    calls = []
    with started(engine_folders[False], Policy(qwen2(tied=False))) as engine:
        hook = engine.vllm_model.logits_processor.register_forward_hook(in_16_bits)
        try:
            with pytest.raises(AuditError, match="head_dtype is 'bfloat16', not 'float32'"):
                engine.audit()
        finally:
            hook.remove()
        assert len(calls) > 1
        engine.audit()


@pytest.mark.engine
def test_a_list_of_seeds_that_is_too_short_is_an_error(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        engine.load(policy.weights(), policy.response_logprobs)
        with pytest.raises(ValueError, match="shorter than"):
            engine.generate([[5, 6], [7, 8]], 1, Sampling(1.0, 4), [0])
        assert engine.num_unfinished == 0


@pytest.mark.engine
def test_fp32_head_on_both_sides_is_closer_than_on_one(engine_folders):
    model = qwen2(tied=False, dtype=torch.bfloat16)
    with torch.no_grad():  # an offset that softmax ignores and bf16 rounding does not: the head's dtype shows
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = 4.0
    fine, coarse = Policy(model, fp32_head=True), Policy(model, fp32_head=False)
    with started(engine_folders[False], fine) as engine:
        both, one = mismatch(fine, engine)["mismatch_abs_mean"], mismatch(coarse, engine)["mismatch_abs_mean"]
    assert both < 0.7 * one


# fp32_head shows in 16 bits only.
@pytest.mark.engine
@pytest.mark.parametrize("flag, dtype", [
    (None, torch.bfloat16), ("fp32_head", torch.bfloat16), ("inflight_keep", torch.float32),
    ("explicit_runtime", torch.float32), ("processed_logprobs", torch.float32),
    ("sampling_mask", torch.float32),
])  # fmt: skip
def test_audit_reads_each_flag_back_from_the_live_engine(engine_folders, flag, dtype):
    policy = Policy(qwen2(tied=False, dtype=dtype), fp32_head=flag != "fp32_head")
    with started(engine_folders[False], policy, ParityFlags(**{flag: False} if flag else {})) as engine:
        found = engine.audit()
        expected = DEFAULTS | WITHOUT.get(flag, {})
        assert {name: found[name] for name in expected} == expected
        assert found["model_dtype"] == str(dtype).removeprefix("torch.")
        assert found["attention_backend"]
        assert found["disable_cascade_attn"] is True
        assert engine.generate(PROMPTS, 2, WARM, SEEDS)


def test_untested_versions_are_refused_by_name_unless_allowed(tmp_path):
    """A later vLLM's metadata is put in front of the installed one, as an upgrade would."""
    planted = tmp_path / "vllm-0.99.1.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
    program = "from engine_adapter import check_vllm_version as check; print(check(allow_untested=True)); check()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                            env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})  # fmt: skip
    assert result.stdout == "0.99.1\n"
    assert "vLLM must be 0.26 to 0.32" in result.stderr
    assert "got 0.99.1" in result.stderr


def test_a_child_process_cannot_start_an_engine_without_the_marker():
    child = subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, text=True, check=False)
    assert "starts an engine: mark it" in child.stderr


# ------------------------------------------------------------------------------------------------ log-probabilities
@pytest.mark.engine
def test_processed_logprobs_match_the_trainer_and_raw_ones_do_not_at_temperature_0_7(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy, ParityFlags(processed_logprobs=False)) as engine:
        raw = mismatch(policy, engine)
        raw_at_one = mismatch(policy, engine, Sampling(1.0, 12, (2,)))
    with started(engine_folders[False], policy) as engine:
        processed = mismatch(policy, engine)
    assert processed["mismatch_abs_mean"] < 1e-5
    assert processed["mismatch_max"] < 1e-3
    assert raw["mismatch_abs_mean"] > 0.05
    assert raw_at_one["mismatch_abs_mean"] < 1e-5


@pytest.mark.engine
def test_every_token_the_stop_token_included_has_a_logprob_and_a_version(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        stops = Sampling(1.0, 30, tuple(range(2, 40)))
        rollouts = engine.generate(PROMPTS, 4, stops, SEEDS)
        assert [r.prompt_ids for r in rollouts] == [p for p in PROMPTS for _ in range(4)]  # group-major
        assert {r.finish_reason for r in rollouts} >= {"stop"}
        for rollout in rollouts:
            assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions) <= 30
            ended = rollout.token_ids[-1] in stops.stop_token_ids
            assert ended == (rollout.finish_reason == "stop")
            assert not set(rollout.token_ids[:-1]) & set(stops.stop_token_ids)
            assert set(rollout.versions) == {engine.weight_version}


@pytest.mark.engine
def test_seeds_decide_the_samples_whatever_the_batch(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        first = engine.generate(PROMPTS, 3, WARM, SEEDS)
        again = engine.generate(PROMPTS[::-1], 3, WARM, SEEDS[::-1])
        alone = engine.generate(PROMPTS[1:2], 1, WARM, [SEEDS[1] + 2])
        other = engine.generate(PROMPTS, 3, WARM, [seed + 50 for seed in SEEDS])
        tokens = lambda rollouts: [r.token_ids for r in rollouts]  # noqa: E731
        assert tokens(first) == [t for group in range(3, -1, -1) for t in tokens(again)[3 * group : 3 * group + 3]]
        assert tokens(alone) == tokens(first)[5:6]  # sample 2 of prompt 1
        assert tokens(other) != tokens(first)
        assert len({tuple(t) for t in tokens(first)}) == 12  # no two samples of a group are alike


@pytest.mark.engine
def test_without_seeds_of_their_own_the_seed_of_the_process_decides_the_samples(engine_folders):
    policy, batches = Policy(qwen2(tied=False)), []
    with started(engine_folders[False], policy) as engine:
        for seed in (5, 5, 6):
            reseed(seed)
            batches.append([rollout.token_ids for rollout in engine.generate(PROMPTS, 3, WARM)])
    assert batches[0] == batches[1] != batches[2]
    assert len(set(map(tuple, batches[0]))) == 12


@pytest.mark.engine
def test_generation_config_of_the_model_never_changes_the_distribution(engine_folders):
    """Their generation_config.json asks for penalties, masks, another temperature and another stop token."""
    policy = Policy(qwen2(tied=False))
    for runtime in (True, False):
        with started(engine_folders[False], policy, ParityFlags(explicit_runtime=runtime)) as engine:
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
            assert ("repetition_penalty" in engine.settings["sampling_defaults"]) == (not runtime)
            rollouts = engine.generate(PROMPTS, 8, Sampling(1.0, 60, (2,)), SEEDS)
            assert all(r.finish_reason == "length" or r.token_ids[-1] == 2 for r in rollouts)


@pytest.mark.engine
def test_prefix_caching_left_on_serves_stale_prompts_after_a_load_and_the_fix_does_not(engine_folders):
    """The prompts are longer than a block of the KV cache (128 tokens), because vLLM caches whole blocks."""
    generator = torch.Generator().manual_seed(0)
    long_prompts = torch.randint(3, 96, (4, 140), generator=generator).tolist()
    for runtime in (False, True):
        policy = Policy(qwen2(tied=False))
        with started(engine_folders[False], policy, ParityFlags(explicit_runtime=runtime)) as engine:
            assert mismatch(policy, engine, prompts=long_prompts)["mismatch_abs_mean"] < 1e-5
            move(policy)
            engine.load(policy.weights(), policy.response_logprobs)
            stale = mismatch(policy, engine, prompts=long_prompts)["mismatch_abs_mean"]
            assert stale < 1e-5 if runtime else stale > 0.01


BLOCK = 32  # the CPU build's smallest


@pytest.mark.engine
def test_a_versioned_prefix_cache_is_hit_within_a_version_and_never_across_a_load(engine_folders):
    """Also by requests that wait while the weights change: the engine has room for 8 of 16 at once."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 96, (4, 3 * BLOCK + 5), generator=generator).tolist()
    options = dict(block_size=BLOCK, prefix_cache="versioned", max_num_seqs=4)
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy, **options) as engine:
        assert engine.audit()["prefix_cache"] == "versioned"
        assert engine.audit()["enable_prefix_caching"] is True
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        for seed in range(3):
            assert mismatch(policy, engine, prompts=prompts)["mismatch_abs_mean"] < 1e-5
            rollouts = [engine.submit(prompt, 4, WARM, 50 * seed + number) for number, prompt in enumerate(prompts)]
            free = pool.get_num_free_blocks()
            engine.step()  # half of them run, the others wait
            assert free - pool.get_num_free_blocks() == 2 * 3 + 8  # two prompts, and a last block of each response
            move(policy, 0.02, seed)
            engine.load(policy.weights(), policy.response_logprobs)
            while engine.num_unfinished:
                engine.step()
            waited = [each for group in rollouts for each in group if set(each.versions) == {engine.weight_version}]
            assert len(waited) >= 8
            assert mismatch_of(policy, waited, WARM.temperature)["mismatch_abs_mean"] < 1e-5


# ------------------------------------------------------------------------------------------------ weight load
def broken_weights(policy: Policy, fault: str) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unexpected":
        weights["model.layers.7.mlp.up_proj.weight"] = weights[name]
    elif fault == "transposed":
        weights[name] = weights[name].T
    elif fault == "nan":
        weights[name][3, 4] = float("nan")
    elif fault == "infinite":
        weights[name][3, 4] = float("inf")
    return weights


@pytest.mark.engine
def test_a_faulty_load_names_the_tensor_and_leaves_the_engine_as_it_was(engine_folders):
    faults = {
        "missing": r": model.layers.1.self_attn.k_proj.weight must be \(32, 64\), got None",
        "unexpected": r": model.layers.7.mlp.up_proj.weight must be absent, got \(",
        "transposed": r": model.layers.1.self_attn.k_proj.weight must be \(32, 64\), got \(64, 32\)",
        "nan": r": model.layers.1.self_attn.k_proj.weight must be finite",
        "infinite": "must be finite",
    }
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        for fault, match in faults.items():
            version = engine.weight_version
            with pytest.raises(WeightLoadError, match=match):
                engine.load(broken_weights(policy, fault), policy.response_logprobs)
            assert engine.weight_version == version
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
            move(policy)
            engine.load(policy.weights(), policy.response_logprobs)
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5


@pytest.mark.engine
def test_the_canary_finds_a_tensor_that_differs_from_the_trainers(engine_folders):
    faults = {
        "model.layers.0.self_attn.o_proj.weight": lambda w: w.T.contiguous(),  # square: no shape gives it away
        "model.layers.1.mlp.down_proj.weight": lambda w: w + 1e-3 * torch.randn_like(w),  # as if one AdamW step missed
        "model.norm.weight": lambda w: w * 1.01,
    }
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        for name, change in faults.items():
            weights = dict(policy.weights())
            weights[name] = change(weights[name])
            with pytest.raises(WeightLoadError, match="does not hold the trainer's weights"):
                engine.load(weights, policy.response_logprobs)
            assert engine.state == "broken"
            engine.state = "empty"  # all tensors had arrived: the test alone may go on with this engine
            engine.load(policy.weights(), policy.response_logprobs)
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5


def read_back(engine: Engine) -> dict[str, torch.Tensor]:
    """The engine's weights by checkpoint name, read through its own layers: vLLM's CPU build keeps linear layers
    packed, but a layer applied to the identity gives its weight back exactly (one product by 1, the others by 0)."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found, contract = {}, engine.contract
    for name, module in engine.vllm_model.named_modules():
        if not hasattr(module, "quant_method"):
            found |= {f"{name}.{kind}": tensor for kind, tensor in module.named_parameters(recurse=False)}
            continue
        if "embed" in name:
            ids = torch.arange(contract[f"{name}.weight"][0])
            found[f"{name}.weight"] = module(ids)
            continue
        path, _, last = name.rpartition(".")
        names = [f"{path}.{part}" if path else part for part in parts.get(last, (last,))]
        identity = torch.eye(contract[f"{names[0]}.weight"][1], dtype=engine.dtype)
        held = {"weight": module.quant_method.apply(module, identity, None).T}  # (all parts' outputs, inputs)
        if getattr(module, "bias", None) is not None:
            held["bias"] = module.bias  # (all parts' outputs,)
        sizes = [contract[f"{part}.weight"][0] for part in names]
        for kind, tensor in held.items():  # vLLM pads the vocabulary
            pieces = tensor[: sum(sizes)].split(sizes)
            found |= {f"{part}.{kind}": piece for part, piece in zip(names, pieces, strict=True)}
    return found


def differing(engine: Engine, policy: Policy) -> list[str]:
    """The tensors that are not bit-identical on both sides."""
    found, sent = read_back(engine), policy.weights()
    assert found.keys() | {"lm_head.weight"} == sent.keys() | {"lm_head.weight"}  # a tied head is the embedding
    return [name for name, tensor in found.items() if not torch.equal(tensor, sent[name].detach())]


@pytest.mark.engine
@pytest.mark.parametrize("dtype, tied", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True),
                                         (torch.bfloat16, False)])  # fmt: skip
def test_consecutive_loads_arrive_bit_by_bit_tied_or_not(engine_folders, tied, dtype):
    policy = Policy(qwen2(tied=tied, dtype=dtype))
    floor = 1e-5 if dtype == torch.float32 else 0.1
    with started(engine_folders[tied], policy) as engine:
        first = engine.weight_version
        for load in range(1, 4):
            before = mismatch(policy, engine)["mismatch_abs_mean"]
            move(policy, 0.05, seed=load)
            stale = mismatch(policy, engine)["mismatch_abs_mean"]
            engine.load(policy.weights(), policy.response_logprobs)
            after = mismatch(policy, engine)["mismatch_abs_mean"]
            assert engine.weight_version == first + load
            assert max(before, after) < floor
            assert stale > 2 * max(floor, after)
            assert not differing(engine, policy)
        policy.model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 2**-7  # one value of one tensor
        assert differing(engine, policy) == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.engine
@pytest.mark.parametrize("tied", [False, True])
def test_consecutive_loads_of_the_toys_architecture_arrive_bit_by_bit_in_float16(tmp_path, tied):
    torch.manual_seed(0)
    config = toy_config("digits")
    config.update({"tie_word_embeddings": tied})
    policy = Policy(Qwen3ForCausalLM(config).to(torch.float16))
    policy.model.save_pretrained(tmp_path)
    with started(str(tmp_path), policy, max_model_len=64) as engine:
        for load in range(3):
            move(policy, 0.02, seed=load)
            engine.load(policy.weights(), policy.response_logprobs)
            assert not differing(engine, policy)


@pytest.mark.engine
def test_a_tied_head_that_is_not_sent_is_loaded_or_refused(engine_folders):
    """vLLM 0.32's CPU build keeps a packed copy of a tied head, stale if each tensor is sent once; 0.26 has no copy."""
    policy = Policy(qwen2(tied=True))
    weights = lambda: {n: t for n, t in policy.weights().items() if n != "lm_head.weight"}  # noqa: E731
    close_live_engine()
    engine = Engine(engine_folders[True], {n: t.shape for n, t in weights().items()}, ParityFlags(), max_model_len=128)
    with pytest.raises(EngineStateError, match="a process holds one engine"):
        Engine(engine_folders[True], {}, ParityFlags(), max_model_len=128)
    try:
        if engine.version.startswith("0.26") or engine.on_gpu:
            engine.load(weights(), policy.response_logprobs)
            move(policy)
            engine.load(weights(), policy.response_logprobs)
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
        else:
            with pytest.raises(WeightLoadError, match="does not hold the trainer's weights"):
                engine.load(weights(), policy.response_logprobs)
            with pytest.raises(EngineStateError, match="broken: build a new one"):
                engine.generate(PROMPTS, 1, WARM, SEEDS)
    finally:
        engine.close()


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["vllm", "shared"])
@pytest.mark.parametrize("collector", ["of the tests", "of vLLM"])
def test_close_frees_every_module_and_parameter_of_vllms_model(engine_folders, kind, collector):
    """After a load. vLLM freezes the heap at start, and its parameters are in cycles that only the collector frees."""
    policy, changed = Policy(qwen2(tied=False)), (gc.freeze, gc.unfreeze)
    close_live_engine()
    if collector == "of vLLM":  # as on a GPU, where helpers.py leaves the collector alone
        gc.freeze, gc.unfreeze = helpers.freeze, helpers.unfreeze
    try:
        with started(engine_folders[False], policy, kind=kind) as engine:
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
        held = {"runner": engine.runner, "sampler": engine.runner.sampler, **dict(engine.vllm_model.named_modules())}
        if kind == "vllm":  # the shared engine's parameters are the trainer's
            held |= {f"parameter {name}": each for name, each in engine.vllm_model.named_parameters()}
        held = {name: weakref.ref(each) for name, each in held.items()}
        engine.close()
        assert len(held) >= 7
        assert [name for name, reference in held.items() if reference() is not None] == []
    finally:
        gc.freeze, gc.unfreeze = changed


@pytest.mark.engine
def test_close_drops_the_sampler_before_vllm_gives_its_memory_back(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        runner = engine.runner
        assert runner.sampler is not None
        engine.close()
        assert runner.sampler is None


@pytest.mark.engine
def test_no_kernel_is_picked_by_its_time_at_the_start(engine_folders):
    with started(engine_folders[False], Policy(qwen2(tied=False))) as engine:
        assert engine.llm.vllm_config.kernel_config.enable_flashinfer_autotune is False


# ------------------------------------------------------------------------------------------------ states
@pytest.mark.engine
def test_sleep_wake_load_generate_is_the_only_order(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy, load=False) as engine:
        check_states(policy, engine)


@pytest.mark.engine
@pytest.mark.parametrize("keep", [False, True])
def test_a_load_in_flight_keeps_or_restarts_unfinished_requests_as_the_flag_says(engine_folders, keep):
    policy = Policy(qwen2(tied=False))
    sampling = Sampling(0.7, 40, ())
    with started(engine_folders[False], policy, ParityFlags(inflight_keep=keep)) as engine:
        groups = [engine.submit(prompt, 2, sampling, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
        rollouts = [rollout for group in groups for rollout in group]
        for _ in range(16):
            engine.step()
        assert mismatch_of(policy, rollouts, 0.7)["mismatch_abs_mean"] < 1e-5
        move(policy)
        version, wasted = engine.weight_version, engine.counters["tokens_wasted"]
        engine.load(policy.weights(), policy.response_logprobs)
        while engine.num_unfinished:
            engine.step()
        assert {rollout.finish_reason for rollout in rollouts} == {"length"}
        expected = [version] * 16 + [version + 1] * 24 if keep else [version + 1] * 40
        assert all(rollout.versions == expected for rollout in rollouts)
        assert engine.counters["tokens_wasted"] - wasted == (0 if keep else 16 * len(rollouts))
        again = engine.generate(PROMPTS, 1, sampling, SEEDS)  # a clean engine either way
        assert mismatch_of(policy, again, 0.7)["mismatch_abs_mean"] < 1e-5


def test_sampling_refuses_what_cannot_be_scored():
    for temperature in (-1.0, 0.001, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or at least 0.01"):
            Sampling(temperature, 8, ())
    bad = dict(top_k=-1, top_p=0.0, min_p=1.0, repetition_penalty=0.0, presence_penalty=float("nan"))
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            Sampling(1.0, 8, (), **{name: value})
    with pytest.raises(TypeError):
        Sampling(1.0, 8, (), logit_bias={})


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.engine
@pytest.mark.gpu
@pytest.mark.own_process
def test_sleep_releases_memory_and_a_load_brings_the_policy_back(engine_folders):
    model = qwen2(tied=False, dtype=torch.bfloat16).cuda()
    policy = Policy(model)
    with started(engine_folders[False], policy, kv_cache_gib=2.0) as engine:
        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free_awake > 1.5 * 2**30
        engine.wake()
        engine.load(policy.weights(), policy.response_logprobs)
        assert mismatch(policy, engine)["mismatch_abs_mean"] < 0.1
