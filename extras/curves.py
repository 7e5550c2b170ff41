"""Pictures of metrics over the steps: curves.png of a run; lab.ablate draws many runs.

`python -m extras.curves --path PNG --folders RUN RUN ...` draws the runs of several seeds.
"""

import json
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import tyro


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plot(panels: dict[str, dict[str, tuple[list[Path], str]]], path: Path) -> Any:
    """Six panels by title, each with lines by label: mean and range over folders of runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (title, lines) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        for label, (folders, name) in lines.items():
            curves = [{row["step"]: row[name] for row in steps_of(folder)
                       if row.get(name) is not None} for folder in folders]
            steps = sorted(set.intersection(*map(set, curves)))
            values = [[curve[step] for curve in curves] for step in steps]
            if steps:
                axis.plot(steps, [*map(mean, values)], label=label)
                axis.fill_between(steps, [*map(min, values)], [*map(max, values)], alpha=0.2)
                axis.legend(fontsize=8)
        axis.set(title=title, xlabel="step")
        positive = [value for line in axis.get_lines() for value in line.get_ydata() if value > 0]
        # Linear below the smallest of these values, so that 0 is on the axis.
        if title.endswith("(log)") and positive:
            axis.set_yscale("symlog", linthresh=min(positive))
    figure.savefig(path, dpi=110)
    return figure


def draw_at_evaluation(out: Path, metrics: dict[str, Any]) -> None:
    """Draw curves.png of the run in `out` anew, if `metrics` are those of an evaluation."""
    if metrics["step"] and "eval_reward" in metrics:
        plot_curves(out / "curves.png", [out])


def plot_curves(path: Path, folders: list[Path]) -> None:
    """The curves of runs of one job: mean and range over the folders."""
    panels = {
        "reward": ["reward", "eval_reward", "eval_reward_greedy"], "clip rate": ["clip_rate"],
        "KL(old, new), nats": ["kl_old_new"], "entropy, nats": ["entropy"],
        "mismatch, nats (log)": ["mismatch_abs_mean", "mismatch_max"],
        "seconds": ["generate_s", "old_logprobs_s", "update_s", "sync_s"],
    }
    lines = {title: {name: (folders, name) for name in names} for title, names in panels.items()}
    plot(lines, path)


if __name__ == "__main__":
    tyro.cli(plot_curves, description=__doc__)
