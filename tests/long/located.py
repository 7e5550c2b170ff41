"""What each part adds to the mismatch of seven architectures.

`python tests/long/located.py [NAME ...]` prints the table of docs/exact.md.

Each row is `python -m probe locate` with three random models (seeds of the weights 0 to 2), one process per row.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean as mean

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import ALWAYS_TIED, ROOT, small_model

from examples.toys import toy_model
from lab import table
from probe.__main__ import WORKLOAD_SAMPLING, Workload, load_policy
from probe.locate import locate

NAMES = ("toy", "Llama", "Qwen2", "Gemma2", "GPT2", "Phi3", "Mistral")
SHORT = dict(prompt_tokens=(4, 24), sampling=replace(WORKLOAD_SAMPLING, max_new_tokens=32))  # the toy's context: 64
TITLES = ("model", "dtype", "ordinary engine", "shared engine", "and vLLM's kernel", "and few rows padded", "code",
          "attention", "batching", "tokens that differ", "remaining")  # fmt: skip


def folder_of(name: str, seed: int, root: str) -> str:
    if name == "toy":
        return str(toy_model(str(ROOT / ".cache"), seed))
    folder = f"{root}/{name}-{seed}"
    small_model(name, name in ALWAYS_TIED, seed).save_pretrained(folder)
    return folder


def row_of(name: str, dtype: str) -> list[str]:
    """Means over the seeds, and of the shares the smallest and the largest."""
    with tempfile.TemporaryDirectory() as root:
        found = [measure(name, dtype, seed, root) for seed in range(3)]
    means = [[step.mean().item() for step in steps.values()] for steps, _ in found]
    parts = [[100 * (before - after) / run[0] for before, after in pairwise(accumulate(run, min))] for run in means]
    means, parts = zip(*means, strict=True), zip(*parts, strict=True)  # by step, over the seeds
    differing = mean((steps.popitem()[1] > 0).double().mean().item() for steps, _ in found)
    exact = dict.fromkeys(sentence.partition("; remaining ")[2] for _, sentence in found)
    return [name, dtype, *(f"{mean(column):.1e}" if any(column) else "0" for column in means),
            *(f"{min(column):.1f} to {max(column):.1f} %" for column in parts),
            f"{differing:.2%}" if differing else "0", "; ".join(exact)]


def measure(name: str, dtype: str, seed: int, root: str) -> tuple[dict[str, Tensor], str]:
    """The command, without its output."""
    folder, short = folder_of(name, seed, root), SHORT if name == "toy" else {}
    work, policy = Workload(model=folder, **short), load_policy(folder, dtype, True)
    requests, longest = work.requests(policy.head.weight.shape[0]), work.prompt_tokens[1] + work.sampling.max_new_tokens
    return locate(policy, folder, work.parity, *requests, work.sampling, max_model_len=longest)


if __name__ == "__main__":
    rows = []
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(row_of(*sys.argv[2:])))
    else:
        for name in sys.argv[1:] or NAMES:
            for dtype in ("float32", "bfloat16"):
                command = [sys.executable, __file__, "--one", name, dtype]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], file=sys.stderr, flush=True)
        print(table(TITLES, rows))
