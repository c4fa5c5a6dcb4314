"""Draw 10_continuity_mnist.png: what continuity means, layer by layer. Deterministic, from any folder."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from depthlab.plots import COLORS, theme

LAYERS = 8


def draw_row(ax: plt.Axes, y: float, angles: np.ndarray, color: str, text: str) -> None:
    """A circle a layer, and in it the direction it listens to most: a line, since the sign means nothing."""
    for layer, angle in enumerate(angles):
        ax.add_patch(plt.Circle((layer, y), 0.4, fill=False, color="0.75"))
        dx, dy = 0.36 * np.cos(angle), 0.36 * np.sin(angle)
        ax.plot([layer - dx, layer + dx], [y - dy, y + dy], color=color, linewidth=2.2, solid_capstyle="round")
    ax.text(-0.45, y + 0.58, text, fontsize=9, color=color)


def main() -> None:
    theme()
    rng = np.random.default_rng(11)
    figure, ax = plt.subplots(figsize=(5.0, 2.3))
    draw_row(
        ax, 1.55, rng.uniform(0, np.pi, LAYERS), COLORS[3], "before training: every layer has a favourite of its own"
    )
    draw_row(
        ax,
        0.0,
        0.9 + np.cumsum(rng.normal(0, 0.13, LAYERS)),
        COLORS[0],
        "with continuity: neighbours have nearly the same",
    )
    for layer in range(LAYERS):
        ax.text(layer, -0.72, f"$W_{layer + 1}$", ha="center", fontsize=9)
    ax.set(xlim=(-0.6, LAYERS - 0.4), ylim=(-0.9, 2.4), aspect="equal")
    ax.axis("off")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
