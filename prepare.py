"""A run from its options: what is refused for its files, data and model, then the two sides.

config.py refuses what the options alone decide. An option imports its file of extras/ or probe/
here.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import records
from config import BUILT_IN, NOT_OF_THE_EXPERIMENT, Config, GrpoConfig
from engine_adapter import Engine, check_vllm_version
from models import describe_model
from objectives import Batch
from rl import Optimizer, Policy, frozen_logprobs
from sampling import Rollout, Sampling, reseed
from tasks import Problem, Task, encode, load_task

HERE = Path(__file__).parent
Observer = Callable[[Any], dict[str, Any]]  # a train.Step -> further metrics
Watcher = Callable[[dict[str, Any]], None]  # a row of metrics.jsonl


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

    @property
    def fingerprint(self) -> str:
        """Digest of the options and the problems: equal for a run and its resumption."""
        flat = self.config.flat()
        options = {name: value for name, value in flat.items() if name not in NOT_OF_THE_EXPERIMENT}
        record = json.dumps([options, self.task.fingerprint], sort_keys=True)
        return sha256(record.encode()).hexdigest()


def prepare(config: Config) -> Run:
    """Check all that can be checked without a model, then teach the toy if it is asked for.

    Raises: ValueError.
    """
    check_files(config)
    for name in ("offload_optimizer", "cuda_graphs"):
        if config.flat()[name] and not torch.cuda.is_available():
            raise ValueError(f"{name} must not be given without a GPU (it would do nothing)")
    if config.backend.engine != "transformers":
        check_vllm_version(config.backend.allow_untested_vllm)
    earlier_problems = _earlier_problems(config)
    _name_idle_switches(config)
    out = Path(config.run.out).absolute()  # a task may change the working directory

    task = find_task(config)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    model_config, tokenizer, stop_token_ids = _describe(config)
    task = encode(tokenizer, task)
    largest = max(max(ids) for ids in (*task.prompts, stop_token_ids))
    if largest >= model_config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the"
                         f" vocabulary of {model_config.vocab_size}")
    num_problems = len(task.prompts)
    task = _fitting(config, task, getattr(model_config, "max_position_embeddings", None))
    groups = config.grpo.num_prompts + config.backend.inflight_groups
    if groups > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all"
                         f" there are), got {groups}")
    if earlier_problems not in (None, task.fingerprint):
        raise ValueError(f"a resumed run must keep its problems, {config.run.task} has others now")

    grpo = config.grpo
    sampling = Sampling(grpo.temperature, grpo.max_new_tokens, stop_token_ids, grpo.top_k,
                        grpo.top_p, grpo.min_p, max_kept=config.max_kept)
    max_model_len = grpo.max_new_tokens + max(map(len, task.prompts))
    path = config.run.model
    if path == "toy":
        from examples.toys import toy_model

        path = str(toy_model(config.run.cache_dir, config.run.seed, config.run.task))
    dropped = num_problems - len(task.prompts)
    return Run(config, out, path, task, tokenizer, sampling, max_model_len, dropped)


def find_task(config: Config) -> Task:
    """The task that `--task` names. Raises: ValueError that says what is wrong with it."""
    name = config.run.task
    if name in BUILT_IN:
        from examples.toys import COUNTDOWN, TASKS

        if name in TASKS:
            return TASKS[name](config.run.seed)
        name = COUNTDOWN
    return load_task(name, config.run.seed, config.data.eval_task, config.data.reward_limit_s)


def _describe(config: Config) -> tuple[Any, Any, tuple[int, ...]]:
    """Configuration, tokenizer and stop tokens of `--model`, without its weights."""
    if config.run.model == "toy":
        from examples.toys import describe_toy

        return describe_toy(config.run.task)
    return describe_model(config.run.model)


def _name_idle_switches(config: Config) -> None:
    """Print which fixes are off and cannot change a figure of this run."""
    without = "is off WITHOUT EFFECT:"
    if not config.parity.inflight_keep and not config.backend.inflight_groups:
        print(f"inflight_keep {without} no load meets an unfinished rollout; try --inflight-groups",
              flush=True)
    if not config.parity.fp32_head and config.run.dtype == "float32":
        print(f"fp32_head {without} the model's dtype is float32; try --dtype bfloat16", flush=True)


def _earlier_problems(config: Config) -> str | None:
    """Digest of the problems of the run in `out`, if there is one that is to be resumed.

    Raises: ValueError if it is damaged, not to be resumed, or had other options.
    """
    path = Path(config.run.out) / "config.json"
    if not path.exists():
        tables = [table for table in path.parent.glob("*.jsonl") if table.stat().st_size]
        if tables or any(path.parent.glob("checkpoints/*")):
            raise ValueError(f"out must be new or a whole run, {config.run.out} has a run's files"
                             " without config.json")
        return None
    if not config.run.resume:
        raise ValueError(f"out must be a new folder, {config.run.out} holds a run; go on with"
                         " --resume or choose another --out")
    with records.stage(f"reading {path}"):
        record = json.loads(path.read_text())
        theirs = dict(record["config"])
        problems = record["problems"]["sha256"]
    ours = config.flat()
    names = ours.keys() - NOT_OF_THE_EXPERIMENT
    changed = sorted(name for name in names if ours[name] != theirs.get(name))
    if changed:
        raise ValueError(f"a resumed run must keep its options, changed are {', '.join(changed)}")
    return problems


def _fitting(config: Config, task: Task, context: int | None) -> Task:
    """The task without the problems whose prompts are too long, if these are to be dropped."""
    response = config.grpo.max_new_tokens
    if context is not None and response >= context:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got"
                         f" {response}")
    limit, why = config.data.max_prompt_tokens, "--max-prompt-tokens"
    if context is not None and (limit is None or context - response < limit):
        limit, why = context - response, f"the context of {context} less --max-new-tokens"
    problems = task.train + task.held_out
    overlong = [each for each in problems if limit is not None and len(each.prompt_ids) > limit]
    if not overlong:
        return task
    counted = f"{len(overlong)} of {len(problems)} prompts are longer than {limit} tokens ({why})"
    if config.data.overlong_prompts == "refuse":
        worst = max(overlong, key=lambda problem: len(problem.prompt_ids))
        raise ValueError(f"{counted}, {worst.source} has {len(worst.prompt_ids)};"
                         " try --overlong-prompts drop")
    train = [problem for problem in task.train if len(problem.prompt_ids) <= limit]
    held_out = [problem for problem in task.held_out if len(problem.prompt_ids) <= limit]
    if not train or not held_out:
        part = "held-out" if train else "training"
        raise ValueError(f"{counted}, none of the {part} problems is left")
    print(f"{counted}: DROPPED", flush=True)
    return replace(task, train=train, held_out=held_out)


def check_files(config: Config) -> None:
    """Raises: ValueError if an option needs a file or a package that is not there."""
    grpo, backend, measure = config.grpo, config.backend, config.measure
    probes = measure.probe_every or measure.probe_on_alarm
    for option, given, file in (
        ("engine transformers", backend.engine == "transformers", "extras/reference.py"),
        ("engine shared", backend.engine == "shared", "extras/shared_engine.py"),
        ("exact", backend.exact, "extras/exact.py"),
        ("inflight_groups", backend.inflight_groups, "extras/inflight.py"),
        ("top_k, top_p or min_p", grpo.has_mask, "extras/masks.py"),
        ("gradient_checkpointing", grpo.gradient_checkpointing, "extras/checkpointing.py"),
        ("offload_optimizer", grpo.offload_optimizer, "extras/offload.py"),
        ("self_noise_every", measure.self_noise_every, "probe/noise.py"),
        ("probe_every or probe_on_alarm", probes, "probe/diagnose.py"),
        ("probe_every or probe_on_alarm", probes, "extras/masks.py"),
        ("tensorboard", measure.tensorboard, "extras/tensorboard.py"),
    ):
        if given and not (HERE / file).exists():
            raise ValueError(f"{option} needs {file}, which is not there")
    if measure.tensorboard and find_spec("tensorboard") is None:
        raise ValueError("tensorboard needs the package of this name, which is not installed; try"
                         " `pip install tensorboard`")


# ---------------------------------------------------------------------------------- both sides
class Synchronous:
    """Where rollouts come from: P problems a step, all responses sampled to their end."""

    def __init__(self, task: Task, engine: Engine, sampling: Sampling, config: Config):
        self.task, self.engine, self.sampling, self.config = task, engine, sampling, config
        self.rng = random.Random(config.run.seed)

    def next(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """P problems and B = P * G rollouts, group-major."""
        problems = self.task.sample(self.rng, self.config.grpo.num_prompts)
        reseed(self.config.run.seed, "train", step)
        prompts = [problem.prompt_ids for problem in problems]
        return problems, self.engine.generate(prompts, self.config.grpo.group_size, self.sampling)

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
    reference: dict[str, torch.Tensor] | None  # the first policy's weights by name, for --kl-coef
    optimizer: Optimizer
    engine: Engine
    source: Synchronous  # or extras.inflight.GroupsInFlight
    # Evaluates beside the engine, with the trainer's own modules.
    trainer_alone: Engine | None = None
    observers: list[Observer] = field(default_factory=list)  # at the end of a step
    watchers: list[Watcher] = field(default_factory=list)  # after each row of metrics.jsonl

    def add_reference(self, batch: Batch, grpo: GrpoConfig) -> Batch:
        """The batch with `ref_logprobs`, if there is a KL term."""
        if self.reference is None:
            return batch
        # The same arithmetic for both sides of the divergence.
        with self.policy.using(self.reference):
            return replace(batch, ref_logprobs=frozen_logprobs(self.policy, batch, grpo))

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.model.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.source.load_state_dict(state["source"])


def extra_if_there(name: str) -> ModuleType | None:
    """A file of extras/ that the default job uses, or None if it has been deleted."""
    if (HERE / "extras" / f"{name}.py").exists():
        return import_module(f"extras.{name}")
    return None


def build(run: Run, start: Callable | None = None) -> tuple[TrainingState, int]:
    """Both sides with the same weights, fresh or from a checkpoint, and the first step."""
    config, grpo = run.config, run.config.grpo
    checkpoint = None
    if config.run.resume:
        every = config.run.checkpoint_every
        checkpoint = records.newest_checkpoint(run.out, every, run.fingerprint)
    policy = load_policy(run)
    # The first policy's, resumed or not: the checkpoint comes later.
    reference = policy.copied_weights() if grpo.kl_coef else None
    make_optimizer = Optimizer
    if grpo.offload_optimizer:
        from extras.offload import OffloadedOptimizer as make_optimizer
    optimizer = make_optimizer(policy.model, grpo.weight_decay)
    alone = trainer_alone(run, policy)
    start = start or start_engine  # lab/other_vllm.py has another
    engine = start(run, policy, alone)
    if grpo.has_mask:
        from extras.masks import use_masks

        use_masks(policy, engine, run.sampling)
    make_source = Synchronous
    if config.backend.inflight_groups:
        from extras.inflight import GroupsInFlight as make_source
    source = make_source(run.task, engine, run.sampling, config)
    state = TrainingState(policy, reference, optimizer, engine, source, alone)
    records.restore(run.out, checkpoint)
    if checkpoint:
        state.load_state_dict(checkpoint)
    first_step = checkpoint["step"] + 1 if checkpoint else 1
    engine.load(policy.weights(), policy.response_logprobs)
    state.observers = observers(run, state)
    state.watchers = watchers(run, first_step)
    records.write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    for side, settings in (("trainer", policy.audit()), ("engine", engine.settings)):
        in_force = ", ".join(f"{name} {value}" for name, value in settings.items())
        print(f"{side}: {in_force}", flush=True)
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
                     "dropped": run.dropped_prompts, "merged": task.num_repeated,
                     "sha256": task.fingerprint},
        "versions": record["versions"] | {"vllm": engine.version},
    }


def load_policy(run: Run) -> Policy:
    """The policy of `--model`; each prompt is computed once, if extras/prompts.py is there."""
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    with records.stage(f"loading the model in {run.model_path}"):
        policy = Policy.load(run.model_path, getattr(torch, config.run.dtype), device,
                             config.parity.trainer_fp32_head)
        if config.grpo.gradient_checkpointing:
            from extras.checkpointing import checkpoint_layers

            checkpoint_layers(policy)
    prompts = extra_if_there("prompts")
    if prompts:
        prompts.compute_prompts_once(policy)
    return policy


def start_engine(run: Run, policy: Policy, alone: Engine | None = None) -> Engine:
    """The engine that `--engine` names, still without the policy's weights.

    `alone`: see trainer_alone.
    """
    config, backend = run.config, run.config.backend
    if backend.engine == "transformers":
        from extras.reference import engine_for

        return alone or engine_for(run, policy)
    options = dict(
        max_model_len=run.max_model_len, max_num_seqs=backend.max_num_seqs, seed=config.run.seed,
        kv_cache_gib=backend.kv_cache_gib, block_size=backend.block_size,
        prefix_cache=backend.prefix_cache, cuda_graphs=backend.cuda_graphs,
        allow_untested_vllm=backend.allow_untested_vllm,
    )
    if backend.engine == "shared":
        from extras.shared_engine import SharedEngine

        return SharedEngine(policy, run.model_path, config.parity, exact=backend.exact, **options)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    return Engine(run.model_path, contract, config.parity, dtype=policy.model.dtype, **options)


def trainer_alone(run: Run, policy: Policy) -> Engine | None:
    """The engine of `--eval-with-trainer`, if extras/reference.py is there."""
    if not run.config.measure.eval_with_trainer:
        return None
    reference = extra_if_there("reference")
    if reference is None:
        print("eval_with_trainer is LEFT OUT: it needs extras/reference.py", flush=True)
        return None
    return reference.engine_for(run, policy)


def observers(run: Run, state: TrainingState) -> list[Observer]:
    """What the options ask to be called at the end of a step."""
    measure = run.config.measure
    asked = []
    if measure.self_noise_every:
        from probe.noise import observe_self_noise

        asked.append(partial(observe_self_noise, state.policy, run.config))
    if measure.probe_every or measure.probe_on_alarm:
        from probe.diagnose import StepProbe

        asked.append(StepProbe(run, state))
    return asked


def watchers(run: Run, first_step: int) -> list[Watcher]:
    """What draws the rows of metrics.jsonl while the run goes on."""
    found = []
    curves = extra_if_there("curves")
    if curves:
        found.append(partial(curves.draw_at_evaluation, run.out))
    if run.config.measure.tensorboard:
        from extras.tensorboard import TensorBoard

        found.append(TensorBoard(run.out, first_step))
    return found
