"""The ladder: which backend fix repairs what, from vLLM V1's defaults to parity, beside the reference backend.

Each arm and seed is one run of train.py in a fresh process. All arms see the same prompts and seeds. A second call
repeats only the runs that did not finish.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal

import tyro

from lab import origin, table
from records import one_sentence

ROOT = Path(__file__).parents[1]
# Settings under which every fault is measurable on two CPU cores. With the toy's defaults most faults would not appear.
WORKLOAD = {
    "--task": ("digits", "64 problems, the same in all steps; their prompts fill a KV block, so vLLM caches them"),
    "--block-size": ("32", "the smallest on a CPU; no prompt fills vLLM's default block of 128 tokens"),
    "--temperature": ("0.7", "at 1, raw and processed log-probabilities are equal"),
    "--dtype": ("bfloat16", "in float32, the head is fp32 with and without the fix"),
    "--num-prompts": ("48", "groups per step"),
    "--inflight-groups": ("16", "additional groups, unfinished while the weights change"),
    "--group-size": ("4", "rollouts per group"),
    "--max-num-seqs": ("128", "half of the rollouts: the last groups have just started when 48 groups are complete"),
    "--max-new-tokens": ("18", "an answer has 16 digits and the end-of-sequence token"),
    "--old-policy": ("rollout", "two policies, as in the original report: the ratio contains the mismatch"),
    "--lr": ("2e-3", "high, so that 40 steps are enough"),
    "--eval-every": ("10", "steps between evaluations"),
    "--eval-problems": ("256", "all held-out problems"),
    "--checkpoint-every": ("1000000", "one checkpoint, after the last step"),
}
RAW, RUNTIME, PAUSE, HEAD = (
    f"--parity.no-{name}" for name in ("processed-logprobs", "explicit-runtime", "inflight-keep", "fp32-head")
)
V1 = (RAW, RUNTIME, PAUSE, HEAD)
THREE = ("--old-policy", "recompute")  # the three-policy form
TIS = (*THREE, "--tis", "token", "--tis-over-a-broken-backend")
ARMS: dict[str, tuple[str, ...]] = {
    "reference": ("--engine", "transformers"),
    "v1-defaults": V1,
    "+processed": (RUNTIME, PAUSE, HEAD),
    "+runtime": (PAUSE, HEAD),
    "+inflight": (HEAD,),
    "parity": (),  # with the fp32 head, the last fix
    "parity-minus-processed": (RAW,),
    "parity-minus-runtime": (RUNTIME,),
    "parity-minus-inflight": (PAUSE,),
    "parity-minus-fp32-head": (HEAD,),
    "parity+three": THREE,
    "parity+tis": (*THREE, "--tis", "token"),
    "v1-defaults+three": (*V1, *THREE),
    "v1-defaults+tis": (*V1, *TIS),
    "parity-minus-processed+three": (RAW, *THREE),
    "parity-minus-processed+tis": (RAW, *TIS),
    "parity-minus-runtime+three": (RUNTIME, *THREE),
    "parity-minus-runtime+tis": (RUNTIME, *TIS),
}
LEFT_OUT = ("parity-minus-processed", "parity-minus-runtime", "parity-minus-inflight", "parity-minus-fp32-head")
FINAL, LAST = slice(-5, None), slice(-1, None)
EARLY = slice(10)  # later, a failing run has collapsed to a nearly uniform policy, whose ratios are rarely clipped


@dataclass(frozen=True)
class Options:
    """Arms, seeds and steps."""

    out: str = "runs/ablation"
    """Folder for ablation.md, ablation.json, ablation.png and one folder per run."""
    arms: tuple[Literal[tuple(ARMS)], ...] = tuple(ARMS)
    """Arms to run; ARMS in lab/ablate.py lists the options of each."""
    seeds: int = 3
    """Number of seeds per arm: 0, 1, ... The tables show the range over the seeds."""
    steps: int = 40
    """Steps per run."""
    jobs: int = 2
    """Runs at the same time; they share the CPU threads. Use 1 on a GPU."""
    train_args: str = ""
    """More options for train.py. They override the workload: --train-args="--model PATH --max-new-tokens 256"."""
    page: str | None = None
    """A file whose text between the two marker lines is replaced by ablation.md."""
    render: bool = False
    """Write ablation.md again from ablation.json in `out`; run nothing. Give the seeds and steps of that run."""

    def __post_init__(self):
        for name in ("seeds", "steps", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        own = {"--out", "--seed", "--steps", "--probe-every", "--resume"}
        if taken := sorted(own & {word.partition("=")[0].replace("_", "-") for word in shlex.split(self.train_args)}):
            raise ValueError(f"train_args must not contain {', '.join(taken)} (lab.ablate sets them), got"
                             f" {self.train_args}")


# ------------------------------------------------------------------------------------------------ running
@dataclass(frozen=True)
class Run:
    """One command of train.py. Arms with equal options share one run per seed."""

    name: str
    folder: Path
    command: list[str]
    threads: int


def runs_of(options: Options) -> dict[tuple[str, int], Run]:
    """The run of each arm and seed. Seeds vary fastest, so that two parallel runs train two different toy models."""
    workload = [word for name, (value, _) in WORKLOAD.items() for word in (name, value)]
    workload += ["--steps", str(options.steps), "--probe-every", str(options.steps), *shlex.split(options.train_args)]
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    first = {ARMS[arm]: arm for arm in reversed(ARMS)}  # the first arm with these options names the folder
    runs = {}
    for arm in options.arms:
        for seed in range(options.seeds):
            folder = Path(options.out).resolve() / "runs" / f"{first[ARMS[arm]]}-seed{seed}"
            command = [sys.executable, str(ROOT / "train.py"), "--out", str(folder), "--seed", str(seed)]
            runs[arm, seed] = Run(f"{arm}, seed {seed}", folder, [*command, *workload, *ARMS[arm]], threads)
    return runs


def execute(run: Run) -> str | None:
    """Run the command, unless the same command has already finished. Returns the error of a failed run."""
    record = run.folder.with_suffix(".json")  # the options of a finished run
    if record.exists() and json.loads(record.read_text()) == run.command[2:]:
        return None
    record.unlink(missing_ok=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    environment, log = os.environ | {"OMP_NUM_THREADS": str(run.threads)}, run.folder.with_suffix(".log")
    with open(log, "w") as output:
        status = subprocess.run(run.command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment)
    if status.returncode:
        last_line = (log.read_text().strip().splitlines() or [""])[-1]
        return f"exit status {status.returncode}: {last_line[:200]}"
    record.write_text(json.dumps(run.command[2:]))
    return None


def execute_all(runs: Iterable[Run], jobs: int) -> dict[Path, str]:
    """Execute each distinct run, `jobs` at a time, with one line of output for each. Returns the errors by folder."""
    distinct = list({run.folder: run for run in runs}.values())
    crashed, started = {}, time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for done, (run, error) in enumerate(zip(distinct, pool.map(execute, distinct), strict=True), 1):
            if error:
                crashed[run.folder], outcome = error, f"CRASHED, {error}"
            else:
                outcome = "reward {reward:.2f}, mismatch {mismatch:.1e}, {probe:.60}".format(**measure(run.folder))
            minutes = (time.monotonic() - started) / 60
            print(f"[{done}/{len(distinct)}] {run.name}: {outcome} | {minutes:.1f} min", flush=True)
    return crashed


# ------------------------------------------------------------------------------------------------ measuring
@dataclass(frozen=True)
class Metric:
    """A column of the tables. `measure` reduces the steps of one run to a number."""

    title: str
    form: str
    measure: Callable[[list[dict[str, Any]]], float | None]


def over_steps(name: str, reduce: Callable = mean, window: slice = slice(None)) -> Callable[..., float | None]:
    def measure(steps: list[dict[str, Any]]) -> float | None:
        values = [step[name] for step in steps if step.get(name) is not None][window]
        return reduce(values) if values else None

    return measure


def tokens_per_second(steps: list[dict[str, Any]]) -> float:
    return sum(step["tokens"] for step in steps) / sum(step["step_s"] for step in steps)


METRICS = {
    "reward": Metric("reward, last 5 steps", ".2f", over_steps("reward", window=FINAL)),
    "eval_reward": Metric("held-out reward, engine", ".2f", over_steps("eval_reward", window=LAST)),
    "eval_true": Metric("held-out reward, trainer", ".2f", over_steps("eval_reward_trainer", window=LAST)),
    "eval_gap": Metric("engine minus trainer", ".2f", over_steps("eval_gap", window=LAST)),
    "entropy": Metric("entropy, last 5 steps", ".2f", over_steps("entropy", window=FINAL)),
    "clip_rate": Metric("clip rate", ".1%", over_steps("clip_rate")),
    "clip_early": Metric("clip rate, first 10 steps", ".1%", over_steps("clip_rate", window=EARLY)),
    "kl_new_old": Metric("KL new/old", ".1e", over_steps("kl_new_old")),
    "ratio_mean": Metric("mean ratio", ".3f", over_steps("ratio_mean")),
    "mismatch": Metric("mean mismatch", ".1e", over_steps("mismatch_abs_mean")),
    "mismatch_fresh": Metric("mean mismatch, fresh rollouts", ".1e", over_steps("fresh_mismatch_abs_mean")),
    "mismatch_max": Metric("largest mismatch", ".1e", over_steps("mismatch_max", max)),
    "mismatch_kl": Metric("mismatch, KL (k3)", ".1e", over_steps("mismatch_kl")),
    "ess": Metric("ESS", ".2f", over_steps("ess")),
    "staleness": Metric("mean staleness", ".2f", over_steps("staleness_mean")),
    "staleness_max": Metric("largest staleness", ".0f", over_steps("staleness_max", max)),
    "wasted": Metric("wasted tokens", ".0f", over_steps("tokens_wasted", window=LAST)),
    "tokens_s": Metric("tokens/s", ".0f", tokens_per_second),
}
LEARNING = ("reward", "eval_reward", "eval_true", "eval_gap", "entropy", "clip_rate", "clip_early", "kl_new_old",
            "ratio_mean")
BACKEND = tuple(name for name in METRICS if name not in LEARNING)
CURVES = ("clip_rate", "clip_early", "kl_new_old", "entropy", "reward", "mismatch")  # the original report, and mismatch


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measure(folder: Path) -> dict[str, Any]:
    """METRICS of one run, and the probe's diagnosis after the first step."""
    steps = steps_of(folder)[1:]  # without the evaluation before the first step
    verdict = json.loads(max(folder.glob("probe/*.json")).read_text())
    causes = [f"{cause['layer']}: {cause['name']}" for cause in verdict["causes"]]
    return {name: metric.measure(steps) for name, metric in METRICS.items()} | {
        "probe": "; ".join(causes) or verdict["status"]
    }


Arm = dict[str, tuple[float, ...]]  # the values of each metric over the seeds


def spreads(runs: list[dict[str, Any]]) -> Arm:
    """METRICS of an arm over its runs, without those that a run did not measure."""
    columns = {name: tuple(run[name] for run in runs) for name in METRICS}
    return {name: values for name, values in columns.items() if values and None not in values}


def seed_range(values: tuple[float, ...]) -> float:
    return max(values) - min(values)


def distances(arm: Arm, base: Arm) -> dict[str, float]:
    """|difference of the means| / larger seed range, for each metric that both arms measured with several seeds."""
    both = ((name, arm[name], base[name]) for name in METRICS if name in arm and name in base)
    return {name: abs(mean(ours) - mean(theirs)) / max(seed_range(ours), seed_range(theirs), 1e-12)
            for name, ours, theirs in both if len(ours) > 1 and len(theirs) > 1}


# ------------------------------------------------------------------------------------------------ reporting
def cell(name: str, arm: Arm) -> str:
    """mean ± half the seed range."""
    form = METRICS[name].form
    if name not in arm:
        return "not measured"
    spread = f" ± {seed_range(arm[name]) / 2:{form}}" if len(arm[name]) > 1 else ", one seed"
    return f"{mean(arm[name]):{form}}{spread}"


def differences(arm: Arm, base: Arm) -> str:
    """The metrics in which two arms differ, the largest distance first, with the value of the base in brackets.

    They differ if the means differ by more than the larger seed range and the values do not overlap. Speed is left out:
    it depends on the other runs of the machine.
    """
    texts, apart = [], distances(arm, base)
    for name in sorted(apart.keys() - {"tokens_s"}, key=apart.get, reverse=True):
        ours, theirs, form = arm[name], base[name], METRICS[name].form
        if apart[name] > 1 and (max(ours) < min(theirs) or max(theirs) < min(ours)):
            texts.append(f"{METRICS[name].title}: {mean(ours):{form}} ({mean(theirs):{form}})")
    return "; ".join(texts) or "nothing"


def report(options: Options, record: dict[str, Any]) -> str:
    """ablation.md from the content of ablation.json."""
    arms = {arm: spreads(entry["runs"]) for arm, entry in record["arms"].items()}
    probes = {arm: " / ".join(dict.fromkeys(run["probe"] for run in entry["runs"]))
              for arm, entry in record["arms"].items()}
    titles = {name: metric.title for name, metric in METRICS.items()}
    parts = [
        f"{origin(record['command'], record)}; seeds 0 to {options.seeds - 1}, {options.steps} steps, the device of one"
        " process. Each figure is the mean over the seeds ± half the seed range.",
        table(["setting", "reason"], [[f"`{name} {value}`", reason] for name, (value, reason) in WORKLOAD.items()]),
        "**Learning**",
        table(["arm", *map(titles.get, LEARNING)],
              [[arm, *(cell(name, of_arm) for name in LEARNING)] for arm, of_arm in arms.items()]),
        "**Mismatch, staleness and speed**",
        table(["arm", *map(titles.get, BACKEND), "diagnosis of the probe"],
              [[arm, *(cell(name, of_arm) for name in BACKEND), probes[arm]] for arm, of_arm in arms.items()]),
    ]
    if record["crashed"]:
        parts.append("**Crashed**\n\n" + "\n".join(f"- {run}: {error}" for run, error in record["crashed"].items()))
    if parity := arms.get("parity"):
        parts += [
            "**Each fix switched off alone**: the metrics that differ from parity by more than the seed range, with the"
            " value of parity in brackets",
            table(["arm", "differs in"], [[arm, differences(arms[arm], parity)] for arm in LEFT_OUT if arm in arms]),
        ]
    if reference := arms.get("reference"):
        apart = {arm: distances(arms[arm], reference) for arm in ("parity", "v1-defaults") if arm in arms}
        parts += [
            "**Difference from the reference** in seed ranges: |difference of the means| / larger seed range",
            table(["arm", *map(titles.get, CURVES)],
                  [[arm, *(f"{min(by_name[name], 999):.1f}" if name in by_name else "not measured" for name in CURVES)]
                   for arm, by_name in apart.items()]),
        ]
    return "\n\n".join(parts) + "\n"


def plot(runs: dict[str, list[Path]], path: Path) -> None:
    """ablation.png: the four curves of the original report, the mismatch, and the held-out reward of the trainer alone.

    Lines are means over the seeds, bands the seed range.
    """
    from matplotlib.figure import Figure

    panels = {
        "clip rate": "clip_rate", "KL new/old, nats": "kl_new_old", "entropy, nats": "entropy", "reward": "reward",
        "mismatch, nats": "mismatch_abs_mean", "held-out reward, trainer alone": "eval_reward_trainer",
    }
    colors = {"reference": "tab:blue", "v1-defaults": "tab:red", "parity": "tab:green"}
    steps = {arm: [steps_of(folder) for folder in runs.get(arm, [])] for arm in colors}
    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (title, name) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        for arm, color in colors.items():
            curves = ({step["step"]: step[name] for step in run if step.get(name) is not None} for run in steps[arm])
            if curves := [curve for curve in curves if curve]:
                shared = sorted(set.intersection(*map(set, curves)))
                values = [[curve[step] for curve in curves] for step in shared]
                axis.plot(shared, [*map(mean, values)], color=color, label=arm)
                axis.fill_between(shared, [*map(min, values)], [*map(max, values)], color=color, alpha=0.2, lw=0)
        axis.set(title=title, xlabel="step", yscale="log" if title.startswith(("mismatch", "KL")) else "linear")
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)


MARKERS = "<!-- ablation.md -->", "<!-- end of ablation.md -->"


def write_page(path: Path, text: str | None = None) -> None:
    """Replace the text between the marker lines; without a new text, only check that both are there.

    Raises: ValueError if a marker is missing.
    """
    before, marker, rest = path.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (marker and end):
        raise ValueError(f"page must hold the lines {' and '.join(MARKERS)}, got {path} without them")
    if text is not None:
        path.write_text(f"{before}{marker}\n\n{text}\n{end}{after}")


# ------------------------------------------------------------------------------------------------ the command
def run_arms(options: Options, command: str) -> None:
    """Execute the runs; write ablation.json and ablation.png."""
    out, runs = Path(options.out), runs_of(options)
    (out / "runs").mkdir(parents=True, exist_ok=True)
    errors = execute_all(runs.values(), options.jobs)
    crashed = {run.name: errors[run.folder] for run in runs.values() if run.folder in errors}
    finished: dict[str, list[Path]] = {}
    for (arm, _), run in runs.items():
        if run.folder not in errors:
            finished.setdefault(arm, []).append(run.folder)
    if not finished:
        sys.exit(f"error: no run finished; the logs are in {out / 'runs'}")
    configs = [json.loads((folders[0] / "config.json").read_text()) for folders in finished.values()]
    config = next((each for each in configs if each["versions"]["vllm"]), configs[0])  # the reference has no vLLM
    arms = {arm: {"options": ARMS[arm], "runs": [*map(measure, folders)]} for arm, folders in finished.items()}
    record = {"command": command} | {name: config[name] for name in ("device", "versions", "commit", "dirty")}
    (out / "ablation.json").write_text(json.dumps(record | {"arms": arms, "crashed": crashed}, indent=1))
    plot(finished, out / "ablation.png")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run crashed, 2 bad input."""
    with one_sentence(2):
        options = tyro.cli(Options, args=arguments, description=__doc__)
        if options.page:
            write_page(Path(options.page))
    if not options.render:
        run_arms(options, shlex.join(["python", "-m", "lab.ablate", *(arguments or sys.argv[1:])]))
    record = json.loads((Path(options.out) / "ablation.json").read_text())
    text = report(options, record)
    (Path(options.out) / "ablation.md").write_text(text)
    if options.page:
        write_page(Path(options.page), text)
    print(f"\n{text}\nwritten to {options.out}: ablation.md, ablation.json, ablation.png")
    return 1 if record["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
