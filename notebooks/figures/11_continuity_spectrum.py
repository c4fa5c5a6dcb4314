"""Draw 11_continuity_spectrum.png: two ways in which neighbours' leading directions can come apart. Deterministic."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Ellipse

from depthlab.plots import COLORS, theme


def draw(ax: plt.Axes, shapes: list[tuple[float, float, float]], title: str, note: str) -> None:
    """One ellipse a layer, (angle in degrees, long axis, short axis), and its long axis as a line."""
    for (angle, length, width), color in zip(shapes, (COLORS[0], COLORS[1]), strict=True):
        ax.add_patch(Ellipse((0, 0), 2 * length, 2 * width, angle=angle, fill=False, color=color, linewidth=1.4))
        x, y = length * np.cos(np.radians(angle)), length * np.sin(np.radians(angle))
        ax.plot([-x, x], [-y, y], color=color, linewidth=2.4, solid_capstyle="round")
    ax.text(0, 1.42, title, ha="center", fontsize=9)
    ax.text(0, -1.42, note, ha="center", va="top", fontsize=8, color="0.3")
    ax.set(xlim=(-1.45, 1.45), ylim=(-2.1, 1.7), aspect="equal")
    ax.axis("off")


def main() -> None:
    theme()
    figure, axes = plt.subplots(1, 3, figsize=(5.0, 2.5))
    draw(axes[0], [(35, 1.2, 0.35), (44, 1.2, 0.35)], "continuity", "a clear favourite,\nnearly shared")
    draw(axes[1], [(35, 1.2, 0.35), (125, 1.2, 0.35)], "drift", "a clear favourite each,\nturned apart")
    draw(axes[2], [(35, 1.1, 1.02), (125, 1.1, 1.02)], "mixing", "nearly round: alike,\nbut no favourite to speak of")
    axes[0].text(0.8, -0.45, "layer $l$", color=COLORS[0], fontsize=8, ha="center")
    axes[0].text(-0.25, 0.85, "layer $l+1$", color=COLORS[1], fontsize=8, ha="center")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
