"""Where the time of decode steps and of an update goes: a run of the study `gpu`.

It takes the options of train.py. After a step, 20 decode steps of as many requests as a step has,
and one update, run under torch's profiler, and 20 more decode steps under Python's (fewer with
short responses). OUT/profile.txt has the dearest operations by the GPU's and the host's own time,
the share of the time in which the GPU computes, and the dearest functions.
"""

import pstats
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from cProfile import Profile
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from engine_adapter import reseed
from lab.bench import built
from report.files import append_rows
from train import train_step, update

ROWS = 12  # of a table


def profiled(what: str, work: Callable[[], None]) -> float:
    """Print the tables of the work; returns the share of its time in which the GPU computes."""
    with profile() as profiler:
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    events = profiler.key_averages()
    # Kernels alone: torch also gives their time to the operations that have launched them.
    kernels = [event for event in events
               if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6 / seconds
    print(f"{what}: {seconds:.3f} s, a GPU computes in {busy:.0%} of it")
    orders = ["self_cpu_time_total"]
    if kernels:
        orders.insert(0, "self_device_time_total")
    for order in orders:
        print(events.table(sort_by=order, row_limit=ROWS, max_name_column_width=60))
    return busy


def main(arguments: list[str]) -> None:
    trainer, _ = built(arguments, __doc__)
    run, engine, policy = trainer.run, trainer.engine, trainer.policy
    config, problems = run.config, run.task.train[: run.config.num_prompts]
    steps = min(20, config.max_new_tokens // 3)

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    done = train_step(trainer, 1)
    reseed(config.seed, "profile")
    rollouts = []
    for problem in problems:
        rollouts += engine.submit(problem.prompt_ids, config.group_size, run.sampling)
    while engine.num_unfinished and not all(rollout.token_ids for rollout in rollouts):
        engine.step()  # prompts
    with open(run.out / "profile.txt", "w") as file, redirect_stdout(file):
        decode_busy = profiled(f"{steps} decode steps of {engine.num_unfinished}", decode)
        with Profile() as functions:
            decode()
        pstats.Stats(functions, stream=file).sort_stats("tottime").print_stats(2 * ROWS)
        while engine.num_unfinished:
            engine.step()
        engine.sleep()
        minibatches = done.batch.minibatches(
            torch.ones(len(rollouts), dtype=torch.bool), config.num_minibatches,
            config.micro_batch_tokens, policy.pack)
        update_busy = profiled("an update", partial(
            update, policy, trainer.optimizer, done.batch, minibatches, config, config.lr))
    shares = {"decode_busy": decode_busy, "update_busy": update_busy}
    append_rows(run.out / "metrics.jsonl", [done.metrics | shares])
    engine.close()
