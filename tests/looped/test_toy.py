"""The linear recurrence: growth by the spectral radius, the shared gradient as a sum over loops, descent."""

import pytest
import torch

from depthlab.looped import toy


def vectors(width, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("radius", [0.5, 1.0, 1.3])
def test_states_grow_by_the_spectral_radius(radius):
    matrix = toy.random_matrix(6, radius, torch.Generator().manual_seed(0))
    assert toy.spectral_radius(matrix) == pytest.approx(radius)
    norms = toy.unroll(matrix, vectors(6, 1)[0], 400).norm(dim=-1)
    assert float((norms[400] / norms[200]) ** (1 / 200)) == pytest.approx(radius, rel=0.02)


def test_an_injected_vector_is_added_in_every_loop():
    matrix, (start, x) = toy.random_matrix(4, 0.8, torch.Generator().manual_seed(0)), vectors(4, 2)
    states = toy.unroll(matrix, start, 3, x)
    assert states.shape == (4, 4) and torch.equal(states[0], start)
    torch.testing.assert_close(states[3], matrix @ (matrix @ (matrix @ start + x) + x) + x)
    fixed = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - matrix, x)  # radius below 1: it converges
    torch.testing.assert_close(toy.unroll(matrix, start, 300, x)[-1], fixed)


@pytest.mark.parametrize("injected", [False, True])
def test_the_gradient_of_a_shared_matrix_is_the_sum_of_its_loops_terms(injected):
    matrix = toy.random_matrix(5, 1.1, torch.Generator().manual_seed(0))
    start, target, x = vectors(5, 3)
    x = x if injected else None
    copies = [matrix.clone().requires_grad_() for _ in range(4)]
    h = start
    for own in copies:
        h = own @ h + (0 if x is None else x)
    ((h - target).square().sum() / 2).backward()
    terms = toy.gradient_terms(matrix, start, 4, (h - target).detach(), x)
    for term, own in zip(terms, copies, strict=True):  # those of an untied stack
        torch.testing.assert_close(term, own.grad)
    shared = matrix.clone().requires_grad_()
    ((toy.unroll(shared, start, 4, x)[-1] - target).square().sum() / 2).backward()
    torch.testing.assert_close(terms.sum(0), shared.grad)


def test_descent_takes_gradient_steps_tied_untied_and_truncated():
    matrix = toy.random_matrix(4, 0.9, torch.Generator().manual_seed(0))
    start, target = vectors(4, 2)
    h = toy.unroll(matrix, start, 3)
    terms = toy.gradient_terms(matrix, start, 3, h[-1] - target)
    runs = {
        "tied": (terms.sum(0).norm(), {}),
        "untied": (terms.norm(), {"tied": False}),
        "truncated": (terms[2].norm(), {"backprop_loops": 1}),
    }
    for expected, how in runs.values():
        found = toy.descend(matrix, start, target, 3, rate=0.01, steps=200, **how)
        torch.testing.assert_close(found.gradient_norms[0], expected)
        torch.testing.assert_close(found.losses[0], (h[-1] - target).square().sum() / 2)
        assert found.losses[-1] < 0.5 * found.losses[0]
    one = toy.descend(matrix, start, target, 3, rate=0.01, steps=1)
    assert one.radius == pytest.approx(toy.spectral_radius(matrix - 0.01 * terms.sum(0)))


def test_a_descent_that_explodes_stops_where_it_is_no_longer_finite():
    matrix = toy.random_matrix(4, 1.5, torch.Generator().manual_seed(0))
    found = toy.descend(matrix, *vectors(4, 2), 12, rate=1.0, steps=500)
    assert len(found.losses) < 500 and found.losses.isfinite().all()
