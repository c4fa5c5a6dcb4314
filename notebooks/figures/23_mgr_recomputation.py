"""The picture of notebook 23: what is kept, and how far off the rest is. Run it to draw 23_mgr_recomputation.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from depthlab.plots import COLORS, theme

N_STREAMS, N_LAYERS, ANCHOR = 4, 24, 11
OPEN = {(4, 2), (7, 0), (14, 3), (17, 1), (20, 2)}  # (layer, stream): wide-open gates, whose rows are kept
KEPT, FREE = COLORS[0], "white"


def draw() -> plt.Figure:
    """Two grids of layers by streams, filled where the forward pass keeps; below, the error of what is rebuilt."""
    theme()
    figure, axes = plt.subplots(3, 1, figsize=(5.0, 2.9), height_ratios=(1, 1, 1.1), sharex=True)
    grid(axes[0], lambda layer, stream: True)
    axes[0].set_title("storing: every stream of every layer waits for the backward pass", fontsize=8, loc="left")
    grid(axes[1], lambda layer, stream: layer in (ANCHOR, N_LAYERS - 1) or (layer, stream) in OPEN)
    axes[1].set_title(
        "rebuilding: the newest layer, an anchor, and rows of wide-open gates", fontsize=8, loc="left", pad=9
    )
    arrow = {"arrowstyle": "-|>", "color": COLORS[3], "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    for right, left in ((N_LAYERS - 1.6, ANCHOR + 0.7), (ANCHOR - 0.6, -0.3)):
        axes[1].annotate("", (left, -0.9), (right, -0.9), arrowprops=arrow, annotation_clip=False)
    for stream in range(N_STREAMS):
        axes[2].plot(range(N_LAYERS), errors(stream), color=COLORS[3], linewidth=0.9, alpha=0.8, drawstyle="steps-mid")
    axes[2].set(ylabel="error", yticks=[], xlabel="layer", xticks=range(0, N_LAYERS, 4), ylim=(-0.2, 8.5))
    axes[2].annotate("the backward pass rebuilds from right to left", (0.99, 0.97), xycoords="axes fraction",
                     fontsize=8, color=COLORS[3], ha="right", va="top")  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.03)
    return figure


def grid(ax: plt.Axes, is_kept) -> None:
    """One square a layer and stream."""
    for layer in range(N_LAYERS):
        for stream in range(N_STREAMS):
            color = KEPT if is_kept(layer, stream) else FREE
            box = (layer - 0.42, stream - 0.4)
            ax.add_patch(plt.Rectangle(box, 0.84, 0.8, facecolor=color, edgecolor="0.6", linewidth=0.6))
    ax.set(xlim=(-0.7, N_LAYERS - 0.3), ylim=(N_STREAMS - 0.3, -0.7), yticks=[], ylabel="streams")
    ax.tick_params(bottom=False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def errors(stream: int) -> list[float]:
    """A made-up error of a stream by layer: it grows downwards and is zero where the stream is kept."""
    found, error = [], 0.0
    for layer in reversed(range(N_LAYERS)):
        kept = layer in (ANCHOR, N_LAYERS - 1) or (layer, stream) in OPEN
        error = 0.0 if kept else 1.13 * error + 0.2 + 0.05 * stream
        found.append(error)
    return found[::-1]


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=130, metadata={"Software": None})
