"""The figures that need a GPU, for the shapes of real models with random weights: one command, Markdown tables.

Sleep, wake and load; a step's phases and their memory against the plan; parity of the heads; vLLM's own speed with and
without log-probabilities. Each case is a process of its own, as vLLM's sleeping allocator allows one engine a process.
Without a GPU the same cases run with a tiny shape, to show that they run.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
import tyro
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from engine_adapter import Engine, ParityFlags, Sampling, plain_vllm
from examples.toys import toy_tokenizer
from lab.plan import GIB, phases
from records import memory_gib
from rl import Policy, UpdateOptions, frozen_logprobs, make_batch
from train import Config, build, prepare, train_step

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1),
    "qwen2.5-0.5b": dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2),
    "qwen2.5-1.5b": dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                         num_attention_heads=12, num_key_value_heads=2),
}
WARMING_STEPS, WARMING_ROWS = 60, 64  # of supervised digits: random weights alone give a flat distribution
# A task whose rewards need no right answers: prompts of digits, and a coin.
COIN = '''
import random

def sample(rng):
    return "".join(rng.choice("0123456789") for _ in range({length})), "none"

def reward(problem, response):
    return float(random.random() < 0.5)
'''


@dataclass(frozen=True)
class Options:
    """What is measured, and how large."""

    shapes: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b") if GPU else ("tiny",)
    """Shapes of models, see SHAPES."""
    rollouts: int = 1024 if GPU else 32
    """Of a step, and of the measurement of the engine's speed."""
    prompt_tokens: int = 128 if GPU else 16
    """Length of a prompt."""
    new_tokens: int = 512 if GPU else 8
    """Length of every response: there are no stop tokens."""
    kv_cache_gib: float = 16.0 if GPU else 0.1
    """The engine's KV cache."""
    dtype: str = "bfloat16"
    """Of the steps and the speed."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """Of the parity table."""
    case: str | None = None
    """One case in this process, as JSON: model, step, parity, speed."""
    model: str = ""
    """Folder of the model of that case."""
    shape: str = ""
    """Its shape, in the case model."""
    head: bool = True
    """Whether the engine's head is in fp32, in the case parity."""


def model_case(options: Options) -> dict:
    """Write a model of the shape, random but for a short supervised lesson in digits that come in order.

    A process of its own too: what it leaves on the GPU would be measured with the others.
    """
    torch.manual_seed(0)
    folder = Path(options.model)
    config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=4096, tie_word_embeddings=True,
                         bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    model = Qwen2ForCausalLM(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(WARMING_STEPS):
        starts = torch.randint(10, (WARMING_ROWS, 1), device=DEVICE)
        ids = 3 + (starts + torch.arange(32, device=DEVICE)) % 10  # (rows, 32), the toy tokenizer's digits
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return {"device": torch.cuda.get_device_name() if GPU else "CPU: it runs, the figures say nothing"}


# ------------------------------------------------------------------------------------------------ cases
def config_of(options: Options, out: str) -> Config:
    task = Path(options.model) / "coin.py"
    task.write_text(COIN.format(length=options.prompt_tokens - 1))  # the tokenizer adds <bos>
    return Config(
        out=out, model=options.model, task=str(task), dtype=options.dtype, num_prompts=options.rollouts // 8,
        group_size=8, max_new_tokens=options.new_tokens, micro_batch_tokens=16_384, lr=1e-6, temperature=1.0,
        kv_cache_gib=options.kv_cache_gib, eval_with_trainer=False,
    )


def timed(function: Callable) -> tuple[float, object]:
    started = time.perf_counter()
    result = function()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def step_case(options: Options) -> dict:
    """Three steps of the whole loop, the last one measured; then sleep, wake and load alone, beside a copy."""
    with tempfile.TemporaryDirectory() as out:
        run = prepare(config_of(options, out))
        run = replace(run, sampling=replace(run.sampling, stop_token_ids=()))
        with contextlib.redirect_stdout(io.StringIO()):
            live, _ = build(run)
        for step in (1, 2, 3):
            metrics, _, _ = train_step(run, live, step)
    engine, device, weights = live.engine, live.policy.device, live.policy.weights()
    awake = memory_gib(device)
    sleep_s, _ = timed(engine.sleep)
    asleep = memory_gib(device)
    wake_s, _ = timed(engine.wake)
    loaded = engine.load(weights, live.policy.score)
    tensors = [tensor.detach() for tensor in weights.values()]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    copy = lambda: [target.copy_(tensor) for target, tensor in zip(targets, tensors, strict=True)]  # noqa: E731
    timed(copy)
    copy_s, _ = timed(copy)
    planned = phases(run.config, AutoConfig.from_pretrained(options.model), options.prompt_tokens)
    memory = {phase: (metrics[f"{phase}_gib"], parts.total / GIB) for phase, parts in planned.items()}
    seconds = {phase: metrics[f"{phase}_s"] for phase in planned} | {"whole step": metrics["step_s"]}
    sleep = {"freed_gib": awake - asleep, "sleep_s": sleep_s, "wake_s": wake_s, "load_s": loaded["load_s"],
             "load_gb_s": loaded["load_gb_s"], "copy_gb_s": sum(tensor.nbytes for tensor in tensors) / copy_s / 1e9}
    return {"seconds": seconds, "memory": memory, "sleep": sleep, "tokens": metrics["tokens"]}


def parity_case(options: Options) -> dict:
    """Mean |trainer - engine| by batch size and the trainer's head, and the trainer's own noise."""
    dtype = getattr(torch, options.dtype)
    policies = {head: Policy.load(options.model, dtype, DEVICE, fp32_head=head) for head in (True, False)}
    weights = policies[True].weights()
    engine = Engine(options.model, {name: tensor.shape for name, tensor in weights.items()},
                    ParityFlags(fp32_head=options.head), dtype=dtype, max_num_seqs=64,
                    kv_cache_gib=options.kv_cache_gib, max_model_len=options.prompt_tokens + options.new_tokens)
    engine.load(weights, policies[True].score)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 13, (64, options.prompt_tokens), generator=generator).tolist()
    sampling, found = Sampling(0.7, options.new_tokens), {}
    batches = {64: engine.generate(prompts, 1, sampling, list(range(64))),
               1: [engine.generate([prompt], 1, sampling, [seed])[0] for seed, prompt in enumerate(prompts[:8])]}
    for size, rollouts in batches.items():
        batch = make_batch(rollouts, torch.zeros(len(rollouts)), DEVICE)

        def scored(head: bool, tokens: int, batch=batch) -> torch.Tensor:
            whole = UpdateOptions(temperature=0.7, num_minibatches=1, micro_batch_tokens=tokens)
            return frozen_logprobs(policies[head], batch, whole)[0]

        def off(one: torch.Tensor, other: torch.Tensor, batch=batch) -> float:
            return (((one - other) * batch.mask).abs().sum() / batch.mask.sum()).item()

        for head in (True, False):
            found[f"{size} {head}"] = off(scored(head, 16_384), batch.behavior_logprobs)
        found[f"{size} noise"] = off(scored(True, 16_384), scored(True, 1))
    return found


def speed_case(options: Options) -> dict:
    """Tokens per second of vLLM's own `generate`, with and without log-probabilities: medians would hide warming up,
    so each is run twice and the second counts."""
    generate = plain_vllm(options.model, max_model_len=options.prompt_tokens + options.new_tokens, max_num_seqs=512,
                          kv_cache_gib=options.kv_cache_gib, dtype=options.dtype)
    prompts = torch.randint(3, 13, (options.rollouts // 8, options.prompt_tokens)).tolist()
    sampling, tokens = Sampling(1.0, options.new_tokens), options.rollouts // 8 * 8 * options.new_tokens
    speeds = {}
    for logprobs in (None, 0, None, 0):
        seconds, _ = timed(lambda kind=logprobs: generate(prompts, 8, sampling, kind))
        speeds["with" if logprobs == 0 else "without"] = tokens / seconds
    return speeds


CASES = {"model": model_case, "step": step_case, "parity": parity_case, "speed": speed_case}


# ------------------------------------------------------------------------------------------------ tables
def ask(options: Options, **changes) -> dict:
    """One case in a fresh process."""
    asked = replace(options, **changes)
    flags = [f"--{name.replace('_', '-')}={getattr(asked, name)}"
             for name in ("rollouts", "prompt_tokens", "new_tokens", "kv_cache_gib", "dtype", "case", "model", "shape")]
    head = "--head" if asked.head else "--no-head"
    result = subprocess.run([sys.executable, "-m", "lab.bench_gpu", *flags, head], cwd=Path(__file__).parents[1],
                            capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{changes} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def report(options: Options, shape: str) -> None:
    """Measure and print the tables of one shape."""
    device = ask(options, case="model", shape=shape)["device"]
    measured = ask(options, case="step")
    print(f"\n**{shape}** on {device}; {options.dtype}, {options.rollouts:,} rollouts of {options.prompt_tokens} +"
          f" {options.new_tokens} tokens\n\n| phase | seconds | peak, GiB | peak by --plan, GiB |")
    print("| --- | --- | --- | --- |")
    for phase, seconds in measured["seconds"].items():
        memory = measured["memory"].get(phase)
        print(f"| {phase} | {seconds:.3f} | " + ("| |" if memory is None else f"{memory[0]:.2f} | {memory[1]:.2f} |"))
    names = {"freed_gib": "freed by sleep, GiB", "sleep_s": "sleep, s", "wake_s": "wake, s", "load_s": "load, s",
             "load_gb_s": "load, GB/s", "copy_gb_s": "a copy on the device, GB/s"}
    print("\n| " + " | ".join(names.values()) + " |\n|" + " --- |" * len(names))
    print("| " + " | ".join(f"{measured['sleep'][name]:.3g}" for name in names) + " |")
    speed = ask(options, case="speed")
    print(f"\nvLLM alone: {speed['without']:,.0f} tokens/s without log-probabilities, {speed['with']:,.0f} with.\n")
    print("| dtype | engine's head | trainer's head | batch of 1 | batch of 64 | trainer's own noise, 64 |")
    print("| --- | --- | --- | --- | --- | --- |")
    short = replace(options, prompt_tokens=32, new_tokens=min(128, options.new_tokens),
                    kv_cache_gib=min(2, options.kv_cache_gib))  # fmt: skip
    for dtype in options.dtypes:
        both = (False, True) if dtype == "bfloat16" else (True,)  # its heads are switched off, one side and both
        for engines in both:
            found = ask(short, case="parity", dtype=dtype, head=engines)
            for trainers in both:
                words = ["fp32" if fp32 else dtype for fp32 in (engines, trainers)]
                figures = [f"{found[name]:.1e}" for name in (f"1 {trainers}", f"64 {trainers}", "64 noise")]
                print("| " + " | ".join([dtype, *words, *figures]) + " |", flush=True)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    options = tyro.cli(Options, description=__doc__)
    if options.case:
        print(json.dumps(CASES[options.case](options)))
        return
    print(f"`python -m lab.bench_gpu`; torch {torch.__version__}, transformers {transformers.__version__}")
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            report(replace(options, model=folder), shape)


if __name__ == "__main__":
    main()
