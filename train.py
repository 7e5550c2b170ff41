"""Colocated GRPO in one process: a transformers trainer and a vLLM V1 engine take turns on one device.

One step is: sample, sleep, score, update, wake, load. It is spelled out in `train_step`, the page to read.
"""

import json
import random
import shutil
import signal
from dataclasses import asdict, dataclass, field, replace
from hashlib import file_digest, sha256
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal

import torch
import transformers
import tyro
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine_adapter import Engine, Flight, ParityFlags, Rollout, Sampling, check_vllm_version
from objectives import OBJECTIVES, group_advantages, mismatch_metrics
from records import (
    MANIFEST,
    TABLES,
    Clock,
    locked,
    log_line,
    memory_gib,
    one_sentence,
    plot_curves,
    provenance,
    stage,
    write_atomically,
    write_config,
)
from reference import ReferenceEngine, kv_bytes_per_token
from rl import Batch, Optimizer, Policy, UpdateOptions, frozen_logprobs, make_batch, update
from tasks import BUILT_IN, CALL_LIMIT_S, Problem, Scores, Task, describe_model, encode_prompt, load_task, score
from toys import describe_toy, toy_model


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

    def __post_init__(self):
        for rule, holds, names in (
            ("a name", bool, "out model task cache_dir"),
            ("at least 1", lambda value: value >= 1, "steps num_prompts max_new_tokens num_minibatches"
             " micro_batch_tokens eval_every eval_problems eval_samples checkpoint_every max_num_seqs"),
            ("positive and finite", lambda value: 0 < value < float("inf"),
             "temperature lr grad_clip tis_cap kv_cache_gib reward_limit_s"),
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


# ------------------------------------------------------------------------------------------------ set-up
@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    out: Path
    model_path: str
    task: Task
    prompt_ids: dict[Problem, list[int]]
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    max_model_len: int
    dropped_prompts: int

    def encode(self, problems: list[Problem]) -> list[list[int]]:
        return [self.prompt_ids[problem] for problem in problems]

    def score(self, problems: list[Problem], rollouts: list[Rollout]) -> Scores:
        texts = self.tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
        stop = self.config.reward_errors == "stop"
        scores = score(self.task.reward, problems, texts, self.config.reward_limit_s, stop)
        for error in [error for error in scores.errors if error][:1]:  # the others of the batch are in its count
            print(f"REWARD FAILED, one of {scores.num_errors}: {error}", flush=True)
        return scores

    def log_samples(
        self, step: int, mode: str, problems: list[Problem], rollouts: list[Rollout], scores: Scores
    ) -> None:
        """A line of samples.jsonl per answer: what the model writes, and what it earned."""
        with open(self.out / "samples.jsonl", "a") as file:
            for problem, rollout, response, reward, error in zip(
                problems, rollouts, scores.responses, scores.rewards, scores.errors, strict=True
            ):
                sample = {"step": step, "mode": mode, "reward": reward, "response": response,
                          "question": problem.question, "answer": problem.answer, "source": problem.source,
                          "finish_reason": rollout.finish_reason, "tokens": len(rollout.token_ids), "error": error}
                file.write(json.dumps(sample) + "\n")

    def log(self, metrics: dict[str, Any]) -> None:
        """All of it to metrics.jsonl, one line to the terminal."""
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        print(log_line(metrics, self.config.steps), flush=True)


def prepare(config: Config) -> Run:
    """Find what can be wrong before a model is loaded (or taught). Raises: ValueError with the rule and the way out."""
    if config.engine == "vllm":
        check_vllm_version(config.allow_untested_vllm)
    record, out = _earlier_record(config), Path(config.out).absolute()  # a task may change the working directory
    task = load_task(config.task, config.seed, config.eval_task, config.reward_limit_s)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    if config.offload_optimizer and not torch.cuda.is_available():
        raise ValueError("offload_optimizer must not be given without a GPU (the optimizer is in host memory anyway)")
    if config.model == "toy":
        model_config, tokenizer, stop_token_ids = describe_toy(config.task)
    else:
        model_config, tokenizer, stop_token_ids = describe_model(config.model)
    prompt_ids = encode_prompts(tokenizer, task)
    if (largest := max(*map(max, prompt_ids.values()), *stop_token_ids)) >= model_config.vocab_size:
        raise ValueError(f"the tokenizer must be the model's, its token {largest} is outside the vocabulary of"
                         f" {model_config.vocab_size}")
    task, dropped = _fitting(config, task, prompt_ids, getattr(model_config, "max_position_embeddings", None))
    if (groups := config.num_prompts + config.inflight_groups) > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all there are),"
                         f" got {groups}")
    longest = max(len(prompt_ids[problem]) for problem in task.train + task.held_out)
    if record and record["problems"]["sha256"] != task.fingerprint:
        raise ValueError(f"a resumed run must keep its problems, {config.task} has others now")
    sampling, path = Sampling(config.temperature, config.max_new_tokens, stop_token_ids), config.model
    if path == "toy":  # taught, if it is not there yet, after all else has been checked
        path = str(toy_model(config.cache_dir, config.seed, "digits" if config.task == "digits" else "toy"))
    max_model_len = longest + config.max_new_tokens
    return Run(config, out, path, task, prompt_ids, tokenizer, sampling, max_model_len, dropped)


def _earlier_record(config: Config) -> dict[str, Any] | None:
    """config.json of the run in `out`, if any. Raises: ValueError if it is damaged, or the run is not to be resumed."""
    path = Path(config.out) / "config.json"
    if not path.exists():
        if any(path.parent.glob("checkpoints/*")) or any(each.stat().st_size for each in path.parent.glob("*.jsonl")):
            raise ValueError(f"out must be new or a whole run, {config.out} has a run's files without config.json")
        return None
    if not config.resume:
        raise ValueError(f"out must be a new folder, {config.out} holds a run; go on with --resume or choose another"
                         " --out")
    with stage(f"reading {path}"):
        record = json.loads(path.read_text())
        theirs, _ = dict(record["config"]), record["problems"]["sha256"]
    ours, free = asdict(config), {"resume", "out", "cache_dir", "plan", "plan_gib"}
    if changed := [name for name in ours.keys() - free if ours[name] != theirs.get(name)]:
        raise ValueError(f"a resumed run must keep its options, changed are {', '.join(sorted(changed))}")
    return record


def encode_prompts(tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[Problem, list[int]]:
    prompt_ids = {}
    for problem in task.train + task.held_out:
        try:
            prompt_ids[problem] = encode_prompt(tokenizer, problem)
        except Exception as error:  # tokenizers raise bare Exceptions on text outside their vocabulary
            raise ValueError(f"the tokenizer must encode all prompts, it fails on {problem.source}: {error}") from error
        if not prompt_ids[problem]:
            raise ValueError(f"the tokenizer must encode all prompts, it makes no token of {problem.source}")
    return prompt_ids


def _fitting(
    config: Config, task: Task, prompt_ids: dict[Problem, list[int]], context: int | None
) -> tuple[Task, int]:
    """The task without the problems whose prompts are too long, and how many these are."""
    limit, why = config.max_prompt_tokens, "--max-prompt-tokens"
    if context is not None and config.max_new_tokens >= context:
        raise ValueError(f"max_new_tokens must be below the model's context of {context}, got {config.max_new_tokens}")
    if context is not None and (limit is None or context - config.max_new_tokens < limit):
        limit, why = context - config.max_new_tokens, f"the context of {context} less --max-new-tokens"
    overlong = {problem for problem, ids in prompt_ids.items() if limit is not None and len(ids) > limit}
    if not overlong:
        return task, 0
    worst = max(overlong, key=lambda problem: len(prompt_ids[problem]))
    if config.overlong_prompts == "refuse":
        raise ValueError(f"prompts must be at most {limit} tokens long ({why}), {worst.source} has"
                         f" {len(prompt_ids[worst])}, {len(overlong)} of {len(prompt_ids)} are longer;"
                         " try --overlong-prompts drop")
    train, held_out = ([p for p in problems if p not in overlong] for problems in (task.train, task.held_out))
    if not train or not held_out:
        raise ValueError(f"prompts must be at most {limit} tokens long ({why}), none of the"
                         f" {'held-out' if train else 'training'} problems is left")
    print(f"{len(overlong)} of {len(prompt_ids)} prompts DROPPED: longer than {limit} tokens ({why})", flush=True)
    return replace(task, train=train, held_out=held_out), len(overlong)


@dataclass
class Live:
    """What changes from step to step."""

    policy: Policy
    reference: Policy | None
    optimizer: Optimizer
    engine: Engine | ReferenceEngine
    flight: Flight
    rng: random.Random


def build(run: Run) -> tuple[Live, int]:
    """Both sides with the same weights, fresh or from the newest checkpoint, and the first step to take."""
    config, rng, first_step = run.config, random.Random(run.config.seed), 1
    state, policy = _newest_checkpoint(run) if config.resume else (None, load_policy(run, run.model_path))
    if policy.model._is_stateful and (config.eval_with_trainer or config.engine == "transformers"):
        raise ValueError("engine must be vllm and eval_with_trainer off with recurrent layers (transformers cannot drop"
                         f" a row of their state), got {config.engine}; try --engine vllm --no-eval-with-trainer")
    tables = {name: _recorded(run.out / name, *state["tables"][name]) if state else "" for name in TABLES}
    reference = load_policy(run, run.model_path) if config.kl_coef else None  # the first policy, resumed or not
    optimizer = Optimizer(policy.model, config.weight_decay, config.offload_optimizer)
    engine = start_engine(run, policy)
    flight = Flight(engine, config.group_size, run.sampling, config.max_staleness)
    torch.manual_seed(config.seed)  # after the engine, whose start reseeds the process
    if state:
        first_step = state["step"] + 1
        _restore(state, optimizer, flight, rng)
    run.out.mkdir(parents=True, exist_ok=True)
    for name, text in tables.items():  # empty, if the run died before its first checkpoint
        write_atomically(run.out / name, text)
    engine.load(policy.weights(), policy.score)
    write_config(run.out / "config.json", _record(run, policy, engine), first_step)
    print("trainer: " + ", ".join(f"{name} {value}" for name, value in policy.audit().items()), flush=True)
    print("engine: " + ", ".join(f"{name} {value}" for name, value in engine.settings.items()), flush=True)
    if config.resume:
        print(f"resumed at step {first_step}" + ("" if state else ": there was no checkpoint"), flush=True)
    return Live(policy, reference, optimizer, engine, flight, rng), first_step


def _record(run: Run, policy: Policy, engine: Engine | ReferenceEngine) -> dict[str, Any]:
    record = provenance(policy.device)
    return record | {
        "config": asdict(run.config), "audit": engine.settings,
        "trainer": policy.audit() | {"model_path": run.model_path},
        "problems": {"train": len(run.task.train), "held_out": len(run.task.held_out), "dropped": run.dropped_prompts,
                     "merged": run.task.num_repeated, "sha256": run.task.fingerprint},
        "versions": record["versions"] | {"vllm": engine.version}, "seed": run.config.seed,
    }


def load_policy(run: Run, path: str) -> Policy:
    config, device = run.config, "cuda" if torch.cuda.is_available() else "cpu"
    with stage(f"loading the model in {path}"):
        return Policy.load(path, getattr(torch, config.dtype), device, config.parity.fp32_head,
                           config.gradient_checkpointing)


def start_engine(run: Run, policy: Policy) -> Engine | ReferenceEngine:
    """The engine that `config.engine` names, still without the policy's weights."""
    config = run.config
    if config.engine == "transformers":
        return reference_engine(run, policy)
    contract = {name: tensor.shape for name, tensor in policy.weights().items()}
    engine = Engine(
        run.model_path, contract, config.parity, dtype=policy.model.dtype, max_model_len=run.max_model_len,
        max_num_seqs=config.max_num_seqs, kv_cache_gib=config.kv_cache_gib, block_size=config.block_size,
        enforce_eager=config.enforce_eager, seed=config.seed, allow_untested_vllm=config.allow_untested_vllm,
    )
    if engine.on_gpu != (policy.device.type == "cuda"):
        raise RuntimeError("torch and vLLM see different devices, one is a CPU build: make a fresh .venv")
    return engine


def reference_engine(run: Run, policy: Policy) -> ReferenceEngine:
    """The trainer's own modules as an engine, with as many sequences at once as kv_cache_gib holds."""
    config, model_config = run.config, policy.model.config.get_text_config()
    bytes_per_rollout = run.max_model_len * kv_bytes_per_token(model_config, policy.model.dtype)
    fitting = max(1, int(config.kv_cache_gib * 2**30 / bytes_per_rollout))
    return ReferenceEngine(policy, config.parity.inflight_update, min(config.max_num_seqs, fitting))


# ------------------------------------------------------------------------------------------------ checkpoints
def save_checkpoint(run: Run, live: Live, step: int) -> None:
    """checkpoints/step_N, written under another name and renamed at the end: complete, or not there."""
    folder = run.out / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    random_states = {"rng": live.rng.getstate(), "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    tables = {name: (run.out / name).read_bytes() for name in TABLES}
    state = {"step": step, "optimizer": live.optimizer.state_dict(), "flight": _flight_state(live.flight),
             "tables": {name: (len(rows), sha256(rows).hexdigest()) for name, rows in tables.items()}}
    with stage(f"writing {folder}"):
        save_policy(run, live.policy, unfinished / "policy")
        torch.save(state | random_states, unfinished / "state.pt")
        (unfinished / MANIFEST).write_text(json.dumps(_manifest(unfinished)))
    shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint of this step, which --resume has passed over
    unfinished.rename(folder)
    for old in sorted(folder.parent.glob("step_??????"))[:-2]:
        shutil.rmtree(old)


def _flight_state(flight: Flight) -> dict[str, Any]:
    state = flight.state_dict()
    return state | {"groups": [group | {"problem": asdict(group["problem"])} for group in state["groups"]]}


def save_policy(run: Run, policy: Policy, folder: Path) -> None:
    """A Hugging Face folder: safetensors, tokenizer, and the sampling the policy was trained under as its defaults."""
    policy.model.generation_config = GenerationConfig(
        do_sample=True, temperature=run.sampling.temperature, top_k=0, max_new_tokens=run.sampling.max_new_tokens,
        eos_token_id=list(run.sampling.stop_token_ids), pad_token_id=run.tokenizer.pad_token_id,
    )
    policy.model.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)


def _newest_checkpoint(run: Run) -> tuple[dict[str, Any] | None, Policy]:
    """State and policy of the newest checkpoint that can be read; before the first one, no state and the first policy.

    Raises: ValueError if there are checkpoints and none of them can be read.
    """
    folders = sorted(run.out.glob("checkpoints/step_??????"), reverse=True)
    for folder in folders:
        if _is_whole(folder):
            state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
            return state, load_policy(run, str(folder / "policy"))
        print(f"checkpoint DAMAGED, trying the one before it: {folder}", flush=True)
    table = run.out / "metrics.jsonl"  # the first checkpoint comes after the row of its step
    if folders or (table.exists() and table.read_bytes().count(b"\n") > run.config.checkpoint_every + 1):
        raise ValueError(f"a resumed run must have a readable checkpoint, {run.out} has none; try another --out")
    return None, load_policy(run, run.model_path)


def _restore(state: dict[str, Any], optimizer: Optimizer, flight: Flight, rng: random.Random) -> None:
    optimizer.load_state_dict(state["optimizer"])
    groups = [group | {"problem": Problem(**group["problem"])} for group in state["flight"]["groups"]]
    flight.load_state_dict(state["flight"] | {"groups": groups})
    rng.setstate(state["rng"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])


def _recorded(path: Path, size: int, digest: str) -> str:
    """A table as it was when the checkpoint was written. Raises: ValueError if it has changed since, or is gone."""
    rows = path.read_bytes()[:size] if path.exists() else b""
    if sha256(rows).hexdigest() != digest:
        raise ValueError(f"a resumed run must have its records, {path} is not what it was at the checkpoint")
    return rows.decode()


def _manifest(folder: Path) -> dict[str, str]:
    """A checkpoint's name and the digests of its files, so that damage and files of another checkpoint show."""
    digests = {"name": folder.stem}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        with path.open("rb") as file:
            digests[str(path.relative_to(folder))] = file_digest(file, "sha256").hexdigest()
    return digests


def _is_whole(folder: Path) -> bool:
    try:
        return json.loads((folder / MANIFEST).read_text()) == _manifest(folder)
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------------ the loop
def train(run: Run, live: Live, first_step: int) -> None:
    """The whole run: steps, evaluations, records, checkpoints."""
    config = run.config
    if first_step == 1:
        run.log({"step": 0} | evaluate(run, live, 0))
    for step in range(first_step, config.steps + 1):
        earlier = live.policy.copied_weights() if config.probe_every or config.probe_on_alarm else None
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
        from probe.noise import measure_self_noise

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
    from probe.diagnose import alarms

    backend = {name: metrics[f"fresh_{name}"] for name in ("mismatch_kl", "mismatch_abs_mean", "ess")}
    if config.probe_on_alarm and None not in backend.values() and (rung := alarms(backend)):
        return f"alarm of {', '.join(rung)}"
    return "as planned" if config.probe_every and (step - 1) % config.probe_every == 0 else None


def probe(run: Run, live: Live, step: int, why: str, problems: list[Problem], earlier: dict[str, torch.Tensor]) -> str:
    """Sample the step's problems again, diagnose them (`earlier`: the weights before the step's update), keep the trace
    and the verdict; returns the verdict's status."""
    from probe.diagnose import diagnose, plot_verdict, sample_trace
    from probe.traces import save_trace

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


# ------------------------------------------------------------------------------------------------ the command
def main(arguments: list[str] | None = None) -> None:
    """Exit status: 0 done, 2 refused or failed during set-up, 1 failed later, 130 stopped by a signal."""
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT: KeyboardInterrupt
    with one_sentence(2):
        config = tyro.cli(Config, args=arguments, description=__doc__)
    with one_sentence(2, config.out), locked(config.out):
        run = prepare(config)
        live, first_step = build(run)
        with one_sentence(1, config.out):
            train(run, live, first_step)


if __name__ == "__main__":
    main()
