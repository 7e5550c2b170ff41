"""A run before its first step: what can be wrong is found, both sides are built; and its checkpoints."""

import json
import random
import shutil
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine_adapter import Engine, Rollout, Sampling, check_vllm_version
from inflight import Flight
from models import describe_model, encode_prompt, toy_model
from records import MANIFEST, TABLES, log_line, stage, write_atomically, write_config
from reference import ReferenceEngine, kv_bytes_per_token
from rl import Optimizer, Policy
from tasks import Problem, Scores, Task, load_task, score

if TYPE_CHECKING:
    from train import Config


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: "Config"
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


def prepare(config: "Config") -> Run:
    """Find what can be wrong before a model is loaded (or taught). Raises: ValueError with the rule and the way out."""
    if config.engine == "vllm":
        check_vllm_version(config.allow_untested_vllm)
    record, out = _earlier_record(config), Path(config.out).absolute()  # a task may change the working directory
    task = load_task(config.task, config.seed, config.eval_task, config.reward_limit_s)
    if task.num_repeated:
        print(f"{task.num_repeated} repeated problems MERGED", flush=True)
    if config.offload_optimizer and not torch.cuda.is_available():
        raise ValueError("offload_optimizer must not be given without a GPU (the optimizer is in host memory anyway)")
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


def _earlier_record(config: "Config") -> dict[str, Any] | None:
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
    config: "Config", task: Task, prompt_ids: dict[Problem, list[int]], context: int | None
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
    write_config(run, engine, policy, first_step)
    print("trainer: " + ", ".join(f"{name} {value}" for name, value in policy.audit().items()), flush=True)
    print("engine: " + ", ".join(f"{name} {value}" for name, value in engine.settings.items()), flush=True)
    if config.resume:
        print(f"resumed at step {first_step}" + ("" if state else ": there was no checkpoint"), flush=True)
    return Live(policy, reference, optimizer, engine, flight, rng), first_step


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
    state = {"step": step, "optimizer": live.optimizer.state_dict(), "flight": live.flight.state_dict(),
             "tables": {name: (len(rows), sha256(rows).hexdigest()) for name, rows in tables.items()}}
    with stage(f"writing {folder}"):
        save_policy(run, live.policy, unfinished / "policy")
        torch.save(state | random_states, unfinished / "state.pt")
        (unfinished / MANIFEST).write_text(json.dumps(_manifest(unfinished)))
    shutil.rmtree(folder, ignore_errors=True)  # a damaged checkpoint of this step, which --resume has passed over
    unfinished.rename(folder)
    for old in sorted(folder.parent.glob("step_??????"))[:-2]:
        shutil.rmtree(old)


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
    flight.load_state_dict(state["flight"])
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
