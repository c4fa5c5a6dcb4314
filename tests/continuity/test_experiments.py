"""The recorded experiment: its grid, one small cell through the runner, and the numbers derived from a run."""

import math

import pytest

from depthlab import runs
from depthlab.continuity import experiments, toy, training
from depthlab.runs import Cell, Experiment

FAST = {"batch_size": 16, "train_size": 8000, "points": 5, "gradient_batch": 64}


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
    assert experiments.onset(measured, 0.2) == pytest.approx(expected)
    later = [*measured, measured[0] | {"step": 16}]  # a fall after the peak moves nothing
    assert experiments.onset(later, 0.2) == pytest.approx(expected)
    falling = rows((1, 0.8, 0.8, 0.2, 0.1), (2, 0.3, 0.8, 0.6, 0.2))
    assert experiments.onset(falling, 0.2)["onset_step"] == 1
    flat = rows((1, 0.1, 0.8, 0.2, 0.1), (2, 0.15, 0.8, 0.6, 0.2), (4, 0.12, 0.8, 0.6, 0.2))
    assert experiments.onset(flat, 0.2)["onset_step"] == 2  # even the peak is below chance


def test_closing_metrics_hold_the_end_the_start_and_the_peak():
    measured = rows((1, 0.1, 0.8, 0.2, 0.1), (4, 0.7, 0.8, 1.0, 0.4), (8, 0.2, 0.8, 2.0, 0.5))
    measured[1] |= {"weight_gram": 0.6, "weight_gap": 1.3}
    measured[2] |= {"grad_v1": 0.5}
    got = experiments.closing_metrics(measured, toy.ToyConfig())
    assert (got["weight_v1"], got["v1_at_peak"], got["step_at_peak"]) == (0.2, 0.7, 4)
    assert (got["gram_at_peak"], got["weight_gram"], got["gap_at_peak"]) == (0.6, 0.1, 1.3)
    assert (got["grad_v1_init"], got["grad_v1"]) == (0.9, 0.5)
    assert "step" not in got and "onset_step" in got
    assert "onset_step" not in experiments.closing_metrics(measured, toy.ToyConfig(residual=False))


def test_the_grid_has_three_seeds_a_variant_and_the_stated_learning_rates():
    experiment = experiments.continuity_mnist()
    seeds = {}
    for cell in experiment.cells:
        seeds.setdefault(cell.settings["variant"], []).append(cell.settings["seed"])
        residual = toy.VARIANTS[cell.settings["network"]].residual
        assert cell.settings["learning_rate"] == (1e-3 if residual else 3e-4)
    assert set(seeds) == {*experiments.RECORDED, "res-none-long"}
    assert all(s == [0, 1, 2] for s in seeds.values())


@pytest.fixture(scope="module")
def images() -> training.Digits:
    return training.digits()


@pytest.fixture
def small_networks(monkeypatch, images):
    monkeypatch.setattr(training, "digits", lambda size: images)
    for name in ("res-radial", "no-res-tanh"):
        config = toy.VARIANTS[name]
        small = toy.ToyConfig(config.activation, config.residual, width=12, depth=3, init_scale=config.init_scale)
        monkeypatch.setitem(toy.VARIANTS, name, small)
    monkeypatch.setattr(experiments, "STEPS", 8)


def small_cell(variant: str, seed: int, **changes) -> Cell:
    settings = {"variant": variant, "network": variant, "seed": seed, "steps": 8, "learning_rate": 1e-3} | changes
    return Cell(f"variant={variant},seed={seed}", settings)


def test_a_small_run_makes_a_valid_record(small_networks, tmp_path):
    cells = [small_cell(v, seed) for v in ("res-radial", "no-res-tanh") for seed in (0, 1)]
    small = Experiment("continuity-small", ("GC-1",), FAST, cells, experiments.run_cell)
    record = runs.make(small, tmp_path / "work", tmp_path / "out")
    x, y = record.curve("no-res-tanh", "weight_v1")
    assert x[0] == 0 and x[-1] == 8 and len(y) == 2
    assert record.values("no-res-tanh.weight_v1") == pytest.approx([row[-1] for row in y], rel=1e-5)
    assert record.curve("no-res-tanh", "follows")[0][0] == 1
    low, mean = (record.values(f"res-radial.radial_factor{which}_init")[1] for which in ("_p01", ""))
    assert 0 < low <= mean < 1


def test_a_longer_run_goes_on_from_the_same_start(small_networks):
    short, long = (
        experiments.run_cell(small_cell("no-res-tanh", 1, steps=steps), FAST)[0].curves["weight_v1"]
        for steps in (8, 1008)
    )
    assert long.x == [*short.x, 508.0, 1008.0]
    assert long.y[: len(short.y)] == short.y


def test_a_run_that_diverges_says_so_and_claims_no_number(small_networks):
    (result,) = experiments.run_cell(small_cell("res-radial", 0, learning_rate=1e9), FAST)
    assert "at step" in result.diverged
    assert all(math.isnan(value) for value in result.metrics.values())
