"""The studies of lab/study.py: what runs, what is measured, and what each cell is compared with.

A cell is a name and options of train.py. They come after the study's workload, so they override it.
"""

from collections.abc import Callable
from operator import itemgetter
from statistics import fmean as mean
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]  # of metrics.jsonl; step 0 is the evaluation before training


# ---------------------------------------------------------------------------------- metrics
first, last = itemgetter(0), itemgetter(-1)  # of the steps


def last_five(values: list[float]) -> float:
    return mean(values[-5:])


def causes(verdicts: list[str]) -> str:
    """Each cause that the probe named at any step; if it named none, its last verdict."""
    found = [cause for verdict in verdicts for cause in verdict.split("; and ") if ":" in cause]
    return "; ".join(dict.fromkeys(found)) or verdicts[-1]


class Metric(NamedTuple):
    """A column of the table: a field of the steps that have it, as one figure of a run."""

    title: str
    form: str
    field: str
    reduce: Callable[[list], Any] = mean

    def measure(self, rows: Rows) -> Any:
        """None if no step has it."""
        values = [row[self.field] for row in rows if row.get(self.field) is not None]
        return self.reduce(values) if values else None


METRICS = {
    "reward": Metric("reward, last 5 steps", ".2f", "reward", last_five),
    "eval_reward": Metric("held out, engine", ".2f", "eval_reward", last),
    "eval_greedy_before": Metric("greedily, untrained", ".2f", "eval_reward_greedy", first),
    "eval_greedy": Metric("held out, greedily", ".2f", "eval_reward_greedy", last),
    "eval_trainer_alone": Metric("held out, trainer alone", ".2f", "eval_reward_trainer_alone",
                                 last),
    "eval_agree": Metric("engine's greedy answers that are the trainer's", ".3f", "eval_agree",
                         last),
    "entropy": Metric("entropy, last 5 steps", ".2f", "entropy", last_five),
    "clip_rate": Metric("clip rate", ".1%", "clip_rate"),
    "kl_old_new": Metric("KL(old, new)", ".1e", "kl_old_new"),
    "ratio_mean": Metric("mean ratio", ".3f", "ratio_mean"),
    "mismatch": Metric("mean mismatch", ".1e", "mismatch_abs_mean"),
    "mismatch_current": Metric("mean mismatch, current weights", ".1e",
                               "current_mismatch_abs_mean"),
    "mismatch_max": Metric("largest mismatch", ".1e", "mismatch_max", max),
    "backend_clip": Metric("the backend's clip rate", ".2%", "backend_clip_rate"),
    "backend_ratio": Metric("the backend's mean ratio", ".4f", "backend_ratio_mean"),
    "kept_mass": Metric("kept mass", ".4f", "kept_mass"),
    "outside": Metric("outside the trainer's mask", ".2%", "outside_frac"),
    "ess": Metric("ESS", ".2f", "ess"),
    "staleness": Metric("mean staleness", ".2f", "staleness_mean"),
    "wasted": Metric("wasted tokens", ".0f", "tokens_wasted", last),
    "probe": Metric("the probe's causes, or its last verdict", "", "probe", causes),
}
SHOWN = "mismatch_current", "backend_clip", "eval_agree", "reward"  # after a run
PANELS = {  # of the picture, by field
    "reward": "reward", "entropy": "entropy, nats", "clip_rate": "clip rate",
    "kl_old_new": "KL(old, new), nats (log)",
    "current_mismatch_abs_mean": "mismatch, current weights, nats (log)",
    "eval_reward_trainer_alone": "held-out reward, trainer alone",
}  # fmt: skip


# ---------------------------------------------------------------------------------- cells
class Cell(NamedTuple):
    """One point of a study. Its runs differ in the seed."""

    options: str  # of train.py
    baseline: str  # the cell whose runs of the same seeds are subtracted


def against(baseline: str, options: dict[str, str]) -> dict[str, Cell]:
    return {name: Cell(words, baseline) for name, words in options.items()}


# Settings under which every fault is measurable on two CPU cores. With the toy's defaults most
# faults would not appear.
LADDER = " ".join((
    "--steps 40",
    "--task digits",  # 64 problems, the same in all steps; their prompts fill a KV block
    "--block-size 32",  # the smallest on a CPU; no prompt fills vLLM's default block of 128
    "--temperature 0.7",  # at 1, raw and processed log-probabilities are equal
    "--dtype bfloat16",  # in float32, the head is fp32 with and without the fix
    "--num-prompts 48 --group-size 4",
    "--inflight-groups 16",  # additional groups, unfinished while the weights change
    "--max-num-seqs 128",  # half of the rollouts: the last groups have just started when 48 end
    "--max-new-tokens 18",  # an answer has up to 16 digits and the end-of-sequence token
    "--two-policy",  # two policies, as in the original report: the ratio has the mismatch
    "--lr 2e-3",  # high, so that 40 steps are enough
    "--eval-every 10 --eval-problems 256 --eval-trainer-alone",  # all held-out problems
    "--checkpoint-every 1000000",  # one checkpoint, after the last step
))  # fmt: skip
RAW = "--parity.no-processed-logprobs"
RUNTIME = "--parity.no-uncached-runtime"
PAUSE = "--parity.no-inflight-keep"
HEAD = "--parity.no-fp32-head"
V1 = f"{RAW} {RUNTIME} {PAUSE} {HEAD}"
TOP_P = "--top-p 0.9"
FAULTS = {"parity-minus-processed": RAW, "parity-minus-runtime": RUNTIME,
          "parity-minus-inflight": PAUSE, "parity-minus-fp32-head": HEAD}
MORE_FAULTS = {
    "parity-minus-processed-runtime": f"{RAW} {RUNTIME}",
    "parity-minus-prefix-cache": f"{RUNTIME} --variants prefix-cache",
    "parity-minus-async-scheduling": f"{RUNTIME} --variants async-scheduling",
}

STUDIES = {  # the workload, and the cells
    "ladder": (LADDER, against("transformers", {
        "transformers": "--engine transformers --block-size None", "v1-defaults": V1, "parity": "",
    }) | against("parity", FAULTS | MORE_FAULTS) | against("top-p", {
        "top-p": TOP_P, "top-p-minus-mask": f"{TOP_P} --parity.no-sampling-mask",
    })),
    # --train-args: a user's model and task, on the defaults of train.py.
    "own": ("", against("parity", {"parity": ""} | FAULTS | {"v1-defaults": V1})),
}  # fmt: skip
