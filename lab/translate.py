"""The experiment of a run as options of another trainer (docs/outgrow.md).

Prints TRL's GRPOConfig or verl's overrides for the options in RUN/config.json, then a comment for
each thing that the other trainer does otherwise or cannot express. The names are those of TRL
1.16.0 and verl 0.9.1.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import tyro

from config import Config, GrpoConfig, ParityFlags
from objectives import OBJECTIVES
from records import one_sentence, stage

Translation = tuple[dict[str, Any], list[str]]  # options by name, notes
# This repository's folders and versions: no note.
OWN = {"out", "resume", "cache_dir", "allow_untested_vllm"}


@dataclass(frozen=True)
class Options:
    """A run and the trainer that takes over."""

    run: tyro.conf.Positional[str]  # Folder of a run of train.py.
    to: Literal["trl", "verl"]  # TRL 1.16.0 or verl 0.9.1.


def read(run: str) -> Config:
    with stage(f"reading the run in {run}"):
        options = renamed(json.loads((Path(run) / "config.json").read_text())["config"])
        return Config.of(**options | {"parity": ParityFlags(**options["parity"])})


def renamed(stored: dict[str, Any]) -> dict[str, Any]:
    """The options of today. Older runs have `tis_floor`, and `tis masked` for two options."""
    options = {name: value for name, value in stored.items() if name != "tis_floor"}
    if stored.get("tis") == "masked":
        bounds = {"reject_low": stored["tis_floor"], "reject_high": stored["tis_cap"]}
        options |= {"tis": "token", "reject": "token"} | bounds
    return options


def view(flat: dict[str, Any]) -> SimpleNamespace:
    """Options by name, past the rules of Config: one may need the value of another."""
    options = SimpleNamespace(**flat | {"parity": SimpleNamespace(**flat["parity"])})
    options.clip = GrpoConfig.clip.fget(options)
    options.has_mask = GrpoConfig.has_mask.fget(options)
    options.rejection = GrpoConfig.rejection.fget(options)
    options.parity.trainer_fp32_head = ParityFlags.trainer_fp32_head.fget(options.parity)
    return options


def shared_notes(config: SimpleNamespace) -> list[str]:
    """What neither TRL nor verl has."""
    parity = config.parity
    return [sentence for holds, sentence in (
        (config.has_mask and parity.sampling_mask, "top_k, top_p, min_p: the trainer's softmax is"
         " over the whole vocabulary there, not over the tokens that the sampler kept"
         " (docs/masks.md)"),
        (config.inflight_groups, f"inflight_groups {config.inflight_groups}: this is another"
         " trainer there (TRL: async GRPO; verl: fully async); their pause mode and cache reset"
         " decide what becomes of kept KV"),
        (True, f"learning rate: here {config.lr_warmup_steps} steps of warm-up times a linear decay"
         " to 0, the same for all minibatches of a step"),
        (True, "a minibatch whose groups are all flat takes an optimizer step there, here it takes"
         " none"),
        (True, "no canary, no audit, no check of weights and loss there: record traces of the first"
         " steps (docs/audit.md)"),
    ) if holds]


def to_trl(config: SimpleNamespace) -> Translation:
    objective, parity, updates = config.objective, config.parity, config.num_minibatches
    low, high = config.clip
    sixteen_bits = config.dtype != "float32"
    rejection, rejects = config.rejection, config.reject != "off"
    masks = rejects and config.reject == config.tis
    options = dict(
        per_device_train_batch_size=config.num_prompts * config.group_size // updates,
        steps_per_generation=updates, max_steps=config.steps * updates, logging_steps=updates,
        num_generations=config.group_size, seed=config.seed,
        max_completion_length=config.max_new_tokens, temperature=config.temperature,
        top_k=config.top_k, top_p=config.top_p, min_p=config.min_p or None, learning_rate=config.lr,
        lr_scheduler_type="linear", warmup_steps=config.lr_warmup_steps * updates,
        weight_decay=config.weight_decay, max_grad_norm=config.grad_clip, beta=config.kl_coef,
        epsilon=0.2 if low is None else low, epsilon_high=high,
        loss_type={"gspo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo"}.get(objective, "bnpo"),
        importance_sampling_level="sequence" if objective == "gspo" else "token",
        scale_rewards="none" if objective == "dr_grpo" else "group",
        mask_truncated_completions=config.mask_truncated, shuffle_dataset=False,
        bf16=config.dtype == "bfloat16", fp16=config.dtype == "float16",
        gradient_checkpointing=config.gradient_checkpointing,
        use_vllm=config.engine != "transformers", vllm_mode="colocate",
        cast_lm_head_to_fp32=parity.trainer_fp32_head and sixteen_bits,
        vllm_importance_sampling_correction=config.tis != "off",
    )
    if config.tis != "off":
        bounds = rejection.bounds if masks else (None, config.tis_cap)
        mode = f"{config.tis}_{'mask' if masks else 'truncate'}"
        options |= {"vllm_importance_sampling_mode": mode,
                    "vllm_importance_sampling_clip_max": bounds[1],
                    "vllm_importance_sampling_clip_min": bounds[0]}
    return options, [sentence for holds, sentence in (
        (rejects and not masks, f"reject {config.reject} {rejection.bounds}: TRL has"
         " no rejection without weights of the same level"),
        (rejects and rejection.mean == "kept", "reject_mean kept: TRL's mean counts"
         " rejected tokens"),
        (masks and config.tis_cap < rejection.bounds[1], f"tis_cap {config.tis_cap} is below"
         " reject_high: TRL truncates no weight that it keeps"),
        (config.old_policy == "rollout", "old_policy rollout: TRL forms the ratio with its own"
         " recomputed values"),
        (config.tis == "off", "tis off: TRL then logs no mismatch"
         " (sampling/sampling_logp_difference)"),
        (not parity.processed_logprobs, "raw log-probabilities: TRL always asks for processed ones"
         " when colocated"),
        (parity.explicit_runtime, "runtime: GRPOConfig has no option for vLLM's prefix cache (TRL"
         " resets it at each load) nor for async scheduling"),
        (True, f"dtype {config.dtype}: GRPOConfig has no option for the engine's, and vLLM's `auto`"
         " rounds a float32 model to bfloat16 (docs/audit.md). bf16=True is autocast over float32"
         " weights"),
        (parity.fp32_head and sixteen_bits, "fp32 head: cast_lm_head_to_fp32 is the trainer's side"
         " only; GRPOConfig has no option for the engine's"),
        (config.objective == "grpo", "bnpo is the token mean of one device's minibatch; with"
         " several devices or gradient accumulation, dapo is nearer"),
        (config.objective == "cispo", "cispo: TRL counts tokens with A > 0 in its clip rate"),
    ) if holds] + shared_notes(config)


def to_verl(config: SimpleNamespace) -> Translation:
    objective, parity = config.objective, config.parity
    low, high = config.clip
    loss = objective if objective in ("gspo", "cispo") else "vanilla"
    reported = "processed" if parity.processed_logprobs else "raw"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    engine = f"+{rollout}.engine_kwargs.vllm"
    mean = {"token": "token-mean", "sequence": "seq-mean-token-mean",
            "constant": "seq-mean-token-sum-norm"}
    options = {
        "actor_rollout_ref.model.path": config.model, "data.train_batch_size": config.num_prompts,
        "data.max_response_length": config.max_new_tokens, "data.shuffle": False,
        "trainer.total_training_steps": config.steps, f"{rollout}.name": "vllm",
        f"{rollout}.n": config.group_size, f"{rollout}.temperature": config.temperature,
        f"{rollout}.top_p": config.top_p, f"{rollout}.top_k": config.top_k or -1,
        f"{rollout}.dtype": config.dtype, f"{rollout}.seed": config.seed,
        f"{rollout}.logprobs_mode": f"{reported}_logprobs",
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.enable_prefix_caching": not parity.explicit_runtime,
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.gradient_checkpointing,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": objective != "dr_grpo",
        f"{actor}.ppo_mini_batch_size": config.num_prompts // config.num_minibatches,
        f"{actor}.ppo_epochs": 1,
        f"{actor}.policy_loss.loss_mode": loss,
        f"{actor}.loss_agg_mode": mean[OBJECTIVES[objective].normalizer],
        f"{actor}.clip_ratio_low": 1.0 if low is None else low,
        f"{actor}.clip_ratio_high": high - 1 if objective == "cispo" else high,
        f"{actor}.clip_ratio_c": 1e6,
        f"{actor}.use_kl_loss": config.kl_coef > 0, f"{actor}.kl_loss_coef": config.kl_coef,
        f"{actor}.kl_loss_type": "low_var_kl", f"{actor}.entropy_coeff": 0,
        f"{actor}.grad_clip": config.grad_clip, f"{actor}.optim.lr": config.lr,
        f"{actor}.optim.weight_decay": config.weight_decay,
        f"{actor}.optim.lr_warmup_steps": config.lr_warmup_steps,
    }
    correction, correction_notes = verl_correction(config)
    options |= correction
    if objective == "dr_grpo":
        options[f"{actor}.loss_scale_factor"] = config.max_new_tokens
    if parity.explicit_runtime:
        options[f"{engine}.async_scheduling"] = False
    if parity.fp32_head and config.dtype != "float32":
        options[f"{engine}.hf_overrides.head_dtype"] = "float32"
    return options, correction_notes + [sentence for holds, sentence in (
        (config.min_p, f"min_p {config.min_p}: rollout has no such option"),
        (parity.trainer_fp32_head and config.dtype != "float32", "fp32 head: verl 0.9.1 has no"
         " option for the trainer's side"),
        (True, "clip_ratio_c 1e6 switches verl's second clip (dual clip) off"),
        (objective != "dr_grpo", "advantages are divided by std + 1e-6 there, here by std + 1e-4"),
        (True, "verl's schedules are constant and cosine"),
        (True, f"task {config.task}: verl reads parquet files (data.train_files) and"
         " reward.custom_reward_function"),
    ) if holds] + shared_notes(config)


# verl's rules by --reject. The bounds of those that end in k1 are bounds of 1 / rho.
VERL_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1",
              "trm": "seq_max_k3"}


def verl_correction(config: SimpleNamespace) -> Translation:
    """Options of verl's rollout correction (bypass, importance weights, rejection), and notes."""
    rejection, rule = config.rejection, VERL_RULES.get(config.reject)
    low, high = rejection.bounds
    # IcePop: weights outside the bounds are 0, the mean counts all tokens, and there is no cap.
    icepop = config.reject == config.tis and rejection.mean == "all" and config.tis_cap >= high
    options = {
        "bypass_mode": config.old_policy == "rollout",
        "rollout_is": "null" if config.tis == "off" else config.tis,
        "rollout_is_threshold": f"'{low:g}_{high:g}'" if icepop else config.tis_cap,
    }
    notes = []
    if config.reject != "off" and not rule:
        notes.append(f"reject {config.reject} {rejection.bounds}: verl has no such rule")
    if rule and not icepop:
        options["rollout_rs"] = rule
        reciprocal = rule.endswith("k1")
        options["rollout_rs_threshold"] = f"'{1 / high:g}_{1 / low:g}'" if reciprocal else high
        if rejection.mean == "all":
            notes.append("reject_mean all: verl's mean counts kept tokens only")
    prefix = "algorithm.rollout_correction"
    return {f"{prefix}.{name}": value for name, value in options.items()}, notes


def translate(config: Config, to: Literal["trl", "verl"]) -> Translation:
    """Adds a note for each option whose default gives the same translation."""
    grpo, given, default = config.grpo, config.flat(), Config().flat()
    if to == "verl" and grpo.num_prompts % grpo.num_minibatches:
        raise ValueError("num_minibatches must divide num_prompts for verl,"
                         f" got {grpo.num_minibatches}")
    translated = to_trl if to == "trl" else to_verl
    options, own_notes = translated(view(given))
    notes = list(own_notes)
    others = {name: given | {name: value} for name, value in default.items() if name not in OWN}
    parity = given["parity"]
    others |= {name: given | {"parity": parity | {name: value}}
               for name, value in default["parity"].items()}
    for name, other in others.items():
        value = given[name] if name in given else parity[name]
        differs = name != "parity" and other != given
        if differs and translated(view(other)) == (options, own_notes):
            notes.append(f"{name} {value}: without effect on this translation")
    return options, notes


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for bad input."""
    with one_sentence(2):
        words = tyro.cli(Options, args=arguments, description=__doc__)
        config = read(words.run)
        options, notes = translate(config, words.to)
        if words.to == "trl":
            print("from trl import GRPOConfig\n\nconfig = GRPOConfig(")
            print(*(f"    {name}={value!r}," for name, value in options.items()), ")", sep="\n")
        else:
            lines = [f"    {name}={value}" for name, value in options.items()]
            print("python -m verl.trainer.main_ppo", *lines, sep=" \\\n")
        print(*(f"# {note}" for note in notes), sep="\n")
        return 0


if __name__ == "__main__":
    sys.exit(main())
