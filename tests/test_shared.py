"""One module on both sides: exact values over loads and lengths, and faults that must break exactness."""

from dataclasses import replace

import pytest
import torch
from helpers import (
    ALWAYS_TIED,
    CAN_BE_EXACT,
    MATRIX_PROMPTS,
    MATRIX_SAMPLING,
    ROUNDING,
    SEEDS,
    at,
    built,
    close_live_engine,
    command,
    move,
    outcome,
    qwen2,
    rows,
    scored,
    small_model,
    started,
    train_here,
)

from config import has_sampling_mask
from engine_adapter import Engine, WeightLoadError
from extras.sampling_mask import SamplingMask
from extras.shared_engine import ExactError
from rl import Batch, Policy, Scoring
from rollouts import Sampling
from train import train_step

pytestmark = pytest.mark.engine
SINGLE, HALF = torch.float32, torch.bfloat16


# ------------------------------------------------------------------------------------------------ architectures
def gradient(policy: Policy, batch: Batch) -> list[torch.Tensor]:
    """Of a weighted sum of the log-probabilities, in float64."""
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    policy.model.zero_grad()
    (at(policy, 0.7).logprobs(batch) * weights).sum().backward()
    return [each.grad.double() for each in policy.model.parameters() if each.grad is not None]


@CAN_BE_EXACT
@pytest.mark.parametrize("name, dtype", [("Llama, biases", SINGLE), ("GPT2", SINGLE), ("Gemma2", HALF),
                                         ("Mixtral", HALF)])  # fmt: skip
def test_the_trainers_module_is_exact_in_the_engine_before_and_after_a_weight_change(tmp_path, name, dtype):
    small_model(name, name in ALWAYS_TIED).save_pretrained(tmp_path)
    plain, limit = Policy.load(str(tmp_path), dtype, "cpu"), ROUNDING if dtype == SINGLE else 0.2
    with started(str(tmp_path), plain, kind="exact") as engine:
        assert engine.settings["exact"] is True
        for seed in range(2):
            rollouts = engine.generate(MATRIX_PROMPTS, 4, MATRIX_SAMPLING, SEEDS)
            batch = scored(engine.policy, rollouts, 0.7)
            assert torch.equal(batch.old_logprobs, batch.behavior_logprobs)
            own = scored(plain, rollouts, 0.7).old_logprobs
            assert 0 < (own - batch.old_logprobs).abs().sum() / batch.mask.sum() <= limit  # another kernel
            move(plain, 0.02, seed)
            engine.load(plain.weights(), engine.policy.response_logprobs)
        kernel, usual = gradient(engine.policy, batch), gradient(plain, batch)
    # The head's differs: it multiplies the kernel's states. Small tensors are compared with 1 % of the largest one.
    floor = 0.01 * max(each.norm() for each in usual)
    errors = [(one - other).norm() / other.norm().clamp(min=floor) for one, other in zip(kernel, usual, strict=True)]
    assert 0 < max(errors) <= (1e-4 if dtype == SINGLE else 0.2)


@pytest.mark.parametrize("name, kind, error, reason", [
    pytest.param("Mixtral", "exact", WeightLoadError, "canary's mean .* more than 0.0e", marks=CAN_BE_EXACT),
    ("FalconH1", "shared", ValueError, "cannot start falcon_h1 .*: it has recurrent layers, .*; try --engine vllm"),
    ("Llama, dynamic rope", "shared", ValueError, "cannot start llama .* longest row of a batch; try --engine vllm"),
])  # fmt: skip
def test_a_module_that_vllm_cannot_serve_is_refused_by_name(tmp_path, name, kind, error, reason):
    small_model(name, False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), SINGLE, "cpu")
    with pytest.raises(error, match=reason), started(str(tmp_path), policy, kind=kind):
        pass
    assert Engine.live is None


# ------------------------------------------------------------------------------------------------ exact at length
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 300, 600, 300)
MASKS = {SINGLE: [dict(), dict(top_p=0.9)], HALF: [dict(temperature=1.0), dict(top_k=7)]}


@CAN_BE_EXACT
@pytest.mark.parametrize("dtype", MASKS)
def test_every_length_mask_temperature_and_micro_batch_is_exact(tmp_path, dtype):
    """Prompts of 1 to 600 tokens, responses of 1 to 40. Half of the prompts have several rows, one length has two."""
    generator, model = torch.Generator().manual_seed(0), qwen2(tied=False, dtype=dtype, max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    prompts = [torch.randint(60, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    lengths: set[int] = set()  # of the responses
    with started(str(tmp_path), Policy(model), kind="exact", max_model_len=640) as engine:
        for mask in MASKS[dtype]:
            sampling = Sampling(**dict(temperature=0.7, max_new_tokens=40, stop_token_ids=(2, 3)) | mask)
            sampling = replace(sampling, max_kept=96) if has_sampling_mask(sampling) else sampling
            rollouts = [each for index, prompt in enumerate(prompts)
                        for each in engine.submit(prompt, 1 + 2 * (index % 2), sampling, 100 * index)]
            rollouts += engine.submit(prompts[5], 1, replace(sampling, max_new_tokens=1), 5)
            while engine.num_unfinished:
                engine.step()
            lengths |= {len(rollout.token_ids) for rollout in rollouts}
            policy = engine.policy.changed(scoring=Scoring(support=SamplingMask(sampling)))
            for tokens in (10**6, 1500, 1):
                batch = scored(policy, rollouts, sampling.temperature, tokens)
                assert torch.equal(batch.old_logprobs, batch.behavior_logprobs), (mask, tokens)
    assert {1, 40} <= lengths


# ------------------------------------------------------------------------------------------------ runs
# Long questions, of which one in four is new to a step: a prefix cache has blocks for them.
LONG_TASK = """
def sample(rng):
    number = rng.randint(1, 12)
    return "1+" * 20 + f"{number}=", str(number + 20)
def reward(problem, response):
    return float(len(response) % 3)
"""
VERSIONED = dict(dtype="bfloat16", prefix_cache="versioned", block_size=32)


@CAN_BE_EXACT
def test_with_exact_a_correction_changes_nothing_bit_for_bit(good, tmp_path):
    (tmp_path / "task.py").write_text(LONG_TASK)
    words = (f"--task {tmp_path}/task.py --engine shared --exact --dtype bfloat16 --prefix-cache versioned"
             " --block-size 32 --steps 3 --group-size 4 --max-new-tokens 12 --temperature 1.3 --lr 3e-3"
             " --lr-warmup-steps 0 --eval-problems 2")  # fmt: skip
    plain, corrected = tmp_path / "plain", tmp_path / "corrected"
    train_here(command(good, words, "--out", str(plain)))
    train_here(command(good, words, "--out", str(corrected), "--tis", "sequence", "--reject", "geometric"))
    assert outcome(plain) == outcome(corrected)
    steps = rows(plain)[1:]
    assert [row["mismatch_max"] for row in steps] == [0, 0, 0]
    assert all(row["exact_tokens"] == row["tokens"] > 0 for row in steps)
    assert sum(row["updates"] for row in steps) > 0


# ------------------------------------------------------------------------------------------------ planted faults
def change_a_weight_while_asleep(engine: Engine) -> None:
    """Between sampling and scoring, at each later step."""
    usual, weight = engine.sleep, engine.policy.model.model.layers[1].mlp.down_proj.weight

    def sleep():
        usual()
        weight.data.view(-1)[7] += 0.5

    engine.sleep = sleep


def forget_the_cache_salt(engine: Engine) -> None:
    """Later loads do not change the key of the cached blocks, and the canary's prompts fill no block."""
    engine.backend, engine._canary_tokens = replace(engine.backend, prefix_cache="off"), 5


TOLD = (r"^exact: token \d+ of request \d+ \(after a prompt of \d+ tokens\) has log-probability -\d.* in the engine and"
        r" -\d.* in the trainer; \d+ of \d+ tokens differ. Cause: a stale prefix cache, weights")  # fmt: skip


@CAN_BE_EXACT
@pytest.mark.parametrize("plant, options", [
    (forget_the_cache_salt, VERSIONED), (change_a_weight_while_asleep, {}),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_planted_fault_stops_the_run_and_is_named(good, tmp_path, plant, options):
    (tmp_path / "task.py").write_text(LONG_TASK)
    close_live_engine()
    run, state, _ = built(good, tmp_path / "run", task=str(tmp_path / "task.py"), engine="shared", exact=True,
                          group_size=4, max_new_tokens=12, temperature=1.3, lr=3e-3, lr_warmup_steps=0, **options)
    plant(state.engine)
    with pytest.raises(ExactError, match=TOLD):
        for number in (1, 2):
            done = train_step(run, state, number)
            for observe in state.observers:
                observe(done)
    close_live_engine()
