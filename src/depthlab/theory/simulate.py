"""Streams at initialisation, by simulation: the truth that the closed forms of `gate_bias` are compared with."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from depthlab.theory.norm_bound import interpolate


@dataclass(frozen=True)
class Moments:
    """Measured after L mixing layers fed with independent unit-variance updates, per stream where it says [n].

    Attributes:
        carry: weight of the stream's own first content (x_0 for stream 1), by regression; [n].
        variance: mean square of each stream; [n].
        increment: mean square of sum_l g F_l, what a plain sum would have added.
        distance: norm(s_1 - s_2) over its value before mixing; NaN for one stream.
    """

    carry: Tensor
    variance: Tensor
    increment: float
    distance: float


def simulate(gates: Tensor, n_layers: int, samples: int, generator: Generator) -> Moments:
    """Mix n streams over `n_layers` with the constant gates [n] (the gates at zero weights); float64.

    Args:
        gates: [n] one gate a stream, in [0, 1].
        n_layers: mixing layers L.
        samples: independent channels; the relative error of a variance is about sqrt(2 / samples).
        generator: source of all randomness.
    """
    n = len(gates)
    start = torch.randn(n, samples, generator=generator, dtype=torch.float64)  # x_0 and n - 1 accumulated updates
    streams, added = start, torch.zeros(samples, dtype=torch.float64)
    beta = gates.double().unsqueeze(-1)
    for _ in range(n_layers):
        update = torch.randn(samples, generator=generator, dtype=torch.float64)
        streams = interpolate(streams, update, beta)
        added = added + beta[0] * update
    gap, first_gap = ((x[0] - x[min(1, n - 1)]).norm() for x in (streams, start))
    return Moments(
        carry=(streams * start).sum(-1) / start.square().sum(-1),
        variance=streams.square().mean(-1),
        increment=added.square().mean().item(),
        distance=(gap / first_gap).item(),
    )
