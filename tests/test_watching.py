"""What one sees of a run while it goes on: curves.png, answers, the time that is left."""

from pathlib import Path

import pytest
from helpers import built, rows

from records import answer_line, draw_at_evaluation, log_line
from train import train

ROW = {"question": "What is 3 + 2?", "response": " 5\nor 6", "reward": 1.0}


def test_curves_are_drawn_at_an_evaluation_and_the_time_left_ends_at_zero(good, tmp_path, capsys, monkeypatch):
    drawn = []

    def draw(out: Path, row: dict) -> None:
        draw_at_evaluation(out, row)
        drawn.append((out / "curves.png").exists())

    monkeypatch.setattr("records.draw_at_evaluation", draw)
    out = tmp_path / "run"
    train(*built(good, out, eval_problems=4, max_new_tokens=6, eval_every=2, steps=2))
    assert drawn == [False, False, True]  # by step; the evaluation before the first has no curve
    left = [row["left_s"] for row in rows(out)[1:]]
    assert left[0] > left[1] == 0.0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    greedy = [row for row in rows(out, "samples") if row["mode"] == "greedy"]
    assert shown == [*map(answer_line, greedy[::4])]  # the first of each evaluation


NAMES = "reward response_len trunc_frac flat_frac mismatch_kl clip_rate entropy grad_norm lr generate_s update_s sync_s"
LINES = [  # a step without a signal has no gradient, and a batch of stale rows alone no clip rate of the backend
    ({"left_s": 59.4}, "| 59 s left"), ({"left_s": 59.6}, "| 1 min left"),
    ({"left_s": 0, "left_out": 3}, "left | 3 responses LEFT OUT"),
    ({"reward/right": 0.25, "reward/length": -1}, "| reward 0.000 (right 0.250, length -1.000) | len   0.0 |"),
    ({"eval_reward": 0.5, "eval_reward_left_out": 0, "eval_reward_greedy": None, "eval_reward_greedy_left_out": 8},
     " | eval 0.500 greedy - (8 LEFT OUT) agree -"),
    ({"kl_only_updates": 1}, " | NO SIGNAL in 1 minibatch(es), a step by the KL alone"),
    ({"clip_rate": None, "grad_norm": None, "lr": 1e-3},
     "| clip     - backend     - | entropy 0.00 | gnorm - lr 1.0e-03 |"),
    ({"kl_ref": 0, "kl_ref_max": 40}, " | kl_ref 0.0e+00 max 4.0e+01"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", LINES, ids=str)
def test_the_line_of_a_step(changes, words):
    assert words in log_line({"step": 1} | dict.fromkeys(NAMES.split(), 0.0) | changes, 9, "off")


def test_an_answer_is_one_short_line_that_any_terminal_shows():
    assert answer_line(ROW) == '    "What is 3 + 2?" -> " 5\\nor 6", reward 1'
    long = answer_line(ROW | {"response": "x" * 300})
    assert len(long) < 130
    assert long.endswith('..., reward 1')
    assert "\\ud800" in answer_line(ROW | {"response": "\ud800"})
