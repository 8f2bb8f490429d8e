"""Query vectors far from all others, such as a failed encoder's. One could set the mean and the scale of all, so none is learned from.

Knows vectors. Does not know what is learned.

Legend: U queries, F numbers of a vector, B queries of a block, S queries of a sample.
"""

from __future__ import annotations

import logging

import numpy as np

from espalier.arrays import Float32, Int64

log = logging.getLogger(__name__)

NUMBERS = 1 << 24
"""Numbers of vectors that are held at a time."""
SAMPLE = 1 << 26
"""Most numbers in the sample of vectors that the median is computed from."""
LEAST = 40
"""Fewer vectors do not say what is far."""
QUANTILE, TIMES = 0.95, 100.0
"""A vector is outlying if its distance from the median of each number is more than so many times this quantile of all distances."""


def without_outliers(vectors_UF: Float32, queries: Int64) -> Int64:
    """The `queries` whose vectors are not outlying, by QUANTILE and TIMES; all of fewer than LEAST. Logs a WARNING with the number of the
    others.
    """
    if len(queries) < LEAST:
        return queries
    width = vectors_UF.shape[1]
    sample_SF = vectors_UF[queries[:: max(1, -(-len(queries) * width // SAMPLE))]]
    median_F = np.quantile(sample_SF, 0.5, axis=0, method="lower").astype(np.float64)
    size = max(1, NUMBERS // width)
    blocks = (queries[start : start + size] for start in range(0, len(queries), size))
    distance_U = np.concatenate([np.linalg.norm(vectors_UF[block] - median_F, axis=1) for block in blocks])
    usual = float(np.quantile(distance_U, QUANTILE, method="lower"))
    kept = queries[distance_U <= TIMES * usual] if usual else queries
    if len(kept) < len(queries):
        log.warning(
            "%d of %d training vectors are not learned from: they are more than %d times as far from the median as %d %% of all, the "
            "farthest %.3g instead of %.3g. Did their encoder fail?",
            *(len(queries) - len(kept), len(queries), TIMES, 100 * QUANTILE, distance_U.max(), usual),
        )
    return kept
