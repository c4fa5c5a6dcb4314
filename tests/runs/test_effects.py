"""Effect sizes: the interval covers the truth, the test is exact, the pairing counts."""

import itertools

import numpy as np
import pytest

from depthlab.runs import paired, rank_correlation


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
def test_the_interval_covers_the_true_mean_of_ten_values_as_often_as_it_says(draw):
    rng = np.random.default_rng(1)
    truth = 0.0 if draw == "standard_normal" else 1.0
    samples = getattr(rng, draw)((300, 10))
    covered = np.mean([e.low <= truth <= e.high for e in map(paired, samples)])
    assert 0.91 <= covered <= 0.985
    percentiles = np.quantile(samples[:, rng.integers(0, 10, (1000, 10))].mean(-1), [0.025, 0.975], axis=1)
    assert ((percentiles[0] <= truth) & (truth <= percentiles[1])).mean() < 0.91  # why the plain bootstrap is not used


def test_p_is_the_share_of_sign_patterns_at_least_as_extreme():
    x = [0.3, -0.1, 0.5, 0.2, 0.05]
    sums = [abs(sum(s * v for s, v in zip(signs, x, strict=True))) for signs in itertools.product((1, -1), repeat=5)]
    assert paired(x).p == pytest.approx(np.mean([s >= sum(x) - 1e-9 for s in sums]))
    assert paired(np.linspace(1, 2, 10)).p == 2 / 2**10


def test_pairing_removes_what_seeds_share():
    common = np.linspace(0, 100, 10)
    own = np.array([0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2])
    effect = paired(common + own, common)
    assert effect.mean == pytest.approx(0.15) and effect.high - effect.low < 0.1 and effect.positive == effect.n == 10
    assert str(effect).startswith("+0.15 [+0.")


def test_equal_input_gives_an_equal_interval_and_no_spread_gives_a_point():
    x = np.random.default_rng(2).standard_normal(10)
    assert paired(x) == paired(list(x))
    same = paired([0.5] * 10, 0.25)
    assert (same.low, same.mean, same.high) == (0.25, 0.25, 0.25)


def test_the_sign_of_the_interval_follows_the_sign_of_the_difference():
    x = np.random.default_rng(3).standard_exponential(10)
    up, down = paired(x), paired(-x)
    assert (up.low, up.high) == pytest.approx((-down.high, -down.low))


def test_rank_correlation_sees_order_only_and_shares_ranks_of_equal_values():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(x, np.exp(3 * x)) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], x)[0, 1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paired([1, 2, 3], [1, 2]), "one value a seed"),
        (lambda: paired([1, 2]), "3 to 16"),
        (lambda: paired(np.arange(17)), "3 to 16"),
        (lambda: paired([1, 2, float("nan")]), "diverged"),
        (lambda: rank_correlation([1, 2, 3], [1, 2]), "3 or more"),
        (lambda: rank_correlation([1, 2, 3], [1, 1, 1]), "constant"),
        (lambda: rank_correlation([1, 2, float("inf")], [1, 2, 3]), "diverged"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
