"""curves.png: a run's metrics over its steps."""

import json
from pathlib import Path


def plot_curves(out: Path) -> None:
    """curves.png from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    panels = {
        "reward": ["reward", "eval_reward", "eval_reward_greedy"], "clip rate": ["clip_rate"],
        "KL new/old, nats": ["kl_new_old"], "entropy, nats": ["entropy"],
        "mismatch, nats": ["mismatch_abs_mean", "mismatch_max"],
        "seconds": ["generate_s", "old_logprobs_s", "update_s", "sync_s"],
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if name.startswith("eval") else None)
                axis.legend(fontsize=8)
        axis.set(title=title, xlabel="step", yscale="log" if title.startswith("mismatch") else "linear")
    figure.savefig(out / "curves.png", dpi=110)
    pyplot.close(figure)


