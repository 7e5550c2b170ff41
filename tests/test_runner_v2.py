"""Model runner V2, a GPU's, on a CPU (tests/gpu_path): its kernels and its sampler."""

from dataclasses import replace

import pytest
import torch
from gpu_path import RUNNER, triton_numpy
from helpers import PROMPTS, ROUNDING, at, rows_of_run, started

from engine_adapter import reseed
from extras.sampling_mask import policy_options
from extras.shared.masks import MaskedSampling, masked_logits
from probe.diagnose import ALARMS, alarms
from rl import make_batch

pytestmark = [pytest.mark.engine, pytest.mark.skipif(RUNNER != "v2", reason="needs RUNNER=v2")]


# ------------------------------------------------------------------------------------------------ the harness
def test_this_process_has_runner_v2_and_its_kernels_give_what_tritons_interpreter_gives(
        engine_folder, monkeypatch, policy):
    """Eight rows with all masks. None of the kernels that V2 launches is left to the interpreter."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    masks = {}, dict(top_k=5), dict(top_p=0.9), dict(min_p=0.05)
    with started(engine_folder, policy, max_num_seqs=8) as engine:
        assert isinstance(engine.runner, GPUModelRunner)

        def samples() -> list:
            reseed(0)
            rollouts = [each for mask in masks for each in
                        engine.generate([[5, 6, 7], [8, 9, 10, 11]], 4, MaskedSampling(1.3, 2, max_kept=96, **mask))]
            return [(each.token_ids, each.logprobs, [kept.tolist() for kept in each.kept]) for each in rollouts]

        triton_numpy.launches.clear()
        found = samples()
        assert {executor for _, executor in triton_numpy.launches} == {"numpy"}
        monkeypatch.setattr(triton_numpy, "translated", lambda kernel: None)
        assert samples() == found


# ------------------------------------------------------------------------------------------------ masks
FAULTY = pytest.mark.xfail(strict=True, reason="vLLM's kernel for top-p: docs/fixes.md")


@pytest.mark.parametrize("mask, scale", [
    (dict(top_p=0.9), 8), (dict(top_k=6, top_p=0.9), 20), (dict(min_p=0.02, top_k=6), 8),
    # On a GPU run.py refuses this one. An unexpected pass says that vLLM has repaired its kernel.
    pytest.param(dict(min_p=0.02, top_p=0.9), 8, marks=FAULTY),
    pytest.param(dict(top_p=0.9), 20, marks=FAULTY),  # it keeps all: such a run stops at max_kept
], ids=str)  # fmt: skip
def test_the_kernel_for_masks_keeps_what_pytorch_keeps(mask, scale):
    """In 400 rows of logits with this deviation."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch

    sampling = MaskedSampling(1.0, 1, **mask)
    logits = masked_logits(torch.randn(400, 700) * scale, replace(sampling, top_k=0, top_p=1.0))
    top_k = torch.full((400,), sampling.top_k, dtype=torch.int32) if sampling.top_k else None
    top_p = torch.full((400,), sampling.top_p) if sampling.top_p < 1 else None
    ours, theirs = (apply(logits.clone(), top_k, top_p) for apply in (apply_top_k_top_p, apply_top_k_top_p_pytorch))
    assert (ours != theirs).any(dim=1).sum() <= 2  # a sum that rounding puts on the other side of top-p


def test_only_surprisal_z_shows_a_temperature_that_is_applied_twice(good, tmp_path, monkeypatch, capsys):
    """And the probe names the sampler, because the reported values are right."""
    from vllm.v1.worker.gpu.sample import sampler

    usual, again = sampler.gumbel_sample, {"apply_temperature": True}
    words = ("--task {root}/task.py --steps 1 --num-prompts 16 --group-size 8 --max-new-tokens 12 --temperature 0.6"
             " --eval-problems 4 --probe-on-alarm")
    assert alarms(rows_of_run(good, tmp_path / "right", words)[1], 0.2) == []
    monkeypatch.setattr(sampler, "gumbel_sample", lambda *given, **named: usual(*given, **named | again))
    _, row = rows_of_run(good, tmp_path / "wrong", words)
    assert row["mismatch_abs_mean"] < ROUNDING
    assert alarms(row, 0.2) == ["surprisal_z"]
    assert "probe after step 1 (alarm of surprisal_z)" in capsys.readouterr().out
    report = (tmp_path / "wrong" / "probe" / "step_000001.txt").read_text()
    assert "=> semantics: tokens drawn from another distribution than the reported one" in report


def test_only_the_kept_mass_shows_a_mask_that_keeps_too_few_tokens(engine_folder, policy):
    """Both softmaxes are over the set that the engine kept, so the mismatch is that of parity."""
    sampling = MaskedSampling(0.4, 4, top_p=0.9, min_p=0.02, max_kept=96)
    with started(engine_folder, policy, max_num_seqs=128) as engine:
        reseed(0)
        batch = make_batch(engine.generate(PROMPTS, 24, sampling))  # more than 64 rows
    found = at(policy, 0.4).changed(**policy_options(sampling)).token_metrics(batch)
    assert (found["logprobs"] - batch.behavior_logprobs).abs().mean() < ROUNDING
    too_few = (found["kept_mass"] - found["engine_kept_mass"]).sum() / batch.mask.sum()
    assert too_few > ALARMS["kept_mass_error"]
