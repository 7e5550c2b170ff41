"""What is found before a run starts."""

import os
import sys
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from helpers import RECURRENT, bare_run, config_of, parametrize, python, small_model, value_error

from engine_adapter import Engine, ParityFlags
from extras.notices import name_idle
from extras.transformers_engine import TransformersEngine
from report.errors import end_of_process
from train import complete_run, new_run


@pytest.fixture
def job(good, tmp_path):
    """For a small model; not the toy: it would be taught on this process's threads."""
    usual = dict(num_prompts=4, out=str(tmp_path / "run"), task=str(good / "task.jsonl"), model=str(good / "model"))
    return lambda **changes: config_of(**usual | changes)


def test_a_switch_that_can_change_nothing_is_named(capsys):
    off, raw = dict(inflight_keep=False, fp32_head=False), dict(processed_logprobs=False)
    for flags, changes, named in (
        (off, {}, ["inflight_keep", "fp32_head"]), (off, {"inflight_groups": 1, "dtype": "bfloat16"}, []),
        (raw, {"temperature": 0.7}, []), (raw, {"temperature": 1.0}, ["processed_logprobs"]),
        (raw | {"sampling_mask": False}, {"temperature": 1.0, "top_p": 0.9}, []),
    ):  # fmt: skip
        config = config_of(ParityFlags(**flags), **changes)
        run = bare_run(config, SimpleNamespace(prompts=[[0] * 7]))
        engine = SimpleNamespace(settings={"block_size": 16})
        name_idle(SimpleNamespace(run=run, engine=engine), {})
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if "WITHOUT EFFECT" in line] == named


def test_prompts_share_a_versioned_cache_wherever_it_is_right():
    def asked(name="Qwen2", longest=33, kind=Engine, **options):
        config, task = config_of(**options), SimpleNamespace(prompts=[[0], [0] * longest])
        run = bare_run(config, task, engine_kind=kind)
        config.extra.prefix_cache.install(run)
        for change in run.with_model:
            change(small_model(name))
        assert run.further == ({"enable_prefix_caching": True} if run.engine else {})
        if run.engine:
            salt = run.engine["cache_salt"]
            keys = {salt(1), salt(2)}
            for function in *run.evaluations, *run.step_metrics:
                assert function(None) == {}
                keys |= {salt(1), salt(2)}
            assert len(keys) == 6  # no block of a load, of an evaluation or of a step is found after it
        return run.engine.get("block_size", 0)

    usual, latent = (None, None) if torch.cuda.is_available() else (32, 0)  # None: vLLM's. 0: there is no cache
    assert [asked(), asked("Gemma2"), asked("DeepseekV3")] == [usual, usual, latent]
    assert (asked(block_size=16), asked(longest=400, block_size=128)) == (16, 128)
    without = [asked(longest=16), asked(block_size=48), asked(prefix_cache="off"), asked(kind=TransformersEngine),
               asked(parity=ParityFlags(uncached_runtime=False)), *map(asked, (*RECURRENT, "Lfm2"))]
    assert without == [0] * len(without)


def test_a_used_folder_is_refused_before_a_toy_is_taught(tmp_path):
    (tmp_path / "config.json").touch()
    with value_error("out must be a new folder"):
        complete_run(config_of(out=str(tmp_path), cache_dir=str(tmp_path / "cache")))
    assert not (tmp_path / "cache").exists()


def test_on_a_gpu_top_p_after_min_p_is_refused_where_vllm_samples(job, monkeypatch):
    """test_runner_v2.py has the fault of vLLM's kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    both = dict(min_p=0.02, top_p=0.9)
    refused, *allowed = (new_run(job(**options)) for options in (
        both, both | {"engine": "transformers"}, dict(min_p=0.02, top_k=6), dict(top_k=6, top_p=0.9)))
    with value_error(r"min_p must be 0 with top_p on a GPU .*, got 0.02 and 0.9; try --top-k"):
        refused.config.extra.sampling_mask.install(refused)
    for run in allowed:
        run.config.extra.sampling_mask.install(run)


@parametrize("version, needed, complaint", [
    ("", "", "vLLM is not installed"), ("0.99.1", "", r"vLLM must be 0.26 to 0.33 .*, got 0\.99\.1"),
    ("0.32.0", "torch==9.9", r"torch must be ==9\.9, for which vLLM 0\.32\.0 was built, got 2"),
])  # fmt: skip
def test_vllm_must_be_there_where_it_samples_in_a_tested_version_and_for_this_torch(
        job, monkeypatch, version, needed, complaint):
    installed = [SimpleNamespace(version=version, requires=[needed] if needed else None)] if version else []
    monkeypatch.setattr("vllm_cases.distributions", lambda name: installed)
    with value_error(complaint):
        complete_run(job())
    complete_run(job(**{"allow_untested_vllm": True} if version else {"engine": "transformers"}))


def test_a_gpus_process_ends_before_python_does_with_its_status(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def last_block():
        with suppress(SystemExit), end_of_process():
            sys.exit(2)
        os._exit(3)

    process = get_context("fork").Process(target=last_block)
    process.start()
    process.join()
    assert process.exitcode == 2


def test_a_machine_without_git_is_no_error(tmp_path):
    code = "from report.files import DESCRIBED; print(repr(DESCRIBED))"
    assert python("-c", code, PATH=str(tmp_path)).stdout == "''\n"  # a folder without programs
