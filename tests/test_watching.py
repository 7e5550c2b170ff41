"""What one sees of a run while it goes on: curves.png, answers, the time that is left, TensorBoard."""

import sys
from io import TextIOWrapper

import pytest
from helpers import built, config_of, rows

from records import answer_line, log_line
from run import prepare
from train import train

ROW = {"question": "What is 3 + 2?", "response": " 5\nor 6", "reward": 1.0}


def watched(good, out, watch, **options) -> None:
    """A run of a small model that calls `watch` with each row, after the curves are drawn and before TensorBoard."""
    run, state, first_step = built(good, out, eval_problems=4, reward_errors="count", max_new_tokens=6, eval_every=2,
                                   **options)  # fmt: skip
    board = state.tensorboard or (lambda row: None)
    state.tensorboard = lambda row: (watch(row), board(row))
    train(run, state, first_step)


def test_curves_are_drawn_at_each_evaluation_and_the_time_left_ends_at_zero(good, tmp_path, capsys):
    seen, picture = [], tmp_path / "run" / "curves.png"
    watched(good, tmp_path / "run", lambda row: seen.append((row, picture.exists() and picture.read_bytes())), steps=5)
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


def test_the_time_left_is_in_seconds_and_then_in_minutes():
    names = "reward response_len trunc_frac flat_frac mismatch_kl clip_rate entropy grad_norm"
    step = {"step": 1} | dict.fromkeys(f"{names} generate_s update_s sync_s".split(), 0.0)
    for seconds, words in ((0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (7300, "121 min")):
        assert f"| {words} left" in log_line(step | {"left_s": seconds}, 9, "off")


def test_a_figure_that_was_not_measured_is_a_dash():
    """A step without a signal has no gradient, and a batch of stale rows alone no clip rate of the backend."""
    names = "reward response_len trunc_frac flat_frac mismatch_kl entropy generate_s update_s sync_s left_s"
    step = {"step": 1, "clip_rate": None, "grad_norm": None} | dict.fromkeys(names.split(), 0.0)
    assert "| clip     - backend     - | entropy 0.00 | gnorm - |" in log_line(step, 9, "off")
    assert "| clip     - backend  2.5% |" in log_line(step | {"backend_clip_rate": 0.025}, 9, "off")


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


# ------------------------------------------------------------------------------------------------ TensorBoard
def test_tensorboard_has_each_figure_and_hides_what_a_resumed_run_repeats(good, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, seen = tmp_path / "run", []
    options = dict(steps=4, checkpoint_every=2, tensorboard=True)
    watched(good, out, seen.append, **options)
    max((out / "checkpoints").iterdir(), key=lambda path: path.name).unlink()
    watched(good, out, seen.append, **options, resume=True)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    final = {row["step"]: row for row in seen}  # steps 3 and 4: of the resumed run
    assert len(seen) == 7
    for name in ("reward", "left_s", "eval_reward"):
        shown = {each.step: each.value for each in events.Scalars(name)}
        expected = {step: row[name] for step, row in final.items() if row.get(name) is not None}
        assert shown == pytest.approx(expected, rel=1e-6), name
        assert len(events.Scalars(name)) == len(shown)  # the first run's steps after the checkpoint are hidden


def test_tensorboard_without_its_package_is_refused_in_one_sentence(good, tmp_path, monkeypatch):
    monkeypatch.setattr("run.find_spec", lambda name: None)
    config = config_of(out=str(tmp_path), model=str(good / "model"), task=str(good / "task.jsonl"), tensorboard=True)
    with pytest.raises(ValueError, match=r"^tensorboard needs the package of this name, .* `pip install tensorboard`$"):
        prepare(config)
