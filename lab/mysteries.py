"""The runs of exercises/mystery.py, on the ladder's job: `python -m lab.mysteries`.

Writes exercises/mystery-N.csv: the columns that are needed, rounded. The runs themselves are in
runs/mysteries, which must not exist.
"""

import subprocess
import sys
from pathlib import Path

from exercises.mystery import HERE, ORDER
from lab.cells import LADDER
from records import read_rows

OPTIONS = f"--model toy {LADDER} --steps 12 --eval-every 4 --self-noise-every 1 --out".split()
COLUMNS = [
    "step", "reward", "eval_reward", "eval_reward_trainer_alone", "eval_agree", "mismatch_abs_mean",
    "current_mismatch_abs_mean", "self_noise_abs_mean", "backend_ratio_mean", "backend_clip_rate",
    "staleness_mean", "tokens", "tokens_wasted",
]  # fmt: skip

if __name__ == "__main__":
    for number, fix in enumerate(ORDER, 1):
        folder, off = f"runs/mysteries/{fix}", f"--parity.no-{fix.replace('_', '-')}"
        command = [sys.executable, "train.py", *OPTIONS, folder, *[off] * (fix != "none")]
        subprocess.run(command, check=True)
        rows = read_rows(Path(folder, "metrics.jsonl"))[1:]  # without step 0
        lines = [[f"{row[name]:.4g}" if name in row else "" for name in COLUMNS] for row in rows]
        text = "\n".join(map(",".join, [COLUMNS, *lines]))
        (HERE / f"mystery-{number}.csv").write_text(text + "\n")
