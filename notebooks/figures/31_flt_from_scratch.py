"""The picture of notebook 31: where five variants use the previous loop. Run it to draw 31_flt_from_scratch.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.looped import VARIANTS, wiring
from depthlab.plots import COLORS, theme

N_BLOCKS = 3
START = {"z": "x", "h": "h", "norm(e + h)": "norm(e + h)", "norm(z + h)": "x"}  # what a loop starts at, by block 1
ADDED, QUERY = COLORS[1], COLORS[0]


def draw() -> plt.Figure:
    """A stack of blocks each; from the previous loop's output, on its left, an arrow for each use, by `wiring`."""
    theme()
    figure, axes = plt.subplots(1, len(VARIANTS), figsize=(6.0, 2.5), sharey=True)
    for ax, variant in zip(axes, VARIANTS, strict=True):
        plan = [wiring(variant, 2, block) for block in range(1, N_BLOCKS + 1)]
        ax.plot([0, 0], [0.05, N_BLOCKS + 0.2], color="0.6", linewidth=3, solid_capstyle="round")
        ax.annotate("", (1.5, N_BLOCKS + 0.75), (1.5, -0.15), arrowprops={"arrowstyle": "-|>", "color": "0.3"})
        for i, wire in enumerate(plan):
            ax.add_patch(plt.Rectangle((0.95, i + 0.3), 1.1, 0.5, facecolor="0.92", edgecolor="0.4", zorder=3))
            ax.annotate(f"block {i + 1}", (1.5, i + 0.55), ha="center", va="center", fontsize=7, zorder=4)
            if wire.enters != "z":
                arrow(ax, (1.46, i + 0.1), ADDED, "-")
            if wire.query == "h":
                arrow(ax, (0.95, i + 0.55), QUERY, "--")
        ax.annotate(START[plan[0].enters], (1.5, -0.18), ha="center", va="top", fontsize=8)
        ax.set(title=variant, xlim=(-0.4, 2.4), ylim=(-0.7, N_BLOCKS + 0.8))
        ax.axis("off")
    axes[0].annotate("h", (0, N_BLOCKS + 0.35), ha="center", va="bottom", fontsize=8, color="0.4")
    figure.supxlabel("solid: the previous loop's output h enters the state   dashed: it asks the queries", fontsize=8)
    return figure


def arrow(ax: plt.Axes, to: tuple[float, float], color: str, style: str) -> None:
    """From the previous loop's output to a point."""
    shape = {"arrowstyle": "-|>", "color": color, "linestyle": style, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", to, (0.05, to[1]), arrowprops=shape, zorder=5)


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
