"""The figures that need a GPU, with random weights of real shapes: one case per command.

Each figure is printed and appended to OUT/figures.jsonl as soon as it is measured; a killed case
leaves what it had measured. `table` prints all figures with their goals. Without a GPU the cases
run on a tiny shape, as a test.
"""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from transformers import Qwen2Config, Qwen2ForCausalLM

from config import ParityFlags
from engine_adapter import check_vllm_version
from examples.toys import toy_tokenizer
from lab import seconds, table
from lab.bench import bare_generate, running
from lab.plan import GIB, phases
from objectives import mismatch_metrics
from probe.noise import measure_self_noise
from records import append_rows, memory_gib, one_sentence, provenance, stage
from rl import Policy, frozen_logprobs, make_batch
from train import Run, TrainingState, train_step

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1),
    "qwen2.5-0.5b": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864,
                         num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960,
                         num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2),
}
# Prompts of one length. Rewards are random: no answer is right, and groups must not be flat.
TASK = '''import random
sample = lambda rng: ("".join(rng.choice("0123456789") for _ in range({digits})), "none")
reward = lambda problem, response: float(random.random() < 0.5)
'''
# Rollouts of a group; times that a figure is measured, of which the last counts.
GROUP, TURNS = 8, 3


@dataclass(frozen=True)
class Options:
    """Size and settings of a case."""

    case: tyro.conf.Fixed[str] = ""
    shape: Literal[tuple(SHAPES)] = "qwen2.5-0.5b"  # Shape of the model.
    rollouts: int = 1024  # Rollouts of a step, in groups of 8.
    prompt_tokens: int = 128  # Length of each prompt.
    new_tokens: int = 512  # Length of each response; there are no stop tokens.
    micro_batch_tokens: int = 16_384  # Tokens of a micro-batch of the trainer.
    kv_cache_gib: float = 16.0  # The engine's KV cache.
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # Of the model on both sides.
    cuda_graphs: bool = False  # Decode with CUDA graphs.
    parity: ParityFlags = field(default_factory=ParityFlags)
    out: str = "runs/bench_gpu"  # Folder of the figures and the models.
    limit_s: float = 480  # After this time the process ends itself, with a traceback.

    @property
    def model(self) -> Path:
        return Path(self.out) / self.shape

    def settings(self) -> dict[str, Any]:
        """What a figure depends on besides the shape, for figures.jsonl."""
        settings = asdict(self) | {"parity": f"without {', '.join(self.parity.off()) or 'nothing'}"}
        return {name: value for name, value in settings.items()
                if name not in ("case", "shape", "out", "limit_s")}


class Figure(NamedTuple):
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None


def write_model(options: Options) -> None:
    """Write a random model that continues digits in order: its distribution is not uniform."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=4096,
                         tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = Qwen2ForCausalLM(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(60):
        starts = torch.randint(10, (64, 1), device=DEVICE)
        # (64, 32), the toy tokenizer's digits.
        ids = 3 + (starts + torch.arange(32, device=DEVICE)) % 10
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unfinished = options.model.with_suffix(".unfinished")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    toy_tokenizer().save_pretrained(unfinished)
    unfinished.rename(options.model)  # a kill leaves a whole model or none


@contextmanager
def running_model(options: Options) -> Iterator[tuple[Run, TrainingState]]:
    """A run of the model on both sides, without stop tokens.

    On a GPU the process ends here, after the last figure.
    """
    # After <bos>.
    (options.model / "task.py").write_text(TASK.format(digits=options.prompt_tokens - 1))
    with running(
        model=str(options.model), task=f"{options.model}/task.py", dtype=options.dtype,
        group_size=GROUP, num_prompts=options.rollouts // GROUP, max_new_tokens=options.new_tokens,
        temperature=0.7, micro_batch_tokens=options.micro_batch_tokens,
        kv_cache_gib=options.kv_cache_gib, eval_with_trainer=False,
        parity=options.parity, **({"cuda_graphs": options.cuda_graphs} if GPU else {}),
    ) as (prepared, live):
        live.source.sampling = replace(prepared.sampling, stop_token_ids=())
        yield replace(prepared, sampling=live.source.sampling), live
        if GPU:  # before vLLM frees its memory, since its allocator may abort the process there
            sys.stdout.flush()
            os._exit(0)


def sleep_figures(run: Run, live: TrainingState, options: Options) -> Iterator[Figure]:
    """Sleep, wake and load, and the memory that sleep frees."""
    engine, weights = live.engine, live.policy.weights()
    torch.cuda.empty_cache()
    num_bytes = sum(parameter.nbytes for parameter in live.policy.model.parameters())
    held = num_bytes / GIB + options.kv_cache_gib
    for _ in range(TURNS):
        awake = memory_gib()
        yield Figure("sleep", seconds(engine.sleep), "s")
        freed = awake - memory_gib()
        yield Figure("memory freed by sleep", freed, "GiB")
        yield Figure("memory freed by sleep / (weights + KV cache)", freed / held, "", 0.95)
        yield Figure("wake", seconds(engine.wake), "s")
        loaded = engine.load(weights, live.policy.response_logprobs)
        # Twice the estimate for 339 tensors.
        yield Figure("load", loaded["load_s"], "s", at_most=0.5)
        yield Figure("canary", loaded["canary_s"], "s")


def speed_figures(run: Run, live: TrainingState, options: Options) -> Iterator[Figure]:
    """Tokens per second of the engine alone, with and without log-probabilities."""
    prompts = [problem.prompt_ids for problem in run.task.train[: options.rollouts // GROUP]]
    for name, logprobs in (("without", None), ("with", 0)):
        for new_tokens in (options.new_tokens // 8, options.new_tokens):
            sampling = replace(run.sampling, max_new_tokens=new_tokens)
            # V1's defaults would find the prompts of the call before.
            live.engine.llm.reset_prefix_cache()
            duration = seconds(bare_generate, live.engine, prompts, GROUP, sampling, logprobs)
        yield Figure(f"generation {name} log-probabilities",
                     options.rollouts * new_tokens / duration, "tokens/s")


def parity_figures(run: Run, live: TrainingState, options: Options) -> Iterator[Figure]:
    """Mean |trainer - engine| by the trainer's head and the engine's batch size."""
    prompts = [problem.prompt_ids for problem in run.task.train[:64]]
    head = {True: "fp32", False: options.dtype}
    for size, number in ((64, 64), (1, 8)):  # prompts that the engine decodes at once, and in all
        calls = [slice(at, at + size) for at in range(0, number, size)]
        rollouts = []
        for call in calls:
            seeds = list(range(call.start, call.stop))
            rollouts += live.engine.generate(prompts[call], 1, run.sampling, seeds)
        batch = make_batch(rollouts, DEVICE)
        for fp32_head in (True, False):
            scorer = Policy(live.policy.model, fp32_head)
            scored = replace(batch, old_logprobs=frozen_logprobs(scorer, batch, run.config.grpo))
            metrics = mismatch_metrics(scored.old_logprobs, scored.behavior_logprobs, scored.mask)
            mismatch = metrics["mismatch_abs_mean"]
            noise = measure_self_noise(scorer, scored, run.config.grpo)
            engines = head[options.parity.fp32_head]
            name = f"engine's batch {size}, heads {engines} and {head[fp32_head]}"
            yield Figure(f"{name}: mismatch", mismatch, "nats")
            yield Figure(f"{name}: mismatch / self-noise", mismatch / noise["self_noise_abs_mean"],
                         "", at_most=1.2 if fp32_head and options.parity.fp32_head else None)


def step_figures(run: Run, live: TrainingState, options: Options) -> Iterator[Figure]:
    """Training steps by phase, with measured and planned peaks of memory."""
    names = ("generate", "old_logprobs", "update", "sync")
    for step in range(1, TURNS + 1):
        metrics = train_step(run, live, step).metrics
        step_s = metrics["step_s"]
        yield Figure("step", step_s, "s", at_most=30 if options.case == "step-1.5b" else None)
        yield Figure("step, tokens/s", metrics["tokens"] / step_s, "tokens/s")
        yield Figure("sleep, wake and load / step",
                     (metrics["sleep_s"] + metrics["sync_s"]) / step_s, "", at_most=0.03)
        for name in names:
            yield Figure(name, metrics[f"{name}_s"], "s")
            yield Figure(f"{name}, peak memory", metrics[f"{name}_gib"], "GiB")
    planned = phases(run.config, live.policy.model.config, options.prompt_tokens,
                     live.policy.chunk_elements)
    for name in names:
        yield Figure(f"{name}, peak memory / plan",
                     metrics[f"{name}_gib"] * GIB / planned[name].total, "", 0.85, 1.15)


V1 = ParityFlags(processed_logprobs=False, explicit_runtime=False, inflight_keep=False,
                 fp32_head=False)
# Short ones first.
CASES: dict[str, tuple[Callable[[Run, TrainingState, Options], Iterator[Figure]], Options]] = {
    "sleep": (sleep_figures, Options()),
    "parity": (parity_figures, Options()),
    "parity-head": (parity_figures, Options(parity=ParityFlags(fp32_head=False))),
    "parity-float16": (parity_figures, Options(dtype="float16")),
    "speed": (speed_figures, Options()),
    "speed-graphs": (speed_figures, Options(cuda_graphs=True)),
    "speed-defaults": (speed_figures, Options(parity=V1)),
    "step": (step_figures, Options()),
    "step-24gb": (step_figures, Options(rollouts=256, micro_batch_tokens=4096, kv_cache_gib=4.0)),
    "step-1.5b": (step_figures, Options(shape="qwen2.5-1.5b", rollouts=256, new_tokens=1024,
                                        micro_batch_tokens=8192)),
}
TINY = dict(shape="tiny", rollouts=32, prompt_tokens=16, new_tokens=8, kv_cache_gib=0.1)


def measure(options: Options) -> Iterator[Figure]:
    """All figures of a case."""
    if options.cuda_graphs and not GPU:
        return print(f"{options.case} is LEFT OUT: CUDA graphs need a GPU")
    if not options.model.is_dir():
        write_model(options)
    started = time.perf_counter()
    with running_model(options) as (run, live):
        yield Figure("start of trainer and engine", time.perf_counter() - started, "s")
        yield from CASES[options.case][0](run, live, options)


def goal_and_verdict(row: dict[str, Any]) -> tuple[str, str]:
    low, high = row["at_least"], row["at_most"]
    limits = {"at least": low, "at most": high}
    goal = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
    if not goal:
        return goal, ""
    if row["device"].startswith("CPU"):
        return goal, "not a GPU"
    met = (low is None or row["value"] >= low) and (high is None or row["value"] <= high)
    return goal, "yes" if met else "NO"


def figures_table(path: Path) -> str:
    """A Markdown table of the newest value of each figure, with the options given."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    keys = ("case", "shape", "options", "name", "device")
    newest = {json.dumps([row[key] for key in keys]): row for row in rows}
    cells = []
    for row in newest.values():
        usual = CASES[row["case"]][1].settings()
        changed = [f"{name} {value}" for name, value in row["options"].items()
                   if value != usual.get(name)]
        cells.append([", ".join([row["case"], *changed]), row["shape"], row["name"],
                      f"{row['value']:.4g} {row['unit']}".strip(), *goal_and_verdict(row)])
    origins = dict.fromkeys(f"{row['device']}; {row['versions']}; commit {row['commit']}"
                            for row in newest.values())
    titles = ["case", "shape", "figure", "value", "goal", "met"]
    return "\n".join([table(titles, cells), "", *origins])


def read_options(arguments: list[str] | None) -> Options:
    described = {name: (case.__doc__, replace(options, case=name, **({} if GPU else TINY)))
                 for name, (case, options) in CASES.items()}
    described["table"] = (figures_table.__doc__, Options(case="table"))
    return tyro.extras.overridable_config_cli(described, args=arguments, description=__doc__)


def main(arguments: list[str] | None = None) -> None:
    with one_sentence(2):
        options = read_options(arguments)
        figures = Path(options.out) / "figures.jsonl"
        if options.case == "table":
            with stage(f"reading {figures}, which the other cases write,"):
                return print(figures_table(figures))
        record = provenance(DEVICE)
        versions = record["versions"] | {"vllm": check_vllm_version()}
        figures.parent.mkdir(parents=True, exist_ok=True)
    case = {"case": options.case, "shape": options.shape, "options": options.settings()}
    origin = {"device": record["device"],
              "versions": ", ".join(f"{name} {each}" for name, each in versions.items()),
              "commit": f"{record['commit']}{' with changes' if record['dirty'] else ''}"}
    faulthandler.dump_traceback_later(options.limit_s, exit=True, file=sys.__stderr__)
    try:
        for figure in measure(options):
            append_rows(figures, [case | figure._asdict() | origin])
            print(f"{figure.name}: {figure.value:.4g} {figure.unit}", flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
