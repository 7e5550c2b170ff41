"""Which fix repairs what: the ladder of arms from vLLM V1's defaults to parity, beside the reference backend.

Each arm and seed is `train.py` in a fresh process, with the same prompts and seeds. A finished run is not repeated.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import tyro

ROOT = Path(__file__).parents[1]
# The settings under which each fault shows on two CPU cores; on the toy's defaults most of them would not.
WORKLOAD = {
    "--task": ("digits", "64 problems met again at every step, their prompts longer than a KV block (prefix cache)"),
    "--block-size": ("32", "the smallest on a CPU: with vLLM's 128 no prompt here would be cached"),
    "--temperature": ("0.7", "not 1, where raw and processed log-probabilities are the same"),
    "--dtype": ("bfloat16", "in fp32 the head's dtype is fp32 whatever the switch"),
    "--num-prompts": ("48", "groups that a step consumes"),
    "--inflight-groups": ("16", "more groups, unfinished while the weights change: without, nothing is in flight"),
    "--group-size": ("4", "rollouts of each"),
    "--max-num-seqs": ("128", "half of the rollouts: the last groups have just begun when the step has its 48"),
    "--max-new-tokens": ("18", "an answer has 16 digits and the end of sequence"),
    "--old-policy": ("rollout", "two policies, as in the original report: the mismatch is inside the ratio"),
    "--lr": ("2e-3", "high: the story takes 40 steps"),
    "--eval-every": ("10", "steps"),
    "--eval-problems": ("256", "all that are held out"),
    "--checkpoint-every": ("1000000", "after the last step only"),
}
RAW, RUNTIME, PAUSE, HEAD = (
    f"--parity.no-{name}" for name in ("processed-logprobs", "explicit-runtime", "inflight-keep", "fp32-head")
)
V1 = (RAW, RUNTIME, PAUSE, HEAD)
THREE = ("--old-policy", "recompute")
TIS = (*THREE, "--tis", "token", "--tis-over-a-broken-backend")
ARMS: dict[str, tuple[str, ...]] = {
    "reference": ("--engine", "transformers"),
    "v1-defaults": V1,
    "+processed": (RUNTIME, PAUSE, HEAD),
    "+runtime": (PAUSE, HEAD),
    "+inflight": (HEAD,),
    "parity": (),  # the fp32 head added
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
LAST = 5  # steps whose mean is "final"
EARLY = 10  # steps before a collapse is complete: a flat policy has little left to clip


@dataclass(frozen=True)
class Options:
    """What to run; a command line of train.py for each arm and seed."""

    out: str = "runs/ablation"
    """Folder of ablation.md, .json, .png and of a folder per run; a second call goes on where the first stopped."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Names of arms, of: see the README."""
    seeds: int = 3
    """Seeds 0, 1, ... of each arm; the spread in the tables is over them."""
    steps: int = 40
    """Batches of rollouts per run."""
    jobs: int = 2
    """Processes at a time, the machine's threads divided among them; 1 on a GPU."""
    train_args: str = ""
    """Further options of train.py, after those of the workload: --train-args="--model PATH --max-new-tokens 256"."""
    readme: str | None = None
    """A file whose text between the two lines of MARKERS is replaced by ablation.md."""

    def __post_init__(self):
        if unknown := sorted(set(self.arms) - set(ARMS)):
            raise ValueError(f"arms must be of {', '.join(ARMS)}, got {', '.join(unknown)}")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms must be named, each once, got {' '.join(self.arms) or 'none'}")
        for name in ("seeds", "steps", "jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        own = {"--out", "--seed", "--steps", "--probe-every", "--resume"}
        if taken := sorted(own & {word.partition("=")[0].replace("_", "-") for word in shlex.split(self.train_args)}):
            raise ValueError(f"train_args must leave {', '.join(taken)} to lab.ablate, got {self.train_args}")


# ------------------------------------------------------------------------------------------------ running
@dataclass(frozen=True)
class Run:
    """One set of options at one seed; two arms with the same options share it."""

    name: str
    folder: Path
    command: list[str]
    threads: int


def plan(options: Options) -> dict[tuple[str, int], Run]:
    """The run of each arm and seed; seeds vary fastest, so that two processes teach two toys."""
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
    """The run's process, unless it has finished before with these options; returns what it said last if it failed."""
    record = run.folder.with_suffix(".json")
    if record.exists() and json.loads(record.read_text()) == run.command[2:]:
        return None
    record.unlink(missing_ok=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(run.threads)}
    with open(run.folder.with_suffix(".log"), "w+") as log:
        status = subprocess.run(run.command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environment)
        log.seek(0)
        said = log.read().strip().splitlines() or [""]
    if status.returncode:
        return f"exit status {status.returncode}: {said[-1][:200]}"
    record.write_text(json.dumps(run.command[2:]))
    return None


def execute_all(runs: Iterable[Run], jobs: int) -> dict[Path, str]:
    """All of them, `jobs` at a time; prints a line for each and returns what the crashed ones said, by folder."""
    distinct = list({run.folder: run for run in runs}.values())
    crashed, started = {}, time.monotonic()
    pool = ThreadPoolExecutor(jobs)
    waiting = {pool.submit(execute, run): run for run in distinct}
    try:
        for done, future in enumerate(as_completed(waiting), 1):
            run, minutes = waiting[future], (time.monotonic() - started) / 60
            if error := future.result():
                crashed[run.folder] = error
            outcome = f"CRASHED, {error}" if error else headline(run.folder)
            left = minutes / done * (len(distinct) - done)
            print(f"[{done}/{len(distinct)}] {run.name}: {outcome} | {minutes:.1f} min, {left:.0f} to go", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C reaches the running ones by itself and must not start the next
    return crashed


# ------------------------------------------------------------------------------------------------ measuring
@dataclass(frozen=True)
class Metric:
    """A column: its title, format, and how a run's steps become one number."""

    title: str
    form: str
    measure: Callable[[list[dict[str, Any]]], float | None]


def over_steps(name: str, reduce: Callable[[list[float]], float] = mean) -> Callable[..., float | None]:
    def measure(rows: list[dict[str, Any]]) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return reduce(values) if values else None

    return measure


def last_of(name: str) -> Callable[..., float | None]:
    return over_steps(name, lambda values: values[-1])


def final(name: str) -> Callable[..., float | None]:
    return over_steps(name, lambda values: mean(values[-LAST:]))


def early(values: list[float]) -> float:
    return mean(values[:EARLY])


def tokens_per_second(rows: list[dict[str, Any]]) -> float:
    return sum(row["tokens"] for row in rows) / sum(row["step_s"] for row in rows)


METRICS = {
    "reward": Metric(f"reward, last {LAST} steps", ".2f", final("reward")),
    "eval_reward": Metric("held out, engine", ".2f", last_of("eval_reward")),
    "eval_true": Metric("held out, trainer alone", ".2f", last_of("eval_reward_trainer")),
    "eval_gap": Metric("gap", ".2f", last_of("eval_gap")),
    "entropy": Metric(f"entropy, last {LAST}", ".2f", final("entropy")),
    "clip_rate": Metric("clip rate", ".1%", over_steps("clip_rate")),
    "clip_early": Metric(f"clip rate, first {EARLY}", ".1%", over_steps("clip_rate", early)),
    "kl_new_old": Metric("KL new/old", ".1e", over_steps("kl_new_old")),
    "ratio_mean": Metric("ratio mean", ".3f", over_steps("ratio_mean")),
    "mismatch": Metric("mismatch, mean", ".1e", over_steps("mismatch_abs_mean")),
    "mismatch_fresh": Metric("of fresh rollouts alone", ".1e", over_steps("fresh_mismatch_abs_mean")),
    "mismatch_max": Metric("mismatch, max", ".1e", over_steps("mismatch_max", max)),
    "mismatch_kl": Metric("mismatch, k3", ".1e", over_steps("mismatch_kl")),
    "ess": Metric("ESS", ".2f", over_steps("ess")),
    "staleness": Metric("staleness, mean", ".2f", over_steps("staleness_mean")),
    "staleness_max": Metric("staleness, max", ".0f", over_steps("staleness_max", max)),
    "wasted": Metric("tokens wasted", ".0f", last_of("tokens_wasted")),
    "tokens_s": Metric("tokens/s", ".0f", tokens_per_second),
}
LEARNING = ("reward", "eval_reward", "eval_true", "eval_gap", "entropy", "clip_rate", "clip_early", "kl_new_old",
            "ratio_mean")
BACKEND = tuple(name for name in METRICS if name not in LEARNING)
CURVES = ("clip_rate", "clip_early", "kl_new_old", "entropy", "reward", "mismatch")  # the original report, and mismatch


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measure(folder: Path) -> dict[str, Any]:
    """The row of METRICS of one run, and what the probe said after its first step."""
    steps = steps_of(folder)
    row = {name: metric.measure(steps[1:]) for name, metric in METRICS.items()}
    verdict = json.loads(max(folder.glob("probe/*.json")).read_text())
    causes = [f"{cause['layer']}: {cause['name']}" for cause in verdict["causes"]]
    return row | {"probe": "; ".join(causes) or verdict["status"]}


def headline(folder: Path) -> str:
    row = measure(folder)
    return f"reward {row['reward']:.2f}, mismatch {row['mismatch']:.1e}, probe: {row['probe'][:60]}"


@dataclass(frozen=True)
class Spread:
    """One metric of one arm over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def range(self) -> float:
        return max(self.values) - min(self.values)

    def apart(self, other: "Spread") -> float:
        """Distance of the means in units of the larger range over seeds."""
        return abs(self.mean - other.mean) / max(self.range, other.range, 1e-12)

    def separate(self, other: "Spread") -> bool:
        """Beyond the spread: further apart than either range, and no seed of one among those of the other."""
        disjoint = max(self.values) < min(other.values) or max(other.values) < min(self.values)
        return min(len(self.values), len(other.values)) > 1 and disjoint and self.apart(other) > 1


def spreads(rows: list[dict[str, Any]]) -> dict[str, Spread]:
    """METRICS of an arm; one that is not measured in all its runs is left out."""
    columns = {name: tuple(row[name] for row in rows) for name in METRICS}
    return {name: Spread(values) for name, values in columns.items() if values and None not in values}


# ------------------------------------------------------------------------------------------------ reporting
Arms = dict[str, dict[str, Spread]]
LEFT_OUT = {  # of parity: what its row shows, and what of it cannot show here
    "parity-minus-processed": "",
    "parity-minus-runtime": "async scheduling shows as the smaller staleness alone: one token per rollout and update is"
    " labelled too new; generation_config.json: every request names its sampling parameters; cascade attention: vLLM"
    " 0.32 has none. On a GPU an engine that sleeps loses its prefix cache",
    "parity-minus-inflight": "",
    "parity-minus-fp32-head": "",
}


def cell(name: str, arm: dict[str, Spread]) -> str:
    """mean ± half the range over the seeds."""
    form = METRICS[name].form
    if name not in arm:
        return "not measured"
    spread = f" ± {arm[name].range / 2:{form}}" if len(arm[name].values) > 1 else ", one seed"
    return f"{arm[name].mean:{form}}{spread}"


def markdown(columns: dict[str, Callable[[str], str]], arms: Iterable[str]) -> str:
    """A row per arm, a column per title."""
    lines = ["| arm | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += ["| " + " | ".join([arm, *(show(arm) for show in columns.values())]) + " |" for arm in arms]
    return "\n".join(lines)


def distance(name: str, arm: dict[str, Spread], base: dict[str, Spread]) -> str:
    """Of the means, in units of the larger range over the seeds."""
    measured = name in arm and name in base and min(len(arm[name].values), len(base[name].values)) > 1
    return f"{min(arm[name].apart(base[name]), 999):.1f}" if measured else "not measured"


def differences(arm: dict[str, Spread], base: dict[str, Spread]) -> str:
    """In what two arms are apart beyond the spread, the clearest first; speed, measured beside others, aside."""
    apart = {name: arm[name].apart(base[name]) for name in METRICS
             if name != "tokens_s" and name in arm and name in base and arm[name].separate(base[name])}
    shown = sorted(apart, key=lambda name: -apart[name])
    texts = (f"{METRICS[name].title} {arm[name].mean:{METRICS[name].form}} for {base[name].mean:{METRICS[name].form}}"
             for name in shown)
    return ", ".join(texts) or "nothing"


def report(
    options: Options, arms: Arms, probes: dict[str, str], crashed: dict[str, str], record: dict[str, Any]
) -> str:
    """ablation.md."""

    def columns(names: Iterable[str]) -> dict[str, Callable[[str], str]]:
        return {METRICS[name].title: lambda arm, name=name: cell(name, arms[arm]) for name in names}

    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    settings = [f"| `{name} {value}` | {why} |" for name, (value, why) in WORKLOAD.items()]
    parts = [
        f"`{record['command']}` on {record['device']} a process; {versions}; commit {str(record['commit'])[:10]}"
        f"{' with changes' if record['dirty'] else ''}; seeds 0 to {options.seeds - 1}, {options.steps} steps."
        " Each figure is the mean over the seeds ± half their range.",
        "\n".join(["| setting | why |", "| --- | --- |", *settings]),
        "**What is learnt**", markdown(columns(LEARNING), arms),
        "**How far sampler and trainer are apart**", markdown(columns(BACKEND) | {"the probe says": probes.get}, arms),
    ]
    if crashed:
        parts.append("**Crashed**\n\n" + "\n".join(f"- {arm}: {error}" for arm, error in crashed.items()))
    if "parity" in arms:
        base = arms["parity"]
        parts += ["**Each fix left out of parity** (beyond the spread of the seeds)", markdown({
            "shows in": lambda arm: differences(arms[arm], base), "cannot show": LEFT_OUT.get,
        }, [arm for arm in LEFT_OUT if arm in arms])]
    if "reference" in arms:
        base = arms["reference"]
        parts += ["**Against the reference** (distance of the means over the larger range of the seeds)", markdown({
            METRICS[name].title: lambda arm, name=name: distance(name, arms[arm], base) for name in CURVES
        }, [arm for arm in ("parity", "v1-defaults") if arm in arms])]
    return "\n\n".join(parts) + "\n"


def plot(runs: dict[str, list[Path]], path: Path) -> None:
    """ablation.png: the original report's four curves, the mismatch, and what the trainer alone makes of held-out
    problems; lines are means over the seeds, bands their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "clip rate": "clip_rate", "KL new/old, nats": "kl_new_old", "entropy, nats": "entropy", "reward": "reward",
        "mismatch, nats": "mismatch_abs_mean", "held-out reward by the trainer alone": "eval_reward_trainer",
    }
    colors = {"reference": "tab:blue", "v1-defaults": "tab:red", "parity": "tab:green"}
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, (title, name) in zip(axes.flat, panels.items(), strict=True):
        for arm, color in colors.items():
            curves = [curve for curve in (_curve(folder, name) for folder in runs.get(arm, [])) if curve]
            if curves:
                steps = sorted(set.intersection(*map(set, curves)))
                values = [[curve[step] for curve in curves] for step in steps]
                axis.plot(steps, [mean(each) for each in values], color=color, label=arm)
                axis.fill_between(steps, [*map(min, values)], [*map(max, values)], color=color, alpha=0.2, lw=0)
        axis.set(title=title, xlabel="step", yscale="log" if title.startswith(("mismatch", "KL")) else "linear")
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(folder: Path, name: str) -> dict[int, float]:
    """Value by step, where there is one."""
    return {row["step"]: row[name] for row in steps_of(folder) if row.get(name) is not None}


MARKERS = "<!-- ablation.md -->", "<!-- end of ablation.md -->"


def around_markers(path: Path) -> tuple[str, str]:
    """What stands before and after the place for ablation.md. Raises: ValueError if the markers are not there."""
    before, marker, rest = path.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (marker and end):
        raise ValueError(f"readme must hold the lines {' and '.join(MARKERS)}, {path} does not")
    return before, after


def write_readme(path: Path, text: str) -> None:
    before, after = around_markers(path)
    path.write_text(f"{before}{MARKERS[0]}\n\n{text}\n{MARKERS[1]}{after}")


def main() -> int:
    try:
        options = tyro.cli(Options, description=__doc__)
        runs, out = plan(options), Path(options.out)
        (out / "runs").mkdir(parents=True, exist_ok=True)
        if options.readme:
            around_markers(Path(options.readme))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    crashes = execute_all(runs.values(), options.jobs)
    finished = {arm: [runs[arm, seed].folder for seed in range(options.seeds)
                      if runs[arm, seed].folder not in crashes] for arm in options.arms}
    rows = {arm: [measure(folder) for folder in folders] for arm, folders in finished.items() if folders}
    crashed = {run.name: crashes[run.folder] for run in runs.values() if run.folder in crashes}
    if not rows:
        print(f"no run finished; the logs are in {out / 'runs'}")
        return 1
    configs = [json.loads((folders[0] / "config.json").read_text()) for folders in finished.values() if folders]
    config = next((each for each in configs if each["versions"]["vllm"]), configs[0])  # the reference has none
    record = {"command": shlex.join(["python", "-m", "lab.ablate", *sys.argv[1:]])} | {
        name: config[name] for name in ("device", "versions", "commit", "dirty")
    }
    arms = {arm: spreads(each) for arm, each in rows.items()}
    probes = {arm: " / ".join(dict.fromkeys(row["probe"] for row in each)) for arm, each in rows.items()}
    text = report(options, arms, probes, crashed, record)
    (out / "ablation.md").write_text(text)
    listed = {arm: {"options": ARMS[arm], "runs": rows[arm]} for arm in rows}
    (out / "ablation.json").write_text(json.dumps(record | {"arms": listed, "crashed": crashed}, indent=1))
    plot(finished, out / "ablation.png")
    if options.readme:
        write_readme(Path(options.readme), text)
    print(f"\n{text}\n{out}/ablation.md, ablation.json, ablation.png")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
