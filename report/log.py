"""The line of a step, and an answer in one line."""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from report.errors import one_line

STEP = (
    " | reward {reward:.3f}{terms} | len {response_len:5.1f} | trunc {trunc_frac:4.0%}"
    " | flat {flat_frac:4.0%} | mismatch {current_mismatch_abs_mean:7.1e} | clip {clip_rate:5.1%}"
    " backend {backend_clip_rate:5.1%} | entropy {entropy:.2f} | gnorm {grad_norm:.2f} lr {lr:.1e}"
    " | gen {generate_s:.2f} upd {update_s:.2f} sync {sync_s:.2f} s | {left:.1f} min left")
# What the line also says if a step has this figure. A count of 0 is not said.
ENDINGS = {
    "kl_ref": " | kl_ref {kl_ref:.1e} max {kl_ref_max:.1e}",
    "skipped_updates": " | NO SIGNAL in {skipped_updates} minibatch(es): flat, masked or rejected"
                       " rows, no step",
    "kl_only_updates": " | NO SIGNAL in {kl_only_updates} minibatch(es), a step by the KL alone",
    "overflowed_updates": " | fp16 OVERFLOW in {overflowed_updates} minibatch(es): scale halved",
    "reward_errors": " | {reward_errors} rewards FAILED",
    "left_out": " | {left_out} responses LEFT OUT (no reward)",
    "all_truncated": " | ALL TRUNCATED: raise --max-new-tokens",
    "eval_reward": " | eval {eval_reward:.3f} greedy {eval_reward_greedy:.3f} agree"
                   " {eval_agree:.3f}",
    "eval_reward_left_out": " | {eval_reward_left_out} sampled answers LEFT OUT",
    "eval_reward_greedy_left_out": " | {eval_reward_greedy_left_out} greedy answers LEFT OUT",
}  # fmt: skip


class Missing:
    """A figure that is None or not there: a dash of its width."""

    def __format__(self, form: str) -> str:
        return "-".rjust(int(form.partition(".")[0] or 1))


def log_line(figures: dict[str, Any], steps: int, endings: dict[str, str]) -> str:
    """One line per step in fixed columns; a degenerate batch and an evaluation are named after.

    `endings`: further ones, of extras.
    """
    terms = ", ".join(f"{name.removeprefix('reward/')} {value:.3f}"
                      for name, value in figures.items() if name.startswith("reward/"))
    left = figures.get("step_s", 0.0) * (steps - figures["step"]) / 60
    figures = figures | {"terms": terms and f" ({terms})", "left": left, "steps": steps,
                         "all_truncated": figures.get("trunc_frac") == 1}
    line = "step {step:>3}/{steps}"
    if "reward" in figures:
        line += STEP
    for name, sentence in (ENDINGS | endings).items():
        if name in figures and (figures[name] or not isinstance(figures[name], int)):
            line += sentence
    known = {name: value for name, value in figures.items() if value is not None}
    return line.format_map(defaultdict(Missing, known))


def log(run: Any, figures: dict[str, Any]) -> None:
    """One line to the terminal, and the reports."""
    print(log_line(figures, run.config.steps, run.endings))
    call_reports(run.reports, figures)


def call_reports(functions: list[Callable], *arguments: Any) -> None:
    """Call each. What only reports ends no run: one that fails is named, and not called again."""
    for function in [*functions]:
        try:
            function(*arguments)
        except (Exception, SystemExit) as error:
            functions.remove(function)
            module = getattr(function, "func", function).__module__
            print(f"notice: {module} failed and the run goes on without it: {one_line(error)}")


def settings_lines(trainer: dict[str, Any], engine: dict[str, Any]) -> str:
    """What is in force on both sides."""
    sides = {"trainer": trainer, "engine": engine}
    return "\n".join(f"{side}: {', '.join(f'{name} {value}' for name, value in settings.items())}"
                     for side, settings in sides.items())


def shown(text: str, head: int = 300, tail: int = 300) -> str:
    """A text as JSON in one line, with the middle left out."""
    text = json.dumps(text, ensure_ascii=False)
    if len(text) > head + tail + 3:
        text = f"{text[:head]}...{text[len(text) - tail :]}"
    return text


def answer_line(row: dict[str, Any]) -> str:
    """An answer of an evaluation, a row of samples.jsonl, in one line."""
    texts = [shown(row[name], 77, 0) for name in ("question", "response")]
    reward = "left out" if row["reward"] is None else f"reward {row['reward']:g}"
    return f"    {' -> '.join(texts)}, {reward}"
