"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

One step: sample, sleep, score, update, wake, load. `train_step` is the whole algorithm and `update`
its gradient. `Core` has the options of the method. All others stand with what they change, in
tasks/, verify/ and the files of extras/; extras/__init__.py says how an option enters a run.
"""

from importlib.util import find_spec

# Checked first, so that the user gets one sentence. vLLM is checked later: not all engines need it.
NEEDED = "torch", "transformers", "tyro", "einops", "matplotlib"
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise SystemExit(f"error: this Python has no {', '.join(missing)}: install what is missing (the"
                     " versions that are tested are in requirements.txt), or run `make setup`,"
                     " which makes .venv")

# isort: split
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor

import extras
import model_folder
import tasks.options
import verify
from engine_adapter import Engine, ParityFlags, Rollout, Sampling, Source, reseed
from extras import Flat
from objectives import CORRECTIONS, OBJECTIVES, Clip, centre, kl_loss, loss_weights
from report import metrics
from report.clock import Clock
from report.curves import draw_at_evaluation
from report.errors import (
    LARGEST,
    MANY,
    SMALLEST,
    end_of_process,
    exit_with_message,
    locked,
    printable,
    replace_file,
    stage,
    stop_on_signals,
    within,
)
from report.files import TABLES, append_rows, record_of, refuse_used_folder, save_checkpoint
from report.log import answer_line, log, report, settings_lines
from rl import (
    Batch,
    EngineWeights,
    Minibatches,
    Optimizer,
    Policy,
    in_micro_batches,
    make_batch,
)
from tasks import Problem, Task
from tasks.job import digests, find_job, teach_toy
from verify import distribution
from verify.settings import of_trainer
from verify.start import check_vllm_version


# ---------------------------------------------------------------------------------- options
@dataclass(frozen=True)
class Config(extras.ByName):
    """All options of a run. The defaults are the toy job: a small model unlearns a wrong habit on
    two CPU cores.
    """

    out: str = "runs/toy"  # Folder for config.json, metrics.jsonl, curves.png, checkpoints/.
    seed: int = 0  # Decides the toy, the held-out split, the problems and the samples.
    steps: int = 60  # Batches; 0: one evaluation. With --lr-decay none a resumed run may have more.
    model: str = "toy"  # `toy`, a folder with a Hugging Face causal language model, or a hub name.
    # `toy` (addition), `digits`; a file of rows with a question and an answer (JSON lines, a JSON
    # array or CSV, each also as .gz; parquet); a dataset: a folder, or NAME or NAME:CONFIG on a
    # hub; a Python file with `sample` or `problems`, and `reward` or `rewards`.
    task: str = "toy"
    # Of the model on both sides. In 16 bits the optimizer keeps fp32 masters.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpoint_every: int = 20  # Steps between checkpoints, and after the last; two are kept.
    # What is sampled.
    num_prompts: int = 128  # Problems per step (P).
    group_size: int = 8  # Samples per problem (G).
    max_new_tokens: int = 8  # Longest response in tokens; the toy answers with 5, its end included.
    temperature: float = 0.7  # Of sampler and trainer; at 1, raw and processed values are equal.
    # What is learnt from it.
    objective: Literal[tuple(OBJECTIVES)] = "grpo"  # Formulas and sources in objectives.py.
    # The ratio is that of trainer and engine; if off, of the trainer after and before the update.
    two_policy: bool = False
    clip_low: float | None = None  # Lower clip distance; if not given, the objective's usual one.
    clip_high: float | None = None  # Upper clip distance (cispo: the absolute cap); as clip_low.
    kl_coef: float = 0.0  # Weight of the KL to the initial policy, a frozen copy of it in memory.
    # k3: the gradient of the estimator alone, as in GRPO; on policy it is that of KL(ref || pi).
    # exact: of KL(pi || ref), by the ratio, as in TRL.
    kl_gradient: Literal["k3", "exact"] = "k3"
    # Corrections of a mismatch, refused while a parity fix is off; docs/objectives.md.
    tis: Literal[tuple(CORRECTIONS)] = "off"  # Importance weight: of the token, or of its response.
    tis_cap: float = 2.0  # Largest importance weight; a larger one is truncated to it.
    # Allow them although a fix is off: only to study how a correction hides a broken backend.
    correct_a_broken_backend: bool = False
    # No loss for truncated responses; their rewards still count in the group's mean (DAPO).
    mask_truncated: bool = False
    num_minibatches: int = 2  # Optimizer steps per batch; from the second on the clip can act.
    micro_batch_tokens: int = 4096  # Tokens per forward and backward: memory, speed and rounding.
    lr: float = 1e-3  # AdamW's peak, for the toy; docs/run.md has rates of pretrained models.
    lr_warmup_steps: int = 5  # Linear warm-up: Adam's second moments are noise at first.
    lr_decay: Literal["linear", "none"] = "linear"  # To zero after the last step, or a constant lr.
    # The engine.
    kv_cache_gib: float = 0.25  # Size of the KV cache; fixed: the trainer needs the free memory.
    max_num_seqs: int = 512  # Sequences the engine decodes at once; the others wait.
    block_size: int | None = None  # Tokens per KV block; if not given 16 (GPU), 128 or 32 (CPU).
    # Evaluation.
    eval_every: int = 20  # Steps between evaluations, also before the first step and at the end.
    # Held-out problems per evaluation (or all there are): always the same, chosen by the seed.
    eval_problems: int = 256
    eval_samples: int = 1  # Sampled answers per problem; the greedy evaluation has one.

    parity: ParityFlags = field(default_factory=ParityFlags)
    data: Flat[tasks.options.Options] = field(default_factory=tasks.options.Options)
    checks: Flat[verify.Options] = field(default_factory=verify.Options)
    extra: Flat[extras.Options] = field(default_factory=extras.Options)

    def __post_init__(self):
        printable(self, "out", "model", "task")
        within(self, 0, 999_999, "steps")  # six digits in the name of a checkpoint
        within(self, 0, 2**32 - 1, "seed")  # numpy's
        within(self, 2, 2**16, "group_size")  # its mean is the baseline
        within(self, 1, MANY, "num_prompts", "max_new_tokens", "num_minibatches",
               "micro_batch_tokens", "checkpoint_every", "max_num_seqs",
               "eval_every", "eval_problems")
        within(self, 1, 2**16, "eval_samples")
        within(self, 0, MANY, "lr_warmup_steps")
        within(self, 0.01, 2, "temperature")  # vLLM's range
        within(self, SMALLEST, LARGEST, "lr", "clip_high", "tis_cap")
        within(self, 0, LARGEST, "kl_coef")
        within(self, 0, 1, "clip_low")
        within(self, SMALLEST, 1e6, "kv_cache_gib")
        within(self, 16, MANY, "block_size")
        objective = OBJECTIVES[self.objective]
        rows = self.num_prompts * self.group_size
        if self.block_size and self.block_size % 16:
            raise ValueError("block_size must be a multiple of 16 (vLLM's CPU build: of 32), got"
                             f" {self.block_size}")
        if self.clip_low is not None and objective.clip[0] is None:
            raise ValueError(f"clip_low must not be given with {self.objective} (it has an upper"
                             f" cap only), got {self.clip_low}")
        if self.clip_high is not None and self.objective == "reinforce":
            raise ValueError("clip_high must not be given with reinforce (its ratio is not bounded;"
                             f" cispo has a cap), got {self.clip_high}")
        if rows % self.num_minibatches:
            raise ValueError(f"num_minibatches must divide num_prompts * group_size = {rows} (all"
                             f" optimizer steps weigh alike), got {self.num_minibatches}")
        if not self.kl_coef and self.kl_gradient != "k3":
            raise ValueError("kl_gradient needs kl_coef (without it there is no KL term), got"
                             f" {self.kl_gradient}")
        if self.tis == "off" and self.tis_cap != Config.tis_cap:
            raise ValueError("tis_cap needs tis (without it there is no weight), got"
                             f" {self.tis_cap}; try --tis token")
        if self.tis != "off":
            self.check_correction("tis", self.parity.off())
        extras.call("check", self, self)

    def check_correction(self, name: str, off: list[str]) -> None:
        """Fix the backend first, then correct the remaining mismatch, by the option of this name.

        `off`: the fixes that are off, or what counts as one. Raises: ValueError.
        """
        value = self.flat()[name]
        if self.two_policy:
            raise ValueError(f"{name} must be off with two_policy (a weight would count the"
                             f" mismatch twice: its ratio holds it), got {value}")
        if off and not self.correct_a_broken_backend:
            raise ValueError(f"{name} must be off while a fix is off (a correction hides the broken"
                             f" backend), got {name} {value} without {', '.join(off)}; to study"
                             " that, --correct-a-broken-backend")

    @property
    def clip(self) -> Clip:
        """(low, high), the objective's usual bounds where the user gives none."""
        low, high = OBJECTIVES[self.objective].clip
        return (low if self.clip_low is None else self.clip_low,
                high if self.clip_high is None else self.clip_high)

    def lr_at(self, step: int) -> float:
        """Linear warm-up times linear decay to zero after the last step; steps count from 1."""
        warm_up = min(1.0, step / (self.lr_warmup_steps + 1))
        decay = 1 - (step - 1) / self.steps if self.lr_decay == "linear" else 1.0
        return self.lr * warm_up * decay


# ---------------------------------------------------------------------------------- a run
# batch -> which tokens get no policy gradient (B, T), bool, and those that the loss's mean counts
# (B, T)
TokenFilter = Callable[[Batch], tuple[Tensor, Tensor]]


@dataclass
class Run(extras.OneOwner):
    """What a run is put together from: its job, and parts. The `install` of an extra replaces a
    part, or adds to a list or a dictionary.
    """

    config: Config
    folder: str  # of the model
    task: Task
    sampling: Sampling
    # Why the sides differ: fixes that are off, and what an option changes on purpose, "trainer"
    # (its distribution) or "weights" (the engine's).
    not_stated: set[str]
    policy: dict[str, Any]  # arguments of Policy
    # Each row of metrics.jsonl, after its checkpoint: what only reports, and ends no run.
    reports: list[Callable]
    send: EngineWeights | None = None  # what the engine gets of the weights
    optimizer: Callable = Optimizer
    engine_kind: type[Engine] = Engine
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of its class
    further: dict[str, Any] = field(default_factory=dict)  # and of vLLM
    source: Callable = Source  # of rollouts
    token_filter: TokenFilter | None = None
    further_files: dict[str, str] = field(default_factory=dict)  # digests, for --resume
    find_start: Callable = refuse_used_folder  # the run; may set `checkpoint`
    # The state.pt from which the run goes on, with its `folder`.
    checkpoint: dict[str, Any] | None = None
    # The run, the model, and the folder that is written: OUT/policy, a checkpoint's.
    save_policy: Callable = model_folder.save_policy
    save_weights: Callable = model_folder.save_policy
    load_weights: Callable = model_folder.load_weights  # the model, and a checkpoint's folder
    # Functions, their arguments, and when they are called:
    with_model: list[Callable] = field(default_factory=list)  # the model: before Policy is made
    # The trainer, the record of config.json: before it is written.
    at_begin: list[Callable] = field(default_factory=list)
    observers: list[Callable] = field(default_factory=list)  # each Step: more metrics
    evaluations: list[Callable] = field(default_factory=list)  # see `evaluate`
    writers: list[Callable] = field(default_factory=list)  # each row, before its checkpoint
    at_end: list[Callable] = field(default_factory=list)  # no argument: after the policy is saved
    endings: dict[str, str] = field(default_factory=dict)  # of a step's line, see report/log.py

    @property
    def out(self) -> Path:
        return Path(self.config.out).absolute()

    @property
    def max_model_len(self) -> int:
        """The longest prompt and response together, in tokens."""
        return self.sampling.max_new_tokens + max(map(len, self.task.prompts))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What --resume compares; the digests are those of the model's files and of the task."""
        return {"config": self.config.flat(), "prompts": self.task.prompts_record,
                "files": digests(self) | self.further_files}


@dataclass
class Trainer:
    """Both sides, and what an optimizer step changes of them."""

    run: Run
    policy: Policy
    optimizer: Optimizer
    engine: Engine
    source: Source

    def state_dict(self) -> dict[str, Any]:
        """All of a checkpoint but the weights of the model."""
        return {"optimizer": self.optimizer.state_dict(), "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


# ---------------------------------------------------------------------------------- the start
def find_run(config: Config) -> Run:
    """The job of a run, without its options' parts, and before the toy is taught.

    Raises: ValueError.
    """
    task, folder = find_job(config.task, config.seed, config.data, config.model,
                            config.max_new_tokens)
    if config.steps and config.num_prompts > len(task.train):
        raise ValueError(f"num_prompts must be at most {len(task.train)} (all there are), got"
                         f" {config.num_prompts}")
    sampling = Sampling(config.temperature, config.max_new_tokens, task.stop_token_ids)
    policy = dict(temperature=config.temperature, has_reference=config.kl_coef > 0)
    return Run(config, folder, task, sampling, {*config.parity.off()}, policy,
               reports=[partial(draw_at_evaluation, Path(config.out).absolute())])


def prepare(config: Config) -> Run:
    """Check all that can be checked without the model's weights, then teach the toy.

    Raises: ValueError.
    """
    run = find_run(config)
    extras.call("install", config, run)
    if run.engine_kind.copies_weights:
        check_vllm_version(config.checks.allow_untested_vllm)
    run.find_start(run)
    teach_toy(config)
    return run


def load_policy(run: Run) -> Policy:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with stage(f"loading the model in {run.folder}"):
        model = model_folder.load(run.folder, getattr(torch, run.config.dtype)).to(device)
        for change in run.with_model:
            change(model)
        return Policy(model, send=run.send, **run.policy)


def begin(run: Run, policy: Policy, engine: Engine) -> Trainer:
    """Both sides get the same weights, fresh or from a checkpoint, and the run its files."""
    config = run.config
    source = run.source(engine, run.task, run.sampling, config.num_prompts, config.group_size,
                        config.seed)
    trainer = Trainer(run, policy, run.optimizer(policy.model), engine, source)
    if run.checkpoint:
        run.load_weights(policy.model, run.checkpoint["folder"])
        trainer.load_state_dict(run.checkpoint)
    else:
        for table in TABLES:
            replace_file(run.out / table, "")
    engine.load(policy.weights(), policy.response_logprobs)
    if engine.copies_weights:
        prompts = [problem.prompt_ids for problem in run.task.train]
        sampled = make_batch(distribution.sampled(engine, prompts, run.sampling), policy.device)
        distribution.check(policy, engine, sampled, run.not_stated)
    settings = of_trainer(policy)
    record = record_of(run, settings, engine)
    print(settings_lines(settings, engine.settings))
    for prepare_first_step in run.at_begin:
        prepare_first_step(trainer, record)
    replace_file(run.out / "config.json", json.dumps(record, indent=2))
    return trainer


# ---------------------------------------------------------------------------------- the loop
def train(trainer: Trainer) -> None:
    """The whole run: steps, evaluations, files, checkpoints."""
    run, config = trainer.run, trainer.run.config
    first_step = run.checkpoint["step"] + 1 if run.checkpoint else 1
    if first_step == 1:
        finish_step(trainer, {"step": 0} | evaluate(trainer, 0))
    for step in range(first_step, config.steps + 1):
        with stage(f"step {step}"):
            done = train_step(trainer, step)
        row = {**done.metrics}
        for observe in run.observers:
            row |= metrics.further(row, observe(done))
        if step == config.steps or step % config.eval_every == 0:
            row |= metrics.further(row, evaluate(trainer, step))
        finish_step(trainer, row)
    print(f"writing {run.out / 'policy'}")
    run.save_policy(run, trainer.policy.model, run.out / "policy")
    report(run.at_end)
    trainer.engine.close()


def finish_step(trainer: Trainer, row: dict[str, Any]) -> None:
    """First what a resumed run needs, then what only reports."""
    run, step = trainer.run, row["step"]
    append_rows(run.out / "metrics.jsonl", [row])
    for write in run.writers:
        write(row)
    if step and (step == run.config.steps or step % run.config.checkpoint_every == 0):
        save_checkpoint(trainer, step)
    log(run, row)


class Step(NamedTuple):
    """What a step has done: its metrics, the P problems, the batch (B, T) that was trained on.

    `fresh` is the batch with a mask on the rows that were sampled wholly with the weights before
    this update, prompt included. --mask-truncated does not change it.
    """

    metrics: Mapping[str, Any]
    problems: list[Problem]
    batch: Batch
    fresh: Batch


def train_step(trainer: Trainer, step: int) -> Step:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    config, policy, engine = trainer.run.config, trainer.policy, trainer.engine
    clock = Clock()

    # 1. Sample with the weights of the last load. Then the engine gives the device to the trainer.
    with clock("generate"), stage(f"sampling by {type(trainer.source).__name__}"):
        problems, rollouts = trainer.source.next(step)  # P, B = P * G rows
    verify.batch.check_rollouts(
        problems, rollouts, config.num_prompts, config.group_size, engine.weight_version)
    verify.batch.check_gradients(trainer.optimizer.masters)
    with clock("sleep"):
        engine.sleep()

    # 2. Score.
    with clock("reward"):
        trainer.run.task.score(problems, rollouts)  # sets each rollout's reward and score
    scores = torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64)  # (B,)
    batch = make_batch(rollouts, policy.device)  # (B, T)

    # 3. The trainer's own log-probabilities before the update, in its micro-batches. A row whose
    # score is its group's mean, or NaN, has no signal. Such rows have micro-batches of their own,
    # whose backward `update` skips, unless there is a KL term.
    has_signal = centre(scores, config.group_size) != 0  # (P, G)
    minibatches = batch.minibatches(has_signal.flatten(), config.num_minibatches,
                                    config.micro_batch_tokens, policy.pack)
    with clock("old_logprobs"):
        measured = in_micro_batches(policy.token_metrics, batch, minibatches)  # (B, T) by name
    batch = replace(batch, old_logprobs=measured["logprobs"], entropy=measured["entropy"],
                    ref_logprobs=measured.get("ref_logprobs"))
    with stage(f"the advantage function of {config.objective}"):
        advantages = OBJECTIVES[config.objective].advantages(  # (B, 1), or (B, T)
            scores.to(policy.device), config.group_size, batch)
        verify.batch.check_advantages(advantages, batch.mask)
    batch = replace(batch, advantages=advantages)

    fresh = batch.mask_rows([rollout.oldest_version == engine.weight_version
                             for rollout in rollouts])
    figures = {"step": step, "lr": config.lr_at(step)} | metrics.before_update(
        batch, fresh, measured, scores, has_signal, engine.weight_version,
        objective=OBJECTIVES[config.objective], clip=config.clip, max_length=config.max_new_tokens)
    if not trainer.run.not_stated:
        verify.canary.check_step(engine, figures)

    # 4. Update.
    batch = batch.mask_rows([has_loss(rollout, config) for rollout in rollouts])
    with clock("update"):
        figures |= update(policy, trainer.optimizer, batch, minibatches, config, figures["lr"],
                          trainer.run.token_filter)

    # 5. Wake, load, verify. Weights that have not changed are loaded too: on a GPU sleep discards.
    with clock("sync"):
        engine.wake()
        figures |= engine.load(policy.weights(), policy.response_logprobs, figures["updates"] > 0)
    figures |= clock.figures()
    figures |= metrics.further(figures, trainer.source.after_update())
    return Step(MappingProxyType(figures), problems, batch, fresh)


def has_loss(rollout: Rollout, config: Config) -> bool:
    """False if it is left out, or truncated with --mask-truncated."""
    masked = config.mask_truncated and rollout.finish_reason == "length"
    return not masked and not math.isnan(rollout.score)


# ---------------------------------------------------------------------------------- update
def with_loss_terms(
    batch: Batch, minibatches: Minibatches, config: Config, token_filter: TokenFilter | None
) -> Batch:
    """The batch with the ratio's denominator, the correction and the weights of the loss."""
    correction = CORRECTIONS[config.tis](  # (B, T)
        batch.old_logprobs, batch.behavior_logprobs, batch.mask, config.tis_cap)
    averaged = batch.mask  # the tokens of the loss's mean
    if token_filter:
        with stage("the token filter"):
            rejected, averaged = token_filter(batch)
        correction = correction * (rejected == 0)
        verify.batch.check_averaged(averaged, correction > 0, batch.mask)
    token_weights = torch.zeros_like(batch.mask)
    for micro_batches in minibatches:
        rows = torch.cat(micro_batches)
        token_weights[rows] = loss_weights(
            averaged[rows], OBJECTIVES[config.objective].normalizer, config.max_new_tokens)
    denominator = batch.behavior_logprobs if config.two_policy else batch.old_logprobs
    return replace(batch, denominator=denominator, correction=correction,
                   token_weights=token_weights)


def update(
    policy: Policy, optimizer: Optimizer, batch: Batch, minibatches: Minibatches,
    config: Config, lr: float, token_filter: TokenFilter | None = None,
) -> dict[str, Any]:
    """One pass over the batch: an optimizer step for each minibatch.

    loss = sum over rows and tokens of token_weights (correction * surrogate + kl_loss). The losses
    of micro-batches add up. A minibatch whose rows have no gradient (all are flat or masked, or
    their correction is 0, and there is no KL term) takes no step and counts in `skipped_updates`:
    otherwise AdamW would move the weights by momentum alone. With a KL term it takes a step and
    counts in `kl_only_updates`.

    Raises: FloatingPointError if a loss is not finite, or a gradient (fp16's overflows aside).
    """
    objective, sums = OBJECTIVES[config.objective], metrics.Sums()
    batch = with_loss_terms(batch, minibatches, config, token_filter)
    from_reward = (batch.correction * batch.advantages != 0).any(dim=1)  # (B,), has a gradient
    from_kl = (config.kl_coef * batch.token_weights > 0).any(dim=1)  # (B,)
    with optimizer.on_device():
        for micro_batches in minibatches:
            of_minibatch = torch.cat(micro_batches)
            if not (from_reward | from_kl)[of_minibatch].any():
                continue
            for rows in micro_batches:
                micro = batch.select(rows)
                has_gradient = bool((from_reward | from_kl)[rows].any())
                with torch.set_grad_enabled(has_gradient):
                    logprobs = policy.score(micro)["logprobs"]  # (b, T)
                token_loss, clipped = objective.surrogate(
                    logprobs, micro.denominator, micro.advantages, micro.correction > 0,
                    config.clip)
                token_loss = micro.correction * token_loss
                if config.kl_coef:
                    token_loss = token_loss + kl_loss(
                        logprobs, micro.denominator, micro.ref_logprobs, micro.token_weights > 0,
                        config.kl_coef, config.kl_gradient)
                loss = (token_loss * micro.token_weights).sum()
                if has_gradient:
                    optimizer.backward(loss)
                sums.add(logprobs.detach(), micro.denominator, micro.ref_logprobs, clipped,
                         micro.token_weights, loss.item())
            sums.step(optimizer.step(lr), kl_only=not from_reward[of_minibatch].any())
    figures = sums.figures(len(minibatches))
    if config.tis != "off" or token_filter:
        figures |= metrics.of_correction(batch.correction, batch.mask, config.tis_cap)
    return figures


# ---------------------------------------------------------------------------------- evaluation
def evaluate(trainer: Trainer, step: int) -> dict[str, float]:
    """Mean reward on held-out problems. Every answer goes to samples.jsonl.

    A policy can adapt to a broken backend. `eval_agree` shows it: the share of the engine's greedy
    answers whose every token is the trainer's likeliest too.
    """
    config, answers = trainer.run.config, partial(answer_held_out, trainer, step)
    rollouts, greedy = answers(trainer.source, "greedy", 1, 0.0)
    print(answer_line(greedy[0]))
    _, sampled = answers(trainer.source, "sampled", config.eval_samples, config.temperature)
    figures = metrics.of_answers("eval_reward", sampled)
    figures |= metrics.of_answers("eval_reward_greedy", greedy)
    figures["eval_agree"] = greedy_agreement(trainer.policy, rollouts, config)
    for evaluate_also in trainer.run.evaluations:
        figures |= metrics.further(figures, evaluate_also(answers))
    return figures


def answer_held_out(
    trainer: Trainer, step: int, source: Source, mode: str, num_samples: int, temperature: float
) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """The source's answers to the held-out problems, and their rows of samples.jsonl."""
    run = trainer.run
    problems = run.task.held_out[: run.config.eval_problems]
    reseed(run.config.seed, "eval", step)
    with stage(f"sampling by {type(source).__name__}"):
        rollouts = source.answer(problems, num_samples, run.sampling.at(temperature))
    verify.batch.check_rollouts(
        problems, rollouts, len(problems), num_samples, source.engine.weight_version)
    rows = [{"step": step, "mode": mode} | row
            for row in run.task.score(problems, rollouts, evaluates=True)]
    append_rows(run.out / "samples.jsonl", rows)
    return rollouts, rows


def greedy_agreement(policy: Policy, rollouts: list[Rollout], config: Config) -> float:
    """The share of rollouts whose every token is the trainer's likeliest one."""
    batch = make_batch(rollouts, policy.device)
    rows = torch.arange(len(rollouts))
    micro_batches = policy.pack(batch, rows, config.micro_batch_tokens)
    at_1 = policy.changed(head=replace(policy.head, temperature=1.0))
    score = partial(at_1.score, measures=(metrics.agreement,))
    agrees = in_micro_batches(score, batch, [micro_batches])["agrees"]  # (B, T)
    return (agrees == batch.mask).all(dim=1).float().mean().item()


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused in set-up, 1 failed later, 130 stopped by a signal."""
    stop_on_signals()
    with exit_with_message(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    out = config.out
    with exit_with_message(2), locked(out):
        run = prepare(config)
        # The run is accepted: from here on files are written, an error's traceback too.
        with exit_with_message(2, out):
            policy = load_policy(run)
            engine = run.engine_kind.start(run, policy)
            trainer = begin(run, policy, engine)
        with exit_with_message(1, out):
            train(trainer)


if __name__ == "__main__":
    with end_of_process():
        main()
