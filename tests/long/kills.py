"""Kills runs at random moments (import, teaching, engine start, steps, checkpoint), resumes them and compares.

    .venv/bin/python tests/long/kills.py --kills 20        # about half an hour on two cores

Each run has its own cache, so that the built-in model is taught again. A resumed run must equal a run that was not
killed: metrics without seconds and memory, every evaluated answer, the final weights. Prints a line for each kill.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
OPTIONS = {"num-prompts": 16, "group-size": 4, "steps": 8, "eval-problems": 32, "eval-every": 4, "checkpoint-every": 2,
           "max-new-tokens": 18, "seed": 1}  # fmt: skip


def command(root: Path, name: str, task: str) -> list[str]:
    program = [sys.executable, str(ROOT / "train.py"), "--out", str(root / name), "--task", task]
    return [*program, *(f"--{name}={value}" for name, value in OPTIONS.items()), f"--cache-dir={root / name}-cache"]


def outcome(out: Path) -> tuple:
    """All of a run that must not depend on its being killed."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timeless = [{name: value for name, value in row.items() if not re.search("_s$|_gib$", name)} for row in rows]
    return timeless, (out / "samples.jsonl").read_text(), (out / "policy" / "model.safetensors").read_bytes()


def finish(words: list[str]) -> float:
    started = time.monotonic()
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, differing = random.Random(options.seed), 0
    with TemporaryDirectory() as folder:
        root = Path(folder)
        whole = {task: finish(command(root, f"whole-{task}", task)) for task in ("digits", "toy")}
        for number in range(options.kills):
            task, name = "toy" if number % 5 == 0 else "digits", f"killed-{number}"
            words, longest = command(root, name, task), whole[task]
            while True:  # until it is killed before it has finished
                moment = rng.uniform(0.0, longest)
                process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                try:
                    process.communicate(timeout=moment)
                except subprocess.TimeoutExpired:
                    process.kill()
                    said, _ = process.communicate()
                    break
                longest = moment
                shutil.rmtree(root / name)
                shutil.rmtree(root / f"{name}-cache")
            last = (said.splitlines() or ["nothing"])[-1][:40]
            finish([*words, "--resume"])
            same = outcome(root / name) == outcome(root / f"whole-{task}")
            differing += not same
            print(f"{task}, killed after {moment:.1f} s ({last}): {'the same' if same else 'DIFFERENT'}", flush=True)
    print(f"{options.kills} kills, {differing} resumed runs differ from the run that was not killed")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
