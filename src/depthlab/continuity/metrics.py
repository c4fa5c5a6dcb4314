"""How much neighbouring layers' matrices share: one score for each pair of neighbours.

Every score takes the matrices W_1 .. W_L of one network, out x in, as a list of 2-D tensors or as one tensor
[.., L, out, in] (any leading dimensions: seeds, variants), and gives [L - 1] or [.., L - 1]. They may be weights,
gradients or sums of gradients. `space="input"` compares right singular vectors (what a layer reads), `"output"` left
ones (what it writes). `remove_ones=True` first removes the all-ones direction from that space, which activations with a
positive mean (ReLU, GELU, SiLU) put into every layer.

Half-precision matrices are converted to float32 one at a time, so that they score exactly as their float32 copies.
CUDA tensors are worked on where they are, all others on the CPU. Nothing is differentiated through.

A zero matrix has no directions: every score with it is 0, and its gap is 1. Where several leading singular values are
equal the single vector is arbitrary and so is `alignment`; `spectral_gap` tells (below about 1.1: not determined),
`spectral_alignment` and `subspace_overlap` do not suffer.

Source: Why Geometric Continuity Emerges in Deep Neural Networks, arXiv 2605.04971 (alignment of leading singular
vectors, sigma^2-weighted form); the centred Gram cosine, the overlap and the gap are ours.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Matrices = Tensor | Sequence[Tensor]


class Spectrum(NamedTuple):
    """One matrix (or a stack): singular values [.., r] in falling order, directions [.., n, r] in the chosen space."""

    values: Tensor
    directions: Tensor


def alignment(weights: Matrices, space: str = "input", *, remove_ones: bool = False) -> Tensor:
    """|cos| of the leading singular vectors of neighbours: in [0, 1], chance `chance_level(d)`.

    Raises:
        ValueError: fewer than two matrices, unlike spaces, an unknown space, NaN or infinite values.
        TypeError: not floating-point tensors.
    """
    return _pairwise(weights, space, remove_ones, spectrum, pair_alignment)


def subspace_overlap(weights: Matrices, k: int = 10, space: str = "input", *, remove_ones: bool = False) -> Tensor:
    """``||V_k^T V'_k||_F^2 / k`` of the k leading directions of neighbours: in [0, 1], chance k / d.

    Matrices whose rank is below k share, in the remaining directions, only chance. Raises as `alignment`, and
    ValueError where k is not between 1 and the smaller side of the matrices.
    """
    return _pairwise(weights, space, remove_ones, spectrum, lambda a, b: pair_overlap(a, b, k))


def index_matched_alignment(weights: Matrices, space: str = "input", *, remove_ones: bool = False) -> Tensor:
    """|cos| of singular vectors of equal index, weighted by their share of sigma^2 (the mean of both matrices' shares).

    The form that the paper's description suggests. In [0, 1], chance `chance_level(d)`; not invariant where singular
    values are close. Raises as `alignment`.
    """
    return _pairwise(weights, space, remove_ones, spectrum, pair_index_matched)


def spectral_alignment(weights: Matrices, space: str = "input", *, remove_ones: bool = False) -> Tensor:
    """Centred Gram cosine of neighbours: the cosine of W^T W and W'^T W' (output: W W^T) without their trace parts.

    The whole spectrum, each direction weighted by sigma^2; unchanged by rotations inside a block of equal singular
    values. In [-1, 1], chance 0. A flat spectrum (an orthogonal matrix) prefers no direction and scores 0. Raises as
    `alignment`.
    """
    return _pairwise(weights, space, remove_ones, centred_gram, pair_gram)


def spectral_gap(weights: Matrices) -> Tensor:
    """s_1 / s_2 of each matrix, [L] or [.., L]: at least 1; inf for rank one, 1 for a zero matrix.

    Below about 1.1 the leading vector is hardly determined, and neither is `alignment`. Raises as `alignment`, but one
    matrix is enough.
    """
    gaps = [gap(_svd(matrix)[1]) for matrix in _ready(_listed(weights, at_least=1))]
    return torch.stack(gaps, dim=-1)


def chance_level(d: int) -> float:
    """Mean |cos| of two independent random directions in d dimensions, exactly: G(d/2) / (sqrt(pi) G((d+1)/2)).

    For large d this is sqrt(2 / (pi d)), which is below it by a share of 1 / (4 d). Raises ValueError for d < 1.
    """
    if not d >= 1:
        raise ValueError(f"chance_level got d = {d}; give the dimension of the space, at least 1.")
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)


def update_ratio(weights: Matrices, initial: Matrices, norm: str = "spectral") -> Tensor:
    """``||W - W_0|| / ||W_0||`` of each matrix, [L] or [.., L]; `norm` is "spectral" or "frobenius".

    Raises:
        ValueError: an unknown norm, unlike shapes, a zero W_0, NaN or infinite values.
    """
    orders = {"spectral": 2, "frobenius": "fro"}
    if norm not in orders:
        raise ValueError(f"update_ratio got norm {norm!r}; use 'spectral' or 'frobenius'.")
    now, start = _listed(weights, at_least=1), _listed(initial, at_least=1)
    if [w.shape for w in now] != [w.shape for w in start]:
        raise ValueError("update_ratio got weights and initial weights of unlike shapes; give both of one network.")
    ratios = []
    for after, before in zip(_ready(now), _ready(start), strict=True):
        length = torch.linalg.matrix_norm(before, ord=orders[norm])
        if not length.all():
            raise ValueError("update_ratio got a zero initial matrix, to which no ratio exists; leave it out.")
        ratios.append(torch.linalg.matrix_norm(after - before, ord=orders[norm]) / length)
    return torch.stack(ratios, dim=-1)


def summary(weights: Matrices, k: int = 10, space: str = "input", *, remove_ones: bool = False) -> dict[str, Tensor]:
    """All scores from one decomposition a matrix; the means over pairs (the gap: over layers), [] or [..].

    Keys: "v1", "gram", "overlap", "index_matched", "gap". Raises as the single scores.
    """
    matrices = list(_comparable(weights, space, remove_ones))
    return summarise([spectrum(m) for m in matrices], [centred_gram(m) for m in matrices], k)


def summarise(spectra: Sequence[Spectrum], grams: Sequence[Tensor], k: int = 10) -> dict[str, Tensor]:
    """`summary` from the decompositions of all layers, for those who need these for more: see `spectrum`."""
    scores = {
        "v1": _over_pairs(spectra, pair_alignment),
        "gram": _over_pairs(grams, pair_gram),
        "overlap": _over_pairs(spectra, lambda a, b: pair_overlap(a, b, k)),
        "index_matched": _over_pairs(spectra, pair_index_matched),
        "gap": torch.stack([gap(s.values) for s in spectra], dim=-1),
    }
    return {name: score.mean(-1) for name, score in scores.items()}


def leading_directions(weights: Matrices, space: str = "input") -> Tensor:
    """The leading singular vector of each matrix, [.., L, d]; its sign is arbitrary, and a zero matrix's vector is 0.

    Raises as `alignment`, but one matrix is enough.
    """
    directions = []
    for matrix in _comparable(weights, space, remove_ones=False, at_least=1):
        values, vectors = spectrum(matrix)
        directions.append(torch.where(values[..., :1] > 0, vectors[..., 0], 0.0))
    return torch.stack(directions, dim=-2)


# What the scores are made of: for one matrix or pair, turned so that the compared space is the last dimension.


def spectrum(matrix: Tensor) -> Spectrum:
    """Singular values and right singular vectors of [.., m, n]."""
    _, values, vh = _svd(matrix)
    return Spectrum(values, vh.mT)


def centred_gram(matrix: Tensor) -> Tensor:
    """W^T W less its trace part, scaled to Frobenius norm 1: [.., m, n] -> [.., n, n]; 0 for a flat spectrum."""
    # Scaling first keeps the squares of very small or large entries inside float32's range.
    matrix = matrix / matrix.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    gram = matrix.mT @ matrix
    n = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    centred = gram - trace / n * torch.eye(n, dtype=gram.dtype, device=gram.device)
    length = torch.linalg.matrix_norm(centred, keepdim=True)
    # What is left of a flat spectrum is rounding noise, whose direction means nothing.
    noise = 4 * n * torch.finfo(gram.dtype).eps * torch.linalg.matrix_norm(gram, keepdim=True)
    return torch.where(length > noise, centred / length.clamp_min(torch.finfo(gram.dtype).tiny), 0.0)


def without_ones(matrix: Tensor) -> Tensor:
    """[.., m, n] with the all-ones direction of the last space projected out; what is only rounding becomes 0."""
    rest = matrix - matrix.mean(-1, keepdim=True)
    norm = torch.linalg.matrix_norm(rest, keepdim=True)
    noise = 4 * torch.finfo(matrix.dtype).eps * torch.linalg.matrix_norm(matrix, keepdim=True)
    return torch.where(norm > noise, rest, 0.0)


def pair_alignment(a: Spectrum, b: Spectrum) -> Tensor:
    """|cos| of the leading directions: [..]."""
    cosine = (a.directions[..., 0] * b.directions[..., 0]).sum(-1).abs().clamp(max=1.0)
    return _or_zero(cosine, a, b)


def pair_overlap(a: Spectrum, b: Spectrum, k: int) -> Tensor:
    """Mean squared cosine of the principal angles between the k leading directions: [..]."""
    smallest = min(a.values.shape[-1], b.values.shape[-1])
    if not 1 <= k <= smallest:
        raise ValueError(f"subspace_overlap got k = {k}; these matrices have {smallest} directions, give 1 to that.")
    product = a.directions[..., :k].mT @ b.directions[..., :k]
    return _or_zero((product.square().sum((-2, -1)) / k).clamp(max=1.0), a, b)


def pair_index_matched(a: Spectrum, b: Spectrum) -> Tensor:
    """sigma^2-weighted |cos| of directions of equal index: [..]."""
    r = min(a.values.shape[-1], b.values.shape[-1])
    cosines = (a.directions[..., :r] * b.directions[..., :r]).sum(-2).abs()
    shares = [_shares(s.values)[..., :r] for s in (a, b)]
    return _or_zero((cosines * (shares[0] + shares[1]) / 2).sum(-1).clamp(max=1.0), a, b)


def pair_gram(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of two matrices of norm 1 (or 0): [..]."""
    return (a * b).sum((-2, -1)).clamp(-1.0, 1.0)


def gap(values: Tensor) -> Tensor:
    """s_1 / s_2 of singular values [.., r] -> [..]."""
    first = values[..., 0]
    second = values[..., 1] if values.shape[-1] > 1 else torch.zeros_like(first)
    return torch.where(first > 0, first / second, torch.ones_like(first))


def _shares(values: Tensor) -> Tensor:
    relative = values / values[..., :1].clamp_min(torch.finfo(values.dtype).tiny)
    squares = relative.square()
    return squares / squares.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def _or_zero(score: Tensor, a: Spectrum, b: Spectrum) -> Tensor:
    """The SVD of a zero matrix returns unit vectors all the same; they must not count as directions."""
    return torch.where((a.values[..., 0] > 0) & (b.values[..., 0] > 0), score, 0.0)


def _pairwise(weights: Matrices, space: str, remove_ones: bool, prepare: Callable, score: Callable) -> Tensor:
    return _over_pairs(map(prepare, _comparable(weights, space, remove_ones)), score)


def _over_pairs(prepared: Iterable, score: Callable) -> Tensor:
    return torch.stack([score(a, b) for a, b in pairwise(prepared)], dim=-1)


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # repeated values can defeat the solver in single precision or on a GPU
        parts = torch.linalg.svd(matrix.double().cpu(), full_matrices=False)
        return tuple(part.to(matrix) for part in parts)


def _comparable(weights: Matrices, space: str, remove_ones: bool, at_least: int = 2) -> Iterator[Tensor]:
    """The matrices one after another, ready for arithmetic, turned so that the compared space is the last dimension."""
    if space not in ("input", "output"):
        raise ValueError(f"continuity got space {space!r}; use 'input' (right vectors) or 'output' (left vectors).")
    given = _listed(weights, at_least)
    sizes = sorted({m.shape[-1 if space == "input" else -2] for m in given})
    if len(sizes) > 1:
        raise ValueError(
            f"continuity in {space} space got matrices with {space} sizes {', '.join(map(str, sizes))}; "
            "directions can be compared only within one space, so give matrices of equal size there."
        )
    for matrix in _ready(given):
        turned = matrix if space == "input" else matrix.mT
        yield without_ones(turned) if remove_ones else turned


def _listed(weights: Matrices, at_least: int) -> list[Tensor]:
    """The given tensors [.., m, n] as a list, checked but not touched."""
    if isinstance(weights, Tensor):
        if weights.ndim < 3:
            raise ValueError(
                f"continuity got one tensor of shape {list(weights.shape)}; give [.., L, out, in] or a list of them."
            )
        given = list(weights.unbind(-3))
    else:
        given = list(weights)
    if len(given) < at_least:
        raise ValueError(f"continuity got {len(given)} matrices; give at least {at_least}.")
    for index, matrix in enumerate(given):
        where = f"continuity got, as matrix {index} of {len(given)},"
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            kind = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise TypeError(f"{where} {kind}; give floating-point tensors.")
        if matrix.ndim < 2 or 0 in matrix.shape:
            raise ValueError(f"{where} a tensor of shape {list(matrix.shape)}; give non-empty matrices [.., out, in].")
    return given


def _ready(given: list[Tensor]) -> Iterator[Tensor]:
    """One matrix at a time: finite, detached, float32, or float64 where any is; on the CPU unless on CUDA."""
    wide = torch.float64 if any(m.dtype == torch.float64 for m in given) else torch.float32
    for index, matrix in enumerate(given):
        matrix = (matrix if matrix.is_cuda else matrix.cpu()).detach().to(wide)
        if not matrix.isfinite().all():
            raise ValueError(
                f"continuity got, as matrix {index} of {len(given)}, NaN or infinite values; "
                "a score of them would mean nothing, find where they arose."
            )
        yield matrix
