"""The figures show what the records hold: a record is made up with known times, and read back off the axes."""

from collections.abc import Iterator

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from depthlab.kernels.bench import figures, profiling, reading
from depthlab.kernels.bench.cases import WIDTHS, Case, table
from depthlab.kernels.bench.counters import READ, TIME, WRITTEN, Launch, summarize
from depthlab.kernels.bench.traffic import flops
from depthlab.runs import Cell, Experiment, Record, Result, make

COPY_GBPS = 4000.0
SHARE = {"triton": 0.9, "compile": 0.4, "eager": 0.08, "liger-mhc": 0.3, "liger-attnres": 0.5, "fla-attnres": 0.6}


def bench_cell(cell: Cell, config: dict) -> list[Result]:
    seed = cell.settings["seed"]
    out = [Result("machine", seed, {"copy_gbps": COPY_GBPS, "float32_tflops": 50.0, "l2_mib": 60.0})]
    for case, names in table():
        for name in names:
            share = SHARE[name] * (1 + 0.01 * (seed - 1))
            metrics = {}
            for which in ("forward", "backward", "both"):
                gbps = share * COPY_GBPS
                metrics |= {
                    f"{which}_ms": case.bytes(which) / gbps / 1e6,
                    f"{which}_gbps": gbps,
                    f"{which}_share": share,
                }
            why = "fla-core is not installed" if name == "fla-attnres" else ""
            out.append(Result(f"{case.name}/{name}", seed, metrics, diverged=why))
    return out


def profile_cell(cell: Cell, config: dict) -> list[Result]:
    case = profiling.COUNTED[0]
    unit = case.tokens * case.n_streams * case.width * 2
    out = [Result(f"model/{case.name}", 0, profiling.model(case))]
    for name, reads, writes in (("eager", 20, 12), ("triton", 1.25, 1.2)):
        launch = Launch("k", {READ: reads * unit, WRITTEN: writes * unit, TIME: 1e6})
        both = summarize([launch], case, "forward") | summarize([launch], case, "backward")
        out.append(Result(f"counters/{case.name}/{name}", 0, both))
    out.append(profiling.traced("trace/eager", [("a", 0.0, 2.0), ("b", 3.0, 1.0), ("c", 4.0, 5.0)]))
    return [*out, profiling.traced("trace/triton", [("layer_fwd_kernel", 0.0, 1.5)])]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("bench")
    cells = [Cell(f"{seed}", {"seed": seed}) for seed in range(3)]
    return make(Experiment("made-up", (), {}, cells, bench_cell), folder / "work", folder)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("profile")
    return make(Experiment("made-up", (), {}, [Cell("all", {})], profile_cell), folder / "work", folder)


@pytest.fixture
def ax() -> Iterator[Axes]:
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def test_rows_hold_the_median_of_the_repetitions(bench: Record) -> None:
    found = reading.rows(bench)
    assert len(found) == sum(len(names) for _, names in table())
    one = found[(found.op == "mix") & (found.tokens == 4096) & (found.n_streams == 8) & (found.width == 2048)].iloc[0]
    assert (one["dtype"], one.gate, one.implementation, one.why) == ("bf16", "competitive", "triton", "")
    assert one.forward_share == pytest.approx(0.9)
    assert set(found[found.implementation == "fla-attnres"].why) == {"fla-core is not installed"}


def test_the_roofline_shows_operations_over_bytes_and_over_time(bench: Record, ax: Axes) -> None:
    drawn = figures.roofline(ax, bench, "forward")
    assert set(drawn) == {"eager", "compile", "triton"}
    for name, dots in drawn.items():
        x, y = np.asarray(dots.get_offsets()).T
        assert y / x == pytest.approx(SHARE[name] * COPY_GBPS / 1e3)  # TFLOP/s over FLOP a byte: TB/s
    case = Case("mix", "bf16", 4096, 4, 768, "competitive")
    intensity = flops("mix", "forward", 4096, 4, 768) / case.bytes("forward")
    assert drawn["triton"].get_offsets()[0][0] == pytest.approx(intensity)


def test_shares_are_drawn_over_the_width_for_each_n(bench: Record, ax: Axes) -> None:
    drawn = figures.shares(ax, bench, "both")
    assert list(drawn) == ["n = 4", "n = 8"]
    for line in drawn.values():
        assert list(line.get_xdata()) == list(WIDTHS)
        assert line.get_ydata() == pytest.approx([0.9] * len(line.get_xdata()))


def test_speedups_are_the_recorded_ratios_at_the_compared_shapes(bench: Record, ax: Axes) -> None:
    drawn = figures.speedups(ax, bench, "both")
    widths = {name: [bar.get_width() for bar in bars] for name, bars in drawn.items()}
    assert widths["eager"] == pytest.approx([0.9 / 0.08] * 6)
    assert widths["compile"] == pytest.approx([0.9 / 0.4] * 6)
    assert np.isfinite(widths["liger-mhc"]).sum() == 3
    assert [t.get_text() for t in ax.get_yticklabels()][0] == "T 4k, n 4, C 1024"


def test_the_timeline_has_a_block_a_kernel(profile: Record, ax: Axes) -> None:
    drawn = figures.timeline(ax, profile, {"eager": "trace/eager", "fused": "trace/triton"})
    spans = {k: [(p.get_extents().x0, p.get_extents().width) for p in v.get_paths()] for k, v in drawn.items()}
    assert spans == {"eager": [(0, 2), (3, 1), (4, 5)], "fused": [(0, 1.5)]}
    assert [t.get_text() for t in ax.get_yticklabels()] == ["eager: 3 kernels", "fused: 1 kernel"]
    found = reading.kernels(profile, "trace/eager")
    assert list(found.name) == ["a", "b", "c"] and list(found.start_us) == [0, 3, 4]


def test_moved_bytes_stand_beside_the_model_and_the_papers_count(profile: Record, ax: Axes) -> None:
    heights = [bar.get_height() for bar in figures.moved(ax, profile)]
    assert heights == pytest.approx([20, 12, 1.25, 1.2, 1.25, 1.25, 3, 1])
