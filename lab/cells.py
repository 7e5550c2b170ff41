"""The studies of lab/study.py: what runs, what is measured, and what each cell is compared with.

A cell is a name and options of train.py. They come after the study's workload, so they override it.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any, NamedTuple

from config import VARIANTS

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, Any]]  # of metrics.jsonl, from step 1 on


# ---------------------------------------------------------------------------------- metrics
class Metric(NamedTuple):
    """A column of the table: a figure of one run, None if the run has not measured it."""

    title: str
    form: str
    measure: Callable[[Rows], Any]


def over(field: str, reduce: Callable = mean, steps: slice = slice(None)) -> Callable:
    """The field, reduced over those of its values that `steps` selects."""

    def measure(rows: Rows) -> Any:
        values = [row[field] for row in rows if row.get(field) is not None][steps]
        return reduce(values) if values else None

    return measure


def per(field: str, other: str, reduce: Callable = median, steps: slice = slice(2, None)):
    """The ratio of two fields of one step. Without the first two steps, which warm up."""

    def measure(rows: Rows) -> Any:
        pairs = [(row.get(field), row.get(other)) for row in rows[steps]]
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return reduce(ratios) if ratios else None

    return measure


def tokens_a_second(rows: Rows) -> float:
    return sum(row["tokens"] for row in rows) / sum(row["step_s"] for row in rows)


def freed_by_sleep(rows: Rows) -> float:
    return median(row["generate_gib"] - row["sleep_gib"] for row in rows)


LAST5, LAST, WARM = slice(-5, None), slice(-1, None), slice(2, None)
SECONDS = ("generate", "old_logprobs", "update", "sync", "sleep", "load", "canary", "step")
METRICS = {
    "reward": Metric("reward, last 5 steps", ".2f", over("reward", steps=LAST5)),
    "eval_reward": Metric("held out, engine", ".2f", over("eval_reward", steps=LAST)),
    "eval_greedy": Metric("held out, greedily", ".2f", over("eval_reward_greedy", steps=LAST)),
    "eval_greedy_before": Metric("greedily, untrained", ".2f", over("eval_reward_greedy_before")),
    "eval_trainer_alone": Metric("held out, trainer alone", ".2f",
                                 over("eval_reward_trainer_alone", steps=LAST)),
    "eval_agree": Metric("engine's greedy answers that are the trainer's", ".3f",
                         over("eval_agree", steps=LAST)),
    "entropy": Metric("entropy, last 5 steps", ".2f", over("entropy", steps=LAST5)),
    "clip_rate": Metric("clip rate", ".1%", over("clip_rate")),
    "kl_old_new": Metric("KL(old, new)", ".1e", over("kl_old_new")),
    "ratio_mean": Metric("mean ratio", ".3f", over("ratio_mean")),
    "mismatch": Metric("mean mismatch", ".1e", over("mismatch_abs_mean")),
    "mismatch_current": Metric("mean mismatch, current weights", ".1e",
                               over("current_mismatch_abs_mean")),
    "mismatch_max": Metric("largest mismatch", ".1e", over("mismatch_max", max)),
    "mismatch_kl": Metric("mismatch, KL (k3)", ".1e", over("mismatch_kl")),
    "self_noise": Metric("trainer's own noise", ".1e", over("self_noise_abs_mean")),
    "mismatch_noise": Metric("mismatch / own noise", ".2f",
                             per("mismatch_abs_mean", "self_noise_abs_mean", mean, slice(None))),
    "backend_clip": Metric("the backend's clip rate", ".2%", over("backend_clip_rate")),
    "backend_ratio": Metric("the backend's mean ratio", ".4f", over("backend_ratio_mean")),
    "kept_mass": Metric("kept mass", ".4f", over("kept_mass")),
    "outside": Metric("outside the trainer's mask", ".2%", over("outside_frac")),
    "ess": Metric("ESS", ".2f", over("ess")),
    "weights_ess": Metric("ESS of the weights", ".2f", over("weights_ess")),
    "rejected": Metric("rejected tokens", ".1%", over("rejected_frac")),
    "updates": Metric("optimizer steps", ".0f", over("updates", sum)),
    "overflowed": Metric("overflowed updates", ".0f", over("overflowed_updates", sum)),
    "staleness": Metric("mean staleness", ".2f", over("staleness_mean")),
    "staleness_max": Metric("largest staleness", ".0f", over("staleness_max", max)),
    "wasted": Metric("wasted tokens", ".0f", over("tokens_wasted", steps=LAST)),
    "tokens_s": Metric("tokens/s", ".0f", tokens_a_second),
    "probe_first": Metric("the probe, first", "", over("probe", steps=slice(1), reduce="".join)),
    "probe": Metric("the probe, last", "", over("probe", steps=LAST, reduce="".join)),
    "freed": Metric("memory freed by sleep, GiB", ".2f", freed_by_sleep),
} | {
    f"{name}_s": Metric(f"{name}, s", ".3f", over(f"{name}_s", median, WARM)) for name in SECONDS
} | {
    f"{name}_bare": Metric(f"{name} / bare work", ".2f", per(f"{name}_s", f"bare_{name}_s"))
    for name in ("generate", "old_logprobs", "update", "step")
} | {
    f"{name}_gib": Metric(f"{name}, peak GiB", ".2f", over(f"{name}_gib", max))
    for name in ("generate", "update")
} | {"update_formula": Metric("update, peak / formula", ".2f", per("update_gib", "formula_gib"))}
LEARNING = ("reward", "eval_reward", "eval_trainer_alone", "eval_agree", "entropy", "clip_rate",
            "kl_old_new", "ratio_mean")
BACKEND = ("mismatch", "mismatch_current", "mismatch_max", "mismatch_kl", "self_noise",
           "mismatch_noise", "backend_clip", "backend_ratio", "kept_mass", "outside", "ess",
           "staleness", "staleness_max", "wasted", "tokens_s", "probe_first", "probe")
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
    reference: str = "reference"  # the cell whose runs of the same seeds are subtracted
    program: str = "train"  # a module whose `main` takes the options: this, or lab.bench
    model: str | None = None  # of lab.models.MODELS: written for each seed before the runs


class Study(NamedTuple):
    """A list of cells with what they have in common."""

    workload: str
    cells: dict[str, Cell]
    metrics: tuple[str, ...]
    drawn: tuple[str, ...] = ()  # the cells of the picture
    steps: int = 40
    seeds: int = 3
    jobs: int = 2  # runs at the same time; they share the CPU threads


def against(reference: str, options: dict[str, str], program: str = "train") -> dict[str, Cell]:
    return {name: Cell(words, reference, program) for name, words in options.items()}


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
    "--old-policy rollout",  # two policies, as in the original report: the ratio has the mismatch
    "--lr 2e-3",  # high, so that 40 steps are enough
    "--eval-every 10 --eval-problems 256 --eval-trainer-alone",  # all held-out problems
    "--checkpoint-every 1000000",  # one checkpoint, after the last step
))  # fmt: skip
RAW = "--parity.no-processed-logprobs"
RUNTIME = "--parity.no-uncached-runtime"
PAUSE = "--parity.no-inflight-keep"
HEAD = "--parity.no-fp32-head"
V1 = f"{RAW} {RUNTIME} {PAUSE} {HEAD}"
THREE = "--old-policy recompute"  # the three-policy form
TIS = f"{THREE} --tis token --correct-a-broken-backend"  # the last one is idle at parity
TOP_P = "--top-p 0.9"
EXACT = "--engine shared --exact"
REFERENCE = "--engine transformers --block-size None"
LORA = "--lora-rank 16 --lr 1e-2"  # adapters need a larger step
RUNGS = {"v1-defaults": V1, "+processed": f"{RUNTIME} {PAUSE} {HEAD}",
         "+runtime": f"{PAUSE} {HEAD}", "+inflight": HEAD, "parity": ""}
ALONE = {"processed": RAW, "runtime": RUNTIME, "inflight": PAUSE, "fp32-head": HEAD}
PAIRS = {f"parity-minus-{one}-{other}": f"{ALONE[one]} {ALONE[other]}"
         for one, other in combinations(ALONE, 2)}
FAULTS = {f"parity-minus-{name}": words for name, words in ALONE.items()} | {"v1-defaults": V1}
SETS = PAIRS | FAULTS
LADDER_CELLS = (
    against("reference", {"reference": REFERENCE} | RUNGS)
    | against("reference", {"shared": "--engine shared", "exact": EXACT})
    | against("parity", {name: words for name, words in SETS.items() if name not in RUNGS})
    | against("parity", {
        "parity-recompute": f"{PAUSE} --parity.variants recompute",
        "parity-16-bit-heads": f"{HEAD} --parity.variants both-heads",
    })
    | against("parity", {f"parity-minus-{part}": f"{RUNTIME} --parity.variants {part}"
                         for part, fix in VARIANTS.items() if fix == "uncached_runtime"})
    | against("parity+three", {"parity+three": THREE, "parity+tis": TIS})
    | against("parity+three", {f"{name}+three": f"{words} {THREE}"
                               for name, words in SETS.items()})
    | against("parity+three", {f"{name}+tis": f"{words} {TIS}" for name, words in SETS.items()})
    | against("exact+three", {"exact+three": f"{EXACT} {THREE}", "exact+tis": f"{EXACT} {TIS}"})
    | against("top-p-reference", {
        "top-p-reference": f"{REFERENCE} {TOP_P}", "top-p": TOP_P,
        "top-p-minus-mask": f"{TOP_P} --parity.no-sampling-mask",
    })
    | against("top-p+three", {
        "top-p+three": f"{TOP_P} {THREE}",
        "top-p-minus-mask+three": f"{TOP_P} {THREE} --parity.no-sampling-mask",
    })
    | against("lora", {"lora": LORA, "lora-added": f"{LORA} --lora-forward added"})
)  # fmt: skip

# Today's engine. The record also has V0 0.8.5 and V1 0.18.1; the commit that docs/findings.md names
# has the programs that drive them in environments of their own.
MIGRATION_CELLS = against("reference", {"reference": REFERENCE, "v1-defaults": V1, "parity": ""})

# Backends by corrections, with three policies and without groups in flight.
CORRECTIONS = {
    "none": "", "tis-token": "--tis token", "tis-sequence": "--tis sequence",
    "icepop": "--tis token --tis-cap 5 --reject token --reject-high 5",
    "mis": "--tis sequence --reject sequence", "geometric": "--reject geometric",
    "tis-geometric": "--tis token --reject geometric", "worst": "--reject worst",
    "trm": "--reject trm", "binary-tv": "--reject binary_tv",
}  # fmt: skip
UNFINISHED = "--inflight-groups 16"  # else no load meets an unfinished request
BACKENDS = {
    "parity-fp32": "--dtype float32", "parity-bf16": "", "parity-fp16": "--dtype float16",
    "exact": EXACT, "v1-defaults": f"{V1} {UNFINISHED}", "minus-processed": RAW,
    "minus-runtime": RUNTIME, "minus-inflight": f"{PAUSE} {UNFINISHED}", "minus-fp32-head": HEAD,
}  # fmt: skip
# Answers of 64 tokens and more: the ratio of a response is the product of as many.
LONG = (f"--task {ROOT / 'examples' / 'long_digits.py'} --max-new-tokens 84 --num-prompts 8"
        " --group-size 8 --reward-limit-s 60 --eval-samples 8 --steps 20")
# Prompts and group size with stale groups: nine batches of prompts must be different problems.
WORKLOADS = {"ladder": ("", (7, 28), None), "long": (LONG, (8, 8), "long-digits")}


def stale(batches: int, prompts: int, size: int) -> str:
    """So many batches of groups in flight: a group is used about so many updates late."""
    waiting = batches * prompts
    return (f"--num-prompts {prompts} --group-size {size} --inflight-groups {waiting}"
            f" --max-staleness {100 if waiting else 8} --max-num-seqs {(prompts + waiting) * size}")


def corrections_cells() -> dict[str, Cell]:
    cells = {}
    for workload, (words, shape, model) in WORKLOADS.items():
        for kind, backends in (
            ("reference", BACKENDS),
            ("reference-stale", {f"stale-{count}": stale(count, *shape) for count in (1, 4, 8)}),
        ):
            reference = f"{workload}.{kind}.none"
            own_shape = stale(0, *shape) if kind == "reference-stale" else ""
            cells[reference] = Cell(f"{words} {own_shape} {REFERENCE}", reference, model=model)
            for backend, options in backends.items():
                for name, correction in CORRECTIONS.items():
                    allowed = "--correct-a-broken-backend" if correction else ""
                    cells[f"{workload}.{backend}.{name}"] = Cell(
                        f"{words} {options} {correction} {allowed}", reference, model=model)
    return cells


# SmolLM2: all prompts begin with the same KV block.
REAL = ("--model .cache/smollm2-135m-instruct-4bit --task examples/arithmetic.py"
        " --reward-limit-s 60 --dtype bfloat16 --num-prompts 8 --inflight-groups 4"
        " --max-num-seqs 64 --max-new-tokens 16 --lr 2e-5 --block-size 32 --old-policy rollout"
        " --eval-every 20 --eval-problems 44 --eval-samples 4 --eval-trainer-alone"
        " --checkpoint-every 1000000")
REAL_ARMS = {"parity": ""} | FAULTS
REAL_CELLS = (
    against("parity", REAL_ARMS)
    | against("parity+three", {f"{name}+three": f"{words} {THREE}"  # parity's is `make real`
                               for name, words in REAL_ARMS.items()})
    | against("parity+three", {f"{dtype}+three": f"{THREE} --dtype {dtype}"
                               for dtype in ("float32", "float16")})
)  # fmt: skip

# The learning rate is too small to change the policy: all steps sample from one.
BENCH = "--lr 1e-12 --eval-every 1000000 --checkpoint-every 1000000"
BENCH_CELLS = against("vllm", {
    "vllm": "", "shared": "--engine shared", "exact": EXACT,
}, "lab.bench")  # fmt: skip

# The first hour on a GPU: random weights of real shapes, 128 tokens of prompt, 512 of response.
GPU = (f"{BENCH} --task {ROOT / 'lab' / 'random_rewards.py'} --dtype bfloat16 --num-prompts 128"
       " --group-size 8 --max-new-tokens 512 --micro-batch-tokens 16384 --kv-cache-gib 16"
       " --eval-problems 8 --self-noise-every 1")
SMALL = "--num-prompts 32"
GPU_CELLS = {
    name: Cell(words, "parity", "lab.bench", "qwen2.5-0.5b") for name, words in {
        "parity": "", "minus-fp32-head": f"{HEAD} {SMALL}", "float16": f"--dtype float16 {SMALL}",
        "cuda-graphs": "--cuda-graphs", "v1-defaults": V1,
        "24gb": f"{SMALL} --micro-batch-tokens 4096 --kv-cache-gib 4 --self-noise-every 0",
    }.items()
} | {
    "1.5b": Cell(f"{SMALL} --max-new-tokens 1024 --micro-batch-tokens 8192 --self-noise-every 0",
                 "1.5b", "lab.bench", "qwen2.5-1.5b"),
    # The default job in float32: it learns, as on a CPU.
    "learns": Cell("--model toy --task toy --dtype float32 --max-new-tokens 8 --lr 1e-3 --steps 60"
                   " --kv-cache-gib 0.25 --eval-every 20 --eval-problems 256", "learns"),
} | {
    # Predicted: sleep clears the cache of V1's defaults; kept requests keep it, and it is stale.
    f"ladder-{name}": Cell(f"--model toy {LADDER} --steps 40 {words}", "ladder-parity")
    for name, words in {"parity": "", "v1-defaults": V1, "raw": RAW,
                        "kept-cache": f"{RUNTIME} --parity.variants prefix-cache"}.items()
}  # fmt: skip

STUDIES = {
    "ladder": Study(LADDER, LADDER_CELLS, LEARNING + BACKEND,
                    ("reference", "v1-defaults", "parity")),
    "migration": Study(LADDER, MIGRATION_CELLS, LEARNING + BACKEND, (
        "reference", "v0", "v1-0.18-defaults", "v1-0.18-repaired", "v1-defaults", "parity")),
    "corrections": Study(
        f"{LADDER} {THREE} --inflight-groups 0", corrections_cells(),
        ("reward", "eval_trainer_alone", "rejected", "updates", "weights_ess", "mismatch",
         "staleness")),
    "real": Study(
        REAL, REAL_CELLS, ("eval_greedy_before", "eval_greedy", *LEARNING, *BACKEND, "overflowed"),
        ("parity", "parity-minus-processed", "parity-minus-runtime", "v1-defaults"), steps=20,
        jobs=1),
    "bench": Study(
        BENCH, BENCH_CELLS, ("step_s", "step_bare", "generate_s", "generate_bare",
                             "old_logprobs_s", "old_logprobs_bare", "update_s", "update_bare",
                             "sync_s", "tokens_s", "update_gib"), steps=22, jobs=1),
    "gpu": Study(
        GPU, GPU_CELLS, ("mismatch", "mismatch_current", "self_noise", "mismatch_noise",
                         "reward", "eval_trainer_alone", "eval_agree", "step_s",
                         "generate_s", "generate_bare", "old_logprobs_s", "update_s", "sleep_s",
                         "load_s", "canary_s", "tokens_s", "freed", "generate_gib", "update_gib",
                         "update_formula"), steps=5, seeds=1, jobs=1),
}  # fmt: skip
