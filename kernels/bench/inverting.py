"""A mixing layer whose backward rebuilds its input ("mix-inverting"): as something to time, and its gate.

What rounding lost of the streams is no fault of the backward. So the gate asks two things: that the streams which come
back are equation (18) of what was stored, and that the gradients are those which the ordinary kernels give at these
streams, in float32, with the numbers that the forward kept. The ordinary kernels have a gate of their own.
"""

import torch
from torch import Tensor

from depthlab.kernels.bench.cases import EPS, Case, Step, inputs
from depthlab.kernels.mgr import ExactRows, mix_and_pool_backward, mix_and_pool_forward, ops, reference

NAMES = ("the rebuilt streams", *(f"the gradient of {x}" for x in ("streams", "update", "w_gate", "bias", "w_pool")))


def step(case: Case, backend: str, above: float | None = None) -> Step:
    """inputs -> (streams, pooled, beta) by a layer that keeps, of its streams, the rows with gates above a number.

    None: no rows at all, and nothing waits for the GPU.
    """
    return lambda *x: _Layer.apply(*x, case.gate, backend, above)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, update, w_gate, bias, w_pool, gate, backend, above):
        ctx.how = {"gate": gate, "normalize": True, "eps": EPS, "backend": backend}
        mixed, pooled, beta, kept = mix_and_pool_forward(streams, update, w_gate, bias, w_pool, **ctx.how)
        ctx.exact = None if above is None else rows_above(streams, beta, above)
        ctx.save_for_backward(mixed, update, w_gate, bias, w_pool, beta, kept)
        ctx.set_materialize_grads(False)
        return mixed, pooled, beta

    @staticmethod
    def backward(ctx, *upstream):
        mixed, *known = ctx.saved_tensors
        return *mix_and_pool_backward(mixed, ctx.exact, *known, *upstream, **ctx.how)[1:], None, None, None


def rows_above(streams: Tensor, beta: Tensor, above: float) -> ExactRows:
    """The rows of streams [T, n, C] whose gate beta [T, n] is above a number."""
    chosen = beta > above
    slots = torch.where(chosen, chosen.flatten().cumsum(0).view_as(beta) - 1, -1)
    return ExactRows(slots.int(), streams[chosen])


def compared(case: Case, device: torch.device, above: float | None, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the backward gives, in the order of NAMES, and what is right; for all tokens of the case."""
    generator = torch.Generator(device).manual_seed(seed)
    streams, *others = (x.detach() for x in inputs(case, generator))
    how = {"gate": case.gate, "normalize": True, "eps": EPS, "backend": "triton"}
    mixed, pooled, beta, kept = mix_and_pool_forward(streams, *others, **how)
    upstream = tuple(
        torch.randn(y.shape, generator=generator, dtype=y.dtype, device=device) for y in (mixed, pooled, beta)
    )
    exact = None if above is None else rows_above(streams, beta, above)
    found = mix_and_pool_backward(mixed, exact, *others, beta, kept, *upstream, **how)
    rebuilt = reference.unmix(*(x.double() for x in (mixed, others[0], beta)))
    if exact is not None:
        rebuilt = torch.where((beta > above).unsqueeze(-1), streams.double(), rebuilt)
    wide = (x.float() for x in (found[0], *others, kept, *upstream))
    gradients = ops.compute_backward(*wide, case.gate, True, EPS)
    return list(found), [rebuilt, *(x.double() for x in gradients)]
