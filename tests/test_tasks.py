"""Tasks: the toys, files and data sets as a user may bring them, and the rewards that compare answers."""

import json
import os
import random
from collections import Counter
from decimal import Decimal

import pytest

from examples.toys import (
    addition,
    digits,
    forget_the_carry,
    share_of_digits,
    toy_tokenizer,
)
from extras.problem_files import last_number, load_task, numeric_match, plain_number
from tasks import Problem, Task, encode, exact_match


# ------------------------------------------------------------------------------------------------ the toys
@pytest.mark.parametrize("toy, sizes", [(addition, (18_000, 2_000)), (digits, (64, 256))])
def test_a_toy_is_right_split_without_overlap_and_decided_by_the_seed(toy, sizes):
    task = toy(0)
    assert (len(task.train), len(task.held_out)) == sizes
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    assert task.train == toy(0).train != toy(1).train
    assert len({p.question for p in task.sample(random.Random(3), 64)}) == 64
    for problem in task.train + task.held_out:
        a, b = problem.question[:-1].split("+")
        if toy is addition:
            assert problem.answer == f"{int(a) + int(b):04}"[::-1]
        else:  # the larger digit at each place
            assert problem.answer == "".join(max(pair) for pair in zip(a, b, strict=True)).rstrip("=")


def test_the_reward_of_digits_is_the_share_of_right_ones():
    problem = Problem("12+03=", "13", "test")
    assert [share_of_digits(problem, r) for r in ("13", "1", "31", "130", "")] == [1, 0.5, 0, 2 / 3, 0]


def test_the_teacher_forgets_the_carry_in_seven_of_ten_answers():
    """What the one of digits teaches is in test_models.py."""
    rng = random.Random(0)
    answers = Counter(forget_the_carry(Problem("", "2360", "347+285"), rng) for _ in range(1000))
    assert answers.keys() == {"2360", "2250"}
    assert 0.65 < answers["2250"] / 1000 < 0.75


# ------------------------------------------------------------------------------------------------ rewards
def test_exact_match():
    responses = "42", " 42\n", "042", "42.", "4 2", ""
    assert [exact_match(Problem("", "42", ""), each) for each in responses] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("answer, response, reward", [
    ("6 * 7 = 42\n#### 42", "6 times 7 is 42.00", 1), ("42", "first 42, then 43", 0), ("1e-05", "that is 0.00001", 1),
    ("42", "", 0),
])  # fmt: skip
def test_numeric_match_compares_last_numbers(answer, response, reward):
    assert numeric_match(Problem("?", answer, ""), response) == reward


PLAIN = {".5": 0.5, "-.5": -0.5, "1e3": 1000, "1,234": 1234, "-$5": -5, "\u2212\u20ac5": -5, "#### -7": -7,
         "-1,200.50": -1200.5, "+5": 5, "48/2 = 24 #### 24": 24}  # fmt: skip
NUMBERS = PLAIN | {
    "50%": 50, r"50 \%": 50, "1E-2.": 0.01, "so $1,200.00 left": 1200, "$-5": -5, r"$\boxed{-\$5}$": -5,
    "x = -3": -3, "7-5=2": 2, "5.": 5, r"\(x = 42\).": 42, "is:**42**": 42, "<<6*7=42>>": 42, "50% of 84 is '42'!": 42,
    "\u662f-42\u5143\u3002": -42, r"\text{so} 5 km": 5, "$$42$$": 42, "1 12": 12, "in 2024 100 came": 100,
}  # fmt: skip
OTHERS = [
    "1/2", "so 3 / 2", "10^5", "10^{5}", r"\frac{3}{2}", r"\sqrt{2}", "\u221a2", "2\u00b2", "2x",
    "12\u202f345", "1_000", "3,14", "2,4", "1,2345", "0,123", "1.2.3", "...42", "12:30", "10-12", "COVID-19",
    "0x1F", "(2)-3", "no idea", "1e99999999999999999999", "9e-99999999999999999999", "1/-2", "5, not 3/2",
    "3\u00f72", "1\u00bc", "5 \u00bd", "5 000", "-12 345", "1 000 000", "10\u201315",
]  # fmt: skip


def test_the_last_number_is_a_plain_one_or_none():
    for text, number in NUMBERS.items():
        assert last_number(text) == Decimal(str(number)), text
        assert (plain_number(text) is not None) == (text in PLAIN), text
    for text in OTHERS:
        assert last_number(text) is plain_number(text) is None, text


def answers(folder, *answers: object) -> str:
    """A file with these answers."""
    path, lines = folder / "task.jsonl", enumerate(answers)
    path.write_text("\n".join(json.dumps({"question": f"{line}", "answer": answer}) for line, answer in lines))
    return str(path)


def test_answers_that_are_no_plain_numbers_are_compared_by_math_verify(tmp_path):
    task = load_task(answers(tmp_path, r"so $\frac{x}{2}$ #### \frac{1}{2}", "1,200", "50%"), 0, limit_s=60)
    half, many, percent = sorted(task.train + task.held_out, key=lambda problem: problem.question)
    for problem, *responses in ((half, "1/2", "is 0.5", r"$\frac{2}{4}$", "3/2", "2", ""),
                                (many, "1,200", "so 1200", "$1200$", "200"), (percent, "50%", r"$50\%$", "0.5", "5")):
        rewards = [task.reward(problem, each) for each in responses]
        assert rewards == [1.0] * 3 + [0.0] * (len(responses) - 3)


@pytest.mark.parametrize("answer", ["12\u202f345", "1_000", "0x1F", "...42", "1 1/2", "1e" + "9" * 20, "Yes", ""])
def test_an_answer_that_math_verify_reads_in_part_is_refused_with_its_line(tmp_path, answer):
    with pytest.raises(ValueError, match=r"line 2 has the answer .* \(pip install math-verify, or write a task file"):
        load_task(answers(tmp_path, 1, answer), 0, limit_s=60)


def test_without_math_verify_only_plain_numbers_are_answers(tmp_path, monkeypatch):
    (tmp_path / "absent.py").write_text("import no_such_module")
    monkeypatch.setattr("extras.problem_files.MATH_ANSWERS", str(tmp_path / "absent.py"))
    assert load_task(answers(tmp_path, 1, "$1,200", "#### -7"), 0).reward is numeric_match
    with pytest.raises(ValueError, match=r"line 3 has the answer '1/2'.*pip install math-verify.*ModuleNotFoundError"):
        load_task(answers(tmp_path, 1, 2, "1/2"), 0)


def test_a_pipe_is_no_task(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ValueError, match="must be a regular file"):
        load_task(str(tmp_path / "pipe.jsonl"), 0)
    with pytest.raises(ValueError, match=r"pipe.py fails \(no answer within 0.5 s"):
        load_task(str(tmp_path / "pipe.py"), 0, limit_s=0.5)


def test_a_chat_template_without_end_is_named():
    tokenizer, problem = toy_tokenizer(), Problem("1+1=", "2", "line 3")
    loop = "{% for _ in range(99999) %}"
    tokenizer.chat_template = loop * 3 + "{% endfor %}" * 3
    with pytest.raises(ValueError, match=r"question of line 3 failed: TimeoutError: no answer within 0.5 s"):
        encode(tokenizer, Task([problem], [], exact_match), limit_s=0.5)


# ------------------------------------------------------------------------------------------------ files
def test_jsonl_is_split_by_question_or_takes_its_held_out_problems_from_a_second_file(tmp_path):
    """40 questions twice, one copy with another solution of the same number and a space: merged before the split."""
    rows = [{"question": f"{i}\u2028+1={end}", "answer": answer.format(i)}
            for end, answer in (("", "{}"), (" ", "so #### {}.0")) for i in range(40)]
    path, held_out = tmp_path / "task.jsonl", tmp_path / "eval.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")  # with a byte-order mark
    task = load_task(str(path), seed=0)
    assert (len(task.train), len(task.held_out), task.num_repeated) == (36, 4, 40)
    assert len({p.question.strip() for p in task.train + task.held_out}) == 40
    held_out.write_text("\n".join(lines[-5:] * 2))
    task = load_task(str(path), 0, str(held_out))
    assert len(task.train) == 35
    assert [{"question": p.question, "answer": p.answer} for p in task.held_out] == rows[-5:]


def test_a_users_file_gives_different_problems_decided_by_the_seed(good):
    task, again, other = (load_task(str(good / "task.py"), seed, limit_s=60) for seed in (0, 0, 1))
    assert (len(task.train), len(task.held_out)) == (54, 6)  # all there are, each once
    assert task.train == again.train != other.train


def test_problems_of_one_family_are_held_out_together(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text("""def sample(rng):
    pair = [rng.randrange(10) for _ in range(2)]
    return "%d + %d" % tuple(pair), str(sum(pair)), str(sorted(pair))
def reward(problem, response):
    return float(response == problem.answer)
""")
    task = load_task(str(path), 0)
    train, held_out = ({problem.family for problem in part} for part in (task.train, task.held_out))
    assert (len(task.train) + len(task.held_out), len(held_out), len(train)) == (100, 6, 49)
    assert not train & held_out


# ------------------------------------------------------------------------------------------------ a hub's dataset
GSM8K = {"question": "Natalia sold 48 clips in April, half as many in May. How many in both?",
         "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"}  # fmt: skip


def dataset(folder, split: str, rows: list[dict]) -> str:
    """As GSM8K lies on the hub: a parquet file for each split."""
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def test_a_dataset_like_gsm8k_is_loaded_with_its_own_test_split(tmp_path):
    rows = [GSM8K | {"question": f"{i}: {GSM8K['question']}"} for i in range(20)]
    folder = dataset(tmp_path / "gsm8k", "train", rows)
    assert (len(load_task(folder, 0).train), len(load_task(folder, 0).held_out)) == (18, 2)
    dataset(tmp_path / "gsm8k", "test", [GSM8K])
    task = load_task(folder, 0)
    assert (len(task.train), len(task.held_out)) == (20, 1)
    assert [task.reward(task.held_out[0], text) for text in ("so 72.", "#### 24", "72 or 24")] == [1, 0, 0]
    assert last_number(GSM8K["answer"]) == 72


def test_a_dataset_without_a_split_train_or_with_other_columns_is_named(tmp_path):
    for split, complaint in (("train", "other, train 1 must be an object"), ("test", "must have a split train")):
        with pytest.raises(ValueError, match=complaint):
            load_task(dataset(tmp_path / split / "other", split, [{"prompt": "1+1", "answer": "2"}] * 3), 0)
