"""Which rotations leave a toy network as it is, and whether training respects them.

A change of basis h_l -> R_l h_l at every depth turns one layer's h_{l+1} = (1 + W_l) h_l into another of the same form
with ``W_l' = R_{l+1} (1 + W_l) R_l^T - 1``. In the linear residual network this is exact for *independent* rotations:
a whole family of weights computes one function, and the angle between neighbouring layers' singular vectors is not the
same within it. With an activation or a norm that any rotation commutes with it is exact only for *one* rotation at all
depths, which cannot change that angle; with an elementwise activation for none.

Two things follow that a drift account must meet. Gradients turn with the weights, so under SGD and Muon the whole
trajectory does: which member of its family a network is, its initialisation decides, and the loss pushes it towards
none. And for a continuous symmetry gradient flow conserves something: here, in the linear residual network, `balance`
(Du, Hu, Lee 2018, "Algorithmic regularization in learning deep homogeneous models", for networks without the residual).
Finite steps, the noise of batches, and optimizers that work entry by entry (Adam) are what is left to cause drift.
"""

import torch
from torch import Tensor

from depthlab.continuity import optimizers, toy


def rotations(count: int, d: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Independent random orthogonal matrices [count, d, d], uniform (Haar) by QR of normal matrices."""
    q, r = torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=dtype))
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def turn(params: toy.Params, turns: Tensor) -> toy.Params:
    """One network's weights in other bases: turns [L + 1, d, d], the rotation of h_0 .. h_L.

    Equal rotations at all depths give W_l' = R W_l R^T; identities at both ends leave input projection and head alone.

    Raises:
        ValueError: another number or size of rotations than the network has.
    """
    depth, d = params.weights.shape[-3], params.weights.shape[-1]
    if turns.shape != (depth + 1, d, d):
        raise ValueError(f"turn got rotations {list(turns.shape)}; this network needs {[depth + 1, d, d]}.")
    one = torch.eye(d, dtype=turns.dtype)
    return toy.Params(
        w_in=turns[0] @ params.w_in,
        b_in=turns[0] @ params.b_in,
        weights=turns[1:] @ (one + params.weights) @ turns[:-1].mT - one,
        w_out=params.w_out @ turns[-1].mT,
        b_out=params.b_out,
    )


@torch.no_grad()
def change_of_outputs(params: toy.Params, turns: Tensor, config: toy.ToyConfig, x: Tensor) -> float:
    """How much turning changes the network's outputs on x [B, inputs]: largest difference over largest output."""
    before = toy.forward(params, x, config)
    after = toy.forward(turn(params, turns), x, config)
    return float((after - before).abs().max() / before.abs().max())


def change_of_training(
    params: toy.Params,
    turns: Tensor,
    config: toy.ToyConfig,
    x: Tensor,
    labels: Tensor,
    *,
    optimizer: str,
    rate: float,
    steps: int,
) -> float:
    """Train the network and the turned one on one batch: how far the second ends from the first one turned.

    The distance between the square layers over how far they moved; 0 where training respects the symmetry.
    """
    ends = []
    for start in (params, turn(params, turns)):
        trained = toy.Params(*(p.clone().requires_grad_() for p in start))
        updaters = optimizers.build(optimizer, [(trained, rate)])
        for _ in range(steps):
            for updater in updaters:
                updater.zero_grad()
            toy.loss(trained, x, labels, config).backward()
            for updater in updaters:
                updater.step()
        ends.append(toy.Params(*(p.detach() for p in trained)))
    expected = turn(ends[0], turns).weights
    moved = expected - turn(params, turns).weights
    return float((ends[1].weights - expected).norm() / moved.norm())


def balance(weights: Tensor) -> Tensor:
    """``M_{l+1}^T M_{l+1} - M_l M_l^T`` with M_l = 1 + W_l, of neighbours: [.., L, d, d] -> [.., L - 1, d, d].

    Gradient flow conserves it exactly in the linear residual network, whatever the data and the loss.
    """
    one = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    lower, upper = one + weights[..., :-1, :, :], one + weights[..., 1:, :, :]
    return upper.mT @ upper - lower @ lower.mT
