"""The line of a step, and an answer in one line."""

import json
from typing import Any

from report.errors import escaped

# What a step's line also says, if this figure is there and not 0. The counts of tokens_wasted and
# kv_lost are from the start of the run.
ENDINGS = {
    "groups_in_flight":
        "in flight {groups_in_flight} stale {staleness_mean:.2f} max {staleness_max}",
    "tokens_wasted": "{tokens_wasted} tokens thrown away",
    "kv_lost": "{kv_lost} kept KV caches LOST to preemption: raise --kv-cache-gib",
    "skipped_updates":
        "NO SIGNAL in {skipped_updates} minibatch(es): flat, masked or rejected rows, no step",
    "kl_only_updates": "NO SIGNAL in {kl_only_updates} minibatch(es), a step by the KL alone",
    "overflowed_updates": "fp16 OVERFLOW in {overflowed_updates} minibatch(es): scale halved",
    "rejected_frac": "{rejected_frac:.1%} of tokens rejected by {reject}",
    "engine_kept_mass": "kept mass {kept_mass:.3f} engine {engine_kept_mass:.3f}",
    "outside_frac": "{outside_frac:.2%} of tokens outside the trainer's own mask",
    "reward_errors": "{reward_errors} rewards FAILED",
    "left_out": "{left_out} responses LEFT OUT (no reward)",
}


def log_line(metrics: dict[str, Any], steps: int, reject: str) -> str:
    """One line per step in fixed columns; a degenerate batch and an evaluation are named after.

    `reject`: the rule of --reject.
    """
    get = metrics.get

    def of(name: str, form: str) -> str:
        """The figure in this format, or a dash of its width if it was not measured; then the number
        of responses that it leaves out, if there are any.
        """
        left_out = get(f"{name}_left_out")
        text = "-".rjust(int(form.partition(".")[0] or 1))
        if get(name) is not None:
            text = format(get(name), form)
        return f"{text} ({left_out} LEFT OUT)" if left_out else text

    line = f"step {metrics['step']:>3}/{steps}"
    if "reward" in metrics:
        minutes, seconds = divmod(round(metrics.get("left_s", 0)), 60)
        left = f"{minutes} min" if minutes else f"{seconds} s"
        parts = ", ".join(f"{name.removeprefix('reward/')} {value:.3f}"
                          for name, value in metrics.items() if name.startswith("reward/"))
        line += (
            f" | reward {of('reward', '.3f')}{escaped(parts and f' ({parts})')}"
            f" | len {of('response_len', '5.1f')}"
            f" | trunc {of('trunc_frac', '4.0%')} | flat {of('flat_frac', '4.0%')}"
            f" | mismatch_kl {of('mismatch_kl', '8.1e')} | clip {of('clip_rate', '5.1%')}"
            f" backend {of('backend_clip_rate', '5.1%')} | entropy {of('entropy', '.2f')}"
            f" | gnorm {of('grad_norm', '.2f')} lr {of('lr', '.1e')}"
            f" | gen {of('generate_s', '.2f')} upd {of('update_s', '.2f')}"
            f" sync {of('sync_s', '.2f')} s | {left} left")
    if "kl_ref" in metrics:
        line += f" | kl_ref {of('kl_ref', '.1e')} max {of('kl_ref_max', '.1e')}"
    figures = metrics | {"reject": reject}
    line += "".join(f" | {said.format_map(figures)}" for name, said in ENDINGS.items() if get(name))
    if get("trunc_frac") == 1:
        line += " | ALL TRUNCATED: raise --max-new-tokens"
    if "eval_reward" in metrics:
        line += (f" | eval {of('eval_reward', '.3f')} greedy {of('eval_reward_greedy', '.3f')}"
                 f" agree {of('eval_agree', '.3f')}")
    if "eval_reward_trainer_alone" in metrics:
        line += f" (trainer alone {of('eval_reward_trainer_alone', '.3f')})"
    return line


def shown(text: str, head: int = 300, tail: int = 300) -> str:
    """A text as JSON in one line that the terminal can print, with the middle left out."""
    text = json.dumps(text, ensure_ascii=False)
    if len(text) > head + tail + 3:
        text = f"{text[:head]}...{text[len(text) - tail :]}"
    return escaped(text)


def answer_line(row: dict[str, Any]) -> str:
    """An answer of an evaluation, a row of samples.jsonl, in one line."""
    texts = [shown(row[name], 77, 0) for name in ("question", "response")]
    reward = "left out" if row["reward"] is None else f"reward {row['reward']:g}"
    return escaped(f"    {' -> '.join(texts)}, {reward}")
