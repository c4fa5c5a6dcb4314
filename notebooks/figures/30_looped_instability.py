"""The picture of notebook 30: one stack applied three times. Run it to draw 30_looped_instability.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.plots import COLORS, theme

N_LOOPS, TOP = 3, 1.75


def draw() -> plt.Figure:
    """Left: the loops forward, and what each adds to the gradient of the one stack. Right: powers of a radius."""
    theme()
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.0, 2.3), width_ratios=(1.7, 1))
    arrow = {"arrowstyle": "-|>", "color": "0.2", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    for t in range(N_LOOPS + 1):
        left.annotate("x" if t == 0 else f"h$_{t}$", (2 * t + 0.55, 0.14), ha="center", va="bottom", fontsize=9)
        left.annotate("", (2 * t + 1, 0), (2 * t + 0.1, 0), arrowprops=arrow)
    for t in range(N_LOOPS):
        box = plt.Rectangle((2 * t + 1, -0.4), 1.1, 0.8, facecolor="0.92", edgecolor=COLORS[0], linewidth=1.6)
        left.add_patch(box)
        left.annotate("stack", (2 * t + 1.55, 0), ha="center", va="center", fontsize=8)
        sent = {**arrow, "color": COLORS[3], "connectionstyle": "arc3,rad=0"}
        left.annotate("", (2 * N_LOOPS / 2 + 0.55 + 0.25 * (t - 1), TOP - 0.25), (2 * t + 1.55, 0.42), arrowprops=sent)
        left.annotate(f"loop {t + 1}", (2 * t + 1.55, -0.75), ha="center", va="center", fontsize=8, color="0.4")
    left.annotate("one gradient: the sum over loops", (N_LOOPS + 0.55, TOP), ha="center", fontsize=8, color=COLORS[3])
    left.set(xlim=(-0.1, 2 * N_LOOPS + 1.2), ylim=(-1.1, 2.1))
    left.axis("off")
    for i, radius in enumerate((0.8, 1.0, 1.25)):
        right.plot(range(13), [radius**t for t in range(13)], color=COLORS[i])
        right.annotate(
            f"{radius:g}", (12.2, radius**12), va="center", fontsize=8, color=COLORS[i], annotation_clip=False
        )
    right.set(xlabel="loops", ylabel="size of the state", yscale="log", xticks=(0, 4, 8, 12), xlim=(0, 12))
    right.set_title("spectral radius", fontsize=8, loc="right")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
