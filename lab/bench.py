"""One run whose steps are each followed by their bare work: the program of `lab.study bench`.

It takes the options of train.py. The bare work is the cheapest known way to do the same, directly
on the step's own engine and model: vLLM samples for the same prompts, without seeds and
log-probabilities; plain transformers computes a forward (old log-probabilities) and a forward and
backward (update), each prompt once for its group. There is no evaluation and no checkpoint.

Of the generation, rows also have the microseconds a token outside of vLLM's model runner: in this
program, in vLLM below it, and in the bare generation. With async scheduling on a GPU, vLLM's
contain its wait for the GPU.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers import DynamicCache

from engine_adapter import Engine, Sampling
from extras.memory import GIB, phases, without_memory
from report.clock import Clock
from report.files import append_rows
from rl import Batch
from train import Config, Trainer, begin, load_policy, parts_of, prepare, train_step


def bare_generate(
    engine: Engine, prompts: list[list[int]], group_size: int, sampling: Sampling
) -> None:
    """Sample as `vllm.LLM.generate` does: no seeds, whole responses at the end."""
    params = engine.sampling_params(sampling, None)
    params.n, params.logprobs = group_size, None
    params.output_kind = type(params.output_kind).FINAL_ONLY
    for request, prompt in enumerate(prompts):
        engine.llm.add_request(str(request), {"prompt_token_ids": prompt}, params)
    while engine.llm.has_unfinished_requests():
        engine.llm.step()


def timed(engine: Engine, *methods: Callable) -> list[float]:
    """The seconds of all later calls of these methods of live objects, except in the canary."""
    seconds = []

    def call(method: Callable, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = method(*arguments, **named)
        if engine.state == "ready":
            seconds.append(time.perf_counter() - started)
        return result

    for method in methods:
        setattr(method.__self__, method.__name__, partial(call, method))
    return seconds


def bare_training(
    model: torch.nn.Module, batch: Batch, config: Config, backward: bool
) -> None:
    """The cheapest forward, or forward and backward, of a batch: the most rows of equal prompts.

    The body computes each prompt once for its group, and the head responses alone. Flat groups need
    no backward. No chunks, no entropy, no mask.
    """
    group_size = config.group_size
    has_signal = batch.advantages.any(dim=1).view(-1, group_size).any(dim=1)  # (P,)
    minibatches = batch.minibatches(
        has_signal.repeat_interleave(group_size).cpu(), config.num_minibatches,
        config.micro_batch_tokens, partial(whole_groups, group_size))
    for rows in chain.from_iterable(minibatches):
        micro, cache = batch.select(rows), DynamicCache(config=model.config)
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


def whole_groups(
    group_size: int, batch: Batch, rows: Tensor, micro_batch_tokens: int
) -> list[Tensor]:
    """The rows in micro-batches of whole groups, whose prompts have one length."""
    positions = group_size * batch.inputs.shape[1]  # of a group
    size = group_size * max(1, micro_batch_tokens // positions)
    lengths = batch.prompt_lengths[rows]
    return [part for length in lengths.unique() for part in rows[lengths == length].split(size)]


def built(arguments: list[str], description: str) -> tuple[Trainer, float]:
    """The trainer of a run with options of train.py, and the seconds of the engine's start."""
    config = tyro.cli(Config, args=arguments, description=description)
    run = prepare(config)
    run.out.mkdir(parents=True)
    parts = parts_of(run)
    policy = load_policy(run, parts)
    started = time.perf_counter()
    engine = parts.engine_kind.start(run, policy, **parts.engine)
    start_s = time.perf_counter() - started
    return begin(run, parts, policy, engine), start_s


def main(arguments: list[str]) -> None:
    trainer, start_s = built(arguments, __doc__)
    run, parts, engine, policy = trainer.run, trainer.parts, trainer.engine, trainer.policy
    config, model = run.config, policy.model
    longest = max(map(len, run.task.prompts))
    formula = {f"formula_{phase}_gib": sum(terms.values()) / GIB for phase, terms in
               phases(config, without_memory(model.config), longest,
                      policy.head.chunk_elements).items()}
    client = engine.llm.engine_core
    in_vllm = timed(engine, engine.llm.input_processor.process_inputs, client.add_request,
                    client.get_output)
    executor = engine.core.model_executor  # its calls wait for the GPU, those of the runner may not
    in_runner = timed(engine, executor.execute_model, executor.sample_tokens)
    for step in range(1, config.steps + 1):
        in_vllm.clear()
        in_runner.clear()
        done = train_step(trainer, step)
        row = done.metrics
        us = 1e6 / row["tokens"]
        row["program_us"] = us * (row["generate_s"] - sum(in_vllm))
        row["vllm_us"] = us * (sum(in_vllm) - sum(in_runner))
        for observe in parts.observers:
            row.update(observe(done))
        in_runner.clear()
        prompts = [problem.prompt_ids for problem in done.problems]
        clock = Clock()
        with clock("bare_generate"):
            bare_generate(engine, prompts, config.group_size, run.sampling)
        with clock("bare_old_logprobs"):
            bare_training(model, done.batch, config, backward=False)
        with clock("bare_update"):
            bare_training(model, done.batch, config, backward=True)
        trainer.optimizer.adamw.zero_grad(set_to_none=True)  # 16-bit gradients are in the masters
        bare_step = {"bare_step_s": sum(clock.phases.values())}
        row |= clock.phases | bare_step | formula | {"start_s": start_s}
        row["bare_us"] = us * (row["bare_generate_s"] - sum(in_runner))
        # The rest of `sync`: weights and KV cache wake.
        row["wake_s"] = row["sync_s"] - row["load_s"] - row["proof_s"] - row["canary_s"]
        append_rows(run.out / "metrics.jsonl", [row])
    engine.close()
