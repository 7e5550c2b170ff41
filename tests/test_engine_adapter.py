"""Against the real vLLM V1 in this process. Faults are planted in real weights, real folders and the live engine."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import qwen2
from transformers import Qwen3ForCausalLM

from engine_adapter import AuditError, Engine, EngineStateError, ParityFlags, Sampling, WeightLoadError
from examples.toys import toy_config
from objectives import mismatch_metrics
from rl import Policy, UpdateOptions, frozen_logprobs, make_batch

ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9, [14, 15]]
SEEDS = [1000, 2000, 3000, 4000]
WARM = Sampling(temperature=0.7, max_new_tokens=12, stop_token_ids=(2,))


@contextmanager
def started(folder: str, policy: Policy, parity: ParityFlags | None = None, load: bool = True, **options):
    """A live engine in the given folder's architecture; holds the policy's weights if `load`."""
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    options = {"max_model_len": 128, "dtype": policy.model.dtype} | options
    engine = Engine(folder, contract, parity or ParityFlags(), **options)
    try:
        if load:
            engine.load(policy.weights(), policy.score)
        yield engine
    finally:
        engine.close()


def mismatch(policy: Policy, engine: Engine, sampling: Sampling = WARM, prompts=PROMPTS) -> dict[str, float]:
    rollouts = engine.generate(prompts, 4, sampling, SEEDS[: len(prompts)])
    batch = make_batch(rollouts, torch.zeros(len(rollouts)))
    old, _ = frozen_logprobs(policy, batch, UpdateOptions(temperature=sampling.temperature))
    return mismatch_metrics(old, batch.behavior_logprobs, batch.mask)


def move(policy: Policy, scale: float = 0.02, seed: int = 7) -> None:
    """Stands for an optimizer step."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


# ------------------------------------------------------------------------------------------------ audit
DEFAULTS = {"logprobs_mode": "processed_logprobs", "prefix_caching": False, "async_scheduling": False,
            "generation_config": "vllm", "inflight_update": "keep", "head_dtype": "float32"}  # fmt: skip
WITHOUT = {
    "processed_logprobs": {"logprobs_mode": "raw_logprobs"},
    "explicit_runtime": {"prefix_caching": True, "async_scheduling": True, "generation_config": "auto"},
    "inflight_keep": {"inflight_update": "abort"},
    "fp32_head": {"head_dtype": "bfloat16"},
}


@pytest.mark.parametrize("flag", [None, *WITHOUT])
def test_audit_reads_each_flag_back_from_the_live_engine(folders, flag):
    policy = Policy(qwen2(tied=False, dtype=torch.bfloat16), fp32_head=flag != "fp32_head")
    with started(folders[False], policy, ParityFlags(**{flag: False} if flag else {})) as engine:
        found = engine.audit()
        expected = DEFAULTS | WITHOUT.get(flag, {})
        assert {name: found[name] for name in expected} == expected
        assert found["model_dtype"] == "bfloat16"
        assert found["attention_backend"]
        assert found["cascade_attention"] is False
        assert engine.generate(PROMPTS, 2, WARM, SEEDS)


def test_audit_raises_when_the_live_engine_does_something_else(folders):
    policy = Policy(qwen2(tied=False, dtype=torch.bfloat16))
    with started(folders[False], policy) as engine:
        sampler, scheduler = engine.runner.sampler, engine.core.scheduler
        sampler.logprobs_mode = "raw_logprobs"
        scheduler.kv_cache_manager.enable_caching = True
        with pytest.raises(AuditError, match=r"logprobs_mode is 'raw_logprobs'.*prefix_caching is True"):
            engine.audit()
        sampler.logprobs_mode, scheduler.kv_cache_manager.enable_caching = "processed_logprobs", False
        engine._model.logits_processor.head_dtype = None  # the head's own switch, behind the configuration's back
        with pytest.raises(AuditError, match="head_dtype is 'bfloat16', not 'float32'"):
            engine.audit()


def test_untested_versions_are_refused_by_name_unless_allowed(tmp_path):
    """A later vLLM's metadata is put in front of the installed one, as an upgrade would."""
    planted = tmp_path / "vllm-0.99.1.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
    program = "import sys, engine_adapter; print(engine_adapter.check_vllm_version(allow_untested=len(sys.argv) > 1))"
    for arguments in ([], ["allow"]):
        result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True,
                                env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=False)  # fmt: skip
        if arguments:
            assert result.stdout == "0.99.1\n"
        else:
            assert "vLLM must be 0.26.0 to 0.32.0" in result.stderr
            assert "got 0.99.1" in result.stderr


# ------------------------------------------------------------------------------------------------ log-probabilities
def test_processed_logprobs_match_the_trainer_and_raw_ones_do_not_at_temperature_0_7(folders):
    policy = Policy(qwen2(tied=False))
    with started(folders[False], policy) as engine:
        processed = mismatch(policy, engine)
    with started(folders[False], policy, ParityFlags(processed_logprobs=False)) as engine:
        raw = mismatch(policy, engine)
        raw_at_one = mismatch(policy, engine, Sampling(1.0, 12, (2,)))
    assert processed["mismatch_abs_mean"] < 1e-5
    assert processed["mismatch_max"] < 1e-3
    assert raw["mismatch_abs_mean"] > 0.05
    assert raw_at_one["mismatch_abs_mean"] < 1e-5


def test_fp32_head_on_both_sides_is_closer_than_on_one(folders):
    model = qwen2(tied=False, dtype=torch.bfloat16)
    with torch.no_grad():  # an offset that softmax ignores and bf16 rounding does not: the head's dtype shows
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = 4.0
    fine, coarse = Policy(model, fp32_head=True), Policy(model, fp32_head=False)
    with started(folders[False], fine) as engine:
        both, one = mismatch(fine, engine)["mismatch_abs_mean"], mismatch(coarse, engine)["mismatch_abs_mean"]
    assert both < 0.7 * one


def test_generation_config_of_the_model_never_changes_the_distribution(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders[False], folder)
    traps = {"repetition_penalty": 1.8, "top_k": 3, "top_p": 0.5, "temperature": 0.2, "min_p": 0.3, "eos_token_id": 50}
    (folder / "generation_config.json").write_text(json.dumps(traps))
    policy = Policy(qwen2(tied=False))
    for runtime in (True, False):
        with started(str(folder), policy, ParityFlags(explicit_runtime=runtime)) as engine:
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
            assert ("repetition_penalty" in engine.settings["sampling_defaults"]) == (not runtime)
            rollouts = engine.generate(PROMPTS, 8, Sampling(1.0, 60, (2,)), SEEDS)
            assert all(r.finish_reason == "length" or r.token_ids[-1] == 2 for r in rollouts)


def test_every_token_the_stop_token_included_has_a_logprob_and_a_version(folders):
    policy = Policy(qwen2(tied=True))
    with started(folders[True], policy) as engine:
        stops = Sampling(1.0, 30, tuple(range(2, 40)))
        rollouts = engine.generate(PROMPTS, 4, stops, SEEDS)
        assert [r.prompt_ids for r in rollouts] == [p for p in PROMPTS for _ in range(4)]  # group-major
        assert {r.finish_reason for r in rollouts} >= {"stop"}
        for rollout in rollouts:
            assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions) <= 30
            ended = rollout.token_ids[-1] in stops.stop_token_ids
            assert ended == (rollout.finish_reason == "stop")
            assert not set(rollout.token_ids[:-1]) & set(stops.stop_token_ids)
            assert set(rollout.versions) == {1}


def test_seeds_decide_the_samples_whatever_the_batch(folders):
    policy = Policy(qwen2(tied=False))
    with started(folders[False], policy) as engine:
        first = engine.generate(PROMPTS, 3, WARM, SEEDS)
        again = engine.generate(PROMPTS[::-1], 3, WARM, SEEDS[::-1])
        alone = engine.generate(PROMPTS[1:2], 1, WARM, [SEEDS[1] + 2])
        other = engine.generate(PROMPTS, 3, WARM, [seed + 50 for seed in SEEDS])
        tokens = lambda rollouts: [r.token_ids for r in rollouts]  # noqa: E731
        assert tokens(first) == [t for group in range(3, -1, -1) for t in tokens(again)[3 * group : 3 * group + 3]]
        assert tokens(alone) == tokens(first)[5:6]  # sample 2 of prompt 1
        assert tokens(other) != tokens(first)
        assert len({tuple(t) for t in tokens(first)}) == 12  # no two samples of a group are alike


# ------------------------------------------------------------------------------------------------ weight load
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_consecutive_loads_arrive_tied_or_not(folders, tied, dtype):
    policy = Policy(qwen2(tied=tied, dtype=dtype))
    floor = 1e-5 if dtype == torch.float32 else 0.1
    with started(folders[tied], policy) as engine:
        for version in (2, 3):
            before = mismatch(policy, engine)["mismatch_abs_mean"]
            move(policy, 0.05, seed=version)
            stale = mismatch(policy, engine)["mismatch_abs_mean"]
            engine.load(policy.weights(), policy.score)
            after = mismatch(policy, engine)["mismatch_abs_mean"]
            assert engine.weight_version == version
            assert max(before, after) < floor
            assert stale > 2 * max(floor, after)


def read_back(engine: Engine) -> dict[str, torch.Tensor]:
    """The engine's weights by checkpoint name, read through its own layers: vLLM's CPU build keeps linear layers
    packed, but a layer applied to the identity gives its weight back exactly (one product by 1, the others by 0)."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found, contract = {}, engine.contract
    for name, module in engine._model.named_modules():
        if not hasattr(module, "quant_method"):
            found |= {f"{name}.{kind}": tensor for kind, tensor in module.named_parameters(recurse=False)}
            continue
        if "embed" in name:
            ids = torch.arange(contract[f"{name}.weight"][0])
            found[f"{name}.weight"] = module(ids)
            continue
        path, _, last = name.rpartition(".")
        names = [f"{path}.{part}.weight" if path else f"{part}.weight" for part in parts.get(last, (last,))]
        identity = torch.eye(contract[names[0]][1], dtype=engine.dtype)
        weight = module.quant_method.apply(module, identity, None).T  # (all parts' outputs, inputs)
        sizes = [contract[part][0] for part in names]
        found |= dict(zip(names, weight[: sum(sizes)].split(sizes), strict=True))  # vLLM pads the vocabulary
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_sides_hold_bit_identical_weights_after_every_load(tmp_path, tied, dtype):
    torch.manual_seed(0)
    config = toy_config("digits")
    config.update({"tie_word_embeddings": tied})
    policy = Policy(Qwen3ForCausalLM(config).to(dtype))
    policy.model.save_pretrained(tmp_path)
    with started(str(tmp_path), policy, max_model_len=64) as engine:
        for load in range(3):
            move(policy, 0.02, seed=load)
            engine.load(policy.weights(), policy.score)
            found, sent = read_back(engine), policy.weights()
            assert found.keys() | {"lm_head.weight"} == sent.keys() | {"lm_head.weight"}
            assert all(torch.equal(tensor, sent[name].detach()) for name, tensor in found.items())
        policy.model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 2**-7  # one value of one tensor
        differs = [name for name, tensor in read_back(engine).items() if not torch.equal(tensor, sent[name].detach())]
        assert differs == ["model.layers.1.mlp.up_proj.weight"]


def test_a_tied_head_that_is_not_sent_is_never_stale_in_silence(folders):
    """vLLM 0.32's CPU build keeps a packed copy of a tied head, stale if each tensor is sent once; 0.26 has no copy."""
    policy = Policy(qwen2(tied=True))
    weights = lambda: {n: t for n, t in policy.weights().items() if n != "lm_head.weight"}  # noqa: E731
    engine = Engine(folders[True], {n: t.shape for n, t in weights().items()}, ParityFlags(), max_model_len=128)
    try:
        if engine.version.startswith("0.26") or engine.on_gpu:
            engine.load(weights(), policy.score)
            move(policy)
            engine.load(weights(), policy.score)
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
        else:
            with pytest.raises(WeightLoadError, match="does not hold the trainer's weights"):
                engine.load(weights(), policy.score)
            with pytest.raises(EngineStateError, match="broken: build a new one"):
                engine.generate(PROMPTS, 1, WARM, SEEDS)
    finally:
        engine.close()


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


def test_a_faulty_load_names_the_tensor_and_leaves_the_engine_as_it_was(folders):
    faults = {
        "missing": r"missing \['model.layers.1.self_attn.k_proj.weight'\]",
        "unexpected": r"unexpected \['model.layers.7.mlp.up_proj.weight'\]",
        "transposed": r"k_proj.weight must have the shape \(32, 64\), got \(64, 32\)",
        "nan": r"not finite: \['model.layers.1.self_attn.k_proj.weight'\]",
        "infinite": "not finite",
    }
    policy = Policy(qwen2(tied=False))
    with started(folders[False], policy) as engine:
        for version, (fault, match) in enumerate(faults.items(), 1):
            with pytest.raises(WeightLoadError, match=match):
                engine.load(broken_weights(policy, fault), policy.score)
            assert engine.weight_version == version
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5
            move(policy)
            engine.load(policy.weights(), policy.score)
            assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5


@pytest.mark.parametrize("name, change", [
    ("model.layers.0.self_attn.o_proj.weight", lambda w: w.T.contiguous()),  # square: no shape gives it away
    ("model.layers.1.mlp.down_proj.weight", lambda w: w + 1e-3 * torch.randn_like(w)),  # as if it missed one AdamW step
    ("model.norm.weight", lambda w: w * 1.01),
])  # fmt: skip
def test_the_canary_sees_a_tensor_that_is_not_the_trainers(folders, name, change):
    policy = Policy(qwen2(tied=False))
    with started(folders[False], policy) as engine:
        weights = dict(policy.weights())
        weights[name] = change(weights[name])
        with pytest.raises(WeightLoadError, match="does not hold the trainer's weights"):
            engine.load(weights, policy.score)


def test_prefix_caching_left_on_serves_stale_prompts_after_a_load_and_the_fix_does_not(folders):
    long_prompts = [torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(4)]
    for runtime in (True, False):  # a prompt must be longer than a KV block, of which 32 is the CPU's smallest
        policy = Policy(qwen2(tied=False))
        with started(folders[False], policy, ParityFlags(explicit_runtime=runtime), block_size=32) as engine:
            assert mismatch(policy, engine, prompts=long_prompts)["mismatch_abs_mean"] < 1e-5
            move(policy)
            engine.load(policy.weights(), policy.score)
            stale = mismatch(policy, engine, prompts=long_prompts)["mismatch_abs_mean"]
            assert stale < 1e-5 if runtime else stale > 0.01


# ------------------------------------------------------------------------------------------------ states
def test_sleep_wake_load_generate_is_the_only_order(folders):
    policy = Policy(qwen2(tied=False))
    with started(folders[False], policy, load=False) as engine:
        with pytest.raises(EngineStateError, match="empty: call load"):
            engine.generate(PROMPTS, 1, WARM, SEEDS)
        with pytest.raises(EngineStateError, match="wake needs an engine that is asleep"):
            engine.wake()
        engine.load(policy.weights(), policy.score)
        engine.sleep()
        with pytest.raises(EngineStateError, match="asleep: call wake"):
            engine.generate(PROMPTS, 1, WARM, SEEDS)
        with pytest.raises(EngineStateError, match="call wake"):
            engine.load(policy.weights(), policy.score)
        with pytest.raises(EngineStateError, match="sleep needs an engine that is ready"):
            engine.sleep()
        with pytest.raises(EngineStateError, match="audit needs an engine that is awake"):
            engine.audit()
        engine.wake()
        with pytest.raises(EngineStateError, match="empty: call load"):
            engine.generate(PROMPTS, 1, WARM, SEEDS)
        engine.load(policy.weights(), policy.score)
        assert mismatch(policy, engine)["mismatch_abs_mean"] < 1e-5


@pytest.mark.parametrize("keep", [True, False])
def test_a_load_in_flight_keeps_or_aborts_unfinished_requests_as_the_flag_says(folders, keep):
    policy = Policy(qwen2(tied=False))
    sampling = Sampling(0.7, 40, ())
    with started(folders[False], policy, ParityFlags(inflight_keep=keep)) as engine:
        groups = [engine.submit(prompt, 2, sampling, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
        rollouts = [rollout for group in groups for rollout in group]
        for _ in range(16):
            engine.step()
        old = frozen_logprobs(policy, batch_of(rollouts), UpdateOptions(temperature=0.7))[0]
        assert mismatch_of(old, rollouts) < 1e-5
        move(policy)
        engine.load(policy.weights(), policy.score)
        while engine.num_unfinished:
            engine.step()
        assert {rollout.finish_reason for rollout in rollouts} == {"length" if keep else "abort"}
        tokens = [len(rollout.token_ids) for rollout in rollouts]
        assert all(n == 40 for n in tokens) if keep else all(n == 16 for n in tokens)
        if keep:
            assert all(r.versions == [1] * 16 + [2] * 24 for r in rollouts)
        again = engine.generate(PROMPTS, 1, sampling, SEEDS)  # a clean engine either way
        new = frozen_logprobs(policy, batch_of(again), UpdateOptions(temperature=0.7))[0]
        assert mismatch_of(new, again) < 1e-5


def batch_of(rollouts):
    return make_batch(rollouts, torch.zeros(len(rollouts)))


def mismatch_of(logprobs, rollouts) -> float:
    batch = batch_of(rollouts)
    return mismatch_metrics(logprobs, batch.behavior_logprobs, batch.mask)["mismatch_abs_mean"]


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
@pytest.mark.gpu
def test_sleep_releases_memory_and_a_load_brings_the_policy_back(folders):
    model = qwen2(tied=False, dtype=torch.bfloat16).cuda()
    policy = Policy(model)
    with started(folders[False], policy, kv_cache_gib=2.0) as engine:
        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free_awake > 1.5 * 2**30
        engine.wake()
        engine.load(policy.weights(), policy.score)
        rollouts = engine.generate(PROMPTS, 4, WARM, SEEDS)
        batch = make_batch(rollouts, torch.zeros(len(rollouts)), "cuda")
        old, _ = frozen_logprobs(policy, batch, UpdateOptions(temperature=0.7))
        assert mismatch_metrics(old, batch.behavior_logprobs, batch.mask)["mismatch_abs_mean"] < 0.1
