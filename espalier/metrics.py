"""Retrieval metrics as the papers define them, one value per query.

Knows item rows and ground truth. Does not know where the recommendations came from. Every function returns a value per query; the papers'
figure is the mean over queries, so F@m is the mean of the queries' F, never the F of mean precision and mean recall.

Legend: B queries, I items, M columns of recommendations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.search import NO_ITEM

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


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
    rows_BM = _recommendations(item_rows_BM, m)
    if len(relevant) != len(rows_BM):
        raise InvalidData("relevant", f"{len(relevant)} queries", f"{len(rows_BM)}, one per row of item_rows_BM")
    relevant_size = np.array([len(rows) for rows in relevant], np.int64)
    if len(relevant) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0)
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
    hits_B = np.where((key[place_BM] == wanted_BM) & (rows_BM != NO_ITEM), y[place_BM], 0).sum(axis=1)
    size_B = np.bincount(key // stride, weights=y, minlength=len(rows_BM))

    precision_B = hits_B / m
    recall_B = hits_B / size_B
    total_B = precision_B + recall_B
    f_B = np.divide(2 * precision_B * recall_B, total_B, out=np.zeros(len(rows_BM)), where=total_B > 0)
    return precision_B, recall_B, f_B


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
