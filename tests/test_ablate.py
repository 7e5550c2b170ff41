"""The ladder: its runs are real commands on a small model; its report is checked on the recorded ladder in docs/."""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import qwen2, refusal

from examples.toys import toy_tokenizer
from lab import bench
from lab.ablate import (
    ARMS,
    LEFT_OUT,
    MARKERS,
    METRICS,
    REFERENCES,
    V1,
    Metric,
    Options,
    cell,
    commands_of,
    differences,
    distances,
    execute,
    execute_all,
    first_outside,
    folders_of,
    main,
    spreads,
    write_page,
)
from records import plot

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small(tmp_path) -> tuple[str, ...]:
    """Options that replace the workload by a tiny model and 12 short problems."""
    folder, task = tmp_path / "model", tmp_path / "task.jsonl"
    qwen2(tied=False).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    task.write_text("\n".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) for n in range(12)))
    size = "--num-prompts 4 --group-size 4 --inflight-groups 2 --eval-problems 2 --lr 1e-3 --dtype float32"
    return f"--train-args=--model {folder} --task {task} {size}", "--steps", "2", "--seeds", "1"


@pytest.mark.engine
def test_a_crashed_run_is_reported_and_a_second_call_repeats_only_that_run(tmp_path, small, capsys):
    out = tmp_path / "ablation"
    (out / "runs").mkdir(parents=True)
    (out / "runs" / "reference-seed0").touch()  # a file where the folder of this run should be
    command = ["--out", str(out), "--arms", "v1-defaults", "reference", *small]
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "[2/2] reference-seed0: CRASHED, exit status 2: error: out must be a writable folder" in printed
    assert set(json.loads((out / "ablation.json").read_text())["arms"]) == {"v1-defaults"}
    assert "**Crashed**" in (out / "ablation.md").read_text()

    stamp = (out / "runs" / "v1-defaults-seed0" / "metrics.jsonl").stat().st_mtime_ns
    (out / "runs" / "reference-seed0").unlink()
    assert main(command) == 0
    assert (out / "runs" / "v1-defaults-seed0" / "metrics.jsonl").stat().st_mtime_ns == stamp
    result, text = json.loads((out / "ablation.json").read_text()), (out / "ablation.md").read_text()
    for name in ("probe_first", "probe"):  # after the first step and the last
        assert "raw log-probabilities" in result["arms"]["v1-defaults"]["runs"][0][name]
        assert result["arms"]["reference"]["runs"][0][name] == "parity"
    probes = sorted(path.stem for path in (out / "runs" / "v1-defaults-seed0").glob("probe/*.json"))
    assert probes == ["step_000001", "step_000002"]
    assert "| reference | " in text
    assert "**Crashed**" not in text
    assert result["device"] in text
    assert result["versions"]["vllm"] in text
    assert (out / "ablation.png").stat().st_size > 10_000


def test_render_writes_the_page_of_the_recorded_ladder_without_a_run(tmp_path, capsys):
    shutil.copy(ROOT / "docs" / "ablation.json", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n")
    assert main(["--out", str(tmp_path), "--render", "--page", str(page)]) == 0
    text = (tmp_path / "ablation.md").read_text()
    assert page.read_text() == f"before\n{MARKERS[0]}\n\n{text}\n{MARKERS[1]}\nafter\n"
    assert text in capsys.readouterr().out
    recorded = json.loads((tmp_path / "ablation.json").read_text())["arms"]
    assert all(f"| {arm} | " in text for arm in recorded)
    alone = text.split("**Each fix switched off alone**")[1].split("**Difference")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in alone if line.startswith(("| parity-", "| top-p-"))]
    assert [(arm, whole) for arm, _, whole, _ in cells] == list(LEFT_OUT.items())


@pytest.mark.parametrize("option, complaint", [
    ("--arms v2", "invalid choice 'v2'"), ("--seeds 0", "seeds must be at least 1"),
    ("--page none.md", "none.md"),
    ("--train-args=--seed=3", "must not contain --seed"), ("--train-args='", "No closing quotation"),
])  # fmt: skip
def test_bad_options_are_refused_in_a_sentence(tmp_path, option, complaint, capsys):
    assert complaint in refusal(["--out", str(tmp_path), *option.split()], capsys, main)


def test_a_run_is_probed_after_its_first_step_and_its_last_or_not_at_all():
    (with_probe,) = commands_of(Options(arms=("parity",), seeds=1, steps=7)).values()
    (without,) = commands_of(Options(arms=("parity",), seeds=1, steps=7, probe=False)).values()
    place = with_probe.index("--probe-every")
    assert with_probe[place + 1] == "6"
    assert [*with_probe[:place], *with_probe[place + 2 :]] == without


def test_the_ladder_adds_one_fix_at_a_time_and_ends_at_parity():
    ladder = ("v1-defaults", "+processed", "+runtime", "+inflight", "parity")
    switched_off = [set(ARMS[arm]) for arm in ladder]
    assert [len(flags) for flags in switched_off] == [4, 3, 2, 1, 0]
    assert all(fewer < more for more, fewer in pairwise(switched_off))
    alone = {arm: set(ARMS[arm]) - set(ARMS[whole]) for arm, whole in LEFT_OUT.items()}
    assert [{flag} for flag in V1] == [flags for arm, flags in alone.items() if arm.startswith("parity-minus")]
    assert alone["parity-recompute"] > alone["parity-minus-inflight"]
    assert alone["parity-16-bit-heads"] > alone["parity-minus-fp32-head"]
    assert all(flags == {"--parity.no-sampling-mask"} for arm, flags in alone.items() if arm.startswith("top-p"))
    for arm, reference in REFERENCES.items():  # of the same mask
        assert ("--top-p" in ARMS[arm]) == ("--top-p" in ARMS[reference])


def test_differences_need_a_distance_above_the_seed_range_and_no_overlap():
    base = {"ess": (1.0, 1.1, 1.2)}
    assert distances({"ess": (2.0, 2.1, 2.2)}, base) == {"ess": pytest.approx(5.0)}
    assert differences({"ess": (2.0, 2.1, 2.2)}, base) == ["ESS: 2.10 (1.10; 1.9 times, 5 seed ranges)"]
    assert differences({"ess": (1.15, 1.9, 2.0)}, base) == []  # the values overlap
    assert differences({"ess": (1.22, 1.27, 1.32)}, base) == []  # the means differ by less than the seed range
    none = {"wasted": (0.0, 0.0)}
    assert differences({"wasted": (9.0, 11.0)}, none) == ["wasted tokens: 10 (0; 5 seed ranges)"]
    assert distances({"ess": (9.0,)}, base) == {}  # one seed has no range


def test_a_curve_is_outside_from_the_first_of_three_steps(tmp_path):
    def runs(name: str, *curves: list[float | None]) -> list[Path]:
        folders = [tmp_path / f"{name}{seed}" for seed in range(len(curves))]
        for folder, curve in zip(folders, curves, strict=True):
            folder.mkdir()
            steps = [{"step": 0}, *({"step": step, "kl": value} for step, value in enumerate(curve, 1))]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
        return folders

    base = runs("base", [0.0] * 8, [1.0] * 8)
    late = runs("late", [2.2, 0.0, 2.2, None, 2.2, 2.2, 2.2, 0.0], [2.1, 0.0, 2.2, 9.0, 2.1, 2.2, 2.1, 0.0])
    assert first_outside(late, base, "kl") == 3  # 3, 5 and 6: a step without a value is passed over
    near = runs("near", [1.9] * 8, [1.95] * 8)  # 0.9 above, less than the reference's range
    assert first_outside(near, base, "kl") is None
    assert first_outside(base, base, "kl") is None


def test_metrics_skip_steps_without_a_value():
    assert Metric("", "", "kl", max).measure([{"kl": 1.0}, {}, {"kl": None}, {"kl": 3.0}]) == 3.0
    assert Metric("", "", "kl").measure([{}]) is None
    assert METRICS["reward"].measure([{"reward": float(step)} for step in range(10)]) == 7.0  # of steps 5 to 9
    assert METRICS["clip_early"].measure([{"clip_rate": float(step)} for step in range(20)]) == 4.5  # of steps 0 to 9
    assert METRICS["eval_true"].measure([{"eval_reward": 0.9, "eval_reward_trainer": 0.0}]) == 0.0
    assert spreads([{**dict.fromkeys(METRICS), "ess": 1.0}, {**dict.fromkeys(METRICS), "ess": 2.0}]) == {"ess": (1, 2)}
    assert cell("reward", {"reward": (0.5,)}) == "0.50, one seed"
    assert cell("reward", {"reward": (0.4, 0.6, 0.5)}) == "0.50 ± 0.10"
    assert cell("mismatch", {"mismatch": (0.0, 0.0)}) == "0 ± 0"


@pytest.mark.filterwarnings("error")
def test_a_log_panel_shows_a_mismatch_of_exactly_0(tmp_path):
    for name, values in (("exact", (0.0, 0.0)), ("parity", (1e-3, 1e-2))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "mismatch": value}) for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    both = {name: ([tmp_path / name], "mismatch") for name in ("exact", "parity")}
    shown = [{"exact": both["exact"]}, {"parity": both["parity"]}, both, both, both, both]
    drawn = plot({f"{index} (log)": lines for index, lines in enumerate(shown)}, tmp_path / "p.png")
    assert [axis.get_yscale() for axis in drawn.axes] == ["linear", *5 * ["symlog"]]
    assert drawn.axes[2].get_ylim()[0] <= 0 < drawn.axes[1].get_ylim()[0]


def test_arms_with_equal_options_share_a_run(tmp_path):
    options = Options(out=str(tmp_path), arms=("+inflight", "parity-minus-fp32-head"), seeds=1)
    (shared,), (same,) = (folders_of(arm, options) for arm in options.arms)
    assert shared == same
    assert [*commands_of(options)] == [shared]
    tmp_path.joinpath("runs").mkdir()
    assert execute_all({shared: ["sh", "-c", "echo once; exit 3"]}, 2) == {shared: "exit status 3: once"}


def test_an_interrupted_run_never_counts_as_finished(tmp_path):
    folder = tmp_path / "v1-0.18-arm-seed0"  # the dot begins no suffix
    finishes = [sys.executable, "-c", f"import os; os.makedirs({str(folder)!r})"]
    dies = [sys.executable, "-c", "import sys; sys.exit('died')"]
    assert execute(folder, finishes) is None
    marker = folder / "marker"
    marker.touch()
    assert execute(folder, finishes) is None
    assert marker.exists()  # not run again
    assert execute(folder, dies) == "exit status 1: died"
    assert not marker.exists()
    assert execute(folder, finishes) is None
    assert folder.exists()  # run again, although the same options had finished earlier
    assert sorted(path.name.removeprefix(folder.name) for path in tmp_path.iterdir()) == ["", ".json", ".log"]


def test_a_page_without_both_markers_is_refused(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"{MARKERS[1]}\n{MARKERS[0]}\n")
    with pytest.raises(ValueError, match="page must hold the lines"):
        write_page(path, "new")


@pytest.mark.engine
def test_the_benchmark_of_engines_takes_turns_over_processes(good, capsys):
    small = dict(model=str(good / "model"), task=str(good / "task.py"), num_prompts=2, group_size=2, max_new_tokens=4)
    engines = {name: small | dict(engine="transformers") for name in ("one", "other")}
    bench.shared(bench.Options(rounds=2), engines)
    *_, one, other = capsys.readouterr().out.strip().splitlines()
    assert one.startswith("| one | ")
    assert " | 1.000 (1.000 to 1.000) | " in one
    assert other.count("|") == one.count("|") == 9
