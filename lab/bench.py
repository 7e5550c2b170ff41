"""Benchmarks of one machine: what a training step costs over the bare work, how time and memory grow with the number of
rollouts, what groups in flight gain when a few responses are long, and what the head in chunks saves.

The bare work is what every colocated GRPO needs: vLLM's own `generate` on the same prompts, without log-probabilities,
and plain transformers on the same tokens and micro-batches: one forward (old log-probabilities) and one forward and
backward (update). A step and its bare work are measured in turns in one process.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean as mean
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from engine_adapter import plain_vllm
from examples.toys import toy_config, toy_tokenizer
from lab import seconds, table
from objectives import Batch
from records import memory_gib, reset_peak
from rl import Policy
from train import Config, Live, Run, build, prepare, train_step

Case = Literal["inflight", "growth", "phases", "head"]


@dataclass(frozen=True)
class Options:
    """What to measure."""

    cases: tyro.conf.Positional[tuple[Case, ...]] = ("inflight", "growth", "phases")
    """inflight: groups in flight. growth: time and memory by rollouts. phases: a step and the bare work. head: the head
    in one piece and in chunks."""
    rollouts: tuple[int, ...] = (1024, 4096, 16384)
    """Case growth: numbers of rollouts per step."""
    rounds: int = 20
    """Case phases: pairs of a step and its bare work."""


@contextmanager
def running(**options) -> Iterator[tuple[Run, Live]]:
    """A run in a temporary folder. The learning rate is too small to change the policy: all steps sample from one."""
    with TemporaryDirectory() as out:
        run = prepare(Config(out=out, lr=1e-12, **options))
        live, _ = build(run)
        yield run, live
        live.engine.close()


def medians(turns: list[tuple[float, ...]]) -> Iterator[float]:
    return map(median, zip(*turns, strict=True))


LONG_TAIL_TOKENS = 96  # eight times the median length: the model ends a response at about one token in fifteen
LONG_TAIL_STEPS, GROUPS_IN_FLIGHT = 10, (0, 16, 32)


def inflight(options: Options) -> None:
    """Tokens per second of the whole loop and of generation, by groups in flight."""
    torch.manual_seed(0)
    model_config = toy_config("digits")
    model_config.update({"max_position_embeddings": 256, "initializer_range": 0.02})  # all tokens about equally likely
    measured, lengths, rows = defaultdict(list), [], []
    with TemporaryDirectory() as model:
        Qwen3ForCausalLM(model_config).save_pretrained(model)
        toy_tokenizer().save_pretrained(model)
        for groups in GROUPS_IN_FLIGHT * 3:
            with running(
                model=model, task="digits", num_prompts=16, group_size=8, inflight_groups=groups,
                max_num_seqs=128, temperature=1.0, max_new_tokens=LONG_TAIL_TOKENS, micro_batch_tokens=2048,
                num_minibatches=1,
            ) as (run, live):
                steps = [train_step(run, live, step) for step in range(1, LONG_TAIL_STEPS + 3)]
            lengths += [length for _, batch, _ in steps for length in batch.mask.sum(dim=1).tolist()]
            metrics = [metrics for metrics, _, _ in steps[2:]]  # the first two steps warm up
            tokens, loop, generation = (sum(m[name] for m in metrics) for name in ("tokens", "step_s", "generate_s"))
            staleness = mean(m["staleness_mean"] for m in metrics)
            measured[groups].append((tokens / loop, tokens / generation, staleness))
    for groups, turns in measured.items():
        loop, generation, staleness = medians(turns)
        rows.append([f"{groups}", f"{loop:,.0f}", f"{generation:,.0f}", f"{staleness:.2f}"])
    print(f"\nResponses of {median(lengths):.0f} tokens (median), at most {max(lengths):.0f}; {LONG_TAIL_STEPS} steps;"
          " medians of three turns\n")
    print(table(["groups in flight", "tokens/s, whole loop", "tokens/s, generation", "mean staleness"], rows))


def growth(options: Options) -> None:
    """Seconds and peak memory of a step by the number of rollouts."""
    measured, rows = defaultdict(list), []
    with running() as (run, live):
        for rollouts in options.rollouts * 3:
            sized = replace(run, config=replace(run.config, num_prompts=rollouts // run.config.group_size))
            for step in (1, 2):
                metrics = train_step(sized, live, step)[0]
                gib = max(value for name, value in metrics.items() if name.endswith("_gib"))
                measured[rollouts].append((metrics["step_s"], metrics["step_s"] / metrics["tokens"], gib))
    for rollouts, turns in measured.items():
        step_s, token_s, gib = medians(turns)
        rows.append([f"{rollouts:,}", f"{step_s:.2f}", f"{1e3 * step_s / rollouts:.2f}", f"{1e6 * token_s:.0f}",
                     f"{gib:.2f}"])
    print("\nMedians of three turns of two steps; the peak is the process's memory in any phase\n")
    print(table(["rollouts per step", "seconds", "ms per rollout", "us per token", "peak, GiB"], rows))


def bare_training(model: PreTrainedModel, batch: Batch, config: Config) -> dict[str, float]:
    """Seconds of a forward, and of a forward and backward, over the batch's tokens, without an optimizer."""
    steps = batch.cut(config.num_minibatches, config.micro_batch_tokens)
    micros = [batch.rows(rows) for step in steps for rows in step]

    @torch.no_grad()
    def forward() -> None:
        for micro in micros:
            model(input_ids=micro.inputs, use_cache=False)

    def forward_and_backward() -> None:
        for micro in micros:
            logits = model(input_ids=micro.inputs, use_cache=False).logits  # (rows, T, V)
            losses = F.cross_entropy(logits.flatten(0, 1), micro.targets.flatten(), reduction="none")
            (losses * micro.mask.flatten()).sum().backward()
        model.zero_grad()

    return {"old_logprobs_s": seconds(forward), "update_s": seconds(forward_and_backward)}


def phases(options: Options) -> None:
    """Seconds of each phase of a step beside the bare work; two uncounted pairs warm up."""
    steps, bare = [], []
    with running() as (run, live):
        config = run.config
        model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32).to(live.policy.device).eval()
        generate = plain_vllm(run.model_path, max_model_len=run.max_model_len, max_num_seqs=config.max_num_seqs,
                              kv_cache_gib=config.kv_cache_gib)
        for step in range(1, options.rounds + 3):
            metrics, batch, problems = train_step(run, live, step)
            prompts = [problem.prompt_ids for problem in problems]
            generate_s = seconds(generate, prompts, config.group_size, run.sampling)
            work = {"generate_s": generate_s} | bare_training(model, batch, config)
            steps.append(metrics)
            bare.append(work | {"step_s": sum(work.values())})
    ratios = [step["step_s"] / work["step_s"] for step, work in zip(steps[2:], bare[2:], strict=True)]
    low, middle, high = quantiles(ratios)
    names = {"generate_s": "generate", "old_logprobs_s": "old log-probabilities", "update_s": "update",
             "sync_s": "sync", "canary_s": "of sync, the canary", "step_s": "whole step"}
    rows = [[title, *(f"{1e3 * median(each.get(name, 0.0) for each in side[2:]):.1f}" for side in (steps, bare))]
            for name, title in names.items()]
    print(f"\nA step costs {middle:.3f} times the bare work (median of {options.rounds} pairs, quartiles {low:.2f} and"
          f" {high:.2f}); {config.num_prompts} prompts x {config.group_size}, {steps[-1]['tokens']:,} tokens\n")
    print(table(["phase", "step, ms", "bare work, ms"], rows))


HEAD_TOKENS, HEAD_VOCABULARY, HEAD_HIDDEN = (2048, 4096, 16384), 150_000, 896  # about the head of Qwen2.5-0.5B
WHOLE_HEAD_TOKENS = 4096  # most tokens in one piece: at 16,384 the logits and their copies take 40 GiB


def head_once(tokens: int, in_chunks: bool) -> list[str]:
    """Seconds of one forward and backward of the head, and the GiB that they add to the process at their peak."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HEAD_HIDDEN, requires_grad=True)
    config = Qwen2Config(vocab_size=HEAD_VOCABULARY, hidden_size=HEAD_HIDDEN, num_hidden_layers=0)
    policy = Policy(Qwen2ForCausalLM(config))
    targets = torch.randint(HEAD_VOCABULARY, (tokens,))

    def forward_and_backward() -> None:
        if in_chunks:
            logprobs, entropy = policy.target_logprobs(hidden, targets, temperature=0.7)
        else:
            all_logprobs = torch.log_softmax(policy.head(hidden) / 0.7, dim=-1)  # (N, V)
            with torch.no_grad():
                entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
            logprobs = all_logprobs.gather(-1, targets[:, None])[:, 0]
        (logprobs * torch.linspace(-1, 1, tokens)).sum().backward()
        assert entropy.isfinite().all()

    reset_peak()
    before = memory_gib()
    return [f"{seconds(forward_and_backward):.2f}", f"{memory_gib(peak=True) - before:.2f}"]


def head(options: Options) -> None:
    """Seconds and memory of the head, in one piece and in chunks of logits."""
    rows = [[f"{tokens:,}", *(head_once(tokens, False) if tokens <= WHOLE_HEAD_TOKENS else ["not run"] * 2),
             *head_once(tokens, True)] for tokens in HEAD_TOKENS]
    print(f"\nHead with {HEAD_VOCABULARY:,} x {HEAD_HIDDEN} weights in fp32 on the CPU, one forward and backward\n")
    print(table(["tokens", "in one piece, s", "GiB", "in chunks, s", "GiB"], rows))


CASES = {"inflight": inflight, "growth": growth, "phases": phases, "head": head}


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=arguments, description=__doc__)
    for case in options.cases:
        CASES[case](options)


if __name__ == "__main__":
    main()
