"""Draw 00_start_here.png: one signal through depth, seen from three sides. Run it from any folder; always the same."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Ellipse

from depthlab.plots import COLORS, theme

LAYERS = 4
INK = "0.25"


def arrow(ax: plt.Axes, start: tuple, end: tuple, color: str = INK, bend: float = 0.0, width: float = 1.3) -> None:
    style = {"arrowstyle": "-|>", "color": color, "linewidth": width, "connectionstyle": f"arc3,rad={bend}"}
    ax.annotate("", end, start, arrowprops={**style, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}, zorder=2)


def box(ax: plt.Axes, x: float, y: float, text: str, color: str, width: float = 0.9) -> None:
    ax.add_patch(
        plt.Rectangle(
            (x - width / 2, y - 0.26), width, 0.52, facecolor="white", edgecolor=color, linewidth=1.4, zorder=3
        )
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, zorder=4)


def weights(ax: plt.Axes) -> None:
    """A stack of layers, and beside each the direction that it listens to most."""
    arrow(ax, (0, -0.6), (0, LAYERS + 0.1))
    for layer, angle in enumerate(np.array([0.5, 0.65, 0.55, 0.75])):
        box(ax, 0, layer, f"$W_{layer + 1}$", COLORS[0])
        dx, dy = 0.18 * np.cos(angle), 0.28 * np.sin(angle)  # the panel is narrower than it is high
        ax.add_patch(Ellipse((0.9, layer), 0.42, 0.64, fill=False, color="0.8"))
        ax.plot([0.9 - dx, 0.9 + dx], [layer - dy, layer + dy], color=COLORS[0], linewidth=2.4)


def streams(ax: plt.Axes) -> None:
    """Three streams beside the layers; each layer reads a mixture of them and every gate lets some of its output in."""
    for x in (0.65, 0.9, 1.15):
        arrow(ax, (x, -0.6), (x, LAYERS + 0.1), COLORS[1], width=1.6)
    for layer in range(LAYERS):
        box(ax, -0.25, layer, f"$F_{layer + 1}$", COLORS[1])
        arrow(ax, (0.65, layer - 0.42), (0.21, layer - 0.14), INK, bend=0.2, width=0.9)
        ax.plot([0.2, 1.15], [layer + 0.1] * 2, color=INK, linewidth=0.9)
        ax.scatter([0.65, 0.9, 1.15], [layer + 0.1] * 3, s=22, color="white", edgecolor=COLORS[1], zorder=3)


def loops(ax: plt.Axes) -> None:
    """The same two blocks again and again."""
    arrow(ax, (0, -0.6), (0, LAYERS + 0.1))
    for y, text in ((0.8, "block 1"), (2.0, "block 2")):
        box(ax, 0, y, text, COLORS[2], width=1.2)
    arrow(ax, (0.05, 3.0), (0.05, 0.1), COLORS[2], bend=-1.15, width=1.8)
    ax.text(1.28, 1.5, "K times", fontsize=9, color=COLORS[2], rotation=90, va="center")


def main() -> None:
    theme()
    figure, axes = plt.subplots(1, 3, figsize=(5.0, 3.0))
    titles = ("weights", "streams", "loops")
    questions = ("Do neighbours\nlook alike?", "Who carries it,\nand how far?", "What if it comes\nback again?")
    for ax, draw, title, question, color in zip(
        axes, (weights, streams, loops), titles, questions, COLORS, strict=False
    ):
        draw(ax)
        ax.text(0.3, LAYERS + 0.75, title, ha="center", fontsize=11, color=color)
        ax.text(0.3, -1.45, question, ha="center", va="center", fontsize=8.5, color=INK)
        ax.text(1.25 if draw is streams else 0.12, -0.62, "$x$", fontsize=10, color=INK)
        ax.set(xlim=(-1.0, 1.6), ylim=(-1.9, LAYERS + 1.1))
        ax.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
