"""Forests: an item's score is the mean over the trees of its score in each.

A tree that did not score an item counts as 0. All leaves that a tree's beam scored take part, before any cut to m, so the answer to m = 5
begins the answer to m = 50. The result's rank is the log of the mean score; ties go to the lower item row. A bundle's tail enters the
ranks (espalier.tail).

A live item goes by a number here, I + its handle, in all trees; the result has its item row: that of a trained item whose row was changed
is its old one, by which ties are broken.

Legend: B queries, T trees, M leaves that a tree scored or results, X live leaves that trees scored, I trained items, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_positions
from espalier.engines.overflow import ScoredLive
from espalier.engines.stages import Leaves
from espalier.engines.tail_ranks import TailArrays, add_tail
from espalier.live.overlay import Overlay
from espalier.queries import QueryBatch
from espalier.read_only import read_only
from espalier.scores import log_scores
from espalier.search import NO_ITEM
from espalier.tail import Tail
from espalier.thread_scratch import ThreadScratch
from espalier.tree import Tree

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Floats = NDArray[np.float32]
BLOCK = 1 << 20
"""Scored leaves of a forest that are held at a time, unless one query has more."""
NEAR = 1e-6
"""More than the relative difference of two float32 numbers that are beside each other."""
NO_ROWS, NO_FEATURES, NO_VALUES = read_only(*(np.empty(0, dtype) for dtype in (np.int64, np.int32, np.float32)))


class LiveRows(NamedTuple):
    """What the mean needs to know of live items: the first of their numbers, and by handle their rows in answers and in the tail.

    item_R  int64[R]; begin_R, end_R int64[R]: where an item's features are in `feature` (int32) and `value` (float32)
    """

    first: int
    item_R: Array
    begin_R: Array
    end_R: Array
    feature: Array
    value: Array

    @staticmethod
    def of(overlay: Overlay) -> LiveRows:
        """Those of a snapshot: rows of the tail come with their leaves in the first tree."""
        leaves = overlay.trees[0]
        if leaves.sparse is None:
            raise ValueError("live leaves without weights")
        pool = leaves.sparse
        begin_R, end_R = np.zeros((2, overlay.handles), np.int64)
        begin_R[leaves.handle_X], end_R[leaves.handle_X] = pool.tail_begin_P[leaves.place_X], pool.tail_end_P[leaves.place_X]
        return LiveRows(overlay.items, *read_only(overlay.item_R, begin_R, end_R, pool.tail_feature, pool.tail_value))


NOTHING_LIVE = LiveRows(np.iinfo(np.int64).max, NO_ROWS, NO_ROWS, NO_ROWS, NO_FEATURES, NO_VALUES)


class LiveLists(NamedTuple):
    """Live leaves that trees scored: those of query b are begin_B[b] … begin_B[b + 1] − 1. number_X: I + handle; ranks_X float32."""

    begin_B: Array
    number_X: Array
    ranks_X: Array

    @staticmethod
    def none(batch: int) -> LiveLists:
        """Of a batch of queries that found nothing live."""
        (begin_B,) = read_only(np.zeros(batch + 1, np.int64))
        return LiveLists(begin_B, NO_ROWS, NO_VALUES)

    @staticmethod
    def of(overlay: Overlay, scored_T: Sequence[ScoredLive]) -> LiveLists:
        """Of all trees together."""
        query = np.concatenate([np.repeat(np.arange(len(scored.begin_B) - 1), np.diff(scored.begin_B)) for scored in scored_T])
        handle = np.concatenate([own.handle_X[scored.position_C] for own, scored in zip(overlay.trees, scored_T, strict=True)])
        ranks = np.concatenate([scored.ranks_C for scored in scored_T])
        order, batch = np.argsort(query, kind="stable"), len(scored_T[0].begin_B) - 1
        begin_B = np.append(0, np.cumsum(np.bincount(query, minlength=batch))).astype(np.int64)
        return LiveLists(*read_only(begin_B, overlay.items + handle[order], ranks[order]))


NO_LISTS = LiveLists.none(1)


class ForestMean:
    """Makes means of what the trees of a bundle scored. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        ranking = self._ranking = bundle.manifest.ranking
        self._by_rank = ranking.own == "log_activation" and ranking.calibration is None
        self._trees = len(bundle.alone)
        scratch = partial(_scratch, bundle.tail, tuple(TailArrays.of(bundle.tail)), bundle.manifest.tree.items)
        self._scratch = ThreadScratch(scratch)

    def best(self, queries: QueryBatch, leaves: Leaves, m_B: Int64, live: tuple[LiveRows, LiveLists] | None) -> tuple[Int64, Floats]:
        """int64[B, M] and float32[B, M]: the best m items of each query, best first, and the logs of their mean scores.

        live  what is live, and which leaves of it were scored
        """
        shape = len(m_B), int(m_B[0]) if len(m_B) == 1 else int(m_B.max(initial=0))
        rows_BM, ranks_BM = np.empty(shape, np.int64), np.empty(shape, np.float32)
        live_rows, lists = live or (NOTHING_LIVE, NO_LISTS if len(m_B) == 1 else LiveLists.none(len(m_B)))
        logs_BTM: Array = leaves.ranks_BTM  # of scores that are exponentials of ranks
        live_logs_X: Array = lists.ranks_X
        if not self._by_rank:
            is_there_BTM = np.arange(logs_BTM.shape[2]) < leaves.count_BT[:, :, None]  # the others hold nothing that is meant
            logs_BTM = log_scores(self._ranking, np.where(is_there_BTM, logs_BTM, np.float32(-np.inf)))
            (live_logs_X,) = read_only(log_scores(self._ranking, live_logs_X))
        found = read_only(leaves.rows_BTM, logs_BTM, leaves.count_BT)
        beside = lists.begin_B, lists.number_X, live_logs_X
        with self._scratch.of(len(live_rows.item_R)) as (tail, place_I):
            features = queries.features.arrays
            best_means(found, beside, self._trees, *read_only(m_B), features, tail, place_I, (rows_BM, ranks_BM), tuple(live_rows))
        return rows_BM, ranks_BM

    def best_with(self, queries: QueryBatch, leaves: Leaves, m_B: Int64, live: tuple[LiveRows, LiveLists] | None) -> tuple[Int64, Floats]:
        """The same where the leaves are one list already, of the means of shards: live items get theirs here.

        No item is both trained and live, so the best of both are the best of the whole.
        """
        rows_BM, ranks_BM = leaves.rows_BTM[:, 0], leaves.ranks_BTM[:, 0]
        if live is None:
            return rows_BM, ranks_BM
        none_BTM, zero_BT = np.empty((len(m_B), 1, 0), np.float32), np.zeros((len(m_B), 1), np.int64)
        nothing = Leaves(none_BTM.astype(np.int64), none_BTM, none_BTM, zero_BT)
        live_rows_BM, live_ranks_BM = self.best(queries, nothing, m_B, live)
        rows_BX, ranks_BX = np.concatenate([rows_BM, live_rows_BM], axis=1), np.concatenate([ranks_BM, live_ranks_BM], axis=1)
        order_BM = np.lexsort((rows_BX, -ranks_BX), axis=1)[:, : int(m_B.max(initial=0))]
        return np.take_along_axis(rows_BX, order_BM, axis=1), np.take_along_axis(ranks_BX, order_BM, axis=1)


def most_leaves(trees: Sequence[Tree], beam_size: int) -> int:
    """The most leaves that a query's searches of all trees can score."""
    return sum(min(2 * beam_size * tree.max_children[-1], tree.leaf_count) for tree in trees)


def _scratch(tail: Tail | None, arrays: tuple[Any, ...], items: int, handles: int) -> tuple[tuple[Any, Array], Array]:
    """`tail` and `place_I` of `best_means`, for so many trained items and handles of live ones. arrays: the fields of TailArrays."""
    return (arrays, np.zeros(0 if tail is None else tail.width)), np.full(items + handles, -1, np.int32)


@compiled()
def best_means(
    found: tuple[Array, ...],
    beside: tuple[Array, ...],
    trees: int,
    m_B: Array,
    features: tuple[Array, ...],
    tail: tuple[Any, Array],
    place_I: Array,
    out: tuple[Array, Array],
    live: tuple[Any, ...],
) -> None:
    """The best m of each query's items by log((Σ_t e^log_t) / trees) and the tail, rounded to float32; ties go to the lower item row.

    found     items int64[B, T, M], logs of their scores float32 or float64, taken as 0 where they are above, and counts int64[B, T];
              empty leaves have an item below 0
    beside    of live leaves: where each query's begin, their items' numbers, logs
    features  of the queries: indptr, indices, values
    tail      the fields of TailArrays, and scratch for `add_tail`
    place_I   int32[I + R] of −1, before and after: where an item is among those of the current query
    out       rows_BM, ranks_BM, which are written whole
    live      the fields of LiveRows

    Sums are relative to an item's largest log, its top, so that scores too small for float64 keep their order. A mean is at most e^top and
    at least e^top / trees: without a tail, an item whose top is below the m-th largest top − log trees is not among the best m, and
    exponentials and logs, which take longest, are left out. The best m are a heap of (rank, −item) pairs, each in one integer; its root is
    the worst.
    """
    items_BTM, logs_BTM, count_BT = found
    begin_B, number_X, live_logs_X = beside
    rows_BM, ranks_BM = out
    most = 0
    for b in range(len(m_B)):
        most = max(most, count_BT[b].sum() + begin_B[b + 1] - begin_B[b])
    item_X, log_X = np.empty(most, np.int64), np.empty(most, np.float64)
    item_of, top_of, sum_of = np.empty(most, np.int64), np.empty(most, np.float64), np.empty(most, np.float64)
    rounded, scratch, heap = np.empty(most, np.float32), np.empty(most, np.int32), np.empty(rows_BM.shape[1], np.int64)
    indptr, indices, values = features
    arrays, query_F = tail
    has_tail = arrays[0] < 1
    log_trees = np.log(np.float64(trees))
    for b in range(len(m_B)):
        total = 0
        for t in range(count_BT.shape[1]):
            for c in range(count_BT[b, t]):
                if items_BTM[b, t, c] >= 0:
                    item_X[total], log_X[total] = items_BTM[b, t, c], min(np.float64(logs_BTM[b, t, c]), 0.0)
                    total += 1
        for c in range(begin_B[b], begin_B[b + 1]):
            item_X[total], log_X[total] = number_X[c], min(np.float64(live_logs_X[c]), 0.0)
            total += 1
        items = 0
        for x in range(total):
            place = place_I[item_X[x]]
            if place < 0:
                place_I[item_X[x]] = items
                item_of[items], top_of[items], sum_of[items] = item_X[x], log_X[x], 0.0
                items += 1
            elif log_X[x] > top_of[place]:
                top_of[place] = log_X[x]
        least = -np.inf
        if not has_tail and items > m_B[b]:
            for place in range(items):
                rounded[place] = top_of[place]
            chosen = best_positions(rounded, items, m_B[b], scratch, heap)
            least = np.inf
            for k in range(chosen):
                least = min(least, np.float64(rounded[heap[k]]))
            least -= log_trees + NEAR * (1 - least)  # what float32 could make equal must stay
        for x in range(total):
            place = place_I[item_X[x]]
            top = top_of[place]
            if top >= least:
                below = log_X[x] - top
                sum_of[place] += np.exp(below) if below < 0 else 1.0
        kept = 0
        for place in range(items):
            place_I[item_of[place]] = -1
            if top_of[place] >= least:
                item_of[kept], top_of[kept] = item_of[place], top_of[place] + np.log(sum_of[place] / trees)
                kept += 1
        items = kept
        if has_tail:
            begin, end = indptr[b], indptr[b + 1]
            add_tail(top_of, item_of, items, indices[begin:end], values[begin:end], arrays, query_F, live)
        rows_BM[b], ranks_BM[b] = NO_ITEM, -np.inf
        size = 0
        for place in range(items):
            bits = np.float32(top_of[place]).view(np.int32)
            bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the ranks; −0, which equals 0, would be −1
            row = item_of[place]
            if row >= live[0]:
                row = live[1][row - live[0]]
            key = (np.int64(bits + (bits == -1)) << 32) | (np.int64(0xFFFFFFFF) - row)
            if size < m_B[b]:
                size = _pushed(heap, size, key)
            elif key > heap[0]:
                _sift_down(heap, size, key)
        for last in range(size - 1, -1, -1):
            key = heap[0]
            _sift_down(heap, last, heap[last])
            ordered = np.int32(key >> 32)
            rows_BM[b, last] = np.int64(0xFFFFFFFF) - (key & np.int64(0xFFFFFFFF))
            ranks_BM[b, last] = np.int32(ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(np.float32)


@compiled()
def _pushed(heap: Array, size: int, key: Any) -> int:
    """Put a key into a heap whose root is the smallest; the heap's new size."""
    place = size
    while place > 0 and heap[(place - 1) // 2] > key:
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = key
    return size + 1


@compiled()
def _sift_down(heap: Array, size: int, key: Any) -> None:
    """Put a key in the place of the root of a heap of `size` keys."""
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = key
