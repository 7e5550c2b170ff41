"""What one sees of a run while it goes on: curves.png, answers, the time that is left."""

import sys
from io import TextIOWrapper
from pathlib import Path

import pytest
from helpers import built, rows

from records import answer_line, draw_at_evaluation, log_line
from train import train

ROW = {"question": "What is 3 + 2?", "response": " 5\nor 6", "reward": 1.0}


def test_curves_are_drawn_at_each_evaluation_and_the_time_left_ends_at_zero(good, tmp_path, capsys, monkeypatch):
    seen, picture = [], tmp_path / "run" / "curves.png"

    def draw(out: Path, row: dict) -> None:
        draw_at_evaluation(out, row)
        seen.append((row, picture.exists() and picture.read_bytes()))

    monkeypatch.setattr("records.draw_at_evaluation", draw)
    train(*built(good, tmp_path / "run", eval_problems=4, reward_errors="leave-out", max_new_tokens=6, eval_every=2,
                 steps=5))
    watched_rows, pictures = zip(*seen, strict=True)
    assert [row["step"] for row in watched_rows] == [0, 1, 2, 3, 4, 5]
    assert pictures[:2] == (False, False)
    assert pictures[2] == pictures[3]
    assert len({*pictures[2:]}) == 3  # of the steps 2, 4 and 5
    left = [row["left_s"] for row in watched_rows[1:]]
    assert left[0] > watched_rows[1]["step_s"] * 3  # four steps are left, and none takes no time
    assert left[-1] == 0.0
    assert rows(tmp_path / "run") == list(watched_rows)
    printed = capsys.readouterr().out.splitlines()
    answers = rows(tmp_path / "run", "samples")
    first = [row for row in answers if row["mode"] == "greedy"][::4]  # of four evaluations: steps 0, 2, 4, 5
    assert [line for line in printed if line.startswith("    ")] == [*map(answer_line, first)]


NAMES = "reward response_len trunc_frac flat_frac mismatch_kl clip_rate entropy grad_norm lr generate_s update_s sync_s"
LINES = [  # a step without a signal has no gradient, and a batch of stale rows alone no clip rate of the backend
    ({"left_s": 0}, "| 0 s left"), ({"left_s": 59.4}, "| 59 s left"), ({"left_s": 59.6}, "| 1 min left"),
    ({"left_s": 7300}, "| 121 min left"), ({"left_s": 0, "left_out": 3}, "left | 3 responses LEFT OUT"),
    ({"clip_rate": None, "grad_norm": None, "lr": 1e-3},
     "| clip     - backend     - | entropy 0.00 | gnorm - lr 1.0e-03 |"),
    ({"clip_rate": None, "backend_clip_rate": 0.025}, "| clip     - backend  2.5% |"),
    ({"kl_ref": 0, "kl_ref_max": 40}, " | kl_ref 0.0e+00 max 4.0e+01"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", LINES, ids=str)
def test_the_line_of_a_step(changes, words):
    step = {"step": 1} | dict.fromkeys(NAMES.split(), 0.0)
    assert words in log_line(step | changes, 9, "off")
    assert "kl_ref" not in log_line(step, 9, "off")


def test_an_answer_is_one_short_line_that_any_terminal_shows(tmp_path, monkeypatch):
    assert answer_line(ROW) == '    "What is 3 + 2?" -> " 5\\nor 6", reward 1'
    long = answer_line(ROW | {"response": "x" * 300})
    assert len(long) < 130
    assert long.endswith('..., reward 1')
    assert "\\ud800" in answer_line(ROW | {"response": "\ud800"})
    assert "日本" in answer_line(ROW | {"response": "日本"})
    monkeypatch.setattr(sys, "stdout", TextIOWrapper((tmp_path / "terminal").open("wb"), encoding="ascii"))
    print(answer_line(ROW | {"response": "日本"}), flush=True)
    assert b"\\u65e5" in (tmp_path / "terminal").read_bytes()
