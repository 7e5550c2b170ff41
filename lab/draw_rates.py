"""docs/rates.png: the reward of two policies against the learning rate times the steps, from the record `rates`."""
import json
from pathlib import Path
from statistics import fmean
from matplotlib.figure import Figure

root = Path(__file__).parents[1] / "docs"
cells = json.loads((root / "records/rates.json").read_text())["cells"]
figure = Figure(figsize=(8.4, 3.4), layout="constrained")
axes = figure.subplots(1, 2, sharex=True)
SIDES = {"parity": ("tab:blue", "all fixes (parity)"), "raw": ("tab:red", "raw log-probabilities")}
for axis, metric in zip(axes, ("reward", "entropy")):
    for side, (colour, label) in SIDES.items():
        points = []
        for name, cell in cells.items():
            rate, _, rest = name.partition(".")
            if rest not in (side, f"{side}-160"):
                continue
            steps = 160 if rest.endswith("160") else 40
            values = [v for v in (cell["metrics"][metric].values() if isinstance(cell["metrics"][metric], dict) else cell["metrics"][metric]) if v is not None]
            points.append((float(rate) * steps, fmean(values), min(values), max(values), steps))
        points.sort()
        axis.plot([p[0] for p in points], [p[1] for p in points], color=colour, lw=1, alpha=.5)
        for x, y, low, high, steps in points:
            axis.plot([x, x], [low, high], color=colour, lw=4, alpha=.25)
            axis.plot(x, y, "o" if steps == 40 else "s", color=colour, ms=6)
    axis.set_xscale("log")
    axis.set(xlabel="learning rate × steps", ylabel="reward, last 5 steps" if metric == "reward" else "entropy, nats, last 5 steps")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_ylim(0)
for side, (colour, label) in SIDES.items():
    axes[0].plot([], [], color=colour, label=label)
axes[0].plot([], [], color="grey", lw=4, alpha=.25, label="smallest to largest seed")
axes[0].plot([], [], "o", color="grey", label="40 steps")
axes[0].plot([], [], "s", color="grey", label="160 steps")
figure.legend(loc="outside lower center", ncols=3, frameon=False)
figure.suptitle("Two policies with raw log-probabilities: a lower learning rate only delays the loss", fontsize=11)
figure.savefig(root / "rates.png", dpi=100)
from PIL import Image
image = Image.open(root / "rates.png").convert("RGB").quantize(64); image.save(root / "rates.png", optimize=True)
