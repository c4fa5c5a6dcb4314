"""The fused way to carry what rounding adds up to from layer to layer: two launches, and nothing waits for the host.

The torch way, and the mathematics, are `depthlab.residuals.recompute.Segment`, which is what the kernels are tested
against. Both add up in a fixed order.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from depthlab.kernels.mgr.launch import power_of_two

BLOCK_ROWS = 512  # rows, streams of tokens, that a program takes at once
PROGRAMS = 128  # at most, about one for each multiprocessor; one more program adds them up


class Carried(NamedTuple):
    """What rounding adds up to from the bottom of a segment to one layer; on the device.

    state: [4, .., n] float32: of every row the growth, V, the smallest mean square of its inputs, and the largest V
    relative to that of its parts that ended below; as the next layer takes them on. numbers: [3] float32: the
    predicted relative error with this layer; how many gates are above the ceiling; 1 where the segment ends here, so
    that the next layer starts anew, else 0.
    """

    state: Tensor
    numbers: Tensor


def carry_rounding(
    beta: Tensor,
    kept: Tensor,
    chosen: Tensor | None,
    below: Carried | None,
    *,
    max_gate: float,
    sigma: float,
    tolerance: float,
) -> Carried:
    """Take a mixing layer into the segment of the one below it.

    Args:
        beta, kept: [.., n], [.., 4n+1], of `mix_and_pool_forward` with Triton.
        chosen: [.., n] bool, rows that the layer keeps besides those with gates above `max_gate`; None for none.
        below: of the layer below; None where a segment begins.
        sigma: the relative size of one rounding.
        tolerance: the segment ends where the prediction is beyond it, and where more than half of the gates are above
            `max_gate`; inf for the latter alone.
    """
    from depthlab.kernels.mgr import rounding_kernels as kernels

    n = beta.shape[-1]
    tokens = beta.numel() // n
    n_pad = power_of_two(n)
    block = BLOCK_ROWS // n_pad
    programs = min(PROGRAMS, max(1, math.ceil(tokens / block)))
    made = Carried(beta.new_empty((4, *beta.shape)), beta.new_empty(3))
    sums = beta.new_empty((programs, n + 1))
    state, numbers = made if below is None else below  # what a segment begins with is not read
    shape = {"N": n, "N_PAD": n_pad}
    with torch.cuda.device_of(beta):
        kernels.carry_kernel[(programs,)](
            beta,
            kept,
            beta if chosen is None else chosen,
            state,
            numbers,
            made.state,
            sums,
            tokens,
            max_gate,
            CHOOSES=chosen is not None,
            FRESH=below is None,
            BLOCK=block,
            **shape,
        )
        kernels.decide_kernel[(1,)](
            sums, made.numbers, programs, beta.numel(), sigma, tolerance, PROGRAMS=PROGRAMS, **shape
        )
    return made
