"""Does the probe find faults in mixtures of experts in bfloat16, where rounding sends tokens to other experts?

    .venv/bin/python tests/long/experts.py             # 3 models x 3 seeds, clean and with 4 faults
    .venv/bin/python tests/long/experts.py --models Mixtral --seeds 1 --faults stale

The faults are in the live engine or in its requests, except "reversed": in the trace, the tokens of one request of 64
are in reverse order. The clean traces of all architectures are those of clean.py.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import MIXTURES, move, small_model, started

from config import ParityFlags
from engine_adapter import Sampling
from lab import table
from probe.diagnose import Verdict, diagnose, sample_trace
from rl import Policy

SAMPLING = Sampling(0.7, 40)
FAULTS = {  # by name, how the verdict begins
    "clean": "parity",
    "raw": "semantics: raw log-probabilities",
    "hotter": "semantics: temperature ",  # and its fitted value
    "stale": "inference path: weights 1 update(s) old",
    "reversed": "inference path: wrong requests among right ones",
}


def requests(seed: int) -> tuple[list[list[int]], list[int]]:
    """64 prompts of 3 to 40 tokens, and the seeds of their responses."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (64,), generator=generator).tolist()
    return [torch.randint(6, 96, (length,), generator=generator).tolist() for length in lengths], list(range(64))


def verdict_on(fault: str, name: str, seed: int) -> Verdict:
    with TemporaryDirectory() as folder:
        small_model(name, False).save_pretrained(folder)
        policy = Policy.load(folder, torch.bfloat16, "cpu")
        move(policy, 0.02, seed)
        with started(folder, policy, ParityFlags(processed_logprobs=fault != "raw")) as engine:
            engine.load(policy.weights(), policy.response_logprobs)
            earlier = policy.copied_weights()
            if fault == "stale":
                move(policy, 0.02, seed + 50)
            sampling = replace(SAMPLING, temperature=0.8 if fault == "hotter" else 0.7)
            prompts, seeds = requests(seed)
            trace = replace(sample_trace(engine, prompts, sampling, seeds), sampling=SAMPLING)
    if fault == "reversed":
        trace.rollouts[5].token_ids.reverse()
    return diagnose(policy, trace, [earlier] if fault == "stale" else [])


def right(fault: str, verdict: Verdict) -> bool:
    return verdict.blamed.startswith(FAULTS[fault]) and (fault != "reversed" or verdict.requests["wrong"] == [5])


def rows(models: list[str], seeds: int, faults: list[str]) -> Iterator[list[str]]:
    for fault in faults:
        for name in models:
            verdicts = [verdict_on(fault, name, seed) for seed in range(seeds)]
            hits = sum(right(fault, each) for each in verdicts)
            for each in verdicts:
                if not right(fault, each):
                    print(f"{name}, {fault}: {each.sentence}", flush=True)
            yield [fault, name, f"{hits} of {seeds}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MIXTURES))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    arguments = parser.parse_args()
    begun = time.perf_counter()
    found = [*rows(arguments.models, arguments.seeds, arguments.faults)]
    print(table(["fault", "model", "right verdict"], found))
    print(f"{time.perf_counter() - begun:.0f} s")
    return int(any(row[2] != f"{arguments.seeds} of {arguments.seeds}" for row in found))


if __name__ == "__main__":
    sys.exit(main())
