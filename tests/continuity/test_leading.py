"""Leading singular vectors by filtered iteration: equal to the full SVD, whatever the spectrum."""

import pytest
import torch

from depthlab.continuity import leading, metrics
from depthlab.continuity.leading import leading_spectrum, opposite

D = 96


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(values: torch.Tensor, seed: int = 1) -> torch.Tensor:
    left, right = (torch.linalg.qr(normal(3, D, D, seed=seed + i))[0] for i in range(2))
    return (left * values) @ right.mT


rank = torch.arange(D, dtype=torch.float64)
SPECTRA = {
    "random": normal(3, D, D),
    "one direction above noise": normal(3, D, D) / D**0.5 + 5 * with_values((rank == 0).double()),
    "one direction far above noise": normal(3, D, D) / D**0.5 + 60 * with_values((rank == 0).double()),
    "rank 10": normal(3, D, 10) @ normal(3, 10, D, seed=1),
    "a steep spectrum": with_values(10 ** (-rank / 4)),
    "close leading values": with_values(torch.where(rank < 3, 3.0 - 1e-3 * rank, 1.0 / (1 + rank / 9))),
    "tiny entries": 1e-30 * normal(3, D, D),
    "tall": normal(2, 3, 2 * D, D),
    "wide": normal(2, D, 2 * D),
}


@pytest.mark.parametrize("matrix", SPECTRA.values(), ids=SPECTRA)
def test_values_and_directions_are_those_of_the_full_svd(matrix):
    found, exact = leading_spectrum(matrix, 10), metrics.spectrum(matrix)
    assert found.values.shape == (*matrix.shape[:-2], 10)
    torch.testing.assert_close(found.values, exact.values[..., :10], rtol=1e-9, atol=1e-12 * float(exact.values.max()))
    cosines = (found.directions * exact.directions[..., :10]).sum(-2).abs()
    assert cosines.min() > 1 - 1e-6
    left = metrics.spectrum(matrix.mT).directions[..., :10]
    assert (opposite(matrix, found).directions * left).sum(-2).abs().min() > 1 - 1e-6


def test_inside_equal_values_the_span_is_right():
    matrix = with_values(torch.where(rank < 4, 3.0, 1.0))
    found, exact = leading_spectrum(matrix, 4), metrics.spectrum(matrix)
    torch.testing.assert_close(metrics.pair_overlap(found, exact, 4), torch.ones(3, dtype=torch.float64))


def test_zero_and_flat_matrices_have_finite_orthonormal_directions():
    for matrix, value in ((torch.zeros(2, D, D), 0.0), (torch.eye(D).expand(2, D, D), 1.0)):
        found = leading_spectrum(matrix, 5)
        torch.testing.assert_close(found.values, torch.full((2, 5), value, dtype=torch.float64))
        gram = found.directions.mT @ found.directions
        torch.testing.assert_close(gram, torch.eye(5, dtype=torch.float64).expand(2, -1, -1))


def test_a_matrix_that_does_not_converge_goes_to_the_full_svd_alone(monkeypatch):
    monkeypatch.setattr(leading, "_ROUNDS", 3)  # too few for the random one, enough for rank 3
    easy, hard = normal(D, 3) @ normal(3, D, seed=1), normal(D, D, seed=2)
    solved = []

    def watched(matrix):
        solved.append(len(matrix))
        return metrics.spectrum(matrix)

    monkeypatch.setattr(leading, "spectrum", watched)
    found = leading_spectrum(torch.stack([easy, hard]), 3)
    assert solved == [1]
    exact = metrics.spectrum(torch.stack([easy, hard]))
    assert (found.directions * exact.directions[..., :3]).sum(-2).abs().min() > 1 - 1e-9


def test_small_matrices_and_large_k_are_solved_outright():
    for n, k in ((12, 12), (D, 40)):
        matrix = normal(2, n, n)
        torch.testing.assert_close(leading_spectrum(matrix, k).values, metrics.spectrum(matrix).values[..., :k])


def test_half_precision_and_float32_score_as_their_float64_copies():
    for dtype in (torch.bfloat16, torch.float32):
        matrix = normal(D, D).to(dtype)
        assert torch.equal(leading_spectrum(matrix).directions, leading_spectrum(matrix.double()).directions)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="k = 97"):
        leading_spectrum(normal(D, D), D + 1)
    with pytest.raises(ValueError, match="NaN"):
        leading_spectrum(torch.full((D, D), torch.nan))
