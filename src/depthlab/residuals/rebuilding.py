"""Mixing layers that keep few streams: what each holds for the backward pass, and how the rest is rebuilt.

A `MixingLayer` is what one layer holds. The backward of layer l needs the streams above it, s'. They are

    exact      while the layer above is an anchor, or the newest layer, whose input is kept until another one follows;
    rebuilt    after the backward of the layer above, which has its own input as a by-product;
    to rebuild from the nearest such point above, layer by layer, where neither is there: a partial backward.

Who holds whom decides when memory goes back. Autograd holds a layer, as a saved variable of its node, and lets go of it
when a backward pass that retains no graph has used it. A layer holds the one above it, since its own backward may need
that, until the one above has been let go of; the one below it only weakly. What a layer holds of tensors is detached:
a graph that reaches itself through its saved variables would never be freed.

Numbers decide what a layer keeps, and the host asks for them late, so that it need not wait for the device. With the
kernels the device decides about anchors and goes on at once; the host acts on it as soon as it hears, `PENDING` layers
later at the latest, and at the last layer. What is kept so never depends on how fast anything was. In plain torch the
host decides, before the next layer is made.
"""

import math
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from depthlab.kernels.mgr import (
    Carried,
    ExactRows,
    carry_rounding,
    mix_and_pool_backward,
    mix_and_pool_forward,
    mix_and_pool_gradients,
    unmix,
)
from depthlab.kernels.mgr.reference import wide
from depthlab.residuals.recompute import LayerKept, Recompute, Segment, predicted, unit_of_rounding

# How many layers may wait for their numbers. The host can be ahead of the device by as many; with fewer, wherever it is
# slow the device waits. The streams of as many layers are kept beside those that stay, but not to the last layer's end,
# after which a model's output layer needs memory most.
PENDING = 8


class Held(NamedTuple):
    """A tensor that the backward needs as it was in the forward."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Held":
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)  # the two share their version

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
    """Which layer made a state's streams, if it is still there, which tensor these were, and in which forward pass."""

    made_by: "weakref.ref[MixingLayer]"
    streams: "weakref.ref[Tensor]"
    version: int
    forward_pass: "ForwardPass"

    def maker_of(self, streams: Tensor) -> "MixingLayer | None":
        """The layer, unless the caller has changed or replaced the streams."""
        same = self.streams() is streams and self.version == streams._version
        return self.made_by() if same else None

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a state, or one from a file, begins anew


class ForwardPass:
    """The layers of one forward pass: what each keeps, and which ones wait for their numbers, the oldest first.

    A layer waits from when another one follows it. Being the newest, it keeps its input anyway.
    """

    def __init__(self) -> None:
        self.kept: dict[int, LayerKept] = {}
        self.waiting: deque[weakref.ref[MixingLayer]] = deque()

    def settle(self, pending: int = 0) -> None:
        """Settle the layers whose numbers are here; wait for numbers until no more than `pending` layers wait."""
        while self.waiting:
            layer = self.waiting[0]()
            if layer is not None:
                if len(self.waiting) <= pending and not layer.is_anchor and not layer.reading.is_here():
                    return
                layer.settle()
            self.waiting.popleft()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return vars(self)


class MixingLayer:
    """One mixing layer: its inputs as far as they are kept, its gates, and its neighbours.

    Args:
        layer: the sublayer, for messages and the report.
        recompute: what to keep.
        how: gate, normalize, eps and backend.
        forward_pass: that it belongs to.
    """

    def __init__(self, layer: int, recompute: Recompute, how: dict[str, Any], forward_pass: ForwardPass) -> None:
        self.layer, self.recompute, self.how, self.forward_pass = layer, recompute, how, forward_pass
        self.input: Held | None = None  # s, of an anchor and of the newest layer
        self.rows: ExactRows | None = None
        self.output: Tensor | None = None  # s', where it is exact or has been rebuilt
        self.is_rebuilt = False
        self.is_followed = False
        self.above: MixingLayer | None = None
        self.below: weakref.ref[MixingLayer] | None = None
        self.lease: weakref.ref[Lease] | None = None
        self.count = 1  # this layer's number among the mixing layers
        self.is_anchor = False
        self.segment: Segment | Carried | None = None  # up to this layer; None where the next one begins a new one
        self.mean_square: Tensor | None = None  # of s', in plain torch
        self.chosen: Tensor | None = None  # rows of the largest gates, as many as are kept in any case
        self.reading: Reading | None = None

    def run(self, streams: Tensor, update: Tensor, w_gate: Tensor, bias: Tensor, w_pool: Tensor) -> tuple[Tensor, ...]:
        """Streams [.., n, C] and pooled [.., C] of the forward pass, which sees nothing of recomputation."""
        self.input, self.update = Held.of(streams), Held.of(update)
        self.weights = [Held.of(x) for x in (w_gate, bias, w_pool)]
        mixed, pooled, self.beta, self.kept = mix_and_pool_forward(streams, update, w_gate, bias, w_pool, **self.how)
        self._measure(mixed)
        return mixed, pooled

    def maker(self) -> "MixingLayer | None":
        """The layer below, if somebody may still ask for its gradients."""
        return None if self.below is None else self.below()

    # ---- what to keep

    def follow(self, below: "MixingLayer") -> None:
        """This layer's input is the output of `below`, which may now be settled."""
        self.below, self.count = weakref.ref(below), below.count + 1
        forward_pass = below.forward_pass
        if below.is_followed:
            forward_pass.settle()  # who else follows it may wait, and settled later would undo what this layer says
        else:
            below.is_followed = True
            forward_pass.waiting.append(weakref.ref(below))
        forward_pass.settle(PENDING if below.is_fused() else 0)

    def is_fused(self) -> bool:
        """Whether the kernels made it, and carry what rounding adds up to."""
        return self.kept.numel() > 0

    def _measure(self, mixed: Tensor) -> None:
        """Take this layer into the segment; what decides about it sets out for the host."""
        below, rows, dtype = self.maker(), self.beta.numel(), mixed.dtype
        start = None if below is None else below.segment
        self.least_rows = math.ceil(self.recompute.top_p * rows)
        self.is_anchor = (  # whatever the numbers say
            self.input.tensor.dtype != dtype
            or self.recompute.is_anchor(self.count, rows, self.least_rows, 0.0, dtype)
            or (start is not None and isinstance(start, Carried) != self.is_fused())
        )
        if self.is_anchor:
            return
        if self.least_rows:
            self.chosen = self.beta.flatten().topk(self.least_rows, sorted=False).indices
        if self.is_fused():
            self._carry(start, dtype)
        else:
            self._add_up(start or Segment(), mixed, None if below is None else below.mean_square)

    def _carry(self, start: Carried | None, dtype: torch.dtype) -> None:
        chosen = None
        if self.chosen is not None:
            chosen = torch.zeros_like(self.beta, dtype=torch.bool)
            chosen.view(-1).index_fill_(0, self.chosen, True)
        self.segment = carry_rounding(
            self.beta,
            self.kept,
            chosen,
            start,
            max_gate=self.recompute.max_gate,
            sigma=unit_of_rounding(dtype, self.beta.dtype) / math.sqrt(3),
            tolerance=self.recompute.tolerance_of(dtype) if self.recompute.anchor_every == "auto" else math.inf,
        )
        self.reading = Reading(self.segment.numbers)

    def _add_up(self, start: Segment, mixed: Tensor, before: Tensor | None) -> None:
        """In plain torch; before: |s|^2 / C + eps of the input [.., n], None where it is not known."""
        if before is None:
            before = self._mean_square(self.input.tensor)
        self.mean_square = self._mean_square(mixed)
        self.wide_open = self.beta > self.recompute.max_gate
        kept = self.wide_open if self.chosen is None else self._with(self.chosen)
        self.segment = start.with_layer(self.beta, before, self.mean_square, kept)
        count = self.wide_open.sum(dtype=before.dtype).reshape(1)
        self.reading = Reading(torch.cat([count, self.segment.shares()]))

    def _mean_square(self, streams: Tensor) -> Tensor:
        return wide(streams)[0].square().mean(-1) + self.how["eps"]

    def settle(self) -> None:
        """Keep what must be kept of the input, now that another layer follows."""
        rows, streams = self.beta.numel(), self.input.get("input", self.layer)
        kept, error = rows, 0.0
        if not self.is_anchor:
            kept, error = self._decide()
        if self.is_anchor:
            self.segment, kept, error = None, rows, 0.0
        elif kept:
            self._keep_rows(streams, kept)
        below = self.maker()
        if below is not None:
            below.output = streams if self.is_anchor else None
            below.above = below.above or (None if self.is_anchor else self)  # of several that follow, any will do
        self.input = self.input if self.is_anchor else None
        self.reading = self.wide_open = self.chosen = None
        self.enter("anchor" if self.is_anchor else "rows", kept, error)

    def _decide(self) -> tuple[int, float]:
        """How many rows to keep, and the predicted error; whether this layer is an anchor, by what has been heard."""
        rows, dtype, numbers = self.beta.numel(), self.update.tensor.dtype, self.reading.get()
        if self.is_fused():
            error, n_wide_open, ends = numbers
        else:
            n_wide_open, *shares = numbers
            error = predicted(shares, dtype, self.beta.dtype)
        exact = n_wide_open < 2**24  # float32 counts so far; beyond, take some more
        kept = max(self.least_rows, math.ceil(n_wide_open * (1 if exact else 1 + 1e-6)))
        if self.is_fused():
            self.is_anchor = ends > 0  # as the next layers on the device have taken it
        else:
            self.is_anchor = self.recompute.is_anchor(self.count, rows, kept, error, dtype)
        return kept, error

    def _keep_rows(self, streams: Tensor, kept: int) -> None:
        """Copy the `kept` rows with the largest gates."""
        chosen = self.chosen if kept == self.least_rows else self.beta.flatten().topk(kept, sorted=False).indices
        slots = torch.full([self.beta.numel()], -1, dtype=torch.int32, device=chosen.device)
        slots[chosen] = torch.arange(kept, dtype=torch.int32, device=chosen.device)
        self.rows = ExactRows(slots.view(self.beta.shape), streams.flatten(0, -2)[chosen])
        if not self.is_fused():
            self.segment = self.segment.without_rows(self._with(chosen))

    def _with(self, chosen: Tensor) -> Tensor:
        """[.., n], True for `chosen` and for every gate above the ceiling."""
        return self.wide_open.flatten().index_fill(0, chosen, True).view_as(self.wide_open)

    def enter(self, kind: str, kept: int, error: float) -> None:
        """Put this layer into the report."""
        update = self.update.tensor
        row, whole = update.shape[-1] * update.element_size(), update.numel() * update.element_size()
        entry = LayerKept(self.layer, kind, self.beta.numel(), kept, row, whole, error)
        self.forward_pass.kept[self.layer] = entry

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
        self.forward_pass.settle()
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
            self.numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            self.arrived = torch.cuda.current_stream(numbers.device).record_event()

    def is_here(self) -> bool:
        return self.arrived is None or self.arrived.query()

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
    traced = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0
    return not traced and not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def mix(new: MixingLayer, tensors: tuple[Tensor, ...], trail: Trail | None) -> tuple[Tensor, Tensor, Trail]:
    """`mix_and_pool` as the layer `new`, which keeps few streams.

    Args:
        new: not run yet.
        tensors: streams [.., n, C], update [.., C], w_gate, bias, w_pool.
        trail: of the state that the streams are from.

    Returns:
        ``(streams [.., n, C], pooled [.., C], trail)``. The report knows `new` as the newest layer.
    """
    below = None if trail is None else trail.maker_of(tensors[0])
    if below is not None:
        new.follow(below)
        below.output, below.is_rebuilt = tensors[0].detach(), False  # even if this layer fails from here on
    lease = Lease(new)
    new.lease = weakref.ref(lease)
    with saved_tensors_hooks(lambda _: lease, _ticket):
        mixed, pooled = _Mixing.apply(new, *tensors)
    new.enter("newest", new.beta.numel(), 0.0)
    return mixed, pooled, Trail(weakref.ref(new), weakref.ref(mixed), mixed._version, new.forward_pass)


mix_apart = torch.compiler.disable(mix)
