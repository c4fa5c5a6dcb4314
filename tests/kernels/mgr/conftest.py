"""An independent statement of one MGR layer: numpy, float64, a loop over tokens; DERIVATION.md equations by number."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch


def _softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def forward_token(s, f, w_gate, b, w_pool, gate, normalize, eps):
    """One token: s [n, C], f [C]. Returns all intermediate results that the backward needs."""
    n, width = s.shape
    v = SimpleNamespace()
    v.r = 1 / np.sqrt((s * s).mean(1) + eps)  # (1)
    v.z = np.array([w_gate @ s[i] for i in range(n)]) * v.r / np.sqrt(width)  # (2)
    if gate == "independent":
        v.beta = 1 / (1 + np.exp(-(v.z + b)))  # (3i)
    else:
        v.beta = _softmax(np.concatenate([b, v.z]))[1:]  # (3c)
    v.mixed = np.stack([(1 - v.beta[i]) * s[i] + v.beta[i] * f for i in range(n)])  # (4)
    _read(v, w_pool, normalize, eps)
    return v


def append_token(s, f, w_pool, normalize, eps):
    v = SimpleNamespace(mixed=np.concatenate([s, f[None]]))
    _read(v, w_pool, normalize, eps)
    return v


def pool_token(s, w_pool, normalize, eps):
    v = SimpleNamespace(mixed=s)
    _read(v, w_pool, normalize, eps)
    return v


def _read(v, w_pool, normalize, eps):
    width = v.mixed.shape[1]
    v.r_mixed = 1 / np.sqrt((v.mixed * v.mixed).mean(1) + eps)  # (1)
    v.a = v.mixed @ w_pool * v.r_mixed / np.sqrt(width)  # (5)
    v.alpha = _softmax(v.a)  # (6)
    v.p = v.alpha @ v.mixed  # (7)
    v.rho = 1 / np.sqrt((v.p * v.p).mean() + eps)
    v.h = v.rho * v.p if normalize else v.p  # (8)


def read_backward(v, w_pool, g_mixed, g_h, normalize):
    """Equations (9) to (12): gradient of the mixed streams, and this token's share of the query's."""
    width = v.p.size
    g_p = v.rho * g_h - v.rho**3 / width * (v.p @ g_h) * v.p if normalize else g_h  # (9)
    d_alpha = v.mixed @ g_p
    d_a = v.alpha * (d_alpha - v.alpha @ d_alpha)  # (10)
    direct = v.r_mixed[:, None] / np.sqrt(width) * w_pool - (v.a * v.r_mixed**2 / width)[:, None] * v.mixed
    d_mixed = g_mixed + v.alpha[:, None] * g_p + d_a[:, None] * direct  # (11)
    return d_mixed, (d_a * v.r_mixed) @ v.mixed / np.sqrt(width)  # (12)


def backward_token(v, s, f, w_gate, w_pool, gate, normalize, g_mixed, g_h, g_beta):
    """Equations (9) to (17). Returns gradients of s, f and this token's share of those of w_gate, bias, w_pool."""
    width = f.size
    d_mixed, d_w_pool = read_backward(v, w_pool, g_mixed, g_h, normalize)
    d_beta = (d_mixed * (f - s)).sum(1) + g_beta  # (13)
    if gate == "independent":  # (14)
        d_z = v.beta * (1 - v.beta) * d_beta
        d_bias = d_z
    else:
        mean = v.beta @ d_beta
        d_z = v.beta * (d_beta - mean)
        d_bias = np.array([-(1 - v.beta.sum()) * mean])
    d_f = v.beta @ d_mixed  # (15)
    direct = v.r[:, None] / np.sqrt(width) * w_gate - (v.z * v.r**2 / width)[:, None] * s
    d_s = (1 - v.beta)[:, None] * d_mixed + d_z[:, None] * direct  # (16)
    d_w_gate = (d_z * v.r) @ s / np.sqrt(width)  # (17)
    return d_s, d_f, d_w_gate, d_bias, d_w_pool


def layer(streams, update, w_gate, bias, w_pool, gate, normalize, eps, upstream):
    """All tokens of a mixing layer: three outputs and five gradients, [tokens, ..] arrays of float64."""
    outputs, gradients = [], []
    for s, f, (g_mixed, g_h, g_beta) in zip(streams, update, zip(*upstream, strict=True), strict=True):
        v = forward_token(s, f, w_gate, bias, w_pool, gate, normalize, eps)
        outputs.append((v.mixed, v.h, v.beta))
        gradients.append(backward_token(v, s, f, w_gate, w_pool, gate, normalize, g_mixed, g_h, g_beta))
    d_s, d_f, d_w_gate, d_bias, d_w_pool = (np.stack(g) for g in zip(*gradients, strict=True))
    return (
        *(np.stack(o) for o in zip(*outputs, strict=True)),
        *(d_s, d_f, d_w_gate.sum(0), d_bias.sum(0), d_w_pool.sum(0)),
    )


def layer_at(rebuilt, streams, update, w_gate, bias, w_pool, gate, normalize, eps, upstream):
    """The gradients of a mixing layer at rebuilt streams, with scores, gates and norms as the forward had them."""
    gradients = []
    for s, true, f, (g_mixed, g_h, g_beta) in zip(rebuilt, streams, update, zip(*upstream, strict=True), strict=True):
        v = forward_token(true, f, w_gate, bias, w_pool, gate, normalize, eps)
        v.mixed = np.stack([(1 - b) * x + b * f for b, x in zip(v.beta, s, strict=True)])
        v.p = v.alpha @ v.mixed
        gradients.append(backward_token(v, s, f, w_gate, w_pool, gate, normalize, g_mixed, g_h, g_beta))
    d_s, d_f, d_w_gate, d_bias, d_w_pool = (np.stack(g) for g in zip(*gradients, strict=True))
    return d_s, d_f, d_w_gate.sum(0), d_bias.sum(0), d_w_pool.sum(0)


@pytest.fixture
def truth():
    return SimpleNamespace(
        layer_at=layer_at, layer=layer, append_token=append_token, pool_token=pool_token, read_backward=read_backward
    )


@pytest.fixture
def make_inputs():
    """Random (streams, update, w_gate, bias, w_pool), sizes of 0.3 to 3, so that no gate is near its start value."""

    def make(tokens, n, width, gate, dtype=torch.float64, seed=0):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        size = torch.rand(tokens, n, 1, generator=g, dtype=torch.float64) * 2.7 + 0.3
        bias = normal(n if gate == "independent" else 1)
        inputs = (normal(tokens, n, width) * size, normal(tokens, width), 3 * normal(width), bias, 3 * normal(width))
        return tuple(x.to(dtype) for x in inputs)

    return make
