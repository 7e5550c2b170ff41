"""Colocated GRPO in one process: trainer (transformers) and engine (vLLM V1) take turns.

One step: sample, sleep, score, update, wake, load. `train_step` is the whole algorithm.
"""

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean as mean
from typing import Any, NamedTuple

import torch
import tyro

import records
from config import BUILT_IN, Config, GrpoConfig
from engine_adapter import Engine, Rollout, Sampling, check_vllm_version, reseed
from models import describe_model, load_model, local_folder
from objectives import OBJECTIVES, Measured, backend_metrics, centre, mismatch_metrics
from rl import (
    Batch,
    Cut,
    Optimizer,
    Policy,
    frozen_agreement,
    frozen_logprobs,
    frozen_measures,
    make_batch,
    update,
)
from tasks import Problem, Task, encode, fitting, load_task, score_rollouts


# ---------------------------------------------------------------------------------- a run
@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    out: Path
    model_path: str
    task: Task
    tokenizer: Any
    sampling: Sampling
    max_model_len: int
    dropped_prompts: int
    # Digests of the model's files and of the task, by name.
    files: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Digest of the options and the files: equal for a run and its resumption."""
        record = json.dumps([self.config.experiment, self.files], sort_keys=True)
        return sha256(record.encode()).hexdigest()


class Synchronous:
    """Where rollouts come from: P problems a step, all responses sampled to their end.

    A source may score its rollouts (`tasks.score_rollouts`); those without a reward are scored
    while the engine sleeps.
    """

    def __init__(self, run: Run, engine: Engine):
        self.run, self.engine = run, engine
        self.rng = random.Random(run.config.run.seed)

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G rollouts, group-major."""
        return self.draw("train", step)

    def draw(self, *stream: int | str) -> tuple[list[Problem], list[Rollout]]:
        """As `next`; each `stream`, such as ("train", step, round), has random samples of its own.
        """
        grpo = self.run.config.grpo
        problems = self.run.task.sample(self.rng, grpo.num_prompts)
        reseed(self.run.config.run.seed, *stream)
        return problems, self.answer(problems, grpo.group_size, self.run.sampling)

    def answer(
        self, problems: list[Problem], num_samples: int, sampling: Sampling
    ) -> list[Rollout]:
        """`num_samples` responses to each problem; the evaluation calls it too."""
        return self.engine.generate([each.prompt_ids for each in problems], num_samples, sampling)

    def after_update(self) -> dict[str, int]:
        """Called after each load: drop what is too old, return metrics. Nothing is unfinished."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate(state["rng"])


@dataclass
class TrainingState:
    """What changes from step to step."""

    policy: Policy
    reference: dict[str, torch.Tensor] | None  # the first policy's weights by name, for a KL term
    optimizer: Optimizer
    engine: Engine
    source: Synchronous  # or extras.inflight.GroupsInFlight
    trainer_alone: Synchronous | None = None  # answers with the trainer's own modules
    observers: list[Callable[["Step"], dict[str, Any]]] = field(default_factory=list)  # of a step
    watchers: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)  # of a row

    def add_reference(self, batch: Batch, cut: Cut, temperature: float) -> Batch:
        """The batch with `ref_logprobs`, if there is a reference."""
        if self.reference is None:
            return batch
        # The same arithmetic for both sides of the divergence.
        with self.policy.using(self.reference):
            ref_logprobs = frozen_logprobs(self.policy, batch, cut, temperature)
        return replace(batch, ref_logprobs=ref_logprobs)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, saved = self.policy.model, state["policy"]
        assert saved.keys() == self.policy.state_dict().keys(), "tensors of the checkpoint"
        model.load_state_dict(model.state_dict() | saved)  # frozen tensors are not saved
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


# ---------------------------------------------------------------------------------- the loop
def train(run: Run, state: TrainingState, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    run_config, measure = run.config.run, run.config.measure
    if first_step == 1:
        log(run, state, {"step": 0} | evaluate(run, state, 0))
    started = time.perf_counter()
    for step in range(first_step, run_config.steps + 1):
        with records.stage(f"step {step} at lr {run.config.lr_at(step):.2g}"):
            done = train_step(run, state, step)
        for observe in state.observers:
            done.metrics.update(observe(done))
        last = step == run_config.steps
        if last or step % measure.eval_every == 0:
            done.metrics.update(evaluate(run, state, step))
        a_step = (time.perf_counter() - started) / (step - first_step + 1)
        log(run, state, done.metrics | {"left_s": a_step * (run_config.steps - step)})
        if last or step % run_config.checkpoint_every == 0:
            records.save_checkpoint(run.out, step, state.state_dict() | {"run": run.fingerprint})
    state.policy.save(run)
    state.engine.close()


class Step(NamedTuple):
    """What a step has done: its metrics, the P problems, the batch (B, T) that was trained on.

    `current` is the batch before any mask on rows, reduced to those that were sampled with the
    weights before the update alone.
    """

    metrics: dict[str, Any]
    problems: list[Problem]
    batch: Batch
    current: Batch


def train_step(run: Run, state: TrainingState, step: int) -> Step:
    """The whole algorithm: one batch of rollouts from question to updated weights in the engine."""
    grpo, policy, engine = run.config.grpo, state.policy, state.engine
    clock = records.Clock()
    with clock("generate"):
        problems, rollouts = state.source.next(step)  # P, B = P * G rows
    with clock("sleep"):
        engine.sleep()

    with clock("reward"):
        rows = score_rollouts(run, problems, rollouts)
    scores = torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64)  # (B,)
    batch = make_batch(rollouts, policy.device)  # (B, T)
    has_signal = (centre(scores, grpo.group_size) != 0).flatten()  # (B,)
    cut = batch.cut(has_signal, grpo.num_minibatches, grpo.micro_batch_tokens)

    with clock("old_logprobs"):
        measured = frozen_measures(policy, batch, cut, grpo.temperature)  # (B, T) by name
        batch = replace(batch, old_logprobs=measured.pop("logprobs"))
        batch = state.add_reference(batch, cut, grpo.temperature)  # for --kl-coef
    known = Measured(batch.mask, batch.old_logprobs, batch.behavior_logprobs, batch.ref_logprobs)
    advantages = OBJECTIVES[grpo.objective].advantages(
        scores.to(policy.device), grpo.group_size, known)
    batch = replace(batch, advantages=advantages)  # (B, 1) or (B, T)

    oldest = [rollout.oldest_version for rollout in rollouts]  # weight versions
    # The rows that were sampled with the current weights alone.
    current = batch.only([version == engine.weight_version for version in oldest])
    metrics = rollout_metrics(rollouts, grpo.group_size)
    metrics |= measure_staleness(rollouts, oldest, engine.weight_version)
    metrics |= {name: (values.sum() / batch.mask.sum()).item() for name, values in measured.items()}
    metrics |= measure_mismatch(batch, current, grpo)
    if grpo.mask_truncated:
        batch = batch.only([each.finish_reason != "length" for each in rollouts])
    with clock("update"):
        metrics |= update(policy, state.optimizer, batch, cut, grpo, run.config.lr_at(step))

    with clock("sync"):
        engine.wake()
        # Weights that have not changed are loaded too: on a GPU sleep may have discarded them.
        changed = metrics["updates"] > 0
        metrics |= engine.load(policy.weights(), policy.response_logprobs, changed)
        metrics |= state.source.after_update()

    errors = sum(row["error"] is not None for row in rows)
    metrics |= {"step": step, "lr": run.config.lr_at(step), "reward_errors": errors}
    metrics |= {"memory_gib": records.memory_gib()} | clock.figures()
    return Step(metrics, problems, batch, current)


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """Metrics of the rollouts alone."""
    scores = torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64)  # (B,)
    tokens = sum(rollout.num_trained for rollout in rollouts)
    truncated = sum(rollout.finish_reason == "length" for rollout in rollouts)
    groups = scores.view(-1, group_size)  # (P, G)
    return {
        "reward": mean(rollout.reward for rollout in rollouts),
        "score": scores.mean().item(),
        "flat_frac": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
        "trunc_frac": truncated / len(rollouts),
        "response_len": tokens / len(rollouts),
        "tokens": tokens,
    }


def measure_staleness(
    rollouts: list[Rollout], oldest: list[int], version: int
) -> dict[str, float]:
    """The updates between sampling and training: of the oldest token, and the mean of all."""
    versions = [token_version for rollout in rollouts for token_version in rollout.versions]
    return {"staleness_max": version - min(oldest), "staleness_mean": version - mean(versions)}


def measure_mismatch(batch: Batch, current: Batch, grpo: GrpoConfig) -> dict[str, float | None]:
    """`mismatch_metrics` of the batch, and as current_... and backend_... of its rows in `current`.

    These were sampled with the current weights alone. Older rollouts are stale as well, and
    staleness is not the backend's fault. Without such rows only the batch is measured.
    """
    metrics = mismatch_metrics(batch.old_logprobs, batch.behavior_logprobs, batch.mask)
    if not current.mask.any():
        return metrics
    policies = current.old_logprobs, current.behavior_logprobs
    backend = mismatch_metrics(*policies, current.mask)
    metrics |= {f"current_{name}": value for name, value in backend.items()}
    return metrics | backend_metrics(
        *policies, current.advantages, current.mask,
        objective=grpo.objective, clip=grpo.clip, max_length=grpo.max_new_tokens)


# ---------------------------------------------------------------------------------- evaluation
def evaluate(run: Run, state: TrainingState, step: int) -> dict[str, float]:
    """Mean reward on held-out problems. Every answer goes to samples.jsonl.

    A policy can adapt to a broken backend. `eval_agree` shows it: the share of the engine's greedy
    answers whose every token is the trainer's likeliest too. With --eval-with-trainer, `eval_gap`
    is how much better the engine's answers are than those that the trainer samples alone.
    """
    samples, temperature = run.config.measure.eval_samples, run.sampling.temperature
    rollouts, greedy = answer_held_out(run, state.source, step, "greedy", 1, 0.0)
    print(records.answer_line(greedy[0]), flush=True)
    _, sampled = answer_held_out(run, state.source, step, "sampled", samples, temperature)
    metrics = {
        "eval_reward": mean(row["reward"] for row in sampled),
        "eval_reward_greedy": mean(row["reward"] for row in greedy),
        "eval_agree": greedy_agreement(state.policy, rollouts, run.config.grpo),
    }
    rows = greedy + sampled
    if state.trainer_alone:
        alone = sampled
        if state.trainer_alone is not state.source:
            own = state.trainer_alone.engine
            own.load(state.policy.weights(), state.policy.response_logprobs)
            _, alone = answer_held_out(
                run, state.trainer_alone, step, "trainer", samples, temperature)
            rows = rows + alone
        trainers = mean(row["reward"] for row in alone)
        metrics |= {"eval_reward_trainer": trainers, "eval_gap": metrics["eval_reward"] - trainers}
    return metrics | {"eval_reward_errors": sum(row["error"] is not None for row in rows)}


def answer_held_out(
    run: Run, source: Synchronous, step: int, mode: str, num_samples: int, temperature: float
) -> tuple[list[Rollout], list[dict[str, Any]]]:
    """The source's answers to the held-out problems, and their rows of samples.jsonl."""
    problems = run.task.held_out[: run.config.measure.eval_problems]
    reseed(run.config.run.seed, "eval", step)
    sampling = replace(run.sampling, max_kept=0, temperature=temperature)
    rollouts = source.answer(problems, num_samples, sampling)
    rows = [{"step": step, "mode": mode} | row for row in score_rollouts(run, problems, rollouts)]
    records.append_rows(run.out / "samples.jsonl", rows)
    return rollouts, rows


def greedy_agreement(policy: Policy, rollouts: list[Rollout], grpo: GrpoConfig) -> float:
    """The share of rollouts whose every token is the trainer's likeliest one."""
    batch = make_batch(rollouts, policy.device)
    cut = batch.cut(torch.ones(len(rollouts), dtype=torch.bool), 1, grpo.micro_batch_tokens)
    agrees = frozen_agreement(policy, batch, cut)  # (B, T)
    return (agrees == batch.mask).all(dim=1).float().mean().item()


def log(run: Run, state: TrainingState, metrics: dict[str, Any]) -> None:
    """All of it to metrics.jsonl and to the state's watchers, one line to the terminal."""
    records.append_rows(run.out / "metrics.jsonl", [metrics])
    config = run.config
    print(records.log_line(metrics, config.run.steps, config.grpo.reject), flush=True)
    for watch in state.watchers:
        watch(metrics)


# ---------------------------------------------------------------------------------- set-up
def prepare(config: Config) -> Run:
    """Check all that can be checked without a model, then teach the toy if it is asked for.

    Raises: ValueError.
    """
    for name in ("offload_optimizer", "cuda_graphs"):
        if config.flat()[name] and not torch.cuda.is_available():
            raise ValueError(f"{name} must not be given without a GPU (it would do nothing)")
    if config.grpo.replay_routes and torch.cuda.is_available():
        raise ValueError("replay_routes must be off on a GPU (vLLM's own report of its routes is"
                         " written for, but no GPU has run it)")
    if config.measure.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("tensorboard needs the package of this name, which is not installed; try"
                         " `pip install tensorboard`")
    if config.backend.engine != "transformers":
        check_vllm_version(config.backend.allow_untested_vllm)
    earlier = records.earlier_files(config.run.out, config.run.resume, config.experiment)

    task = find_task(config)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    path = local_folder(config.run.model)
    if path == "toy":
        from examples.toys import describe_toy, toy_model

        described = describe_toy(config.run.task)
    else:
        described = describe_model(path)
    model_config, tokenizer, stop_token_ids = described
    task = encode(tokenizer, task, config.data.reward_limit_s)
    largest = max(max(ids) for ids in (*task.prompts, stop_token_ids))
    if largest >= model_config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the"
                         f" vocabulary of {model_config.vocab_size}")
    num_problems, grpo, data = len(task.prompts), config.grpo, config.data
    context = getattr(model_config, "max_position_embeddings", None)
    task = fitting(task, context, grpo.max_new_tokens, data.max_prompt_tokens,
                   drop=data.overlong_prompts == "drop")
    longest_prompt = max(map(len, task.prompts))
    groups = grpo.num_prompts + config.backend.inflight_groups
    if groups > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all"
                         f" there are), got {groups}")

    sampling = Sampling(grpo.temperature, grpo.max_new_tokens, stop_token_ids, grpo.top_k,
                        grpo.top_p, grpo.min_p, max_kept=config.max_kept)
    max_model_len = grpo.max_new_tokens + longest_prompt
    if path == "toy":
        path = str(toy_model(config.run.cache_dir, config.run.seed, config.run.task))
    dropped = num_problems - len(task.prompts)
    model_files = [each for each in Path(path).glob("*") if each.is_file() and each.suffix != ".md"]
    files = {f"{config.run.model}/{each.name}": records.digest_of(each) for each in model_files}
    files[config.run.task] = task.fingerprint
    records.keep_files(files if earlier is None else earlier, files)
    out = Path(config.run.out).absolute()
    return Run(config, out, path, task, tokenizer, sampling, max_model_len, dropped, files)


def find_task(config: Config) -> Task:
    """The task that `--task` names. Raises: ValueError that says what is wrong with it."""
    name = config.run.task
    if name in BUILT_IN:
        from examples.toys import COUNTDOWN, TASKS

        if name in TASKS:
            return TASKS[name](config.run.seed)
        name = COUNTDOWN
    return load_task(name, config.run.seed, config.data.eval_task, config.data.reward_limit_s)


def name_idle_switches(run: Run, block: int) -> None:
    """Print which switches cannot change a figure of this run; `block`: tokens of a KV block."""
    parity, grpo = run.config.parity, run.config.grpo
    float32 = run.config.run.dtype == "float32"
    cached = not parity.in_force("explicit_runtime", "prefix-cache")
    waiting = run.config.backend.inflight_groups
    for name, is_idle, why in (
        # The last token of a prompt is always computed.
        ("explicit_runtime: the prefix cache", cached and max(map(len, run.task.prompts)) <= block,
         f"no prompt is longer than a block of {block} tokens; try --block-size"),
        ("inflight_keep", not parity.inflight_keep and not waiting,
         "no load meets an unfinished rollout; try --inflight-groups"),
        ("fp32_head", not parity.fp32_head and float32,
         "the model's dtype is float32; try --dtype bfloat16"),
        ("replay_routes", grpo.replay_routes and float32 and grpo.num_minibatches == 1,
         "in float32 no token is routed otherwise before the update; try --dtype bfloat16"),
    ):
        if is_idle:
            print(f"{name} is switched WITHOUT EFFECT: {why}", flush=True)


def is_routed(run: Run, model: Any) -> bool:
    """Whether the engine's choice of experts is recorded: of any mixture in vLLM on a CPU."""
    is_mixture = hasattr(model.config, "num_experts_per_tok") and not torch.cuda.is_available()
    return run.config.grpo.replay_routes or (is_mixture and run.config.backend.engine == "vllm")


def load_policy(run: Run) -> Policy:
    """The policy of `--model`."""
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    support = None
    make_policy = Policy
    if config.grpo.has_mask:
        from extras.masks import KeptTokens

        support = KeptTokens(run.sampling)
    with records.stage(f"loading the model in {run.model_path}"):
        model = load_model(run.model_path, getattr(torch, config.run.dtype)).to(device)
        if config.lora.lora_rank:
            from extras import lora

            lora.add_adapters(model, config.lora, config.run.seed)
            make_policy = lora.AdaptedPolicy
        if config.grpo.gradient_checkpointing:
            from extras.checkpointing import checkpoint_layers

            checkpoint_layers(model)
        if is_routed(run, model):
            from extras.routes import RoutedPolicy

            make_policy = partial(RoutedPolicy, replay=config.grpo.replay_routes)
        return make_policy(model, config.parity.trainer_fp32_head, support=support)


def start_engine(run: Run, policy: Policy) -> Engine:
    """The engine that `--engine` names, still without the policy's weights."""
    config, backend = run.config, run.config.backend
    if backend.engine == "transformers":
        from extras.reference import engine_for

        return engine_for(run, policy)
    options = dict(
        max_model_len=run.max_model_len, max_num_seqs=backend.max_num_seqs, seed=config.run.seed,
        kv_cache_gib=backend.kv_cache_gib, block_size=backend.block_size,
        prefix_cache=backend.prefix_cache, cuda_graphs=backend.cuda_graphs,
        allow_untested_vllm=backend.allow_untested_vllm,
    )
    if config.grpo.has_mask:
        from extras.masks import collect_kept_sets

        options["collect"] = collect_kept_sets
    if backend.engine == "shared":
        from extras.shared_engine import SharedEngine

        return SharedEngine(policy, run.model_path, config.parity, exact=backend.exact, **options)
    make_engine = Engine
    if is_routed(run, policy.model):
        from extras.routes import RoutedEngine as make_engine
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return make_engine(run.model_path, contract, config.parity, dtype=policy.model.dtype, **options)


def find_checkpoint(run: Run) -> dict[str, Any] | None:
    """With --resume the newest checkpoint, if there is one."""
    options = run.config.run
    if not options.resume:
        return None
    found = records.newest_checkpoint(run.out, options.checkpoint_every, run.fingerprint)
    if found and found["step"] > options.steps:
        raise ValueError(f"steps must be at least {found['step']}, the checkpoint's, got"
                         f" {options.steps}")
    return found


def build(
    run: Run, policy: Policy, engine: Engine, checkpoint: dict[str, Any] | None
) -> tuple[TrainingState, int]:
    """Both sides with the same weights, fresh or from a checkpoint, and the first step."""
    config, grpo = run.config, run.config.grpo
    if config.backend.engine == "shared":
        policy = engine.policy  # of the same model, with the body and the products of the engine
    # The first policy's, resumed or not: the checkpoint comes later.
    needs_reference = grpo.kl_coef or OBJECTIVES[grpo.objective].needs_reference
    reference = policy.copied_weights() if needs_reference else None
    make_optimizer, make_source = Optimizer, Synchronous
    if grpo.offload_optimizer:
        from extras.offload import OffloadedOptimizer as make_optimizer
    if config.backend.inflight_groups:
        from extras.inflight import GroupsInFlight as make_source
    optimizer = make_optimizer(policy.model, grpo.weight_decay)
    source = make_source(run, engine)
    state = TrainingState(policy, reference, optimizer, engine, source)
    if config.measure.eval_with_trainer:
        state.trainer_alone = trainer_alone(run, state)
    if checkpoint:
        state.load_state_dict(checkpoint)
    first_step = checkpoint["step"] + 1 if checkpoint else 1
    records.cut_tables(run.out, first_step - 1 if checkpoint else -1)
    engine.load(policy.weights(), policy.response_logprobs)
    state.observers = observers(run, state)
    state.watchers = watchers(run, first_step)
    records.write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        in_force = ", ".join(f"{name} {value}" for name, value in settings.items())
        print(f"{side}: {in_force}", flush=True)
    name_idle_switches(run, engine.settings.get("block_size", 0))  # 0: transformers has no blocks
    if config.run.resume:
        without = "" if checkpoint else ": there was no checkpoint"
        print(f"resumed at step {first_step}{without}", flush=True)
    return state, first_step


def _record(run: Run, policy: Policy, engine: Engine) -> dict[str, Any]:
    task, record = run.task, records.provenance(policy.device)
    return record | {
        "config": run.config.flat(), "audit": engine.settings, "seed": run.config.run.seed,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(task.train), "held_out": len(task.held_out),
                     "dropped": run.dropped_prompts, "merged": task.num_repeated},
        "files": run.files,
        "versions": record["versions"] | {"vllm": engine.version},
    }


def trainer_alone(run: Run, state: TrainingState) -> Synchronous:
    """The source of --eval-with-trainer: the run's own if the trainer's modules sample anyway."""
    if run.config.backend.engine == "transformers":
        return state.source
    from extras.reference import engine_for

    return Synchronous(run, engine_for(run, state.policy))


def observers(run: Run, state: TrainingState) -> list[Callable[[Step], dict[str, Any]]]:
    """What the options ask to be called at the end of a step; returns further metrics."""
    measure = run.config.measure
    asked = []
    if run.config.backend.exact:
        from extras.shared_engine import observe_exact

        asked.append(partial(observe_exact, state.engine))
    if measure.self_noise_every:
        from probe.noise import observe_self_noise

        asked.append(partial(observe_self_noise, state.policy, run.config))
    if measure.probe_every or measure.probe_on_alarm:
        from probe.diagnose import StepProbe

        asked.append(StepProbe(run, state))
    return asked


def watchers(run: Run, first_step: int) -> list[Callable[[dict[str, Any]], None]]:
    """What draws the rows of metrics.jsonl while the run goes on."""
    found = [partial(records.draw_at_evaluation, run.out)]
    if run.config.measure.tensorboard:
        from extras.tensorboard import TensorBoard

        found.append(TensorBoard(run.out, first_step))
    return found


# ---------------------------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused in set-up, 1 failed later, 130 stopped by a signal."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with records.one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    out = config.run.out
    with records.one_sentence(2), records.locked(out):
        run = prepare(config)
        checkpoint = find_checkpoint(run)
        with records.one_sentence(2, out):  # accepted: from here on files are written
            policy = load_policy(run)
            engine = start_engine(run, policy)
            state, first_step = build(run, policy, engine, checkpoint)
        with records.one_sentence(1, out):
            train(run, state, first_step)


if __name__ == "__main__":
    # The module's own name, so that extras/ can import it without a second copy of its classes.
    from train import main as command

    command()
    records.end_process()
