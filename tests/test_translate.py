"""lab.translate: a run's options in the words of TRL and verl, against values written by hand."""

import json
import re
from pathlib import Path

import pytest

from config import Config, ParityFlags
from lab.compare import STORED
from lab.translate import OWN, main, to_trl, to_verl, translate, view


def translated(tmp_path: Path, capsys, to: str, **changes) -> tuple[dict[str, object], str]:
    """The options that the command prints for a run of the default job with some options changed, and its comments."""
    options = json.loads((STORED / "default.json").read_text())["options"] | {"out": str(tmp_path), "seed": 3} | changes
    (tmp_path / "config.json").write_text(json.dumps({"config": options}))
    assert main([str(tmp_path), "--to", to]) == 0
    text = capsys.readouterr().out
    code, notes = (" ".join(line for line in text.splitlines() if line.startswith("#") == comment)
                   for comment in (False, True))  # fmt: skip
    if to == "trl":
        return eval(code.partition("config = ")[2], {"GRPOConfig": dict}), notes
    return dict(re.findall(r" (\S+)=(\S+)", code)), notes


def test_the_default_job_in_trl_takes_the_same_number_of_samples_and_steps(tmp_path, capsys):
    options, notes = translated(tmp_path, capsys, "trl")
    expected = dict(per_device_train_batch_size=512, steps_per_generation=2, max_steps=120, num_generations=8, seed=3,
                    max_completion_length=8, temperature=0.7, learning_rate=0.001, warmup_steps=10, beta=0.0,
                    epsilon=0.2, epsilon_high=0.2, loss_type="bnpo", scale_rewards="group", use_vllm=True, bf16=False,
                    vllm_importance_sampling_correction=False, cast_lm_head_to_fp32=False)  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    assert "dtype float32: GRPOConfig has no option for the engine's" in notes
    assert "fp32 head" not in notes
    assert "old_policy" not in notes


@pytest.mark.parametrize("changes, expected, noted", [
    ({"objective": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.2}, ""),
    ({"objective": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}, ""),
    ({"objective": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}, "cispo: TRL counts"),
    ({"tis": "token", "reject": "token", "tis_cap": 5.0, "reject_high": 5.0},
     {"vllm_importance_sampling_mode": "token_mask", "min_p": None,
     "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}, ""),
    ({"tis": "masked", "tis_cap": 5.0, "tis_floor": 0.4},  # of a run that is older than `reject`
     {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.4,
     "vllm_importance_sampling_clip_max": 5.0}, ""),
    ({"tis": "token", "reject": "token", "reject_high": 5.0}, {"vllm_importance_sampling_clip_max": 5.0},
     "tis_cap 2.0 is below reject_high"),
    ({"tis": "sequence", "reject": "sequence"}, {"vllm_importance_sampling_mode": "sequence_mask"}, "reject_mean kept"),
    ({"tis": "token", "reject": "geometric"}, {"vllm_importance_sampling_mode": "token_truncate"}, "reject geometric"),
    ({"reject": "worst"}, {"vllm_importance_sampling_correction": False}, "reject worst (0.0001, 100.0): TRL has no"),
    ({"tis": "sequence"}, {"vllm_importance_sampling_mode": "sequence_truncate"}, ""),
    ({"old_policy": "rollout"}, {}, "old_policy rollout: TRL forms the ratio with its own recomputed values"),
    ({"dtype": "bfloat16"}, {"bf16": True, "cast_lm_head_to_fp32": True}, "fp32 head: cast_lm_head_to_fp32 is the"),
    ({"top_p": 0.9}, {"top_p": 0.9}, "the trainer's softmax is over the whole vocabulary"),
    ({"inflight_groups": 4}, {}, "inflight_groups 4"),
    ({"engine": "shared"}, {"use_vllm": True}, "# engine shared: without effect on this translation"),
    ({"engine": "transformers"}, {"use_vllm": False}, ""),
])  # fmt: skip
def test_other_options_in_trl(changes, expected, noted, tmp_path, capsys):
    options, notes = translated(tmp_path, capsys, "trl", **changes)
    assert {name: options[name] for name in expected} == expected
    assert noted in notes


@pytest.mark.parametrize("changes, expected, noted", [
    ({}, {"data.train_batch_size": "128", "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
          "actor_rollout_ref.rollout.n": "8", "actor_rollout_ref.rollout.top_k": "-1",
          "actor_rollout_ref.rollout.logprobs_mode": "processed_logprobs",
          "actor_rollout_ref.rollout.enable_prefix_caching": "False", "algorithm.rollout_correction.rollout_is": "null",
          "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
          "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla"}, "verl reads parquet files"),
    ({"objective": "cispo"}, {"actor_rollout_ref.actor.clip_ratio_high": "4.0",
                              "actor_rollout_ref.actor.clip_ratio_low": "1.0"}, ""),
    ({"objective": "dr_grpo"}, {"algorithm.norm_adv_by_std_in_grpo": "False",
                                "actor_rollout_ref.actor.loss_scale_factor": "8"}, ""),
    ({"objective": "gspo"}, {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, ""),
    ({"tis": "token", "reject": "token"}, {"algorithm.rollout_correction.rollout_is": "token",
     "algorithm.rollout_correction.rollout_is_threshold": "'0.5_2'"}, ""),
    ({"tis": "masked", "tis_cap": 5.0, "tis_floor": 0.5}, {"algorithm.rollout_correction.rollout_is": "token",
     "algorithm.rollout_correction.rollout_is_threshold": "'0.5_5'"}, ""),
    ({"tis": "sequence", "reject": "sequence"}, {"algorithm.rollout_correction.rollout_is": "sequence",
     "algorithm.rollout_correction.rollout_is_threshold": "2.0",
     "algorithm.rollout_correction.rollout_rs": "seq_sum_k1",
     "algorithm.rollout_correction.rollout_rs_threshold": "'0.5_2'"}, ""),
    ({"reject": "token", "reject_high": 5.0}, {"algorithm.rollout_correction.rollout_is": "null",
     "algorithm.rollout_correction.rollout_rs": "token_k1",
     "algorithm.rollout_correction.rollout_rs_threshold": "'0.2_2'"}, "reject_mean all"),
    ({"reject": "trm", "reject_mean": "kept"}, {"algorithm.rollout_correction.rollout_rs": "seq_max_k3",
     "algorithm.rollout_correction.rollout_rs_threshold": "0.05"}, ""),
    ({"reject": "binary_tv"}, {}, "reject binary_tv (-inf, 0.2): verl has no such rule"),
    ({"old_policy": "rollout"}, {"algorithm.rollout_correction.bypass_mode": "True"}, ""),
    ({"gradient_checkpointing": True}, {"actor_rollout_ref.rollout.seed": "3",
     "actor_rollout_ref.model.enable_gradient_checkpointing": "True"}, ""),
    ({"engine": "shared", "exact": True}, {}, "exact True: without effect on this translation"),
    ({"dtype": "bfloat16"}, {"+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.head_dtype": "float32"},
     "fp32 head: verl 0.9.1 has no option"),
])  # fmt: skip
def test_options_in_verl(changes, expected, noted, tmp_path, capsys):
    options, notes = translated(tmp_path, capsys, "verl", **changes)
    assert {name: options[name] for name in expected} == expected
    assert noted in notes


# A value other than the default for each option, with the options that it needs.
OTHER = {
    "seed": 7, "steps": 7, "eval_every": 7, "model": "owner/model", "task": "digits", "dtype": "bfloat16",
    "objective": "cispo", "num_prompts": 64, "group_size": 4, "max_new_tokens": 9, "temperature": 1.0, "top_k": 50,
    "top_p": 0.9, "min_p": 0.1, "lr": 1e-4, "old_policy": "rollout", "clip_low": 0.1, "clip_high": 0.3, "kl_coef": 0.1,
    "tis": "sequence", "tis_cap": 3.0, "reject": "geometric", "reject_low": 0.4, "reject_high": 1.5,
    "reject_mean": "kept", "mask_truncated": True, "num_minibatches": 4,
    "micro_batch_tokens": 1024, "lr_warmup_steps": 7, "weight_decay": 0.1, "grad_clip": 0.5, "engine": "shared",
    "exact": True, "kv_cache_gib": 0.5, "eval_task": "held_out.jsonl", "max_prompt_tokens": 64,
    "overlong_prompts": "drop", "reward_limit_s": 3.0, "reward_errors": "count", "gradient_checkpointing": True,
    "offload_optimizer": True, "inflight_groups": 4, "max_staleness": 2,
    "tis_over_a_broken_backend": True, "max_kept": 64, "max_num_seqs": 64, "block_size": 32,
    "prefix_cache": "versioned", "cuda_graphs": True, "eval_problems": 16, "eval_samples": 4,
    "eval_with_trainer": False, "checkpoint_every": 7, "self_noise_every": 7, "probe_every": 7,
    "probe_on_alarm": True, "processed_logprobs": False, "explicit_runtime": False, "inflight_keep": False,
    "fp32_head": False, "sampling_mask": False, "inflight_otherwise": "recompute",
    "head_otherwise": "both", "tensorboard": True,
}  # fmt: skip
MASKED = {"tis": "token", "reject": "token"}
NEEDS = {"tis_cap": {"tis": "token"}, "reject_low": MASKED, "reject_high": MASKED, "reject_mean": MASKED,
         "exact": {"engine": "shared"},
         "eval_task": {"task": "problems.jsonl"},
         "max_kept": {"top_k": 9}, "sampling_mask": {"top_k": 9}, "fp32_head": {"dtype": "bfloat16"},
         "inflight_otherwise": {"inflight_keep": False},
         "head_otherwise": {"dtype": "bfloat16", "fp32_head": False}}  # fmt: skip
UNUSED = {  # in both; the lists are the translations that do not exist
    "eval_every", "model", "micro_batch_tokens", "exact", "kv_cache_gib", "eval_task", "max_prompt_tokens",
    "overlong_prompts", "reward_limit_s", "reward_errors", "offload_optimizer", "max_staleness",
    "tis_over_a_broken_backend", "max_kept", "max_num_seqs", "block_size", "prefix_cache", "cuda_graphs",
    "eval_problems", "eval_samples", "eval_with_trainer", "checkpoint_every",
    "self_noise_every", "probe_every", "probe_on_alarm", "inflight_keep", "inflight_otherwise",
    "tensorboard",
}  # fmt: skip
UNUSED_BY = {"trl": UNUSED | {"engine", "task"}, "verl": (UNUSED - {"model"}) | {"engine", "mask_truncated"}}


def config_with(changes: dict[str, object]) -> Config:
    """The default job with some options changed, flags of its group `parity` among them."""
    flags = {name: value for name, value in changes.items() if name in vars(ParityFlags())}
    options = {name: value for name, value in changes.items() if name not in flags}
    return Config.of(**options, parity=ParityFlags(**flags))


def test_other_values_are_given_for_every_option():
    assert set(OTHER) == Config().flat().keys() - OWN - {"parity"} | vars(ParityFlags()).keys()


@pytest.mark.parametrize("to", UNUSED_BY)
@pytest.mark.parametrize("name", OTHER)
def test_each_option_is_translated_or_named(name, to, tmp_path, capsys):
    needed = NEEDS.get(name, {})
    before, after = config_with(needed), config_with(needed | {name: OTHER[name]})
    options, notes = translate(after, to)
    named = f"{name} {OTHER[name]}: without effect on this translation" in notes
    assert named == (name in UNUSED_BY[to])
    to_other = to_trl if to == "trl" else to_verl
    before, after = view(before.flat()), view(after.flat())
    assert named or to_other(before) != to_other(after)
    assert options == to_other(after)[0]


def test_the_default_job_has_no_option_without_effect_and_neither_have_folders_and_versions(tmp_path, capsys):
    own = {"resume": True, "cache_dir": "elsewhere", "allow_untested_vllm": True}
    for to in UNUSED_BY:
        assert "without effect" not in translated(tmp_path, capsys, to, **own)[1]


def test_minibatches_that_are_no_whole_prompts_are_refused_for_verl(tmp_path, capsys):
    changes = {"num_prompts": 2, "group_size": 8, "num_minibatches": 8}
    assert translated(tmp_path, capsys, "trl", **changes)[0]["per_device_train_batch_size"] == 2
    with pytest.raises(SystemExit) as stop:
        translated(tmp_path, capsys, "verl", **changes)
    assert stop.value.code == 2
    assert "num_minibatches must divide num_prompts for verl, got 8" in capsys.readouterr().err


@pytest.mark.parametrize("text, complaint", [
    (None, "error: reading the run in {run} failed: FileNotFoundError"),
    ("{", "error: reading the run in {run} failed: json.decoder.JSONDecodeError"),
    ("{}", "error: reading the run in {run} failed: KeyError: 'config'"),
    ('{"config": {"parity": {}, "unknown": 1}}',
     "error: reading the run in {run} failed: TypeError: options must be those of Config, got unknown"),
    ('{"config": {"parity": {}, "group_size": 1}}', "error: reading the run in {run} failed: ValueError: group_size"),
])  # fmt: skip
def test_bad_input_is_one_sentence(text, complaint, tmp_path, capsys):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--to", "trl"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(complaint.format(run=tmp_path))
    assert error.count("\n") == 1
