"""Drift or mixing? Why continuity of the leading direction falls again in the linear residual network.

The paper's account is *drift*: nothing fixes a layer's basis, so each layer's leading directions rotate away on their
own. The other account is *mixing*: neighbours keep a shared leading subspace, but its largest singular values come so
close that which vector inside it leads is an accident of each layer. Both lower the |cos| of leading vectors. Written
down before any of these runs, with "peak" the measured step where a seed's `weight_v1` is largest, and "end" the last
one:

| | drift predicts | mixing predicts |
|---|---|---|
| share of v1 in the neighbour's ten (`weight_v1_in_span`), peak to end | falls | does not fall |
| neighbour overlap at k = 10, peak to end | falls | does not fall |
| v1 twenty steps later in the layer's own ten (`own_in_span`) | clearly below 1 | near 1, while `own_v1` is below it |
| gap held open from step 100 on | v1 falls as before | v1 falls by less than half as much |

The share in the neighbour's span is the largest squared |cos| that any turning within that span could restore, so it
says directly how much of the fall mixing can account for. Both accounts may hold in part, and a third is possible: the
leading directions are *replaced* in all layers alike, which turns a layer against its own past (low `own_in_span` over
long times) but not against its neighbours.

Holding the gap open: after each step the leading singular value is raised to 1.5 times the second ("raise"), or all
others are lowered by one factor ("shrink"); no direction is turned. A raised value is also harder to turn, so a fall
that stops is weaker evidence than one that goes on; "shrink" adds no weight. Controls get the size of what their
partner got, at a random direction ("raise-control") or on the whole matrix ("shrink-control"). Conversely "close"
lowers the leading value to 1.02 times the second in a network that keeps its continuity: if v1 then falls while the
overlap stays, a closed gap is enough for such a fall, without any drift.

What this cannot show: anything at other widths, depths or data; that the subspaces at k = 10 are the right ones (k = 2
and 5 stand beside it); or what the paper's own runs did, whose settings are not known to us.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthlab.continuity import measuring, metrics
from depthlab.continuity.batched import Stack
from depthlab.continuity.leading import leading_spectrum
from depthlab.continuity.metrics import Spectrum

ARMS = ("plain", "raise", "raise-control", "shrink", "shrink-control", "close", "close-control")
HELD_GAP, CLOSED_GAP = 1.5, 1.02
SIZES = (2, 5, 10)  # the k of the subspaces
_RANDOM_DIRECTIONS = 32  # used in turn by the controls
_REFINEMENTS = 3  # products with W^T W after each step, which keep the leading pair of directions up to date


class GapControl:
    """Changes each network's leading singular value after each step, as its arm says; for `Stack.intervene`.

    The two leading directions of each matrix are found once and then followed by subspace iteration.
    """

    def __init__(self, stack: Stack, arms: Sequence[str]) -> None:
        """`arms`: one of `ARMS` for each network; a control's partner is the network of the same seed it is named for.

        Raises:
            ValueError: an unknown arm, another number of arms than networks, or a control without its partner.
        """
        if len(arms) != len(stack.nets):
            raise ValueError(f"GapControl got {len(arms)} arms for {len(stack.nets)} networks; give one for each.")
        unknown = [arm for arm in arms if arm not in ARMS]
        if unknown:
            raise ValueError(f"GapControl got the arm {unknown[0]!r}; use one of {', '.join(ARMS)}.")
        weights = stack.params.weights
        seeds = [net.seed for net in stack.nets]
        place = {key: i for i, key in enumerate(zip(seeds, arms, strict=True))}
        partners = [place.get((seed, arm.removesuffix("-control"))) for seed, arm in zip(seeds, arms, strict=True)]
        if None in partners:
            i = partners.index(None)
            raise ValueError(f"GapControl got {arms[i]!r} without its partner at seed {seeds[i]}; add it.")
        self._partner = torch.tensor(partners, device=weights.device)
        self._is = {arm: torch.tensor([a == arm for a in arms], device=weights.device)[:, None] for arm in ARMS}
        self._pair = leading_spectrum(weights, 2).directions.to(weights.dtype)
        generator = torch.Generator().manual_seed(0)
        shape = (2, _RANDOM_DIRECTIONS, *weights.shape[:-1])
        random = torch.randn(shape, generator=generator).to(weights)
        self._left, self._right = random / torch.linalg.vector_norm(random, dim=-1, keepdim=True)  # [32, N, L, d] each

    @torch.no_grad()
    def __call__(self, stack: Stack) -> None:
        w = stack.params.weights
        for _ in range(_REFINEMENTS):
            self._pair.copy_(_leading_pair(w, self._pair))
        images = w @ self._pair  # [N, L, d, 2]
        sizes = torch.linalg.vector_norm(images, dim=-2).clamp_min(torch.finfo(w.dtype).tiny)
        first, second = sizes.unbind(-1)  # [N, L]
        u, v = images[..., 0] / first.unsqueeze(-1), self._pair[..., 0]
        up = self._is["raise"] * (HELD_GAP * second - first).clamp_min(0)
        down = self._is["close"] * (first - CLOSED_GAP * second).clamp_min(0)
        factor = torch.where(self._is["shrink"], (first / (HELD_GAP * second)).clamp_max(1), 1.0)
        along = up - down + (1 - factor) * first
        # the controls
        kick = (self._is["raise-control"] | self._is["close-control"]) * (up + down)[self._partner]
        factor = torch.where(self._is["shrink-control"], factor[self._partner], factor)
        at = stack.at % _RANDOM_DIRECTIONS
        left, right = (bank.index_select(0, at).squeeze(0) for bank in (self._left, self._right))
        w.mul_(factor[..., None, None])
        w.add_(_outer(along, u, v) + _outer(kick, left, right))


def _leading_pair(w: Tensor, pair: Tensor) -> Tensor:
    """One product of [.., d, 2] with W^T W, made orthonormal and turned so that the longer image comes first."""
    first, second = (w.mT @ (w @ pair)).unbind(-1)
    tiny = torch.finfo(w.dtype).tiny
    first = first / torch.linalg.vector_norm(first, dim=-1, keepdim=True).clamp_min(tiny)
    second = second - (first * second).sum(-1, keepdim=True) * first
    second = second / torch.linalg.vector_norm(second, dim=-1, keepdim=True).clamp_min(tiny)
    basis = torch.stack([first, second], dim=-1)
    gram = (w @ basis).mT @ (w @ basis)
    angle = 0.5 * torch.atan2(2 * gram[..., 0, 1], gram[..., 0, 0] - gram[..., 1, 1])
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    return torch.stack([cos * first + sin * second, cos * second - sin * first], dim=-1)


def _outer(size: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (size.unsqueeze(-1) * left).unsqueeze(-1) * right.unsqueeze(-2)


def directions(stack: Stack) -> tuple[Spectrum, Tensor]:
    """The ten leading directions of every matrix now, [N, L, d, 10], and which networks are finite, [N]."""
    params, alive = measuring.finite(stack)
    return leading_spectrum(params.weights, max(SIZES)), alive


def neighbour_scores(found: Spectrum) -> dict[str, Tensor]:
    """`measuring.subspace_scores` as weight_*, with overlaps at all `SIZES` and the gap s_1 / s_10: each [N]."""
    left, right = measuring.pairs(found)
    scores = {f"weight_{name}": value for name, value in measuring.subspace_scores(found).items() if name != "overlap"}
    scores |= {f"overlap_{k}": metrics.pair_overlap(left, right, k).mean(-1) for k in SIZES}
    return scores | {"gap_10": (found.values[..., 0] / found.values[..., -1]).mean(-1)}


def own_scores(before: Spectrum, now: Spectrum) -> dict[str, Tensor]:
    """The same layers at two moments, means over layers, each [N].

    `own_v1`: |cos| of the leading directions; `own_in_span`: the share of today's in the ten of before;
    `own_overlap_k`: overlap of the leading k.
    """
    scores = {"own_v1": metrics.pair_alignment(before, now), "own_in_span": measuring.in_span(now, before)}
    scores |= {f"own_overlap_{k}": metrics.pair_overlap(before, now, k) for k in SIZES}
    return {name: value.mean(-1) for name, value in scores.items()}
