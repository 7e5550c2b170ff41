"""The adapter against the real vLLM V1 in this process. Faults are planted in weights, folders and the live engine.

Tests that need equal engines follow one another, so that they share one (helpers.started).
"""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import helpers
import pytest
import torch
from helpers import (
    AT_PARITY,
    PROMPTS,
    SEEDS,
    VERSIONED,
    WARM,
    checks_of,
    close_live_engine,
    floors,
    floors_of,
    load_into,
    move,
    started,
)

import engine_adapter
import verify
from engine_adapter import Engine, ParityFlags, Sampling, Source
from tasks import Problem, Task, exact_match
from verify import canary, settings
from verify.settings import AuditError
from vllm_cases import EngineStateError, WeightLoadError

pytestmark = pytest.mark.engine
IN_FORCE = {"logprobs_mode": "processed_logprobs", "enable_prefix_caching": False, "async_scheduling": False,
            "head_dtype": "float32", "max_logprobs": -1}  # fmt: skip


def check_settings(engine, **without):
    """What the engine reads back is the fixes' settings, except for those that are given."""
    found = verify.audit(engine)
    assert found | IN_FORCE | without == found


# ------------------------------------------------------------------------------------------------ one engine at parity
def test_the_audit_names_every_setting_that_is_not_in_force(engine_folder, policy, monkeypatch):
    from vllm.config import CUDAGraphMode

    def replayed(model, **inputs):  # a step of one token without the model's call, as a graph
        call = model.forward if len(inputs["positions"]) == 1 else partial(torch.nn.Module.__call__, model)
        return call(**inputs)

    with started(engine_folder, policy) as engine:
        check_settings(engine)
        sampler, cache = engine.runner.sampler, engine.core.scheduler.kv_cache_manager
        sampler.logprobs_mode, cache.enable_caching = "raw_logprobs", True
        hook = engine.vllm_model.logits_processor.register_forward_hook(lambda *given: given[2].bfloat16().float())
        engine.wanted["compilation_config.cudagraph_mode"] = "FULL_DECODE_ONLY"
        graphs = engine.llm.vllm_config.compilation_config
        monkeypatch.setattr(graphs, "cudagraph_mode", CUDAGraphMode.FULL_DECODE_ONLY)  # and none is replayed
        wrong = (r"logprobs_mode is 'raw_logprobs'.*prefix_caching is True.*head_dtype is 'bfloat16', not 'float32'"
                 r".*cudagraph_mode is 'NONE', not 'FULL_DECODE_ONLY'; try --no-cuda-graphs")  # fmt: skip
        with pytest.raises(AuditError, match=wrong):
            verify.audit(engine)
        hook.remove()
        sampler.logprobs_mode, cache.enable_caching = "processed_logprobs", False
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.vllm_model), "__call__", replayed)
            check_settings(engine, cudagraph_mode="FULL_DECODE_ONLY")
        del engine.wanted["compilation_config.cudagraph_mode"]


def test_a_setting_without_a_reader_is_refused_and_so_is_a_reader_without_a_setting(
        engine_folder, monkeypatch, policy):
    """As a fork adds them."""
    with started(engine_folder, policy) as engine:
        monkeypatch.setitem(engine.wanted, "kv_cache_dtype", "auto")
        with pytest.raises(AuditError, match=r"must have a reader.*kv_cache_dtype has not"):
            verify.audit(engine)
        monkeypatch.setitem(settings.READERS, "kv_cache_dtype", lambda engine: "auto")
        check_settings(engine, kv_cache_dtype="auto")
        monkeypatch.delitem(engine.wanted, "kv_cache_dtype")
        with pytest.raises(AuditError, match=r"each reader a setting.*kv_cache_dtype has not"):
            verify.audit(engine)


def test_every_token_the_stop_token_included_has_the_trainers_logprob_and_the_engines_version(engine_folder, policy):
    """The model's generation_config.json asks for penalties, masks, another temperature and another stop token."""
    stops = Sampling(0.7, 30, tuple(range(2, 40)))
    with started(engine_folder, policy) as engine:
        rollouts = engine.generate(PROMPTS, 4, stops, SEEDS)
        assert floors_of(policy, rollouts, 0.7) < AT_PARITY
        assert [r.prompt_ids for r in rollouts] == [p for p in PROMPTS for _ in range(4)]  # group-major
        assert {r.finish_reason for r in rollouts} - {"length"} == {"stop"}  # none is unfinished
        for rollout in rollouts:
            *others, last = [token in stops.stop_token_ids for token in rollout.token_ids]
            assert not any(others)
            assert last == (rollout.finish_reason == "stop")
            assert rollout.versions == [engine.weight_version] * len(rollout.token_ids)


def test_seeds_decide_the_samples_whatever_the_batch_and_else_the_runs_seed_and_its_step_do(engine_folder, policy):
    def tokens(rollouts):
        return [rollout.token_ids for rollout in rollouts]

    with started(engine_folder, policy) as engine:
        first = tokens(engine.generate(PROMPTS, 3, WARM, SEEDS))
        assert tokens(engine.generate(PROMPTS[1:2], 1, WARM, [SEEDS[1] + 2])) == first[5:6]  # sample 2 of prompt 1
        task = Task([Problem("", "", "", PROMPTS[0])], [], exact_match)
        runs = [tokens(Source(engine, task, WARM, 1, 12, seed).next(step)[1])
                for seed, step in ((5, 1), (5, 1), (6, 1), (5, 2))]  # fmt: skip
    assert runs[0] == runs[1] != runs[2] != runs[3] != runs[0]
    assert all(len({*map(tuple, samples)}) > 6 for samples in (first, *runs))  # samples of a group differ


# ------------------------------------------------------------------------------------------------ weight load
def test_a_faulty_load_is_refused_and_one_of_other_names_leaves_the_engine_as_it_was(engine_folder, policy):
    name = "model.layers.1.self_attn.k_proj.weight"
    with started(engine_folder, policy) as engine:
        version, weights = engine.weight_version, policy.weights()
        with pytest.raises(WeightLoadError, match=f"missing or unknown are {name}, unknown$"):
            engine.load({word.replace(name, "unknown"): weights[word] for word in weights})
        assert (engine.weight_version, engine.state) == (version, "ready")
        assert floors(policy, engine) < AT_PARITY
        for wrong, reason in ((weights[name] / 0, "log-probabilities are"), (weights[name].T, "vLLM refused the")):
            with pytest.raises((WeightLoadError, FloatingPointError), match=reason):
                load_into(engine, policy, weights | {name: wrong})
            with pytest.raises(EngineStateError, match=r"this one is (unproven|broken)"):
                engine.generate(PROMPTS, 1, WARM, SEEDS)
            engine.state = "ready"  # the test alone may go on with this engine
    close_live_engine()


BLOCK = 32  # the CPU build's smallest


def test_a_versioned_prefix_cache_is_hit_within_a_version_and_never_across_a_load(engine_folder, policy):
    """Also by requests that wait while the weights change: the engine has room for 8 of 16 at once."""
    endless, options = replace(WARM, stop_token_ids=()), VERSIONED | dict(block_size=BLOCK, max_num_seqs=4)
    prompts = [helpers.drawn_ids(3 * BLOCK + 5) for _ in range(2)] * 2  # what waits has the prompts of what runs
    with started(engine_folder, policy, in_flight=True, **options) as engine:
        check_settings(engine, enable_prefix_caching=True)
        assert canary.length(engine) == BLOCK + 1
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        for seed in range(2):
            rollouts = [rollout for number, prompt in enumerate(prompts)
                        for rollout in engine.submit(prompt, 4, endless, 50 * seed + number)]
            free = pool.get_num_free_blocks()
            engine.step()  # half of them run, the others wait
            assert free - pool.get_num_free_blocks() == 2 * 3 + 8  # two prompts, and a last block of each response
            move(policy, 0.02, seed)
            load_into(engine, policy)
            while engine.num_unfinished:
                engine.step()
            waited = [each for each in rollouts if set(each.versions) == {engine.weight_version}]
            assert len(waited) >= 8
            assert floors_of(policy, waited, WARM.temperature) < AT_PARITY


# ------------------------------------------------------------------------------------------------ states
def test_sleep_wake_load_generate_is_the_only_order_and_close_frees_the_model(engine_folder, monkeypatch, policy):
    """vLLM freezes the heap at start, and its parameters are in cycles that only the collector frees."""
    sample, load = lambda: engine.generate(PROMPTS, 1, WARM, SEEDS), lambda: load_into(engine, policy)
    close_live_engine()
    monkeypatch.setattr(gc, "freeze", helpers.freeze)  # as on a GPU, where helpers.py leaves them alone
    monkeypatch.setattr(gc, "unfreeze", helpers.unfreeze)
    with started(engine_folder, policy) as engine:
        for reason, call in (
            ("", engine.sleep), ("is asleep: .* wake", sample), ("needs an engine that is ready", engine.sleep),
            ("load needs", load), ("", engine.wake), (r"is awake: .* load\(\) to unproven", sample),
            ("needs .* asleep", engine.wake), ("", lambda: engine.load(policy.weights())),
            (r"is unproven: .* by the checks of verify/ \(proof, canary\) to ready", sample),
            ("", lambda: checks_of(engine).prove(policy.weights())), ("is unproven", sample), ("load needs", load),
            ("", lambda: checks_of(engine).run_canary(policy)), ("canary needs", lambda: engine.passed("canary")),
            ("", load), ("a process holds one engine", lambda: Engine(
                engine_folder, {}, ParityFlags(), max_model_len=128)),
        ):
            with pytest.raises(EngineStateError, match=reason) if reason else nullcontext():
                call()
        assert floors(policy, engine) < AT_PARITY
    model = engine.vllm_model
    held = [*map(weakref.ref, (engine.runner, engine.runner.sampler, *model.modules(), *model.parameters()))]
    del model
    engine.close()
    assert len(held) >= 7
    assert all(reference() is None for reference in held)


def test_an_answer_that_vllm_ends_with_another_reason_such_as_an_error_stops_the_run(
        engine_folder, monkeypatch, policy):
    assert "error" not in engine_adapter.FINISH_REASONS
    with started(engine_folder, policy) as engine:
        monkeypatch.setattr(engine_adapter, "FINISH_REASONS", ())
        with pytest.raises(RuntimeError, match=r"vLLM ended a request with (stop|length)"):
            engine.generate(PROMPTS, 1, WARM)
    close_live_engine()  # its requests are unfinished

