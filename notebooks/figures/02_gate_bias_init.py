"""The picture of notebook 02: what a stream is made of at initialisation. Run it to draw 02_gate_bias_init.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.plots import COLORS, theme
from depthlab.theory import carry_weight, gate_bias, initial_gate

DEPTHS = (6, 21, 96, 384)


def draw() -> plt.Figure:
    """Bars of the weights in a stream after L mixing layers: x_0, the first half of the updates, the last half."""
    theme()
    figure, ax = plt.subplots(figsize=(4.8, 2.1))
    for row, depth in enumerate(reversed(DEPTHS)):
        g = initial_gate("independent", 4, gate_bias("independent", 4, depth))
        kept, half = carry_weight(g, depth), carry_weight(g, depth - depth // 2)
        left = 0.0
        for share, color in ((kept, COLORS[0]), (half - kept, "0.75"), (1 - half, "0.55")):
            ax.barh(row, share, left=left, color=color, height=0.62)
            left += share
        ax.text(left + 0.01, row, f"gate {g:.3f}", va="center", fontsize=8, color="0.3")
    top = len(DEPTHS) - 0.55
    for x, text, color in (
        (0.29, "embedding x_0", COLORS[0]),
        (0.66, "first half,", "0.55"),
        (0.92, "last half of updates", "0.35"),
    ):
        ax.text(x, top, text, ha="center", fontsize=8, color=color)
    ax.set_yticks(range(len(DEPTHS)), [f"L = {depth}" for depth in reversed(DEPTHS)])
    ax.set(xlim=(0, 1.2), xlabel="weight in the stream (all add up to 1)")
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
