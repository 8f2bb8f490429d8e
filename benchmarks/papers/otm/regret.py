"""The regret of OTM: what recommendations miss where the probabilities of all items are known.

Legend: B queries, I items, M columns of recommendations.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.errors import InvalidData
from espalier.metrics import recommendations
from espalier.search import NO_ITEM


def regret_at_m(eta_BI: Float64, item_rows_BM: Int64, m: int) -> Float64:
    """float64[B]: what the recommendations miss of the best m items (OTM Eq. 10 is the mean over queries).

        reg@m(x) = ( Σ_{j ∈ Top-m η(x)} η_j(x) − Σ_{j ∈ Î} η_j(x) ) / m

    eta_BI         float64[B, I]: η_j(x) = p(y_j = 1 | x)
    item_rows_BM   as in `precision_recall_f`; a place without an item gives 0

    Never negative: a row recommends each item at most once. Raises InvalidData as `precision_recall_f` does.
    """
    rows_BM = recommendations(item_rows_BM, m)
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
