"""One look for every figure: small, labelled directly, safe for colour-blind readers.

Each function draws on an axes that is given to it and returns what it drew.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D

COLORS: list[str] = sns.color_palette("colorblind", 8).as_hex()
_CHANCE_STYLE = {"color": "0.55", "linestyle": ":", "linewidth": 1.0, "zorder": 0}
_DRAWN = "_depthlab_drawn"  # gid of the lines that get a label at their right end


def theme() -> None:
    """Set matplotlib's defaults for this session: 4.6 x 3.1 inches, no top or right spine, PNG at 100 dpi."""
    sns.set_theme(style="ticks", palette="colorblind")
    plt.rcParams.update(
        {
            "figure.figsize": (4.6, 3.1),
            "figure.dpi": 100,
            "savefig.dpi": 150,
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.labelsize": 9,
            "axes.titlesize": 9,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.linewidth": 1.6,
            "image.cmap": "cividis",
        }
    )


def lines(
    ax: Axes,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    chance: float | None = None,
) -> dict[str, Line2D]:
    """Draw one line a series, each named at its right end; `chance` adds a dotted reference line."""
    drawn = {
        label: ax.plot(x, y, color=COLORS[i % len(COLORS)], gid=_DRAWN, label=label)[0]
        for i, (label, y) in enumerate(series.items())
    }
    finish(ax, xlabel=xlabel, ylabel=ylabel, chance=chance)
    return drawn


def seed_band(
    ax: Axes, x: Sequence[float], values: np.ndarray, label: str, color: str = COLORS[0]
) -> tuple[Line2D, PolyCollection]:
    """Draw the mean over seeds with its min-max range; `values`: [seeds, points]. Call `finish` after the last."""
    values = np.atleast_2d(np.asarray(values, dtype=float))
    band = ax.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
    (line,) = ax.plot(x, values.mean(0), color=color, gid=_DRAWN, label=label)
    return line, band


def finish(ax: Axes, *, xlabel: str, ylabel: str, chance: float | None = None) -> None:
    """Name the axes, add the chance line and label every drawn line at its right end, without overlaps."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if chance is not None:
        ax.axhline(chance, **_CHANCE_STYLE)
        ax.annotate("chance", (0.01, chance), xycoords=("axes fraction", "data"), va="bottom", fontsize=7, color="0.4")
    label_lines(ax)


def label_lines(ax: Axes) -> list:
    """Write each line's label beside its last finite point; labels that would overlap are moved apart."""
    named = [line for line in ax.get_lines() if line.get_gid() == _DRAWN]
    ax.autoscale_view()  # limits are set lazily, and the labels need the final ones
    ends = sorted(((_end(ax, line), line) for line in named), key=lambda item: item[0][1])
    texts, lowest = [], -np.inf
    for (_, y_px), line in ends:
        y_px = max(y_px, lowest + 11 * ax.figure.dpi / 100)  # one line of 8 pt text
        lowest = y_px
        y_axes = ax.transAxes.inverted().transform((0, y_px))[1]
        texts.append(
            ax.annotate(
                f" {line.get_label()}",
                (1.0, y_axes),
                xycoords="axes fraction",
                va="center",
                fontsize=8,
                color=line.get_color(),
                annotation_clip=False,
            )
        )
    return texts


def _end(ax: Axes, line: Line2D) -> np.ndarray:
    """Pixels of the line's last point that can be drawn; the axes' lower left corner where none can."""
    points = ax.transData.transform(line.get_xydata())
    points = points[np.isfinite(points).all(-1)]
    return points[-1] if len(points) else ax.transAxes.transform((0.0, 0.0))


def bars(
    ax: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float] | np.ndarray | None = None,
    *,
    ylabel: str,
    chance: float | None = None,
) -> BarContainer:
    """Draw one bar a label; `errors` is a half-width each, or [2, n] distances below and above.

    Raises ValueError where they are not equally many: matplotlib would draw one value for all labels.
    """
    n = len(labels)
    if len(values) != n or (errors is not None and np.shape(errors) not in ((n,), (2, n))):
        shape = "none" if errors is None else np.shape(errors)
        raise ValueError(f"bars got {n} labels, {len(values)} values and errors {shape}; give one of each a bar.")
    colors = [COLORS[i % len(COLORS)] for i in range(len(labels))]
    drawn = ax.bar(range(len(labels)), values, yerr=errors, color=colors, width=0.7, error_kw={"linewidth": 1.0})
    ax.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    ax.set_ylabel(ylabel)
    if chance is not None:
        ax.axhline(chance, **_CHANCE_STYLE)
    return drawn
