"""The learning rate's record: its settings, one small cell, and what its training loss is."""

import pytest

from depthlab.continuity import metrics, rates_experiments, toy, training
from depthlab.runs import Cell

SMALL = rates_experiments.continuity_rates().config | {
    "seeds": [0, 1],
    "steps": 10,
    "rates": [1e-3, 1e-4, 1e38],
    "others": [[0.05, 1e-3], [0.9, 1e-4]],
    "train_size": 300,
    "gradient_batch": 32,
    "width": 12,
    "depth": 3,
}


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    whole = training.digits()
    monkeypatch.setattr(training, "digits", lambda n: training.Digits(*(t[:n] for t in whole)))


def test_every_wiring_of_the_main_record_runs_at_its_rate_and_around_it():
    experiment = rates_experiments.continuity_rates()
    assert len(experiment.cells) == 15 and experiment.config["seeds"] == list(range(10))
    assert experiment.config["rates"][3] == 1e-3 and [0.05, 1e-4] in experiment.config["others"]


def test_each_setting_is_the_single_run_of_its_rate_and_scale():
    results = {(r.variant, r.seed): r for r in rates_experiments.run_cell(Cell("c", {"network": "res-relu"}), SMALL)}
    assert len(results) == 10 and all(set(r.metrics) == set(rates_experiments.KEPT) for r in results.values())
    images = training.digits(300)
    for scale, rate in ((0.32, 1e-3), (0.32, 1e-4), (0.05, 1e-3), (0.9, 1e-4)):
        network = toy.ToyConfig("relu", width=12, depth=3, init_scale=scale)
        _, last = training.train(network, images, seed=1, steps=10, learning_rate=rate, snapshots=[8, 10])
        got = results[f"res-relu/g={scale}/rate={rate:g}", 1]
        assert not got.diverged
        # Over the last fifth of training, so that it is the loss by which the grid chooses a rate.
        assert got.metrics["train_loss"] == pytest.approx(last.train_loss, rel=1e-3)
        v1 = float(metrics.alignment(last.params.weights).mean())
        assert got.metrics["weight_v1"] == pytest.approx(v1, rel=2e-3)
    assert "rate 1e+38" in results["res-relu/g=0.32/rate=1e+38", 0].diverged


def test_networks_without_residuals_keep_a_scale_at_which_a_signal_passes():
    variants = {r.variant for r in rates_experiments.run_cell(Cell("c", {"network": "no-res-relu"}), SMALL)}
    assert variants == {f"no-res-relu/g=1.414/rate={rate}" for rate in ("0.001", "0.0001", "1e+38")}
