"""What a step costs over the bare work, both measured in one run; what time and memory do as rollouts grow; and what
groups in flight are worth where a few responses are long.

The bare work is what no colocated GRPO can do without: vLLM's own `generate` on the same prompts without
log-probabilities, and plain transformers' forward and backward over the same tokens in the same micro-batches, with
one more forward for the old log-probabilities.
"""

import contextlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean as mean
from statistics import median, quantiles

import torch
import torch.nn.functional as F
import transformers
import tyro
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from engine_adapter import plain_vllm
from examples.toys import toy_config, toy_tokenizer
from rl import HEAD_CHUNK_ELEMENTS, Batch, Shape, TargetLogprobs
from train import Config, Live, Run, build, prepare, train_step

PHASES = ("generate_s", "old_logprobs_s", "update_s", "sync_s")


@dataclass(frozen=True)
class Options:
    """How long to measure."""

    rounds: int = 20
    """Pairs of one step and its bare work, in turns; medians are compared."""
    rollouts: tuple[int, ...] = (1024, 4096, 16384)
    """Rollouts per step at which time and memory are measured; empty for none."""
    inflight_groups: tuple[int, ...] = (0, 16, 32)
    """Groups in flight at which a workload with a long tail is run, in turns; empty for none."""
    long_tail_steps: int = 10
    """Steps of each such run; each is run three times."""
    head_tokens: tuple[int, ...] = ()
    """Measure the head alone, plain and in chunks, at so many tokens, and nothing else: 2048 16384."""
    plain_tokens: int = 4096
    """Most tokens at which the plain head is run: at 16,384 its logits and their copies alone take 40 GiB."""
    seed: int = 0
    """Of the toy model and the problems."""


def bare_training(model: PreTrainedModel, batch: Batch, config: Config) -> dict[str, float]:
    """Seconds of a forward, and of a forward and backward, over the batch's tokens, without any optimizer."""
    steps = batch.cut(config.num_minibatches, config.micro_batch_tokens)
    micros = [batch.rows(rows) for step in steps for rows in step]
    started = time.perf_counter()
    with torch.no_grad():
        for micro in micros:
            model(input_ids=micro.inputs, use_cache=False)
    _wait()
    forward = time.perf_counter()
    for micro in micros:
        logits = model(input_ids=micro.inputs, use_cache=False).logits  # (rows, T, V)
        losses = F.cross_entropy(logits.flatten(0, 1), micro.targets.flatten(), reduction="none")
        (losses * micro.mask.flatten()).sum().backward()
    model.zero_grad()
    _wait()
    return {"old_logprobs_s": forward - started, "update_s": time.perf_counter() - forward}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(run: Run, live: Live, rounds: int) -> None:
    """Print the table of phases: our step beside the bare work, medians over `rounds` after two uncounted ones."""
    config = run.config
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype=torch.float32).to(live.policy.device).eval()
    generate = plain_vllm(run.model_path, max_model_len=run.max_model_len, max_num_seqs=config.max_num_seqs,
                          kv_cache_gib=config.kv_cache_gib)
    ours, bare = [], []
    for step in range(1, rounds + 3):
        metrics, batch, problems = train_step(run, live, step)
        prompts = run.encode(problems)
        started = time.perf_counter()
        generate(prompts, config.group_size, run.sampling)
        phases = {"generate_s": time.perf_counter() - started} | bare_training(model, batch, config)
        ours.append(metrics)
        bare.append(phases | {"step_s": sum(phases.values())})
    print(f"{'phase':<16} {'step, ms':>9} {'bare, ms':>9}   medians of {rounds} pairs, {config.num_prompts} prompts"
          f" x {config.group_size}, {ours[-1]['tokens']} tokens")
    table = {name: (median(row[name] for row in ours[2:]), median(row.get(name, 0.0) for row in bare[2:]))
             for name in (*PHASES, "canary_s", "step_s")}
    for name, (step_s, bare_s) in table.items():
        print(f"{name:<16} {1e3 * step_s:9.1f} {1e3 * bare_s:9.1f}{'   in sync_s' if name == 'canary_s' else ''}")
    low, middle, high = quantiles([a["step_s"] / b["step_s"] for a, b in zip(ours[2:], bare[2:], strict=True)])
    print(f"a step costs {middle:.3f} times the bare work (median of pairs, quartiles {low:.2f} and {high:.2f});"
          f" the canary is {table['canary_s'][0] / table['step_s'][0]:.1%} of a step")


def grow(run: Run, live: Live, rollouts: tuple[int, ...]) -> None:
    """Print seconds and peak memory of a step as rollouts grow: medians of three turns over all sizes."""
    measured = defaultdict(list)
    for _ in range(3):
        for num_rollouts in rollouts:
            size = replace(run, config=replace(run.config, num_prompts=num_rollouts // run.config.group_size))
            for step in (1, 2):
                row = train_step(size, live, step)[0]
                gib = max(value for name, value in row.items() if name.endswith("_gib"))
                measured[num_rollouts].append((row["step_s"], 1e6 * row["step_s"] / row["tokens"], gib))
    print(f"{'rollouts':>8} {'step, s':>8} {'ms/rollout':>11} {'us/token':>9} {'peak, GiB':>10}")
    for num_rollouts, rows in measured.items():
        seconds, per_token, gib = map(median, zip(*rows, strict=True))
        print(f"{num_rollouts:8d} {seconds:8.2f} {1e3 * seconds / num_rollouts:11.2f} {per_token:9.0f} {gib:10.3f}")


HEAD_VOCABULARY, HEAD_HIDDEN = 150_000, 896  # Qwen2.5-0.5B's, nearly


def head_once(mode: str, tokens: int) -> tuple[float, float]:
    """Seconds of one forward and backward of the head, and GiB that it takes at its peak; in a process of its own."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HEAD_HIDDEN, requires_grad=True)
    weight = (torch.randn(HEAD_VOCABULARY, HEAD_HIDDEN) / HEAD_HIDDEN**0.5).requires_grad_()
    targets = torch.randint(HEAD_VOCABULARY, (tokens,))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if mode == "plain":
        all_logprobs = torch.log_softmax(F.linear(hidden, weight) / 0.7, dim=-1)  # (N, V)
        with torch.no_grad():
            entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        logprobs = all_logprobs.gather(-1, targets[:, None])[:, 0]
    else:
        shape = Shape(torch.float32, HEAD_CHUNK_ELEMENTS // HEAD_VOCABULARY, 1 / 0.7)
        logprobs, entropy = TargetLogprobs.apply(hidden, weight, None, targets, shape)
    (logprobs * torch.linspace(-1, 1, tokens)).sum().backward()
    assert entropy.isfinite().all()
    seconds = time.perf_counter() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def measure_head(options: Options) -> None:
    """Print seconds and memory of the plain head and of the one in chunks, each in a fresh process."""
    print(f"head with {HEAD_VOCABULARY} x {HEAD_HIDDEN} weights in fp32, forward and backward")
    print(f"{'tokens':>7} {'mode':>8} {'seconds':>8} {'us/token':>9} {'GiB':>7}")
    for tokens in options.head_tokens:
        for mode in ("plain", "chunks") if tokens <= options.plain_tokens else ("chunks",):
            program = f"from lab.bench import head_once; print(*head_once({mode!r}, {tokens}))"
            command = [sys.executable, "-c", program]
            result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
            seconds, gib = map(float, result.stdout.split())
            print(f"{tokens:7d} {mode:>8} {seconds:8.2f} {1e6 * seconds / tokens:9.0f} {gib:7.2f}", flush=True)


LONG_TAIL_TOKENS = 96  # eight times the median of a model that ends a response with about one token in fifteen


def long_tail(options: Options, folder: Path) -> None:
    """Print generated tokens per second, of the whole loop and of its generation, by groups in flight."""
    torch.manual_seed(options.seed)
    model_config = toy_config("digits")
    model_config.update({"max_position_embeddings": 256, "initializer_range": 0.02})  # all tokens about as likely
    Qwen3ForCausalLM(model_config).save_pretrained(folder / "model")
    toy_tokenizer().save_pretrained(folder / "model")
    speeds, lengths = defaultdict(list), []
    for turn in range(3):
        for groups in options.inflight_groups:
            run = prepare(Config(
                out=str(folder / f"{turn}-{groups}"), model=str(folder / "model"), task="digits", seed=options.seed,
                num_prompts=16, group_size=8, inflight_groups=groups, max_num_seqs=128, lr=1e-12, temperature=1.0,
                max_new_tokens=LONG_TAIL_TOKENS, micro_batch_tokens=2048, num_minibatches=1,
            ))
            speed, seen = _speed(run, options.long_tail_steps)
            speeds[groups].append(speed)
            lengths += seen
    print(f"responses of {median(lengths):.0f} tokens in the median and {max(lengths):.0f} at most;"
          f" {options.long_tail_steps} updates each, medians of three turns")
    print(f"{'in flight':>9} {'tokens/s':>9} {'while generating':>17} {'staleness':>10}")
    for groups, values in speeds.items():
        loop, generating, staleness = map(median, zip(*values, strict=True))
        print(f"{groups:9d} {loop:9.0f} {generating:17.0f} {staleness:10.2f}")


def _speed(run: Run, steps: int) -> tuple[tuple[float, float, float], list[float]]:
    """Tokens per second of the loop and of its generation and mean staleness, after two uncounted steps; lengths."""
    with contextlib.redirect_stdout(io.StringIO()):
        live, _ = build(run)
    rows, lengths = [], []
    for step in range(1, steps + 3):
        metrics, batch, _ = train_step(run, live, step)
        rows.append(metrics)
        lengths += batch.mask.sum(dim=1).tolist()
    live.engine.close()
    tokens, seconds, generating = (sum(row[name] for row in rows[2:]) for name in ("tokens", "step_s", "generate_s"))
    return (tokens / seconds, tokens / generating, mean(row["staleness_mean"] for row in rows[2:])), lengths


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    options = tyro.cli(Options, description=__doc__)
    if options.head_tokens:
        measure_head(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.inflight_groups:
            long_tail(options, Path(folder))
        # A learning rate too small to move the weights: both sides sample from the same policy throughout.
        run = prepare(Config(out=f"{folder}/steps", seed=options.seed, lr=1e-12))
        with contextlib.redirect_stdout(io.StringIO()):
            live, _ = build(run)
        grow(run, live, options.rollouts)
        compare(run, live, options.rounds)


if __name__ == "__main__":
    main()
