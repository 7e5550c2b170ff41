"""Colocated GRPO in one process: a transformers trainer and a vLLM V1 engine take turns on one device.

One step is: sample, sleep, score, update, wake, load. It is spelled out in `train_step`, the page to read.
"""

import json
import signal
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal

import torch
import transformers
import tyro

from engine_adapter import Engine, ParityFlags, Rollout, Sampling
from models import digits_config, read_model, toy_config, toy_tokenizer
from objectives import OBJECTIVES, group_advantages, mismatch_metrics
from parity import alarms, current_weights, diagnose, plot_verdict, sample_trace
from plan import print_plan
from records import Clock, locked, memory_gib, one_sentence, plot_curves
from reference import ReferenceEngine
from replay import Weights, save_trace
from rl import Batch, Policy, UpdateOptions, frozen_logprobs, make_batch, self_noise, update
from run import Live, Run, build, encode_prompts, prepare, reference_engine, save_checkpoint, save_policy
from tasks import BUILT_IN, CALL_LIMIT_S, Problem, load_task


@dataclass(frozen=True)
class Config(UpdateOptions):
    """The options of a run. The defaults are the toy job: a small model learns to add on two CPU cores."""

    out: str = "runs/toy"
    """Folder of the run: config.json, metrics.jsonl, curves.png, checkpoints/."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`; the other options must be those of the first start."""
    seed: int = 0
    """Decides the toy model, the held-out split, the problems of each step and the seed of every sample."""
    steps: int = 100
    """Batches of rollouts; the learning rate decays to zero over them."""
    model: str = "toy"
    """`toy`, a folder with a Hugging Face causal language model, or a hub name."""
    task: str = "toy"
    """`toy` (addition), `digits` (for ablations), `countdown`; a JSONL file of {"question", "answer"} with numbers as
    answers; a Python file with `sample` and `reward`; or a hub's dataset with such columns, NAME or NAME:CONFIG."""
    eval_task: str | None = None
    """JSONL file of held-out problems; if not given, a tenth of `task` is held out."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; if not given, what the model's context leaves beside max_new_tokens."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """What to do with problems whose prompt is longer; dropped ones are counted."""
    reward_limit_s: float = CALL_LIMIT_S
    """Seconds after which the import of a task file, or one call of its sample or reward, counts as hanging."""
    reward_errors: Literal["stop", "count"] = "stop"
    """If a reward raises, hangs or is not a finite number: stop the run, or count it and go on with reward 0."""
    cache_dir: str = str(Path(__file__).parent / ".cache")
    """Where the toy model is kept once it has been taught."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the model on both sides; 16 bits keep fp32 masters in the optimizer, float16 scales its loss as well."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for backward and compute the layer again there: less memory, more time."""
    offload_optimizer: bool = False
    """Keep master weights and moments in pinned host memory but during the update: lets large models fit a GPU."""

    num_prompts: int = 128
    """Problems per step (P)."""
    group_size: int = 8
    """Samples per problem (G); their mean is the baseline, so a single one would carry no signal."""
    mask_truncated: bool = False
    """Leave responses cut off at max_new_tokens out of the loss; their reward stays in the baseline (DAPO's filter)."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """Who samples: vLLM, or the trainer's own modules (reference.py): slow, without mismatch, the known-good curve."""
    inflight_groups: int = 0
    """Groups on their way beyond the P that a step consumes (N), unfinished while the weights change; 0: none."""
    max_staleness: int = 8
    """Updates after which a group in flight is dropped, counted from its oldest token."""
    parity: ParityFlags = field(default_factory=ParityFlags)
    """The four backend fixes, each switchable alone."""
    tis_over_a_broken_backend: bool = False
    """Allow `tis` although a parity flag is off: only to study how a correction hides a broken backend."""

    lr: float = 1e-3
    """AdamW's peak learning rate; right for the toy, a thousand times too high for a pretrained model."""
    lr_warmup_steps: int = 5
    """Linear warm-up: Adam's second moments are noise at first."""
    weight_decay: float = 0.0
    """Decoupled; a few hundred steps of RL have nothing to regularise."""
    eval_every: int = 20
    """Steps between evaluations on held-out problems; also before the first step and after the last."""
    eval_problems: int = 256
    """Held-out problems per evaluation (or all there are), answered through the engine: sampled, and greedily."""
    eval_samples: int = 1
    """Samples of each; the greedy answer is one."""
    eval_with_trainer: bool = True
    """Evaluate without the engine as well: a broken backend can learn to please itself (eval_gap); slow if large."""
    checkpoint_every: int = 20
    """Steps between checkpoints, and after the last; the newest two are kept."""

    self_noise_every: int = 0
    """Steps between measurements of the noise floor of the mismatch (rl.self_noise); 0 for none."""
    probe_every: int = 0
    """Steps between probes of the mismatch (parity.py), the first after the first step; 0 for none. In `out`/probe."""
    probe_on_alarm: bool = False
    """Probe after a step whose mismatch is beyond parity.ALARMS. Either keeps a second copy of the weights."""

    max_num_seqs: int = 512
    """Sequences the engine decodes at once; further rollouts queue, so memory does not grow with their number."""
    block_size: int | None = None
    """Tokens per block of the KV cache; if not given, vLLM's choice (CPU 128, GPU 16). Prompts are cached by blocks."""
    kv_cache_gib: float = 0.25
    """The engine's KV cache: given, not guessed from memory that the trainer will need."""
    enforce_eager: bool = True
    """No CUDA graphs: starts in seconds instead of minutes; switch off for long GPU runs."""
    allow_untested_vllm: bool = False
    """Try a vLLM version outside the tested range."""
    plan: bool = False
    """Print the memory of each phase on a GPU, from the model's configuration alone, and stop: no weights, no GPU."""
    plan_gib: float = 80.0
    """The GPU's memory that the plan is held against."""

    def __post_init__(self):
        for rule, holds, names in (
            ("a name", bool, "out model task cache_dir"),
            ("at least 1", lambda value: value >= 1, "steps num_prompts max_new_tokens num_minibatches"
             " micro_batch_tokens eval_every eval_problems eval_samples checkpoint_every max_num_seqs"),
            ("positive and finite", lambda value: 0 < value < float("inf"),
             "temperature lr grad_clip tis_cap kv_cache_gib reward_limit_s plan_gib"),
            ("at least 1, if given", lambda value: value is None or value >= 1, "max_prompt_tokens"),
            ("non-negative and finite", lambda value: 0 <= value < float("inf"),
             "kl_coef tis_floor weight_decay lr_warmup_steps seed probe_every self_noise_every"
             " inflight_groups max_staleness"),
            ("at least 2 (the group's mean is the baseline)", lambda value: value >= 2, "group_size"),
            ("below 2^32 (numpy's limit)", lambda value: value < 2**32, "seed"),
        ):
            for name in names.split():
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        if (rows := self.num_prompts * self.group_size) % self.num_minibatches:
            raise ValueError(f"num_minibatches must divide num_prompts * group_size = {rows} (all optimizer steps weigh"
                             f" alike), got {self.num_minibatches}")
        if not (0 <= self.clip[0] < 1 and 0 < self.clip[1] < float("inf")):
            raise ValueError(f"clip_low must be in [0, 1) and clip_high positive and finite, got {self.clip}")
        if self.objective == "cispo" and self.clip_low is not None:
            raise ValueError(f"clip_low must not be given with cispo (it has an upper cap only), got {self.clip_low}")
        if self.eval_task is not None and (self.task in BUILT_IN or self.task.endswith(".py")):
            raise ValueError(f"eval_task must not be given with task {self.task} (it holds problems out itself), got"
                             f" {self.eval_task}")
        if self.tis != "off":
            self._check_tis()
        self._check_backend()

    def _check_tis(self) -> None:
        """Fix the backend first, then correct what is left."""
        if self.old_policy == "rollout":
            raise ValueError(f"tis must be off with old_policy rollout (its ratio holds the mismatch already: a weight"
                             f" would count it twice), got {self.tis}; try --old-policy recompute")
        if self.parity.off() and not self.tis_over_a_broken_backend:
            raise ValueError(f"tis must be off before parity (a correction hides the broken backend), got {self.tis}"
                             f" without {', '.join(self.parity.off())}; to study that, --tis-over-a-broken-backend")
        if self.tis == "masked" and self.tis_floor >= self.tis_cap:
            raise ValueError(f"tis_floor must be below tis_cap = {self.tis_cap}, got {self.tis_floor}")

    def _check_backend(self) -> None:
        if self.parity.inflight_keep and self.parity.inflight_otherwise != "abort":
            raise ValueError(f"inflight_otherwise must not be given with inflight_keep (it would do nothing), got"
                             f" {self.parity.inflight_otherwise}; try --parity.no-inflight-keep")
        if self.engine == "transformers" and set(self.parity.off()) & {"processed_logprobs", "explicit_runtime"}:
            raise ValueError(f"engine must be vllm to leave out a fix of vLLM's (the reference has no such faults), got"
                             f" transformers without {', '.join(self.parity.off())}")

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        return self.lr * min(1.0, step / (self.lr_warmup_steps + 1)) * (1 - (step - 1) / self.steps)


# ------------------------------------------------------------------------------------------------ the loop
def train(run: Run, live: Live, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    config = run.config
    if first_step == 1:
        run.log({"step": 0} | evaluate(run, live, 0))
    for step in range(first_step, config.steps + 1):
        earlier = current_weights(live.policy) if config.probe_every or config.probe_on_alarm else None
        metrics, _, problems = train_step(run, live, step)
        last = step == config.steps
        if earlier and (why := probe_reason(config, step, metrics)):
            metrics["probe"] = probe(run, live, step, why, problems, earlier)
        if last or step % config.eval_every == 0:
            metrics |= evaluate(run, live, step)
        run.log(metrics)
        if last or step % config.checkpoint_every == 0:
            save_checkpoint(run, live, step)
    live.engine.close()
    save_policy(run, live.policy, run.out / "policy")
    plot_curves(run.out)


def train_step(run: Run, live: Live, step: int) -> tuple[dict[str, Any], Batch, list[Problem]]:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    config, policy, engine, flight, clock = run.config, live.policy, live.engine, live.flight, Clock()
    problems = run.task.sample(live.rng, config.num_prompts + config.inflight_groups - len(flight.groups))
    seeds = [sample_seed(config.seed, "train", step, p) for p in range(len(problems))]
    flight.submit(problems, run.encode(problems), seeds)
    with clock("generate"):
        groups = flight.take(config.num_prompts)  # P
    with clock("sleep"):
        engine.sleep()

    problems = [group.problem for group in groups]  # P
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # B = P * G, group-major
    with clock("reward"):
        scores = run.score([problem for problem in problems for _ in range(config.group_size)], rollouts)
    rewards = torch.tensor(scores.rewards)  # (B,)
    sampled = rollout_metrics(rollouts, rewards, config.group_size, engine.weight_version)
    advantages = group_advantages(rewards, config.group_size, OBJECTIVES[config.objective].divide_by_std)  # (B,)
    batch = make_batch(rollouts, advantages, policy.device)  # (B, T)
    with clock("old_logprobs"):
        old_logprobs, entropy = frozen_logprobs(policy, batch, config)  # (B, T), before any update
        batch = replace(batch, old_logprobs=old_logprobs)
        if live.reference is not None:
            batch = replace(batch, ref_logprobs=frozen_logprobs(live.reference, batch, config)[0])
    sampled |= measure_mismatch(batch, rollouts, engine.weight_version)
    if config.self_noise_every and (step - 1) % config.self_noise_every == 0:
        sampled |= measure_self_noise(policy, batch, config)
    entropy = (entropy.sum() / batch.mask.sum()).item()
    if config.mask_truncated:
        batch = batch.without(torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]))
    with clock("update"):
        metrics = update(policy, live.optimizer, batch, config, config.lr_at(step))

    with clock("sync"):
        engine.wake()
        loaded = engine.load(policy.weights(), policy.score, changed=metrics["updates"] > 0)
        flight.after_update()

    metrics |= sampled | flight.counts()
    metrics |= {"step": step, "entropy": entropy, "lr": config.lr_at(step), "reward_errors": scores.num_errors}
    metrics |= clock.figures() | loaded | {"memory_gib": memory_gib(policy.device)}
    return metrics, batch, problems


def measure_mismatch(batch: Batch, rollouts: list[Rollout], version: int) -> dict[str, float | None]:
    """`mismatch_metrics` of the batch and, as fresh_..., of the rollouts sampled by the present weights alone: what is
    older is stale as well, and staleness is not the backend's fault. None if all is older."""
    fresh = torch.tensor([[min(rollout.versions) == version] for rollout in rollouts]).to(batch.mask)  # (B, 1)
    policies = batch.old_logprobs, batch.behavior_logprobs
    metrics = mismatch_metrics(*policies, batch.mask)
    backend = mismatch_metrics(*policies, batch.mask * fresh) if fresh.any() else dict.fromkeys(metrics)
    return metrics | {f"fresh_{name}": value for name, value in backend.items()}


def measure_self_noise(policy: Policy, batch: Batch, options: UpdateOptions) -> dict[str, float]:
    """What the mismatch would be if the trainer itself had sampled, along another path of its arithmetic."""
    noise = self_noise(policy, batch, options)
    metrics = mismatch_metrics(noise, torch.zeros_like(noise), batch.mask)
    return {"self_noise_abs_mean": metrics["mismatch_abs_mean"], "self_noise_max": metrics["mismatch_max"]}


def evaluate(run: Run, live: Live, step: int) -> dict[str, float]:
    """Mean reward on held-out problems at the run's temperature: through the engine and, as a broken backend can learn
    to please itself, by the trainer alone; `eval_gap` is how much better the engine looks. And greedily, through the
    engine. Every answer goes to samples.jsonl."""
    problems = run.task.held_out[: run.config.eval_problems]
    seeds = [sample_seed(run.config.seed, "eval", step, p) for p in range(len(problems))]
    errors = 0

    def mean_reward(engine: Engine | ReferenceEngine, mode: str, samples: int, sampling: Sampling) -> float:
        nonlocal errors
        asked = [problem for problem in problems for _ in range(samples)]
        rollouts = engine.generate(run.encode(problems), samples, sampling, seeds)
        scores = run.score(asked, rollouts)
        run.log_samples(step, mode, asked, rollouts, scores)
        errors += scores.num_errors
        return mean(scores.rewards)

    samples = run.config.eval_samples
    greedy = mean_reward(live.engine, "greedy", 1, replace(run.sampling, temperature=0.0))
    alone = through_engine = mean_reward(live.engine, "sampled", samples, run.sampling)
    if run.config.eval_with_trainer and run.config.engine == "vllm":  # the reference engine is the trainer alone
        trainer = reference_engine(run, live.policy)
        trainer.load(live.policy.weights(), live.policy.score)
        alone = mean_reward(trainer, "trainer", samples, run.sampling)
    metrics = {"eval_reward": through_engine, "eval_reward_greedy": greedy, "eval_reward_errors": errors}
    if run.config.eval_with_trainer:
        metrics |= {"eval_reward_trainer": alone, "eval_gap": through_engine - alone}
    return metrics


# ------------------------------------------------------------------------------------------------ the probe
PROBE_REQUESTS = 128  # over the problems of the step just taken: met again, they show a stale prefix cache


def probe_reason(config: Config, step: int, metrics: dict[str, Any]) -> str | None:
    """Why the engine is to be probed after this step, if it is."""
    backend = {name: metrics[f"fresh_{name}"] for name in ("mismatch_kl", "mismatch_abs_mean", "ess")}
    if config.probe_on_alarm and None not in backend.values() and (rung := alarms(backend)):
        return f"alarm of {', '.join(rung)}"
    return "as planned" if config.probe_every and (step - 1) % config.probe_every == 0 else None


def probe(run: Run, live: Live, step: int, why: str, problems: list[Problem], earlier: Weights) -> str:
    """Sample the step's problems again, diagnose them (`earlier`: the weights before the step's update), keep the trace
    and the verdict; returns the verdict's status."""
    problems = (problems * -(-PROBE_REQUESTS // len(problems)))[:PROBE_REQUESTS]
    seeds = [sample_seed(run.config.seed, "probe", step, p) for p in range(len(problems))]
    trace = sample_trace(live.engine, run.encode(problems), run.sampling, seeds)
    verdict = diagnose(live.policy, trace, [earlier], live.engine.weight_version, trainer="temperature")
    path = run.out / "probe" / f"step_{step:06d}"
    path.parent.mkdir(exist_ok=True)
    save_trace(f"{path}.npz", trace)
    plot_verdict(verdict, f"{path}.png")
    path.with_suffix(".json").write_text(json.dumps({"step": step, "why": why} | verdict.record(), indent=1))
    print(f"probe after step {step} ({why}): {verdict.headline}", flush=True)
    return verdict.status


def rollout_metrics(rollouts: list[Rollout], rewards: torch.Tensor, group_size: int, version: int) -> dict[str, float]:
    """What the rollouts alone tell; staleness counts updates between sampling a token and training on it."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    versions = [token_version for rollout in rollouts for token_version in rollout.versions]
    groups = rewards.view(-1, group_size)  # (P, G)
    return {
        "reward": rewards.mean().item(),
        "flat_frac": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
        "trunc_frac": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
        "staleness_max": version - min(versions),
        "staleness_mean": version - mean(versions),
    }


def sample_seed(run_seed: int, stream: str, step: int, index: int) -> int:
    """The seed of a group, far from all others (its samples use seed, seed + 1, ...): 48 bits of a hash."""
    return int.from_bytes(sha256(f"{run_seed}/{stream}/{step}/{index}".encode()).digest()[:6], "big")


# ------------------------------------------------------------------------------------------------ commands
def plan(config: Config) -> None:
    """Print the memory of each phase. Raises: ValueError if configuration or prompts cannot be had."""
    if config.model == "toy":
        model_config, tokenizer = digits_config() if config.task == "digits" else toy_config(), toy_tokenizer()
    else:
        model_config, tokenizer = read_model(config.model, with_weights=False)
    longest = config.max_prompt_tokens
    if longest is None:
        if tokenizer is None:
            raise ValueError(f"max_prompt_tokens must be given for a plan where no tokenizer is, got {config.model}")
        task = load_task(config.task, config.seed, config.eval_task, config.reward_limit_s)
        prompt_ids = encode_prompts(tokenizer, task)
        longest = max(map(len, prompt_ids.values()))
    print_plan(config, model_config, longest, config.plan_gib)


def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused or failed during set-up, 1 failed later, 130 stopped by a signal."""
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.plan:
        with one_sentence(2):
            plan(config)
        return
    with one_sentence(2, config.out), locked(config.out):
        run = prepare(config)
        live, first_step = build(run)
        with one_sentence(1, config.out):
            train(run, live, first_step)


if __name__ == "__main__":
    main()
