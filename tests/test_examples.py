"""An example of a task file: countdown's reward for right, wrong and hostile text."""

import re
import time

from helpers import ROOT, parametrize, task_of

from examples.countdown import reward
from tasks import Problem

# An answer => right responses, or =/= wrong ones. The first: another number, one that is not used, one that is used
# twice, another value. The last two: a limit.
RESPONSES = f"""\
3 4 25 = 100 =/= <answer>(25 - 3) * 4 + 12</answer> ~ <answer>25 * 4</answer> ~ <answer>25*4*3/3</answer>
3 4 25 = 100 =/= <answer>25*(3+4)</answer> ~ <answer>25*4**3</answer> ~ <answer>25//3*4</answer> ~ 100
3 4 25 = 100 =/=  ~ <answer>25*4+(3</answer> ~ <answer>3/0+25*4</answer> ~ <answer>(3)(4)+25</answer>
3 4 25 = 100 =/= <answer>__import__('os').getcwd()</answer>
2 4 5 = 10 => 4*5/2 ~ <answer>5*4/⏎2</answer> ~ <answer>5×4÷2</answer>
2 4 5 = 10 => I think <answer>1</answer> no, <answer> 5*(4/2) </answer>
2 4 5 = -18 => <answer>-(4*5-2)</answer>
1 3 3 = 1 => 1/3*3
2 3 8 = 3 => 8-3-2
7 = -7 => {"-" * 199}7
7 = 7 =/= {"-" * 200}7"""  # noqa: RUF001


@parametrize("line", RESPONSES.split("\n"), ids=lambda line: line[:20])
def test_a_reward_is_for_the_value_with_each_number_once(line):
    answer, sign, responses = re.split(" (=>|=/=) ", line.replace("⏎", "\n"))
    for response in responses.split(" ~ "):
        assert reward(Problem("", answer, "test"), response) == (sign == "=>"), response


@parametrize("text", [
    "(" * 10_000, "9" * 1_000_000, "1+" * 50_000 + "1", "<answer>" * 20_000, "**".join("9" * 60), "9(" * 60,
])  # fmt: skip
def test_hostile_text_takes_no_time(text):
    problem, started = Problem("", "3 4 25 = 100", "test"), time.process_time()
    assert reward(problem, text) == reward(problem, f"<answer>{text}</answer>") == 0.0
    assert time.process_time() - started < 10  # a search without limits takes hours


def test_it_is_a_task_file(monkeypatch):
    monkeypatch.setattr("tasks.problem_files.drawn", lambda file: [file.sample() for _ in range(20)])
    task = task_of(ROOT / "examples" / "countdown.py")
    assert (len(task.train), len(task.held_out)) == (18, 2)
    assert task.reward(task.train[0], "") == 0.0

