"""Faults that trackers of vLLM list (docs/records/vllm-rl.json), planted between two loads of a live engine."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from helpers import MATRIX_PROMPTS, VERSIONED, WARM, checks_of, load_into, mismatch, move, policy_of, started
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_cases
from engine_adapter import Engine, ParityFlags, Sampling
from verify.buffers import changed_buffers
from vllm_cases import EngineStateError, WeightLoadError

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


# Model, options of the engine, what is done to it, and what the next load reports.
PROOF = "holds other values than were sent in "
BUFFERS, CANARY = "buffers of the engine differ", "the canary's m.* nats"
STALE = "blocks of an older version"
FAULTS = {
    "rotary table from 8 on": (
        "Qwen2", {}, lambda engine, *_: buffer(engine, "cos_sin_cache")[8:].normal_(), BUFFERS),
    "scale of the embedding": ("Gemma2", {}, lambda engine, *_: buffer(engine, "normalizer").zero_(), BUFFERS),
    "alias of a convolution": ("FalconH1", {}, break_alias, BUFFERS),
    "tied head not sent": (
        "Llama", dict(tied=True), lambda _, patch, __: patch.setattr(
            vllm_cases, "heads_without_a_name", vllm_cases.tied_heads), PROOF),
    "experts packed once": (
        "Qwen3Moe", {}, lambda engine, patch, _: patch.setattr(
            vllm_cases, "packed_again", lambda _: nullcontext()), PROOF),
    "gates fused once": ("Qwen3Moe", {}, fuse_gates, CANARY),
    STALE: ("Qwen2", VERSIONED, lambda engine, *_: setattr(engine, "cache_salt", lambda _: "1"), CANARY),
    "adapter merged twice": ("Qwen3", {}, merge_twice, PROOF),
    "reset that does nothing": (
        "Qwen2", dict(parity=ParityFlags(inflight_keep=False), recomputes=True, in_flight=True), refuse_reset,
        "vLLM did not give up the KV cache"),
}  # fmt: skip
UNSEEN = 0.0005  # a step that the canary cannot tell from bfloat16's rounding
CASES = [(fault, torch.float32, 0.005) for fault in FAULTS]
CASES += [("gates fused once", torch.bfloat16, UNSEEN), (STALE, torch.bfloat16, UNSEEN)]
# A third of a nat, 26 times the noise: it bounds how loose the limit of later loads may become.
CASES += [(STALE, torch.bfloat16, 0.02), ("adapter merged twice", torch.bfloat16, UNSEEN * 2)]


@pytest.mark.parametrize("fault, dtype, scale", CASES)
def test_a_planted_fault_is_refused_at_the_next_load_or_known_to_pass(tmp_path, monkeypatch, fault, dtype, scale):
    name, options, plant, report = FAULTS[fault]
    options = dict(block_size=BLOCK) | options
    policy = policy_of(tmp_path, name, options.pop("tied", False), dtype)
    with started(tmp_path, policy, **options) as engine:
        plant(engine, monkeypatch, deepcopy(policy).weights())
        move(policy, scale)
        refused = pytest.raises((WeightLoadError, EngineStateError), match=report)
        with nullcontext() if scale == UNSEEN else refused:
            load_into(engine, policy)


def test_a_load_compares_each_buffer_once_and_waits_for_none(tmp_path):
    """On a GPU a comparison whose result Python reads waits for it. All layers share one rotary table."""
    waits = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            waits.extend({function.overloadpacket.__name__} & {"equal", "_local_scalar_dense"})
            return function(*arguments, **named or {})

    policy = policy_of(tmp_path, "Qwen2", num_hidden_layers=4)
    with started(tmp_path, policy) as engine, Count():
        assert len([each for each in checks_of(engine).buffers if each.endswith("cos_sin_cache")]) == 1
        assert not changed_buffers(engine, checks_of(engine).buffers)
    assert not waits


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
