"""The benchmark's figures, redrawn from its records. Each draws on the axes it is given and returns what it drew."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer

from depthlab import plots
from depthlab.kernels.bench.reading import kernels, rows
from depthlab.kernels.bench.traffic import flops
from depthlab.runs import Record

COLORS = {
    "triton": plots.COLORS[0],
    "compile": plots.COLORS[1],
    "eager": plots.COLORS[2],
    "liger-mhc": plots.COLORS[3],
}


def roofline(ax: Axes, record: Record, which: str = "forward") -> dict[str, PathCollection]:
    """Every bfloat16 mixing row under the machine's two measured roofs; both axes logarithmic.

    x: operations a byte of the model; y: operations a second. A point on the slope moves its bytes as fast as a copy.
    """
    copy = float(np.median(record.values("machine.copy_gbps"))) * 1e9
    peak = float(np.median(record.values("machine.float32_tflops"))) * 1e12
    x = np.geomspace(0.5, 64, 50)
    ax.plot(x, np.minimum(copy * x, peak) / 1e12, color="0.4", linewidth=1.2)
    ax.annotate("slope: copy bandwidth", (0.5, copy * 4 / 1e12), fontsize=8, color="0.4", va="bottom")
    ax.annotate("float32 arithmetic", (64, peak / 1e12), fontsize=8, color="0.4", va="bottom", ha="right")
    measured = _mixing(rows(record))
    drawn = {}
    for name, color in COLORS.items():
        points = measured[measured.implementation == name].dropna(subset=[f"{which}_ms"])
        if points.empty or name == "liger-mhc":  # another operation: its operations are not counted here
            continue
        done = [flops(r.op, which, r.tokens, r.n_streams, r.width) for r in points.itertuples()]
        seconds = points[f"{which}_ms"].to_numpy() / 1e3
        moved = points[f"{which}_gbps"].to_numpy() * 1e9 * seconds
        drawn[name] = ax.scatter(done / moved, np.asarray(done) / seconds / 1e12, s=12, color=color, label=name)
    ax.set(xscale="log", yscale="log", xlabel="operations a byte (by the model)", ylabel="TFLOP/s")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    return drawn


def shares(ax: Axes, record: Record, which: str = "forward", tokens: int = 32768) -> dict[str, object]:
    """The fused kernels' share of the copy bandwidth over C, a band over the repetitions for each n."""
    measured = _mixing(rows(record))
    chosen = measured[(measured.implementation == "triton") & (measured.tokens == tokens)]
    drawn = {}
    for i, (n, points) in enumerate(chosen.groupby("n_streams")):
        points = points.sort_values("width")
        variants = [f"mix/competitive/bf16/T={tokens},n={n},C={c}/triton.{which}_share" for c in points.width]
        values = np.array([record.values(v) for v in variants]).T  # [seeds, widths]
        label = f"n = {n}"
        drawn[label] = plots.seed_band(ax, points.width.to_numpy(), values, label, plots.COLORS[i])[0]
    ax.set_ylim(0, 1.05)
    plots.finish(ax, xlabel="width C", ylabel="share of copy bandwidth")
    return drawn


def speedups(ax: Axes, record: Record, which: str = "forward") -> dict[str, BarContainer]:
    """How many times faster the fused kernels are than each other implementation, at every shape that has it."""
    measured = _mixing(rows(record))
    ours = measured[measured.implementation == "triton"].sort_values(["tokens", "n_streams", "width"])
    others = [name for name in COLORS if f"{which}_over_{name}" in ours and ours[f"{which}_over_{name}"].notna().any()]
    ours = ours.dropna(subset=[f"{which}_over_{name}" for name in others], how="all")
    places, height = np.arange(len(ours)), 0.8 / max(len(others), 1)
    drawn = {}
    for i, name in enumerate(others):
        values = ours[f"{which}_over_{name}"].to_numpy()
        drawn[name] = ax.barh(places + i * height, values, height * 0.9, color=COLORS[name], label=f"v. {name}")
    labels = [f"T {r.tokens // 1024}k, n {r.n_streams}, C {r.width}" for r in ours.itertuples()]
    ax.set_yticks(places + 0.4 - height / 2, labels)
    ax.invert_yaxis()
    ax.axvline(1, color="0.55", linestyle=":", linewidth=1.0)
    ax.set_xlabel("times faster")
    ax.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(others) or 1)
    return drawn


def timeline(ax: Axes, record: Record, variants: dict[str, str]) -> dict[str, object]:
    """A profiler's view of one step: each kernel a block from its start to its end, one row a variant.

    variants: label -> variant of kernels-mgr-profile.
    """
    drawn = {}
    for place, (label, variant) in enumerate(variants.items()):
        found = kernels(record, variant)
        spans = list(zip(found.start_us, found.duration_us, strict=True))
        shades = [plots.COLORS[place], "0.75"]
        colors = [shades[i % 2] for i in range(len(spans))]
        drawn[label] = ax.broken_barh(spans, (place - 0.35, 0.7), facecolors=colors)
    counted = {label: len(kernels(record, variant)) for label, variant in variants.items()}
    ax.set_yticks(range(len(counted)), [f"{k}: {n} kernel{'s' * (n > 1)}" for k, n in counted.items()])
    ax.invert_yaxis()
    ax.set_xlabel("microseconds")
    return drawn


def moved(ax: Axes, record: Record, shape: str = "mix/competitive/bf16/T=131072,n=4,C=1024") -> BarContainer:
    """Forward reads and writes a token in units of n C: counted by hardware, by our model, and as the paper counts."""
    values = {}
    for label, variant, prefix in (
        ("eager", f"counters/{shape}/eager", "forward"),
        ("fused", f"counters/{shape}/triton", "forward"),
        ("model", f"model/{shape}", "forward"),
        ("paper", f"model/{shape}", "paper_forward"),
    ):
        for kind in ("reads", "writes"):
            values[f"{label} {kind}"] = record.values(f"{variant}.{prefix}_{kind}_nC")[0]
    drawn = plots.bars(ax, list(values), list(values.values()), ylabel="elements a token, in n C")
    for i, bar in enumerate(drawn):
        bar.set_facecolor(plots.COLORS[i % 2])  # reads in one colour, writes in the other
    return drawn


def _mixing(measured):
    return measured[(measured.op == "mix") & (measured.gate == "competitive") & (measured.dtype == "bf16")]
