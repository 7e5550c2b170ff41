"""A run before its first step: what can be wrong is found, both sides are built; and its checkpoints."""

import json
import os
import random
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine_adapter import Engine, Rollout, Sampling, check_vllm_version
from inflight import Flight
from models import describe_model, encode_prompt, toy_model
from records import TABLES, log_line, write_atomically, write_config
from reference import ReferenceEngine, kv_bytes_per_token
from rl import Optimizer, Policy
from scoring import Scores, score
from tasks import Problem, Task, load_task

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
    _check_out(config)
    task = load_task(config.task, config.seed, config.eval_task)
    if config.offload_optimizer and not torch.cuda.is_available():
        raise ValueError("offload_optimizer must not be given without a GPU (the optimizer is in host memory anyway)")
    model_config, tokenizer, stop_token_ids = describe_model(config.model)
    prompt_ids = encode_prompts(tokenizer, task)
    task, dropped = _fitting(config, task, prompt_ids, getattr(model_config, "max_position_embeddings", None))
    if (groups := config.num_prompts + config.inflight_groups) > len(task.train):
        raise ValueError(f"num_prompts + inflight_groups must be at most {len(task.train)} (all there are),"
                         f" got {groups}")
    longest = max(len(prompt_ids[problem]) for problem in task.train + task.held_out)
    path = config.model
    if path == "toy":  # taught, if it is not there yet, after all else has been checked
        path = str(toy_model(config.cache_dir, config.seed, "digits" if config.task == "digits" else "toy"))
    sampling = Sampling(config.temperature, config.max_new_tokens, stop_token_ids)
    max_model_len = longest + config.max_new_tokens
    if (record := Path(config.out) / "config.json").exists():
        earlier = json.loads(record.read_text()).get("problems", {}).get("sha256")
        if earlier != task.fingerprint:
            raise ValueError(f"a resumed run must keep its problems, {config.task} has others now")
    return Run(config, Path(config.out), path, task, prompt_ids, tokenizer, sampling, max_model_len, dropped)


def _check_out(config: "Config") -> None:
    out, record = Path(config.out), Path(config.out) / "config.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out must be a writable folder, got {out}: {error}") from error
    if record.exists() and not config.resume:
        raise ValueError(f"out must be a new folder, {out} holds a run; go on with --resume or choose another --out")
    if record.exists():
        ours, theirs = asdict(config), json.loads(record.read_text())["config"]
        free = {"resume", "out", "cache_dir", "plan", "plan_gib"}
        changed = [name for name in ours.keys() - free if ours[name] != theirs.get(name)]
        if changed:
            raise ValueError(f"a resumed run must keep its options, changed are {', '.join(sorted(changed))}")


def encode_prompts(tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[Problem, list[int]]:
    prompt_ids = {}
    for problem in task.train + task.held_out:
        try:
            prompt_ids[problem] = encode_prompt(tokenizer, problem)
        except Exception as error:  # tokenizers raise bare Exceptions on text outside their vocabulary
            raise ValueError(f"the tokenizer must encode all prompts, it fails on {problem.source}: {error}") from error
    return prompt_ids


def _fitting(
    config: "Config", task: Task, prompt_ids: dict[Problem, list[int]], context: int | None
) -> tuple[Task, int]:
    """The task without the problems whose prompts are too long, and how many these are."""
    limit, why = config.max_prompt_tokens, "--max-prompt-tokens"
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
    checkpoint = newest_checkpoint(run.out) if config.resume else None
    placement = getattr(torch, config.dtype), "cuda" if torch.cuda.is_available() else "cpu", config.parity.fp32_head
    path = str(checkpoint / "policy" if checkpoint else run.model_path)
    policy = Policy.load(path, *placement, gradient_checkpointing=config.gradient_checkpointing)
    reference = Policy.load(run.model_path, *placement) if config.kl_coef else None  # the first policy, resumed or not
    optimizer = Optimizer(policy.model, config.weight_decay, config.offload_optimizer)
    engine = start_engine(run, policy)
    flight = Flight(engine, config.group_size, run.sampling, config.max_staleness)
    torch.manual_seed(config.seed)  # after the engine, whose start reseeds the process
    if checkpoint:
        first_step = load_checkpoint(run, checkpoint, optimizer, flight, rng) + 1
    else:
        for name in TABLES:  # of a run that died before its first checkpoint
            (run.out / name).unlink(missing_ok=True)
    engine.load(policy.weights(), policy.score)
    write_config(run, engine, policy, first_step)
    print("trainer: " + ", ".join(f"{name} {value}" for name, value in policy.audit().items()), flush=True)
    print("engine: " + ", ".join(f"{name} {value}" for name, value in engine.settings.items()), flush=True)
    if config.resume:
        print(f"resumed at step {first_step}" + ("" if checkpoint else ": there was no checkpoint"), flush=True)
    return Live(policy, reference, optimizer, engine, flight, rng), first_step


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
    """checkpoints/step_N, whole or not there if the process dies: renamed at the end; the one before it stays."""
    folder = run.out / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_policy(run, live.policy, unfinished / "policy")
    random_states = {"rng": live.rng.getstate(), "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    state = {"step": step, "optimizer": live.optimizer.state_dict(), "flight": live.flight.state_dict()}
    torch.save(state | random_states, unfinished / "state.pt")
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


def newest_checkpoint(out: Path) -> Path | None:
    return max(out.glob("checkpoints/step_??????"), default=None)


def load_checkpoint(run: Run, folder: Path, optimizer: Optimizer, flight: Flight, rng: random.Random) -> int:
    """Restore all but the policy (loaded from the folder), drop the metrics written since; returns the step."""
    state = torch.load(folder / "state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    flight.load_state_dict(state["flight"])
    rng.setstate(state["rng"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    for name in TABLES:
        lines = (run.out / name).read_text().split("\n")[:-1]  # what follows the last newline was cut off
        kept = [line for line in lines if json.loads(line)["step"] <= state["step"]]
        write_atomically(run.out / name, "".join(f"{line}\n" for line in kept))
    return state["step"]


