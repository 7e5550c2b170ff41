"""What the pages name exists: links, functions, commands, options. Whether a command works is not shown here."""

import re
import shlex

import tyro
from helpers import ROOT, parametrize, read_json

from engine_adapter import Rollout
from lab import study
from tasks import Problem
from tasks.task_file import TaskFile
from train import Config
from verify import layers

README = ROOT / "README.md"
FOR_READERS = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.ipynb"), *ROOT.glob("dev/*.md"),
               *ROOT.glob("exercises/*.md")]
PAGES = [*ROOT.glob("*.md"), *FOR_READERS, *ROOT.glob("tests/**/*.md")]
CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+", re.M | re.S)  # fenced or indented
PROGRAMS = {"train": Config, "lab.study": study.Options, "verify.layers": layers.Options}
OF_OTHERS = "logprobs-mode", "enable-prefix-caching", "algo.", "vllm.", "ds.", "deps"  # vLLM, OpenRLHF, pip
each_page = parametrize("page", PAGES, ids=lambda page: page.name)


def defines(name, file):
    """Does the file define this function, class, table, or CLASS.METHOD?"""
    text = file.read_text()
    owner, _, last = name.rpartition(".")
    if owner:
        text = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", text, re.S | re.M)[0]
    return bool(re.search(rf"^ *((def|class) )?{last}\b *[(:=]", text, re.M))


def read(page):
    """The text of a page; of a notebook its Markdown cells."""
    if page.suffix == ".md":
        return page.read_text()
    cells = read_json(page)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(page):
    headings = re.findall(r"^#+ (.*)", CODE.sub("", read(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_each_link_names_what_is_there(page):
    for text, target, anchor in re.findall(r"\[([^]]*)\]\((?!https://)([^)#]*)#?([^)]*)\)", CODE.sub("", read(page))):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), anchor
        if text.startswith("`") and file.suffix == ".py":
            assert defines(text.strip("`"), file), f"{text} in {target}"


def test_the_readme_leads_to_each_page():
    assert [page for page in FOR_READERS if f"({page.relative_to(ROOT)})" not in README.read_text()] == []


def test_each_page_that_the_code_names_exists():
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("*.txt"), ROOT / "Makefile", ROOT / "setup.sh"]
    named = re.findall(r"\b(?:docs|dev)/[\w-]+\.(?:md|ipynb)\b", "".join(file.read_text() for file in files))
    assert [page for page in named if not (ROOT / page).exists()] == []


def test_each_test_that_the_table_of_faults_names_exists():
    for row in read_json(study.RECORDS / "vllm-rl.json")["rows"]:
        for file, _, name in (test.partition("::") for test in row["noticed"]["tests"]):
            assert defines(name, ROOT / file), name


@each_page
def test_each_command_exists_and_one_of_ours_is_read_by_its_own_parser(page):
    """Of code blocks and of the text, in one line each, without interpreter and comment."""
    text = read(page)
    blocks = "\n".join(CODE.findall(text)).replace("\\\n", " ")
    lines = re.sub(r"\s{2,}#.*", "", blocks).splitlines() + re.findall(r"`([^`]+)`", CODE.sub("", text))
    for command in lines:
        if not re.match(r" *(\S*python3? (?!3)|make |train\.py -|lab\.study )", command):
            continue
        name, *words = shlex.split(re.sub(r"^ *\S*python3? (-m )?", "", re.sub(r"\bS\b", "0", command)))
        name = name.removesuffix(".py")
        if name == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), command
        elif name in PROGRAMS and "--help" not in words:
            options = tyro.cli(PROGRAMS[name], args=words)
            assert name != "lab.study" or options.print is None or (study.RECORDS / f"{options.study}.json").exists()


@each_page
def test_each_file_and_module_of_ours_exists_or_is_in_the_commit_that_is_named_with_it(page):
    """Also those that no command and no link names. A page that shows a new file begins it with # and its name."""
    rooms = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isalpha())
    form = rf"(?<!# )(?<![\w./-])((?:{rooms})(?:/[\w/]+\.py|\.(?!md)[a-z]\w+))(?![^.]{{0,20}} in commit)"
    for name in re.findall(form, read(page)):
        file = name.removesuffix(".py").replace(".", "/")
        assert (ROOT / file).is_dir() or (ROOT / f"{file}.py").exists(), name


def test_each_option_exists():
    """In a command or in the text: in the help of a program of ours, or in the source of one that needs vLLM."""
    helps = [tyro.extras.get_parser(kind).format_help() for kind in PROGRAMS.values()]
    files = ROOT / "grpo.py", ROOT / "verify" / "parity.py", *ROOT.glob("examples/*.py"), *ROOT.glob("examples/forks/*")
    sources = [file.read_text().replace("_", "-") for file in files]
    flags = re.findall(r"--(?:no-)?([a-z][\w.-]*\w)", " ".join(map(read, PAGES)))
    unknown = {*flags} - {*re.findall(r"[a-z][\w.-]*", " ".join(helps + sources))}
    assert [flag for flag in unknown if not flag.startswith(OF_OTHERS)] == []


def test_the_examples_of_an_own_job_run(tmp_path):
    """A task file that draws, a reward for rows, and a task file for whole groups."""
    files, text = {}, read(README) + read(ROOT / "docs" / "run.md")
    for name, code in re.findall(r"```python\n# (\w+)\.py(.*?)```", text, re.S):
        path = tmp_path / f"{name}.py"
        path.write_text(code.partition("\n")[2])
        files[name] = TaskFile(str(path), 0, 60)
    problem = Problem(*files["sorting"].sample(), "")
    answer, sorting, mine = problem.answer, files["sorting"].reward, files["mine"].reward
    assert sorted(answer) == [*answer]
    assert [sorting(problem, response) for response in (f"It is {answer}.", "hgfedcba", "")] == [1, 0, 0]
    assert [mine(problem, response) for response in ("", answer)] == [None, {"right": 1.0, "length": -0.006}]
    problem = Problem(*files["six"].problems()[7], "")
    rollouts = [Rollout([1], 0, [5] * 4), Rollout([1], 0, [5])]
    assert files["six"].rewards(problem, [problem.answer, "no"], rollouts) == [0.25, 0.0]
