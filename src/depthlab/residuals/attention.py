"""Attention Residuals: each sublayer reads a softmax over the embedding and earlier outputs, or over sums of them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from depthlab.kernels.mgr.reference import inverse_rms, wide
from depthlab.residuals.base import Float32, Residual, State


class _Query(Float32):
    """One read: its query and the weight of its keys' RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.key_weight = nn.Parameter(torch.ones(width, dtype=torch.float32))


class AttnRes(Residual):
    """Full Attention Residuals: sublayer l reads p = sum_j a_j v_j over v = (x_0, F_0, .., F_(l-1)).

        a = softmax_j( q_l . (k_l * RMSNorm(v_j)) )      q_l = 0 and k_l = 1 at the start; no 1/sqrt(C)

    So every read starts as the mean of all that came before. The output is one more read. The first read has one source
    and owns no query. The state holds every v_j apart, and 1/RMS of each.

    Source: arXiv 2603.15031 (Full AttnRes).
    """

    def __init__(self, d_model: int, n_sublayers: int, *, normalize: bool = True) -> None:
        super().__init__(d_model, n_sublayers, normalize=normalize)
        self.residual_layers = nn.ModuleList(_Query(d_model) for _ in range(n_sublayers))  # [l] is the read after l

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for layer in self.residual_layers:
            layer.query.zero_()
            layer.key_weight.fill_(1)

    def read_weights(self, layer: int, state: State) -> Tensor:
        if layer == 0:
            return torch.ones(1, device=state.streams[0].device)
        own = self.residual_layers[layer - 1]
        _, query, key_weight = wide(state.extra[0], own.query, own.key_weight)
        weight = query * key_weight
        # Sources stay apart: a half-precision product with a float32 weight is float32, and keeps no copy for backward.
        logits = [(v * weight).sum(-1) * scale for v, scale in zip(state.streams, state.extra, strict=True)]
        return torch.stack(logits, -1).softmax(-1)

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        eye = torch.eye(len(state.streams) + 1, device=state.streams[0].device)
        return eye[:, :-1], eye[:, -1]

    def _open(self, x: Tensor) -> State:
        return State(0, (x,), (self._scale(x),))

    def _fits(self, state: State) -> bool:
        streams = state.streams
        apart = isinstance(streams, tuple) and len(streams) == len(state.extra) > 0
        return apart and all(source.shape[-1] == self.d_model for source in streams)

    def _write(self, layer: int, update: Tensor, state: State) -> State:
        sources, scales = self._stored(state, update.dtype)
        return State(layer + 1, (*sources, update), (*scales, self._scale(update)))

    def _read(self, layer: int, state: State) -> Tensor:
        weights = self.read_weights(layer, state).unsqueeze(-1).unbind(-2)
        pooled = sum(a * v for a, v in zip(weights, state.streams, strict=True))
        return self._finish(pooled, state.streams[0].dtype)

    def _scale(self, source: Tensor) -> Tensor:
        return inverse_rms(*wide(source), self.eps).squeeze(-1)

    def _stored(self, state: State, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Sources and scales in the dtype the state is stored in; the embedding's may differ, once."""
        if all(source.dtype == dtype for source in state.streams):
            return state.streams, state.extra
        sources = tuple(source.to(dtype) for source in state.streams)
        return sources, tuple(self._scale(source) for source in sources)


class BlockAttnRes(AttnRes):
    """Block Attention Residuals: the same read over x_0, the sums of finished blocks of layers, and the running sum.

    The sublayers form 8 blocks, sublayer l in block floor(8 l / L): blocks of 3 with L = 24, and each sublayer a block
    of its own with L <= 8. The first sublayer of a block opens a new sum, the others add to it. x_0 stays a source of
    its own.

    Source: arXiv 2603.15031 (Block AttnRes).
    """

    N_BLOCKS = 8

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        if self._opens(layer, state):
            return super().write_weights(layer, state)
        eye = torch.eye(len(state.streams), device=state.streams[0].device)
        return eye, eye[:, -1]

    def _write(self, layer: int, update: Tensor, state: State) -> State:
        if self._opens(layer, state):
            return super()._write(layer, update, state)
        sources, scales = self._stored(state, update.dtype)
        running, f = wide(sources[-1], update)
        running = (running + f).to(update.dtype)
        return State(layer + 1, (*sources[:-1], running), (*scales[:-1], self._scale(running)))

    def _opens(self, layer: int, state: State) -> bool:
        """Whether `layer` is the first of its block that was stepped (a pruned one leaves that to the next)."""
        block: Callable[[int], int] = lambda index: index * self.N_BLOCKS // self.n_sublayers  # noqa: E731
        return len(state.streams) == 1 or block(layer) != block(state.layer - 1)
