"""The grid: how learning rates are chosen, what a cell gives, and what becomes of a diverged network."""

import math

import pytest
import torch

from depthlab.continuity import grid_experiments as ge
from depthlab.continuity import recording, toy, training
from depthlab.runs import Cell, make
from depthlab.runs.experiment import Experiment

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def falling(end: float, seeds: int = 3, steps: int = 100) -> torch.Tensor:
    """Losses that fall from 2.3 to `end`, [seeds, steps]."""
    return (end + (2.3 - end) * torch.exp(-torch.arange(steps) / 10.0)).expand(seeds, -1).clone()


def test_the_stable_rate_of_least_late_loss_is_chosen():
    losses = torch.stack([falling(e) for e in (0.9, 0.5, 0.2, 0.4, 0.1)])
    losses[4, 1, 60:] = math.nan  # one seed of the best rate diverges
    choice = ge.choose(RATES, losses)
    assert (choice.rate, choice.at_edge, choice.stable) == (1e-3, False, 4)
    assert choice.loss == pytest.approx(0.2, abs=1e-3)
    losses[4] = falling(0.1)
    assert ge.choose(RATES, losses)[:2] == (1e-2, True)


def test_a_loss_that_climbs_above_its_beginning_is_unstable_even_if_it_recovers():
    losses = torch.stack([falling(e) for e in (0.9, 0.5, 0.3, 0.2, 0.1)])
    losses[4, 0, 40:50] = 5.0
    assert ge.choose(RATES, losses).rate == 3e-3
    constant = torch.full((5, 3, 100), 2.3) + 0.02 * torch.randn(5, 3, 100, generator=torch.Generator().manual_seed(0))
    assert ge.choose(RATES, constant).stable == 5  # a network that learns nothing is stable


def test_where_nothing_is_stable_the_lowest_rate_is_taken_and_said_so():
    choice = ge.choose(RATES, torch.full((5, 3, 100), torch.inf))
    assert (choice.rate, choice.at_edge, choice.stable) == (1e-4, True, 0)


def test_the_grid_covers_the_controls_and_the_rates_do_not_depend_on_wiring_or_scale():
    experiment = ge.continuity_grid()
    cells = [c.settings for c in experiment.cells]
    assert len(cells) == len(ge.NETWORKS) * 4 and set(ge.NETWORKS) <= set(toy.VARIANTS)
    assert {"res-radial-unit", "res-none-rms", "res-clip", "res-none-clip", "res-none-ln"} <= set(ge.NETWORKS)
    assert all(set(c) == {"network", "optimizer"} for c in cells)
    assert len(experiment.config["seeds"]) == 10 and experiment.config["scales"] == [0.05, 0.1, 0.32, 0.577]
    for rates in experiment.config["rates"].values():  # a factor of 100 or more, in steps of about 3
        assert rates[-1] / rates[0] > 99 and all(2.9 < b / a < 3.4 for a, b in zip(rates, rates[1:], strict=False))


SMALL = ge.continuity_grid().config | {
    "width": 16,
    "depth": 3,
    "seeds": [0, 1, 2],
    "choosing_seeds": [0, 1],
    "steps": 30,
    "choosing_steps": 20,
    "points": {"adam": 5, "sgd": 3},
    "train_size": 300,
    "gradient_batch": 32,
    "scales": [0.1, 0.32],
    "no_residual_scales": [1.0],
}


@pytest.fixture(scope="module")
def whole():
    return training.digits()


@pytest.fixture(autouse=True)
def few_digits(monkeypatch, whole):
    monkeypatch.setattr(training, "digits", lambda n: training.Digits(*(t[:n] for t in whole)))


def test_a_cell_gives_every_scale_and_seed_with_the_curves_of_one_scale():
    results = ge.run_cell(Cell("c", {"network": "res-relu", "optimizer": "adam"}), SMALL)
    expected = [(f"res-relu/adam/g={g}", s) for g in (0.1, 0.32) for s in (0, 1, 2)]
    assert [(r.variant, r.seed) for r in results] == expected
    for result in results:
        assert result.metrics["choice_rate"] in ge.RATES["adam"] and not result.diverged
        wanted = {"weight_v1", "weight_index_matched", "grad_v1_init", "v1_at_peak", "test_accuracy"}
        assert wanted <= set(result.metrics)
        assert set(result.curves) == (set(ge.CURVES) if "0.32" in result.variant else set())
    curve = results[-1].curves["weight_v1"]
    assert curve.x[0] == 0 and curve.x[-1] == 30 and curve.y[-1] == pytest.approx(results[-1].metrics["weight_v1"])


def test_the_chosen_rate_is_the_one_the_single_run_prefers():
    config = SMALL | {"choosing_steps": 30, "choosing_seeds": [0], "scales": [0.32], "rates": {"adam": [1e-5, 3e-3]}}
    images = training.digits(300)
    late = {}
    for rate in (1e-5, 3e-3):
        network = toy.ToyConfig("relu", width=16, depth=3)
        rows = training.train(network, images, seed=0, steps=30, learning_rate=rate, snapshots=[24, 30])
        late[rate] = list(rows)[-1].train_loss
    choice = ge.choose_rates(toy.ToyConfig("relu", width=16, depth=3), "adam", [0.32], images, config)[0.32]
    assert choice.rate == min(late, key=late.get)
    assert choice.loss == pytest.approx(late[choice.rate], rel=1e-4)


def test_a_diverged_seed_is_recorded_as_such_and_the_others_keep_their_numbers(monkeypatch):
    cell = Cell("c", {"network": "res-none", "optimizer": "sgd"})
    calm = ge.run_cell(cell, SMALL)

    class Wild(recording.Stack):
        def advance(self, to):
            super().advance(to)
            if self.gradient_sum is not None and to == 30:  # the recorded run, not the choice
                self.params.weights[1] = torch.nan

    monkeypatch.setattr(recording, "Stack", Wild)
    wild = ge.run_cell(cell, SMALL)
    assert wild[0].metrics == calm[0].metrics and wild[2].metrics == calm[2].metrics
    rate = calm[1].metrics["choice_rate"]
    assert wild[1].diverged == f"The parameters were not finite after step 30, at rate {rate:g}."
    assert set(wild[1].metrics) == set(calm[1].metrics)
    assert math.isnan(wild[1].metrics["weight_v1"]) and wild[1].metrics["choice_rate"] == rate


def test_a_killed_grid_goes_on_to_the_same_record(tmp_path, monkeypatch):
    whole = ge.continuity_grid()
    cells = [c for c in whole.cells if c.settings["optimizer"] == "sgd"][:2]
    small = Experiment("small-grid", whole.claims, SMALL, cells, ge.run_cell)
    straight = make(small, tmp_path / "a", tmp_path / "a")
    real, calls = ge.choose_rates, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(ge, "choose_rates", killed)
    with pytest.raises(KeyboardInterrupt):
        make(small, tmp_path / "b", tmp_path / "b")
    resumed = make(small, tmp_path / "b", tmp_path / "b")
    assert len(calls) == 3  # the first cell was not run again
    assert (resumed.metrics, resumed.curves) == (straight.metrics, straight.curves)
