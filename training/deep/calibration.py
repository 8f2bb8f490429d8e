"""How likely an item of a key is relevant: what scores are made of, fitted on the answers to validation queries.

Ranks are close to log-odds, and Platt's logistic function fits them. Keys with a memory are not: few are far larger than the rest, and a
straight line that fits the many says of the few that nearly all are relevant. Their log-odds are a piecewise linear function, by isotonic
regression over bins with as many hits each.

Legend: B queries, M results, R items that came back, N bins, K knots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from espalier.manifest import MAX_KNOTS, Calibration

MIN_HITS = 20
"""Hits of a bin: the standard error of its log-odds is then 0.2."""
TAIL = 0.2
"""Most that log-odds rise from the last bin to the largest key: so much more may be true of its largest keys, and no more is known."""
LEAST_SLOPE = 1e-6
"""For a key that is a standard deviation larger: scores are to rise with keys, even where hits do not."""


def calibrate(
    rows_BM: NDArray[np.int64], keys_BM: NDArray[np.float32], relevant: Sequence[NDArray[np.int64]], heavy_tailed: bool = False
) -> Calibration:
    """A fit of "the item is relevant" on the key, over all returned items.

    heavy_tailed  piecewise, where there are hits for two bins; else Platt's logistic function of the key
    """
    found_BM = rows_BM >= 0
    hit_BM = np.stack([np.isin(rows, wanted) for rows, wanted in zip(rows_BM, relevant, strict=True)])
    keys_R, hits_R = keys_BM[found_BM].astype(np.float64), hit_BM[found_BM]
    if hits_R.all() or not hits_R.any():
        return Calibration(slope=1, intercept=0)
    knots = piecewise(keys_R, hits_R) if heavy_tailed else ()
    if knots:
        return Calibration(slope=1, intercept=0, knots=knots)
    scale = float(keys_R.std()) or 1.0
    fit = LogisticRegression(C=np.inf).fit(keys_R[:, None] / scale, hits_R)
    return Calibration(slope=max(float(fit.coef_[0, 0]), LEAST_SLOPE) / scale, intercept=float(fit.intercept_[0]))


def piecewise(keys_R: NDArray[np.float64], hits_R: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    """(key, log-odds) of at most MAX_KNOTS knots, both ascending; none where fewer than two bins rise one over the other.

    A bin's knot is at its median key, which its largest keys do not move. Neighbouring bins that would fall are one (isotonic regression).
    The last knot is at the largest key.
    """
    bins = min(MAX_KNOTS - 1, int(hits_R.sum()) // MIN_HITS)
    if bins < 2:
        return ()
    edges = np.unique(np.quantile(keys_R[hits_R], np.arange(1, bins) / bins, method="lower"))
    edges = edges[edges > keys_R.min()]
    bin_R = np.searchsorted(edges, keys_R, side="right")
    count_N, hits_N = np.bincount(bin_R), np.bincount(bin_R, hits_R)
    median_N = np.array([np.median(keys_R[bin_R == n]) for n in range(len(count_N))])
    rate_N = (hits_N + 0.5) / (count_N + 1)  # neither 0 nor 1
    rising_N = IsotonicRegression().fit_transform(np.arange(len(rate_N)), rate_N, sample_weight=count_N + 1)
    rate_K, block_N = np.unique(rising_N, return_inverse=True)
    if len(rate_K) < 2:
        return ()
    key_K = np.bincount(block_N, count_N * median_N) / np.bincount(block_N, count_N)
    value_K = np.log(rate_K) - np.log1p(-rate_K)
    largest = keys_R.max()
    if largest > key_K[-1]:
        slope = (value_K[-1] - value_K[-2]) / (key_K[-1] - key_K[-2])
        rise = min(TAIL, slope * (largest - key_K[-1]))
        key_K, value_K = np.append(key_K, largest), np.append(value_K, value_K[-1] + rise)
    return tuple(zip(key_K.tolist(), value_K.tolist(), strict=True))
