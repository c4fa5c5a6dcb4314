"""The optimizers of the toy networks, for one network or for a stack with its own learning rate for each network.

Adam and momentum SGD are torch's. Muon is written here because it must treat a stack [.., m, n] as many matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlab.continuity import toy

# Adam without a second-moment average (beta2 = 0) divides by |g| + eps, so eps decides the size of small steps; at
# torch's default 1e-8 nearly every entry moves by the full rate and the networks go non-finite.
BETA2_ZERO_EPS = 1e-3
SGD_MOMENTUM = 0.9
MUON_MOMENTUM = 0.95
MUON_EDGE_RATE = 1e-3  # Adam's, for what is no hidden matrix: input projection, head, biases

NAMES = ("adam", "adam-beta2-0", "sgd", "muon")


def build(
    name: str, groups: Sequence[tuple[toy.Params, float]], *, capturable: bool = False
) -> list[torch.optim.Optimizer]:
    """Optimizers that together update every tensor of `groups`, each pair's tensors at its own learning rate.

    Args:
        name: "adam"; "adam-beta2-0" (betas 0.9 and 0, eps 1e-3); "sgd" (momentum 0.9); "muon" (hidden matrices by Muon
            at the given rate, all else by Adam at 1e-3).
        capturable: keep all state on the device, so that `step` can be captured in a CUDA graph.

    Raises:
        ValueError: an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"optimizers.build got {name!r}; use one of {', '.join(NAMES)}.")
    every = [{"params": list(params), "lr": rate} for params, rate in groups]
    if name == "adam":
        return [torch.optim.Adam(every, fused=True, capturable=capturable)]
    if name == "adam-beta2-0":
        return [torch.optim.Adam(every, betas=(0.9, 0.0), eps=BETA2_ZERO_EPS, fused=True, capturable=capturable)]
    if name == "sgd":
        return [torch.optim.SGD(every, momentum=SGD_MOMENTUM)]
    hidden = [{"params": [params.weights], "lr": rate} for params, rate in groups]
    edges = [t for params, _ in groups for field, t in params._asdict().items() if field != "weights"]
    return [Muon(hidden), torch.optim.Adam(edges, lr=MUON_EDGE_RATE, fused=True, capturable=capturable)]


def orthogonalize(matrices: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Each matrix of [.., m, n] with its singular values brought near 1 (0.7 to 1.2) and its directions kept.

    Newton-Schulz iteration of a quintic whose slope at 0 is as steep as convergence allows. It is computed in `dtype`,
    by default bfloat16 on CUDA and the given dtype elsewhere; the result has the given dtype.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), whose coefficients
    these are.
    """
    x = matrices.to(dtype or (torch.bfloat16 if matrices.is_cuda else matrices.dtype))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(1e-7)  # spectral norm at most 1
    x = x.reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # one kernel in place of four
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return (x if wide else x.mT).reshape(matrices.shape).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose every update is orthogonalised: Nesterov momentum 0.95, no weight decay.

    Each parameter is a matrix or a stack of matrices [.., m, n], moved by rate x sqrt(max(1, m / n)) x an orthogonal
    matrix. Source: as `orthogonalize`.
    """

    def __init__(self, params, lr: float = 1e-3, momentum: float = MUON_MOMENTUM) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(average, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)
