"""The seven rules once more, in numpy: one token, a loop over streams, parameters by their names in the state dict."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from depthlab.residuals import build

EPS = 1e-6


def norm(v):
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPS)


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def softmax(v):
    e = np.exp(v - np.max(v))
    return e / e.sum()


def prenorm(p, x, updates, skip, n):
    reads = [x]
    for layer, f in enumerate(updates):
        if layer not in skip:
            x = x + f
        reads.append(x)
    return reads


def hyper(p, x, updates, skip, n):
    s, reads = np.stack([x] * n), []
    for layer, f in enumerate(updates):
        own = p[layer]
        k = norm(s)
        a = [own["static_read"][i] + own["read_mix_scale"] * np.tanh(k[i] @ own["dynamic_read"]) for i in range(n)]
        reads.append(sum(a[i] * s[i] for i in range(n)))
        if layer in skip:
            continue
        mixed = np.zeros_like(s)
        for j, i in itertools.product(range(n), range(n)):
            weight = own["static_mix"][i, j] + own["read_mix_scale"] * np.tanh(k[i] @ own["dynamic_mix"][:, j])
            mixed[j] += weight * s[i]
        b = [own["static_write"][i] + own["write_scale"] * np.tanh(k[i] @ own["dynamic_write"]) for i in range(n)]
        s = mixed + np.outer(b, f)
    return [*reads, s.mean(0)]


def mhc_lite(p, x, updates, skip, n):
    s, reads = np.stack([x] * n), []
    for layer, f in enumerate(updates):
        own = p[layer]
        flat = norm(s.reshape(-1))
        read = sigmoid(own["read_scale"] * (flat @ own["read_weight"]) + own["read_bias"])
        reads.append(read @ s)
        if layer in skip:
            continue
        write = 2 * sigmoid(own["write_scale"] * (flat @ own["write_weight"]) + own["write_bias"])
        shares = softmax(own["mix_scale"] * (flat @ own["mix_weight"]) + own["mix_bias"]) if n > 1 else [1.0]
        mixed = np.zeros_like(s)
        for share, order in zip(shares, itertools.permutations(range(n)), strict=True):
            mixed += share * s[list(order)]
        s = mixed + np.outer(write, f)
    return [*reads, s.mean(0)]


def attention_read(own, sources):
    weights = softmax(np.array([own["query"] @ (own["key_weight"] * norm(v)) for v in sources]))
    return sum(a * v for a, v in zip(weights, sources, strict=True))


def attnres(p, x, updates, skip, n):
    sources, reads = [x], [x]
    for layer, f in enumerate(updates):
        if layer not in skip:
            sources.append(f)
        reads.append(attention_read(p[layer], sources))
    return reads


def attnres_block(p, x, updates, skip, n):
    count = len(updates)
    blocks = min(8, count)
    sums, reads = {}, [x]
    for layer, f in enumerate(updates):
        block = math.floor(layer * blocks / count)
        if layer not in skip:
            sums[block] = sums.get(block, 0) + f
        reads.append(attention_read(p[layer], [x, *sums.values()]))
    return reads


def mgr(gate):
    def rule(p, x, updates, skip, n):
        slots, reads = {0: x}, [x]
        root = np.sqrt(x.size)
        for layer, f in enumerate(updates):
            own = p[layer]
            if layer not in skip:
                if layer < n - 1:
                    slots[layer + 1] = f
                else:
                    z = np.array([own["w_gate"] @ norm(s) / root for s in slots.values()])
                    if gate == "independent":
                        beta = sigmoid(z + own["bias"][list(slots)])
                    else:
                        beta = softmax(np.concatenate([own["bias"], z]))[1:]
                    slots = {i: (1 - b) * s + b * f for b, (i, s) in zip(beta, slots.items(), strict=True)}
            streams = list(slots.values())
            a = softmax(np.array([own["w_pool"] @ norm(s) / root for s in streams])) if n > 1 else [1.0]
            reads.append(sum(w * s for w, s in zip(a, streams, strict=True)))
        return reads

    return rule


RULES = {
    "prenorm": prenorm,
    "hc": hyper,
    "mhc-lite": mhc_lite,
    "attnres": attnres,
    "attnres-block": attnres_block,
    "mgr-independent": mgr("independent"),
    "mgr-competitive": mgr("competitive"),
}


def parameters_by_layer(residual):
    layers = [{} for _ in range(residual.n_sublayers)]
    for name, value in residual.state_dict().items():
        if name.startswith("residual_layers."):
            _, layer, own = name.split(".")
            layers[int(layer)][own] = value.double().numpy()
    return layers


def reads_by_numpy(scheme, residual, x, updates, skip=(), normalize=False):
    """All reads [L + 1, tokens, C] of x [tokens, C] and updates [L, tokens, C]."""
    p, n = parameters_by_layer(residual), getattr(residual, "n_streams", 1)
    tokens = [RULES[scheme](p, x[t], updates[:, t], skip, n) for t in range(len(x))]
    reads = np.stack([np.stack(reads) for reads in tokens], 1)
    return norm(reads) if normalize else reads


@pytest.fixture
def truth():
    return SimpleNamespace(reads=reads_by_numpy)


@pytest.fixture
def shake():
    """Move every parameter away from its start value, so that no term of a rule can hide."""

    def away(residual, seed=0, size=0.7):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in residual.parameters():
                parameter += size * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)
        return residual

    return away


@pytest.fixture
def make(shake):
    """build(..), shaken, in float64."""

    def shaken(scheme, d_model=5, n_sublayers=6, **how):
        return shake(build(scheme, d_model, n_sublayers, **how).double())

    return shaken


@pytest.fixture
def network():
    """`n_sublayers` small nonlinear sublayers of width `d_model`."""

    def layers(d_model, n_sublayers, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        make_one = lambda: torch.nn.Sequential(torch.nn.Linear(d_model, d_model), torch.nn.Tanh())  # noqa: E731
        return torch.nn.ModuleList(make_one() for _ in range(n_sublayers)).to(dtype)

    return layers
