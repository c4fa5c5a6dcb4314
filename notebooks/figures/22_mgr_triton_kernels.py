"""The picture of notebook 22: every line to memory and back, or once. Run it to draw 22_mgr_triton_kernels.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.plots import COLORS, theme

STEPS = ("scores", "gates", "mix", "scores", "read", "norm")
MEMORY, REGISTERS = 1.0, 0.0


def draw() -> plt.Figure:
    """Two panels over the same steps: a path that returns to memory after each, and one that stays in registers."""
    theme()
    figure, (eager, fused) = plt.subplots(1, 2, figsize=(5.0, 1.9), sharey=True)
    for ax, title in ((eager, "plain torch: every line"), (fused, "fused: once")):
        ax.axhspan(MEMORY, MEMORY + 0.3, color="0.85", zorder=0)
        ax.axhspan(REGISTERS - 0.3, REGISTERS, color="0.93", zorder=0)
        ax.set(title=title, xlim=(-0.4, len(STEPS) + 0.2), ylim=(-0.95, MEMORY + 0.3))
        ax.axis("off")
        for i, step in enumerate(STEPS):
            ax.annotate(step, (i + 0.45, REGISTERS - 0.38), rotation=45, ha="right", va="top", fontsize=8)
    for y, name in ((MEMORY + 0.15, "memory"), (REGISTERS - 0.15, "registers")):
        eager.annotate(name, (-0.45, y), ha="right", va="center", fontsize=9, annotation_clip=False)
    for i in range(len(STEPS)):
        arrow(eager, i + 0.25, MEMORY, REGISTERS, COLORS[2])
        arrow(eager, i + 0.65, REGISTERS, MEMORY, COLORS[2])
    arrow(fused, 0.25, MEMORY, REGISTERS, COLORS[0])
    arrow(fused, len(STEPS) - 0.35, REGISTERS, MEMORY, COLORS[0])
    fused.plot([0.25, len(STEPS) - 0.35], [REGISTERS - 0.15] * 2, color=COLORS[0], linewidth=2)
    for i in range(len(STEPS)):
        fused.plot(i + 0.45, REGISTERS - 0.15, "o", color=COLORS[0], markersize=5)
        eager.plot(i + 0.45, REGISTERS - 0.15, "o", color=COLORS[2], markersize=5)
    return figure


def arrow(ax: plt.Axes, x: float, start: float, end: float, color: str) -> None:
    """A vertical arrow between the two levels."""
    ax.annotate("", (x, end), (x, start), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6,
                "shrinkA": 0, "shrinkB": 0})  # fmt: skip


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
