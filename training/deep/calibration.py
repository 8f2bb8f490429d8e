"""The probability that an item with a given key is relevant, which scores state; fitted to the answers to validation queries.

Ranks are close to log-odds, and Platt's logistic function fits them. Keys with a memory are not: a few are far larger than the others, and
a straight line fitted to the others predicts that nearly all of these few are relevant. Their log-odds are a piecewise linear function, by
isotonic regression over bins with equal numbers of hits.

Legend: B queries, M results, R returned items, N bins, K knots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.manifest import MAX_KNOTS, Calibration

MIN_HITS = 20
"""Least hits of a bin: the standard error of its log-odds is then 0.2."""
TAIL = 0.2
"""The most that log-odds rise from the last bin to the largest key: the data say little about the largest keys."""
LEAST_SLOPE = 1e-6
"""Least rise of log-odds for a key one standard deviation larger: scores must rise with keys, even if hits do not."""


def calibrate(rows_BM: Int64, keys_BM: Float32, relevant: Sequence[Int64], heavy_tailed: bool = False) -> Calibration:
    """A fit of "the item is relevant" on the key, over all returned items.

    heavy_tailed  fit a piecewise linear function if there are hits for two bins; otherwise Platt's logistic function
    """
    is_item_BM = rows_BM >= 0
    is_hit_BM = np.stack([np.isin(rows, relevant_rows) for rows, relevant_rows in zip(rows_BM, relevant, strict=True)])
    keys_R, hits_R = keys_BM[is_item_BM].astype(np.float64), is_hit_BM[is_item_BM]
    if hits_R.all() or not hits_R.any():
        return Calibration(slope=1, intercept=0)
    knots = piecewise(keys_R, hits_R) if heavy_tailed else ()
    if knots:
        return Calibration(slope=1, intercept=0, knots=knots)
    scale = float(keys_R.std()) or 1.0
    fit = LogisticRegression(C=np.inf).fit(keys_R[:, None] / scale, hits_R)
    return Calibration(slope=max(float(fit.coef_[0, 0]), LEAST_SLOPE) / scale, intercept=float(fit.intercept_[0]))


def piecewise(keys_R: Float64, hits_R: Bool) -> tuple[tuple[float, float], ...]:
    """(key, log-odds) of at most MAX_KNOTS knots, both ascending; none if isotonic regression leaves fewer than two bins.

    A bin's knot is at its median key, which its largest keys do not move. Isotonic regression merges neighbouring bins whose rate falls.
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
