"""The pictures of a run."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from report.files import read_rows

PANELS = {  # of curves.png: titles, and figures of metrics.jsonl
    "reward": ("reward", "eval_reward", "eval_reward_greedy"), "clip rate": ("clip_rate",),
    "length, tokens": ("response_len",), "shares": ("trunc_frac", "flat_frac"),
    "KL(old, new), nats": ("kl_old_new",), "entropy, nats": ("entropy",),
    "mismatch, nats (log)": ("mismatch_abs_mean", "mismatch_max"),
    "seconds": ("generate_s", "reward_s", "old_logprobs_s", "update_s", "sync_s"),
}  # fmt: skip


def over_steps(titles: Collection[str], size: tuple[float, float]) -> Any:
    """A figure of `size` inches with two rows of axes, logarithmic where the title says so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    for axis, title in zip(figure.subplots(2, len(titles) // 2).flat, titles, strict=True):
        axis.set(title=title, xlabel="step")
        if "(log)" in title:
            axis.set_yscale("symlog", linthresh=1e-9)  # linear below, so that 0 is on the axis
    return figure


def draw_figure(axis: Any, rows: list[dict[str, Any]], name: str, **style: Any) -> None:
    """The figure of this name, at the steps that have it."""
    measured = {row["step"]: row[name] for row in rows if row.get(name) is not None}
    axis.plot(list(measured), list(measured.values()), **style)


def draw_at_evaluation(out: Path, metrics: dict[str, Any]) -> None:
    """Draw curves.png of the run in `out` anew, if `metrics` are those of an evaluation."""
    if not metrics["step"] or "eval_reward" not in metrics:
        return
    rows = read_rows(out / "metrics.jsonl")
    figure = over_steps(PANELS, (17, 7))
    for axis, names in zip(figure.axes, PANELS.values(), strict=True):
        for name in names:
            marker = "o" if name.startswith("eval_") else ""
            draw_figure(axis, rows, name, marker=marker, label=name)
        axis.legend(fontsize=8)
    figure.savefig(out / "curves.png", dpi=110)
