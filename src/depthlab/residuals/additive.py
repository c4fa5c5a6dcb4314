"""The plain residual connection."""

import torch
from torch import Tensor

from depthlab.kernels.mgr.reference import wide
from depthlab.residuals.base import Residual, State


class PreNorm(Residual):
    """x' = x + F(RMSNorm(x)): one stream, no parameters.

    Source: He et al., arXiv 1512.03385 (the sum); Xiong et al., arXiv 2002.04745 (the norm in front of F).
    """

    def read_weights(self, layer: int, state: State) -> Tensor:
        return torch.ones(1, device=state.streams.device)

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        one = torch.ones(1, device=state.streams.device)
        return one.unsqueeze(0), one

    def _write(self, layer: int, update: Tensor, state: State) -> State:
        x, f = wide(state.streams, update.unsqueeze(-2))
        return State(layer + 1, (x + f).to(update.dtype))

    def _read(self, layer: int, state: State) -> Tensor:
        return self._finish(state.streams.squeeze(-2), state.streams.dtype)
