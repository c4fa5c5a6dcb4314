"""The recorded experiment: its grid, one small cell through the runner, and the numbers derived from a run."""

import math

import pytest
import torch

from depthlab import runs
from depthlab.continuity import experiments, metrics, recording, toy, training
from depthlab.runs import Cell, Experiment

SMALL = experiments.continuity_mnist().config | {
    "seeds": [0, 1],
    "train_size": 300,
    "points": 5,
    "gradient_batch": 64,
    "width": 12,
    "depth": 3,
}


def rows(*columns: tuple) -> list[dict[str, float]]:
    names = ("step", "weight_v1", "cumulative_v1", "ratio_spectral", "ratio_frobenius")
    out = [dict(zip(names, column, strict=True)) for column in columns]
    for row in out:
        row |= {"weight_gram": 0.1, "weight_overlap": 0.2, "weight_gap": 1.2, "grad_v1": 0.9, "grad_v1_no_ones": 0.8}
    return out


def test_onset_is_half_way_from_chance_to_the_peak():
    measured = rows((1, 0.1, 0.8, 0.2, 0.1), (2, 0.3, 0.8, 0.6, 0.2), (4, 0.7, 0.8, 1.0, 0.4), (8, 0.8, 0.8, 2.0, 0.5))
    # chance 0.2, peak 0.8: half-way is 0.5, reached in the middle of steps 2 and 4
    expected = {"onset_step": 3.0, "onset_ratio_spectral": 0.8, "onset_ratio_frobenius": 0.3}
    assert recording.onset(measured, 0.2) == pytest.approx(expected)
    later = [*measured, measured[0] | {"step": 16}]  # a fall after the peak moves nothing
    assert recording.onset(later, 0.2) == pytest.approx(expected)
    falling = rows((1, 0.8, 0.8, 0.2, 0.1), (2, 0.3, 0.8, 0.6, 0.2))
    assert recording.onset(falling, 0.2)["onset_step"] == 1
    flat = rows((1, 0.1, 0.8, 0.2, 0.1), (2, 0.15, 0.8, 0.6, 0.2), (4, 0.12, 0.8, 0.6, 0.2))
    assert recording.onset(flat, 0.2)["onset_step"] == 2  # even the peak is below chance


def test_closing_metrics_hold_the_end_the_start_and_the_peak():
    measured = rows((1, 0.1, 0.8, 0.2, 0.1), (4, 0.7, 0.8, 1.0, 0.4), (8, 0.2, 0.8, 2.0, 0.5))
    measured[1] |= {"weight_gram": 0.6, "weight_gap": 1.3}
    measured[2] |= {"grad_v1": 0.5}
    got = recording.closing_metrics(measured, toy.ToyConfig())
    assert (got["weight_v1"], got["v1_at_peak"], got["step_at_peak"]) == (0.2, 0.7, 4)
    assert (got["gram_at_peak"], got["weight_gram"], got["gap_at_peak"]) == (0.6, 0.1, 1.3)
    assert (got["grad_v1_init"], got["grad_v1"]) == (0.9, 0.5)
    assert "step" not in got and "onset_step" in got
    assert "onset_step" not in recording.closing_metrics(measured, toy.ToyConfig(residual=False))


def test_the_record_has_ten_seeds_and_the_stated_learning_rates():
    experiment = experiments.continuity_mnist()
    assert experiment.config["seeds"] == list(range(10))
    settings = {cell.settings["variant"]: cell.settings for cell in experiment.cells}
    assert set(settings) == {*experiments.MAIN, *experiments.CONTROLS, "res-none-long"}
    for setting in settings.values():
        residual = toy.VARIANTS[setting["network"]].residual
        assert setting["learning_rate"] == (1e-3 if residual else 3e-4)
        assert not residual or setting["init_scale"] == 0.32


@pytest.fixture(scope="module")
def whole() -> training.Digits:
    return training.digits()


@pytest.fixture(autouse=True)
def few_digits(monkeypatch, whole):
    monkeypatch.setattr(training, "digits", lambda n: training.Digits(*(t[:n] for t in whole)))
    monkeypatch.setattr(experiments, "STEPS", 8)


def small_cell(variant: str, **changes) -> Cell:
    scale = toy.VARIANTS[variant].init_scale
    settings = {"variant": variant, "network": variant, "steps": 8, "learning_rate": 1e-3, "init_scale": scale}
    return Cell(f"variant={variant}", settings | changes)


def test_a_small_run_makes_a_valid_record(tmp_path):
    cells = [small_cell("res-radial"), small_cell("no-res-tanh")]
    small = Experiment("continuity-small", ("GC-1",), SMALL, cells, experiments.run_cell)
    record = runs.make(small, tmp_path / "work", tmp_path / "out")
    x, y = record.curve("no-res-tanh", "weight_v1")
    assert x[0] == 0 and x[-1] == 8 and len(y) == 2
    assert record.values("no-res-tanh.weight_v1") == pytest.approx([row[-1] for row in y], rel=1e-5)
    assert record.curve("no-res-tanh", "follows")[0][0] == 1
    low, mean = (record.values(f"res-radial.radial_factor{which}_init")[1] for which in ("_p01", ""))
    assert 0 < low <= mean < 1


def test_the_recorded_numbers_are_those_of_the_single_run():
    (_, result) = experiments.run_cell(small_cell("res-radial"), SMALL)
    network, images = toy.ToyConfig("radial", width=12, depth=3), training.digits(300)
    first, last = training.train(network, images, seed=1, steps=8, learning_rate=1e-3, snapshots=[0, 8])
    norms = [training.preactivation_norms(shot.params, network, images.val_x) for shot in (first, last)]
    expected = {
        "weight_v1": metrics.alignment(last.params.weights).mean(),
        "ratio_spectral": metrics.update_ratio(last.params.weights, last.initial).mean(),
        "test_accuracy": training.evaluate(last.params, network, images.test_x, images.test_y)[1],
        "preactivation_norm_init": norms[0].mean(),
        "radial_factor_end": torch.tanh(norms[1]).mean(),
        "radial_factor_p01_end": torch.tanh(norms[1]).quantile(0.01),
    }
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(float(value), rel=1e-3), name


def test_a_longer_run_goes_on_from_the_same_start():
    short, long = (
        experiments.run_cell(small_cell("no-res-tanh", steps=steps), SMALL)[1].curves["weight_v1"]
        for steps in (8, 1008)
    )
    assert long.x == [*short.x, 508.0, 1008.0]
    assert long.y[: len(short.y)] == short.y


def test_a_run_that_diverges_says_so_and_claims_no_number():
    for result in experiments.run_cell(small_cell("res-radial", learning_rate=1e9), SMALL):
        assert "at rate 1e+09" in result.diverged
        assert all(math.isnan(value) for value in result.metrics.values())
