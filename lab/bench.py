"""Benchmarks of one machine; `Options.cases` lists them.

The bare work is the cheapest known way to do the same, directly on the step's own engine and model:
vLLM samples for the same prompts, without seeds and log-probabilities; plain transformers computes
a forward (old log-probabilities) and a forward and backward (update), each prompt once for its
group. A step and its bare work are measured in turns. Beside them stands what no program can be
faster than: the products of the weights' matrices alone, at the speed of the machine's fastest
product in the model's dtype, and for sampling one reading of the weights for each decoded token.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean as mean
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy
import torch
import torch.nn.functional as F
import tyro
from extras.prompts import PromptsOnce
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from config import Config, GrpoConfig, ParityFlags
from engine_adapter import Engine, Sampling
from examples.toys import toy_config, toy_tokenizer
from extras.masks import mask_outside, use_masks
from lab import seconds, table
from records import memory_gib, reset_peak
from rl import (
    Batch,
    Optimizer,
    Policy,
    TargetLogprobs,
    Vocabulary,
    frozen_logprobs,
    make_batch,
    update,
)
from train import Run, TrainingState, build, prepare, train_step

Case = Literal["inflight", "growth", "phases", "prompts", "masks", "head", "shared"]


@dataclass(frozen=True)
class Options:
    """What to measure."""

    # inflight: groups in flight. growth: time and memory by rollouts. phases: a step and the bare
    # work. prompts: each prompt computed once for its group. masks: a step with top-k, top-p,
    # min-p. head: in one piece and in chunks. shared: the engine around the trainer's module, with
    # and without --exact.
    cases: tyro.conf.Positional[tuple[Case, ...]] = ("inflight", "growth", "phases")
    rollouts: tuple[int, ...] = (1024, 4096, 16384)  # Case growth: numbers of rollouts per step.
    # Cases phases and shared: pairs of a step and its bare work; turns over the engines.
    rounds: int = 20
    # Case phases: options of train.py, with an equals sign: --job="--model PATH --task FILE.py".
    job: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"  # Case shared: of the model.


@contextmanager
def running(job: str = "", **options) -> Iterator[tuple[Run, TrainingState]]:
    """A run in a temporary folder, of train.py's options as words or by name.

    The learning rate is too small to change the policy: all steps sample from one.
    """
    given = tyro.cli(Config, args=shlex.split(job))
    with TemporaryDirectory() as out:
        run = prepare(given.but(out=out, lr=1e-12, **options))
        live, _ = build(run)
        yield run, live
        live.engine.close()


def medians(
    sizes: Sequence[int], measure: Callable[[int], tuple[float, ...]], size: str,
    columns: dict[str, str]
) -> str:
    """A table of what `measure` returns: the medians of three turns over all sizes.

    `columns`: titles and formats.
    """
    turns = [[measure(each) for each in sizes] for _ in range(3)]  # (3, sizes, columns)
    rows = [[f"{each:,}", *map(format, figures, columns.values())]
            for each, figures in zip(sizes, numpy.median(turns, axis=0), strict=True)]
    return table([size, *columns], rows)


# Eight times the median length: the model ends a response at about one token in fifteen.
LONG_TAIL_TOKENS = 96
LONG_TAIL_STEPS, GROUPS_IN_FLIGHT = 10, (0, 16, 32)


def inflight(options: Options) -> None:
    """Tokens per second of the whole loop and of generation, by groups in flight."""
    torch.manual_seed(0)
    model_config = toy_config("digits")
    # All tokens about equally likely.
    model_config.update({"max_position_embeddings": 256, "initializer_range": 0.02})

    def measure(groups: int) -> tuple[float, ...]:
        with running(
            model=model, task="digits", num_prompts=16, group_size=8, inflight_groups=groups,
            max_num_seqs=128, temperature=1.0, max_new_tokens=LONG_TAIL_TOKENS,
            micro_batch_tokens=2048, num_minibatches=1,
        ) as (run, live):
            steps = [train_step(run, live, step).metrics
                     for step in range(1, LONG_TAIL_STEPS + 3)][2:]  # two warm up
        tokens, loop, generation = (sum(step[name] for step in steps)
                                    for name in ("tokens", "step_s", "generate_s"))
        length, staleness = (mean(step[name] for step in steps)
                             for name in ("response_len", "staleness_mean"))
        return tokens / loop, tokens / generation, staleness, length

    columns = {"tokens/s, whole loop": ",.0f", "tokens/s, generation": ",.0f",
               "mean staleness": ".2f", "mean length": ".1f"}
    with TemporaryDirectory() as model:
        Qwen3ForCausalLM(model_config).save_pretrained(model)
        toy_tokenizer().save_pretrained(model)
        measured = medians(GROUPS_IN_FLIGHT, measure, "groups in flight", columns)
    print(f"\nResponses of at most {LONG_TAIL_TOKENS} tokens; {LONG_TAIL_STEPS} steps; medians of"
          " three turns\n")
    print(measured)


def growth(options: Options) -> None:
    """Seconds and peak memory of a step by the number of rollouts."""

    def measure(rollouts: int) -> tuple[float, ...]:
        num_prompts = rollouts // run.config.grpo.group_size
        sized = replace(run, config=run.config.but(num_prompts=num_prompts))
        live.source.config = sized.config
        train_step(sized, live, 1)  # warms up
        metrics = train_step(sized, live, 2).metrics
        step_s = metrics["step_s"]
        peak = max(value for name, value in metrics.items() if name.endswith("_gib"))
        return step_s, 1e3 * step_s / rollouts, 1e6 * step_s / metrics["tokens"], peak

    columns = {"seconds": ".2f", "ms per rollout": ".2f", "us per token": ".0f", "peak, GiB": ".2f"}
    with running() as (run, live):
        measured = medians(options.rollouts, measure, "rollouts per step", columns)
    print("\nMedians of three turns, the second of two steps each; the peak is the process's memory"
          " in any phase\n")
    print(measured)


def bare_generate(
    engine: Engine, prompts: list[list[int]], group_size: int, sampling: Sampling,
    logprobs: int | None = None
) -> None:
    """Sample as `vllm.LLM.generate` does: no seeds, whole responses at the end."""
    params = engine.sampling_params(sampling, None)
    params.n, params.logprobs = group_size, logprobs
    params.output_kind = type(params.output_kind).FINAL_ONLY
    for request, prompt in enumerate(prompts):
        engine.llm.add_request(str(request), {"prompt_token_ids": prompt}, params)
    while engine.llm.has_unfinished_requests():
        engine.llm.step()


def bare_training(model: torch.nn.Module, batch: Batch, config: Config, backward: bool) -> None:
    """The cheapest forward, or forward and backward, of a batch: the most rows of equal prompts.

    The body computes each prompt once for its group, and the head responses alone. Flat groups need
    no backward. No chunks, no entropy, no mask.
    """
    group_size = config.grpo.group_size
    for rows in whole_groups(batch, config.grpo):
        micro, cache = batch.rows(rows), DynamicCache(config=model.config)
        prompt = int(micro.prompt_lengths[0])
        learns = backward and bool(micro.advantages.any())
        with torch.set_grad_enabled(learns):
            first = model.base_model(input_ids=micro.inputs[::group_size, :prompt],
                                     past_key_values=cache)
            cache.batch_repeat_interleave(group_size)
            rest = model.base_model(input_ids=micro.inputs[:, prompt:], past_key_values=cache)
            last = first.last_hidden_state[:, -1:].repeat_interleave(group_size, dim=0)
            hidden = torch.cat([last, rest.last_hidden_state], dim=1)
            hidden = hidden[micro.mask[:, prompt - 1 :] > 0]  # (N, H)
            loss = F.cross_entropy(model.lm_head(hidden), micro.targets[micro.mask > 0])
        if learns:
            loss.backward()
    model.zero_grad()


def whole_groups(batch: Batch, grpo: GrpoConfig) -> Iterator[Tensor]:
    """Rows of whole groups with prompts of one length, with an advantage or all without."""
    count, width = batch.inputs.shape
    size = max(1, grpo.micro_batch_tokens // (width * grpo.group_size)) * grpo.group_size
    signal = batch.advantages.view(-1, grpo.group_size).any(dim=1)  # (P,)
    kinds = 2 * batch.prompt_lengths + signal.repeat_interleave(grpo.group_size)  # (B,)
    for minibatch in torch.arange(count).split(count // grpo.num_minibatches):
        for kind in kinds[minibatch].unique():
            yield from minibatch[kinds[minibatch] == kind].split(size)


def machine_peaks(like: Tensor) -> tuple[float, float]:
    """The fastest of many products in operations a second, and of many reads in bytes a second.

    Both are measured on `like`'s device, the products in its dtype.
    """
    square, much = like.new_ones(2048, 2048), like.new_ones(2**28, dtype=torch.float32)
    product = min(seconds(torch.mm, square, square) for _ in range(10))
    reading = min(seconds(much.sum) for _ in range(5))
    return 2 * 2048**3 / product, much.nbytes / reading


def bounds(
    run: Run, model: torch.nn.Module, batch: Batch, peaks: tuple[float, float]
) -> dict[str, float]:
    """Seconds of the products with weight matrices at the machine's `peaks`, by phase.

    Each prompt is computed once for its group, with a shared prefix cache in the engine too. A row
    without advantage needs no backward. Attention, norms and activations count as free.
    """
    grpo, shared = run.config.grpo, run.config.backend.prefix_cache != "off"
    linear = [each for each in model.base_model.modules() if isinstance(each, torch.nn.Linear)]
    body, head = sum(each.weight.numel() for each in linear), model.lm_head.weight.numel()
    responses = batch.mask.sum(dim=1).double().cpu()  # (B,) tokens, as all of the next lines
    prompts = batch.prompt_lengths / grpo.group_size
    work = 2 * body * (prompts + responses - 1) + 2 * head * responses  # of a forward
    forward, learns = work.sum().item(), (batch.advantages != 0).cpu()
    again = 0.0 if shared else (batch.prompt_lengths - prompts).sum().item()
    sampling = forward + 2 * body * again
    operations_a_second, bytes_a_second = peaks
    longest = responses.max().item()
    reads = longest * (body + head) * model.dtype.itemsize / bytes_a_second
    found = {"generate_s": max(sampling / operations_a_second, reads),
             "old_logprobs_s": forward / operations_a_second,
             "update_s": (forward + 2 * work[learns].sum().item()) / operations_a_second}
    return found | {"step_s": sum(found.values())}


def phases(options: Options) -> None:
    """Seconds of each phase of a step beside the bare work; two uncounted pairs warm up."""
    turns = []
    with running(options.job) as (run, live):
        config, model = run.config, live.policy.model
        peaks = machine_peaks(model.lm_head.weight)
        for step in range(1, options.rounds + 3):
            metrics, batch, problems = train_step(run, live, step)
            prompts = [problem.prompt_ids for problem in problems]
            bare = {
                "generate_s": seconds(bare_generate, live.engine, prompts, config.grpo.group_size,
                                      run.sampling),
                "old_logprobs_s": seconds(bare_training, model, batch, config, False),
                "update_s": seconds(bare_training, model, batch, config, True),
            }
            turns.append((metrics, bare | {"step_s": sum(bare.values())},
                          bounds(run, model, batch, peaks)))
    turns = turns[2:]
    names = {"generate_s": "generate", "old_logprobs_s": "old log-probabilities",
             "update_s": "update", "sync_s": "sync", "canary_s": "of sync, the canary",
             "step_s": "whole step"}
    rows = []
    for name, title in names.items():
        sides = [[each.get(name, 0.0) for each in side] for side in zip(*turns, strict=True)]
        cells = [f"{1e3 * median(side):.1f}" for side in sides]
        for other in sides[1:]:
            ratios = [ours / theirs if theirs else 0.0
                      for ours, theirs in zip(sides[0], other, strict=True)]
            low, middle, high = quantiles(ratios)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})" if middle else "")
        rows.append([title, *cells])
    print(f"\n{config.grpo.num_prompts} prompts x {config.grpo.group_size}, {metrics['tokens']:,}"
          f" tokens; {torch.get_num_threads()} threads. Medians of {options.rounds} turns, ratios"
          " with quartiles\n")
    print(table(["phase", "step, ms", "bare work, ms", "bound, ms", "step / bare work",
                 "step / bound"], rows))


PROMPT_TOKENS, RESPONSE_TOKENS, GROUPS, GROUP_SIZE = (16, 64, 256), 64, 16, 8


def prompts(options: Options) -> None:
    """Seconds of the trainer, tokens per second of the engine; a prompt's work shared or not."""
    torch.manual_seed(0)
    model_config = toy_config("toy")
    model_config.update({"max_position_embeddings": 1024, "initializer_range": 0.02})
    policy = Policy(Qwen3ForCausalLM(model_config))
    sampling = Sampling(temperature=1.0, max_new_tokens=RESPONSE_TOKENS)
    size = dict(num_prompts=GROUPS, group_size=GROUP_SIZE, max_new_tokens=RESPONSE_TOKENS)
    update_options = GrpoConfig(temperature=1.0, **size)

    def measure(tokens: int) -> tuple[float, ...]:
        ids = torch.randint(model_config.vocab_size, (GROUPS, tokens)).tolist()
        speeds, durations = [], []
        contract = {name: tensor.shape for name, tensor in policy.weights().items()}
        for prefix_cache in ("off", "versioned"):
            engine = Engine(folder, contract, ParityFlags(), max_model_len=tokens + RESPONSE_TOKENS,
                            max_num_seqs=GROUPS * GROUP_SIZE, prefix_cache=prefix_cache)
            engine.load(policy.weights(), policy.response_logprobs)
            generate = partial(engine.generate, ids, GROUP_SIZE, sampling)
            rollouts = generate()  # warms up
            # Another version: its cache is empty.
            engine.load(policy.weights(), policy.response_logprobs)
            speeds.append(GROUPS * GROUP_SIZE * RESPONSE_TOKENS / seconds(generate))
            engine.close()
        batch = make_batch(rollouts, torch.randn(len(rollouts)))
        optimizer = Optimizer(policy.model, weight_decay=0.0)
        for body in (policy.plain_body, PromptsOnce(policy)):
            policy.body = body
            scored = replace(batch, old_logprobs=frozen_logprobs(policy, batch, update_options))
            durations.append(seconds(update, policy, optimizer, scored, update_options, 0.0))
        return *durations, durations[0] / durations[1], *speeds, speeds[1] / speeds[0]

    columns = {"update, s": ".2f", "prompts once": ".2f", "times faster": ".2f",
               "engine, tokens/s": ",.0f", "with `--prefix-cache versioned`": ",.0f",
               "times": ".2f"}
    with TemporaryDirectory() as folder:
        policy.model.save_pretrained(folder)
        measured = medians(PROMPT_TOKENS, measure, "prompt tokens", columns)
    print(f"\n{GROUPS} prompts, {GROUP_SIZE} responses of {RESPONSE_TOKENS} tokens each; medians of"
          " three turns\n")
    print(measured)


MASKS = {"none": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 5": {"top_k": 5},
         "both": {"top_p": 0.9, "top_k": 5}, "min-p 0.05": {"min_p": 0.05}}
RANDOM_REWARD = """import random
sample = lambda rng: (str(rng.randrange(10**6)), "")
reward = lambda problem, response: random.random()
"""
MASK_TURNS, LARGE_VOCABULARY, LOGIT_SCALE = 6, 32_000, 6.0


def masks(options: Options) -> None:
    """Seconds of a step by mask: the default job, and a random model of many tokens."""
    model_config = toy_config("toy")
    model_config.update({"vocab_size": LARGE_VOCABULARY, "initializer_range": 0.02,
                         "tie_word_embeddings": False})
    model = Qwen3ForCausalLM(model_config)
    # Logits of this standard deviation: the final norm leaves hidden states of norm sqrt(width)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, LOGIT_SCALE / model_config.hidden_size**0.5)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        toy_tokenizer().save_pretrained(folder)
        task = Path(folder) / "task.py"
        task.write_text(RANDOM_REWARD)
        large = {"model": folder, "task": str(task), "num_prompts": 16}
        for title, changes in (("The default job", {}),
                               (f"A vocabulary of {LARGE_VOCABULARY:,}", large)):
            with running(temperature=1.0, **changes) as (run, live):
                turns = [[masked_step(run, live, step, mask) for mask in MASKS.values()]
                         for step in range(MASK_TURNS)]
            figures = numpy.median(turns[1:], axis=0)  # (masks, columns); the first turn warms up
            rows = [[mask, *(f"{1e3 * each:.0f}" for each in row[:4]),
                     f"{row[3] / figures[0, 3]:.2f}", f"{row[4]:.1f}"]
                    for mask, row in zip(MASKS, figures, strict=True)]
            print(f"\n{title}, medians of {MASK_TURNS - 1} turns over all masks\n")
            print(table(["mask", "generate, ms", "old log-probabilities, ms", "update, ms",
                         "step, ms", "over none", "ids kept per token"], rows))


def masked_step(run: Run, live: TrainingState, step: int, mask: dict[str, float]) -> list[float]:
    """Seconds of three phases and of the whole step, and the mean size of the kept sets."""
    config = run.config.but(**mask)
    run = replace(run, config=config,
                  sampling=replace(run.sampling, **mask, max_kept=config.max_kept))
    live.source.sampling = run.sampling
    live.policy.support = Vocabulary()
    if mask:
        use_masks(live.policy, live.engine, run.sampling)
    metrics, batch, _ = train_step(run, live, step)
    sizes = [len(ids) for rollout in batch.rollouts for ids in rollout.kept]
    names = ("generate_s", "old_logprobs_s", "update_s", "step_s")
    return [*(metrics[name] for name in names), mean(sizes or [0])]


# About the head of Qwen2.5-0.5B.
HEAD_TOKENS, HEAD_VOCABULARY, HEAD_HIDDEN = (2048, 4096, 16384), 150_000, 896
HEAD_KEPT_IDS = 50
# Most tokens in one piece: at 16,384 the logits and their copies take 40 GiB.
WHOLE_HEAD_TOKENS = 4096


def head_cost(tokens: int, in_chunks: bool, kept_ids: int = 0) -> list[str]:
    """Seconds of one forward and backward of the head, and the GiB that they add at their peak.

    With `kept_ids`, the softmax is over a kept set of this size for each token.
    """
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HEAD_HIDDEN, requires_grad=True)
    config = Qwen2Config(vocab_size=HEAD_VOCABULARY, hidden_size=HEAD_HIDDEN, num_hidden_layers=0)
    policy = Policy(Qwen2ForCausalLM(config))
    targets, kept = torch.randint(HEAD_VOCABULARY, (tokens,)), []
    if kept_ids:
        others = torch.randint(HEAD_VOCABULARY, (tokens, kept_ids - 1), dtype=torch.int32)
        kept = list(torch.cat([targets[:, None].int(), others], dim=1).numpy())

    def restrict(logits: Tensor, part: slice) -> Tensor:
        return mask_outside(logits, kept[part]) if kept else logits

    def logprobs() -> Tensor:
        if in_chunks:
            return TargetLogprobs.apply(hidden, policy.head.weight, None, targets, restrict,
                                        policy.projection(0.7))
        all_logprobs = torch.log_softmax(policy.head(hidden) / 0.7, dim=-1)  # (N, V)
        with torch.no_grad():
            _entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        return all_logprobs.gather(-1, targets[:, None])

    reset_peak()
    before = memory_gib()
    duration = seconds(lambda: logprobs().sum().backward())
    return [f"{duration:.2f}", f"{memory_gib(peak=True) - before:.2f}"]


def head(options: Options) -> None:
    """Seconds and memory of the head: in one piece, in chunks, in chunks with kept sets."""
    rows = []
    for tokens in HEAD_TOKENS:
        whole = head_cost(tokens, False) if tokens <= WHOLE_HEAD_TOKENS else ["not run"] * 2
        rows.append([f"{tokens:,}", *whole, *head_cost(tokens, True),
                     *head_cost(tokens, True, HEAD_KEPT_IDS)])
    print(f"\nHead with {HEAD_VOCABULARY:,} x {HEAD_HIDDEN} weights in fp32 on the CPU, one forward"
          " and backward\n")
    print(table(["tokens", "in one piece, s", "GiB", "in chunks, s", "GiB",
                 f"in chunks with {HEAD_KEPT_IDS} kept ids a token, s", "GiB"], rows))


SHARED = {"vllm": {}, "shared": dict(engine="shared"), "exact": dict(engine="shared", exact=True)}


def serve(pipe: Any, config: dict) -> None:
    """In a process of its own: a step for each number received, until 0; sends its metrics."""
    with running(**config) as (run, live):
        for step in iter(pipe.recv, 0):
            pipe.send(train_step(run, live, step).metrics)
    pipe.send({})


def shared(options: Options, engines: dict[str, dict] = SHARED) -> None:
    """Seconds and peak memory of a step by engine; the processes take turns."""
    context, pipes = get_context("spawn"), []
    for config in engines.values():
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, config | {"dtype": options.dtype}),
                        daemon=True).start()
        theirs.close()  # so that `recv` fails if the process ends
        pipes.append(ours)
    turns = [[pipe.send(step) or pipe.recv() for pipe in pipes]
             for step in [*range(1, options.rounds + 3), 0]]
    names = ["step_s", "generate_s", "old_logprobs_s", "update_s", "sync_s"]
    rows = []
    by_engine = [*zip(*turns[2:-1], strict=True)]  # two turns warm up
    for engine, steps in zip(engines, by_engine, strict=True):
        ratios = quantiles(step["step_s"] / first["step_s"]
                           for step, first in zip(steps, by_engine[0], strict=True))
        peak = max(value for step in steps for name, value in step.items() if name.endswith("_gib"))
        rows.append([engine, *(f"{1e3 * median(step[name] for step in steps):.1f}"
                               for name in names),
                     "{1:.3f} ({0:.3f} to {2:.3f})".format(*ratios), f"{peak:.2f}"])
    print(f"\nMilliseconds, medians of {options.rounds} turns over all engines; {options.dtype},"
          f" threads: {torch.get_num_threads()}. Ratio: to the step of vllm in the same turn,"
          " median and quartiles\n")
    print(table(["engine", *names, "ratio", "peak, GiB"], rows))


CASES = {"inflight": inflight, "growth": growth, "phases": phases, "prompts": prompts,
         "masks": masks, "head": head, "shared": shared}


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    for case in options.cases:
        CASES[case](options)


if __name__ == "__main__":
    main()
