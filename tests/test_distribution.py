"""Before the first step both sides are compared with the stated distribution: what both forget shows in no mismatch."""

from dataclasses import replace

import pytest
from helpers import CAN_BE_EXACT, built, close_live_engine

from config import ParityFlags
from engine_adapter import AuditError, Engine
from rl import Policy
from rollouts import Rollout

pytestmark = pytest.mark.engine
OPTIONS = [
    {}, dict(top_p=0.8, temperature=1.4), dict(parity=ParityFlags(processed_logprobs=False)),
    dict(parity=ParityFlags(sampling_mask=False), min_p=0.1),
    pytest.param(dict(engine="shared", exact=True), marks=CAN_BE_EXACT), dict(lora_rank=4),
    dict(rollout_weights="int3"), dict(dtype="bfloat16", temperature=0.5),
    dict(parity=ParityFlags(processed_logprobs=False, variants=("both-raw",))),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_stated_distribution_passes_under_its_name(good, tmp_path, options):
    close_live_engine()
    _, state, _ = built(good, tmp_path, **{"engine": "vllm", "temperature": 0.7} | options)
    both_raw = bool(options.get("parity", ParityFlags()).variants)
    assert state.policy.audit()["temperature"] == (1.0 if both_raw else options.get("temperature", 0.7))
    state.engine.close()


@pytest.mark.parametrize("forgets", ["trainer", "engine", "both"])
@pytest.mark.parametrize("option", ["temperature", "top_p"])
def test_a_side_that_forgets_the_temperature_or_the_mask_is_refused(good, tmp_path, monkeypatch, forgets, option):
    """With both the mismatch is 0, and the canary samples at temperature 1 and without a mask. The trainer's mask is
    what the engine kept, so a mask that the engine forgets is named there.
    """
    usual = Engine.sampling_params
    named = "engine" if (forgets, option) == ("engine", "temperature") else "trainer"
    if forgets != "trainer":
        monkeypatch.setattr(Engine, "sampling_params", lambda engine, sampling, seed: usual(
            engine, replace(sampling, **{option: 1.0}), seed))  # fmt: skip
    if forgets != "engine":
        logprobs = Policy.logprobs
        scoring = {"temperature": lambda old: replace(old, temperature=1.0),
                   "top_p": lambda old: replace(old, support=type(old)().support)}[option]
        monkeypatch.setattr(Policy, "logprobs", lambda policy, batch: logprobs(
            policy.changed(scoring=scoring(policy.scoring)), batch))  # fmt: skip
        monkeypatch.setattr("rl.Support.restriction", lambda *_: lambda logits, chunk: logits)
    close_live_engine()
    with pytest.raises(AuditError, match=f"the {named}'s log-probabilities are not those of the stated distribution"):
        built(good, tmp_path, engine="vllm", **{option: 0.3})
    Engine.live.close()


@pytest.mark.parametrize("named, options", [
    ("trainer", dict(parity=ParityFlags(processed_logprobs=False))),
    ("engine", dict(parity=ParityFlags(sampling_mask=False), top_p=0.8)),
], ids=str)  # fmt: skip
def test_without_a_fix_of_one_side_the_other_side_is_still_compared(good, tmp_path, monkeypatch, named, options):
    """The trainer forgets the temperature; the engine reports other values, except at temperature 1."""
    if named == "trainer":
        logprobs = Policy.logprobs
        monkeypatch.setattr(Policy, "logprobs", lambda policy, batch: logprobs(
            policy.changed(scoring=replace(policy.scoring, temperature=1.0)), batch))  # fmt: skip
    else:
        append = Rollout.append
        monkeypatch.setattr(Rollout, "append", lambda rollout, ids, values, version: append(
            rollout, ids, [each - (rollout.sampling.temperature != 1) for each in values], version))  # fmt: skip
    close_live_engine()
    with pytest.raises(AuditError, match=f"the {named}'s log-probabilities are not those of the stated distribution"):
        built(good, tmp_path, engine="vllm", **{"temperature": 0.3} | options)
    Engine.live.close()
