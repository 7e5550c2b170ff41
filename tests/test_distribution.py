"""Before the first step both sides are compared with the stated distribution: what both forget shows in no mismatch."""

from dataclasses import replace

import pytest
from helpers import at, built, parametrize, value_error
from transformers import Qwen2ForCausalLM

from engine_adapter import Engine, ParityFlags
from rl import Policy
from verify.settings import AuditError, of_trainer

pytestmark = pytest.mark.engine
NO_MASK, RAW = ParityFlags(sampling_mask=False), ParityFlags(processed_logprobs=False)


@parametrize("options", [  # those with which no other test starts a run
    dict(parity=NO_MASK, min_p=0.1), dict(parity=RAW, variants=("both-raw",)),
    dict(dtype="bfloat16", steps=0, num_prompts=999),  # more than there are problems
], ids=str)  # fmt: skip
def test_the_stated_distribution_passes_under_its_name(good, tmp_path, capsys, options):
    trainer = built(good, tmp_path, **{"engine": "vllm", "temperature": 0.7} | options)
    parity, printed = options.get("parity"), capsys.readouterr().out
    assert of_trainer(trainer.policy)["temperature"] == (1.0 if parity == RAW else 0.7)
    assert printed.count(" differs from the stated distribution by ") == {NO_MASK: 1, RAW: 0}.get(parity, 2)


@parametrize("engine, fault", [("transformers", "operation"), ("vllm", "operation"), ("vllm", "scale")])
def test_a_head_that_the_trainer_does_not_reproduce_is_refused_by_name(good, tmp_path, monkeypatch, engine, fault):
    """transformers has one operation more, or the trainer computes another one, and then the canary fails first."""
    usual = Qwen2ForCausalLM.forward

    def one_more(*given, **named):
        output = usual(*given, **named)
        output.logits *= 1.01
        return output

    if fault == "operation":
        monkeypatch.setattr(Qwen2ForCausalLM, "forward", one_more)
    else:
        monkeypatch.setattr("rl.Head.scaled", lambda head, logits: logits * 1.5)
    with value_error("Qwen2ForCausalLM does more after its head than the trainer reproduces"):
        built(good, tmp_path, engine=engine)


@parametrize("forgets, options, fix_off, named", [
    ("engine", dict(temperature=0.3), {}, "engine"), ("trainer and engine", dict(temperature=0.3), {}, "trainer"),
    # The trainer's mask is what the engine kept, so a mask that the engine forgets is named there.
    ("engine", dict(top_p=0.3), {}, "trainer"),
    # Without a fix of one side the other side is still compared.
    ("trainer", dict(temperature=0.3), dict(processed_logprobs=False), "trainer"),
    ("engine", dict(temperature=0.3, top_p=0.8), dict(sampling_mask=False), "engine"),
], ids=str)  # fmt: skip
def test_a_side_that_forgets_the_temperature_or_the_mask_is_refused(
        good, tmp_path, monkeypatch, forgets, options, fix_off, named):
    """If both do, the mismatch is 0, and the canary samples at temperature 1 and without a mask."""
    option, params, logprobs = next(iter(options)), Engine.sampling_params, Policy.logprobs
    if "engine" in forgets:
        monkeypatch.setattr(Engine, "sampling_params", lambda engine, sampling, seed: params(
            engine, replace(sampling, **{option: 1.0} if hasattr(sampling, option) else {}), seed))  # fmt: skip
    if "trainer" in forgets:
        monkeypatch.setattr(Policy, "logprobs", lambda policy, batch: logprobs(at(policy, 1.0), batch))
    parity = ParityFlags(**fix_off)
    with pytest.raises(AuditError, match=f"the {named}'s log-probabilities are not those of the stated distribution"):
        built(good, tmp_path, engine="vllm", parity=parity, **options)
