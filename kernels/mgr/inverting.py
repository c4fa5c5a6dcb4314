"""Mixing layers whose input streams are not kept: the backward rebuilds them from the output, equation (18).

A row is one stream of one token. The rows that rounding would spoil, those of wide-open gates, are kept exactly
(`ExactRows`); which ones, and when a whole layer must be, is decided in `depthlab.residuals`. Nothing here is recorded
by autograd: these are the two halves of somebody's autograd.Function. Numbers are those of DERIVATION.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from depthlab.kernels.mgr import ops, reference
from depthlab.kernels.mgr.function import Backend, Gate, check_mixing, check_tensor, resolve_backend


class ExactRows(NamedTuple):
    """Rows of a layer's input streams that are kept.

    slots: [.., n] int32, the row of `values` that holds this stream of this token, or -1 where it is rebuilt; below R,
        which is not checked, since that would wait for the GPU.
    values: [R, C], in the streams' dtype.
    """

    slots: Tensor
    values: Tensor


@torch.no_grad()
def mix_and_pool_forward(
    streams: Tensor,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    *,
    gate: Gate,
    normalize: bool = False,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mix_and_pool` without autograd, and what its backward would sum up again.

    Returns:
        ``(mixed [.., n, C], pooled [.., C], beta [.., n], kept)``: kept is [.., 4n+1] float32 (rho, a, r', z, r) with
        Triton and empty with torch.

    Raises:
        TypeError, ValueError, BackendUnavailable: as in `mix_and_pool`.
    """
    tensors = (streams, update, w_gate, bias, w_pool)
    check_mixing(*tensors, gate, normalize, eps, backend)
    if resolve_backend(backend, *tensors) == "triton":
        return ops.compute(*tensors, gate, normalize, float(eps), True)
    mixed, pooled, beta = reference.mix_and_pool(*tensors, gate=gate, normalize=normalize, eps=eps)
    return mixed, pooled, beta, beta.new_empty(0)


@torch.no_grad()
def mix_and_pool_backward(
    mixed: Tensor,
    exact: ExactRows | None,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    beta: Tensor,
    kept: Tensor,
    d_mixed: Tensor | None,
    d_pooled: Tensor | None,
    d_beta: Tensor | None,
    *,
    gate: Gate,
    normalize: bool = False,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a mixing layer from its output instead of its input, which is rebuilt on the way.

    Args:
        mixed: [.., n, C], the layer's output as it was stored. The streams before it must have been of its dtype.
        exact: rows of the input that are known, None for none.
        update, w_gate, bias, w_pool, gate, normalize, eps: as the forward got them.
        beta, kept: as `mix_and_pool_forward` returned them, with the same backend.
        d_mixed, d_pooled, d_beta: [.., n, C], [.., C], [.., n], gradients of the outputs; None where nobody asked.

    Returns:
        ``(streams, d_streams, d_update, d_w_gate, d_bias, d_w_pool)``. streams: the input as `unmix` gives it; the
        gradients are those at these streams, as they are rounded.

    Raises:
        TypeError, ValueError, BackendUnavailable: as in `mix_and_pool`; exact, beta, kept or an upstream gradient that
            does not fit.
    """
    weights = (w_gate, bias, w_pool)
    check_mixing(mixed, update, *weights, gate, normalize, eps, backend)
    _check_known(mixed, exact, beta)
    upstream = (d_mixed, d_pooled, d_beta)
    _check_upstream(mixed, upstream)
    if resolve_backend(backend, mixed, update, *weights) == "triton":
        _check_kept(kept, mixed)
        slots, values = exact or (None, None)
        return ops.compute_inverting_backward(mixed, slots, values, update, *weights, kept, upstream, gate, normalize)
    return _differentiate(_unmix(mixed, exact, update, beta), update, *weights, upstream, gate, normalize, eps)


def _differentiate(streams, update, w_gate, bias, w_pool, upstream, gate, normalize, eps) -> tuple[Tensor, ...]:
    """The streams and the gradients at them, by autograd, of what has an upstream gradient."""
    weights = (w_gate, bias, w_pool)
    leaves = [x.detach().requires_grad_() for x in (streams, update, *weights)]
    with torch.enable_grad():
        outputs = reference.mix_and_pool(*leaves, gate=gate, normalize=normalize, eps=eps)
    asked = [(y, d) for y, d in zip(outputs, upstream, strict=True) if d is not None]
    if not asked:
        return streams, *(torch.zeros_like(x) for x in (streams, update, *weights))
    grads = torch.autograd.grad(
        [y for y, _ in asked], leaves, [d for _, d in asked], allow_unused=True, materialize_grads=True
    )
    return streams, *grads


@torch.no_grad()
def mix_and_pool_gradients(
    streams: Tensor,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    kept: Tensor,
    d_mixed: Tensor | None,
    d_pooled: Tensor | None,
    d_beta: Tensor | None,
    *,
    gate: Gate,
    normalize: bool = False,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a mixing layer whose streams were kept after all: of `mix_and_pool`, without another forward.

    Args: streams: [.., n, C], the layer's input; the others as in `mix_and_pool_backward`.

    Returns:
        ``(d_streams, d_update, d_w_gate, d_bias, d_w_pool)``

    Raises:
        TypeError, ValueError, BackendUnavailable: as in `mix_and_pool_backward`.
    """
    tensors, upstream = (streams, update, w_gate, bias, w_pool), (d_mixed, d_pooled, d_beta)
    check_mixing(*tensors, gate, normalize, eps, backend)
    _check_upstream(streams, upstream)
    if resolve_backend(backend, *tensors) == "triton":
        _check_kept(kept, streams)
        return ops.compute_backward(*tensors, kept, *upstream, gate, normalize, float(eps))
    return _differentiate(*tensors, upstream, gate, normalize, eps)[1:]


@torch.no_grad()
def unmix(mixed: Tensor, exact: ExactRows | None, update: Tensor, beta: Tensor) -> Tensor:
    """The rebuilding alone, in plain torch: the streams that a mixing layer got.

    Args: as in `mix_and_pool_backward`.

    Returns:
        streams [.., n, C] in mixed's dtype: the rows of `exact` as they are, the others by equation (18), computed in
        float32 or wider and rounded once. A gate of exactly 1 leaves nothing to rebuild from: without an exact row the
        stream is then F, finite and wrong.

    Raises:
        TypeError, ValueError: an argument is no tensor, or its shape, dtype or device does not fit.
    """
    check_tensor("mixed", mixed)
    check_tensor("update", update)
    if mixed.ndim < 2 or update.shape != mixed.shape[:-2] + mixed.shape[-1:]:
        raise ValueError(
            f"mixed has shape {list(mixed.shape)} and update {list(update.shape)}; they need [.., n, C] and [.., C]."
        )
    _check_known(mixed, exact, beta)
    return _unmix(mixed, exact, update, beta)


def _unmix(mixed: Tensor, exact: ExactRows | None, update: Tensor, beta: Tensor) -> Tensor:
    streams = reference.unmix(mixed, update, beta).to(mixed.dtype)
    if exact is not None:
        known = exact.slots >= 0
        streams[known] = exact.values[exact.slots[known].long()]
    return streams


def _check_known(mixed: Tensor, exact: ExactRows | None, beta: Tensor) -> None:
    check_tensor("beta", beta)
    _check_shape("beta", beta, mixed.shape[:-1], mixed)
    if exact is None:
        return
    slots, values = exact
    _check_shape("exact.slots", slots, mixed.shape[:-1], mixed)
    if slots.dtype != torch.int32:
        raise TypeError(f"exact.slots has dtype {slots.dtype}; it needs torch.int32.")
    _check_shape("exact.values", values, (*values.shape[:1], mixed.shape[-1]), mixed)
    if values.dtype != mixed.dtype:
        raise TypeError(
            f"exact.values has dtype {values.dtype} and mixed {mixed.dtype}; only streams of one dtype can be rebuilt, "
            "so keep such a layer's input instead."
        )


def _check_kept(kept: Tensor, mixed: Tensor) -> None:
    check_tensor("kept", kept)
    if kept.numel() == 0 and mixed.numel() > 0:
        raise ValueError("kept is empty, as with backend='torch'; use one backend for the forward and the backward.")
    _check_shape("kept", kept, (*mixed.shape[:-2], 4 * mixed.shape[-2] + 1), mixed)


def _check_upstream(streams: Tensor, upstream: tuple[Tensor | None, ...]) -> None:
    shape = streams.shape
    shapes = {"d_mixed": shape, "d_pooled": shape[:-2] + shape[-1:], "d_beta": shape[:-1]}
    for (name, shape), x in zip(shapes.items(), upstream, strict=True):
        if x is not None:
            check_tensor(name, x)
            _check_shape(name, x, shape, streams)


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], beside: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(x.shape)}; it needs {list(shape)}.")
    if x.device != beside.device:
        raise ValueError(f"{name} is on {x.device} and the streams on {beside.device}; move them to one device.")
