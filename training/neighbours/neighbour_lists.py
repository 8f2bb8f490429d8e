"""Item-to-item scores that answer queries: the neighbours of a history's items, weighted by recency and summed.

Knows a sparse matrix of scores. Does not know how they are made (`fit.py`, `item_cf.py` of baselines).

    score(b | history) = Σ_{d < L} qd^d · S[h_d, b],   h_0 the last item of the history

Legend: B queries, I items, M results, T history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from espalier.arrays import Array, Float32, Float64, Int32, Int64
from espalier.compiled_code import compiled

from ..retrieval.scores import empty_rows, filled, keep_best


class Pairs(NamedTuple):
    """offset_I1 int64[I + 1]: row a is offset_I1[a] … offset_I1[a + 1] − 1 of item_N int32 and score_N float32, above 0."""

    offset_I1: Int64
    item_N: Int32
    score_N: Float32


@dataclass(frozen=True)
class NeighbourLists:
    """S, an I × I matrix in sparse rows.

    offset_I1    int64[I + 1]: row a is offset_I1[a] … offset_I1[a + 1] − 1
    item_N       int32: the neighbours · score_N float32: S[a, b], above 0
    popular_I    int64[I]: all item rows, most popular first; they fill answers with fewer neighbours than m
    """

    offset_I1: Int64
    item_N: Int32
    score_N: Float32
    popular_I: Int64

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (self.offset_I1, self.item_N, self.score_N, self.popular_I))

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool, weight_L: Float64 | None = None) -> Int64:
        """int64[B, M = m]: the best items, ties by the lower row; then, if fewer than m have a score, the most popular others.

        weight_L  of the last item of a history, the one before it, …; None: all count alike. Entries below 0 (unknown items) are skipped
        """
        rows_BM = empty_rows(len(histories), m)
        known_items = [np.asarray(history, np.int64)[np.asarray(history) >= 0] for history in histories]
        latest = [history[::-1][: None if weight_L is None else len(weight_L)] for history in known_items]
        weight_L = np.ones(0) if weight_L is None else weight_L
        rows = (self.offset_I1, self.item_N, self.score_N)
        _rank(rows, *_concatenated(latest), *_concatenated(known_items if exclude_seen else []), weight_L, rows_BM)
        return filled(rows_BM, known_items, self.popular_I, exclude_seen)

    def limited(self, most: int) -> NeighbourLists:
        """The same with the best `most` neighbours of each item, ties by the lower row. Rows of items that have no more are unchanged."""
        length = np.minimum(np.diff(self.offset_I1), most)
        offset = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
        item_N, score_N = np.empty(offset[-1], np.int32), np.empty(offset[-1], np.float32)
        _limit((self.offset_I1, self.item_N, self.score_N), offset, item_N, score_N)
        return NeighbourLists(offset, item_N, score_N, self.popular_I)


def _concatenated(lists: Sequence[Int64]) -> tuple[Int64, Int64]:
    """The items of all lists, and the offsets of the lists, with the end of the last."""
    offset = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
    return np.concatenate([np.zeros(0, np.int64), *lists]), offset


@compiled()
def _rank(
    rows: tuple[Array, Array, Array], latest: Array, offset: Array, seen: Array, seen_offset: Array, weight_L: Array, rows_BM: Array
) -> None:
    """Sums are of float64, in which those of few float32 numbers are exact: ties do not depend on the order of a history."""
    offset_I1, item_N, score_N = rows
    items = len(offset_I1) - 1
    total_I = np.zeros(items, np.float64)
    scored, found, score_M = np.empty(items, np.int64), np.empty(items, np.float64), np.empty(rows_BM.shape[1], np.float64)
    for b in range(len(rows_BM)):
        count = 0
        for t in range(offset[b], offset[b + 1]):
            weight = weight_L[t - offset[b]] if len(weight_L) else 1.0
            for n in range(offset_I1[latest[t]], offset_I1[latest[t] + 1]):
                item, score = item_N[n], weight * score_N[n]
                if score == 0:
                    continue
                if total_I[item] == 0:
                    scored[count] = item
                    count += 1
                total_I[item] += score
        if len(seen_offset) > 1:
            for t in range(seen_offset[b], seen_offset[b + 1]):
                if total_I[seen[t]] != 0:
                    total_I[seen[t]] = -np.inf
        for n in range(count):
            found[n] = total_I[scored[n]]
            total_I[scored[n]] = 0
        keep_best(scored, found, count, rows_BM[b], score_M)


@compiled()
def _limit(rows: tuple[Array, Array, Array], offset: Array, item_N: Array, score_N: Array) -> None:
    offset_I1, items, scores = rows
    for a in range(len(offset) - 1):
        row, kept = slice(offset_I1[a], offset_I1[a + 1]), slice(offset[a], offset[a + 1])
        if row.stop - row.start == kept.stop - kept.start:
            item_N[kept], score_N[kept] = items[row], scores[row]
        else:
            keep_best(items[row], scores[row], row.stop - row.start, item_N[kept], score_N[kept])
