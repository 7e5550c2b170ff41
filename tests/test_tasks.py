"""Tasks: the toys, files and data sets as a user may bring them, and the rewards that compare answers."""

import json
import os
import random

import pytest

from examples.toys import (
    addition,
    digits,
    toy_tokenizer,
)
from extras.problem_files import load_task
from tasks import Problem, Task, encode, exact_match


# ------------------------------------------------------------------------------------------------ the toys
@pytest.mark.parametrize("toy, sizes", [(addition, (18_000, 2_000)), (digits, (64, 256))])
def test_a_toy_is_right_split_without_overlap_and_decided_by_the_seed(toy, sizes):
    task = toy(0)
    assert (len(task.train), len(task.held_out)) == sizes
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    assert task.train == toy(0).train != toy(1).train
    assert len({p.question for p in task.sample(random.Random(3), 64, [])}) == 64
    for problem in task.train + task.held_out:
        a, b = problem.question[:-1].split("+")
        if toy is addition:
            assert problem.answer == f"{int(a) + int(b):04}"[::-1]
        else:  # the larger digit at each place
            assert problem.answer == "".join(max(pair) for pair in zip(a, b, strict=True)).rstrip("=")


# ------------------------------------------------------------------------------------------------ rewards
def test_exact_match():
    responses = "42", " 42\n", "042", "42.", "4 2", ""
    assert [exact_match(Problem("", "42", ""), each) for each in responses] == [1, 1, 0, 0, 0, 0]


def test_a_pipe_is_no_task(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(ValueError, match="must be a regular file"):
        load_task(str(tmp_path / "pipe.jsonl"), 0)
    with pytest.raises(ValueError, match=r"pipe.py fails \(no answer within 0.5 s"):
        load_task(str(tmp_path / "pipe.py"), 0, reward_limit_s=0.5)


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
    task = load_task(str(path), 0, eval_task=str(held_out))
    assert len(task.train) == 35
    assert [{"question": p.question, "answer": p.answer} for p in task.held_out] == rows[-5:]


def test_problems_of_one_family_are_held_out_together_and_the_seed_decides_which(loaded):
    text = """def sample(rng):
    pair = [rng.randrange(10) for _ in range(2)]
    return "%d + %d" % tuple(pair), str(sum(pair)), str(sorted(pair))
def reward(problem, response):
    return float(response == problem.answer)
"""
    task, again, other = (loaded(text, seed) for seed in (0, 0, 1))
    train, held_out = ({problem.family for problem in part} for part in (task.train, task.held_out))
    assert (len(task.train) + len(task.held_out), len(held_out), len(train)) == (100, 6, 49)  # all there are, once
    assert not train & held_out
    assert task.train == again.train != other.train


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


