"""The sampler's mask (top-k, top-p, min-p): the kept sets of both engines, and the trainer's use of them."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import PROMPTS, SEEDS, by_the_book, command, move, qwen2, started, train_here

from config import Config, GrpoConfig, ParityFlags
from engine_adapter import Engine, Rollout, Sampling
from extras.masks import KeptTokens, collect_kept_sets, masked_logits
from extras.reference import ReferenceEngine
from objectives import mismatch_metrics
from rl import Optimizer, Policy, frozen_logprobs, frozen_measures, make_batch, update
from train import build, evaluate, prepare

MASKS = [dict(top_p=0.9), dict(top_k=5), dict(top_k=5, top_p=0.9), dict(min_p=0.05),
         dict(min_p=0.02, top_k=20, top_p=0.95)]  # fmt: skip


def sampled(engine: Engine, max_kept: int = 96, **mask) -> list[Rollout]:
    return engine.generate(PROMPTS, 8, Sampling(1.3, 12, (2,), max_kept=max_kept, **mask), SEEDS)


def measured(policy: Policy, rollouts: list[Rollout], **mask) -> tuple[dict[str, float], dict[str, float]]:
    """The mismatch of some rollouts, and the means of what `measure` returns."""
    batch = make_batch(rollouts, policy.device)
    options = GrpoConfig(temperature=1.3, num_minibatches=1, micro_batch_tokens=100, **mask)
    policy.support = KeptTokens(Sampling(1.3, 12, **mask))
    values = frozen_measures(policy, batch, options)
    means = {name: (each.sum() / batch.mask.sum()).item() for name, each in values.items()}
    return mismatch_metrics(values["logprobs"], batch.behavior_logprobs, batch.mask), means


def check_kept_sets(policy: Policy, rollouts: list[Rollout], **mask) -> None:
    """Each kept set is the support of the distribution in `by_the_book`, and has the sampled token."""
    sampling = Sampling(1.3, 12, **mask)
    for rollout in rollouts[::5]:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids], device=policy.device)
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].tolist()
        rows = [by_the_book(row, set(), [0] * len(row), sampling) for row in logits]
        support = [{token for token, probability in enumerate(row) if probability} for row in rows]
        assert [set(ids.tolist()) for ids in rollout.kept] == support
        assert all(token in kept for token, kept in zip(rollout.token_ids, support, strict=True))


@pytest.mark.engine
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.own_process])]
)
def test_the_engines_kept_sets_are_the_sampled_distribution_and_the_trainer_takes_its_softmax_over_them(
        engine_folders, device):
    policy = Policy(qwen2(tied=False).to(device))
    for mask in MASKS:  # in one test: on a GPU each test starts an engine of its own
        with started(engine_folders[False], policy) as engine:
            rollouts = sampled(engine, **mask)
        check_kept_sets(policy, rollouts, **mask)
        sizes = [len(kept) for rollout in rollouts for kept in rollout.kept]
        assert 1.5 < sum(sizes) / len(sizes) < 96, mask
        found, means = measured(policy, rollouts, **mask)
        assert found["mismatch_abs_mean"] <= (1e-5 if device == "cpu" else 1e-3), mask
        assert means["outside_frac"] == 0, mask
        assert means["kept_mass"] < 0.99, mask


@pytest.mark.engine
def test_without_the_kept_sets_the_mean_ratio_is_the_kept_mass(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy, ParityFlags(sampling_mask=False)) as engine:
        assert engine.settings["max_logprobs"] == 20  # vLLM's default
        rollouts = sampled(engine, max_kept=0, top_p=0.8)
    assert not any(rollout.kept for rollout in rollouts)
    found, means = measured(policy, rollouts, top_p=0.8)
    assert found["mismatch_ratio"] == pytest.approx(means["kept_mass"], rel=1e-3)
    assert means["kept_mass"] < 0.95
    assert found["mismatch_abs_mean"] > 0.05


@pytest.mark.engine
def test_a_kept_set_larger_than_what_is_returned_is_an_error_that_names_the_setting(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        largest = max(len(kept) for rollout in sampled(engine, top_p=0.9) for kept in rollout.kept)
        assert sampled(engine, max_kept=largest, top_p=0.9)
        with pytest.raises(ValueError, match=rf"max_kept must be .* got {largest - 1}, one has more .*--max-kept"):
            sampled(engine, max_kept=largest - 1, top_p=0.9)


@pytest.mark.engine
def test_requests_with_other_masks_or_none_run_beside_each_other(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy) as engine:
        masks = [dict(top_k=2, max_kept=4), dict(top_p=0.9, max_kept=90), {}]
        groups = [engine.submit(PROMPTS[0], 4, Sampling(1.3, 12, (2,), **mask), seed=9) for mask in masks]
        while engine.num_unfinished:
            engine.step()
    assert all(len(kept) == 2 for rollout in groups[0] for kept in rollout.kept)
    check_kept_sets(policy, groups[1], top_p=0.9)
    assert not any(rollout.kept for rollout in groups[2])


@pytest.mark.engine
def test_a_rollout_that_is_aborted_and_submitted_again_forgets_its_kept_sets(engine_folders):
    policy = Policy(qwen2(tied=False))
    with started(engine_folders[False], policy, ParityFlags(inflight_keep=False)) as engine:
        rollouts = engine.submit(PROMPTS[0], 4, Sampling(1.3, 12, top_k=5, max_kept=9))
        for _ in range(5):
            engine.step()
        assert all(len(rollout.kept) == 5 for rollout in rollouts)
        move(policy)
        engine.load(policy.weights(), policy.response_logprobs)
        while engine.num_unfinished:
            engine.step()
    check_kept_sets(policy, rollouts, top_k=5)


def test_the_reference_engine_samples_under_the_same_masks():
    policy = Policy(qwen2(tied=False))
    engine = ReferenceEngine(policy)
    engine.collect = collect_kept_sets
    engine.load(policy.weights(), policy.response_logprobs)
    for mask in MASKS:
        rollouts = sampled(engine, **mask)
        check_kept_sets(policy, rollouts, **mask)
        assert measured(policy, rollouts, **mask)[0]["mismatch_abs_mean"] <= 1e-5
    drawn = engine.generate([[5, 6, 7]], 2000, Sampling(1.3, 1, top_k=3), [7])
    probabilities = {r.token_ids[0]: math.exp(r.logprobs[0]) for r in drawn}
    assert sum(probabilities.values()) == pytest.approx(1.0, abs=1e-5)  # three tokens, all drawn
    for token, probability in probabilities.items():
        share = sum(r.token_ids[0] == token for r in drawn) / 2000
        assert abs(share - probability) < 4 * (probability * (1 - probability) / 2000) ** 0.5
    assert not any(rollout.kept for rollout in sampled(engine, max_kept=0, top_k=3))


def test_top_p_keeps_more_than_the_512_likeliest_tokens_of_a_flat_distribution():
    logits = torch.randn(3, 2000)
    for row, masked in zip(logits.double(), masked_logits(logits, Sampling(1.0, 1, top_p=0.9)), strict=True):
        order = row.argsort(descending=True)
        count = int((row.softmax(0)[order].cumsum(0) < 0.9).sum()) + 1
        assert count > 512
        assert set(masked.isfinite().nonzero()[:, 0].tolist()) == set(order[:count].tolist())
        assert torch.equal(masked[order[:count]], row[order[:count]].float())


def test_rows_of_a_batch_take_their_kept_sets_along():
    a = Rollout([5, 6], 0, [7, 8], [0.0] * 2, kept=[torch.tensor([7, 1]).numpy(), torch.tensor([8]).numpy()])
    b = Rollout([9], 0, [4, 3, 2], [0.0] * 3, kept=[torch.tensor(ids).numpy() for ids in ([4], [1, 2, 3], [2, 9])])
    batch = make_batch([a, b, a])
    last = batch.only([True, False, True]).rows(torch.tensor([1, 2]))
    support = KeptTokens(Sampling(1.0, 3))
    for micro, sets in ((batch, [[7, 1], [8], [4], [1, 2, 3], [2, 9], [7, 1], [8]]), (last, [[7, 1], [8]])):
        restrict = support.restriction(micro, micro.mask > 0)
        masked = torch.cat([restrict(torch.zeros(1, 10), slice(i, i + 1)) for i in range(len(sets))])
        assert [set(row.isfinite().nonzero()[:, 0].tolist()) for row in masked] == list(map(set, sets))
        assert torch.equal(masked, restrict(torch.zeros(len(sets), 10), slice(None)))
    fewer = make_batch([replace(a, kept=a.kept[:1])])
    with pytest.raises(AssertionError, match="kept"):
        support.restriction(fewer, fewer.mask > 0)
    with pytest.raises(AssertionError, match="kept sets"):  # that the policy would ignore
        Policy(qwen2(tied=False)).logprobs(batch, 1.0)


def test_a_token_moved_over_the_border_is_counted_and_its_kept_set_still_holds():
    policy, ids = Policy(qwen2(tied=False)), [5, 6, 7]
    with torch.no_grad():
        likely = (policy.model(torch.tensor([ids])).logits[0, -1] / 1.3).double().log_softmax(0).sort(descending=True)
    rollout = Rollout(ids, 0, [int(likely.indices[2])], [0.0], kept=[likely.indices[:3].numpy()])
    _, means = measured(policy, [rollout], top_k=2)
    assert means["outside_frac"] == 1
    assert means["kept_mass"] == pytest.approx(likely.values[:2].exp().sum().item(), rel=1e-5)
    logprobs = likely.values[:3].log_softmax(0)  # over the kept set
    assert means["logprobs"] == pytest.approx(logprobs[2].item(), abs=1e-5)
    assert means["entropy"] == pytest.approx(-(logprobs.exp() * logprobs).sum().item(), abs=1e-5)


def test_the_update_does_not_depend_on_micro_batches_and_lowers_the_loss_over_the_kept_sets():
    rollouts, gradients = [], []
    for index, length in enumerate((4, 2, 6, 1)):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        kept = [torch.tensor([token, *range(90, 90 + index)]).numpy() for token in ids]  # of 1 to 4 ids
        rollouts.append(Rollout([3 + index, 4], 0, ids, [-0.1] * length, kept=kept))
    for micro_batch_tokens in (1, 12, 1000):
        policy = Policy(qwen2(tied=False), chunk_elements=96 * 3)
        policy.support = KeptTokens(Sampling(1.3, 8))
        options = GrpoConfig(temperature=1.3, num_minibatches=1, micro_batch_tokens=micro_batch_tokens)
        batch = make_batch(rollouts, torch.tensor([1.0, -1.0, 0.5, -0.5]))
        batch = replace(batch, old_logprobs=frozen_logprobs(policy, batch, options))
        optimizer = Optimizer(policy.model, 0.0)
        metrics, later = (update(policy, optimizer, batch, options, lr=1e-3) for _ in range(2))
        gradients.append(metrics["grad_norm"])
        assert metrics["loss"] == pytest.approx(-(4 * 1.0 - 2 * 1.0 + 6 * 0.5 - 1 * 0.5) / 13)  # ratios of 1
        assert later["loss"] < metrics["loss"] - 0.05
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert gradients == pytest.approx(gradients[:1] * 3, rel=1e-4)
    assert batch.old_logprobs[0].abs().max() == 0  # the only kept token has probability 1


# ------------------------------------------------------------------------------------------------ runs
RUN = ("--steps", "3", "--num-prompts", "4", "--group-size", "4", "--max-new-tokens", "12", "--eval-problems", "4",
       "--temperature", "1.3", "--probe-every", "2")  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("options, status", [
    ("--top-p 0.9 --top-k 20", "parity"), ("--min-p 0.05 --inflight-groups 3 --parity.no-inflight-keep", "parity"),
    ("--top-p 0.9 --parity.no-sampling-mask", "mismatch"),
])  # fmt: skip
def test_a_run_with_a_mask_is_at_parity_unless_the_flag_is_off(good, tmp_path, options, status):
    train_here(command(good, "--task {root}/task.py", *RUN, "--out", str(tmp_path), *options.split()))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert {row.get("probe") for row in rows} == {status, None}
    for row in rows:
        assert row["outside_frac"] == 0 or "inflight" in options  # stale tokens were cut off by older weights
        assert row["kept_mass"] < 0.999
        if status == "parity":
            assert row["current_mismatch_abs_mean"] <= 1e-5
        else:
            assert row["current_mismatch_ratio"] == pytest.approx(row["kept_mass"], rel=0.01)
    verdict = json.loads((tmp_path / "probe" / "step_000001.json").read_text())
    assert ("mask applied by the sampler and not by the trainer" in verdict["sentence"]) == (status == "mismatch")


def test_an_evaluation_samples_as_the_training_does(good, tmp_path):
    config = Config.of(model=str(good / "model"), task=str(good / "task.jsonl"), out=str(tmp_path), num_prompts=4,
                    top_k=7, top_p=0.5)  # fmt: skip
    run = prepare(config)
    assert (run.sampling.top_k, run.sampling.top_p, run.sampling.max_kept) == (7, 0.5, 24)
    assert prepare(config.but(max_kept=9)).sampling == replace(run.sampling, max_kept=9)
    greedy = []
    for top_p in (0.99, 0.001):
        out = tmp_path / str(top_p)
        run = prepare(config.but(out=str(out), engine="transformers", temperature=1.5, top_p=top_p))
        evaluate(run, build(run)[0], step=1)
        lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        greedy.append(len({(line["question"], line["response"]) for line in lines}) == len(lines) / 2)
    assert greedy == [False, True]  # are the sampled answers the greedy ones?
