"""The fused layer in torch: launches, gradients, and the operators that tracers see. `function.py` checks inputs.

`run` computes a layer and its gradients. Whoever traces or transforms (torch.compile, vmap, dispatch modes) meets two
operators, ``depthlab::mgr_layer`` and ``depthlab::mgr_layer_backward``, and cannot look inside; all others get the same
functions without them, since calling an operator written in Python costs more than the GPU's work on small inputs.
Everything is deterministic: a program sums its own tokens' weight gradients in order, and one `sum` adds up the
programs. A kind ("independent", "competitive", "append", "read") is what `kernels.py` calls so.
"""

import math
import os
from functools import lru_cache, wraps
from typing import NamedTuple

import torch
from torch import Tensor

from depthlab.kernels.mgr import launch

# Whether the kernels run in Triton's interpreter, on tensors of the CPU; Triton looks when it compiles the first one.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
INTERPRETED_PROGRAMS = 4  # in Triton's interpreter: few, so that each walks over several tokens as on a GPU


def compute(
    streams: Tensor,
    update: Tensor | None,
    w_gate: Tensor | None,
    bias: Tensor | None,
    w_pool: Tensor,
    kind: str,
    normalize: bool,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Equations (1) to (8): streams [.., n, C], pooled [.., C], beta [.., n]; if `keep`, for the backward, [.., 4n+1].

    What a kind does not make is empty.
    """
    from depthlab.kernels.mgr import kernels

    mixed, pooled, beta, kept = outputs = _outputs(streams, update, kind, keep)
    n = streams.shape[-2] + int(kind == "append")
    arguments = [_dense(x, streams) for x in (streams, update, w_gate, bias, w_pool)]
    how = _choice(streams, update, n, backward=False)
    shares = _shares(how, pooled)
    arguments += [mixed, pooled, beta, kept, *shares[1:], eps]
    _launch(kernels.layer_fwd_kernel, how, shares, pooled, n, kind, normalize, arguments, {"KEEP": keep})
    return outputs


def compute_backward(
    streams: Tensor,
    update: Tensor | None,
    w_gate: Tensor | None,
    bias: Tensor | None,
    w_pool: Tensor,
    kept: Tensor,
    d_mixed: Tensor | None,
    d_pooled: Tensor | None,
    d_beta: Tensor | None,
    kind: str,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Equations (9) to (17): gradients of streams, update, w_gate, bias and w_pool; of an absent one it is empty."""
    tensors, upstream = (streams, update, w_gate, bias, w_pool, kept), (d_mixed, d_pooled, d_beta)
    return _launch_backward(tensors, upstream, kind, normalize)


def compute_inverting_backward(
    mixed: Tensor,
    slots: Tensor | None,
    values: Tensor | None,
    update: Tensor,
    w_gate: Tensor,
    bias: Tensor,
    w_pool: Tensor,
    kept: Tensor,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    kind: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Equations (18) and (9) to (17): the streams that were mixed, then the gradients of `compute_backward`."""
    streams = mixed.new_empty(mixed.shape)
    tensors = (mixed, update, w_gate, bias, w_pool, kept)
    return streams, *_launch_backward(tensors, upstream, kind, normalize, (slots, values, streams))


def _launch_backward(tensors, upstream, kind: str, normalize: bool, rebuilding=(None,) * 3) -> tuple[Tensor, ...]:
    """`rebuilding`: slots and values of exact rows, and where the streams go that are rebuilt from the first tensor."""
    from depthlab.kernels.mgr import kernels

    streams, update, w_gate, bias, w_pool, _ = tensors
    d_mixed, d_pooled, d_beta = upstream
    d_streams, d_update = _gradients(streams, update)
    n, width = streams.shape[-2] + int(kind == "append"), streams.shape[-1]
    if d_pooled is None:
        d_pooled = streams.new_zeros([*streams.shape[:-2], width])
    arguments = [_dense(x, streams) for x in (*tensors, d_mixed, d_pooled, d_beta)]
    how = _choice(streams, update, n, backward=True)
    shares = _shares(how, d_pooled)
    new = torch.empty if how.constants["HELD"] else torch.zeros  # the kernel adds to what it cannot hold
    d_weights = new(shares.programs, 2 * width + n, dtype=torch.float32, device=streams.device)
    given = {"HAS_D_MIXED": d_mixed, "HAS_D_BETA": d_beta, "INVERT": rebuilding[2], "EXACT": rebuilding[0]}
    flags = {name: x is not None for name, x in given.items()}
    arguments += [d_streams, d_update, d_weights, *(_dense(x, streams) for x in rebuilding), *shares[1:]]
    _launch(kernels.layer_bwd_kernel, how, shares, d_pooled, n, kind, normalize, arguments, flags)
    absent = streams.new_empty(0)
    d_w_gate, d_w_pool, d_bias = d_weights.sum(0).tensor_split([width, 2 * width])
    return (
        d_streams,
        d_update,
        absent if w_gate is None else d_w_gate.to(w_gate.dtype),
        absent if bias is None else d_bias[: bias.numel()].to(bias.dtype),
        d_w_pool.to(w_pool.dtype),
    )


@wraps(compute_backward)
def _compute_backward_apart(*inputs) -> tuple[Tensor, ...]:
    """What an operator returns may not share memory."""
    return tuple(x.clone() if i > 1 else x for i, x in enumerate(compute_backward(*inputs)))


def _outputs(streams: Tensor, update: Tensor | None, kind: str, keep: bool) -> tuple[Tensor, ...]:
    stored = streams if update is None else update
    *lead, n, width = streams.shape
    n += int(kind == "append")
    mixes = kind not in ("read", "append")
    mixed = stored.new_empty([0] if kind == "read" else [*lead, n, width])
    beta = streams.new_empty([*lead, n] if mixes else [0], dtype=torch.float32)
    kept = streams.new_empty([*lead, (4 if mixes else 2) * n + 1] if keep else [0], dtype=torch.float32)
    return mixed, stored.new_empty([*lead, width]), beta, kept


def _gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


layer = torch.library.custom_op("depthlab::mgr_layer", compute, mutates_args=())
layer_backward = torch.library.custom_op("depthlab::mgr_layer_backward", _compute_backward_apart, mutates_args=())


@layer.register_fake
def _(streams, update, w_gate, bias, w_pool, kind, normalize, eps, keep):
    return _outputs(streams, update, kind, keep)


@layer_backward.register_fake
def _(streams, update, w_gate, bias, w_pool, kept, d_mixed, d_pooled, d_beta, kind, normalize, eps):
    return _gradients(streams, update, w_gate, bias, w_pool)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.kind, ctx.normalize, ctx.eps, ctx.kept = inputs
    ctx.save_for_backward(*tensors, output[3])
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)  # zeros for an output that nobody used would be read like any gradient


def _backward(ctx, *upstream: Tensor | None, plain: bool = False) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    forward, backward = (compute, compute_backward) if plain else (layer, layer_backward)
    how = (ctx.kind, ctx.normalize, ctx.eps)
    if not ctx.kept:  # the caller did not see that a gradient would be asked for
        kept = forward(*tensors, *how, True)[3]
    d_mixed, d_pooled, d_beta, _ = upstream
    upstream = (d_mixed if ctx.kind != "read" else None, d_pooled, d_beta if tensors[2] is not None else None)
    found = backward(*tensors, kept, *upstream, *how)
    needed = zip(found, tensors, ctx.needs_input_grad[:5], strict=True)
    return (*(d if x is not None and need else None for d, x, need in needed), *[None] * 4)


def _twice(ctx, *grads):
    raise RuntimeError("The fused kernels can be differentiated once, not twice; use backend='torch' for that.")


layer.register_autograd(_backward, setup_context=_save)
layer_backward.register_autograd(_twice)


class _Layer(torch.autograd.Function):
    """The gradients of `layer`, without the operator."""

    @staticmethod
    def forward(ctx, *inputs) -> tuple[Tensor, ...]:  # a setup_context apart would double what a call costs
        output = compute(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *upstream, plain=not torch.is_grad_enabled())  # enabled: to be differentiated again


def run(streams: Tensor, update: Tensor | None, w_gate: Tensor | None, bias: Tensor | None, w_pool: Tensor, *how):
    """`layer` by the shortest way; how: kind, normalize, eps."""
    tensors = [x for x in (streams, update, w_gate, bias, w_pool) if x is not None]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not all(map(_is_plain, tensors)):
        return layer(streams, update, w_gate, bias, w_pool, *how, keep)
    return (_Layer.apply if keep else compute)(streams, update, w_gate, bias, w_pool, *how, keep)


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _one_by_one(op):
    """The rule of `vmap`: one launch for each element of the batch."""

    def rule(info, in_dims, *args):
        picked = [
            [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        found = tuple(torch.stack(xs) for xs in zip(*(op(*each) for each in picked), strict=True))
        return found, (0,) * len(found)

    return rule


layer.register_vmap(_one_by_one(layer))
layer_backward.register_vmap(_one_by_one(layer_backward))


def _dense(x: Tensor | None, instead: Tensor) -> Tensor:
    """What a kernel gets for an argument: contiguous, and for an absent one a tensor that it will not touch."""
    return (instead if x is None else x).contiguous()


def _choice(streams: Tensor, update: Tensor | None, n: int, *, backward: bool) -> launch.Launch:
    itemsize = max(x.element_size() for x in (streams, update) if x is not None)
    limit = _device(streams.device).shared_memory_per_block_optin if streams.is_cuda else launch.SHARED_BYTES
    return launch.launch_choice(n, streams.shape[-1], itemsize, backward=backward, shared_bytes=limit)


class _Shares(NamedTuple):
    """How tokens are dealt out to programs: see `own_tokens` of kernels.py."""

    programs: int
    n_tokens: int
    n_long: int
    long_tokens: int


def _shares(how, pooled: Tensor) -> _Shares:
    tokens = pooled.numel() // pooled.shape[-1]
    at_once = how.programs * _device(pooled.device).multi_processor_count if pooled.is_cuda else INTERPRETED_PROGRAMS
    rounds = int(how.long_share * tokens / at_once)
    n_long = at_once if rounds else 0
    n_short = math.ceil((tokens - rounds * n_long) / how.short_tokens)
    return _Shares(n_long + n_short, tokens, n_long, rounds * n_long)


@lru_cache
def _device(device: torch.device):
    return torch.cuda.get_device_properties(device)


def _launch(kernel, how, shares: _Shares, pooled: Tensor, n: int, kind: str, normalize: bool, arguments, flags) -> None:
    if pooled.numel() == 0:
        return
    shape = {"KIND": kind, "NORMALIZE": normalize, "N": n, "N_PAD": launch.power_of_two(n), "C": pooled.shape[-1]}
    with torch.cuda.device_of(pooled):  # Triton launches on the current device, whatever the tensors' is
        kernel[(shares.programs,)](*arguments, **flags, **shape, **how.constants, num_warps=how.warps)
