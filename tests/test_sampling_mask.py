"""The sampler's mask (top-k, top-p, min-p): the kept sets of both engines, and the trainer's use of them."""

import numpy
import pytest
import torch
from helpers import DEVICES, PROMPTS, ROUNDING, at, built, parametrize, qwen2, started, value_error

from engine_adapter import ParityFlags, Rollout, reseed
from extras.sampling_mask import kept_sets, policy_options
from extras.shared.masks import MaskedSampling, masked_logits
from extras.transformers_engine import TransformersEngine
from report.metrics import of_mismatch
from rl import Policy, make_batch
from train import answer_held_out
from verify.parity import NEUTRAL, drawn_from

MASKS = [dict(top_k=5, top_p=0.9), dict(min_p=0.05), dict(min_p=0.02, top_k=20, top_p=0.95)]


def sampled(engine, max_kept=96, **mask):
    reseed(0)
    return engine.generate(PROMPTS, 4, MaskedSampling(1.3, 12, (2,), max_kept=max_kept, **mask))


def measured(policy, rollouts, **mask):
    """The mismatch of some rollouts, and the means of what `measure` returns."""
    batch = make_batch(rollouts, policy.device)
    policy = at(policy, 1.3).with_(**policy_options(MaskedSampling(1.3, 12, **mask)))
    values = policy.token_metrics(batch)
    means = {name: (each.sum() / batch.mask.sum()).item() for name, each in values.items()}
    return of_mismatch(values["logprobs"], batch.behavior_logprobs, batch.mask), means


def check_masks(policy, engine, rounding=ROUNDING):
    """Each kept set is that of `drawn_from` and has the sampled token, and the trainer's softmax is over it."""
    for mask in MASKS:
        rollouts = sampled(engine, **mask)
        for rollout in rollouts[::5]:
            prompt, response = (torch.tensor(ids, device=policy.device)
                                for ids in (rollout.prompt_ids, rollout.token_ids))
            with torch.no_grad():
                logits = policy.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].double()
            plain = drawn_from(logits, prompt, response, **NEUTRAL | {"temperature": 1.3} | mask).isfinite()
            for token, kept, row in zip(response, rollout.kept, plain, strict=True):
                assert token in kept and sorted(kept) == row.nonzero()[:, 0].tolist()
        found, means = measured(policy, rollouts, **mask)
        assert found["mismatch_abs_mean"] <= rounding and means["outside_frac"] == 0, mask
        assert means["engine_kept_mass"] == pytest.approx(means["kept_mass"], abs=ROUNDING)
        assert means["kept_mass"] < 0.99


# ------------------------------------------------------------------------------------------------ kept sets
@pytest.mark.engine
@parametrize("device", ["cpu", pytest.param("cuda", marks=[*DEVICES[1].marks, pytest.mark.own_process])])
def test_the_engines_kept_sets_are_the_sampled_distribution_and_the_trainer_takes_its_softmax_over_them(
        engine_folder, device):
    policy = Policy(qwen2().to(device))
    with started(engine_folder, policy) as engine:
        check_masks(policy, engine, ROUNDING if device == "cpu" else 1e-3)
        with value_error(r"max_kept must be .* got 5, one has more .*--max-kept"):
            sampled(engine, max_kept=5, top_k=6)


@pytest.mark.engine
def test_without_the_kept_sets_a_mask_is_a_mismatch(engine_folder, policy):
    with started(engine_folder, policy, ParityFlags(sampling_mask=False)) as engine:
        assert engine.settings["max_logprobs"] == 20  # vLLM's default
        rollouts = sampled(engine, max_kept=0, top_p=0.8)
    assert not any(rollout.kept for rollout in rollouts)
    found, means = measured(policy, rollouts, top_p=0.8)
    assert found["mismatch_abs_mean"] > 1 - means["kept_mass"] > 0.05  # -log(kept mass) of each token


def test_the_reference_engine_samples_under_the_same_masks(policy):
    engine = TransformersEngine(policy)
    engine.load(policy.weights())
    check_masks(policy, engine)


def test_top_p_keeps_more_than_the_512_likeliest_tokens_of_a_flat_distribution():
    """Beside two others one that is not flat."""
    logits, targets = torch.randn(3, 2000), torch.arange(3)
    logits[2] *= 9
    masked = masked_logits(logits, MaskedSampling(1.0, 1, top_p=0.9))
    kept, plain = masked.isfinite(), drawn_from(logits, targets[:0], targets, **NEUTRAL | {"top_p": 0.9}).isfinite()
    assert (kept.sum(dim=1) > 512).tolist() == [True, True, False]
    assert (kept != plain).sum(dim=1).max() <= 1  # the last one, by rounding
    assert torch.equal(masked[kept], logits[kept])


# ------------------------------------------------------------------------------------------------ the trainer's side
# That they go to the trained tokens of rows with a loss: test_architectures.py.
def test_kept_sets_are_refused_if_one_is_missing():
    kept = [numpy.array([7])]
    batch = make_batch([Rollout([5], 0, [7, 8], [-0.1] * 2, kept=kept)])
    with pytest.raises(AssertionError, match="of all tokens of a row"):
        kept_sets(batch, batch.mask > 0)
    batch = make_batch([Rollout([5], 0, [7], [-0.1], kept=kept, sampling=MaskedSampling(1.0, 1, top_k=1, max_kept=1))])
    logits = torch.randn(0, 9)  # of a micro-batch whose rows are all masked: --mask-truncated
    assert kept_sets(batch, batch.mask < 0)(logits, slice(0)) is logits


def test_a_token_moved_over_the_border_is_counted_and_its_kept_set_still_holds(policy):
    ids = [5, 6, 7]
    with torch.no_grad():
        likely = (policy.model(torch.tensor([ids])).logits[0, -1] / 1.3).softmax(0).sort(descending=True)
    kept, mass = likely.indices[:3].numpy(), likely.values.cumsum(0)
    _, means = measured(policy, [Rollout(ids, 0, [int(kept[2])], [0.0], kept=[kept])], top_k=2)
    probs = likely.values[:3] / mass[2]  # over the kept set
    expected = dict(outside_frac=1, kept_mass=mass[1], engine_kept_mass=mass[2], logprobs=probs[2].log(),
                    entropy=torch.special.entr(probs).sum())  # fmt: skip
    assert all(abs(means[name] - value) < 1e-5 for name, value in expected.items())


# ------------------------------------------------------------------------------------------------ runs
# A whole one: test_stop_texts.py; what an abort does to kept sets: test_inflight.py.
def test_an_evaluation_samples_under_the_mask_and_returns_no_kept_sets(good, tmp_path):
    masks = dict(top_k=7, top_p=0.001, min_p=0.1)  # they keep the likeliest token
    trainer = built(good, tmp_path, temperature=1.5, **masks)
    assert vars(trainer.run.sampling).items() >= (masks | {"max_kept": 24}).items()
    greedy, drawn = (answer_held_out(trainer, 1, trainer.source, "greedy", 1, temperature)[0]
                     for temperature in (0.0, 1.5))  # fmt: skip
    assert [each.token_ids for each in greedy] == [each.token_ids for each in drawn]
    assert not any(rollout.kept for rollout in greedy + drawn)
