"""Why a stale prefix cache rescues a run from raw log-probabilities: the program of its study.

A run of train.py with two additions. It measures the tokens of each step, and it can end the
staleness of the cache, or begin it, at a step. From `fresh_from` to `stale_from` each load gives the
cache new keys, so no block of older weights is found.

Predicted before any run (ladder's job, reward of the last five steps): fresh from step 20 < 0.3;
stale from step 10 > 0.3; stale from step 20 < 0.3; always fresh within 0.05 of raw values alone.
"""

from typing import Any

import torch
import tyro

from config import Config
from records import locked, one_sentence
from train import Step, build, load_policy, prepare, start_engine, train

EDGES = 0.1, 0.5, 0.9  # of the engine's reported probability
NEVER = 1_000_000


def measure(step: Step, clip: float) -> dict[str, float]:
    """Of the tokens before the first minibatch's update: ratio r = pi_theta / mu, by probability.

    log_ratio: mean log r. up, down: the mean of A r over tokens that are not clipped, A > 0 and
    A < 0: how strongly a token is pushed. clip_up, clip_down: share of the tokens with A > 0, A < 0
    that are clipped.
    """
    batch = step.batch
    on = batch.mask > 0
    advantages = batch.advantages.expand_as(batch.mask)[on]
    log_ratio = (batch.old_logprobs - batch.behavior_logprobs)[on]
    ratio = log_ratio.exp()
    up, down = advantages > 0, advantages < 0
    free = ~(up & (ratio > 1 + clip)) & ~(down & (ratio < 1 - clip))
    push = advantages * ratio * free
    found = {"clip_up": (~free)[up].float().mean(), "clip_down": (~free)[down].float().mean()}
    bins = torch.bucketize(batch.behavior_logprobs[on].exp(), torch.tensor(EDGES))
    for index in range(len(EDGES) + 1):
        here = bins == index
        found |= {
            f"share_{index}": here.float().mean(), f"log_ratio_{index}": log_ratio[here].mean(),
            f"up_{index}": push[here & up].sum() / len(push),
            f"down_{index}": push[here & down].sum() / len(push),
        }  # fmt: skip
    return {name: None if value.isnan() else value.item() for name, value in found.items()}


def program(fresh_from: int = NEVER, stale_from: int = NEVER) -> Any:
    """`main` of a run whose cache is fresh from the one step (0: the start) to the other."""

    def main(arguments: list[str] | None = None) -> None:
        config = tyro.cli(Config, args=arguments)
        with one_sentence(2, config.run.out), locked(config.run.out):
            run = prepare(config)
            policy = load_policy(run)
            engine = start_engine(run, policy)
            state, _ = build(run, policy, engine, None)

            def renew(step: int) -> None:
                if fresh_from <= step < stale_from:
                    engine._cache_salt = f"after step {step}"
                    for request in engine.core.scheduler.requests.values():
                        if not request.num_computed_tokens:
                            request.cache_salt, request.block_hashes = engine._cache_salt, []
                            request.update_block_hashes()

            def observe(done: Step) -> dict[str, float]:
                renew(done.metrics["step"])
                return measure(done, config.grpo.clip[0])

            state.observers.append(observe)
            renew(0)
            train(run, state, 1)

    return main


main = program()
