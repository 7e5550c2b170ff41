"""Each extra can be taken away, and no core file has a word of one."""

import ast
import re
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
from helpers import ROOT, bare_run, command, config_of, copied, parametrize, python, timeless, value_error

import extras
from extras import transformers_engine
from train import Config

CORE = ("train", "rl", "objectives", "engine_adapter")
OPTIONS = {group.name: {option.name for option in fields(group.default_factory)} for group in fields(extras.Options)}

# In processes forked from one that has imported what takes time: without each file a line of option names, the other
# programs' help, and a step.
WITHOUT_EACH = """
import contextlib, os, sys
import matplotlib.pyplot, torch, tyro
from transformers import AutoTokenizer, Qwen2ForCausalLM
sys.path.insert(0, ".")
for name in sys.argv[1:]:
    path = "extras/" + name + ".py"
    os.rename(path, "away")
    if os.fork() == 0:
        import exercises.functions, lab.study, train, verify.layers
        train.draw_at_evaluation = lambda *_: None  # a picture takes longer than the step
        tyro.extras.get_parser(train.Config).format_help()
        print(*train.Config().flat(), flush=True)
        sys.stdout = sys.stderr
        for main, words in (verify.layers.main, ["--help"]), (lab.study.main, ["own", "--help"]):
            sys.argv = ["program", *words]
            with contextlib.suppress(SystemExit):
                main(words)
        if name != "transformers_engine":
            train.main((os.environ["JOB"] + name).split())
        os._exit(0)
    assert os.wait()[1] == 0, name
    os.rename("away", path)
"""


def test_without_the_file_of_an_extra_the_programs_have_none_of_its_options_and_the_job_runs(good, tmp_path):
    folder = copied(tmp_path / "copy")
    shutil.copytree(ROOT / "exercises", folder / "exercises")
    job = " ".join(command(good, "--engine transformers --steps 1 --eval-problems 2 --out run/"))
    found = python("-c", WITHOUT_EACH, *OPTIONS, folder=folder, JOB=job).stdout.splitlines()
    everything = {*Config().flat()}
    for (name, options), line in zip(OPTIONS.items(), found, strict=True):
        assert everything - {*line.split()} == options, name


@pytest.mark.engine
def test_the_core_runs_alone_and_computes_what_it_computes_with_all_extras(tmp_path):
    """Three steps of the default job, row by row: only an extra computes a prompt once for its group."""
    of_extras = {path.name for path in ROOT.glob("extras/*.py")} - {"__init__.py"}
    alone = copied(tmp_path / "copy", "examples", "shared", "grpo.py", *of_extras)
    for folder, more in (alone, ""), (copied(tmp_path / "whole"), "--no-prompts-once"):
        job = f"train.py --steps 3 --num-prompts 16 --eval-problems 8 --out run {more}"
        python(*job.split(), folder=folder)
    assert timeless(alone / "run") == timeless(tmp_path / "whole" / "run")
    assert len(timeless(alone / "run")) == 4


@parametrize("name", CORE)
def test_no_core_file_has_a_word_of_an_extra(name):
    """The name of a file or an option. `engine` is also the engine, `sampling_mask` a fix, `stop` a reason."""
    words = set(OPTIONS).union(*OPTIONS.values()) - {"engine", "sampling_mask", "stop"}
    used = {value for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))
            for field in ("id", "attr", "arg", "name", "value", "module")
            if isinstance(value := getattr(node, field, None), str)}
    assert used & words == set()


def test_the_option_of_the_page_is_one_file(good, tmp_path):
    """It says its rule, and prints what it promises."""
    page = (ROOT / "docs" / "fork.md").read_text()
    folder = copied(tmp_path / "copy")
    (folder / "extras" / "show_responses.py").write_text(re.search(r"```python\n(# extras/show_.*?)```", page, re.S)[1])
    job = *command(good, "--engine transformers --steps 1 --eval-problems 2 --out run"), "--show-responses"
    said = python("train.py", *job, 9, folder=folder, status=2).stderr
    assert "must be 0 to num_prompts * group_size, got 9" in " ".join(said.replace("│", " ").split())
    before = python("train.py", *job, 2, folder=folder).stdout.partition("writing")[0]
    assert re.search(r"\n[\d+=]+\n[\d+=]+\n.*$", before)


def test_a_rule_for_the_transformers_engine_names_options_that_exist():
    """A misspelt name would be a rule that never acts. For other rules: test_bad_input.py."""
    assert {*Config().flat()} >= transformers_engine.OF_VLLM


WRONG_FILES = {
    "no class": "def install(run, options, parts): pass",
    "a hook outside": "from extras import Extra\nclass Options(Extra): mine: int = 0\ndef install(self, run): pass",
    "two classes": "from extras import Extra\nclass One(Extra): pass\nclass Two(Extra): pass",
}


def test_what_an_extra_does_in_vain_is_an_error(tmp_path):
    """A file without a class of its own, a hook under another name, a part that is none or has two owners."""
    folder = copied(tmp_path / "copy")
    for code in WRONG_FILES.values():
        (folder / "extras" / "tracker.py").write_text(code)
        said = python("-c", "import extras", folder=folder, status=1).stderr
        assert said.startswith(f"error: {folder}/extras/tracker.py must have one class of") and said.count("\n") == 1
    for name in ("instal", "_install", "__postinit__"):
        with pytest.raises(SystemExit, match=f"{name} of mine is no hook"):
            type("Options", (extras.Extra,), {name: lambda self, run: None, "__module__": "mine"})
    with pytest.raises(SystemExit, match="may_change of mine must be a tuple of its own options, got m"):
        type("Options", (extras.Extra,), {"may_change": "mm", "__module__": "mine"})
    silent = SimpleNamespace(extra=SimpleNamespace(mine=SimpleNamespace(install=lambda run: run)))
    with pytest.raises(TypeError, match=r"install of extras\.mine must return nothing"):
        extras.call("install", silent, "a run")
    run = bare_run(config_of())
    run.source, run.policy["metrics"] = "one option's", ()
    for _ in range(2):  # as two options that each wrap it
        run.advantages = lambda *values, inner=run.advantages: inner(*values)
    run.policy |= {"temperature": 1.0}
    for name, said in ("sources", "sources is no part of a run"), ("source", "two options"), ("policy", "two options"):
        with value_error(said):
            setattr(run, name, [])
