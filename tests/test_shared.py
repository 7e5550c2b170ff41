"""One module on both sides: each architecture, each interface, exact values, and faults that must break exactness.

`python tests/test_shared.py [NAME ...]` prints the table of docs/exact.md: every architecture of the matrix.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    ABORT,
    ALWAYS_TIED,
    ARCHITECTURES,
    KEEP,
    MATRIX_PROMPTS,
    MATRIX_SAMPLING,
    MIXTURES,
    PROMPTS,
    RECOMPUTE,
    RECURRENT,
    SEEDS,
    WARM,
    check_states,
    close_live_engine,
    command,
    mismatch,
    move,
    move_and_load,
    over_a_kept_state,
    qwen2,
    refusal,
    small_model,
    started,
    train_here,
)

from config import Config, GrpoConfig, ParityFlags
from engine_adapter import Engine, Rollout, Sampling, WeightLoadError
from examples.toys import toy_tokenizer
from extras.masks import KeptTokens
from extras.offload import OffloadedOptimizer
from extras.shared_engine import ExactError, SharedEngine
from objectives import REJECTIONS
from rl import Batch, Optimizer, Policy, frozen_logprobs, make_batch, update
from train import Run, TrainingState, build, prepare, start_engine, train_step

pytestmark = pytest.mark.engine
DTYPES = [torch.float32, torch.bfloat16]
REFUSED = {"Llama, dynamic rope": "longest row of a batch", **dict.fromkeys(RECURRENT, "recurrent layers")}
SERVED = [name for name in ARCHITECTURES if name not in REFUSED]
EXPERTS = [name for name in SERVED if name.split(",")[0] in MIXTURES]


# ------------------------------------------------------------------------------------------------ the matrix
def scored(policy: Policy, rollouts: list[Rollout], temperature: float = 0.7, **changes) -> tuple[torch.Tensor, Batch]:
    """The trainer's log-probabilities of the batch (B, T), and the batch."""
    batch = make_batch(rollouts)
    options = GrpoConfig(temperature=temperature, num_minibatches=1, **changes)
    return frozen_logprobs(policy, batch, options), batch


def gradient(policy: Policy, batch: Batch) -> list[torch.Tensor]:
    """Of a weighted sum of the log-probabilities, in float64."""
    weights = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    policy.model.zero_grad()
    (policy.logprobs(batch, 0.7) * weights).sum().backward()
    return [each.grad.double() for each in policy.model.parameters() if each.grad is not None]


def gradient_error(policy: Policy, engine: Engine, batch: Batch) -> float:
    """Largest |kernel's - plain| / |plain| of a tensor; tensors below 1 % of the largest one are compared with that."""
    found = []
    for body in (engine.kernel_body, policy.own_body):
        policy.body = body
        found.append(gradient(policy, batch))
    floor = 0.01 * max(each.norm() for each in found[1])
    pairs = zip(*found, strict=True)
    return max(((ours - plain).norm() / plain.norm().clamp(min=floor)).item() for ours, plain in pairs)


def measure(name: str, dtype: torch.dtype, changes: int) -> dict[str, Any]:
    """Before and after each weight change: mean |trainer with its own attention - engine|, and whether the trainer with
    vLLM's kernel has the engine's values bit for bit. The gradient's error after the last change."""
    with tempfile.TemporaryDirectory() as folder:
        small_model(name, name in ALWAYS_TIED).save_pretrained(folder)
        policy = Policy.load(folder, dtype, "cpu")
        kind = "shared" if name in EXPERTS and dtype == torch.float32 else "exact"
        with started(folder, policy, kind=kind) as engine:
            kernel, plain, exact = policy.body if kind == "exact" else None, [], []
            for change in range(changes + 1):
                rollouts = engine.generate(MATRIX_PROMPTS, 4, MATRIX_SAMPLING, [1000, 2000, 3000, 4000])
                if kernel:
                    values, batch = scored(policy, rollouts)
                    exact.append(torch.equal(values, batch.behavior_logprobs))
                policy.body = policy.own_body
                values, batch = scored(policy, rollouts)
                plain.append(((values - batch.behavior_logprobs).abs().sum() / batch.mask.sum()).item())
                policy.body = kernel or policy.own_body
                if change < changes:
                    move(policy, 0.02, change)
                    engine.load(policy.weights(), policy.response_logprobs)
            error = gradient_error(policy, engine, batch)
            policy.body = kernel or policy.own_body
    return {"plain": plain, "exact": all(exact) if kernel else None, "gradient": error}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SERVED)
def test_the_trainers_module_is_exact_in_the_engine_before_and_after_a_weight_change(name, dtype):
    found, single = measure(name, dtype, 1), dtype == torch.float32
    assert found["exact"] is (None if single and name in EXPERTS else True)
    assert max(found["plain"]) <= (2e-5 if single else 0.05)
    assert max(found["plain"]) > 0  # the kernel is another one than the trainer's own
    allowed = 2e-5 if single else 0.6 if name in EXPERTS else 0.1  # rounding sends tokens to other experts
    assert 0 < found["gradient"] <= allowed


@pytest.mark.parametrize("name", EXPERTS)
def test_exact_refuses_experts_in_float32(name, tmp_path):
    small_model(name, False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    kind = policy.model.config.model_type
    reason = rf"exact must be off here: a product of few rows .*\({kind}, torch.float32, .*; experts in float32"
    with pytest.raises(ValueError, match=reason), started(str(tmp_path), policy, kind="exact"):
        pass
    assert Engine.live is None
    assert policy.body == policy.own_body


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_vllm_cannot_serve_is_refused_by_name(name, tmp_path):
    small_model(name, False).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), torch.float32, "cpu")
    reason = rf"cannot start {policy.model.config.model_type} .*: it has .*{REFUSED[name]}.*; try --engine vllm"
    with pytest.raises(ValueError, match=reason), started(str(tmp_path), policy, kind="shared"):
        pass


def exact_with_a_bias(folder: str) -> bool:
    """Whether a Phi, whose head has a bias, is exact in an exact engine."""
    model = small_model("Phi", False, partial_rotary_factor=0.5)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    policy = Policy.load(folder, torch.float32, "cpu")
    with started(folder, policy, kind="exact") as engine:
        values, batch = scored(policy, engine.generate(MATRIX_PROMPTS, 4, MATRIX_SAMPLING, [1000, 2000, 3000, 4000]))
    return torch.equal(values, batch.behavior_logprobs)


def test_a_head_with_a_bias_is_exact_since_no_load_can_drop_it(tmp_path):
    """The ordinary engine refuses it (REFUSED in test_architectures.py); vLLM has then patched Phi's class."""
    with ProcessPoolExecutor(1, get_context("spawn")) as another:
        assert another.submit(exact_with_a_bias, str(tmp_path)).result()


# ------------------------------------------------------------------------------------------------ one trainer's policy
@cache
def cached_policy(dtype: torch.dtype, **changes) -> Policy:
    return Policy(qwen2(tied=False, dtype=dtype, **changes))


def first_policy(dtype: torch.dtype = torch.float32, **changes) -> Policy:
    """One object for all tests, because a SharedEngine stays with its policy; its weights are the first ones again."""
    policy = cached_policy(dtype, **changes)
    policy.model.load_state_dict(qwen2(tied=False, dtype=dtype, **changes).state_dict())
    return policy


def is_exact(policy: Policy, engine: Engine, **options) -> bool:
    values, batch = scored(policy, engine.generate(PROMPTS, 4, WARM, SEEDS), **options)
    return torch.equal(values, batch.behavior_logprobs)


# ------------------------------------------------------------------------------------------------ states and weights
def test_the_shared_engine_has_the_states_of_the_engine(engine_folders):
    policy = first_policy()
    with started(engine_folders[False], policy, load=False, kind="exact") as engine:
        check_states(policy, engine)
        assert is_exact(policy, engine)


def test_vllms_model_has_no_parameter_of_its_own(engine_folders):
    """All that a load, a sleep or the dummy initialisation of vLLM could write to."""
    policy = first_policy()
    with started(engine_folders[False], policy, kind="exact") as engine:
        assert engine.load(policy.weights(), policy.response_logprobs)["load_bytes"] == 0
        assert not list(torch.nn.Module.named_parameters(engine.vllm_model))
        assert sum(buffer.numel() for buffer in torch.nn.Module.buffers(engine.vllm_model)) < 100
        names = {type(each).__name__ for each in engine.vllm_model.modules()}
        assert not names & {"Qwen2ForCausalLM", "Qwen2Model"}
        assert all(torch.equal(ours, first) for ours, first in
                   zip(policy.model.parameters(), qwen2(tied=False).parameters(), strict=True))  # fmt: skip


def test_an_optimizer_step_in_place_is_seen_by_the_next_sample(engine_folders):
    for dtype in DTYPES:
        policy = Policy(qwen2(tied=False, dtype=dtype))  # a policy has one optimizer
        with started(engine_folders[False], policy, kind="exact") as engine:
            optimizer, before = Optimizer(policy.model, 0.0), policy.copied_weights()
            for step in range(3):
                assert is_exact(policy, engine)
                values, batch = scored(policy, engine.generate(PROMPTS, 4, WARM, SEEDS))
                engine.sleep()
                optimizer.backward(policy.logprobs(batch, 0.7).sum() / 100)
                assert optimizer.step(lr=1e-2, grad_clip=1.0) > 0
                engine.wake()
                version = engine.weight_version
                assert engine.load(policy.weights(), policy.response_logprobs)["load_bytes"] == 0
                assert engine.weight_version == version + 1
                assert (scored(policy, engine.generate(PROMPTS, 4, WARM, SEEDS))[0] - values).abs().max() > 0.1, step
            assert any((before[name] != weight).any() for name, weight in policy.copied_weights().items())


def test_the_audit_names_the_trainers_module_and_whether_it_is_exact(engine_folders):
    policy = first_policy()
    for kind in ("shared", "exact"):
        with started(engine_folders[False], policy, kind=kind) as engine:
            expected = {"module": "the trainer's Qwen2ForCausalLM", "exact": kind == "exact"}
            assert {name: engine.settings[name] for name in expected} == expected
            found = engine.audit()
            assert found["head_dtype"] == found["model_dtype"] == "float32"
            assert (policy.body == policy.own_body) == (kind == "shared")


@torch.no_grad()
def test_a_load_refuses_weights_that_are_not_the_trainers_where_they_were_and_leaves_the_engine_as_it_was(
    engine_folders,
):
    policy = first_policy()
    weight, name = policy.model.model.layers[1].mlp.up_proj.weight, "model.layers.1.mlp.up_proj.weight"
    first, value = weight.data, weight[3, 4].item()

    def reallocated():
        weight.data = weight.data.clone()

    def another_dtype():
        weight.data = weight.data.bfloat16()

    def not_finite():
        weight[3, 4] = torch.nan

    faults = {reallocated: f"where they were at first, not {name}$", another_dtype: f"at first, not {name}$",
              not_finite: f": {name} must be finite$"}  # fmt: skip
    with started(engine_folders[False], policy, kind="exact") as engine:
        version = engine.weight_version
        for fault, reason in faults.items():
            fault()
            with pytest.raises(WeightLoadError, match=reason):
                engine.load(policy.weights(), policy.response_logprobs)
            weight.data = first
            weight[3, 4] = value
            assert (engine.weight_version, engine.state) == (version, "ready")
            assert is_exact(policy, engine)
        for wrong in (policy.weights() | {name: first.clone()}, {n: w.clone() for n, w in policy.weights().items()}):
            with pytest.raises(WeightLoadError, match=f"weights must be the trainer's, .*{name}"):
                engine.load(wrong, policy.response_logprobs)
        with pytest.raises(WeightLoadError, match=f"{name} must be .*, got None"):
            engine.load({n: w for n, w in policy.weights().items() if n != name}, policy.response_logprobs)
        engine.load(policy.weights(), policy.response_logprobs)
        assert is_exact(policy, engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offloaded_optimizer_and_a_checkpoint_leave_the_parameters_where_they_are(engine_folders, dtype):
    policy = Policy(qwen2(tied=False, dtype=dtype))
    with started(engine_folders[False], policy, kind="exact") as engine:
        optimizer, options = OffloadedOptimizer(policy.model, 0.0), GrpoConfig(temperature=0.7)
        state = deepcopy({"model": policy.model.state_dict(), "optimizer": optimizer.state_dict()})
        for resumed in (False, True):
            batch = scored(policy, engine.generate(PROMPTS, 4, WARM, SEEDS))[1]
            batch = replace(batch, advantages=torch.linspace(-1, 1, 16), old_logprobs=batch.behavior_logprobs)
            assert update(policy, optimizer, batch, options, 1e-2)["updates"] == 2
            engine.load(policy.weights(), policy.response_logprobs)
            assert is_exact(policy, engine)
            if not resumed:
                moved = policy.copied_weights()
                policy.model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                engine.load(policy.weights(), policy.response_logprobs)
                assert is_exact(policy, engine)
        assert all(torch.equal(moved[name], weight) for name, weight in policy.copied_weights().items())


# ------------------------------------------------------------------------------------------------ in flight
@torch.no_grad()
@pytest.mark.parametrize("parity", [KEEP, RECOMPUTE, ABORT], ids=lambda parity: parity.inflight_update)
def test_an_optimizer_step_in_flight_keeps_recomputes_or_aborts_the_kv_cache(engine_folders, parity):
    policy, sampling = first_policy(), Sampling(temperature=0.7, max_new_tokens=24)
    with started(engine_folders[False], policy, parity, kind="shared") as engine:
        rollouts = [each for size in (2, 24, 70) for each in engine.submit([*range(6, 6 + size)], 2, sampling, size)]
        for _ in range(12):
            engine.step()
        old = deepcopy(policy)
        move_and_load(policy, engine, scale=0.03)
        while engine.num_unfinished:
            engine.step()
    aborted = parity.inflight_update == "abort"
    for rollout in rollouts:
        kept, own = over_a_kept_state(policy if aborted else old, policy, rollout)
        found = torch.tensor(rollout.logprobs).double()
        assert len(set(rollout.versions)) == (1 if aborted else 2)
        same, other = (kept, own) if parity.inflight_update == "keep" else (own, kept)
        assert (found - same).abs().max() <= 5e-5
        assert aborted or (found - other)[12:].abs().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_versioned_prefix_cache_is_exact_over_weight_changes(engine_folders, dtype):
    """Prompts of three blocks and a part, so that all but the first sample of a group find blocks in the cache."""
    generator, policy = torch.Generator().manual_seed(0), first_policy(dtype)
    prompts = torch.randint(3, 96, (4, 101), generator=generator).tolist()
    with started(engine_folders[False], policy, kind="exact", block_size=32, prefix_cache="versioned") as engine:
        for change in range(3):
            for _ in range(2):
                values, batch = scored(policy, engine.generate(prompts, 4, WARM, SEEDS))
                assert torch.equal(values, batch.behavior_logprobs)
            move(policy, 0.02, change)
            engine.load(policy.weights(), policy.response_logprobs)


def test_v1s_own_prefix_cache_serves_stale_prompts_after_a_weight_change(engine_folders):
    generator, policy = torch.Generator().manual_seed(0), first_policy()
    prompts = torch.randint(3, 96, (4, 140), generator=generator).tolist()
    with started(engine_folders[False], policy, ParityFlags(explicit_runtime=False), kind="shared") as engine:
        assert mismatch(policy, engine, prompts=prompts)["mismatch_abs_mean"] < 1e-5
        move(policy)
        engine.load(policy.weights(), policy.response_logprobs)
        assert mismatch(policy, engine, prompts=prompts)["mismatch_abs_mean"] > 0.01


# ------------------------------------------------------------------------------------------------ exact at length
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 300, 513, 600)
MASKS = [dict(), dict(temperature=1.0), dict(top_p=0.9), dict(top_k=7), dict(min_p=0.05),
         dict(top_k=20, top_p=0.8, temperature=1.0)]  # fmt: skip


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("long")
    qwen2(tied=False, max_position_embeddings=1024).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_mask_temperature_and_micro_batch_is_exact(long_folder, dtype):
    """Prompts of 1 to 600 tokens, responses of 1 to 40. Half of the prompts have several rows, one length has two."""
    generator, policy = torch.Generator().manual_seed(0), first_policy(dtype, max_position_embeddings=1024)
    draw = lambda length: torch.randint(60, 96, (length,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(length) for length in (*LENGTHS, 300)]
    with started(long_folder, policy, kind="exact", max_model_len=640) as engine:
        for mask in MASKS:
            sampling = Sampling(**dict(temperature=0.7, max_new_tokens=40, stop_token_ids=tuple(range(4))) | mask)
            sampling = replace(sampling, max_kept=96) if sampling.has_mask else sampling
            policy.support = KeptTokens(sampling)
            rollouts = [each for index, prompt in enumerate(prompts)
                        for each in engine.submit(prompt, 1 + 2 * (index % 2), sampling, 100 * index)]
            rollouts += engine.submit(prompts[5], 1, replace(sampling, max_new_tokens=1), 5)
            while engine.num_unfinished:
                engine.step()
            assert {1, 40} <= {len(rollout.token_ids) for rollout in rollouts}
            for rows in ([rollouts], [rollouts[i : i + 7] for i in range(0, len(rollouts), 7)],
                         [[each] for each in rollouts[::3]]):  # fmt: skip
                for together in rows if mask == {} else rows[:1]:
                    values, batch = scored(policy, together, sampling.temperature, micro_batch_tokens=10**6)
                    assert torch.equal(values, batch.behavior_logprobs), (mask, len(together))


# ------------------------------------------------------------------------------------------------ runs
# Long questions, of which one in four is new to a step: a prefix cache has blocks for them.
LONG_TASK = """
def sample(rng):
    number = rng.randint(1, 12)
    return "1+" * 20 + f"{number}=", str(number + 20)
def reward(problem, response):
    return float(len(response) % 3)
"""


@contextmanager
def job(good: Path, out: Path, **changes) -> Iterator[tuple[Run, TrainingState]]:
    """All of train.py up to its first step; long questions with a prefix cache."""
    task = good / "task.py"
    if "prefix_cache" in changes:
        task = out.parent / "long_task.py"
        task.write_text(LONG_TASK)
    usual = dict(model=str(good / "model"), task=str(task), out=str(out), engine="shared", exact=True, num_prompts=4,
                 group_size=4, max_new_tokens=12, temperature=1.3, lr=3e-3, lr_warmup_steps=0, steps=9)
    close_live_engine()
    run = prepare(Config.of(**usual | changes))
    out.mkdir(exist_ok=True)
    live = build(run)[0]
    try:
        yield run, live
    finally:
        live.engine.close()


def changed(run: Run, **options) -> Run:
    return replace(run, config=run.config.but(**options))


def steps(run: Run, live: TrainingState, *numbers: int) -> list[dict[str, Any]]:
    return [train_step(run, live, number).metrics for number in numbers]


def from_the_start(run: Run, live: TrainingState, state: dict[str, Any], count: int) -> tuple[list[dict], Any]:
    """Metrics of the first steps without times and memory, and the weights after them."""
    live.load_state_dict(deepcopy(state))
    live.engine.load(live.policy.weights(), live.policy.response_logprobs, changed=False)
    rows = steps(run, live, *range(1, count + 1))
    rows = [{name: value for name, value in row.items() if not re.search("_s$|_gib$", name)} for row in rows]
    return rows, live.policy.copied_weights()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_exact_a_correction_changes_nothing_bit_for_bit(good, tmp_path, dtype):
    with job(good, tmp_path / "run", dtype=dtype) as (run, live):
        state = deepcopy(live.state_dict())
        rows, weights = from_the_start(run, live, state, 3)
        assert all(row["mismatch_max"] == row["mismatch_kl"] == 0 for row in rows)
        assert all(row["mismatch_ratio"] == row["ess"] == 1 for row in rows)  # the weights' mean and effective size
        assert all(row["exact_tokens"] == row["tokens"] > 0 < row["updates"] for row in rows)
        assert not equal(weights, state["policy"])
        _, first = from_the_start(run, live, state, 1)
        assert all(value == 0 for row in rows for name, value in row.items() if "rejected_frac" in name)
        assert all(row["tis_clip_frac"] == 0 and row["weights_ess"] == 1 for row in rows)
        weightings, means = [{}, {"tis": "token"}, {"tis": "sequence"}], ("all", "kept")
        rejections = [{"reject": rule, "reject_mean": mean} for rule in REJECTIONS for mean in means]
        assert sum(name.startswith("rejected_frac") for name in rows[0]) == 1 + len(REJECTIONS)
        for correction in (*weightings[1:], *(a | b for a, b in product(weightings, rejections))):
            corrected, after = from_the_start(changed(run, **correction), live, state, 1)
            assert corrected == rows[:1], correction
            assert equal(after, first), correction
        both = {"tis": "sequence", "reject": "geometric"}
        corrected, after = from_the_start(changed(run, **both), live, state, 3)
        assert corrected == rows
        assert equal(after, weights)


def test_without_exact_a_correction_changes_the_weights(good, tmp_path):
    """Else the test above would prove nothing."""
    with job(good, tmp_path / "run", exact=False) as (run, live):
        state = deepcopy(live.state_dict())
        rows, weights = from_the_start(run, live, state, 2)
        corrected, after = from_the_start(changed(run, tis="token"), live, state, 2)
        rejecting = changed(run, reject="binary_tv", reject_high=1e-8)
        rejected, after_rejection = from_the_start(rejecting, live, state, 2)
    assert all(0 < row["mismatch_max"] < 1e-4 for row in rows + corrected)
    assert not equal(after, weights)
    assert all(0 < row["rejected_frac"] < 1 for row in rejected)
    assert not equal(after_rejection, weights)


def test_fresh_rollouts_are_exact_with_groups_in_flight(good, tmp_path):
    """Answers end at one of many tokens, so that some groups take longer than a step."""
    for parity in (KEEP, RECOMPUTE, ABORT):
        usual = dict(parity=parity, inflight_groups=3, max_num_seqs=12, max_new_tokens=24)
        if parity != KEEP:
            with pytest.raises(ValueError, match="exact must be off if a fix is off"):
                Config.of(engine="shared", exact=True, **usual)
        with job(good, tmp_path / parity.inflight_update, exact=parity == KEEP, **usual) as (run, live):
            live.source.sampling = replace(run.sampling, stop_token_ids=tuple(range(2, 8)))
            rows = steps(run, live, *range(1, 7))
        fresh = [row["current_mismatch_max"] for row in rows if row.get("current_mismatch_max") is not None]
        assert len(fresh) > 1
        assert max(fresh) == 0 if parity == KEEP else max(fresh) < 1e-5
        if parity != ABORT:
            assert max(row["staleness_max"] for row in rows) > 0
            assert max(row["mismatch_max"] for row in rows) > 0.01  # of stale tokens
        if parity == KEEP:
            assert all((row["exact_tokens"] > 0) == (row.get("current_mismatch_max") is not None) for row in rows)
            assert any(0 < row["exact_tokens"] < row["tokens"] for row in rows)


@pytest.mark.parametrize("name, dtype", [("Gemma2", "bfloat16"), ("Llama", "float32")])
def test_ten_optimizer_steps_stay_exact(good, tmp_path, name, dtype):
    small_model(name, name in ALWAYS_TIED).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    first = Policy.load(str(tmp_path), getattr(torch, dtype), "cpu").copied_weights()
    with job(good, tmp_path / "run", model=str(tmp_path), dtype=dtype, steps=10, num_minibatches=1) as (run, live):
        rows = steps(run, live, *range(1, 11))
        assert [row["mismatch_max"] for row in rows] == [0] * 10
        assert all(row["updates"] == 1 and row["exact_tokens"] == row["tokens"] for row in rows)
        assert not any(torch.equal(first[name], tensor) for name, tensor in live.policy.copied_weights().items())


# ------------------------------------------------------------------------------------------------ planted faults
def change_a_weight_while_asleep(live: TrainingState) -> None:
    """Between sampling and scoring, at each later step."""
    usual, weight = live.engine.sleep, live.policy.model.model.layers[1].mlp.down_proj.weight

    def sleep():
        usual()
        weight.data.view(-1)[7] += 0.5

    live.engine.sleep = sleep


def score_with_sdpa(live: TrainingState) -> None:
    live.policy.body = live.policy.own_body


def forget_the_cache_salt(live: TrainingState) -> None:
    """Later loads do not change the key of the cached blocks."""
    live.engine.prefix_cache = "off"


FAULTS = {  # how it is planted, before which step, the options of the run, and the cause that is told in step 2
    "another kernel": (score_with_sdpa, 2, {}, "the trainer scored with sdpa, not with vLLM's kernel"),
    "a stale prefix cache": (forget_the_cache_salt, 1, dict(prefix_cache="versioned", block_size=32),
                             "a prompt in the prefix cache is stale"),
    "a changed weight": (change_a_weight_while_asleep, 2, {}, "the weights were changed after this token was sampled"),
}  # fmt: skip
TOLD = (r"^exact: token \d+ of request \d+ \(after a prompt of \d+ tokens\) has log-probability -\d.* in the engine and"
        r" -\d.* in the trainer; \d+ of \d+ tokens differ, inputs \(\d+, \d+\), {dtype}. Cause: {cause}")  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_run_and_is_named(good, tmp_path, fault, dtype):
    plant, step, options, cause = FAULTS[fault]
    with job(good, tmp_path / "run", dtype=dtype, **options) as (run, live):
        if step == 1:
            plant(live)
        steps(run, live, 1)
        if step == 2:
            plant(live)
        with pytest.raises(ExactError, match=TOLD.format(dtype=f"torch.{dtype}", cause=cause)):
            steps(run, live, 2)


class TwoRows(SharedEngine):
    fewest_rows = 2


def test_two_rows_a_product_in_place_of_more_are_found(good, tmp_path):
    """The engine decodes two sequences at once. A new engine refuses at its start, a live one stops the run."""
    cause = r"a product of few rows is rounded differently \(qwen2, torch.float32, 1 threads\)"
    with job(good, tmp_path / "run", max_num_seqs=1, group_size=2) as (run, live):
        steps(run, live, 1)
        live.engine.pad_rows(2)
        with pytest.raises(ExactError, match=TOLD.format(dtype="torch.float32", cause=cause)):
            steps(run, live, 2)
    with pytest.raises(ValueError, match=f"^exact must be off here: {cause}"):
        TwoRows(live.policy, run.model_path, ParityFlags(), exact=True, max_model_len=64)
    assert Engine.live is None


def test_one_wrong_token_is_found_wherever_it_is(engine_folders):
    """A value that is not a number, and one that differs by one unit in the last place."""
    policy = first_policy()
    with started(engine_folders[False], policy, kind="exact") as engine:
        values, batch = scored(policy, engine.generate(PROMPTS, 4, WARM, SEEDS))
        batch = replace(batch, old_logprobs=values)
        assert engine.verify(batch) == {"exact_tokens": batch.mask.sum()}
        assert batch.mask.sum() > 100
        for row, column in batch.mask.nonzero()[::40].tolist():
            token, size = column + 1 - int(batch.prompt_lengths[row]), int(batch.prompt_lengths[row])
            place = rf"^exact: token {token} of request {row} \(after a prompt of {size} tokens\) .*; 1 of {{}} tokens"
            right = values[row, column]
            for wrong in (torch.nan, right.nextafter(torch.tensor(0.0)), right.nextafter(torch.tensor(-torch.inf))):
                theirs, ours = batch.behavior_logprobs.clone(), values.clone()
                theirs[row, column] = ours[row, column] = wrong
                for change in ({"behavior_logprobs": theirs}, {"old_logprobs": ours}):
                    with pytest.raises(ExactError, match=place.format(int(batch.mask.sum()))):
                        engine.verify(replace(batch, **change))
        outside = batch.behavior_logprobs.where(batch.mask > 0, 1.0)
        assert engine.verify(replace(batch, behavior_logprobs=outside)) == {"exact_tokens": batch.mask.sum()}


def test_a_broken_promise_ends_the_command_with_its_sentence(good, tmp_path, capfd):
    def start(run: Run, policy: Policy, alone: Engine | None = None) -> Engine:
        """The engine of the command; a weight changes after the samples of step 3."""
        engine, steps = start_engine(run, policy, alone), count(1)
        usual, weight = engine.sleep, policy.model.model.layers[1].mlp.down_proj.weight

        def sleep():
            usual()
            if next(steps) == 3:
                weight.data.view(-1)[7] += 0.5

        engine.sleep = sleep
        return engine

    with pytest.raises(SystemExit) as stop:
        train_here(command(good, f"--out {tmp_path}/run --task {{root}}/task.py --engine shared --exact --steps 4",
                           "--eval-problems=2", "--no-eval-with-trainer", "--temperature=1.3"), start)
    assert stop.value.code == 1
    said = capfd.readouterr().err
    assert re.search("^error: .*exact: token .* Cause: the weights were changed after this token", said, re.M)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["audit"]["module"] == "the trainer's Qwen2ForCausalLM"
    assert record["audit"]["exact"] is True


@pytest.mark.parametrize("alone, reason", [("", "engine must be vllm and eval_with_trainer off with recurrent layers"),
                                           ("--no-eval-with-trainer", "cannot start falcon_h1 .*recurrent layers")])
def test_a_recurrent_model_is_refused_in_a_sentence(good, tmp_path, capsys, alone, reason):
    small_model("FalconH1", False).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    close_live_engine()
    said = refusal(command(good, f"--out {tmp_path}/run --model {tmp_path} --engine shared {alone}"), capsys)
    assert re.search(reason, said)


def main(names: list[str]) -> None:
    print("| architecture | fp32: own attention | exact | bf16: own attention | exact | gradient fp32 | bf16 |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names or ARCHITECTURES:
        if name in REFUSED:
            print(f"| {name} | refused: {REFUSED[name]} | | | | | |", flush=True)
            continue
        found = [measure(name, dtype, 3) for dtype in DTYPES]
        cells = [cell for each in found for cell in
                 (f"{max(each['plain']):.1e}", {None: "refused", True: "yes", False: "NO"}[each["exact"]])]
        print(f"| {' | '.join([name, *cells, *(format(each['gradient'], '.1e') for each in found)])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
