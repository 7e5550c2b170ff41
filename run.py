"""A run: what stays the same, what changes, and building both sides before the first step."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from config import Config
from engine_adapter import Engine, Sampling, Synchronous, has_sampling_mask
from models import load_model, read_config, save_model
from objectives import OBJECTIVES
from report.errors import replace_file, stage
from report.files import TABLES, checkpoints, provenance
from rl import (
    VOCABULARY,
    Batch,
    Optimizer,
    Policy,
    Scoring,
    make_batch,
)
from tasks import Task
from tasks.job import digests, find_job
from tasks.prompts import prompts_record
from verify import distribution
from verify.start import check_vllm_version


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    out: Path
    model_path: str
    task: Task
    sampling: Sampling

    @property
    def max_model_len(self) -> int:
        """The longest prompt and response together, in tokens."""
        return self.sampling.max_new_tokens + max(map(len, self.task.prompts))

    @cached_property
    def files(self) -> dict[str, str]:
        """Digests of the model's files and of the task, by name."""
        job = self.config.job
        return digests(job.task, self.config.data, self.task, job.model, self.model_path)

    @property
    def seen_by_extras(self) -> Any:
        """This run with the options by their own names, without groups."""
        usual, config = Config().flat(), self.config
        options = config.flat()
        given = {name for name, value in options.items() if value != usual[name]}
        flat = SimpleNamespace(**options | {"parity": config.parity, "data": config.data},
                               given=given, lr_at=config.lr_at)
        return SimpleNamespace(config=flat, task=self.task, sampling=self.sampling)


@dataclass
class TrainingState:
    """What changes from step to step, and what options add to a step."""

    policy: Policy
    optimizer: Optimizer
    engine: Engine
    source: Synchronous  # or extras.inflight.GroupsInFlight
    tracker: Any = None  # extras.tracker.Tracker
    trainer_alone: Synchronous | None = None  # answers with the trainer's own modules
    # Called with batch and metrics between measurement and update; return further metrics, or
    # another learning rate, `lr`.
    before_update: list[Callable[[Batch, dict[str, Any]], dict[str, Any]]] = field(
        default_factory=list)
    # Called with each train.Step at its end; return further metrics.
    observers: list[Callable[[Any], dict[str, Any]]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.trained(), "optimizer": self.optimizer.state_dict(),
                "source": self.source.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        trained, saved = self.policy.trained(), state["policy"]
        assert saved.keys() == trained.keys(), "tensors of the checkpoint"
        for name, tensor in trained.items():
            tensor.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


# ---------------------------------------------------------------------------------- checks
def prepare(config: Config) -> Run:
    """Check all that can be checked without the model's weights. Raises: ValueError."""
    check_machine(config)
    out = Path(config.job.out).absolute()
    holds_run = (out / "config.json").exists() or checkpoints(out)
    if holds_run and not config.job.resume:
        raise ValueError(f"out must be a new folder, {config.job.out} holds a run; go on with"
                         " --resume or choose another --out")
    learning = config.learning
    job = find_job(config.job.task, config.job.seed, config.data, config.job.model,
                   config.job.cache_dir, learning.max_new_tokens)
    task = job.task
    groups = learning.num_prompts + config.backend.inflight_groups
    if config.job.steps and groups > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all"
                         f" there are), got {groups}")
    sampling = Sampling(learning.temperature, learning.max_new_tokens, job.stop_token_ids,
                        learning.top_k, learning.top_p, learning.min_p, max_kept=config.max_kept)
    run = Run(config, out, job.folder, task, sampling)
    from extras import notices

    notices.check_task(run.seen_by_extras, None)
    return run


def check_machine(config: Config) -> None:
    """Raises: ValueError if an option needs another device, library or vLLM."""
    for name in ("offload_optimizer", "cuda_graphs"):
        if config.flat()[name] and not torch.cuda.is_available():
            raise ValueError(f"{name} must not be given without a GPU (it would do nothing)")
    tracker = config.job.tracker
    if tracker != "none" and find_spec(tracker) is None:
        raise ValueError(f"tracker must be installed, {tracker} is not: pip install {tracker}")
    learning = config.learning
    samples_in_vllm = config.backend.engine != "transformers"
    if torch.cuda.is_available() and samples_in_vllm and learning.min_p and learning.top_p < 1:
        raise ValueError("min_p must be 0 with top_p on a GPU (vLLM's kernel for top-p drops tokens"
                         f" after min-p), got {learning.min_p} and {learning.top_p}; try --top-k")
    if samples_in_vllm:
        check_vllm_version(config.backend.allow_untested_vllm)


# ---------------------------------------------------------------------------------- both sides
def load_policy(run: Run) -> Policy:
    """The policy of `--model`, with what the options change of it."""
    config = run.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    support = VOCABULARY
    parts = {}
    if has_sampling_mask(config.learning):
        from extras.sampling_mask import SamplingMask

        support = SamplingMask(run.sampling)
    temperature = config.learning.temperature if config.parity.trainer_temperature else 1.0
    scoring = Scoring(temperature, config.parity.trainer_fp32_head, support)
    with stage(f"loading the model in {run.model_path}"):
        model = load_model(run.model_path, getattr(torch, config.job.dtype)).to(device)
        from extras.rotary_table import give_one_table

        give_one_table(model, run.max_model_len)
        if config.lora.lora_rank:
            from extras.lora import Adapters

            parts["send"] = Adapters(model, config.lora, config.job.seed)
        if config.backend.rollout_weights != "own":
            from extras.rounded_weights import RoundedWeights

            parts["send"] = RoundedWeights(model, config.backend.rollout_weights)
        if config.learning.gradient_checkpointing:
            from extras.gradient_checkpointing import checkpoint_layers

            checkpoint_layers(model)
        if not config.learning.plain:
            from extras.fast import fast_parts

            parts |= fast_parts(model)
        objective = OBJECTIVES[config.learning.objective]
        has_reference = config.learning.kl_coef > 0 or objective.needs_reference
        return Policy(model, scoring, has_reference=has_reference, **parts)


def start_engine(run: Run, policy: Policy) -> Engine:
    """The engine that `--engine` names, still without the policy's weights."""
    config, backend = run.config, run.config.backend
    if backend.engine == "transformers":
        from extras.transformers_engine import engine_for

        return engine_for(run, policy)
    from extras import cuda_graphs, prefix_cache
    from extras.rotary_table import with_one_table

    options = {name: getattr(backend, name)
               for name in ("kv_cache_gib", "max_num_seqs", "block_size")} | dict(
        max_model_len=run.max_model_len, dtype=policy.model.dtype, seed=config.job.seed,
        checks=backend, config=with_one_table(read_config(run.model_path), run.max_model_len))
    for extra in (cuda_graphs, prefix_cache):
        extra.install(run, backend, SimpleNamespace(engine=options))
    if has_sampling_mask(config.learning):
        from extras.sampling_mask import collect_kept_sets

        options["collect"] = collect_kept_sets
    kind = Engine
    if backend.inflight_groups:
        from extras.inflight import InflightEngine

        kind = InflightEngine
    return kind(run.model_path, policy.weights().keys(), config.parity, **options)


def find_checkpoint(run: Run) -> dict[str, Any] | None:
    """With --resume the newest checkpoint, if there is one."""
    if not run.config.job.resume:
        return None
    from extras.resume import newest_checkpoint

    return newest_checkpoint(run)


def build(run: Run, policy: Policy, engine: Engine) -> TrainingState:
    """The state before the first step, with the engine still without the policy's weights."""
    config, learning = run.config, run.config.learning
    make_optimizer, make_source = Optimizer, Synchronous
    if learning.offload_optimizer:
        from extras.offload import OffloadedOptimizer

        make_optimizer = OffloadedOptimizer
    if config.backend.inflight_groups:
        from extras.inflight import GroupsInFlight

        make_source = partial(GroupsInFlight, num_waiting=config.backend.inflight_groups,
                              max_staleness=config.backend.max_staleness)
    of_source = run.task, run.sampling, learning.num_prompts, learning.group_size, config.job.seed
    source = make_source(engine, *of_source)
    optimizer = make_optimizer(policy.model, learning.weight_decay)
    state = TrainingState(policy, optimizer, engine, source)
    if config.measure.eval_trainer_alone:
        from extras.transformers_engine import engine_for

        state.trainer_alone = Synchronous(engine_for(run, policy), *of_source)
    return state


def begin(run: Run, state: TrainingState, checkpoint: dict[str, Any] | None = None) -> int:
    """Both sides get the same weights, fresh or from the checkpoint, and the run its records.

    Returns the number of the first step.
    """
    first_step = 1
    policy, engine = state.policy, state.engine
    if checkpoint:
        from extras.resume import drop_rows_after

        state.load_state_dict(checkpoint)
        first_step = checkpoint["step"] + 1
        drop_rows_after(checkpoint["step"], run.out)
    else:
        for table in TABLES:
            replace_file(run.out / table, "")
    engine.load(policy.weights(), policy.response_logprobs)
    if run.config.backend.engine != "transformers":
        prompts = [problem.prompt_ids for problem in run.task.train]
        batch = make_batch(distribution.sampled(engine, prompts, run.sampling), policy.device)
        distribution.check(policy, engine, batch, stated(run.sampling))
    state.observers = observers(run, state)  # after the load: the probe copies the first weights
    record = _record(run, policy, engine)
    if checkpoint:
        from extras.resume import added

        record = added(record, first_step, run.out)
    replace_file(run.out / "config.json", json.dumps(record, indent=2))
    announce(run, policy, engine)
    from extras import idle_switches

    parts = SimpleNamespace(at_begin=[])
    idle_switches.install(run.seen_by_extras, None, parts)
    for at_begin in parts.at_begin:
        at_begin(state, record, first_step)
    if run.config.job.tracker != "none":
        from extras.tracker import Tracker

        state.tracker = Tracker(run.config.job.tracker, run.out, record, first_step)
    if run.config.job.resume:
        without = "" if checkpoint else ": there was no checkpoint"
        print(f"resumed at step {first_step}{without}", flush=True)
    return first_step


def announce(run: Run, policy: Policy, engine: Engine) -> None:
    """Print what is in force on both sides."""
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        in_force = ", ".join(f"{name} {value}" for name, value in settings.items())
        print(f"{side}: {in_force}", flush=True)


def stated(sampling: Sampling) -> Callable[[Any], Any]:
    """(N, V) logits, as the sampling changes them before its softmax."""
    from extras.sampling_mask import masked_logits

    return lambda logits: masked_logits(logits / sampling.temperature, sampling)


def _record(run: Run, policy: Policy, engine: Engine) -> dict[str, Any]:
    task, record = run.task, provenance(policy.device)
    record["versions"]["vllm"] = engine.vllm_version
    evaluated = min(len(task.held_out), run.config.measure.eval_problems)
    return record | {
        "config": run.config.flat(), "audit": engine.settings,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(task.train), "held_out": len(task.held_out),
                     "evaluated": f"{evaluated}, at each step the same, chosen by the seed",
                     "dropped": task.num_dropped, "merged": task.num_repeated},
        "files": run.files, "prompts": prompts_record(task),
    }


def observers(run: Run, state: TrainingState) -> list[Callable[[Any], dict[str, Any]]]:
    """What the options ask to be called at the end of a step; returns further metrics."""
    measure = run.config.measure
    asked = []
    if measure.self_noise_every:
        from probe.noise import observe_self_noise

        asked.append(partial(observe_self_noise, state.policy, run.config))
    if measure.probe_every or measure.probe_on_alarm:
        from probe.diagnose import StepProbe

        asked.append(StepProbe(run, state))
    return asked


def save_policy(run: Run, policy: Policy) -> None:
    """OUT/policy: the model as a Hugging Face folder, with the adapters merged into it."""
    from extras.further_tokens import copy_untrained

    if run.config.lora.lora_rank:
        policy.send.merge()
    folder = run.out / "policy"
    save_model(policy.model, run.task.tokenizer, run.sampling, folder)
    copy_untrained(run.model_path, policy.model.config, folder)
