"""Why a convex residual stream cannot explode, and what floating point does to that.

Multi-Gate Residuals (arXiv 2605.23259), norm bound. A scheme is seen only through its combination coefficients: layer l
turns the streams s (n of them) and one update F into ``s' = mix @ s + write * F``. If every row of [mix | write] has
absolute sum at most 1, no stream can outgrow the largest of its inputs (`row_weight`, `carry`). MGR's rows are
``(1 - beta, beta)``, so they sum to exactly 1.
"""

import math

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def interpolate(stream: Tensor, update: Tensor, beta: Tensor) -> Tensor:
    """(1 - beta) * stream + beta * update, stepped from whichever end is nearer.

    This form returns `stream` exactly at beta = 0, `update` exactly at beta = 1 and either one when they are equal;
    every element lies between its two inputs; and the norm exceeds max(norm(stream), norm(update)) by no more than the
    final rounding (`rounding_term`). Other forms miss an end point or err more (notebook 01 measures five of them).

    Args:
        stream: [.., C] values, float32 or wider, at most half the largest finite number.
        update: broadcastable to `stream`.
        beta: gate in [0, 1], broadcastable; [.., 1] for one scalar a stream. Not checked (this runs inside models): a
            NaN stays NaN in the result.

    Returns:
        [.., C] the interpolated stream.

    Raises:
        TypeError: an input is float16 or bfloat16; half types are for storage, so cast first.
    """
    for name, tensor in (("stream", stream), ("update", update), ("beta", beta)):
        if tensor.dtype in _HALF:
            raise TypeError(f"interpolate got {name} in {tensor.dtype}; it computes in float32 or wider: cast first.")
    near = beta < 0.5
    # beta - 1 is exact for beta >= 1/2, so the step from the far end loses nothing either.
    return torch.where(near, stream, update) + torch.where(near, beta, beta - 1) * (update - stream)


def carry(streams: Tensor, update: Tensor, mix: Tensor, write: Tensor) -> Tensor:
    """One layer of any residual scheme in linear form: ``mix @ streams + write * update``.

    Args:
        streams: [.., n, C]
        update: [.., C] what the sublayer puts out.
        mix: [.., n, n] how streams are carried over.
        write: [.., n] how much of the update each stream takes.

    Returns:
        [.., n, C] the new streams.
    """
    return mix @ streams + write.unsqueeze(-1) * update.unsqueeze(-2)


def row_weight(mix: Tensor, write: Tensor) -> Tensor:
    """[.., n] absolute row sums of [mix | write]: how much one layer can multiply the largest norm, exactly.

    At most 1 keeps the bound (triangle inequality). Above 1 breaks it: feed a row one direction v, with the signs of
    its coefficients, and the new stream is row_weight times as long as every input.
    """
    return mix.abs().sum(-1) + write.abs()


def norm_ratio(reached: Tensor, terms: Tensor) -> Tensor:
    """[..] largest norm among `reached` [.., k, C] over the largest norm among `terms` [.., m, C]; float64 inside.

    The bound says: at most 1, where `terms` are the embedding and all updates.

    Raises:
        ValueError: every term is zero (or not finite), so there is nothing to compare with.
    """
    largest = terms.double().norm(dim=-1).amax(-1)
    if not bool((torch.isfinite(largest) & (largest > 0)).all()):
        raise ValueError(
            "norm_ratio got terms whose largest norm is zero or not finite; give finite terms, not all zero."
        )
    return reached.double().norm(dim=-1).amax(-1) / largest


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: the largest relative error of rounding to nearest. 2**-53 for float64, 2**-24 for float32, 2**-8 for bfloat16.

    Raises:
        TypeError: not a floating-point type.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"unit_roundoff got {dtype}, which does not round; give a floating-point dtype.")
    return torch.finfo(dtype).eps / 2


def rounding_term(
    n_layers: int,
    arithmetic: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    min_gate: float = 0.0,
) -> float:
    """How far rounding may lift the norm bound over `n_layers` calls of `interpolate`.

    Computed max_i norm(s_i) <= (1 + rounding_term) * max(norm(x_0), max_l norm(F_l)).

    One layer. The errors before the last addition are at most 2u min(beta, 1 - beta) |F - s|, while an exact convex
    combination stays short of its bound by about beta (1 - beta) |F - s|^2 / 2M. The second outweighs the first but for
    2u^2 M, so a layer costs rho = (1 + u)(1 + 2u^2): its final rounding. Storing in a narrower type multiplies rho by
    one more (1 + u_storage). With q the square of the whole factor, q <- rho^2 ((1 - beta) q + beta), which grows like
    rho^(2L) with closed gates and settles near 1 + 2u/beta when every gate is at least `min_gate`.

    Args:
        n_layers: mixing layers, >= 0.
        arithmetic: dtype that `interpolate` computes in, float32 or float64.
        storage: dtype the streams are kept in between layers; None for `arithmetic`.
        min_gate: smallest gate of any layer, in [0, 1].

    Returns:
        The term, >= 0. Inputs must be finite and at most half the largest finite number; products that underflow add
        at most sqrt(C) times the smallest subnormal of `arithmetic` (and of `storage`) a layer, which is not included.

    Raises:
        ValueError: negative `n_layers`, a gate outside [0, 1], or half-precision arithmetic.
        TypeError: `n_layers` is no integer, or a dtype does not round.
    """
    if isinstance(n_layers, bool) or not hasattr(n_layers, "__index__"):
        raise TypeError(f"rounding_term got n_layers={n_layers!r}; give a whole number from 0 on.")
    if n_layers < 0:
        raise ValueError(f"rounding_term got n_layers={n_layers}; give 0 or more.")
    if not 0.0 <= min_gate <= 1.0:
        raise ValueError(f"rounding_term got min_gate={min_gate}; a gate lies in [0, 1].")
    if arithmetic in _HALF:
        raise ValueError(f"rounding_term got arithmetic in {arithmetic}; streams are mixed in float32 or wider.")
    u = unit_roundoff(arithmetic)
    # log1p keeps what 1 + u would round away in float64.
    log_rho = math.log1p(u) + math.log1p(2 * u * u)
    if storage is not None and storage != arithmetic:
        log_rho += math.log1p(unit_roundoff(storage))
    growth = math.expm1(2 * log_rho)  # rho^2 - 1
    excess = 0.0  # q - 1
    for _ in range(n_layers):
        excess = (1 - min_gate) * excess * (1 + growth) + growth
    # The loop rounds too (a few 1e-16 a layer, relative), and a bound must not end below its true value.
    return math.expm1(math.log1p(excess) / 2) * (1 + 1e-15 * (n_layers + 4))
