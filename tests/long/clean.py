"""How often does the probe call a trace without a fault a mismatch? On every architecture of the matrix.

    .venv/bin/python tests/long/clean.py             # 420 traces: 44 models x fp32, bf16 (but recurrent ones) x 5
    .venv/bin/python tests/long/clean.py --seed 9 --only Gemma2 Llama

The five traces of a model differ in weights, prompts, batch size and temperature. Each model runs in a process of its
own, because vLLM patches the Python classes of some models.
"""

import argparse
import json
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
        yield {"model": name, "tied": tied, "dtype": dtype, "responses": len(trace.rollouts), "status": verdict.status,
               "sentence": verdict.sentence, "of limit": verdict.start.mean / verdict.start.limit.of_mean(),
               "ratio": verdict.sizes["engine_error"] / verdict.sizes["trainer_error"]}  # fmt: skip


def alone(name: str, tied: str, seed: str, *dtypes: str) -> list[dict]:
    """`verdicts` of each dtype, in a separate process."""
    command = [sys.executable, __file__, "--json", name, tied, seed, *dtypes]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(result.stdout.splitlines()[-1])


def report(rows: list[dict]) -> int:
    """Prints the table; returns the number of false alarms."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["dtype"], row["responses"]].append(row)
        if row["status"] != "parity":
            print("FALSE ALARM", row)
    print("engine's error / trainer's: least, median, largest; the largest share of the limit")
    for (dtype, responses), group in sorted(groups.items()):
        ratios = [row["ratio"] for row in group]
        figures = " ".join(f"{figure(ratios):.2f}" for figure in (min, median, max))
        print(f"{dtype:<8} {responses:>3} responses: {figures}; {max(row['of limit'] for row in group):.2f}"
              f" in {len(group)} traces")
    wrong = sum(row["status"] != "parity" for row in rows)
    print(f"{wrong} false alarms in {len(rows)} clean traces")
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
