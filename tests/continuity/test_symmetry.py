"""Exact symmetries of the toy networks: which rotations, and which training respects them."""

from dataclasses import replace

import pytest
import torch

from depthlab.continuity import symmetry, toy

D, L = 20, 4


def config(name: str) -> toy.ToyConfig:
    return replace(toy.VARIANTS[name], width=D, depth=L, inputs=15, classes=5)


def network(name: str) -> toy.Params:
    params = toy.init(config(name), torch.Generator().manual_seed(0), torch.float64)
    return params._replace(b_in=params.w_in[:, 0].clone())


def turns(kind: str) -> torch.Tensor:
    """ "independent" at every depth, "inner" (independent, but none at the ends), "global" (one everywhere)."""
    found = symmetry.rotations(L + 1, D, torch.Generator().manual_seed(1))
    if kind == "global":
        return found[:1].expand(L + 1, -1, -1)
    if kind == "inner":
        found[0] = found[-1] = torch.eye(D)
    return found


X = 2 * torch.randn(12, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.arange(12) % 5
EQUIVARIANT = ("res-radial", "res-radial-unit", "res-clip", "res-none-rms", "res-none-clip")
ELEMENTWISE = ("res-relu", "res-gelu", "res-tanh", "res-shrink", "res-none-ln")


def test_rotations_are_orthogonal_and_independent():
    found = turns("independent")
    torch.testing.assert_close(found @ found.mT, torch.eye(D, dtype=torch.float64).expand(L + 1, -1, -1))
    assert (found[0] - found[1]).abs().max() > 0.1


def test_the_linear_network_allows_independent_rotations_at_every_layer():
    for kind in ("independent", "inner", "global"):
        assert symmetry.change_of_outputs(network("res-none"), turns(kind), config("res-none"), X) < 1e-13


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_networks_that_commute_with_rotations_allow_one_rotation_only(name):
    assert symmetry.change_of_outputs(network(name), turns("global"), config(name), X) < 1e-13
    assert symmetry.change_of_outputs(network(name), turns("independent"), config(name), X) > 0.01


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_networks_allow_no_rotation(name):
    for kind in ("global", "independent"):
        assert symmetry.change_of_outputs(network(name), turns(kind), config(name), X) > 0.01


def test_one_rotation_leaves_the_angles_between_layers_and_independent_ones_do_not():
    from depthlab.continuity import metrics

    before = network("res-none")
    same = symmetry.turn(before, turns("global")).weights
    torch.testing.assert_close(metrics.alignment(same), metrics.alignment(before.weights))
    torch.testing.assert_close(metrics.spectral_alignment(same), metrics.spectral_alignment(before.weights))
    other = symmetry.turn(before, turns("independent")).weights
    assert (metrics.spectral_alignment(other) - metrics.spectral_alignment(before.weights)).abs().max() > 0.05


@pytest.mark.parametrize(
    ("optimizer", "rate", "respects"),
    [("sgd", 1e-2, True), ("muon", 1e-2, True), ("adam", 1e-3, False), ("adam-beta2-0", 1e-3, False)],
)
def test_sgd_and_muon_respect_inner_rotations_and_adam_does_not(optimizer, rate, respects):
    error = symmetry.change_of_training(
        network("res-none"), turns("inner"), config("res-none"), X, LABELS, optimizer=optimizer, rate=rate, steps=40
    )
    assert error < 1e-9 if respects else error > 0.1


def test_gradient_flow_conserves_the_balance_of_the_linear_network_only():
    def moved(name: str, rate: float) -> float:
        trained = toy.Params(*(p.clone().requires_grad_() for p in network(name)))
        start = symmetry.balance(network(name).weights)
        for _ in range(round(0.4 / rate)):
            gradients = torch.autograd.grad(toy.loss(trained, X, LABELS, config(name)), trained)
            with torch.no_grad():
                for p, g in zip(trained, gradients, strict=True):
                    p -= rate * g
        travelled = (trained.weights - network(name).weights).norm()
        return float((symmetry.balance(trained.weights.detach()) - start).norm() / travelled.detach())

    coarse, fine = moved("res-none", 2e-2), moved("res-none", 2e-3)
    assert fine < 0.02 and coarse / fine == pytest.approx(10, rel=0.3)  # what is left is the finite step's
    assert moved("res-relu", 2e-3) > 10 * fine


def test_a_wrong_number_of_rotations_is_named():
    with pytest.raises(ValueError, match=rf"needs \[{L + 1}, {D}, {D}\]"):
        symmetry.turn(network("res-none"), turns("inner")[1:])
