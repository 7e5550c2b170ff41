"""How often does the probe call a trace without a fault a mismatch? On every architecture of the matrix.

    .venv/bin/python tests/long/clean.py             # 420 traces: 44 models x fp32, bf16 (but recurrent ones) x 5
    .venv/bin/python tests/long/clean.py --seed 9 --only Gemma2 Llama

The five traces of a model differ in weights, prompts, batch size and temperature. Each model runs in a process of its
own, because vLLM patches the Python classes of some models.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small threads cost more than they save

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import MATRIX, dtypes_of, move, small_model, started

from engine_adapter import Sampling
from probe.diagnose import diagnose, sample_trace
from probe.traces import Trace
from rl import Policy

BATCHES = 1, 3, 8, 24, 64  # responses of 40 tokens each
TEMPERATURES = 0.5, 0.7, 1.0, 1.5


def record(name: str, tied: bool, dtype: str, seed: int) -> Iterator[tuple[Policy, Trace]]:
    """Five traces of one model. The prompts have 3 to 40 tokens, so that a sliding window of 16 cuts them."""
    with TemporaryDirectory() as folder:
        small_model(name, tied).save_pretrained(folder)
        policy = Policy.load(folder, getattr(torch, dtype), "cpu")
        with started(folder, policy) as engine:
            for index, batch in enumerate(BATCHES):
                move(policy, 0.02, 100 * seed + index)
                engine.load(policy.weights(), policy.response_logprobs)
                generator = torch.Generator().manual_seed(100 * seed + index)
                lengths = torch.randint(3, 41, (batch,), generator=generator).tolist()
                prompts = [torch.randint(6, 96, (length,), generator=generator).tolist() for length in lengths]
                sampling = Sampling(TEMPERATURES[(seed + index + tied) % 4], 40)
                seeds = [10_000 * seed + 100 * index + row for row in range(batch)]
                yield policy, sample_trace(engine, prompts, sampling, seeds)


def verdicts(name: str, tied: bool, dtype: str, seed: int) -> Iterator[dict]:
    for policy, trace in record(name, tied, dtype, seed):
        verdict = diagnose(policy, trace)
        noise, floor = verdict.start.noise, verdict.start.floor
        yield {"model": name, "tied": tied, "dtype": dtype, "temperature": trace.sampling.temperature,
               "tokens": noise.tokens, "mismatch": noise.mean, "floor": floor.mean, "status": verdict.status,
               "sentence": verdict.sentence,
               "beyond": (noise.mean - floor.floors * floor.mean) / floor.rms * noise.tokens**0.5}  # fmt: skip


def alone(name: str, tied: str, seed: str, *dtypes: str) -> list[dict]:
    """`verdicts` of each dtype, in a separate process."""
    command = [sys.executable, __file__, "--json", name, tied, seed, *dtypes]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(result.stdout.splitlines()[-1])


def clopper_pearson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a rate: at its ends so few hits, or so many, have a probability of 2.5 %."""
    def rate(most: int, chance: float) -> float:
        """The rate at which P(at most `most` hits) = chance, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            at_most = sum(math.comb(total, k) * middle**k * (1 - middle) ** (total - k) for k in range(most + 1))
            low, high = (middle, high) if at_most > chance else (low, middle)
        return low

    return (rate(hits - 1, 0.975) if hits else 0.0), rate(hits, 0.025)


def report(rows: list[dict]) -> int:
    """Prints the table; returns the number of false alarms."""
    by_model, by_tokens = defaultdict(list), defaultdict(list)
    for row in rows:
        by_model[row["model"], row["dtype"]].append(row)
        by_tokens[row["dtype"], row["tokens"]].append(row["mismatch"] / row["floor"])
        if row["status"] != "parity":
            print("FALSE ALARM", row)
    print("mismatch / floor over all tokens of a model:")
    for key, group in sorted(by_model.items()):
        sums = [sum(row[name] * row["tokens"] for row in group) for name in ("mismatch", "floor")]
        print(f"  {' '.join(key):<20} {sums[0] / sums[1]:.2f} over {sum(row['tokens'] for row in group)} tokens")
    print("mismatch / floor of one trace: least, median, largest")
    for (dtype, tokens), ratios in sorted(by_tokens.items()):
        figures = " ".join(f"{figure(ratios):.2f}" for figure in (min, median, max))
        print(f"  {dtype:<8} {tokens:>5} tokens {figures} in {len(ratios)} traces")
    print(f"the largest is {max(row['beyond'] for row in rows):.1f} standard errors beyond the limit's floors")
    wrong, total = sum(row["status"] != "parity" for row in rows), len(rows)
    low, high = clopper_pearson(wrong, total)
    print(f"{wrong} false alarms in {total} clean traces, 95 % interval (Clopper-Pearson) {low:.2%} to {high:.2%}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.json:
        name, tied, seed, *dtypes = arguments.json
        print(json.dumps([row for dtype in dtypes for row in verdicts(name, tied == "True", dtype, int(seed))]))
        return 0
    started_at, rows = time.perf_counter(), []
    for name, tied in MATRIX:
        if not arguments.only or name in arguments.only:
            for dtype in (str(each).removeprefix("torch.") for each in dtypes_of(name)):
                rows += alone(name, str(tied), str(arguments.seed), dtype)
                print(f"{name} tied {tied} {dtype}", *(row["status"] for row in rows[-len(BATCHES) :]), flush=True)
    wrong = report(rows)
    print(f"{time.perf_counter() - started_at:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
