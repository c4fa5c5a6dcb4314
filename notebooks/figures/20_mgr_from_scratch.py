"""The picture of notebook 20: four streams through ten sublayers. Run it to draw 20_mgr_from_scratch.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.plots import COLORS, theme

N_STREAMS, N_LAYERS = 4, 10


def draw() -> plt.Figure:
    """Streams as horizontal lines, sublayers as boxes: the first three append a line, the others bend all lines."""
    theme()
    figure, ax = plt.subplots(figsize=(5.0, 2.3))
    for i in range(N_STREAMS):
        y = N_STREAMS - i
        ax.plot([i, N_LAYERS + 0.6], [y, y], color=COLORS[i], linewidth=2.5, solid_capstyle="round", zorder=1)
        name = "x$_0$" if i == 0 else f"F$_{i - 1}$"
        ax.annotate(name, (i, y), (2, 2), textcoords="offset points", ha="left", va="bottom", fontsize=9)
    for layer in range(N_LAYERS):
        mixing = layer >= N_STREAMS - 1
        ax.add_patch(plt.Rectangle((layer + 0.3, -0.35), 0.4, 0.6, facecolor="0.9", edgecolor="0.4", zorder=2))
        ax.annotate(str(layer), (layer + 0.5, -0.05), ha="center", va="center", fontsize=7)
        alive = min(layer + 1, N_STREAMS)
        lowest = N_STREAMS - alive + 1
        ax.plot([layer + 0.38] * 2, [0.25, N_STREAMS], color="0.6", linewidth=0.8, zorder=0)  # the read
        ax.annotate("", (layer + 0.38, 0.22), (layer + 0.38, 0.8), arrowprops={"arrowstyle": "-|>", "color": "0.6",
                    "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
        if mixing:
            ax.plot([layer + 0.62] * 2, [0.25, N_STREAMS], color="0.2", linewidth=0.9, zorder=0)
            ax.scatter([layer + 0.62] * N_STREAMS, range(1, N_STREAMS + 1), s=26, facecolor="white", edgecolor="0.2",
                       linewidth=1.0, zorder=3)  # fmt: skip
        else:
            ax.plot([layer + 0.62, layer + 0.62, layer + 1], [0.25, lowest - 1, lowest - 1], color="0.2",
                    linewidth=0.9, zorder=0)  # fmt: skip
    ax.plot([N_LAYERS + 0.6] * 2, [1, N_STREAMS], color="0.6", linewidth=0.8, zorder=0)
    ax.annotate("output", (N_LAYERS + 0.6, -0.05), ha="center", va="center", fontsize=8)
    ax.annotate("", (N_LAYERS + 0.6, 0.22), (N_LAYERS + 0.6, 1), arrowprops={"arrowstyle": "-|>", "color": "0.6",
                "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
    ax.annotate("accumulation: append", (1.1, N_STREAMS + 0.6), ha="center", fontsize=8)
    ax.annotate("mixing: every stream takes a gated share (circles)", (6.9, N_STREAMS + 0.6), ha="center", fontsize=8)
    ax.axvline(N_STREAMS - 1 + 0.08, ymin=0.08, ymax=0.98, color="0.7", linestyle=":", linewidth=1)
    ax.annotate("sublayers", (-0.1, -0.05), ha="right", va="center", fontsize=8)
    ax.annotate("grey: the pooled read   black: the output F", (5.5, -0.85), ha="center", va="center", fontsize=8)
    ax.set(xlim=(-1.3, N_LAYERS + 1.1), ylim=(-1.1, N_STREAMS + 1.0))
    ax.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
