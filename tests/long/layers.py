"""Does `probe layers` name the layer and the half of a planted fault, and accuse no model without one?

    .venv/bin/python tests/long/layers.py              # 210 faults, 400 clean runs
    .venv/bin/python tests/long/layers.py --seeds 1 --clean 1 --only Llama

The faults are in the live vLLM: in its modules, or in the weights that it is given (`layer_fault` in helpers.py). A
fault counts as found if its layer is the first that is named, and no other layer is named that has no fault.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import (
    LAYER_FAULTS,
    LAYER_SAMPLING,
    SHAPES,
    layer_fault,
    layer_of,
    layer_requests,
    layered_model,
    move,
    named_layers,
    started,
)

from lab import table
from probe.layers import compare_layers
from rl import Policy

OUTCOMES = "layer and half right", "layer right, half wrong", "confidently wrong", "missed"


def outcome(fault: str, named: dict[int, list[str]], layer: int, halves: list[str]) -> str:
    """One of OUTCOMES. Wrong positions are a fault of every layer."""
    if not named:
        return "missed"
    if next(iter(named)) != layer or (len(named) > 1 and not fault.startswith("positions")):
        return "confidently wrong"
    return "layer and half right" if named[layer] == halves else "layer right, half wrong"


def trials(name: str, dtype: torch.dtype, seeds: int, clean: int) -> Iterator[tuple[str, str, list[dict], str]]:
    """Fault ("clean" without one), outcome, and what `compare_layers` returned."""
    with TemporaryDirectory() as folder:
        layered_model(name).save_pretrained(folder)
        policy = Policy.load(folder, dtype, "cpu")
        with started(folder, policy) as engine:
            for seed in range(clean):
                move(policy, 0.02, seed)
                engine.load(policy.weights(), policy.response_logprobs)
                rows, sentence = compare_layers(policy, engine, *layer_requests(seed), LAYER_SAMPLING)
                yield "clean", "accused" if named_layers(rows) else "not accused", rows, sentence
            for fault in (fault for fault, names in LAYER_FAULTS.items() if name in names):
                for seed in range(seeds):
                    move(policy, 0.02, 1000 + seed)
                    with layer_fault(fault, name, engine, policy, layer_of(fault, name, seed), seed) as expected:
                        rows, sentence = compare_layers(policy, engine, *layer_requests(1000 + seed), LAYER_SAMPLING)
                    yield fault, outcome(fault, named_layers(rows), *expected), rows, sentence


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate. Source: Wilson, 1927."""
    rate, width = hits / total, z * z / total
    middle, half = rate + width / 2, z * ((rate * (1 - rate) + width / 4) / total) ** 0.5
    return max(0.0, (middle - half) / (1 + width)), (middle + half) / (1 + width)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clean", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    begun, counts = time.perf_counter(), defaultdict(Counter)
    for name in arguments.only:
        for dtype in (torch.float32, torch.bfloat16):
            nearest = 0.0
            for fault, what, rows, sentence in trials(name, dtype, arguments.seeds, arguments.clean):
                counts[fault, str(dtype).removeprefix("torch.")][what] += 1
                if fault == "clean":
                    nearest = max([nearest, *(row["floors"] for row in rows)])
                if what not in ("not accused", OUTCOMES[0]):
                    print(f"{name} {dtype} {fault}: {what}: {sentence}", flush=True)
            print(f"{name} {dtype}: the highest part of a clean run has {nearest:.2f} floors", flush=True)
    clean = {dtype: row for (fault, dtype), row in counts.items() if fault == "clean"}
    planted = {key: row for key, row in sorted(counts.items()) if key[0] != "clean"}
    print(table(["fault", "dtype", "trials", *OUTCOMES],
                [[*key, str(row.total()), *(str(row[each]) for each in OUTCOMES)] for key, row in planted.items()]))
    for dtype, row in clean.items():
        low, high = wilson(row["accused"], row.total())
        print(f"{dtype}: {row['accused']} of {row.total()} clean runs accused,"
              f" 95 % interval (Wilson) {low:.2%} to {high:.2%}")
    print(f"{time.perf_counter() - begun:.0f} s")
    return int(any(row["accused"] or row["confidently wrong"] for row in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
