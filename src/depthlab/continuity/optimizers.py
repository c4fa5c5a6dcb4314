"""The optimizers of the toy networks, for one network or for a stack with its own learning rate for each network.

Adam and momentum SGD are torch's, Muon is `depthlab.lm`'s: it treats a stack [.., m, n] as many matrices.
"""

from collections.abc import Sequence

import torch

from depthlab.continuity import toy
from depthlab.lm.optimizers import Muon

# Adam without a second-moment average (beta2 = 0) divides by |g| + eps, so eps decides the size of small steps; at
# torch's default 1e-8 nearly every entry moves by the full rate and the networks go non-finite.
BETA2_ZERO_EPS = 1e-3
SGD_MOMENTUM = 0.9
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
