"""The linear recurrence h_t = A h_(t-1) + x, the smallest looped network: what sharing A does to gradients.

All is float64. Source: the argument is that of recurrent networks (Pascanu et al., arXiv 1211.5063, section 2).
"""

from typing import NamedTuple

import torch
from torch import Tensor


def spectral_radius(matrix: Tensor) -> float:
    """The largest absolute eigenvalue of a matrix [C, C]: states grow by it, loop by loop, in the long run."""
    return float(torch.linalg.eigvals(matrix.double()).abs().max())


def random_matrix(width: int, radius: float, generator: torch.Generator) -> Tensor:
    """A Gaussian matrix [C, C], scaled to have this spectral radius."""
    matrix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return matrix * (radius / spectral_radius(matrix))


def unroll(matrix: Tensor, start: Tensor, n_loops: int, injected: Tensor | None = None) -> Tensor:
    """States h_0 .. h_K, [K + 1, C], of h_t = A h_(t-1) + x from h_0 = `start` [C]; x = `injected` [C], or zero."""
    states = [start]
    for _ in range(n_loops):
        states.append(matrix @ states[-1] + (0 if injected is None else injected))
    return torch.stack(states)


def gradient_terms(
    matrix: Tensor, start: Tensor, n_loops: int, gradient: Tensor, injected: Tensor | None = None
) -> Tensor:
    """What each loop adds to the gradient of the shared A, [K, C, C]; `gradient` [C] is that of the loss at h_K.

        dL/dA = sum over t of (A^T)^(K - t) g h_(t-1)^T

    The sum over loops is the shared matrix's gradient; in an untied stack the terms are those of its K matrices.
    """
    states = unroll(matrix, start, n_loops, injected)
    terms = []
    for t in range(n_loops, 0, -1):
        terms.append(torch.outer(gradient, states[t - 1]))
        gradient = matrix.T @ gradient
    return torch.stack(terms[::-1])


class Descent(NamedTuple):
    """Losses and gradient norms [S] before each of S steps, and the spectral radius of the last matrix after them."""

    losses: Tensor
    gradient_norms: Tensor
    radius: float


def descend(
    matrix: Tensor,
    start: Tensor,
    target: Tensor,
    n_loops: int,
    *,
    rate: float,
    steps: int,
    tied: bool = True,
    backprop_loops: int | None = None,
) -> Descent:
    """Gradient descent on |h_K - target|^2 / 2 over A, or over K matrices of their own that start equal (not `tied`).

    With `backprop_loops` only the last so many loops are differentiated. Stops at the first loss that is not finite.
    """
    matrices = [matrix.clone().requires_grad_() for _ in range(1 if tied else n_loops)]
    losses, norms = [], []
    for _ in range(steps):
        h = start
        for t in range(1, n_loops + 1):
            h = matrices[0 if tied else t - 1] @ h
            if backprop_loops is not None and t <= n_loops - backprop_loops:
                h = h.detach()
        loss = (h - target).square().sum() / 2
        if not bool(loss.isfinite()):
            break
        found = torch.autograd.grad(loss, matrices, allow_unused=True)
        losses.append(loss.detach())
        norms.append(torch.stack([g.norm() for g in found if g is not None]).norm())
        with torch.no_grad():
            for own, g in zip(matrices, found, strict=True):
                if g is not None:
                    own -= rate * g
    finite = bool(matrices[-1].isfinite().all())
    return Descent(
        torch.stack(losses), torch.stack(norms), spectral_radius(matrices[-1].detach()) if finite else float("inf")
    )
