"""Kills runs at random moments (import, teaching, engine start, steps, checkpoint), resumes them and compares.

    .venv/bin/python tests/long/kills.py 20        # kills; about half an hour on two cores

Each run has its own cache, so that the built-in model is taught again. A resumed run must equal a run that was not
killed: metrics without seconds and memory, every evaluated answer, the final weights. Prints a line for each kill.
"""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import ROOT, outcome

OPTIONS = ("--num-prompts 16 --group-size 4 --steps 8 --eval-problems 32 --eval-every 4 --checkpoint-every 2"
           " --max-new-tokens 18 --seed 1")


def command(folder: Path, task: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "--out", str(folder / "run"), "--cache-dir", str(folder / "cache"),
            "--task", task, *OPTIONS.split()]  # fmt: skip


def finish(words: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def main(kills: int) -> int:
    rng, differing = random.Random(0), 0
    with TemporaryDirectory() as root:
        whole = {task: finish(command(Path(root, task), task)) for task in ("digits", "toy")}
        for number in range(kills):
            task, folder = "toy" if number % 5 == 0 else "digits", Path(root, str(number))
            killed, longest = False, whole[task]
            while not killed:  # again if it has finished before
                shutil.rmtree(folder, ignore_errors=True)
                longest = rng.uniform(0.0, longest)
                process = subprocess.Popen(command(folder, task), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                try:
                    process.wait(timeout=longest)
                except subprocess.TimeoutExpired:
                    process.kill()
                    killed = process.wait() != 0
            finish([*command(folder, task), "--resume"])
            same = outcome(folder / "run") == outcome(Path(root, task, "run"))
            differing += not same
            print(f"{task}, killed after {longest:.1f} s: {'the same' if same else 'DIFFERENT'}", flush=True)
    print(f"{kills} kills, {differing} resumed runs differ from the run that was not killed")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
