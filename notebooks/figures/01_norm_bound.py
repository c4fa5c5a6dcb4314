"""The picture of notebook 01: where one layer can take a stream. Run it to draw 01_norm_bound.png."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from depthlab.plots import COLORS, theme


def draw() -> plt.Figure:
    """A stream s and an update F of equal length in the plane, and everything three kinds of layer can make of them."""
    theme()
    figure, ax = plt.subplots(figsize=(5.0, 1.95))
    s, f = np.array([0.35, 1.0]), np.array([1.0, 0.35])
    s, f = s / np.linalg.norm(s), f / np.linalg.norm(f)
    corner, total = np.maximum(s, f), s + f
    ax.add_patch(plt.Circle((0, 0), 1, color="0.93", zorder=0))
    ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.6", linestyle=":", zorder=1))
    low, size = np.minimum(s, f), np.abs(f - s)
    ax.add_patch(plt.Rectangle(low, *size, fill=False, edgecolor=COLORS[1], linestyle="--", linewidth=1.2))
    for end, name, shift in ((s, "s", (-0.12, 0.03)), (f, "F", (0.04, -0.08))):
        ax.annotate("", end, (0, 0), arrowprops={"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.2})
        ax.annotate(name, end + shift, fontsize=11, color="0.25")
    ax.plot(*zip(s, f, strict=True), color=COLORS[0], linewidth=3, solid_capstyle="round")
    ax.plot(*corner, "o", color=COLORS[1], markersize=5)
    ax.plot(*total, "o", color=COLORS[3], markersize=5)
    ax.annotate("one gate for the whole vector:\nsomewhere on this segment,\nso never outside the circle", (0.45, 0.85),
                (-2.75, 1.15), fontsize=8, color=COLORS[0], va="center",
                arrowprops={"arrowstyle": "-", "color": COLORS[0], "linewidth": 0.8})  # fmt: skip
    ax.annotate("a gate a channel:\nanywhere in this box", corner, (1.6, 0.72), fontsize=8, color=COLORS[1],
                va="center", arrowprops={"arrowstyle": "-", "color": COLORS[1], "linewidth": 0.8})  # fmt: skip
    ax.annotate("s + F: PreNorm's sum", total, (1.6, 1.32), fontsize=8, color=COLORS[3], va="center",
                arrowprops={"arrowstyle": "-", "color": COLORS[3], "linewidth": 0.8})  # fmt: skip
    ax.annotate("radius: max(|s|, |F|)", (0, -0.3), fontsize=8, color="0.45", ha="center")
    ax.plot(0, 0, "o", color="0.25", markersize=3)
    ax.set(xlim=(-2.75, 3.0), ylim=(-0.45, 1.6), aspect="equal")
    ax.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
