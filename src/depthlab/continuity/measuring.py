"""What is measured on a stack of networks at one moment: the scores of `metrics`, for all of them at once.

The scores come from `leading_spectrum` instead of a full SVD of every matrix; a test compares both. All results are
[N], means over neighbouring pairs or over layers, and NaN for a network that is not finite any more.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from depthlab.continuity import metrics, toy, training
from depthlab.continuity.batched import Stack
from depthlab.continuity.leading import leading_spectrum, opposite
from depthlab.continuity.metrics import Spectrum

SUBSPACE = 10  # the k of the overlaps, as in `metrics.subspace_overlap`


def measure(stack: Stack, gradient_batch: int = 1024) -> dict[str, Tensor]:
    """Every continuity number of one moment but the full SVDs of `index_matched`.

    In input space: `weight_*`, `grad_*` (on the first `gradient_batch` training digits) and `cumulative_*` (the sum of
    raw gradients, absent at step 0) are scores of `metrics`; `*_no_ones` is without the all-ones direction; `follows`
    is the |cos| of a layer's leading weight direction and its leading cumulative-gradient direction;
    `weight_v1_in_span` the share of a leading direction in the span of its neighbour's ten. In output space:
    `weight_u1`, `grad_u1`. `ratio_*` is the size of the update over that of W_0; `val_*` are of the validation digits.
    """
    params, alive = finite(stack)
    weights, initial = params.weights, stack.initial
    config, images = stack.config, stack.images
    fixed = images.train_x[:gradient_batch], images.train_y[:gradient_batch]
    gradient = training.weight_gradient(params, config, *fixed)
    alive = alive & gradient.flatten(1).isfinite().all(1)  # finite parameters can be large enough to overflow it
    gradient = torch.where(alive.view(-1, 1, 1, 1), gradient, 0.0)
    found, slope = leading_spectrum(weights, SUBSPACE), leading_spectrum(gradient, 1)
    scores = {f"weight_{name}": value for name, value in subspace_scores(found).items()}
    scores["weight_u1"] = _v1(opposite(weights, found))
    scores["weight_v1_no_ones"] = _v1(leading_spectrum(metrics.without_ones(weights), 1))
    scores["grad_v1"], scores["grad_u1"] = _v1(slope), _v1(opposite(gradient, slope))
    scores["grad_v1_no_ones"] = _v1(leading_spectrum(metrics.without_ones(gradient), 1))
    scores["weight_gram"] = metrics.spectral_alignment(weights).mean(-1)
    scores["weight_gram_no_ones"] = metrics.spectral_alignment(weights, remove_ones=True).mean(-1)
    scores["grad_gram"] = metrics.spectral_alignment(gradient).mean(-1)
    change = weights - initial
    largest = leading_spectrum(change, 1).values / leading_spectrum(initial, 1).values
    scores["ratio_spectral"] = largest.squeeze(-1).mean(-1)
    scores["ratio_frobenius"] = metrics.update_ratio(weights, initial, "frobenius").mean(-1)
    if stack.step and stack.gradient_sum is not None:
        total = leading_spectrum(torch.where(alive.view(-1, 1, 1, 1), stack.gradient_sum, 0.0), 1)
        scores["cumulative_v1"] = _v1(total)
        scores["follows"] = metrics.pair_alignment(found, total).mean(-1)
    scores["val_loss"], scores["val_accuracy"] = training.evaluate_each(params, config, images.val_x, images.val_y)
    return {name: only(alive, values) for name, values in scores.items()}


def subspace_scores(found: Spectrum) -> dict[str, Tensor]:
    """Scores of the weights' leading directions [.., L, k] that need no more than these, each [..]."""
    left, right = pairs(found)
    spans = (in_span(left, right) + in_span(right, left)) / 2
    return {
        "v1": _v1(found),
        "overlap": metrics.pair_overlap(left, right, found.values.shape[-1]).mean(-1),
        "v1_in_span": spans.mean(-1),
        "gap": metrics.gap(found.values).mean(-1),
    }


def index_matched(stack: Stack, threads: int = 1) -> Tensor:
    """`metrics.index_matched_alignment` of every network: a full SVD of every matrix, on the CPU, [N]."""
    params, alive = finite(stack)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(metrics.index_matched_alignment, params.weights.cpu().unbind(0)))
    return only(alive, torch.stack([score.mean() for score in found]))


def pairs(found: Spectrum) -> tuple[Spectrum, Spectrum]:
    """Spectra of all layers [.., L, k] as neighbours: those of layers 1 .. L-1 and those of layers 2 .. L."""
    lower = Spectrum(found.values[..., :-1, :], found.directions[..., :-1, :, :])
    return lower, Spectrum(found.values[..., 1:, :], found.directions[..., 1:, :, :])


def in_span(inner: Spectrum, outer: Spectrum) -> Tensor:
    """The share (a squared cosine) of the leading direction of `inner` inside the span of all of `outer`: [..].

    Chance k / d. It is the largest squared |cos| that turning `outer` within its own span could reach.
    """
    return (outer.directions.mT @ inner.directions[..., :1]).square().sum((-2, -1)).clamp(max=1.0)


def finite(stack: Stack) -> tuple[toy.Params, Tensor]:
    """The parameters with those of networks not finite any more set to 0, and which are finite: bool [N]."""
    alive = stack.alive()
    return toy.Params(*(torch.where(alive.view(-1, *[1] * (p.ndim - 1)), p, 0.0) for p in stack.params)), alive


def only(alive: Tensor, values: Tensor) -> Tensor:
    """The values [N] in float64 on the CPU, NaN where a network is not alive."""
    return torch.where(alive.cpu(), values.double().cpu(), torch.nan)


def _v1(found: Spectrum) -> Tensor:
    return metrics.pair_alignment(*pairs(found)).mean(-1)
