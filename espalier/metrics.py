"""Retrieval and ranking metrics as the papers define them, one value per query.

Knows item rows, ground truth, scores and grades. Does not know where they came from. Every function returns a value per query; the papers'
figure is the mean over queries, so F@m is the mean of the queries' F, never the F of mean precision and mean recall.

By hand: scikit-learn's ndcg_score takes one rectangular array of queries, linear gains and averages over ties; it has no ERR, and no choice
of what a query without a relevant item counts as.

Legend: B queries, I items, M columns of recommendations; for rankings Q queries, R rows (an item of a query).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.search import NO_ITEM

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
WithoutRelevant = Literal["one", "zero", "drop"]
"""What a query without a relevant item counts as: LightGBM's NDCG takes 1, LETOR's scripts take 0, others leave it out."""


def precision_recall_f(
    item_rows_BM: Int64, relevant: Sequence[Int64], m: int, *, multiset: bool = False
) -> tuple[Float64, Float64, Float64]:
    """P@m, R@m and F@m of every query (OTM Eq. 5, 6, 7), each float64[B].

        P@m = Σ_{j ∈ Î} y_j / m      R@m = Σ_{j ∈ Î} y_j / |I_x|      F@m = 2·P·R / (P + R), 0 where P + R = 0

    item_rows_BM   int64[B, M], best first; the first m columns count, NO_ITEM marks a place without an item.
                   A row with fewer than m items is still divided by m.
    relevant       for each query the item rows of I_x. As a set (the default): y_j ∈ {0, 1} and repeats count once.
                   As a multiset (`multiset=True`, the published code of TDM and OTM): y_j is how often j occurs and |I_x| is
                   the length with repeats, so P may exceed 1.

    Raises InvalidData when a query has no relevant item (recall is undefined: skip it before the call), when a row recommends an item
    twice, or when shapes and dtypes do not fit.
    """
    hits_BM, size_B = _hits(_recommendations(item_rows_BM, m), relevant, multiset)
    hits_B = hits_BM.sum(axis=1)
    precision_B, recall_B = hits_B / m, hits_B / np.maximum(size_B, 1)
    total_B = precision_B + recall_B
    f_B = np.divide(2 * precision_B * recall_B, total_B, out=np.zeros(len(total_B)), where=total_B > 0)
    return precision_B, recall_B, f_B


def ndcg_at_m(item_rows_BM: Int64, relevant: Sequence[Int64], m: int) -> Float64:
    """float64[B]: nDCG@m of recommendations, relevance being yes or no (the Extreme Classification Repository's nDCG@k).

        nDCG@m = Σ_{i ≤ m, item i relevant} 1 / log2(1 + i), divided by its value if the first min(m, |I_x|) were

    Arguments and errors as `precision_recall_f`, repeats counting once. What was not retrieved counts in the divisor, so that this judges
    retrieval and order together; `ndcg` judges the order of a list.
    """
    hits_BM, size_B = _hits(_recommendations(item_rows_BM, m), relevant, multiset=False)
    discount_M = 1 / np.log2(np.arange(2, m + 2))
    best_B = np.cumsum(discount_M)[np.minimum(size_B, m).astype(np.int64) - 1]
    ndcg_B: Float64 = (hits_BM * discount_M[: hits_BM.shape[1]]).sum(axis=1) / best_B
    return ndcg_B


def _hits(rows_BM: Int64, relevant: Sequence[Int64], multiset: bool) -> tuple[Float64, Float64]:
    """float64[B, M]: how often each recommendation is relevant, at most once unless as a multiset; float64[B]: |I_x|."""
    if len(relevant) != len(rows_BM):
        raise InvalidData("relevant", f"{len(relevant)} queries", f"{len(rows_BM)}, one per row of item_rows_BM")
    relevant_size = np.array([len(rows) for rows in relevant], np.int64)
    if len(relevant) == 0:
        return np.zeros(rows_BM.shape), np.zeros(0)
    if relevant_size.min() == 0:
        raise InvalidData(f"relevant[{int(relevant_size.argmin())}]", [], "at least one relevant item")
    relevant_rows = np.concatenate(relevant)
    if not np.issubdtype(relevant_rows.dtype, np.integer) or relevant_rows.min() < 0:
        raise InvalidData("relevant", relevant_rows[:4].tolist(), "integer item rows of at least 0")

    # One sorted key per (query, item) turns the membership test of the whole batch into one binary search.
    stride = max(int(rows_BM.max(initial=0)), int(relevant_rows.max())) + 1
    query_B = np.arange(len(rows_BM))
    key, times = np.unique(np.repeat(query_B, relevant_size) * stride + relevant_rows, return_counts=True)
    y = times if multiset else np.ones_like(times)
    wanted_BM = query_B[:, None] * stride + rows_BM
    place_BM = np.minimum(np.searchsorted(key, wanted_BM), len(key) - 1)
    hits_BM = np.where((key[place_BM] == wanted_BM) & (rows_BM != NO_ITEM), y[place_BM], 0).astype(np.float64)
    return hits_BM, np.bincount(key // stride, weights=y, minlength=len(rows_BM)).astype(np.float64)


def regret_at_m(eta_BI: Float64, item_rows_BM: Int64, m: int) -> Float64:
    """float64[B]: what the recommendations miss of the best m items (OTM Eq. 10 is the mean over queries).

        reg@m(x) = ( Σ_{j ∈ Top-m η(x)} η_j(x) − Σ_{j ∈ Î} η_j(x) ) / m

    eta_BI         float64[B, I]: η_j(x) = p(y_j = 1 | x)
    item_rows_BM   as in `precision_recall_f`; a place without an item gives 0

    Never negative: a row recommends each item at most once. Raises InvalidData as `precision_recall_f` does.
    """
    rows_BM = _recommendations(item_rows_BM, m)
    if eta_BI.ndim != 2 or len(eta_BI) != len(rows_BM):
        raise InvalidData("eta_BI", f"shape {list(eta_BI.shape)}", f"[{len(rows_BM)}, I]")
    items = eta_BI.shape[1]
    if rows_BM.size and rows_BM.max() >= items:
        raise InvalidData("item_rows_BM", int(rows_BM.max()), f"item rows below {items}")
    best = min(m, items)
    best_B = np.partition(eta_BI, items - best, axis=1)[:, items - best :].sum(axis=1)
    got_BM = np.where(rows_BM == NO_ITEM, 0.0, np.take_along_axis(eta_BI, np.maximum(rows_BM, 0), axis=1))
    # The two sums add the same numbers in another order, so that a perfect answer could come out as −1e−17.
    regret_B: Float64 = np.maximum(best_B - got_BM.sum(axis=1), 0.0) / m
    return regret_B


def ndcg(
    scores_R: NDArray[np.floating],
    grades_R: NDArray[np.floating],
    query_offset: Int64,
    k: int | None = None,
    without_relevant: WithoutRelevant = "zero",
) -> Float64:
    """NDCG@k of every query (Järvelin and Kekäläinen 2002, with the gains of NCE §5.1); k = None takes all places.

        NDCG@k = Σ_{i ≤ k} (2^{r_i} − 1) / log2(1 + i), divided by its largest value over all orders

    scores_R      of each row; the order is by descending score, and by row where scores are equal
    grades_R      r ≥ 0 of each row; 0 is irrelevant
    query_offset  int64[Q + 1]: where the rows of each query begin, at least one each

    float64[Q], or fewer with `without_relevant = "drop"`. Raises InvalidData where arrays do not fit or a score is no number.
    """
    if k is not None and k < 1:
        raise InvalidData("k", k, "at least 1, or none for all places")
    place_R, query_R, sorted_R = _ranked(scores_R, grades_R, query_offset)
    _, _, ideal_R = _ranked(grades_R, grades_R, query_offset)
    discount_R = np.where(place_R <= (np.inf if k is None else k), 1 / np.log2(1 + place_R), 0)
    best_Q = np.bincount(query_R, weights=(np.exp2(ideal_R) - 1) * discount_R)
    got_Q = np.bincount(query_R, weights=(np.exp2(sorted_R) - 1) * discount_R)
    return _of_queries(got_Q / np.where(best_Q > 0, best_Q, 1), best_Q > 0, without_relevant)


def expected_reciprocal_rank(
    scores_R: NDArray[np.floating],
    grades_R: NDArray[np.floating],
    query_offset: Int64,
    max_grade: float,
    without_relevant: WithoutRelevant = "zero",
) -> Float64:
    """ERR of every query: the mean of 1 / the place at which a user who reads down is satisfied (Chapelle et al. 2009; NCE §5.1).

        ERR = Σ_i R_i / i · Π_{j < i} (1 − R_j),   R_i = (2^{r_i} − 1) / 2^{max_grade}

    max_grade  the highest grade that the set's judges could give, 4 in the paper, not the highest in this query

    Arguments, result and errors as `ndcg`. (The paper prints the product over j > i.)
    """
    place_R, query_R, sorted_R = _ranked(scores_R, grades_R, query_offset)
    if sorted_R.max(initial=0) > max_grade:
        raise InvalidData("grades_R", float(sorted_R.max()), f"at most max_grade, {max_grade}")
    satisfied_R = (np.exp2(sorted_R) - 1) / np.exp2(max_grade)
    left_R = np.log1p(-satisfied_R)
    before_R = np.cumsum(left_R) - left_R
    reading_R = np.exp(before_R - before_R[query_offset[:-1]][query_R])
    relevant_Q = np.maximum.reduceat(sorted_R, query_offset[:-1]) > 0
    err_Q: Float64 = np.add.reduceat(reading_R * satisfied_R / place_R, query_offset[:-1])
    return _of_queries(err_Q, relevant_Q, without_relevant)


def average_precision(
    scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64, without_relevant: WithoutRelevant = "zero"
) -> Float64:
    """AP of every query, whose mean is MAP: the mean over relevant items (grade above 0) of the precision at their place.

    Arguments, result and errors as `ndcg`.
    """
    place_R, query_R, sorted_R = _ranked(scores_R, grades_R, query_offset)
    hits_R = np.cumsum(sorted_R > 0)
    before_Q: Int64 = hits_R[query_offset[:-1]] - (sorted_R[query_offset[:-1]] > 0)
    precision_R = np.where(sorted_R > 0, (hits_R - before_Q[query_R]) / place_R, 0)
    relevant_Q = np.add.reduceat(sorted_R > 0, query_offset[:-1], dtype=np.int64)
    return _of_queries(np.bincount(query_R, weights=precision_R) / np.maximum(relevant_Q, 1), relevant_Q > 0, without_relevant)


def _ranked(
    scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64
) -> tuple[Int64, Int64, NDArray[np.floating]]:
    """The rows in the order of the ranking, as three arrays: place in their query, from 1; query; grade."""
    rows = len(grades_R)
    if scores_R.shape != (rows,) or grades_R.shape != (rows,):
        raise InvalidData("scores_R", f"shapes {list(scores_R.shape)}, {list(grades_R.shape)}", "as many scores as grades")
    starts = query_offset.ndim == 1 and len(query_offset) >= 2 and query_offset[0] == 0 and query_offset[-1] == rows
    if not starts or np.any(query_offset[1:] <= query_offset[:-1]):  # differences could wrap
        raise InvalidData("query_offset", query_offset[:8].tolist(), f"ascending from 0 to {rows}, at least one row a query")
    if np.isnan(scores_R).any() or not (grades_R >= 0).all():
        raise InvalidData("scores_R, grades_R", "NaN, or a grade below 0", "scores that are numbers, and grades of at least 0")
    size_Q = np.diff(query_offset)
    query_R = np.repeat(np.arange(len(size_Q)), size_Q)
    order_R = np.lexsort((-scores_R, query_R))
    return np.arange(rows) - query_offset[:-1][query_R] + 1, query_R, grades_R[order_R].astype(np.float64)


def _of_queries(value_Q: Float64, relevant_Q: NDArray[np.bool_], without_relevant: WithoutRelevant) -> Float64:
    if without_relevant == "drop":
        return value_Q[relevant_Q]
    return np.where(relevant_Q, value_Q, 1.0 if without_relevant == "one" else 0.0)


def _recommendations(item_rows_BM: Int64, m: int) -> Int64:
    """The first m columns, after checking that they are item rows, each at most once in a row."""
    if m < 1:
        raise InvalidData("m", m, "at least 1")
    if item_rows_BM.ndim != 2 or not np.issubdtype(item_rows_BM.dtype, np.integer):
        raise InvalidData("item_rows_BM", f"{item_rows_BM.dtype}{list(item_rows_BM.shape)}", "int64[B, M]")
    rows_BM = item_rows_BM[:, :m].astype(np.int64, copy=False)
    if rows_BM.size and rows_BM.min() < NO_ITEM:
        raise InvalidData("item_rows_BM", int(rows_BM.min()), f"item rows, or {NO_ITEM} for no item")
    ascending_BM = np.sort(rows_BM, axis=1)
    repeated = (ascending_BM[:, 1:] == ascending_BM[:, :-1]) & (ascending_BM[:, 1:] != NO_ITEM)
    if repeated.any():
        row, column = np.argwhere(repeated)[0]
        raise InvalidData(f"item_rows_BM[{row}]", int(ascending_BM[row, column]), "each item at most once")
    return rows_BM
