"""Plot functions: labels sit where their lines end, and do not overlap."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from depthlab import plots


@pytest.fixture
def ax():
    plots.theme()
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def label_heights(ax) -> dict[str, float]:
    """Data height of each end label, as it stands once drawn."""
    ax.figure.canvas.draw()
    to_data = (ax.transAxes + ax.transData.inverted()).transform
    return {t.get_text().strip(): to_data((1.0, t.xy[1]))[1] for t in ax.texts if t.get_text() != "chance"}


def test_labels_sit_at_the_ends_of_their_lines(ax):
    plots.lines(ax, [0, 1, 2], {"rising": [0, 10, 40], "flat": [5, 5, 5]}, xlabel="step", ylabel="y")
    assert label_heights(ax) == pytest.approx({"rising": 40, "flat": 5}, abs=1)


def test_labels_of_bands_sit_at_the_mean_of_the_seeds(ax):
    plots.seed_band(ax, [0, 1], np.array([[0, 0.2], [0, 0.4]]), "a")
    plots.seed_band(ax, [0, 1], np.array([[0, 0.7], [0, 0.9]]), "b")
    plots.finish(ax, xlabel="step", ylabel="y", chance=0.05)
    assert label_heights(ax) == pytest.approx({"a": 0.3, "b": 0.8}, abs=0.02)


def test_labels_of_lines_that_end_together_are_moved_apart(ax):
    plots.lines(ax, [0, 1], {"one": [0, 1], "two": [0, 1.0001], "low": [0, 0]}, xlabel="step", ylabel="y")
    heights = label_heights(ax)
    assert heights["two"] - heights["one"] > 0.03


def test_every_line_keeps_its_label_also_where_it_ends_in_nan(ax):
    nan = float("nan")
    plots.lines(
        ax, [1, 2, 3], {"whole": [1, 2, 3], "diverged": [1, 2, nan], "nothing": [nan] * 3}, xlabel="", ylabel=""
    )
    heights = label_heights(ax)
    assert set(heights) == {"whole", "diverged", "nothing"}
    assert heights["diverged"] == pytest.approx(2, abs=0.1)


def test_an_empty_line_is_no_error(ax):
    plots.lines(ax, [], {"empty": []}, xlabel="", ylabel="")
    assert set(label_heights(ax)) == {"empty"}


@pytest.mark.parametrize(("values", "errors"), [([1], None), ([1, 2, 3], None), ([1, 2], [0.1]), ([1, 2], [[1, 2]])])
def test_a_value_or_error_too_few_is_refused_not_repeated(ax, values, errors):
    with pytest.raises(ValueError, match="bars got 2 labels"):
        plots.bars(ax, ["a", "b"], values, errors, ylabel="y")


def test_bands_span_the_seeds_about_their_mean(ax):
    line, band = plots.seed_band(ax, [0, 1], np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 6.0]]), "a")
    assert line.get_ydata().tolist() == [0.0, 3.0]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.0, 6.0)
