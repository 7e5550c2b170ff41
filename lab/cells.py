"""The studies of lab/study.py: what runs, what is measured, and what each cell is compared with.

A cell is a name and options of train.py. They come after the study's workload, so they override it.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from operator import itemgetter
from pathlib import Path
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


def freed_by_sleep(rows: Rows) -> float | None:
    freed = [row["generate_gib"] - row["sleep_gib"] for row in rows if "sleep_gib" in row]
    return median(freed) if freed else None


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
    "freed": Metric("memory freed by sleep, GiB", ".2f", freed_by_sleep),
    "generate_gib": column("generate, peak GiB", ".2f", "generate_gib", max),
    "update_gib": column("update, peak GiB", ".2f", "update_gib", max),
    "start_s": column("start the engine, s", ".1f", "start_s"),
    "program_us": column("generate in this program, us a token", ".1f", "program_us", warm),
    "vllm_us": column("in vLLM outside of its model runner, us a token", ".1f", "vllm_us", warm),
    "bare_us": column("bare generate outside of it, us a token", ".1f", "bare_us", warm),
    "decode_busy": column("the GPU computes, decode", ".0%", "decode_busy"),
    "update_busy": column("the GPU computes, update", ".0%", "update_busy"),
} | {
    f"{phase}_formula": column(f"{phase}, peak / formula", ".2f", f"{phase}_gib", warm,
                               per=f"formula_{phase}_gib")
    for phase in ("generate", "update")
} | {
    f"{name}_s": column(f"{name}, s", ".3f", f"{name}_s", warm)
    for name in ("generate", "old_logprobs", "update", "sync", "sleep", "wake", "load", "proof",
                 "canary", "step")
} | {
    f"{name}_bare": column(f"{name} / bare work", ".2f", f"{name}_s", warm,
                           per=f"bare_{name}_s")
    for name in ("generate", "old_logprobs", "update", "step")
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
    program: str = "train"  # a module whose `main` takes the options; others are in lab/
    model: str | None = None  # of lab/models.py: written for each seed before the runs
    limit_s: float = math.inf  # of a run
    jobs: int = 1  # runs at the same time on a GPU, if all of them allow so many
    seeds: tuple[int, ...] = ()  # its own, without --seeds
    # What was predicted, what others report, or what an H200 gave: printed beside the figures.
    expected: str = "-"


class Study(NamedTuple):
    """A list of cells with what they have in common."""

    workload: str
    cells: dict[str, Cell]
    metrics: tuple[str, ...]
    drawn: tuple[str, ...] = ()  # the cells of the picture
    steps: int = 40
    seeds: int = 3
    jobs: int = 2  # runs at the same time; they share the CPU threads
    # The first cells are worth most: the record is written after each run, with the steps of those
    # that have not finished.
    piecewise: bool = False
    rehearsal: str = ""  # options that come last without a GPU


def against(baseline: str, options: dict[str, str], program: str = "train") -> dict[str, Cell]:
    return {name: Cell(words, baseline, program) for name, words in options.items()}


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

# The learning rate is too small to change the policy: all steps sample from one.
BENCH = "--lr 1e-12 --eval-every 1000000 --checkpoint-every 1000000"
BENCH_CELLS = against("vllm", {"vllm": ""}, "lab.bench")

# The first hour on a GPU, in the order of what is worth most. MINUTES=10 holds the profiles and the
# first prices; `--cells smollm2-*` is another ten. On an H100 each process takes 35 to 55 s before
# its first step. Random weights of real shapes, 128 tokens of prompt, 512 of response: with 128
# prompts a step and its bare work took 32 + 27 s on an H200, so there are 64. docs/fixes.md has the
# reasons of what is expected.
GPU = (f"{BENCH} --task {Path(__file__).with_name('models.py')} --dtype bfloat16 --num-prompts 64"
       " --group-size 8 --max-new-tokens 512 --micro-batch-tokens 16384 --kv-cache-gib 16"
       " --eval-problems 8")
NOISE = "--self-noise-every 1"
TINY = ("--steps 3 --num-prompts 4 --group-size 4 --max-new-tokens 18 --kv-cache-gib 0.1"
        " --eval-problems 4")
PRICE = "--max-new-tokens 128 --steps 2"
SMALL = "--num-prompts 32"
half_b = partial(Cell, baseline="parity", program="lab.bench", model="qwen2.5-0.5b", limit_s=180)
price = partial(half_b, baseline="small", limit_s=120)
ARMS = {"parity": "", "raw": RAW, "kept-cache": f"{RUNTIME} --variants prefix-cache"}
TAUGHT = "taught-qwen2.5-0.5b"
# The settings of the record gpu-trained.
HALF_B = (f"{LADDER} --kv-cache-gib 0.5 --micro-batch-tokens 8192 --eval-problems 128"
          " --self-noise-every 10 --steps 40")
SUMS = (f"--model {SMOLLM2} --task {Path(__file__).with_name('sums.py')} --num-prompts 32"
        " --inflight-groups 8 --max-new-tokens 16 --temperature 0.7 --lr 1e-5 --kv-cache-gib 2"
        " --block-size 32 --micro-batch-tokens 4096 --eval-every 15 --eval-problems 128"
        " --eval-trainer-alone --self-noise-every 10 --steps 30 --two-policy")


def arms(job: str, options: str, *expected: str, **fields: Any) -> dict[str, Cell]:
    """The first of ARMS, one for each expectation. They run beside each other, because engines that
    keep requests do not sleep.
    """
    return {f"{job}-{arm}": Cell(f"{options} {ARMS[arm]}", f"{job}-parity", limit_s=300, jobs=4,
                                 expected=each, **fields)
            for arm, each in zip(ARMS, expected, strict=False)}


GPU_CELLS = {
    # The default job in float32: it learns, as on a CPU.
    "learns": Cell("--model toy --task toy --max-new-tokens 8 --dtype float32 --lr 1e-3 --steps 60"
                   " --num-prompts 128 --micro-batch-tokens 4096 --kv-cache-gib 0.25"
                   " --eval-every 20 --eval-problems 256", "learns", limit_s=180,
                   expected="H200: held out greedily 1.00"),
    "profile": price(PRICE, baseline="profile", program="lab.profile"),
    "profile-eager": price(f"{PRICE} --no-cuda-graphs", baseline="profile", program="lab.profile"),
    # The price of each fix in seconds: 512 requests.
    "small": price(f"{PRICE} {NOISE}", expected="a decode step of 16 ms or less"),
    "small-eager": price(f"{PRICE} --no-cuda-graphs"),
    "minus-fp32-head": price(f"{PRICE} {NOISE} {HEAD}",
                             expected="H100: mismatch 11 times that of parity"),
    "minus-async-scheduling": price(f"{PRICE} {RUNTIME} --variants async-scheduling"),
    **arms("smollm2", SUMS, "H100, seed 0: reward 0.56", "H100, seed 0: reward 0.09", seeds=(1, 2)),
    **arms("taught-2e-5", f"{HALF_B} --lr 2e-5", "H100: reward 0.93", "H100: reward 0.86",
           "H100: reward 0.86, agreement 0.72", model=TAUGHT),
    **arms("taught-5e-5", f"{HALF_B} --lr 5e-5", "H100: reward 0.99",
           "further below parity than with 2e-5", "the same", model=TAUGHT),
    # The shape of garg-aayush/building-from-scratch: 256 rollouts.
    "1.5b": Cell(f"{SMALL} --max-new-tokens 1024 --micro-batch-tokens 8192 --kv-cache-gib 8"
                 " --steps 2", "1.5b", "lab.bench", "qwen2.5-1.5b", limit_s=300,
                 expected="others: a step takes 30 s on an H100, 84 s on a 4090"),
    "minus-processed": price(f"{PRICE} {RAW}"),
    "minus-prefix-cache": price(f"{PRICE} {ARMS['kept-cache']}"),
    "small-top-p": price(f"{PRICE} {TOP_P}"),
    "small-top-p-minus-mask": price(f"{PRICE} {TOP_P} --parity.no-sampling-mask"),
    "v1-defaults": price(f"{PRICE} {V1}"),
    # Its engine sleeps, which clears its cache.
    "taught-2e-5-v1-defaults": Cell(
        f"{HALF_B} --lr 2e-5 {V1}", "taught-2e-5-parity", model=TAUGHT, limit_s=300,
        expected="H100: reward 0.78 after 21 steps"),
    "tests": Cell("", "tests", "lab.gpu_tests", limit_s=300, expected="exit status 0"),
    "parity": half_b(
        NOISE, expected="H100: frees 18.3 GiB, load 0.06 s; sleep, wake and load 0.7 % of a step;"
        " mismatch 1.5 times the own noise"),
    "float16": half_b(f"--dtype float16 {SMALL} {NOISE}"),
    "24gb": half_b(f"{SMALL} --micro-batch-tokens 4096 --kv-cache-gib 4"),
}

STUDIES = {
    "ladder": Study(LADDER, LADDER_CELLS, LEARNING + BACKEND,
                    ("transformers", "v1-defaults", "parity")),
    "real": Study(
        REAL, REAL_CELLS, ("eval_greedy_before", "eval_greedy", *LEARNING, *BACKEND, "overflowed"),
        ("parity", "parity-minus-processed", "parity-minus-runtime", "v1-defaults"), steps=20,
        jobs=1),
    # --train-args: a user's model and task, on the defaults of train.py.
    "own": Study("", against("parity", REAL_ARMS),
                 ("mismatch_current", "backend_clip", "eval_agree", "reward"), steps=60, seeds=1,
                 jobs=1),
    "bench": Study(
        BENCH, BENCH_CELLS, ("step_s", "step_bare", "generate_s", "generate_bare",
                             "program_us", "vllm_us", "bare_us", "old_logprobs_s",
                             "old_logprobs_bare", "update_s", "update_bare", "sync_s", "tokens_s",
                             "update_gib"), steps=22, jobs=1),
    "gpu": Study(
        GPU, GPU_CELLS, ("reward", "entropy", "eval_greedy_before", "eval_greedy",
                         "eval_trainer_alone", "eval_agree", "backend_clip", "mismatch",
                         "mismatch_current", "self_noise",
                         "mismatch_noise", "start_s", "sleep_s", "wake_s", "load_s", "proof_s",
                         "canary_s", "step_s", "generate_s", "generate_bare", "program_us",
                         "vllm_us", "bare_us", "old_logprobs_s", "update_s", "tokens_s", "freed",
                         "generate_gib", "generate_formula", "update_gib", "update_formula",
                         "decode_busy", "update_busy"),
        steps=5, seeds=1, jobs=1, piecewise=True, rehearsal=TINY),
}  # fmt: skip
