"""The probe against faults planted in the real engine, and against clean traces: the table of docs/probe.md.

    .venv/bin/python tests/long/planted.py            # all of it: singles, pairs, clean; fp32 and bf16; three seeds
    .venv/bin/python tests/long/planted.py --seeds 1 --only raw stale raw+stale

The faults are in the live engine: weights are not loaded, caches are kept, flags are off, sampling parameters and KV
blocks are changed, outputs are read wrongly, responses are given to other prompts.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small threads cost more than they save

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import EXPECTED, FaultBench, plant, rightly_named

from probe.diagnose import diagnose

PAIRS = [f"{a}+{b}" for a, b in product(("raw", "top-1"), ("stale", "prefix", "kept", "one request", "head"))]
PAIRS += ["head+stale", "head+prefix", "raw+moved on"]
ONLY_BF16 = {"head", "head in trainer", "head on both sides"}


def trials(arguments) -> list[tuple[str, bool, torch.dtype, int]]:
    names = arguments.only or [*EXPECTED, *PAIRS]
    wanted = []
    for name, dtype, seed in product(names, arguments.dtypes, range(arguments.seeds)):
        faults = set(name.split("+"))
        if not (dtype == "float32" and faults & ONLY_BF16):
            wanted.append((name, bool(seed % 2), getattr(torch, dtype), seed))
    # trials with the same engine follow each other
    return sorted(wanted, key=lambda t: (str(t[2]), t[1], "raw" in t[0], "prefix" in t[0] or "async" in t[0],
                                         "head" in t[0], t[0], t[3]))


def clean_trials():
    """Trials without a fault: tied and untied, batches of 1 to 128, temperatures 0.5 to 1.5."""
    for dtype, tied in product((torch.float32, torch.bfloat16), (False, True)):
        for index, (batch, temperature) in enumerate(product((1, 2, 8, 33, 128), (0.5, 0.7, 1.0, 1.5))):
            yield dtype, tied, batch, temperature, index % 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--json")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    bench, rows, table = FaultBench(), [], defaultdict(list)
    started = time.perf_counter()
    for name, tied, dtype, seed in trials(arguments):
        faults = name.split("+")
        trace, policy, earlier, version, trainer = plant(bench, set(faults), tied, dtype, seed)
        verdict = diagnose(policy, trace, earlier, version, trainer)
        layer, cause = rightly_named(faults, verdict)
        table[name, str(dtype)].append((layer, cause))
        rows.append({"fault": name, "dtype": str(dtype), "seed": seed, "layer": layer, "cause": cause,
                     "sentence": verdict.sentence, "status": verdict.status})
        if arguments.verbose or not cause:
            print(f"{'ok ' if cause else 'BAD'} {name} {dtype} {seed}: {verdict.sentence[:700]}", flush=True)
    alarms = 0
    if not arguments.only:
        clean = list(clean_trials())
        for dtype, tied, batch, temperature, seed in clean:
            given = plant(bench, set(), tied, dtype, seed, batch, temperature)
            verdict = diagnose(given[1], given[0], given[2], given[3])
            if verdict.status != "parity":
                alarms += 1
                print(f"FALSE ALARM {dtype} tied {tied} batch {batch} T {temperature}: {verdict.sentence}", flush=True)
        print(f"clean traces: {alarms} false alarms in {len(clean)}")
    bench.close()
    print(f"{'fault':<30} {'dtype':<9} {'layer':>6} {'cause':>6}")
    for (name, dtype), outcomes in sorted(table.items()):
        print(f"{name:<30} {dtype.removeprefix('torch.'):<9} {sum(o[0] for o in outcomes):>3}/{len(outcomes)}"
              f" {sum(o[1] for o in outcomes):>4}/{len(outcomes)}")
    total = [o for outcomes in table.values() for o in outcomes]
    layers, causes = (sum(o[part] for o in total) for part in (0, 1))
    seconds = time.perf_counter() - started
    print(f"right layer {layers}/{len(total)}, right cause {causes}/{len(total)}, {seconds:.0f} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    return int(alarms > 0 or not all(o[0] for o in total))


if __name__ == "__main__":
    sys.exit(main())
