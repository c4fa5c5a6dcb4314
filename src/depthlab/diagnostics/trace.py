"""Watching one forward pass of a residual scheme."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthlab.residuals import Residual, State


@dataclass
class Step:
    """One sublayer's output and the states around it."""

    layer: int
    before: State
    update: Tensor
    after: State


@dataclass
class Trace:
    """One forward pass: the embedding, every step, and the state that each sublayer read.

    embedding: [.., C]. steps: in order; pruned sublayers have none. reads: state by reader, 0 .. n_sublayers. inputs:
    what each reader was given (normalised, where the scheme normalises).
    """

    residual: Residual
    embedding: Tensor | None = None
    steps: list[Step] = field(default_factory=list)
    reads: dict[int, State] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def require(self) -> "Trace":
        """This trace; ValueError if no forward pass was recorded, or one of no token."""
        if self.embedding is None:
            raise ValueError("This trace is empty; run the model inside `with record(residual) as trace:` first.")
        if self.embedding.numel() == 0:
            shape = list(self.embedding.shape)
            raise ValueError(f"An embedding of shape {shape} has no token to measure; give at least one.")
        return self


@contextmanager
def record(residual: Residual, *, gradients: bool = False) -> Iterator[Trace]:
    """Keep the signals of the last forward pass through `residual` that starts inside the block. Eager mode only.

    Args:
        residual: the scheme inside a model, for example ``model.residual``.
        gradients: keep the signals in the graph, so that after `backward` each holds its gradient
            (`signal_gradient_norms`). Otherwise they are detached.

    Yields:
        the trace, filled while the model runs.

    Raises:
        TypeError: not a Residual.
        RuntimeError: this residual is being recorded already.
    """
    if not isinstance(residual, Residual):
        raise TypeError(f"record needs a depthlab.residuals.Residual, got {type(residual).__name__}.")
    if "step" in vars(residual):
        raise RuntimeError("This residual is being recorded already; use one `record` at a time.")
    trace = Trace(residual)
    start, step, read = residual.start, residual.step, residual.read

    def keep(tensor: Tensor) -> Tensor:
        if not gradients:
            return tensor.detach()
        if tensor.requires_grad:
            tensor.retain_grad()
        return tensor

    def keep_state(state: State) -> State:
        if gradients:
            return state
        streams = state.streams
        streams = streams.detach() if isinstance(streams, Tensor) else tuple(s.detach() for s in streams)
        extra = tuple(e.detach() if isinstance(e, Tensor) else e for e in state.extra)
        return State(state.layer, streams, extra)

    def recorded_start(x: Tensor) -> tuple[Tensor, State]:
        h, state = start(x)
        trace.embedding, trace.steps, trace.reads, trace.inputs = keep(x), [], {}, {}
        trace.reads[0], trace.inputs[0] = keep_state(state), keep(h)
        return h, state

    def recorded_step(layer: int, update: Tensor, state: State) -> tuple[Tensor, State]:
        h, after = step(layer, update, state)
        if not trace.steps or layer > trace.steps[-1].layer:  # a checkpoint's recomputation comes a second time
            trace.steps.append(Step(layer, keep_state(state), keep(update), keep_state(after)))
            trace.reads[layer + 1], trace.inputs[layer + 1] = keep_state(after), keep(h)
        return h, after

    def recorded_read(layer: int, state: State) -> Tensor:
        h = read(layer, state)
        trace.reads[layer], trace.inputs[layer] = keep_state(state), keep(h)
        return h

    residual.start, residual.step, residual.read = recorded_start, recorded_step, recorded_read
    try:
        yield trace
    finally:
        del residual.start, residual.step, residual.read


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor without its graph, in float32 or wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
