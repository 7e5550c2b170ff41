"""What one sees of a run while it goes on: curves.png, answers, the time that is left."""

import json
from itertools import chain

from helpers import built, parametrize, python, rows
from matplotlib.figure import Figure

from report.log import answer_line, log_line
from train import train

ROW = {"question": "What is 3 + 2?", "response": " 5\nor 6", "reward": 1.0}


def test_curves_are_drawn_at_an_evaluation(good, tmp_path, capsys, monkeypatch):
    """Evaluations are before the first step, after each second one, and after the last."""
    drawn, out = [], tmp_path / "run"
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append((figure, path)))
    train(built(good, out, eval_problems=4, max_new_tokens=6, eval_every=2, steps=3, task=str(good / "task.py"),
                group_size=8, temperature=2.0, objective="gspo", num_minibatches=1))  # fmt: skip
    table = rows(out)
    assert ["eval_reward" in row for row in table] == [True, False, True, True]
    assert [path for _, path in drawn] == 2 * [out / "curves.png"]  # that before the first has no curve
    for line in chain(*(axis.lines for axis in drawn[-1][0].axes)):
        name = line.get_label()
        assert line.get_xydata().tolist() == [[row["step"], row[name]] for row in table if row.get(name) is not None]
    said = capsys.readouterr().out.splitlines()
    assert f"writing {out}/policy" in said
    shown = [line for line in said if line.startswith("    ")]
    greedy = [row for row in rows(out, "samples") if row["mode"] == "greedy"]
    assert shown == [*map(answer_line, greedy[::4])]  # the first of each evaluation


MEASURED = json.loads("""{
 "reward": 0.5, "response_len": 12.34, "trunc_frac": 1.0, "flat_frac": 0.5, "clip_rate": 0.01,
 "current_mismatch_abs_mean": 1e-05, "backend_clip_rate": 0.02, "entropy": 0.12, "grad_norm": 0.34, "lr": 0.001,
 "generate_s": 1, "update_s": 2,
 "sync_s": 3, "step_s": 806.7, "kl_ref": 0.0, "kl_ref_max": 40, "groups_in_flight": 3, "staleness_mean": 0.5,
 "staleness_max": 2, "tokens_wasted": 9, "kv_lost": 4, "skipped_updates": 1, "kl_only_updates": 1,
 "overflowed_updates": 2, "rejected_frac": 0.25, "kept_mass": 0.8, "engine_kept_mass": 0.9, "outside_frac": 0.01,
 "reward_errors": 5, "left_out": 6, "eval_reward": 0.7, "eval_reward_left_out": 0, "eval_reward_greedy": 0.9,
 "eval_reward_greedy_left_out": 8, "eval_agree": 1, "eval_reward_trainer_alone": 0.0, "reward/right": 0.25,
 "reward/length": -1}""")
LINE = (
    "| reward 0.500 (right 0.250, length -1.000) | len  12.3 | trunc 100% | flat  50% | mismatch 1.0e-05 | clip "
    " 1.0% backend  2.0% | entropy 0.12 | gnorm 0.34 lr 1.0e-03 | gen 1.00 upd 2.00 sync 3.00 s | 121.0 min left |"
    " kl_ref 0.0e+00 max 4.0e+01 | NO SIGNAL in 1 minibatch(es): flat, masked or rejected rows, no step | NO SIGNAL in"
    " 1 minibatch(es), a step by the KL alone | fp16 OVERFLOW in 2 minibatch(es): scale halved | 5 rewards FAILED | 6"
    " responses LEFT OUT (no reward) | ALL TRUNCATED: raise --max-new-tokens | eval 0.700 greedy 0.900 agree"
    " 1.000 | 8 greedy answers LEFT OUT"
    " | in flight 3 stale 0.50 max 2 | 9 tokens thrown away | 4 kept KV caches LOST to preemption: raise --kv-cache-gib"
    " | 25.0% of tokens rejected | kept mass 0.800 engine 0.900 | 1.00% of tokens outside the trainer's own mask"
    " | trainer alone 0.000"
)  # fmt: skip
LINES = [  # a step without a signal has no gradient, and a batch of stale rows alone no clip rate of the backend
    (MEASURED, LINE), ({"eval_reward": None}, "| eval - greedy - agree -"),
    (dict(reward=None, trunc_frac=0.5, step_s=4), "| reward - | len     - | trunc  50% | flat    - | mismatch "
     "      - | clip     - backend     - | entropy - | gnorm - lr - | gen - upd - sync - s | 0.6 min left"),
]  # fmt: skip


@parametrize("metrics, line", LINES, ids=len)
def test_the_line_of_a_step(good, tmp_path, metrics, line):
    options = dict(inflight_groups=1, reject="token", top_k=2, eval_trainer_alone=True)
    endings = built(good, tmp_path, **options).run.endings
    assert log_line({"step": 0} | metrics, 9, endings) == f"step   0/9 {line}"


def test_an_answer_is_one_short_line():
    assert answer_line(ROW) == '    "What is 3 + 2?" -> " 5\\nor 6", reward 1'
    long = answer_line(ROW | {"response": "x" * 300})
    assert len(long) < 130 and long.endswith('..., reward 1')


def test_a_command_prints_what_the_terminal_cannot_show_as_numbers():
    code = "from report.errors import exit_with_message\nwith exit_with_message(2): print('\\u20ac \\ud800')"
    assert python("-c", code, PYTHONIOENCODING="ascii").stdout == "\\u20ac \\ud800\n"
