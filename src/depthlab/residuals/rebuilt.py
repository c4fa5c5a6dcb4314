"""Looking at rebuilt streams: what a backward pass would work with, and how far off it can be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from depthlab.kernels.mgr.reference import wide
from depthlab.residuals.base import State
from depthlab.theory import unit_roundoff


@dataclass(frozen=True)
class RebuiltStreams:
    """The input streams of one mixing layer as the backward pass has them.

    layer: the sublayer. streams: [.., n, C], as stored. bound: [.., n] float64, no row's RMS error over channels is
    larger; 0 where rows are kept exactly.
    """

    layer: int
    streams: Tensor
    bound: Tensor


@torch.no_grad()
def rebuild(state: State) -> list[RebuiltStreams]:
    """Rebuild the input of every mixing layer below `state`, from the newest down, beside a backward pass.

    `state` comes from a forward pass with `recompute`, whose graph must still be there. In plain torch.

    The bound. A layer stores s' = m + d, m = (1 - beta) s + beta F, and the rebuilding starts from s' + e'. With u the
    unit roundoff of the stored dtype, v that of the arithmetic, and every norm one over channels,

        |d|    <= u |m| + v (|m| + |s|) + 3 v |m - s|             rounding when stored, and in (4) in any of its forms
        |e|    <= (|e'| + |d|) / (1 - beta) + 4 v |m - s| + (u + v) |s|           and in (18), and when stored again

    evaluated at the rebuilt s and s', with factors that cover second order and gradual underflow. Unlike the
    prediction of `Recompute` it lets all errors add up in one direction.

    Raises:
        ValueError: no layer of the state's graph is there.
    """
    maker = None if state.trail is None else state.trail.maker_of(state.streams)
    if maker is None:
        raise ValueError(
            "state holds no mixing layer to go down from; give one that step returned with recompute and autograd on, "
            "before its graph is freed or its streams are changed."
        )
    maker.forward_pass.settle()
    found: list[RebuiltStreams] = []
    while maker is not None:
        if maker.input is not None:
            streams = maker.input_streams(None)
            found.append(RebuiltStreams(maker.layer, streams, torch.zeros_like(maker.beta, dtype=torch.float64)))
        else:
            above = found[-1]
            streams = maker.input_streams(above.streams)
            bound = _bound(streams, above, maker.beta.double(), maker.beta.dtype)
            if maker.rows is not None:
                bound = bound.masked_fill(maker.rows.slots >= 0, 0)
            found.append(RebuiltStreams(maker.layer, streams, bound))
        maker = maker.maker()
    return found


def _bound(streams: Tensor, above: RebuiltStreams, beta: Tensor, arithmetic: torch.dtype) -> Tensor:
    """Bound [.., n] of the RMS error of `streams`, rebuilt from those above."""
    u, v = unit_roundoff(streams.dtype), unit_roundoff(arithmetic)
    least = torch.finfo(streams.dtype).tiny
    before, after = wide(streams, above.streams)
    s, m, change = (x.double().square().mean(-1).sqrt() for x in (before, after, after - before))
    stored = (u + v) * m + v * s + 3 * v * change + least
    inherited = ((1 + 2 * u + 8 * v) * above.bound + stored) / (1 - beta)
    second_order = 1 + 8 * u + 8 * v / (1 - beta)
    return second_order * (inherited + 4 * v * change + (u + v) * s + least)
