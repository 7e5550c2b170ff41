"""The studies of lab/study.py: what runs, what is measured, and what each cell is compared with.

A cell is a name and options of train.py. They come after the study's workload, so they override it.
"""

from collections.abc import Callable
from itertools import combinations
from operator import itemgetter
from statistics import fmean as mean
from statistics import median
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]  # of metrics.jsonl; step 0 is the evaluation before training


# ---------------------------------------------------------------------------------- metrics
class Metric(NamedTuple):
    """A column of the table: a figure of one run, None if the run has not measured it."""

    title: str
    form: str
    measure: Callable[[Rows], Any] | None = None


first, last = itemgetter(0), itemgetter(-1)  # of the steps


def last_five(values: list[float]) -> float:
    return mean(values[-5:])


def warm(values: list[float]) -> float:
    """The median without the first two steps."""
    return median(values[2:] or values[-1:])


def column(
    title: str, form: str, field: str, reduce: Callable = mean, per: str | None = None
) -> Metric:
    """The field, or its ratio to the field `per`, of the steps that have it, as one figure."""

    def measure(rows: Rows) -> Any:
        values = [row[field] / row[per] if per else row[field] for row in rows
                  if row.get(field) is not None and (per is None or row.get(per))]
        return reduce(values) if values else None

    return Metric(title, form, measure)


def tokens_a_second(rows: Rows) -> float | None:
    seconds = sum(row.get("step_s", 0) for row in rows)
    return sum(row.get("tokens", 0) for row in rows) / seconds if seconds else None


def verdicts(rows: Rows) -> str | None:
    """The causes that the probe has named at any step. Without one, its last verdict."""
    probed = [row["probe"] for row in rows if "probe" in row]
    causes = dict.fromkeys(verdict for verdict in probed if ":" in verdict)
    return "; ".join(causes) or (probed or [None])[-1]


METRICS = {
    "reward": column("reward, last 5 steps", ".2f", "reward", last_five),
    "eval_reward": column("held out, engine", ".2f", "eval_reward", last),
    "eval_greedy": column("held out, greedily", ".2f", "eval_reward_greedy", last),
    "eval_greedy_before": column("greedily, untrained", ".2f", "eval_reward_greedy", first),
    "eval_trainer_alone": column("held out, trainer alone", ".2f", "eval_reward_trainer_alone",
                                 last),
    "eval_agree": column("engine's greedy answers that are the trainer's", ".3f", "eval_agree",
                         last),
    "entropy": column("entropy, last 5 steps", ".2f", "entropy", last_five),
    "clip_rate": column("clip rate", ".1%", "clip_rate"),
    "kl_old_new": column("KL(old, new)", ".1e", "kl_old_new"),
    "ratio_mean": column("mean ratio", ".3f", "ratio_mean"),
    "mismatch": column("mean mismatch", ".1e", "mismatch_abs_mean"),
    "mismatch_current": column("mean mismatch, current weights", ".1e",
                               "current_mismatch_abs_mean"),
    "mismatch_max": column("largest mismatch", ".1e", "mismatch_max", max),
    "self_noise": column("trainer's own noise", ".1e", "self_noise_abs_mean"),
    "mismatch_noise": column("mismatch / own noise", ".2f", "mismatch_abs_mean",
                             per="self_noise_abs_mean"),
    "backend_clip": column("the backend's clip rate", ".2%", "backend_clip_rate"),
    "backend_ratio": column("the backend's mean ratio", ".4f", "backend_ratio_mean"),
    "kept_mass": column("kept mass", ".4f", "kept_mass"),
    "outside": column("outside the trainer's mask", ".2%", "outside_frac"),
    "ess": column("ESS", ".2f", "ess"),
    "overflowed": column("overflowed updates", ".0f", "overflowed_updates", sum),
    "staleness": column("mean staleness", ".2f", "staleness_mean"),
    "wasted": column("wasted tokens", ".0f", "tokens_wasted", last),
    "tokens_s": Metric("tokens/s", ".0f", tokens_a_second),
    "probe": Metric("the probe's causes, or its last verdict", "", verdicts),
    "generate_gib": column("generate, peak GiB", ".2f", "generate_gib", max),
    "update_gib": column("update, peak GiB", ".2f", "update_gib", max),
} | {
    f"{name}_s": column(f"{name}, s", ".3f", f"{name}_s", warm)
    for name in ("generate", "old_logprobs", "update", "sync", "sleep", "load", "proof", "canary",
                 "step")
}
LEARNING = ("reward", "eval_reward", "eval_trainer_alone", "eval_agree", "entropy", "clip_rate",
            "kl_old_new", "ratio_mean")
BACKEND = ("mismatch", "mismatch_current", "mismatch_max", "self_noise", "mismatch_noise",
           "backend_clip", "backend_ratio", "kept_mass", "outside", "ess", "staleness", "wasted",
           "tokens_s", "probe")
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
    baseline: str = "transformers"  # the cell whose runs of the same seeds are subtracted


class Study(NamedTuple):
    """A list of cells with what they have in common."""

    workload: str
    cells: dict[str, Cell]
    metrics: tuple[str, ...]
    drawn: tuple[str, ...]  # the cells of the picture, if the user chooses none
    steps: int = 40
    seeds: int = 3
    jobs: int = 2  # runs at the same time; they share the CPU threads


def against(baseline: str, options: dict[str, str]) -> dict[str, Cell]:
    return {name: Cell(words, baseline) for name, words in options.items()}


# Settings under which every fault is measurable on two CPU cores. With the toy's defaults most
# faults would not appear.
LADDER = " ".join((
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
THREE = "--no-two-policy"  # the three-policy form
TIS = f"{THREE} --tis token --correct-a-broken-backend"  # the last one is idle at parity
TOP_P = "--top-p 0.9"
TRANSFORMERS = "--engine transformers --block-size None"
LORA = "--lora-rank 16 --lr 1e-2"  # adapters need a larger step
RUNGS = {"v1-defaults": V1, "+processed": f"{RUNTIME} {PAUSE} {HEAD}",
         "+runtime": f"{PAUSE} {HEAD}", "+inflight": HEAD, "parity": ""}
ALONE = {"processed": RAW, "runtime": RUNTIME, "inflight": PAUSE, "fp32-head": HEAD}
FAULTS = {f"parity-minus-{name}": words for name, words in ALONE.items()}
PAIRS = {f"parity-minus-{one}-{other}": f"{ALONE[one]} {ALONE[other]}"
         for one, other in combinations(ALONE, 2)}
SETS = PAIRS | FAULTS | {"v1-defaults": V1}
LADDER_CELLS = (
    against("transformers", {"transformers": TRANSFORMERS} | RUNGS)
    | against("parity", PAIRS | FAULTS | {
        "parity-recompute": f"{PAUSE} --variants recompute",
        "parity-16-bit-heads": f"{HEAD} --variants both-heads",
    } | {
        f"parity-minus-{part}": f"{RUNTIME} --variants {part}"
        for part in ("prefix-cache", "async-scheduling")
    })
    | against("parity+three", {"parity+three": THREE, "parity+tis": TIS} | {
        f"{name}+three": f"{words} {THREE}" for name, words in SETS.items()
    } | {
        f"{name}+tis": f"{words} {TIS}" for name, words in SETS.items()
    })
    | against("top-p-transformers", {
        "top-p-transformers": f"{TRANSFORMERS} {TOP_P}", "top-p": TOP_P,
        "top-p-minus-mask": f"{TOP_P} --parity.no-sampling-mask",
    })
    | against("top-p+three", {
        "top-p+three": f"{TOP_P} {THREE}",
        "top-p-minus-mask+three": f"{TOP_P} {THREE} --parity.no-sampling-mask",
    })
    | against("lora", {"lora": LORA, "lora-added": f"{LORA} --lora-forward added"})
)  # fmt: skip

# SmolLM2; `make real` runs parity+three. All prompts begin with the same KV block.
SMOLLM2 = ".cache/smollm2-135m-instruct-4bit"  # of examples/smollm2.py
REAL = (f"--model {SMOLLM2} --task examples/arithmetic.py"
        " --reward-limit-s 60 --dtype bfloat16 --num-prompts 8 --inflight-groups 4"
        " --max-num-seqs 64 --max-new-tokens 16 --lr 2e-5 --block-size 32 --two-policy"
        " --eval-every 20 --eval-problems 44 --eval-samples 4 --eval-trainer-alone"
        " --checkpoint-every 1000000")
REAL_ARMS = {"parity": ""} | FAULTS | {"v1-defaults": V1}
REAL_CELLS = (
    against("parity", REAL_ARMS)
    | against("parity+three", {
        f"{name}+three": f"{words} {THREE}" for name, words in REAL_ARMS.items()
    } | {"float16+three": f"{THREE} --dtype float16"})
)  # fmt: skip

STUDIES = {
    "ladder": Study(LADDER, LADDER_CELLS, LEARNING + BACKEND,
                    ("transformers", "v1-defaults", "parity")),
    "real": Study(
        REAL, REAL_CELLS, ("eval_greedy_before", "eval_greedy", *LEARNING, *BACKEND, "overflowed"),
        ("parity", "parity-minus-processed", "parity-minus-runtime", "v1-defaults"), steps=20,
        jobs=1),
    # --train-args: a user's model and task, on the defaults of train.py.
    "own": Study("", against("parity", REAL_ARMS),
                 ("mismatch_current", "backend_clip", "eval_agree", "reward"), tuple(REAL_ARMS),
                 steps=60, seeds=1, jobs=1),
}  # fmt: skip
