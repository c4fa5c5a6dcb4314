"""Drift against mixing: the measures tell planted cases apart, and the interventions do what they say and no more."""

from dataclasses import replace

import pytest
import torch

from depthlab.continuity import drift, drift_experiments, metrics, toy, training
from depthlab.continuity.batched import Net, Stack
from depthlab.continuity.leading import leading_spectrum
from depthlab.runs import Cell

D, LAYERS = 80, 4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers_from(bases: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Matrices [1, L, D, D] whose leading right singular vectors are the columns of `bases`."""
    out = [torch.linalg.qr(normal(D, 10, seed=50 + i))[0] * values @ b.T for i, b in enumerate(bases)]
    return torch.stack(out)[None] + 1e-3 * normal(1, len(bases), D, D, seed=9)


def turned(basis: torch.Tensor, seed: int) -> torch.Tensor:
    return basis @ torch.linalg.qr(normal(10, 10, seed=seed))[0]


VALUES = 3 - torch.arange(10, dtype=torch.float64) / 50


def test_mixing_keeps_the_share_in_the_neighbours_span_and_drift_does_not():
    shared = torch.linalg.qr(normal(D, 10, seed=1))[0]
    same = leading_spectrum(layers_from([shared] * LAYERS, VALUES), 10)
    mixed = leading_spectrum(layers_from([turned(shared, 20 + i) for i in range(LAYERS)], VALUES), 10)
    drifted = leading_spectrum(
        layers_from([torch.linalg.qr(normal(D, 10, seed=30 + i))[0] for i in range(LAYERS)], VALUES), 10
    )
    scores = {name: drift.neighbour_scores(s) for name, s in (("same", same), ("mixed", mixed), ("drifted", drifted))}
    assert scores["same"]["weight_v1"] > 0.99
    assert scores["mixed"]["weight_v1"] < 0.7 and scores["drifted"]["weight_v1"] < 0.3
    for name in ("weight_v1_in_span", "overlap_10"):
        assert scores["mixed"][name] > 0.99 and scores["drifted"][name] < 0.3, name
    assert scores["mixed"]["overlap_2"] < 0.6
    own = {name: drift.own_scores(same, s) for name, s in (("mixed", mixed), ("drifted", drifted))}
    assert own["mixed"]["own_v1"] < 0.7 and own["mixed"]["own_in_span"] > 0.99 and own["mixed"]["own_overlap_10"] > 0.99
    assert own["drifted"]["own_in_span"] < 0.3
    assert drift.own_scores(same, same)["own_v1"] > 1 - 1e-9


@pytest.fixture(scope="module")
def digits() -> training.Digits:
    return training.Digits(*(t[:300] for t in training.digits(dtype=torch.float64)))


SEEDS = (0, 1)


def stack_of(digits, arms, steps=60, name="res-none") -> tuple[Stack, list[str]]:
    config = replace(toy.VARIANTS[name], width=D, depth=LAYERS)
    stack = Stack(config, [Net(s, 0.32, 1e-3) for _ in arms for s in SEEDS], digits, steps=steps)
    return stack, [arm for arm in arms for _ in SEEDS]


def test_each_arm_changes_only_what_it_names(digits):
    stack, arms = stack_of(digits, drift.ARMS)
    stack.advance(10)
    before = stack.params.weights.clone()
    control = drift.GapControl(stack, arms)
    control(stack)
    after, old = stack.params.weights, metrics.spectrum(before)
    change = after - before
    new = metrics.spectrum(after)
    size = {arm: change[2 * i : 2 * i + 2].flatten(2).norm(dim=-1) for i, arm in enumerate(drift.ARMS)}
    by_arm = {arm: slice(2 * i, 2 * i + 2) for i, arm in enumerate(drift.ARMS)}
    assert torch.equal(after[by_arm["plain"]], before[by_arm["plain"]])
    for arm in ("raise", "shrink"):
        part = by_arm[arm]
        gap = metrics.gap(new.values[part])
        assert (gap - drift.HELD_GAP).abs().max() < 0.02, arm
        turned_by = (new.directions[part][..., 0] * old.directions[part][..., 0]).sum(-1).abs()
        assert turned_by.min() > 1 - 1e-3, arm
    torch.testing.assert_close(
        new.values[by_arm["shrink"]][..., 0], old.values[by_arm["shrink"]][..., 0], rtol=1e-3, atol=0
    )
    assert (torch.linalg.matrix_rank(change[by_arm["raise"]], atol=1e-6) == 1).all()
    closed = metrics.gap(old.values[by_arm["close"]]) > drift.CLOSED_GAP + 0.01
    assert closed.any() and (new.values[by_arm["close"]][..., 0] <= old.values[by_arm["close"]][..., 0] + 1e-9).all()
    assert (metrics.gap(new.values[by_arm["close"]])[closed] < drift.CLOSED_GAP + 0.01).all()
    # controls: the same size as their partner, elsewhere
    for arm in ("raise", "close"):
        torch.testing.assert_close(size[f"{arm}-control"], size[arm])
        _, _, vh = torch.linalg.svd(change[by_arm[f"{arm}-control"]])
        moved = size[arm] > 0
        assert (vh[..., 0, :] * old.directions[by_arm["raise"]][..., 0]).sum(-1).abs()[moved].max() < 0.5
    factor = after[by_arm["shrink-control"]] / before[by_arm["shrink-control"]]
    assert (factor.flatten(2).std(-1) < 1e-9).all() and factor.max() < 1


def test_a_held_gap_stays_open_and_a_closed_one_shut_through_training(digits):
    stack, arms = stack_of(digits, ("plain", "raise", "shrink", "close"))
    free, _ = stack_of(digits, ("plain",))
    stack.advance(10), free.advance(40)
    stack.intervene(drift.GapControl(stack, arms))
    stack.advance(40)
    gaps = metrics.gap(metrics.spectrum(stack.params.weights).values).view(4, len(SEEDS), LAYERS)
    assert (gaps[1:3] > 1.4).all() and (gaps[3] < 1.06).all()
    assert (gaps[0] < 1.4).all()
    torch.testing.assert_close(stack.params.weights[: len(SEEDS)], free.params.weights, rtol=0, atol=1e-12)


def test_wrong_arms_are_named(digits):
    stack, arms = stack_of(digits, ("plain", "raise"))
    with pytest.raises(ValueError, match="3 arms for 4"):
        drift.GapControl(stack, arms[:3])
    with pytest.raises(ValueError, match="'hold'"):
        drift.GapControl(stack, ["hold"] * 4)
    with pytest.raises(ValueError, match="'raise-control' without its partner at seed 0"):
        drift.GapControl(stack, ["raise-control"] * 4)


def test_the_experiment_records_every_arm_and_moment():
    experiment = drift_experiments.continuity_drift()
    config = experiment.config | {"width": 16, "depth": 3, "seeds": [0, 1], "start": 6, "lag": 2, "train_size": 200}
    arms = ("plain", "raise", "raise-control")
    settings = {"name": "n", "network": "res-none", "points": [0, 3, 6, 10], "arms": list(arms)}
    results = drift_experiments.run_cell(Cell("n", settings), config)
    assert [(r.variant, r.seed) for r in results] == [(f"n/{a}", s) for a in arms for s in (0, 1)]
    assert len({tuple(r.metrics) for r in results}) == 1
    plain, held = results[0], results[2]
    curve = plain.curves["weight_v1"]
    assert curve.x == [0, 3, 6, 10] and plain.metrics["weight_v1"] == pytest.approx(curve.y[-1], abs=1e-5)
    assert plain.metrics["weight_v1_at_peak"] == pytest.approx(max(curve.y), abs=1e-5)
    assert plain.metrics["weight_v1_at_start"] == pytest.approx(curve.y[2], abs=1e-5)
    assert held.metrics["weight_v1_at_start"] == plain.metrics["weight_v1_at_start"]
    assert plain.curves["since_start_v1"].y[0] == 1.0 and plain.curves["since_start_v1"].x == [6, 10]
    own = plain.curves["own_v1"].y
    assert plain.metrics["own_v1_mean"] == pytest.approx((own[2] + own[3]) / 2, abs=1e-4)
