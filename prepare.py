"""A run before its model is loaded: its options, its problems, and all that is refused by then."""

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import records
from config import BUILT_IN, NOT_OF_THE_EXPERIMENT, Config
from engine_adapter import Sampling, check_vllm_version
from models import describe_model
from tasks import Task, encode, load_task

HERE = Path(__file__).parent


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
        return sha256(json.dumps([options, self.task.fingerprint]).encode()).hexdigest()


def prepare(config: Config) -> Run:
    """Check all that can be checked before a model is loaded or taught. Raises: ValueError."""
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
