"""Hyper-Connections and mHC-lite: n streams, read, written and mixed by learned token-dependent matrices."""

import itertools
import math

import torch
from torch import Tensor, nn

from depthlab.kernels.mgr.reference import rms_normalize, wide
from depthlab.residuals.base import Float32, Residual, State

_SCALE = 0.01  # start value of the factor before every token-dependent part, both papers


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


def _mean_weights(streams: Tensor) -> Tensor:
    """1/n for each of the n streams [.., n, C], as exact as the streams allow."""
    n, dtype = streams.shape[-2], torch.promote_types(streams.dtype, torch.float32)
    return torch.full((n,), 1 / n, dtype=dtype, device=streams.device)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight in x's dtype, which `wide` has made the wider one."""
    return x @ weight.to(x.dtype)


class _HyperLayer(Float32):
    """One sublayer's static coefficients, and the weights of their token-dependent parts."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.static_read, self.static_mix, self.static_write = _zeros(n), _zeros(n, n), _zeros(n)
        self.dynamic_read, self.dynamic_mix, self.dynamic_write = _zeros(width), _zeros(width, n), _zeros(width)
        self.read_mix_scale, self.write_scale = _zeros(), _zeros()


class HyperConnections(Residual):
    """Dynamic Hyper-Connections: everything about the n streams is learned and depends on the token.

    With S the streams, N = RMSNorm(S) row by row, l the sublayer, at its start values

        read  r_i  = a_i  + c tanh(N_i . v)          a = e_(l mod n), c = 0.01, v = 0          h  = sum_i r_i S_i
        mix   M_ji = A_ij + c tanh(N_i . V_j)        A = identity, V = 0                       S' = M S + w F
        write w_i  = b_i  + d tanh(N_i . u)          b = 1, d = 0.01, u = 0

    The streams start as n copies of x_0; the output reads their mean. At the start values every stream is x_0 + sum F,
    so the scheme equals prenorm.

    Differences from the paper: the output there is the *sum* of the streams (a factor n that the final RMSNorm
    removes); the norm has no weight of its own (it would only multiply v, V and u); no parameter has weight decay.

    Source: arXiv 2409.19606, section 2 and appendix J (algorithm 2).
    """

    def __init__(self, d_model: int, n_sublayers: int, *, n_streams: int = 4, normalize: bool = True) -> None:
        super().__init__(d_model, n_sublayers, normalize=normalize)
        self.n_streams = n_streams
        self.residual_layers = nn.ModuleList(_HyperLayer(d_model, n_streams) for _ in range(n_sublayers))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for index, layer in enumerate(self.residual_layers):
            for parameter in layer.parameters():
                parameter.zero_()
            layer.static_read[index % self.n_streams] = 1
            layer.static_mix.fill_diagonal_(1)
            layer.static_write.fill_(1)
            layer.read_mix_scale.fill_(_SCALE)
            layer.write_scale.fill_(_SCALE)

    def read_weights(self, layer: int, state: State) -> Tensor:
        if layer == self.n_sublayers:
            return _mean_weights(state.streams)
        own = self.residual_layers[layer]
        return own.static_read + own.read_mix_scale * torch.tanh(_project(self._normed(state), own.dynamic_read))

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        own, normed = self.residual_layers[layer], self._normed(state)
        mix = own.static_mix + own.read_mix_scale * torch.tanh(_project(normed, own.dynamic_mix))
        write = own.static_write + own.write_scale * torch.tanh(_project(normed, own.dynamic_write))
        return mix.transpose(-1, -2), write

    def _normed(self, state: State) -> Tensor:
        streams, _ = wide(state.streams, self.residual_layers[0].dynamic_read)
        return rms_normalize(streams, self.eps)

    def _open(self, x: Tensor) -> State:
        return State(0, x.unsqueeze(-2).expand(*x.shape[:-1], self.n_streams, x.shape[-1]))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_streams={self.n_streams}"


class _LiteLayer(Float32):
    """One sublayer's biases, the weights of their token-dependent parts, and the factors before those."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.read_bias, self.read_weight, self.read_scale = _zeros(n), _zeros(n * width, n), _zeros()
        self.write_bias, self.write_weight, self.write_scale = _zeros(n), _zeros(n * width, n), _zeros()
        if n > 1:  # one stream has one permutation, whose logit changes nothing
            count = math.factorial(n)
            self.mix_bias, self.mix_weight, self.mix_scale = _zeros(count), _zeros(n * width, count), _zeros()


class MHCLite(Residual):
    """mHC-lite: Hyper-Connections whose stream mixer is doubly stochastic by construction.

    With x = RMSNorm of all n streams laid end to end (n C values), P_k the n! permutation matrices, l the sublayer

        read   r = sigmoid(c_r x W_r + b_r)                   b_r = -1, but +1 at l mod n        h  = sum_i r_i S_i
        write  w = 2 sigmoid(c_w x W_w + b_w)                 b_w = -1, but +1 at l mod n        S' = M S + w F
        mix    M = sum_k softmax(c_m x W_m + b_m)_k P_k       b_m = -8, but 0 at the identity

    with every c = 0.01 and every W = 0 at the start. The streams start as n copies of x_0; the output reads their mean.

    Differences from the paper: the output there is the *sum* of the streams (a factor n that the final RMSNorm
    removes); the norm has no weight of its own (it would only multiply the W); no parameter has weight decay.

    Source: arXiv 2601.05732 (mHC-lite), after arXiv 2512.24880 (mHC).
    """

    MAX_STREAMS = 5  # 5! = 120 permutations; 6! = 720 would cost more than the sublayer

    def __init__(self, d_model: int, n_sublayers: int, *, n_streams: int = 4, normalize: bool = True) -> None:
        if n_streams > self.MAX_STREAMS:
            raise ValueError(
                f"'mhc-lite' got n_streams={n_streams}, which needs {n_streams}! permutation matrices; "
                f"use at most {self.MAX_STREAMS}."
            )
        super().__init__(d_model, n_sublayers, normalize=normalize)
        self.n_streams = n_streams
        self.residual_layers = nn.ModuleList(_LiteLayer(d_model, n_streams) for _ in range(n_sublayers))
        # In the state dict on purpose: a buffer outside it would stay uninitialised after `to_empty`.
        shape = (math.factorial(n_streams), n_streams, n_streams)
        self.register_buffer("residual_permutations", torch.zeros(shape, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        rows = list(itertools.permutations(range(self.n_streams)))  # the identity comes first
        index = torch.tensor(rows, device=self.residual_permutations.device)
        self.residual_permutations.copy_(nn.functional.one_hot(index, self.n_streams))
        for index, layer in enumerate(self.residual_layers):
            for parameter in layer.parameters():
                parameter.zero_()
            for bias in (layer.read_bias, layer.write_bias):
                bias.fill_(-1)
                bias[index % self.n_streams] = 1
            layer.read_scale.fill_(_SCALE)
            layer.write_scale.fill_(_SCALE)
            if self.n_streams > 1:
                layer.mix_bias.fill_(-8)
                layer.mix_bias[0] = 0
                layer.mix_scale.fill_(_SCALE)

    def read_weights(self, layer: int, state: State) -> Tensor:
        if layer == self.n_sublayers:
            return _mean_weights(state.streams)
        own = self.residual_layers[layer]
        return torch.sigmoid(own.read_scale * _project(self._normed(state), own.read_weight) + own.read_bias)

    def write_weights(self, layer: int, state: State) -> tuple[Tensor, Tensor]:
        own, normed = self.residual_layers[layer], self._normed(state)
        write = 2 * torch.sigmoid(own.write_scale * _project(normed, own.write_weight) + own.write_bias)
        if self.n_streams == 1:
            return self.residual_permutations[0], write
        shares = (own.mix_scale * _project(normed, own.mix_weight) + own.mix_bias).softmax(-1)
        return _project(shares, self.residual_permutations.flatten(1)).unflatten(
            -1, (self.n_streams, self.n_streams)
        ), write

    def _normed(self, state: State) -> Tensor:
        streams, _ = wide(state.streams, self.residual_permutations)
        return rms_normalize(streams.flatten(-2), self.eps)

    def _open(self, x: Tensor) -> State:
        return State(0, x.unsqueeze(-2).expand(*x.shape[:-1], self.n_streams, x.shape[-1]))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_streams={self.n_streams}"
