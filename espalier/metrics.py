"""Retrieval and ranking metrics as the papers define them, one value per query.

Knows item rows, ground truth, scores and grades. Does not know where they came from. The papers' figures are means over queries. So F@m is
the mean of the queries' F, never the F of mean precision and mean recall.

Not from scikit-learn: its ndcg_score takes one rectangular array of queries, has linear gains and averages over ties. A query without a
relevant item counts 0 in `ndcg`, as in LETOR's scripts; LightGBM counts it 1.

Legend: B queries, I items, M columns of recommendations; for rankings Q queries, R rows (an item of a query).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Bool, Float64, Int64
from espalier.errors import InvalidData
from espalier.search import NO_ITEM


def precision_recall_f(item_rows_BM: Int64, relevant: Sequence[Int64], m: int) -> tuple[Float64, Float64, Float64]:
    """P@m, R@m and F@m of every query (OTM Eq. 5, 6, 7), each float64[B].

        P@m = Σ_{j ∈ Î} y_j / m      R@m = Σ_{j ∈ Î} y_j / |I_x|      F@m = 2·P·R / (P + R), 0 where P + R = 0

    item_rows_BM   int64[B, M], best first; the first m columns count, NO_ITEM is padding.
                   A row with fewer than m items is still divided by m.
    relevant       for each query the item rows of I_x: y_j ∈ {0, 1}, repeats count once. (The published code of TDM and OTM counts them.)

    Raises InvalidData when a query has no relevant item (recall is undefined: skip it before the call), when a row recommends an item
    twice, or when shapes and dtypes do not fit.
    """
    hits_BM, size_B = _hits(recommendations(item_rows_BM, m), relevant)
    hits_B = hits_BM.sum(axis=1)
    precision_B, recall_B = hits_B / m, hits_B / np.maximum(size_B, 1)
    total_B = precision_B + recall_B
    f_B = np.divide(2 * precision_B * recall_B, total_B, out=np.zeros(len(total_B)), where=total_B > 0)
    return precision_B, recall_B, f_B


def reciprocal_rank_at_m(item_rows_BM: Int64, relevant: Sequence[Int64], m: int) -> Float64:
    """float64[B]: 1 / the position of the first relevant item among m, 0 without one. The mean is MRR@m. See `precision_recall_f`."""
    hits_BM, _ = _hits(recommendations(item_rows_BM, m), relevant)
    first_B = hits_BM.argmax(axis=1) if hits_BM.shape[1] else np.zeros(len(hits_BM), np.int64)
    rank_B: Float64 = np.where(hits_BM.any(axis=1), 1.0 / (first_B + 1), 0.0)
    return rank_B


def ndcg_at_m(item_rows_BM: Int64, relevant: Sequence[Int64], m: int) -> Float64:
    """float64[B]: nDCG@m of recommendations, relevance being yes or no (the Extreme Classification Repository's nDCG@k).

        nDCG@m = Σ_{i ≤ m, item i relevant} 1 / log2(1 + i), divided by its value if the first min(m, |I_x|) were

    Arguments and errors as `precision_recall_f`. Relevant items that were not retrieved count in the divisor, so
    this measures retrieval and order together; `ndcg` measures the order of a list.
    """
    hits_BM, size_B = _hits(recommendations(item_rows_BM, m), relevant)
    discount_M = 1 / np.log2(np.arange(2, m + 2))
    best_B = np.cumsum(discount_M)[np.minimum(size_B, m) - 1]
    ndcg_B: Float64 = (hits_BM * discount_M[: hits_BM.shape[1]]).sum(axis=1) / best_B
    return ndcg_B


def _hits(rows_BM: Int64, relevant: Sequence[Int64]) -> tuple[Bool, Int64]:
    """bool[B, M]: whether each recommendation is relevant; int64[B]: |I_x|."""
    if len(relevant) != len(rows_BM):
        raise InvalidData("relevant", f"{len(relevant)} queries", f"{len(rows_BM)}, one per row of item_rows_BM")
    relevant_size = np.array([len(rows) for rows in relevant], np.int64)
    if len(relevant) == 0:
        return np.zeros(rows_BM.shape, np.bool_), np.zeros(0, np.int64)
    if relevant_size.min() == 0:
        raise InvalidData(f"relevant[{int(relevant_size.argmin())}]", [], "at least one relevant item")
    relevant_rows = np.concatenate(relevant)
    if not np.issubdtype(relevant_rows.dtype, np.integer) or relevant_rows.min() < 0:
        raise InvalidData("relevant", relevant_rows[:4].tolist(), "integer item rows of at least 0")

    # One sorted key per (query, item) turns the membership test of the whole batch into one binary search.
    stride = max(int(rows_BM.max(initial=0)), int(relevant_rows.max())) + 1
    query_B = np.arange(len(rows_BM))
    key = np.unique(np.repeat(query_B, relevant_size) * stride + relevant_rows)
    key_BM = query_B[:, None] * stride + rows_BM
    slot_BM = np.minimum(np.searchsorted(key, key_BM), len(key) - 1)
    return (key[slot_BM] == key_BM) & (rows_BM != NO_ITEM), np.bincount(key // stride, minlength=len(rows_BM))


def ndcg(scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64, k: int | None = None) -> Float64:
    """NDCG@k of every query (Järvelin and Kekäläinen 2002, with the gains of NCE §5.1); k = None takes all positions.

        NDCG@k = Σ_{i ≤ k} (2^{r_i} − 1) / log2(1 + i), divided by its largest value over all orders

    scores_R      of each row; rows are ordered by descending score, ties by row
    grades_R      r ≥ 0 of each row; 0 is irrelevant
    query_offset  int64[Q + 1]: where the rows of each query begin, at least one each

    float64[Q], 0 for a query without a relevant item. Raises InvalidData where arrays do not fit or a score is no number.
    """
    if k is not None and k < 1:
        raise InvalidData("k", k, "at least 1, or none for all places")
    position_R, query_R, sorted_R = ranked_grades(scores_R, grades_R, query_offset)
    _, _, ideal_R = ranked_grades(grades_R, grades_R, query_offset)
    discount_R = np.where(position_R <= (np.inf if k is None else k), 1 / np.log2(1 + position_R), 0)
    best_Q = np.bincount(query_R, weights=(np.exp2(ideal_R) - 1) * discount_R)
    got_Q = np.bincount(query_R, weights=(np.exp2(sorted_R) - 1) * discount_R)
    ndcg_Q: Float64 = got_Q / np.where(best_Q > 0, best_Q, 1)
    return ndcg_Q


def ranked_grades(
    scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64
) -> tuple[Int64, Int64, NDArray[np.floating]]:
    """The rows in the order of the ranking, as three arrays: position in their query, from 1; query; grade."""
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


def recommendations(item_rows_BM: Int64, m: int) -> Int64:
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
