"""The leading singular vectors of many matrices at once, for when a full SVD of each is too slow.

Chebyshev-filtered subspace iteration (Zhou, Saad, Tiago, Chelikowsky 2006) in float64, made of batched products and
small Cholesky factors only, so that hundreds of matrices advance together on a GPU. Each matrix is accepted by the size
of its residual; one that does not converge goes to the full SVD, never out with a wrong answer.
"""

import torch
from torch import Tensor

from depthlab.continuity.metrics import Spectrum, spectrum

_BLOCK = 32  # directions iterated together: small eigenproblems up to 32 are solved in one batch on CUDA
_DEGREE = 3  # a higher degree costs the small directions of a steep spectrum their digits, as does a lower floor:
_FLOOR = 1e-3  # the filter damps what lies below this share of s_1^2, or below the block
_ROUNDS = 30


def leading_spectrum(matrix: Tensor, k: int = 10, *, tolerance: float = 1e-6) -> Spectrum:
    """The k largest singular values [.., k] and their right singular vectors [.., n, k] of matrices [.., m, n].

    As `metrics.spectrum` cut to k columns, in float64. Equal singular values leave their vectors arbitrary here too.

    Args:
        tolerance: bound on ``|A^T A v - s^2 v|`` in units of s^2, for each of the k pairs.

    Raises:
        ValueError: NaN or infinite entries; k not between 1 and the smaller side.
    """
    side = min(matrix.shape[-2:])
    if not 1 <= k <= side:
        raise ValueError(f"leading_spectrum got k = {k}; these matrices have {side} directions, give 1 to that.")
    if not matrix.isfinite().all():
        raise ValueError(
            "leading_spectrum got NaN or infinite values; leave those matrices out, find where they arose."
        )
    a = matrix.detach().double()
    a = a.reshape(-1, *a.shape[-2:])
    scale = a.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    if side < 2 * _BLOCK or k > _BLOCK // 2:
        found = _cut(spectrum(a), k)
    else:
        found = _iterate(a / scale, k, tolerance)
        found = Spectrum(found.values * scale[..., 0], found.directions)
    return Spectrum(*(part.reshape(*matrix.shape[:-2], *part.shape[1:]) for part in found))


def opposite(matrix: Tensor, found: Spectrum) -> Spectrum:
    """The left singular vectors [.., m, k] that belong to the right ones in `found`: A v / s, 0 where s is 0."""
    images = matrix.to(found.directions) @ found.directions
    return Spectrum(found.values, images / found.values.unsqueeze(-2).clamp_min(torch.finfo(images.dtype).tiny))


def _iterate(a: Tensor, k: int, tolerance: float) -> Spectrum:
    """Matrices [b, m, n] of largest entry 1."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(a.shape[-1], _BLOCK, generator=generator, dtype=a.dtype).to(a.device)
    start = torch.linalg.qr(start)[0].expand(len(a), -1, -1)
    q, values, error = _ritz(a, start, start)
    for _ in range(_ROUNDS):
        floor = _FLOOR * values[:, 0]
        cut = torch.maximum(values[:, -1], floor).clamp_min(torch.finfo(a.dtype).tiny)[:, None, None]
        image = a.mT @ (a @ q)
        before, now = q, image * (2 / cut) - q
        for _ in range(_DEGREE - 1):
            before, now = now, a.mT @ (a @ now) * (4 / cut) - 2 * now - before
        # On a steep spectrum the filter would damp some of the k directions; there one plain product is enough.
        steep = (values[:, -1] < floor) & (values[:, k - 1] < 2 * cut[:, 0, 0])
        q, values, error = _ritz(a, _orthonormal(torch.where(steep[:, None, None], image, now)), start)
        # the second term is what float64 leaves of directions far below the first
        settled = (error[:, :k] <= tolerance * values[:, :k] + 1e-12 * values[:, :1]).all(-1)
        if settled.all():
            break
    found = Spectrum(values[:, :k].sqrt(), q[..., :k].clone())
    stubborn = (~settled).nonzero()[:, 0]
    if len(stubborn):
        exact = _cut(spectrum(a[stubborn].cpu()), k)
        found.values[stubborn], found.directions[stubborn] = (part.to(a) for part in exact)
    return found


def _orthonormal(block: Tensor) -> Tensor:
    """An orthonormal basis of the columns by Cholesky QR, three times with a shift against near-dependent columns."""
    block = block / torch.linalg.vector_norm(block, dim=-2, keepdim=True).clamp_min(torch.finfo(block.dtype).tiny)
    eye = torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
    for shift in (1e-13, 0.0, 0.0):
        factor, _ = torch.linalg.cholesky_ex(block.mT @ block + shift * eye)
        block = torch.linalg.solve_triangular(factor.mT, block, upper=True, left=False)
    return block


def _ritz(a: Tensor, q: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best vectors within the span of q, their squared singular values in falling order, and their residuals.

    Where the Cholesky factors failed q is not orthonormal; that matrix begins again from `start`.
    """
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    sound = (q.mT @ q - eye).abs().amax((-2, -1), keepdim=True) < 1e-8  # False for NaN too
    q = torch.where(sound, q, start)
    image = a @ q
    values, turn = torch.linalg.eigh(image.mT @ image)
    values, turn = values.flip(-1).clamp_min(0), turn.flip(-1)
    q, image = q @ turn, image @ turn
    error = torch.linalg.vector_norm(a.mT @ image - q * values.unsqueeze(-2), dim=-2)
    return q, values, error


def _cut(found: Spectrum, k: int) -> Spectrum:
    return Spectrum(found.values[..., :k], found.directions[..., :k])
