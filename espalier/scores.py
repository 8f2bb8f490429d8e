"""From the ranks of the best leaves to a search's result and its scores.

A score is in [0, 1] and never falls as its key rises. It is the sigmoid of the rank for `node` rankings, the exponential for `path`, and
calibrated on validation users for `discounted` rankings and for bundles with a memory. A forest's score is the mean over its trees; a tree
that did not score the item counts 0. Its rank is the log of this mean, and ties go to the lower item row. The search itself never ranks by
scores. A node whose logit, rank or key is not finite is no candidate, so nothing below it comes back.

Legend: B queries, M results, K knots, P pieces between two knots.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.manifest import LARGEST, Calibration, Ranking
from espalier.search import NO_ITEM, LevelTrace, SearchResult


def finish(
    ranking: Ranking,
    m_B: Int64,
    eligible_B: Int64,
    item_rows_BM: Int64,
    ranks_BM: Float32,
    traces: tuple[tuple[LevelTrace, ...], ...] = (),
    finite_B: Bool | None = None,
    keys_BM: Float32 | None = None,
) -> SearchResult:
    """The result of a search from its best leaves. Columns past a query's m, or with rank −inf, have no item.

    eligible_B  int64[B]: number of eligible items of each query
    keys_BM     the keys, which order the leaves and give their scores; None: the ranks
    """
    if len(m_B) == 1 and ranks_BM.shape[1] == m_B[0] and ranks_BM[0, -1] > -np.inf:  # the usual case: one query that gets m items
        count_B = m_B.copy()
    else:
        has_item_BM = ranks_BM > -np.inf
        if len(m_B) > 1:  # otherwise its m is the width
            has_item_BM &= np.arange(ranks_BM.shape[1]) < m_B[:, None]
            ranks_BM = np.where(has_item_BM, ranks_BM, np.float32(-np.inf))
            keys_BM = None if keys_BM is None else np.where(has_item_BM, keys_BM, np.float32(-np.inf))
        count_B, item_rows_BM = has_item_BM.sum(1), np.where(has_item_BM, item_rows_BM, NO_ITEM)
    keys_BM = ranks_BM if keys_BM is None else keys_BM
    return SearchResult(
        item_rows_BM=item_rows_BM,
        scores_BM=scores_of_ranks(ranking, keys_BM),
        ranks_BM=ranks_BM,
        keys_BM=keys_BM,
        count_B=count_B,
        complete_B=count_B >= np.minimum(m_B, eligible_B),
        traces=traces,
        finite_B=finite_B,
    )


def scores_of_ranks(ranking: Ranking, ranks: Float32) -> Float32:
    """float32, same shape, in [0, 1]: the scores of ranks, or of keys if there is a memory; 0 for −inf.

    By the calibration if there is one, else by the exponential (`path`) or the sigmoid. Scores never fall as keys rise. Different keys may
    have the same score in float32.
    """
    wide = ranks.astype(np.float64)
    if ranking.calibration is not None:
        wide = ranking.calibration.slope * bent(ranking.calibration, wide) + ranking.calibration.intercept
    elif ranking.own == "log_activation":
        return np.exp(np.minimum(wide, 0)).astype(np.float32)
    return (1 / (1 + np.exp(np.minimum(np.maximum(-wide, -700), 700)))).astype(np.float32)  # 1 / (1 + e^700) is 0 in float32


def log_scores(ranking: Ranking, ranks: Float32) -> Float64:
    """float64, same shape: the logs of `scores_of_ranks`, finite even where float32 rounds a score to 0; −inf for −inf."""
    wide = ranks.astype(np.float64)
    if ranking.calibration is None and ranking.own == "log_activation":
        return np.minimum(wide, 0)
    if ranking.calibration is not None:
        with np.errstate(over="ignore"):
            wide = ranking.calibration.slope * bent(ranking.calibration, wide) + ranking.calibration.intercept
    logs = np.maximum(np.minimum(wide, 0) - np.log1p(np.exp(-np.abs(wide))), -LARGEST)
    return np.where(ranks > -np.inf, logs, -np.inf)


def bent(calibration: Calibration, keys: Float64) -> Float64:
    """float64, same shape: the piecewise linear function through a calibration's knots; the keys unchanged without knots."""
    if not calibration.knots:
        return keys
    knot_K, width_P, value_P, rise_P, end_P = _pieces(calibration.knots)
    piece = knot_K[1:-1].searchsorted(keys, side="right")
    with np.errstate(over="ignore"):  # far beyond steep ends the value is infinite, and its sigmoid 0 or 1
        values = value_P[piece] + (keys - knot_K[piece]) / width_P[piece] * rise_P[piece]
    return np.asarray(np.minimum(values, end_P[piece]), np.float64)  # rounding must not lift the end of a piece over the next one


@lru_cache(maxsize=64)
def _pieces(knots: tuple[tuple[float, float], ...]) -> tuple[Float64, ...]:
    """The keys of the knots; of each piece between two: its width, its first value, its rise, and the value that it must not exceed."""
    knot_K, value_K = np.array(knots).T
    return knot_K, np.diff(knot_K), value_K[:-1], np.diff(value_K), np.append(value_K[1:-1], np.inf)
