"""The equations of Multi-Gate Residuals on one token's tiles, as the fused kernels compute them.

Names and numbers are those of `kernels.py` and DERIVATION.md; what is padded stays zero.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(squares, eps, C: tl.constexpr):
    """Equation (1) from the sum of squares."""
    return tl.rsqrt(squares / C + eps)


@triton.jit
def softmax(x, rows, N: tl.constexpr):
    """Over the first N values; zero where padded."""
    x = tl.where(rows < N, x, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def gates(z, bias, rows, N: tl.constexpr, KIND: tl.constexpr):
    """Equations (3i) and (3c): beta [N_PAD], zero where padded, and beta_0, the share that no stream takes."""
    if KIND == "competitive":
        z = tl.where(rows < N, z, -float("inf"))
        forget = tl.max(bias, 0)
        top = tl.maximum(tl.max(z, 0), forget)
        e = tl.exp(z - top)
        e_0 = tl.exp(forget - top)
        total = tl.sum(e, 0) + e_0
        return e / total, e_0 / total
    else:
        return tl.where(rows < N, tl.sigmoid(z + bias), 0.0), 0.0


@triton.jit
def make_streams(s, f, beta, rows, N: tl.constexpr, KIND: tl.constexpr):
    """A tile of m from a tile of s and a row of f."""
    if KIND == "read":
        return s
    elif KIND == "append":
        return tl.where((rows == N - 1)[:, None], f[None, :], s)
    else:  # (4) in two fused multiply-adds: both end points are exact
        beta = beta[:, None]
        return beta * f[None, :] + (s - beta * s)


@triton.jit
def through_read(d_m, m, g, w, alpha, rho, shrink, to_w_pool, to_m):
    """Equations (9) and (11): the gradient of m, with what comes back through the read."""
    g_p = rho * g - shrink * tl.sum(alpha[:, None] * m, 0)
    return d_m + to_w_pool[:, None] * w[None, :] - to_m[:, None] * m + alpha[:, None] * g_p[None, :]


@triton.jit
def odds_of(beta):
    """beta / (1 - beta), and 0 for a gate of exactly 1, which leaves nothing to rebuild from."""
    return tl.where(beta < 1.0, beta / tl.where(beta < 1.0, 1.0 - beta, 1.0), 0.0)


@triton.jit
def unmix(m, f, odds):
    """Equation (18): a tile of s from a tile of m and a row of f."""
    return m + odds[:, None] * (m - f[None, :])
