"""The trained items whose own texts are nearest to a new item's: cosines by an inverted index, compiled by numba.

Knows sparse rows. Does not know trees or weights.

Legend: n new items, I trained items, K neighbours, E entries.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Array, Float32, Int64, read_only
from espalier.compiled_code import compiled
from espalier.text.sparse_rows import SparseRows

NO_NEIGHBOUR = -1
"""Padding where an item has fewer neighbours."""


class NearItems:
    """An index of the trained items' rows (SparseRows [I, F], of length 1). Used by any number of threads."""

    def __init__(self, rows: SparseRows) -> None:
        by_feature = np.argsort(rows.indices, kind="stable")
        item_E = np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(rows.indptr))[by_feature]
        feature, first = np.unique(rows.indices[by_feature], return_index=True)
        self._items = len(rows)
        self._index = read_only(feature, np.append(first, len(item_E)).astype(np.int64), item_E, rows.values[by_feature])

    def nearest(self, new: SparseRows, count: int) -> tuple[Int64, Float32]:
        """int64[n, K]: item rows, the nearest first, NO_NEIGHBOUR as padding; float32[n, K]: their cosines, above 0.

        new  rows of length 1. Ties go to the lower item row.
        """
        item_nK = np.full((len(new), count), NO_NEIGHBOUR, np.int64)
        cosine_nK = np.zeros((len(new), count), np.float32)
        _nearest(new.arrays, self._index, self._items, item_nK, cosine_nK)
        return item_nK, cosine_nK


@compiled()
def _nearest(new: tuple[Array, ...], index: tuple[Array, ...], items: int, item_nK: Array, cosine_nK: Array) -> None:
    indptr, indices, values = new
    feature, first, item_E, value_E = index
    sum_I, touched = np.zeros(items, np.float32), np.empty(items, np.int32)
    for i in range(len(indptr) - 1):
        touched_count = 0
        for e in range(indptr[i], indptr[i + 1]):
            list_number = np.searchsorted(feature, indices[e])
            if list_number == len(feature) or feature[list_number] != indices[e]:
                continue
            for posting in range(first[list_number], first[list_number + 1]):
                item, product = item_E[posting], values[e] * value_E[posting]
                if sum_I[item] == 0 and product != 0:
                    touched[touched_count] = item
                    touched_count += 1
                sum_I[item] += product
        for item in touched[:touched_count]:
            _insert(item, sum_I[item], item_nK[i], cosine_nK[i])
            sum_I[item] = 0


@compiled()
def _insert(item: int, cosine: float, item_K: Array, cosine_K: Array) -> None:
    """Insert an item into the K nearest so far, which are in order, if it belongs there."""
    k = len(item_K)
    while k > 0 and cosine > 0 and (cosine > cosine_K[k - 1] or (cosine == cosine_K[k - 1] and item < item_K[k - 1])):
        k -= 1
    if k < len(item_K):
        item_K[k + 1 :], cosine_K[k + 1 :] = item_K[k:-1].copy(), cosine_K[k:-1].copy()
        item_K[k], cosine_K[k] = item, cosine
