"""lab.translate: a run's options in the words of TRL and verl, against values written by hand."""

import json
import re
from pathlib import Path

import pytest

from lab.compare import STORED
from lab.translate import main


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
    ({"tis": "masked", "tis_cap": 5.0}, {"vllm_importance_sampling_mode": "token_mask", "min_p": None,
     "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}, ""),
    ({"tis": "sequence"}, {"vllm_importance_sampling_mode": "sequence_truncate"}, ""),
    ({"old_policy": "rollout"}, {}, "old_policy rollout: TRL forms the ratio with its own recomputed values"),
    ({"dtype": "bfloat16"}, {"bf16": True, "cast_lm_head_to_fp32": True}, "fp32 head: cast_lm_head_to_fp32 is the"),
    ({"top_p": 0.9}, {"top_p": 0.9}, "the trainer's softmax is over the whole vocabulary"),
    ({"inflight_groups": 4}, {}, "inflight_groups 4"),
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
    ({"tis": "masked"}, {"algorithm.rollout_correction.rollout_is": "token",
                         "algorithm.rollout_correction.rollout_is_threshold": "'0.5_2.0'"}, ""),
    ({"old_policy": "rollout"}, {"algorithm.rollout_correction.bypass_mode": "True"}, ""),
    ({"dtype": "bfloat16"}, {"+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.head_dtype": "float32"},
     "fp32 head: verl 0.9.1 has no option"),
])  # fmt: skip
def test_options_in_verl(changes, expected, noted, tmp_path, capsys):
    options, notes = translated(tmp_path, capsys, "verl", **changes)
    assert {name: options[name] for name in expected} == expected
    assert noted in notes


@pytest.mark.parametrize("text, complaint", [
    (None, "error: reading the run in {run} failed: FileNotFoundError"),
    ("{", "error: reading the run in {run} failed: json.decoder.JSONDecodeError"),
    ("{}", "error: reading the run in {run} failed: KeyError: 'config'"),
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
