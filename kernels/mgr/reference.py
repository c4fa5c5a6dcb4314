"""Multi-Gate Residuals in plain torch: the definition of truth, one function an equation.

Every function takes streams [.., n, C] with any leading dimensions and differentiates twice. Arithmetic runs in float32
or wider whatever the inputs are; `mix_and_pool`, `append_and_pool` and `attn_pool` round once, when they store.
Numbers (1) to (8) and (18) are those of DERIVATION.md. Nothing is checked here: `function.py` does that. Source: arXiv
2605.23259.

Products and sums are written out: `matmul` and `einsum` would drop to half precision under autocast.
"""

import torch
from torch import Tensor

from depthlab.theory import interpolate


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in the widest of their dtypes, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def inverse_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Equation (1): 1 / sqrt(mean(x^2) + eps) over the last dimension, kept as size 1; eps is inside the root."""
    mean = x.square().mean(-1, keepdim=True)
    return (mean + eps).sqrt().reciprocal()  # not rsqrt: its gradient cubes the result, which may leave float32's range


def rms_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm without a weight, [.., C] -> [.., C] in x's dtype, computed in float32 or wider."""
    (w,) = wide(x)
    return (w * inverse_rms(w, eps)).to(x.dtype)


def scores(streams: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Equations (2) and (5): weight . RMSNorm(s_i) / sqrt(C), [.., n, C] and [C] -> [.., n]."""
    along = (streams * weight).sum(-1)
    return along * inverse_rms(streams, eps).squeeze(-1) * streams.shape[-1] ** -0.5


def independent_gate(z: Tensor, bias: Tensor) -> Tensor:
    """Equation (3i): beta_i = sigmoid(z_i + b_i); z [.., n], bias [n]."""
    return torch.sigmoid(z + bias)


def competitive_gate(z: Tensor, bias: Tensor) -> Tensor:
    """Equation (3c): beta = softmax([b, z_1 .. z_n])[1:]; z [.., n], bias [1] is the forget logit."""
    return torch.cat([bias.expand(*z.shape[:-1], 1), z], -1).softmax(-1)[..., 1:]


def pool_weights(streams: Tensor, w_pool: Tensor, eps: float = 1e-6) -> Tensor:
    """Equation (6): alpha = softmax over the streams of their scores, [.., n, C] -> [.., n]."""
    return scores(streams, w_pool, eps).softmax(-1)


def pool(streams: Tensor, alpha: Tensor) -> Tensor:
    """Equation (7): p = sum_i alpha_i s_i, [.., n, C] and [.., n] -> [.., C]."""
    return (alpha.unsqueeze(-1) * streams).sum(-2)


def gate_values(streams: Tensor, w_gate: Tensor, bias: Tensor, *, gate: str, eps: float = 1e-6) -> Tensor:
    """Equations (2) and (3): beta [.., n], in float32 or wider, of the streams [.., n, C] before a layer mixes them."""
    streams, w_gate, bias = wide(streams, w_gate, bias)
    rule = {"independent": independent_gate, "competitive": competitive_gate}[gate]
    return rule(scores(streams, w_gate, eps), bias)


def attn_pool(streams: Tensor, w_pool: Tensor, *, normalize: bool = False, eps: float = 1e-6) -> Tensor:
    """Equations (5) to (8): the read of streams [.., n, C]; pooled [.., C] in the streams' dtype."""
    s, w_pool = wide(streams, w_pool)
    pooled = pool(s, pool_weights(s, w_pool, eps))
    return (rms_normalize(pooled, eps) if normalize else pooled).to(streams.dtype)


def append_and_pool(
    streams: Tensor, update: Tensor, w_pool: Tensor, *, normalize: bool = False, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Accumulation: the update becomes stream n + 1, then the read. Both results are stored in the update's dtype."""
    s, f = wide(streams, update)
    s = torch.cat([s, f.unsqueeze(-2)], -2)
    return s.to(update.dtype), attn_pool(s, w_pool, normalize=normalize, eps=eps).to(update.dtype)


def mix_and_pool(
    streams: Tensor,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    *,
    gate: str,
    normalize: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing: equation (4) moves every stream towards the update, then the read of the unrounded mixed streams.

    Returns streams [.., n, C] and pooled [.., C] in the update's dtype, beta [.., n] in the arithmetic's.
    """
    s, f, w_gate, bias, w_pool = wide(streams, update, w_gate, bias, w_pool)
    beta = gate_values(s, w_gate, bias, gate=gate, eps=eps)
    mixed = interpolate(s, f.unsqueeze(-2), beta.unsqueeze(-1))
    pooled = attn_pool(mixed, w_pool, normalize=normalize, eps=eps)
    return mixed.to(update.dtype), pooled.to(update.dtype), beta


def unmix(mixed: Tensor, update: Tensor, beta: Tensor) -> Tensor:
    """Equation (18): the streams before (4), [.., n, C], from those after it, F [.., C] and beta [.., n].

    In float32 or wider, unrounded. Of a gate of exactly 1 nothing is left: its stream comes back as it is, so as F.
    """
    mixed, update, beta = wide(mixed, update, beta)
    odds = torch.where(beta < 1, beta / (1 - beta), 0.0).unsqueeze(-1)
    return mixed + odds * (mixed - update.unsqueeze(-2))
