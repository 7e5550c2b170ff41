"""Faults that trackers of vLLM list (docs/records/vllm-rl.json), planted between two loads of a live engine."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from helpers import MATRIX_PROMPTS, VERSIONED, WARM, load_into, mismatch, move, policy_of, started
from torch.nn.functional import linear

from engine_adapter import Engine, ParityFlags, Sampling
from verify import experts, model_cases
from verify.errors import EngineStateError, WeightLoadError

pytestmark = pytest.mark.engine
BLOCK = 32  # the CPU build's smallest; the canary's prompts then have 33 tokens


def buffer(engine: Engine, name: str) -> torch.Tensor:
    return next(tensor for each, tensor in engine.vllm_model.named_buffers() if each.endswith(name))


def break_alias(engine: Engine, *_) -> None:
    for module in engine.vllm_model.modules():
        if "conv_weights" in module._buffers:
            module.conv_weights = module.conv_weights.clone()


def fuse_gates(engine: Engine, patch, old: dict[str, torch.Tensor]) -> None:
    for number, each in enumerate(engine.vllm_model.model.layers):
        first = old[f"model.layers.{number}.mlp.gate.weight"]
        patch.setattr(each.mlp.gate, "forward", lambda states, first=first: (linear(states, first), None))


def merge_twice(engine: Engine, patch, old: dict[str, torch.Tensor]) -> None:
    """The load brings the change of each tensor two times, as an adapter would that is merged into merged weights."""
    transfer = engine._transfer
    patch.setattr(engine, "_transfer", lambda new: transfer({name: 2 * new[name] - old[name] for name in new}))


def refuse_reset(engine: Engine, patch, _) -> None:
    engine.submit([5, 6, 7], 1, Sampling(1.0, 8))  # without an unfinished request a load resets nothing
    patch.setattr(engine.llm, "reset_prefix_cache", lambda **_: False)


# Model, options of the engine, what is done to it, and what the next load reports in float32 (and in bfloat16).
PROOF = "holds other values than were sent in "
BUFFERS, CANARY, NOTHING = "buffers of the engine differ", "the canary's m.* nats", None
GIVE_UP = "vLLM did not give up the KV cache"
FAULTS = {
    "rotary table from 8 on": (
        "Qwen2", {}, lambda engine, *_: buffer(engine, "cos_sin_cache")[8:].normal_(), BUFFERS),
    "scale of the embedding": ("Gemma2", {}, lambda engine, *_: buffer(engine, "normalizer").zero_(), BUFFERS),
    "alias of a convolution": ("FalconH1", {}, break_alias, BUFFERS),
    "tied head not sent": (
        "Llama", dict(tied=True), lambda _, patch, __: patch.setattr(
            model_cases, "heads_without_a_name", model_cases.tied_heads), PROOF),
    "experts packed once": (
        "Qwen3Moe", {}, lambda engine, patch, _: patch.setattr(
            experts, "packed_again", lambda _: nullcontext()), PROOF),
    "gates fused once": ("Qwen3Moe", {}, fuse_gates, CANARY, NOTHING),
    "blocks of an older version": (
        "Qwen2", VERSIONED, lambda engine, *_: setattr(engine, "cache_salt", lambda _: "1"), CANARY, NOTHING),
    "adapter merged twice": ("Qwen3", {}, merge_twice, PROOF, PROOF),
    "reset that does nothing": (
        "Qwen2", dict(parity=ParityFlags(inflight_keep=False), recomputes=True, in_flight=True), refuse_reset,
        GIVE_UP),
}  # fmt: skip
DTYPES = torch.float32, torch.bfloat16
CASES = [(fault, dtype) for fault, (_, _, _, *reports) in FAULTS.items() for dtype in DTYPES[: len(reports)]]


@pytest.mark.parametrize("fault, dtype", CASES)
def test_a_planted_fault_is_refused_at_the_next_load_or_known_to_pass(tmp_path, monkeypatch, fault, dtype):
    name, options, plant, *reports = FAULTS[fault]
    options = dict(block_size=BLOCK) | options
    policy = policy_of(tmp_path, name, options.pop("tied", False), dtype)
    with started(tmp_path, policy, **options) as engine:
        plant(engine, monkeypatch, deepcopy(policy).weights())
        move(policy, 0.0005 if dtype == torch.bfloat16 else 0.005)
        report = reports[DTYPES.index(dtype)]
        refused = pytest.raises((WeightLoadError, EngineStateError), match=report) if report else nullcontext()
        with refused:
            load_into(engine, policy)


def test_a_stale_cache_of_a_third_of_a_nat_is_refused_in_16_bits(tmp_path):
    """26 times the noise: it bounds how loose the limit of later loads may become."""
    policy = policy_of(tmp_path, "Qwen2", dtype=torch.bfloat16)
    with started(tmp_path, policy, block_size=BLOCK, **VERSIONED) as engine:
        engine.cache_salt = lambda _: "1"
        move(policy, 0.02)
        with pytest.raises(WeightLoadError, match=CANARY):
            load_into(engine, policy)


GPU = [pytest.mark.gpu, pytest.mark.own_process]


@pytest.mark.parametrize("name, byte, device", [  # of bytes of 69 a float32 is 3156, of 255 NaN
    ("Llama", 69, "cpu"), ("FalconH1", 255, "cpu"), pytest.param("Llama", 255, "cuda", marks=GPU),
    pytest.param("FalconH1", 255, "cuda", marks=GPU),
])  # fmt: skip
def test_undefined_pages_and_recurrent_states_change_no_value(tmp_path, name, byte, device):
    """A CPU's attention may multiply a NaN behind the last token by 0: then the run stops."""
    policy = policy_of(tmp_path, name, device=device)
    with started(tmp_path, policy) as engine:
        for cache in engine.runner.kv_caches:
            for part in [cache] if isinstance(cache, torch.Tensor) else cache:
                part.view(torch.uint8).fill_(byte)
        assert mismatch(policy, engine, WARM, MATRIX_PROMPTS)["mismatch_abs_mean"] < 1e-3
