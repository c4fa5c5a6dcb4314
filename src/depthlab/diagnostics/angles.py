"""Angular distance between what layers read, between streams, and of a stream over depth."""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthlab.diagnostics.measures import raw_reads
from depthlab.diagnostics.trace import Trace, full_precision


def angular_distance(a: Tensor, b: Tensor) -> Tensor:
    """arccos(cos(a, b)) / pi in [0, 1] over the last dimension; [.., C] and [.., C] broadcast to [..].

    0: same direction, 1/2: orthogonal, 1: opposite. NaN where one of them is zero, which has no direction, or not
    finite. Computed in float64 as 2 atan2(|a' - b'|, |a' + b'|) of the unit vectors: arccos loses half the digits near
    0 and 1.

    Source: Gromov et al., arXiv 2403.17887.
    """
    a, b = _unit(a), _unit(b)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) / torch.pi


def layer_angles(trace: Trace) -> np.ndarray:
    """[R, R] mean angular distance between the raw reads of all R readers (R = n_sublayers + 1 when none is pruned).

    Like the two measures below: the mean is over the tokens that have a direction, NaN if none has
    or if a signal is not finite.
    """
    reads = list(raw_reads(trace).values())
    return np.array([[_mean_angle(a, b) for b in reads] for a in reads])


def stream_angles(trace: Trace) -> pd.DataFrame:
    """Between streams of one state: layer (its reader), stream, other, angle (mean over tokens), each pair once."""
    rows = []
    for layer, state in sorted(trace.require().reads.items()):
        streams = full_precision(state.stacked()).unbind(-2)
        for i, a in enumerate(streams):
            rows += [
                {"layer": layer, "stream": i, "other": j, "angle": _mean_angle(a, streams[j])}
                for j in range(i + 1, len(streams))
            ]
    return pd.DataFrame(rows, columns=["layer", "stream", "other", "angle"])


def stream_turns(trace: Trace) -> pd.DataFrame:
    """How far each stream turns in a layer: layer, stream, angle (mean over tokens); peaks are MGR-7's boundaries."""
    rows = []
    for step in trace.require().steps:
        before, after = (full_precision(s.stacked()).unbind(-2) for s in (step.before, step.after))
        rows += [
            {"layer": step.layer, "stream": i, "angle": _mean_angle(a, b)}
            for i, (a, b) in enumerate(zip(before, after, strict=False))  # an appended stream has no before
        ]
    return pd.DataFrame(rows, columns=["layer", "stream", "angle"])


def _unit(v: Tensor) -> Tensor:
    """v / |v| in float64. Scaled first, so that the squares of tiny or huge values neither vanish nor overflow."""
    v = v.double()
    v = v / v.abs().amax(-1, keepdim=True)
    return v / v.norm(dim=-1, keepdim=True)


def _mean_angle(a: Tensor, b: Tensor) -> float:
    directed = (a != 0).any(-1) & (b != 0).any(-1)  # a NaN in a signal counts, so it shows in the mean
    return angular_distance(a, b)[directed].mean().item()
