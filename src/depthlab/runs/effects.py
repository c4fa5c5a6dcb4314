"""How large a difference between two variants is, and how sure: for the few seeds of a record, paired by seed.

The unit is that of the metric itself. A difference divided by the spread over seeds (Cohen's d) is left out on purpose:
seeds of one setting can agree to three digits, and the ratio then says how alike they are, not how large the effect is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_LARGEST = 16  # 2^n patterns of signs are enumerated


@dataclass(frozen=True)
class Effect:
    """A mean difference with its 95 % interval.

    `p`: the share of all patterns of signs that give a mean at least as far from 0, two-sided (exact sign-flip test).
    With n seeds it is at least 2 / 2^n: ten seeds can establish 25 comparisons at once at 5 % (Bonferroni), not more.
    """

    mean: float
    low: float
    high: float
    p: float
    positive: int  # in how many seeds the difference is above 0
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], above 0 in {self.positive} of {self.n} seeds"


def paired(values: Sequence[float], others: Sequence[float] | float = 0.0) -> Effect:
    """The mean of `values` less `others` of the same seeds (or less one number).

    The interval is the studentised bootstrap's (bootstrap-t), whose coverage holds for ten values, where that of plain
    percentiles does not; resampling is seeded, so that equal input gives an equal interval.

    Source: Efron, Tibshirani, An Introduction to the Bootstrap (1993), sections 12.5 and 15.2.

    Raises:
        ValueError: unlike lengths, fewer than 3 or more than 16 values, NaN or infinite values.
    """
    a = np.asarray(values, dtype=float)
    b = np.asarray(others, dtype=float)
    if a.ndim != 1 or b.shape not in ((), a.shape):
        raise ValueError(f"paired got shapes {a.shape} and {b.shape}; give one value a seed for both.")
    if not 3 <= len(a) <= _LARGEST:
        raise ValueError(f"paired got {len(a)} values; give 3 to {_LARGEST}, one a seed.")
    x = a - b
    if not np.isfinite(x).all():
        raise ValueError("paired got NaN or infinite values; leave diverged runs out and say so.")
    n, mean = len(x), x.mean()
    error = x.std(ddof=1) / n**0.5
    draws = x[np.random.default_rng(0).integers(0, n, (_RESAMPLES, n))]
    errors = draws.std(axis=1, ddof=1) / n**0.5
    usable = errors > 1e-12 * max(abs(x).max(), 1e-300)  # a resample of one value alone has no spread
    t = (draws.mean(axis=1)[usable] - mean) / errors[usable]
    below, above = np.quantile(t, [0.025, 0.975]) if usable.any() else (0.0, 0.0)
    signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    p = float((abs(signs @ x) >= abs(x.sum()) * (1 - 1e-12)).mean())
    return Effect(float(mean), float(mean - above * error), float(mean - below * error), p, int((x > 0).sum()), n)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank.

    Raises ValueError for unlike lengths, fewer than 3 values, a constant, NaN or infinite values.
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 3:
        raise ValueError(f"rank_correlation got shapes {a.shape} and {b.shape}; give 3 or more values for both.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("rank_correlation got NaN or infinite values; leave diverged runs out and say so.")
    if len(set(a)) < 2 or len(set(b)) < 2:
        raise ValueError("rank_correlation got a constant, which has no order; give values that differ.")
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]
