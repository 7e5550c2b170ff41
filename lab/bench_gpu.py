"""The figures that need a GPU, for the shapes of real models with random weights. One case per command:

    model    write the model folder that the other cases load
    step     phases of a training step with their peak memory; sleep, wake and load; the memory that lab.plan predicts
    parity   mismatch of trainer and engine by the dtype of both heads, beside the trainer's noise floor
    speed    tokens per second of vLLM alone, with and without log-probabilities

Each figure is printed as soon as it is measured. Without a GPU the same cases run on a tiny shape, as a test.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from engine_adapter import ParityFlags, check_vllm_version
from examples.toys import toy_tokenizer
from lab import origin, seconds, table_lines
from lab.bench import bare_generate, running
from lab.plan import GIB, phases
from objectives import mismatch_metrics
from probe.noise import measure_self_noise
from records import memory_gib, one_sentence, provenance
from rl import Policy, frozen_logprobs, make_batch
from train import Live, Run, train_step

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1),
    "qwen2.5-0.5b": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                         num_attention_heads=12, num_key_value_heads=2),
}
# A task of prompts of one length. Rewards are random: the model knows no right answers, but groups must not be flat.
TASK = '''
import random

def sample(rng):
    return "".join(rng.choice("0123456789") for _ in range({digits})), "none"

def reward(problem, response):
    return float(random.random() < 0.5)
'''

Row = tuple[str | float, ...]  # the first row that a case yields has the titles


@dataclass(frozen=True)
class Options:
    """What to measure, and the size."""

    case: tyro.conf.Positional[Literal["model", "step", "parity", "speed"]]  # The case; model comes first.
    shape: Literal[tuple(SHAPES)] = "qwen2.5-0.5b" if GPU else "tiny"  # Shape of the model.
    out: str = "runs/bench_gpu"  # Folder of the models.
    rollouts: int = 1024 if GPU else 32  # Rollouts per step, in groups of 8.
    prompt_tokens: int = 128 if GPU else 16  # Length of each prompt.
    new_tokens: int = 512 if GPU else 8  # Length of each response; there are no stop tokens.
    kv_cache_gib: float = 16.0 if GPU else 0.1  # The engine's KV cache.
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # Of the model on both sides.
    fp32_head: bool = True  # Case parity: whether the engine's head is in fp32.

    @property
    def model(self) -> str:
        return str(Path(self.out) / self.shape)


@contextmanager
def running_model(options: Options, parity: ParityFlags, temperature: float = 1.0) -> Iterator[tuple[Run, Live]]:
    """A run of the model on both sides, without stop tokens."""
    (Path(options.model) / "task.py").write_text(TASK.format(digits=options.prompt_tokens - 1))  # after <bos>
    with running(
        model=options.model, task=f"{options.model}/task.py", dtype=options.dtype, group_size=8,
        num_prompts=options.rollouts // 8, max_new_tokens=options.new_tokens, micro_batch_tokens=16_384,
        temperature=temperature, kv_cache_gib=options.kv_cache_gib, eval_with_trainer=False, parity=parity,
    ) as (prepared, live):
        live.flight.sampling = replace(prepared.sampling, stop_token_ids=())
        yield replace(prepared, sampling=live.flight.sampling), live


def write_model(options: Options) -> None:
    """Write a random model that has learnt to continue digits in order: without that its distribution is uniform."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=4096, tie_word_embeddings=True,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = Qwen2ForCausalLM(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(60):
        starts = torch.randint(10, (64, 1), device=DEVICE)
        ids = 3 + (starts + torch.arange(32, device=DEVICE)) % 10  # (64, 32), the toy tokenizer's digits
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(options.model)
    toy_tokenizer().save_pretrained(options.model)


def step_figures(options: Options) -> Iterator[Row]:
    """Three training steps, the third in detail; then sleep, wake and load alone, a copy on the device, the plan."""
    with running_model(options, ParityFlags()) as (run, live):
        yield "figure", "value"
        for step in (1, 2, 3):
            metrics, _, _ = train_step(run, live, step)
            yield f"step {step}, s", metrics["step_s"]
        yield "tokens of a step", f"{metrics['tokens']:,}"
        for phase in ("generate", "old_logprobs", "update", "sync"):
            yield f"{phase}, s", metrics[f"{phase}_s"]
            yield f"{phase}, peak GiB", metrics[f"{phase}_gib"]
        engine, weights, awake = live.engine, live.policy.weights(), memory_gib()
        yield "sleep, s", seconds(engine.sleep)
        yield "freed by sleep, GiB", awake - memory_gib()
        yield "wake, s", seconds(engine.wake)
        loaded = engine.load(weights, live.policy.response_logprobs)
        yield "load, s", loaded["load_s"]
        yield "load, GB/s", loaded["load_gb_s"]
        sources = [tensor.detach() for tensor in weights.values()]
        targets = [torch.empty_like(tensor) for tensor in sources]
        copy_s = [seconds(torch._foreach_copy_, targets, sources) for _ in range(2)][1]
        yield "a copy on the device, GB/s", sum(tensor.nbytes for tensor in sources) / copy_s / 1e9
    for phase, parts in phases(run.config, AutoConfig.from_pretrained(options.model), options.prompt_tokens).items():
        yield f"{phase}, planned peak GiB", parts.total / GIB


def parity_figures(options: Options) -> Iterator[Row]:
    """Mean |trainer - engine| by the trainer's head and the engine's batch size, and the trainer's noise floor."""
    with running_model(options, ParityFlags(fp32_head=options.fp32_head), temperature=0.7) as (run, live):
        prompts = [problem.prompt_ids for problem in run.task.train[:64]]
        one_by_one = [live.engine.generate([prompt], 1, run.sampling, [seed])[0]
                      for seed, prompt in enumerate(prompts[:8])]
        batches = {64: live.engine.generate(prompts, 1, run.sampling, list(range(64))), 1: one_by_one}
        yield "engine's head", "trainer's head", "engine's batch", "mean mismatch", "noise floor"
        for size, rollouts in batches.items():
            batch = make_batch(rollouts, torch.zeros(len(rollouts)), DEVICE)
            for head, fp32_head in (("fp32", True), (options.dtype, False)):
                scorer = Policy(live.policy.model, fp32_head)
                scored = replace(batch, old_logprobs=frozen_logprobs(scorer, batch, run.config)[0])
                mismatch = mismatch_metrics(scored.old_logprobs, scored.behavior_logprobs, scored.mask)
                noise = measure_self_noise(scorer, scored, run.config)
                yield ("fp32" if options.fp32_head else options.dtype, head, str(size), mismatch["mismatch_abs_mean"],
                       noise["self_noise_abs_mean"])


def speed_figures(options: Options) -> Iterator[Row]:
    """Tokens per second of vLLM with its own defaults, with and without log-probabilities; the first turn warms up."""
    with running_model(options, ParityFlags(False, False, False, False)) as (run, live):
        prompts = [problem.prompt_ids for problem in run.task.train[: options.rollouts // 8]]
        yield "turn", "log-probabilities", "tokens/s"
        for turn in (1, 2):
            for name, logprobs in (("without", None), ("with", 0)):
                duration = seconds(bare_generate, live.engine, prompts, 8, run.sampling, logprobs)
                yield str(turn), name, f"{len(prompts) * 8 * options.new_tokens / duration:,.0f}"


CASES = {"step": step_figures, "parity": parity_figures, "speed": speed_figures}


def main(arguments: list[str] | None = None) -> None:
    with one_sentence(2):
        options = tyro.cli(Options, args=arguments, description=__doc__)
        if options.case != "model" and not Path(options.model).is_dir():
            raise ValueError(f"the model must be written first, {options.model} is not there; try"
                             f" python -m lab.bench_gpu model --shape {options.shape} --out {options.out}")
        record = provenance(DEVICE)
        record["versions"]["vllm"] = check_vllm_version()
    command = shlex.join(["python", "-m", "lab.bench_gpu", *(arguments or sys.argv[1:])])
    size = f"{options.dtype}, {options.rollouts:,} rollouts of {options.prompt_tokens} + {options.new_tokens} tokens"
    print(f"{origin(command, record)}; {options.shape}, {size}\n", flush=True)
    if options.case == "model":
        write_model(options)
    else:
        rows = ([cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row]
                for row in CASES[options.case](options))
        for line in table_lines(next(rows), rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
