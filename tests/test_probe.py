"""The probe of a run: faults planted in a live engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    SIXTEEN,
    checks_of,
    config_of,
    drawn_ids,
    load_into,
    move,
    parametrize,
    qwen2,
    scored,
    started,
)

from engine_adapter import ParityFlags, Rollout, Sampling
from extras.live_probe import StepProbe, explain, verdict
from extras.sampling_mask import MaskedSampling, kept_sets
from rl import Policy

RAW = "semantics: raw log-probabilities"
STALE = "cache: prompt KV computed under earlier weights"
EXPECTED = {  # by the faults that are planted
    "no mask": "trainer: its values are without the mask",
    "head in trainer": "head: float32 in the engine and bfloat16 in the trainer",
    "head on both sides": "head: bfloat16 in the engine and bfloat16 in the trainer",
    "raw+head+prefix": f"{RAW}; and {STALE}; and head: bfloat16 in the engine and float32 in the trainer",
    "prefix": STALE,
    "raw+prefix+older": f"{RAW}; and unexplained",
    "not loaded": "unexplained",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its engines live from test to test."""
    return tmp_path_factory.mktemp("planted")


def found_in(folder, faults, dtype=torch.float32, tied=False, batch=24, temperature=0.7, **masks):
    """Sample with the faults; the probe's verdict."""
    model = qwen2(tied, dtype=dtype)
    for each in model.model.embed_tokens, model.get_output_embeddings():
        each.weight.data[:, 0] = 4.0  # an offset in all logits changes the rounding of a 16-bit head, not the softmax
    parity = ParityFlags(processed_logprobs="raw" not in faults, uncached_runtime="prefix" not in faults,
                         fp32_head=not faults & {"head", "head on both sides"})  # fmt: skip
    policy = Policy(model, restrict=kept_sets)
    place = str(folder / f"{tied} {dtype}")
    model.save_pretrained(place)
    with started(place, policy, parity, max_model_len=192, block_size=32, max_num_seqs=128) as engine:
        checks_of(engine).canary.nats = 100
    generator = torch.Generator().manual_seed(100)
    lengths = torch.randint(1, 30, (batch,), generator=generator).tolist()
    if "prefix" in faults:
        lengths[batch // 2 :] = [64] * (batch // 2)
    prompts = [drawn_ids(length, generator) for length in lengths]
    seeds = [*range(5000, 5000 + 7 * batch, 7)]
    max_kept = 0 if faults & {"no mask", "raw"} else 96
    sampling = MaskedSampling(temperature, 40, stop_token_ids=(2, 3, 4, 5), max_kept=max_kept, **masks)
    if "no mask" in faults:
        sampling = replace(sampling, top_k=8)
    if "prefix" in faults:
        engine.generate(prompts[:-3], 1, sampling, seeds[:-3])  # all but three are sent again
    before = policy.copied_weights()
    move(policy, 0.002 if "older" in faults else 0.03, 60)
    if "older" in faults:
        before = policy.copied_weights()
        move(policy, 0.03, 61)
    if "not loaded" not in faults:
        load_into(engine, policy)
    rollouts = engine.generate(prompts, 1, sampling, seeds)
    of_trainer = dtype if faults & {"head in trainer", "head on both sides"} else torch.float32
    policy = policy.with_(head=replace(policy.head, dtype=of_trainer))
    batch, weights = scored(policy, rollouts, temperature), policy.copied_weights()
    lines = explain(policy, batch, sampling, engine.settings, before)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.model.named_parameters())
    return verdict(lines)


MASKS = dict(top_k=12, top_p=0.9, min_p=0.02)


@pytest.mark.engine
@parametrize("dtype, tied, batch, temperature, masks", [
    (torch.float32, False, 1, 0.5, {}), (torch.float32, True, 64, 0.7, MASKS),
    (SIXTEEN, False, 9, 1.5, {}), (SIXTEEN, True, 40, 1.0, {}),
    (SIXTEEN, False, 64, 0.1, {}), (SIXTEEN, False, 64, 0.15, {"top_p": 0.9}),  # nearly deterministic
])  # fmt: skip
def test_clean_samples_of_the_live_engine_are_parity(folder, dtype, tied, batch, temperature, masks):
    assert found_in(folder, set(), dtype, tied, batch, temperature, **masks) == "parity"


@pytest.mark.engine
@parametrize("name", EXPECTED)
def test_a_planted_fault_is_named_and_the_policy_is_unchanged(folder, name):
    assert found_in(folder, {*name.split("+")}, SIXTEEN if "head" in name else torch.float32) == EXPECTED[name]


def test_one_token_that_is_far_off_is_no_fault_and_a_request_or_the_trainer_that_is_is_unexplained():
    """As where a nearly certain policy rounds, or at the edge of a mask."""
    policy, prompts = Policy(qwen2()), torch.randint(96, (24, 60)).tolist()
    batch = scored(policy, [Rollout(ids[:10], None, ids[10:], [0.0] * 50) for ids in prompts], 0.7)
    for rollout, row in zip(batch.rollouts, batch.old_logprobs, strict=True):
        rollout.logprobs[:] = row[9:].tolist()
    stale = explain(policy, batch.mask_rows([False] * 24), Sampling(0.7, 50), {"head_dtype": "float32"}, {})
    assert verdict(stale) == "no rollout of the weights before the update alone"
    batch.rollouts[1].trained[:] = [False] + 49 * [True]  # it begins with a word of an environment
    for off, found in (1, "parity"), (50, "unexplained"):  # all tokens of one request
        batch.rollouts[0].logprobs[:off] = [value - 0.05 for value in batch.rollouts[0].logprobs[:off]]
        lines = explain(policy, batch, Sampling(0.7, 50), {"head_dtype": "float32"}, {})
        assert verdict(lines) == found
    batch = replace(batch, old_logprobs=batch.old_logprobs + 0.01 * batch.mask)
    batch.rollouts[0].logprobs[:] = batch.rollouts[2].logprobs
    (trainer,) = [line for line in explain(policy, batch, Sampling(0.7, 50), {"head_dtype": "float32"}, {})
                  if line.name == "trainer"]  # fmt: skip
    assert trainer.verdict == "cannot tell"


# ------------------------------------------------------------------------------------------------ a run
def test_a_step_without_an_update_leaves_the_probe_the_weights_before_the_last_update():
    sides = SimpleNamespace(run=SimpleNamespace(config=config_of()), policy=Policy(qwen2()), engine=None)
    probe = StepProbe(sides, 2)
    probe(SimpleNamespace(metrics={"step": 2, "updates": 2}))
    known = probe.before, probe.weights
    probe(SimpleNamespace(metrics={"step": 4, "updates": 0}))
    assert known[0] and (probe.before, probe.weights) == known
