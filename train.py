"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

`train_step` is the whole algorithm, in five parts:
    1. Sample: `Source.next`, then `Engine.sleep`.
    2. Score: `Task.score`.
    3. Log-probabilities before the update, and the mismatch: `Policy.token_metrics`.
    4. Update: `update`, the gradient.
    5. Wake, load, verify: `Engine.load`, then `prove` and `run_canary` of verify.Checks.
`Config` has the options of the method. All others stand with what they change, in tasks/, verify/
and the files of extras/, which change a default run too: prompts_once replaces two functions of
rl.py, and prefix_cache shares prompts in the engine.
"""

import report  # noqa: F401  # isort: skip  # it names packages that are missing
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

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
from report import files
from report import metrics as of_step
from report.clock import Clock
from report.curves import draw_at_evaluation
from report.errors import end_of_process, exit_with_message, locked, stage, stop_on_signals
from report.log import answer_line, call_reports, log, settings_lines
from report.metrics import further
from report.ranges import MANY, Count, Name, NotNegative, Positive, Range, check_ranges
from rl import Batch, Minibatches, Optimizer, Policy, in_micro_batches, make_batch
from tasks import Problem, Task
from tasks.job import digests, find_job, teach_toy
from verify.settings import of_trainer
from vllm_cases import check_vllm_version


# ---------------------------------------------------------------------------------- options
@dataclass(frozen=True)
class Config(extras.ByName):
    """All options of a run. The defaults are the toy job: a small model unlearns a wrong habit on
    two CPU cores.
    """

    out: Name = "runs/toy"  # Folder for config.json, metrics.jsonl, curves.png, checkpoints/.
    # Decides the toy, the held-out split, the problems and the samples.
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    # Batches; 0: one evaluation. With --lr-decay none a resumed run may have more.
    steps: Annotated[int, Range(0, 999_999)] = 60
    model: Name = "toy"  # `toy`, a folder with a Hugging Face causal language model, or a hub name.
    # `toy` (addition), `digits`; a file of rows with a question and an answer (JSON lines, a JSON
    # array, parquet); a dataset: a folder, or NAME or NAME:CONFIG on a hub; a Python file with
    # `sample` or `problems`, and `reward` or `rewards`.
    task: Name = "toy"
    # The model's, on both sides. In 16 bits the optimizer keeps fp32 masters.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    checkpoint_every: Count = 20  # Steps between checkpoints, and after the last; two are kept.
    # What is sampled.
    num_prompts: Count = 128  # Problems per step (P).
    # Samples per problem (G), whose mean is the baseline.
    group_size: Annotated[int, Range(2, 2**16)] = 8
    # Longest response in tokens; the toy answers with 5, its end included.
    max_new_tokens: Count = 8
    # Sampler and trainer have it; at 1, raw and processed values are equal.
    temperature: Annotated[float, Range(0.01, 2)] = 0.7
    # What is learnt from it.
    objective: Literal[tuple(OBJECTIVES)] = "grpo"  # Formulas and sources in objectives.py.
    # The ratio is that of trainer and engine; if off, of the trainer after and before the update.
    two_policy: bool = False
    # Lower clip distance; if not given, the objective's usual one.
    clip_low: Annotated[float | None, Range(0, 1)] = None
    clip_high: Positive | None = None  # Upper one (cispo: the absolute cap); as clip_low.
    # Weight of the KL to the initial policy, a frozen copy of it in memory.
    kl_coef: NotNegative = 0.0
    # k3: the gradient of the estimator alone, as in GRPO; on policy it is that of KL(ref || pi).
    # exact: of KL(pi || ref), by the ratio, as in TRL.
    kl_gradient: Literal["k3", "exact"] = "k3"
    # Corrections of a mismatch, refused while a parity fix is off; docs/objectives.md.
    tis: Literal[tuple(CORRECTIONS)] = "off"  # Importance weight: of the token, or of its response.
    tis_cap: Positive = 2.0  # Largest importance weight; a larger one is truncated to it.
    # Allow them although a fix is off: only to study how a correction hides a broken backend.
    correct_a_broken_backend: bool = False
    # No loss for truncated responses; their rewards still count in the group's mean (DAPO).
    mask_truncated: bool = False
    num_minibatches: Count = 2  # Optimizer steps per batch; from the second on the clip can act.
    micro_batch_tokens: Count = 4096  # Tokens per forward and backward: memory, speed, rounding.
    lr: Positive = 1e-3  # AdamW's peak, for the toy; docs/run.md has rates of pretrained models.
    # Linear warm-up: Adam's second moments are noise at first.
    lr_warmup_steps: Annotated[int, Range(0, MANY)] = 5
    lr_decay: Literal["linear", "none"] = "linear"  # To zero after the last step, or a constant lr.
    # The engine.
    # Size of the KV cache; fixed: the trainer needs the free memory.
    kv_cache_gib: Annotated[float, Range(1e-30, 1e6)] = 0.25
    max_num_seqs: Count = 512  # Sequences the engine decodes at once; the others wait.
    # Tokens per KV block, on a CPU a multiple of 32; if not given 16 (GPU), 128 or 32 (CPU).
    block_size: Annotated[int | None, Range(16, MANY, step=16)] = None
    # Evaluation.
    eval_every: Count = 20  # Steps between evaluations, also before the first step and at the end.
    # Held-out problems per evaluation (or all there are): always the same, chosen by the seed.
    eval_problems: Count = 256
    # Sampled answers per problem; the greedy evaluation has one.
    eval_samples: Annotated[int, Range(1, 2**16)] = 1

    parity: ParityFlags = field(default_factory=ParityFlags)
    data: Flat[tasks.options.Options] = field(default_factory=tasks.options.Options)
    checks: Flat[verify.Options] = field(default_factory=verify.Options)
    extra: Flat[extras.Options] = field(default_factory=extras.Options)

    def __post_init__(self):
        check_ranges(self)
        objective = OBJECTIVES[self.objective]
        rows = self.num_prompts * self.group_size
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
@dataclass
class Run(extras.OneOwner):
    """What a run is put together from: its job, and parts. The `install` of an extra replaces a
    part, or adds to a list or a dictionary.
    """

    config: Config
    folder: str  # the model's
    task: Task
    sampling: Sampling
    advantages: Callable[[Tensor, int, Batch], Tensor]  # the objective's; an extra may wrap it
    # Why the sides differ: fixes that are off, and what an option changes on purpose, "trainer"
    # (its distribution) or "weights" (the engine's). With any, no step's mismatch is checked; the
    # first comparison leaves out only the side that is changed.
    not_stated: set[str]
    policy: dict[str, Any]  # arguments of Policy
    # Each row of metrics.jsonl, after its checkpoint: what only reports, and ends no run.
    reports: list[Callable]
    send: Callable | None = None  # the rl.EngineWeights
    optimizer: Callable = Optimizer
    engine_kind: type[Engine] = Engine
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of its class
    further: dict[str, Any] = field(default_factory=dict)  # arguments of vLLM
    checks_kind: type[verify.Checks] = verify.Checks
    source: Callable = Source  # where rollouts come from
    # batch -> which tokens get no policy gradient (B, T), bool, and those that the loss's mean
    # counts (B, T)
    token_filter: Callable | None = None
    # policy, optimizer, micro-batch -> the micro-batch, with another `denominator`, say
    change_micro_batch: Callable | None = None
    find_start: Callable = files.refuse_used_folder  # the run; may set `checkpoint`
    # The state.pt from which the run goes on, with its `folder`.
    checkpoint: dict[str, Any] | None = None
    # The run, the model, and the folder that is written: OUT/policy, a checkpoint's.
    save_policy: Callable = model_folder.save_policy
    save_weights: Callable = model_folder.save_policy
    load_weights: Callable = model_folder.load_weights  # the model, and a checkpoint's folder
    # Functions, their arguments, and when they are called:
    with_model: list[Callable] = field(default_factory=list)  # the model: before Policy is made
    # The sides, the record of config.json: before it is written.
    at_begin: list[Callable] = field(default_factory=list)
    # The problems, the rollouts: before they are scored, while the engine sleeps.
    before_scores: list[Callable] = field(default_factory=list)
    step_metrics: list[Callable] = field(default_factory=list)  # each Step: more metrics
    evaluations: list[Callable] = field(default_factory=list)  # see `evaluate`
    writers: list[Callable] = field(default_factory=list)  # each row, before its checkpoint
    at_end: list[Callable] = field(default_factory=list)  # no argument: after the policy is saved
    endings: dict[str, str] = field(default_factory=dict)  # what a step's line says: report/log.py

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
                "files": digests(self)}


@dataclass
class Sides:
    """Trainer and engine of a run, and what an optimizer step changes of them."""

    run: Run
    policy: Policy
    optimizer: Optimizer
    engine: Engine
    checks: verify.Checks
    source: Source

    def state_dict(self) -> dict[str, Any]:
        """All of a checkpoint but the weights of the model."""
        return {"optimizer": self.optimizer.state_dict(), "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


# ---------------------------------------------------------------------------------- the start
def new_run(config: Config) -> Run:
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
    advantages = OBJECTIVES[config.objective].advantages
    return Run(config, folder, task, sampling, advantages, {*config.parity.off()}, policy,
               reports=[partial(draw_at_evaluation, Path(config.out).absolute())])


def complete_run(config: Config) -> Run:
    """Check all that can be checked without the model's weights, then teach the toy.

    Raises: ValueError.
    """
    run = new_run(config)
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


def first_load(run: Run, policy: Policy, engine: Engine) -> Sides:
    """Both sides get the same weights, fresh or from a checkpoint, and the run its files."""
    config, checks = run.config, run.checks_kind(engine, run.config.checks)  # it audits
    source = run.source(engine, run.task, run.sampling, config.num_prompts, config.group_size,
                        config.seed)
    sides = Sides(run, policy, run.optimizer(policy.model), engine, checks, source)
    if run.checkpoint:
        run.load_weights(policy.model, run.checkpoint["folder"])
        sides.load_state_dict(run.checkpoint)
    else:
        files.empty_tables(run.out)
    weights = policy.weights()
    engine.load(weights)
    checks.prove(weights)
    checks.run_canary(policy)
    checks.compare_with_stated(policy, run.task.train, run.sampling, run.not_stated)
    settings = of_trainer(policy)
    record = files.record_of(run, settings, engine)
    print(settings_lines(settings, engine.settings))
    for prepare_first_step in run.at_begin:
        prepare_first_step(sides, record)
    files.write_record(run.out, record)
    return sides


# ---------------------------------------------------------------------------------- the loop
def train(sides: Sides) -> None:
    """The whole run: steps, evaluations, files, checkpoints."""
    run, config = sides.run, sides.run.config
    first_step = run.checkpoint["step"] + 1 if run.checkpoint else 1
    if first_step == 1:
        finish_step(sides, {"step": 0} | evaluate(sides, 0))
    for step in range(first_step, config.steps + 1):
        try:
            done = train_step(sides, step)
        except Exception as error:
            error.add_note(f"(in step {step})")
            raise
        row = {**done.metrics}
        for measure in run.step_metrics:
            row |= further(row, measure(done))
        if step == config.steps or step % config.eval_every == 0:
            row |= further(row, evaluate(sides, step))
        finish_step(sides, row)
    print(f"writing {run.out / 'policy'}")
    run.save_policy(run, sides.policy.model, run.out / "policy")
    call_reports(run.at_end)
    sides.engine.close()


def finish_step(sides: Sides, row: dict[str, Any]) -> None:
    """First what a resumed run needs, then what only reports."""
    run, step = sides.run, row["step"]
    files.append_rows(run.out / "metrics.jsonl", [row])
    for write in run.writers:
        write(row)
    if step and (step == run.config.steps or step % run.config.checkpoint_every == 0):
        files.save_checkpoint(sides, step)
    log(run, row)


class Step(NamedTuple):
    """What a step has done: its metrics, the P problems, the batch (B, T) that was trained on.

    `current` is the batch with a mask on the rows that were sampled wholly with the weights before
    this update, prompt included. --mask-truncated does not change it.
    """

    metrics: Mapping[str, Any]
    problems: list[Problem]
    batch: Batch
    current: Batch


def train_step(sides: Sides, step: int) -> Step:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    run, policy, engine, checks = sides.run, sides.policy, sides.engine, sides.checks
    config, clock = run.config, Clock()

    # 1. Sample with the weights of the last load. Then the engine gives the device to the trainer.
    with clock("generate"), stage(f"sampling by {type(sides.source).__name__}"):
        problems, rollouts = sides.source.next(step)  # P, B = P * G rows
    verify.batch.check_rollouts(
        problems, rollouts, config.num_prompts, config.group_size, engine.weight_version)
    verify.batch.check_gradients(sides.optimizer.masters)
    with clock("sleep"):
        engine.sleep()

    # 2. Score.
    with clock("reward"):
        for prepare_scores in run.before_scores:
            verify.batch.check_returned(prepare_scores(problems, rollouts))
        run.task.score(problems, rollouts)  # sets each rollout's reward and score
    verify.batch.check_extra(rollouts)
    scores = torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64)  # (B,)
    batch = make_batch(rollouts, policy.device)  # (B, T)

    # 3. The trainer's own log-probabilities before the update, in its micro-batches. A row whose
    # score is its group's mean, or NaN, has no signal. Such rows have micro-batches of their own,
    # whose backward `update` skips, unless there is a KL term.
    has_signal = centre(scores, config.group_size) != 0  # (P, G)
    minibatches = batch.minibatches(has_signal.flatten(), config.num_minibatches,
                                    config.micro_batch_tokens, policy.pack)
    with clock("old_logprobs"):
        of_tokens = in_micro_batches(policy.token_metrics, batch, minibatches)  # (B, T) by name
    batch = replace(batch, old_logprobs=of_tokens["logprobs"], entropy=of_tokens["entropy"],
                    ref_logprobs=of_tokens.get("ref_logprobs"))
    with stage("the advantage function"):
        advantages = run.advantages(  # (B, 1), or (B, T)
            scores.to(policy.device), config.group_size, batch)
        verify.batch.check_advantages(advantages, batch.mask)
    batch = replace(batch, advantages=advantages)

    current = batch.mask_rows([rollout.oldest_version == engine.weight_version
                               for rollout in rollouts])
    metrics = {"step": step, "lr": config.lr_at(step)} | of_step.before_update(
        batch, current, of_tokens, scores, has_signal, engine.weight_version,
        objective=OBJECTIVES[config.objective], clip=config.clip, max_length=config.max_new_tokens)
    if not run.not_stated:
        checks.canary.check_step(metrics)

    # 4. Update. Responses that are left out or, with --mask-truncated, truncated have no loss.
    batch = batch.mask_rows([
        not math.isnan(rollout.score)
        and not (config.mask_truncated and rollout.finish_reason == "length")
        for rollout in rollouts])
    with clock("update"):
        metrics |= update(policy, sides.optimizer, batch, minibatches, config, metrics["lr"],
                          run.token_filter, run.change_micro_batch)

    # 5. Wake, load, verify. Weights that have not changed are loaded too: on a GPU sleep discards
    # them. The engine gives no rollouts before both checks have passed.
    with clock("sync"):
        engine.wake()
        weights = policy.weights()
        with clock("load"):
            engine.load(weights, is_new_version=metrics["updates"] > 0)
        with clock("proof"):
            checks.prove(weights)  # all tensors, later a part: the engine has these, bit for bit
        with clock("canary"):
            checks.run_canary(policy)  # a few tokens, which both sides score
    metrics |= clock.metrics()
    metrics |= further(metrics, sides.source.after_update())
    return Step(MappingProxyType(metrics), problems, batch, current)


# ---------------------------------------------------------------------------------- update
def with_loss_terms(
    batch: Batch, minibatches: Minibatches, config: Config, token_filter: Callable | None
) -> Batch:
    """The batch with the ratio's denominator, the correction, which tokens have a policy gradient,
    and the weights of the loss."""
    correction = CORRECTIONS[config.tis](  # (B, T)
        batch.old_logprobs, batch.behavior_logprobs, batch.mask, config.tis_cap)
    learns = batch.mask > 0
    averaged = batch.mask  # the tokens of the loss's mean
    if token_filter:
        with stage("the token filter"):
            rejected, averaged = token_filter(batch)
        learns = learns & (rejected == 0)
        verify.batch.check_averaged(averaged, learns, batch.mask)
    token_weights = torch.zeros_like(batch.mask)
    for micro_batches in minibatches:
        rows = torch.cat(micro_batches)
        token_weights[rows] = loss_weights(
            averaged[rows], OBJECTIVES[config.objective].normalizer, config.max_new_tokens)
    denominator = batch.behavior_logprobs if config.two_policy else batch.old_logprobs
    return replace(batch, denominator=denominator, correction=correction, learns=learns,
                   token_weights=token_weights)


def update(
    policy: Policy, optimizer: Optimizer, batch: Batch, minibatches: Minibatches,
    config: Config, lr: float, token_filter: Callable | None = None,
    change_micro_batch: Callable | None = None,
) -> dict[str, Any]:
    """One pass over the batch: an optimizer step for each minibatch.

    loss = sum over rows and tokens of token_weights (learns * correction * surrogate + kl_loss).
    The losses of micro-batches add up. A minibatch whose rows have no gradient (all are flat,
    masked or rejected, and there is no KL term) takes no step and counts in `skipped_updates`:
    otherwise AdamW would move the weights by momentum alone. (If every token is clipped, it does.)
    With a KL term such a minibatch takes a step and counts in `kl_only_updates`.

    Raises: FloatingPointError if a loss is not finite, or a gradient (fp16's overflows aside).
    """
    objective, sums = OBJECTIVES[config.objective], of_step.Sums()
    batch = with_loss_terms(batch, minibatches, config, token_filter)
    by_reward = batch.learns & (batch.advantages != 0)  # (B, T)
    has_gradient = (by_reward | (config.kl_coef * batch.token_weights > 0)).any(dim=1)  # (B,)
    with optimizer.on_device():
        for micro_batches in minibatches:
            of_minibatch = torch.cat(micro_batches)
            if not has_gradient[of_minibatch].any():
                continue
            for rows in micro_batches:
                micro = batch.select(rows)
                if change_micro_batch:
                    with torch.no_grad():
                        micro = change_micro_batch(policy, optimizer, micro)
                    assert micro.denominator.shape == micro.mask.shape, f"{micro.denominator=}"
                needs_backward = bool(has_gradient[rows].any())
                with torch.set_grad_enabled(needs_backward):
                    logprobs = policy.logprobs(micro)  # (b, T)
                token_loss, clipped = objective.surrogate(
                    logprobs, micro.denominator, micro.advantages, micro.learns, config.clip)
                token_loss = micro.learns * micro.correction * token_loss
                if config.kl_coef:
                    token_loss = token_loss + kl_loss(
                        logprobs, micro.denominator, micro.ref_logprobs, micro.token_weights > 0,
                        config.kl_coef, config.kl_gradient)
                loss = (token_loss * micro.token_weights).sum()
                if needs_backward:
                    optimizer.backward(loss)
                sums.add(micro, logprobs.detach(), clipped, loss.item())
            norm = optimizer.step(lr)
            sums.step(norm, kl_only=not by_reward[of_minibatch].any())
    metrics = sums.metrics(len(minibatches))
    if config.tis != "off" or token_filter:
        metrics |= of_step.of_correction(
            batch.correction, batch.learns, batch.mask, config.tis_cap)
    return metrics


# ---------------------------------------------------------------------------------- evaluation
def evaluate(sides: Sides, step: int) -> dict[str, float]:
    """Mean reward on held-out problems. Every answer goes to samples.jsonl.

    A policy can adapt to a broken backend. `eval_agree` shows it: the share of the engine's greedy
    answers whose every token is the trainer's likeliest too.
    """
    config, answers = sides.run.config, partial(answer_held_out, sides, step)
    rollouts, greedy = answers(sides.source, mode="greedy", num_samples=1, temperature=0.0)
    print(answer_line(greedy[0]))
    _, sampled = answers(sides.source, mode="sampled", num_samples=config.eval_samples,
                         temperature=config.temperature)
    metrics = of_step.of_answers("eval_reward", sampled)
    metrics |= of_step.of_answers("eval_reward_greedy", greedy)
    metrics["eval_agree"] = verify.agreement(sides.policy, rollouts, config.micro_batch_tokens)
    for evaluate_also in sides.run.evaluations:
        metrics |= further(metrics, evaluate_also(answers))
    return metrics


def answer_held_out(
    sides: Sides, step: int, source: Source, mode: str, num_samples: int, temperature: float
) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """The source's answers to the held-out problems, and their rows of samples.jsonl."""
    run = sides.run
    problems = run.task.held_out[: run.config.eval_problems]
    reseed(run.config.seed, "eval", step)
    with stage(f"sampling by {type(source).__name__}"):
        rollouts = source.answer(problems, num_samples, run.sampling.at(temperature),
                                 evaluates=True)
    verify.batch.check_rollouts(
        problems, rollouts, len(problems), num_samples, source.engine.weight_version)
    rows = [{"step": step, "mode": mode} | row
            for row in run.task.score(problems, rollouts, evaluates=True)]
    files.append_rows(run.out / "samples.jsonl", rows)
    return rollouts, rows


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused in set-up, 1 failed later, 130 stopped by a signal."""
    stop_on_signals()
    with exit_with_message(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    out = config.out
    with exit_with_message(2), locked(out):
        run = complete_run(config)
        # The run is accepted: from here on files are written, an error's traceback too.
        with exit_with_message(2, out):
            policy = load_policy(run)
            engine = run.engine_kind.start(run, policy)
            sides = first_load(run, policy, engine)
        with exit_with_message(1, out):
            train(sides)


if __name__ == "__main__":
    with end_of_process():
        main()
