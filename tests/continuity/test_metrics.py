"""The continuity scores: invariances, planted directions, chance, edge cases, and wrong variants that must differ."""

import math

import numpy as np
import pytest
import torch

from depthlab import continuity
from depthlab.continuity import metrics

SCORES = {
    "alignment": continuity.alignment,
    "overlap": lambda w, **kw: continuity.subspace_overlap(w, k=2, **kw),
    "index-matched": continuity.index_matched_alignment,
    "gram": continuity.spectral_alignment,
}
every_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64).to(dtype)


def rotation(d: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed))[0]


def with_spectrum(values: list[float], left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T


def planted(d: int = 32, count: int = 4, strength: float = 40.0, seed: int = 1) -> torch.Tensor:
    """Noise of its own in each matrix, and one input direction that all share (outputs differ)."""
    shared = normal(d, seed=100 + seed)
    return torch.stack(
        [normal(d, d, seed=seed + i) + strength * torch.outer(normal(d, seed=50 + i), shared) for i in range(count)]
    )


def numpy_scores(a: np.ndarray, b: np.ndarray, k: int) -> dict[str, float]:
    """Independent truth from NumPy: eigenvectors of explicit Gram matrices."""
    frames, shares, grams = [], [], []
    for w in (a, b):
        gram = w.T @ w
        values, vectors = np.linalg.eigh(gram)
        frames.append(vectors[:, ::-1])
        shares.append(values[::-1] / values.sum())
        grams.append(gram - np.trace(gram) / len(gram) * np.eye(len(gram)))
    cosines = np.abs((frames[0] * frames[1]).sum(0))
    return {
        "alignment": cosines[0],
        "overlap": np.linalg.svd(frames[0][:, :k].T @ frames[1][:, :k], compute_uv=False).__pow__(2).mean(),
        "index-matched": (cosines * (shares[0] + shares[1]) / 2).sum(),
        "gram": (grams[0] * grams[1]).sum() / np.linalg.norm(grams[0]) / np.linalg.norm(grams[1]),
    }


@pytest.mark.parametrize("space", ["input", "output"])
def test_scores_agree_with_numpy(space):
    a, b = normal(12, 12, seed=1), normal(12, 12, seed=1) + 0.8 * normal(12, 12, seed=2)
    pair = (a.numpy(), b.numpy()) if space == "input" else (a.numpy().T, b.numpy().T)
    for name, expected in numpy_scores(*pair, k=2).items():
        got = SCORES[name]([a, b], space=space)
        assert got.shape == (1,)
        assert float(got) == pytest.approx(expected, abs=1e-10), name


@every_score
def test_signs_and_scale_of_a_matrix_do_not_matter(score):
    w = normal(3, 16, 16)
    flipped = [w[0], -w[1], 1e-18 * w[2]]
    torch.testing.assert_close(score(flipped), score(w), rtol=1e-9, atol=1e-9)
    tiny, huge = (score((w * s).float()) for s in (1e-25, 1e25))
    torch.testing.assert_close(tiny, huge, rtol=1e-3, atol=1e-3)


@every_score
def test_one_rotation_of_all_inputs_leaves_scores_alone_and_outputs_never_count(score):
    w, turn = planted(), rotation(32, seed=5)
    torch.testing.assert_close(score(w @ turn), score(w))
    turned = torch.stack([rotation(32, seed=20 + i) @ m for i, m in enumerate(w)])
    torch.testing.assert_close(score(turned), score(w))


def test_a_planted_input_direction_is_found_in_input_space_only():
    w = planted()
    assert continuity.alignment(w).min() > 0.98 and continuity.alignment(w, space="output").max() < 0.6
    assert continuity.spectral_alignment(w).min() > 0.9 and continuity.spectral_alignment(w, space="output").max() < 0.3
    assert continuity.alignment(w.mT, space="output").min() > 0.98
    shared = normal(32, seed=101)
    found = continuity.leading_directions(w) @ (shared / shared.norm())
    assert found.abs().min() > 0.98


def test_rotation_in_a_degenerate_block_moves_the_single_vector_but_not_the_subspace_scores():
    # Field case: 8 x 8, values (3, 3, 1, ..), equal up to noise of 1e-6.
    values, left, right = [3.0, 3.0] + [1.0] * 6, rotation(8, 1), rotation(8, 2)
    turned = right.clone()
    turned[:, 0], turned[:, 1] = right[:, 1], -right[:, 0]
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-5)):
        a = (with_spectrum(values, left, right) + 1e-6 * with_spectrum([1.0, 0] + [0.0] * 6, left, right)).to(dtype)
        b = (with_spectrum(values, left, turned) + 1e-6 * with_spectrum([1.0, 0] + [0.0] * 6, left, turned)).to(dtype)
        if dtype == torch.float64:  # in float32 1e-6 is within rounding, and any angle may come out
            assert continuity.alignment([a, b]).item() < 1e-3
        assert continuity.subspace_overlap([a, b], k=2).item() == pytest.approx(1.0, abs=tolerance)
        assert continuity.spectral_alignment([a, b]).item() == pytest.approx(1.0, abs=tolerance)
        assert continuity.spectral_gap([a, b]).max() < 1.001


def test_gap_is_the_ratio_of_the_first_two_singular_values():
    w = with_spectrum([6.0, 4.0, 1.0], rotation(3, 1), rotation(3, 2))
    assert continuity.spectral_gap([w]).item() == pytest.approx(1.5)
    assert continuity.spectral_gap([torch.ones(4, 1)]).item() == math.inf
    assert continuity.spectral_gap([torch.zeros(4, 4)]).item() == 1.0


@pytest.mark.parametrize("d", [1, 2, 3, 16, 256])
def test_chance_level_is_the_simulated_mean_cosine(d):
    a, b = (torch.nn.functional.normalize(normal(40_000, d, seed=s), dim=-1) for s in (1, 2))
    cosines = (a * b).sum(-1).abs()
    assert continuity.chance_level(d) == pytest.approx(
        cosines.mean().item(), abs=4 * cosines.std().item() / 200 + 1e-12
    )


def test_chance_level_tends_to_the_large_d_formula():
    for d in (64, 256, 4096, 10**6):
        limit = math.sqrt(2 / (math.pi * d))
        assert continuity.chance_level(d) / limit - 1 == pytest.approx(1 / (4 * d), rel=0.02, abs=1e-9)
    with pytest.raises(ValueError, match="at least 1"):
        continuity.chance_level(0)


def test_random_matrices_score_chance():
    d, k = 24, 3
    w = normal(40, 30, d, d, dtype=torch.float32)  # 40 networks, 29 pairs each
    per_network = {
        continuity.chance_level(d): (continuity.alignment(w), continuity.index_matched_alignment(w)),
        k / d: (continuity.subspace_overlap(w, k=k),),
        0.0: (continuity.spectral_alignment(w),),
    }
    for expected, results in per_network.items():
        for score in results:
            means = score.mean(-1)
            error = means.std().item() / math.sqrt(len(means))
            assert means.mean().item() == pytest.approx(expected, abs=4 * error)
            assert error < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda a, b: float(torch.linalg.svd(a)[2][0] @ torch.linalg.svd(b)[2][0]), id="signed cosine"),
        pytest.param(lambda a, b: float(torch.linalg.svd(a)[0][:, 0] @ torch.linalg.svd(b)[0][:, 0]), id="wrong side"),
        pytest.param(lambda a, b: float((a * b).sum().abs() / a.norm() / b.norm()), id="plain matrix cosine"),
    ],
)
def test_wrong_alignments_differ_from_ours_on_a_planted_pair_with_flipped_sign(wrong):
    a, b = planted(count=2)
    right = continuity.alignment([a, b]).item()
    answers = [wrong(a, b), wrong(a, -b)]
    assert right > 0.98 and continuity.alignment([a, -b]).item() == pytest.approx(right)
    assert min(answers) < 0.6


def test_an_uncentred_gram_cosine_calls_random_matrices_alike_and_ours_does_not():
    a, b = normal(64, 64, seed=1), normal(64, 64, seed=2)
    uncentred = ((a.T @ a) * (b.T @ b)).sum() / (a.T @ a).norm() / (b.T @ b).norm()
    assert uncentred > 0.4
    assert continuity.spectral_alignment([a, b]).abs().item() < 0.05


@every_score
def test_identity_orthogonal_and_zero_matrices_give_finite_scores(score):
    eye, turn, zero = torch.eye(16), rotation(16, 3).float(), torch.zeros(16, 16)
    result = score([eye, turn, zero, zero, eye, normal(16, 16, dtype=torch.float32)])
    assert result.isfinite().all() and result.min() >= -1 and result.max() <= 1
    assert result[1:4].tolist() == [0, 0, 0]  # no score with a matrix that has no direction


def test_a_flat_spectrum_has_no_gram_alignment_even_with_itself():
    turn = rotation(256, 3).float()
    assert continuity.spectral_alignment([turn, turn, torch.eye(256)]).tolist() == [0, 0]
    w = normal(64, 64, dtype=torch.float32)
    assert continuity.spectral_alignment([w, w]).item() == pytest.approx(1.0, abs=1e-6)


@every_score
def test_identical_matrices_score_one(score):
    w = planted(count=1)[0]
    assert score([w, w, 3 * w]).tolist() == pytest.approx([1, 1], abs=1e-9)


@every_score
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_values_are_refused_and_located(score, bad):
    w = normal(4, 6, 6)
    w[2, 1, 1] = bad
    with pytest.raises(ValueError, match="matrix 2 of 4.*NaN or infinite"):
        score(w)
    with pytest.raises(ValueError, match="matrix 2 of 4"):
        continuity.summary(w, k=2)


@every_score
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_scores_exactly_as_its_float32_copy(score, half):
    w = planted().to(half)
    assert torch.equal(score(w), score(w.float()))
    assert torch.equal(score(list(w)), score(w))


@every_score
def test_rectangular_matrices_compare_in_the_space_they_share(score):
    read_same = [normal(5, 9, seed=1), normal(7, 9, seed=2)]
    assert score(read_same).shape == (1,)
    with pytest.raises(ValueError, match="output sizes 5, 7.*equal size"):
        score(read_same, space="output")
    write_same = [m.mT for m in read_same]
    torch.testing.assert_close(score(write_same, space="output"), score(read_same))


@every_score
def test_leading_dimensions_are_networks_of_their_own(score):
    w = normal(2, 3, 4, 8, 8)
    assert score(w).shape == (2, 3, 3)
    torch.testing.assert_close(score(w)[1, 2], score(w[1, 2]), rtol=1e-9, atol=1e-9)


@every_score
def test_removing_the_ones_direction_equals_projecting_it_out_by_hand(score):
    ones = torch.ones(32, dtype=torch.float64)
    projector = torch.eye(32, dtype=torch.float64) - torch.outer(ones, ones) / 32
    w = planted()
    torch.testing.assert_close(score(w, remove_ones=True), score(w @ projector), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        score(w, space="output", remove_ones=True), score(projector @ w, space="output"), rtol=1e-8, atol=1e-8
    )


def test_a_shared_ones_direction_is_seen_and_its_removal_leaves_chance():
    w = normal(4, 64, 64, dtype=torch.float32) + 5 * normal(4, 64, 1, seed=7, dtype=torch.float32)
    assert continuity.alignment(w).min() > 0.95
    assert continuity.alignment(w, remove_ones=True).mean() < 4 * continuity.chance_level(64)


@every_score
def test_nothing_but_the_ones_direction_leaves_nothing(score):
    w = 0.1 * normal(3, 16, 1, dtype=torch.float32).expand(3, 16, 16)
    assert score(w, remove_ones=True).tolist() == [0, 0]


def test_summary_is_the_mean_of_the_single_scores():
    w = planted(count=5)
    got = continuity.summary(w, k=3)
    assert got["v1"] == continuity.alignment(w).mean() and got["gram"] == continuity.spectral_alignment(w).mean()
    assert got["overlap"] == continuity.subspace_overlap(w, k=3).mean()
    assert got["index_matched"] == continuity.index_matched_alignment(w).mean()
    assert got["gap"] == continuity.spectral_gap(w).mean()
    assert continuity.summary(torch.stack([w, 2 * w]), k=3)["v1"].shape == (2,)


@pytest.mark.parametrize("norm, order", [("spectral", 2), ("frobenius", "fro")])
def test_update_ratio_is_the_relative_size_of_the_change(norm, order):
    start, step = normal(3, 8, 8), normal(3, 8, 8, seed=1)
    expected = [np.linalg.norm(s.numpy(), order) / np.linalg.norm(w.numpy(), order) for s, w in zip(step, start)]  # noqa: B905
    assert continuity.update_ratio(start + step, start, norm).tolist() == pytest.approx(expected)
    assert continuity.update_ratio(start, start, norm).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="zero initial"):
        continuity.update_ratio(start, torch.zeros(3, 8, 8), norm)
    with pytest.raises(ValueError, match="unlike shapes"):
        continuity.update_ratio(start, start[:2], norm)
    with pytest.raises(ValueError, match="'spectral' or 'frobenius'"):
        continuity.update_ratio(start, start, "nuclear")


def test_svd_failure_is_retried_in_double_precision(monkeypatch):
    w, solver = normal(3, 8, 8, dtype=torch.float32), torch.linalg.svd
    expected = continuity.alignment(w)

    def failing(matrix, **kwargs):
        if matrix.dtype != torch.float64:
            raise torch.linalg.LinAlgError("did not converge")
        return solver(matrix, **kwargs)

    monkeypatch.setattr(torch.linalg, "svd", failing)
    got = continuity.alignment(w)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_no_gradient_flows_and_inputs_stay_as_they_are():
    w = normal(3, 8, 8).requires_grad_()
    before = w.detach().clone()
    assert not continuity.summary(w, k=2, remove_ones=True)["v1"].requires_grad
    assert torch.equal(w.detach(), before)


@pytest.mark.parametrize(
    "weights, error, says",
    [
        (torch.zeros(4, 4), ValueError, "list of them"),
        ([torch.zeros(4, 4)], ValueError, "at least 2"),
        ([torch.zeros(4), torch.zeros(4)], ValueError, "shape"),
        (torch.zeros(2, 0, 4), ValueError, "non-empty"),
        (torch.zeros(2, 4, 4, dtype=torch.long), TypeError, "floating-point"),
        ([np.zeros((4, 4)), np.zeros((4, 4))], TypeError, "floating-point"),
    ],
)
@every_score
def test_wrong_input_is_named_with_what_is_allowed(score, weights, error, says):
    with pytest.raises(error, match=says):
        score(weights)


def test_unknown_space_and_impossible_k_are_refused():
    w = normal(2, 4, 6)
    with pytest.raises(ValueError, match="'input'.*'output'"):
        continuity.alignment(w, space="left")
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k = {k}.*4 directions"):
            continuity.subspace_overlap(w, k=k)


def test_float32_and_float64_matrices_may_be_mixed():
    w = normal(2, 8, 8)
    mixed = [w[0], w[1].float()]
    for score in SCORES.values():
        torch.testing.assert_close(score(mixed), score(w), rtol=1e-4, atol=1e-5)
    assert metrics.pair_gram(*(metrics.centred_gram(m) for m in w)) == continuity.spectral_alignment(w)[0]
