"""Place the mismatch figures of a training log among known ones (docs/probe.md has their sources).

Names and meanings were read in TRL 1.16.0, verl (1dda039) and prime-rl (559b447).
"""

from bisect import bisect_left
from math import isfinite, log
from pathlib import Path
from statistics import fmean

from report.errors import stage
from report.files import read_json
from tasks.problem_files import read_text

# Columns of both tables, in nats: the mean |mismatch| of tokens; their mean k3, an estimate of
# KL(engine || trainer).
ABS, KL = 0, 1
# By the dtype of the less exact side: normal up to the first value, very high above the second.
# float32: 118 of 122 random models (records/classes.json) are below 1e-5, TRL's engine in bfloat16
# beside a trainer in float32 is above 1e-3. float16: SmolLM2 has 0.0012 to 0.0018
# (records/dtypes.json). bfloat16: what others call healthy, and ALARMS and prime-rl's bar. k3 in
# float32 and float16 was not measured apart: about ten squares of the mean.
LIMITS = {
    "float32": ((1e-5, 1e-3), (1e-9, 1e-6)),
    "float16": ((0.003, 0.049), (1e-4, 0.015)),
    "bfloat16": ((0.02, 0.049), (1e-3, 0.015)),
}
ROWS = {
    "parity, float32, 0.6M": (2.6e-7, 1.2e-13),
    "parity, 0.1M": (0.0054, 5.8e-5),
    "parity, 135M": (0.017, 0.0016),
    "16-bit head, 0.1M": (0.017, 4.1e-4),
    "raw log-probabilities, float32, 0.6M": (0.032, 0.0030),
    "raw log-probabilities, 0.1M": (0.11, 0.014),
    "raw log-probabilities, 135M": (0.30, 0.087),
    "stale cache, 0.1M": (0.097, 0.013),
    "stale cache, 135M": (0.033, 0.0049),
}
# Metrics of train.py, TRL, verl and prime-rl: the column, or why there is none. Means are over
# tokens, of the trainer's log-probabilities before the update and the engine's.
METRICS = {
    "current_mismatch_abs_mean": ABS,
    "current_mismatch_kl": KL,
    # Mean of each process, then of processes. TRL leaves NaN out, and logs 0 if nothing is left.
    "sampling/sampling_logp_difference/mean": ABS,
    # Of rows by default; those above 3 count as 0.
    "sampling/importance_sampling_ratio/mean": "not comparable: after TRL's mask or cap",
    "rollout_corr/k3_kl": KL,  # stale tokens too; logged with algorithm.rollout_correction
    "rollout_corr/kl": "not comparable: errors of both signs cancel",  # mean(engine - trainer)
    "training/rollout_probs_diff_mean": "not comparable: a difference of probabilities",
    "mismatch_kl/all/mean": KL,  # of the policy in the update, stale tokens too
}
NEXT = """\
next: python -m probe diagnose on a trace, which is written by train.py --probe-on-alarm, for TRL by
examples/record_trl.py, and for any engine of vLLM by examples/record_vllm.py (docs/audit.md)"""


def place(path: str, dtype: str) -> tuple[str, bool]:
    """The report, and whether all metrics with a column are normal; False without such a metric.

    Raises: ValueError if the log cannot be read or has no known name, or if a value is not finite.
    """
    rows, lines, words = rows_of(path), [], set()
    for name, column in METRICS.items():
        values = [row[name] for row in rows if name in row]
        if not all(isinstance(value, float | int) and isfinite(value) for value in values):
            raise ValueError(f"{name} must be finite in each step, {path} has another value")
        if values:
            mean, last, text = fmean(values), values[-1], column
            if column in (ABS, KL):
                word, text = placed(max(mean, last), column, dtype)
                if name.startswith("sampling/") and not any(values):
                    word, text = "nothing", "0 in each step: TRL has compared nothing"
                words.add(word)
            lines.append(f"{name}: mean {mean:.3g}, last {last:.3g}, largest {max(values):.3g};"
                         f" {text}")
    if not lines:
        raise ValueError(f"log must have one of {', '.join(METRICS)}; {path} has none")
    return "\n".join([*lines, NEXT]), words == {"normal"}


def dtype_of(log: str, given: str | None) -> str:
    """The given dtype, or that of train.py's config.json beside the log.

    Raises: ValueError if there is none.
    """
    beside, recorded = Path(log).with_name("config.json"), None
    if beside.exists():
        recorded = read_json(beside).get("config", {}).get("dtype")
    if not given and not recorded:
        raise ValueError(f"dtype must be given (no config.json of train.py is beside {log}); try"
                         " --dtype bfloat16, in which most trainers run vLLM")
    return given or recorded


def placed(value: float, column: int, dtype: str) -> tuple[str, str]:
    """normal, high or very high; this in words, with the limits and the two nearest of ROWS."""
    limits = LIMITS[dtype][column]
    word = ("normal", "high", "very high")[bisect_left(limits, value)]
    nearest = sorted(ROWS, key=lambda label: abs(log(max(value, 1e-20) / ROWS[label][column])))
    return word, f"{word} for {dtype} (limits {limits}), most like: {'; '.join(nearest[:2])}"


def rows_of(path: str) -> list[dict]:
    """Rows of JSON lines (verl: of their `data`), or of TRL's trainer_state.json."""
    with stage(f"reading {path} as JSON lines or as a trainer_state.json"):
        if path.endswith(".json"):
            return read_json(Path(path))["log_history"]
        return [row.get("data", row) for _, row in read_text(path)]
