"""Which streams MGR keeps for the backward pass when it rebuilds the others, and what rounding does to those.

A mixing layer can be turned round, s = s' + beta / (1 - beta) (s' - F), so the backward needs the streams above it
only. Two things go wrong on the way down. The stored s' is off by its rounding, at most u |s'|, and so is the rebuilt
s, at most u |s|; and each layer multiplies what it inherits by 1 / (1 - beta). For a row (one stream of one token):

    error(s) <= (error(s') + u |s'|) / (1 - beta) + u |s|                                             (bound)
    V(s)      = (V(s') + sigma^2 |s'|^2 / C) / (1 - beta)^2 + sigma^2 |s|^2 / C                    (model)

u is the unit roundoff of the stored dtype (2^-8 for bfloat16, 2^-24 for float32). The model takes roundings for
independent and uniform, so that their squares add up: V is the mean square of a row's error, and sigma = (u + v) /
sqrt(3), where v is the unit roundoff of the arithmetic, whose own roundings count in float32. Both are linear, so the
forward pass can carry them upwards: with P the product of 1 / (1 - beta)^2 over the layers taken in so far, layer l
adds sigma^2 (|s'|^2 P_with_l + |s|^2 P_without_l) / C to V at the bottom of its segment. A segment reaches from one
anchor, a layer whose input is kept, to the next. Reads and gates see every row by its direction (RMSNorm), so a row's V
counts relative to that row: to |s|^2 / C + eps where that is smallest in the segment, which is high for a row that
fades. Relative to all tokens together, a few huge ones (attention sinks) would hide what becomes of the others.
`Segment` needs no pass over the streams; the bound, with every rounding of the arithmetic in it, is that of
`depthlab.residuals.rebuild`.

Source: arXiv 2605.23259 ("fallback inversion", of which the summary says that the top-p gates' values are saved); the
model and its use are ours.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from depthlab.theory import unit_roundoff

MAX_GATE = 0.99  # the highest ceiling: beyond it a single layer multiplies errors by more than 100


@dataclass(frozen=True)
class Recompute:
    """How MGR keeps few streams and rebuilds the others in the backward pass.

    The forward pass is unchanged, bit by bit. The streams of a layer are rebuilt from those above it, unless the layer
    is an anchor. Rows are streams of single tokens.

    Args:
        top_p: share of each layer's rows, those with the largest gates, that are kept exactly.
        anchor_every: keep all streams at every k-th mixing layer; "auto": wherever the predicted error of a rebuilt
            stream, relative to each of its rows, RMS over them, would exceed `tolerance`; None: nowhere.
        max_gate: rows with a larger gate are always kept, at most 0.99. A layer that would keep more than half of its
            rows is an anchor.
        tolerance: of "auto"; None: 1e-4 for streams in float32 and float64, 2e-2 in bfloat16 and float16.

    Raises:
        TypeError, ValueError: naming the field, its value and what is allowed.
    """

    top_p: float = 0.0
    anchor_every: int | Literal["auto"] | None = "auto"
    max_gate: float = 0.5
    tolerance: float | None = None

    def __post_init__(self) -> None:
        _check_number("top_p", self.top_p, "a number from 0 to 1")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not allowed; use a number from 0 to 1.")
        _check_number("max_gate", self.max_gate, f"a number from 0 to {MAX_GATE}")
        if not 0 <= self.max_gate <= MAX_GATE:
            raise ValueError(f"max_gate={self.max_gate} is not allowed; use a number from 0 to {MAX_GATE}.")
        self._check_anchors()
        if self.tolerance is None:
            return
        _check_number("tolerance", self.tolerance, "a positive number, or None")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} is not allowed; use a positive number, or None.")
        if self.anchor_every != "auto":
            raise ValueError(
                f"tolerance={self.tolerance} has no use with anchor_every={self.anchor_every!r}; only 'auto' heeds it."
            )

    def _check_anchors(self) -> None:
        every = self.anchor_every
        if every is None or (isinstance(every, str) and every == "auto"):
            return
        if isinstance(every, bool) or not isinstance(every, Integral):
            raise TypeError(f"anchor_every={every!r} is no number of layers; use one of at least 1, 'auto' or None.")
        if every < 1:
            raise ValueError(f"anchor_every={every} is not allowed; use at least 1, 'auto' or None.")

    def tolerance_of(self, dtype: torch.dtype) -> float:
        """The tolerance for streams stored in `dtype`."""
        if self.tolerance is not None:
            return self.tolerance
        return 2e-2 if dtype.itemsize < 4 else 1e-4

    def is_anchor(self, count: int, rows: int, kept: int, predicted: float, dtype: torch.dtype) -> bool:
        """Whether the `count`-th mixing layer keeps its whole input, where it would else keep `kept` of its `rows`."""
        if 2 * kept > rows:
            return True
        if self.anchor_every == "auto":
            return not predicted <= self.tolerance_of(dtype)  # not a number is no promise
        return self.anchor_every is not None and count % self.anchor_every == 0


def _check_number(name: str, value: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use {allowed}.")


@lru_cache
def unit_of_rounding(stored: torch.dtype, arithmetic: torch.dtype) -> float:
    """u + v, sqrt(3) sigma."""
    return unit_roundoff(stored) + unit_roundoff(arithmetic)


@dataclass(frozen=True)
class Segment:
    """What rounding adds up to from the bottom of a segment to its newest layer; a new one for every layer.

    growth: [.., n], the product P of 1 / (1 - beta)^2 over a row's layers. variance: [.., n], V in units of sigma^2.
    least: [.., n], the smallest mean square of the row's inputs. closed: [.., n], the largest V / least of a row's
    parts that ended below rows which are kept. None: not yet.
    """

    growth: Tensor | None = None
    variance: Tensor | None = None
    least: Tensor | None = None
    closed: Tensor | None = None

    def with_layer(self, beta: Tensor, before: Tensor, after: Tensor, kept: Tensor) -> "Segment":
        """This segment and one more layer; beta, mean squares of its input and output, rows that it keeps, [.., n]."""
        carried = (1 - beta.masked_fill(kept, 0)).square()
        growth = carried.reciprocal() if self.growth is None else self.growth / carried
        variance = growth * after if self.variance is None else torch.addcmul(self.variance, growth, after)
        variance = variance + before if self.growth is None else torch.addcmul(variance, self.growth, before)
        least = before if self.least is None else torch.minimum(self.least, before)
        return replace(self, growth=growth, variance=variance, least=least)

    def without_rows(self, kept: Tensor) -> "Segment":
        """The same after its newest layer kept these rows [.., n]: what comes from above ends there."""
        closed = (self.variance / self.least).masked_fill(~kept, 0)
        return Segment(
            self.growth.masked_fill(kept, 1),
            self.variance.masked_fill(kept, 0),
            self.least.masked_fill(kept, math.inf),
            closed if self.closed is None else torch.maximum(self.closed, closed),
        )

    def shares(self) -> Tensor:
        """V / least [n], the mean over the tokens."""
        largest = self.variance / self.least
        largest = largest if self.closed is None else torch.maximum(largest, self.closed)
        tokens = largest.reshape(-1, largest.shape[-1])
        return tokens.sum(0) / max(len(tokens), 1)


def predicted(shares: Iterable[float], stored: torch.dtype, arithmetic: torch.dtype) -> float:
    """The largest relative error of a stream, RMS over its rows' own, from `Segment.shares`; inf where unknown."""
    worst = max(math.inf if math.isnan(share) else share for share in shares)
    return unit_of_rounding(stored, arithmetic) * math.sqrt(worst / 3)


class LayerKept(NamedTuple):
    """What one mixing layer keeps of its input streams.

    kind: "anchor" (all), "newest" (all, until another layer follows) or "rows". rows: tokens times streams. kept: rows
    kept exactly. row_bytes, update_bytes: of one row, and of the sublayer's output, which is kept in any case.
    predicted: relative error of the rebuilt streams from this layer down to the anchor below, that of the worst stream,
    RMS over its rows' own; 0 where all are kept.
    """

    layer: int
    kind: Literal["anchor", "newest", "rows"]
    rows: int
    kept: int
    row_bytes: int
    update_bytes: int
    predicted: float


@dataclass(frozen=True)
class RecomputeReport:
    """What one forward pass kept for its backward, layer by layer."""

    layers: tuple[LayerKept, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the streams that are kept."""
        return sum(layer.kept * layer.row_bytes for layer in self.layers)

    @property
    def all_bytes(self) -> int:
        """Bytes of all streams, which would be kept without recomputation."""
        return sum(layer.rows * layer.row_bytes for layer in self.layers)

    @property
    def update_bytes(self) -> int:
        """Bytes of the sublayers' outputs, kept either way."""
        return sum(layer.update_bytes for layer in self.layers)

    @property
    def share(self) -> float:
        """Stream bytes kept over all stream bytes."""
        return self.kept_bytes / max(self.all_bytes, 1)

    @property
    def share_with_updates(self) -> float:
        """The same with the sublayers' outputs on both sides."""
        return (self.kept_bytes + self.update_bytes) / max(self.all_bytes + self.update_bytes, 1)

    @property
    def anchors(self) -> tuple[int, ...]:
        """Sublayers whose input streams are all kept, the newest included."""
        return tuple(layer.layer for layer in self.layers if layer.kind != "rows")

    @property
    def predicted(self) -> float:
        """The largest predicted relative error of rebuilt streams."""
        return max((layer.predicted for layer in self.layers), default=0.0)

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} mixing layers, {len(self.anchors)} of them kept whole, "
            f"{self.kept_bytes:,} of {self.all_bytes:,} stream bytes kept ({self.share:.1%}); "
            f"predicted relative error of the rebuilt streams {self.predicted:.1e}"
        )
