"""Mixing layers that keep few streams: what each holds for the backward pass, and how the rest is rebuilt.

A `MixingLayer` is what one layer holds. The backward of layer l needs the streams above it, s'. They are

    exact      while the layer above is an anchor, or the newest layer, whose input is kept until another one follows;
    rebuilt    after the backward of the layer above, which has its own input as a by-product;
    to rebuild from the nearest such point above, layer by layer, where neither is there: a partial backward.

Who holds whom decides when memory goes back. Autograd holds a layer, as a saved variable of its node, and lets go of it
when a backward pass that retains no graph has used it. A layer holds the one above it, since its own backward may need
that, until the one above has been let go of; the one below it only weakly. What a layer holds of tensors is detached:
a graph that reaches itself through its saved variables would never be freed.

Whether a layer is an anchor is read from the device when the next one is made, so that nothing waits meanwhile.
"""

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from depthlab.kernels.mgr import (
    ExactRows,
    mix_and_pool_backward,
    mix_and_pool_forward,
    mix_and_pool_gradients,
    unmix,
)
from depthlab.kernels.mgr.reference import wide
from depthlab.residuals.recompute import LayerKept, Recompute, Segment


class Held(NamedTuple):
    """A tensor that the backward needs as it was in the forward."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Held":
        return cls(tensor.detach(), tensor._version)  # the two share their version

    def get(self, name: str, layer: int) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"The {name} of sublayer {layer}'s residual step was changed in place after the step, and the gradient "
                "needs it as it was; change a copy."
            )
        return self.tensor


class Lease:
    """What autograd holds for a layer. When it is gone, no backward will ask for the layer again."""

    def __init__(self, layer: "MixingLayer") -> None:
        self.layer = layer


class Trail(NamedTuple):
    """Which layer made a state's streams, if it is still there, and which tensor these were."""

    made_by: "weakref.ref[MixingLayer]"
    streams: "weakref.ref[Tensor]"
    version: int

    def maker_of(self, streams: Tensor) -> "MixingLayer | None":
        """The layer, unless the caller has changed or replaced the streams."""
        same = self.streams() is streams and self.version == streams._version
        return self.made_by() if same else None


class MixingLayer:
    """One mixing layer: its inputs as far as they are kept, its gates, and its neighbours.

    Args:
        layer: the sublayer, for messages and the report.
        recompute: what to keep.
        how: gate, normalize, eps and backend.
    """

    def __init__(self, layer: int, recompute: Recompute, how: dict[str, Any]) -> None:
        self.layer, self.recompute, self.how = layer, recompute, how
        self.input: Held | None = None  # s, of an anchor and of the newest layer
        self.rows: ExactRows | None = None
        self.output: Tensor | None = None  # s', where it is exact or has been rebuilt
        self.is_rebuilt = False
        self.above: MixingLayer | None = None
        self.below: weakref.ref[MixingLayer] | None = None
        self.lease: weakref.ref[Lease] | None = None
        self.count = 1  # this layer's number among the mixing layers
        self.segment = Segment()
        self.reading: Reading | None = None

    def run(self, streams: Tensor, update: Tensor, w_gate: Tensor, bias: Tensor, w_pool: Tensor) -> tuple[Tensor, ...]:
        """Streams [.., n, C] and pooled [.., C] of the forward pass, which sees nothing of recomputation."""
        self.input, self.update = Held.of(streams), Held.of(update)
        self.weights = [Held.of(x) for x in (w_gate, bias, w_pool)]
        mixed, pooled, self.beta, self.kept = mix_and_pool_forward(streams, update, w_gate, bias, w_pool, **self.how)
        return mixed, pooled

    def maker(self) -> "MixingLayer | None":
        """The layer below, if somebody may still ask for its gradients."""
        return None if self.below is None else self.below()

    # ---- what to keep

    def follow(self, below: "MixingLayer", streams: Tensor) -> None:
        """This layer's input [.., n, C] is the output of `below`, which has been settled."""
        self.below, self.count, self.segment = weakref.ref(below), below.count + 1, below.segment
        below.output, below.is_rebuilt = streams.detach(), False

    def measure(self, mixed: Tensor) -> None:
        """Take this layer into the segment; what decides about it sets out for the host."""
        below, n = self.maker(), mixed.shape[-2]
        before = None if below is None else below.mean_square
        before, self.mean_square = self._mean_squares(mixed, before)
        beta = self.beta.flatten()
        self.wide_open = self.beta > self.recompute.max_gate
        self.least_rows = math.ceil(self.recompute.top_p * beta.numel())
        self.chosen = beta.topk(self.least_rows, sorted=False).indices if self.least_rows else None
        kept = self.wide_open if self.chosen is None else self._with(self.chosen)
        self.segment = self.segment.with_layer(self.beta, before, self.mean_square, kept)
        count = self.wide_open.sum(dtype=before.dtype).reshape(1)
        self.reading = Reading(torch.cat([self.segment.sums(), before.reshape(-1, n).sum(0), count]))

    def _mean_squares(self, mixed: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """|s|^2 / C + eps of input (`before`, where it is known) and output, [.., n]."""
        if self.kept.numel():  # rho, a, r' = (|s'|^2 / C + eps)^(-1/2), z, r
            n = mixed.shape[-2]
            before = self.kept[..., 1 + 3 * n :].pow(-2) if before is None else before
            return before, self.kept[..., 1 + n : 1 + 2 * n].pow(-2)
        squares = (wide(x)[0].square().mean(-1) + self.how["eps"] for x in (mixed, self.input.tensor))
        after = next(squares)
        return next(squares) if before is None else before, after

    def settle(self) -> LayerKept:
        """Keep what must be kept of the input, now that another layer follows."""
        n, dtype, streams = self.beta.shape[-1], self.update.tensor.dtype, self.input.get("input", self.layer)
        *sums, n_wide_open = self.reading.get()
        self.segment = self.segment.with_least(sums[n:])
        predicted = self.segment.predicted(sums[:n], dtype, self.beta.dtype)
        exact = n_wide_open < 2**24  # float32 counts so far; beyond, take some more
        rows, kept = self.beta.numel(), max(self.least_rows, math.ceil(n_wide_open * (1 if exact else 1 + 1e-6)))
        anchor = self.recompute.is_anchor(self.count, rows, kept, predicted, dtype) or streams.dtype != dtype
        if anchor:
            self.segment, kept, predicted = Segment(), rows, 0.0
        elif kept:
            self._keep_rows(streams, kept)
        below = self.maker()
        if below is not None:
            below.output = streams if anchor else None
            below.above = below.above or (None if anchor else self)  # of several that follow, any will do
        self.input = self.input if anchor else None
        self.reading = self.wide_open = self.chosen = None
        return self.report("anchor" if anchor else "rows", kept, predicted)

    def _keep_rows(self, streams: Tensor, kept: int) -> None:
        """Copy the `kept` rows with the largest gates."""
        chosen = self.chosen if kept == self.least_rows else self.beta.flatten().topk(kept, sorted=False).indices
        slots = torch.full([self.beta.numel()], -1, dtype=torch.int32, device=chosen.device)
        slots[chosen] = torch.arange(kept, dtype=torch.int32, device=chosen.device)
        self.rows = ExactRows(slots.view(self.beta.shape), streams.flatten(0, -2)[chosen])
        self.segment = self.segment.without_rows(self._with(chosen))

    def _with(self, chosen: Tensor) -> Tensor:
        """[.., n], True for `chosen` and for every gate above the ceiling."""
        return self.wide_open.flatten().index_fill(0, chosen, True).view_as(self.wide_open)

    def report(self, kind: str, kept: int, predicted: float) -> LayerKept:
        """The entry of the report."""
        update = self.update.tensor
        row, whole = update.shape[-1] * update.element_size(), update.numel() * update.element_size()
        return LayerKept(self.layer, kind, self.beta.numel(), kept, row, whole, predicted)

    # ---- gradients

    def output_streams(self) -> Tensor:
        """s' [.., n, C], exact or rebuilt from the nearest point above."""
        path = [self]
        while path[-1].output is None:
            path.append(path[-1].above)
        streams = path.pop().output
        for layer in reversed(path):
            streams = layer.above.input_streams(streams)
        return streams

    def input_streams(self, mixed: Tensor | None) -> Tensor:
        """s [.., n, C], kept or else rebuilt from s'."""
        if self.input is not None:
            return self.input.get("input", self.layer)
        return unmix(mixed, self.rows, self.update.get("update", self.layer), self.beta)

    def gradients(self, d_mixed: Tensor | None, d_pooled: Tensor | None) -> tuple[Tensor, ...]:
        """Of streams, update, w_gate, bias and w_pool. The layer below has its s' afterwards."""
        names = ("update", "w_gate", "bias", "w_pool")
        tensors = [x.get(name, self.layer) for name, x in zip(names, (self.update, *self.weights), strict=True)]
        if self.input is not None:
            streams = self.input.get("input", self.layer)
            return mix_and_pool_gradients(streams, *tensors, self.kept, d_mixed, d_pooled, None, **self.how)
        mixed = self.output_streams()
        if self.output is not None and self.above is not None and self.above.lease() is None:
            self.above = None  # it has had its turn; what it holds is free from here on
        streams, *found = mix_and_pool_backward(
            mixed, self.rows, *tensors, self.beta, self.kept, d_mixed, d_pooled, None, **self.how
        )
        below = self.maker()
        if below is not None and below.output is None:
            below.output, below.is_rebuilt = streams, True
        if self.is_rebuilt and self.above is not None:
            self.output, self.is_rebuilt = None, False  # the graph is retained, so it can be rebuilt again
        return tuple(found)


class Reading:
    """Numbers on their way from the device. `get` waits for them, not for what was launched after them."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.arrived = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.current_stream(numbers.device).record_event()

    def get(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()


class _Mixing(torch.autograd.Function):
    """A mixing layer whose backward finds everything in its `MixingLayer`."""

    @staticmethod
    def forward(ctx, layer: MixingLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = layer.run(*tensors)
        ctx.save_for_backward(layer.beta)  # for which `mix` puts the layer's lease
        return outputs

    @staticmethod
    def backward(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Rebuilt streams have first derivatives only; use recompute=None for a backward with create_graph=True."
            )
        (ticket,) = ctx.saved_tensors
        found = ticket.lease.layer.gradients(*upstream)
        return None, *(d if need else None for d, need in zip(found, ctx.needs_input_grad[1:], strict=True))


def _ticket(lease: Lease) -> Tensor:
    """A saved variable is unpacked to a tensor; this one carries the lease."""
    ticket = torch.empty(0)
    ticket.lease = lease
    return ticket


def can_rebuild(*tensors: Tensor) -> bool:
    """Whether a gradient of these may be asked for by an ordinary backward, not by a tracer or a transformation."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors) or torch.compiler.is_exporting():
        return False
    if torch.compiler.is_compiling():
        return True  # `mix` breaks the graph
    traced = torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0
    return not traced and not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


@torch.compiler.disable
def mix(new: MixingLayer, tensors: tuple[Tensor, ...], trail: Trail | None) -> tuple[Tensor, Tensor, Trail, list]:
    """`mix_and_pool` as the layer `new`, which keeps few streams.

    Args:
        new: not run yet.
        tensors: streams [.., n, C], update [.., C], w_gate, bias, w_pool.
        trail: of the state that the streams are from.

    Returns:
        ``(streams [.., n, C], pooled [.., C], trail, entries)``: entries of the report, the final one of the layer
        below where it had none yet, and one of this layer as the newest.
    """
    streams, entries = tensors[0], []
    below = None if trail is None else trail.maker_of(streams)
    if below is not None:
        if below.reading is not None:
            entries.append(below.settle())
        new.follow(below, streams)
    lease = Lease(new)
    new.lease = weakref.ref(lease)
    with saved_tensors_hooks(lambda _: lease, _ticket):
        mixed, pooled = _Mixing.apply(new, *tensors)
    new.measure(mixed.detach())
    entries.append(new.report("newest", new.beta.numel(), 0.0))
    return mixed, pooled, Trail(weakref.ref(new), weakref.ref(mixed), mixed._version), entries
