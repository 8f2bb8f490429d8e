"""Forests: an item's score is the mean over the trees of its score in each.

A tree that did not score an item counts as 0. All leaves that a tree's beam scored take part, before any cut to m, so the answer to m = 5
is the beginning of the answer to m = 50. The result's rank is the log of the mean score; ties go to the lower item row. A bundle's tail
is added to the ranks (espalier.tail).

Here a live item has the number I + its handle in all trees; results have its item row. A trained item whose row was changed keeps its old
item row, which also breaks ties.

Legend: B queries, T trees, M leaves that a tree scored or results, X live leaves that trees scored, I trained items, R handles,
P entries of live leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Float32, Int64, read_only
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_positions
from espalier.engines.overflow_scores import ScoredLive
from espalier.engines.stages import Leaves
from espalier.entry_lists import NO_ENTRIES, EntryArrays, entry_of
from espalier.live.overlay import HANDLE, Overlay
from espalier.queries import QueryBatch
from espalier.scores import log_scores
from espalier.search import NO_ITEM
from espalier.tail import FARTHEST, FLOOR, Tail
from espalier.thread_scratch import ThreadScratch
from espalier.tree import Tree

BLOCK = 1 << 20
"""Most scored leaves of a forest in one block of queries, unless a single query has more."""
NEAR = 1e-6
"""More than the relative difference of two adjacent float32 numbers."""
NO_ROWS, NO_FEATURES, NO_VALUES = read_only(*(np.empty(0, dtype) for dtype in (np.int64, np.int32, np.float32)))


class LiveRows(NamedTuple):
    """The live items as the mean reads them.

    first           the first number of a live item
    item_R          int64[R]: their item rows in answers, by handle
    leaves          of the first tree: its entries have the rows of the tail
    begin_P, end_P  int64[P]: the span of an entry's features in `feature` (int32) and `value` (float32)
    """

    first: int
    item_R: Array
    leaves: EntryArrays
    begin_P: Array
    end_P: Array
    feature: Array
    value: Array

    @staticmethod
    def of(overlay: Overlay) -> LiveRows:
        """The live items of a snapshot."""
        leaves = overlay.trees[0]
        if leaves.sparse is None:
            raise ValueError("live leaves without weights")
        pool = leaves.sparse
        (item_R,) = read_only(overlay.item_R)
        begin_P, end_P, feature, value = read_only(pool.tail_begin_P, pool.tail_end_P, pool.tail_feature, pool.tail_value)
        return LiveRows(overlay.items, item_R, leaves.entries, begin_P, end_P, feature, value)


NO_LIVE_ROWS = LiveRows(np.iinfo(np.int64).max, NO_ROWS, NO_ENTRIES, NO_ROWS, NO_ROWS, NO_FEATURES, NO_VALUES)


class LiveLists(NamedTuple):
    """The live leaves that trees scored. Query b's are begin_B[b] … begin_B[b + 1] − 1. number_X: I + handle; ranks_X float32."""

    begin_B: Array
    number_X: Array
    ranks_X: Array

    @staticmethod
    def of(overlay: Overlay, scored_T: Sequence[ScoredLive]) -> LiveLists:
        """The scored live leaves of all trees."""
        query = np.concatenate([np.repeat(np.arange(len(scored.begin_B) - 1), np.diff(scored.begin_B)) for scored in scored_T])
        handle = np.concatenate([leaves.column(HANDLE, scored.entry_C) for leaves, scored in zip(overlay.trees, scored_T, strict=True)])
        ranks = np.concatenate([scored.ranks_C for scored in scored_T])
        order, batch = np.argsort(query, kind="stable"), len(scored_T[0].begin_B) - 1
        begin_B = np.append(0, np.cumsum(np.bincount(query, minlength=batch))).astype(np.int64)
        return LiveLists(*read_only(begin_B, overlay.items + handle[order], ranks[order]))


class ForestMean:
    """Averages the scores of a forest's trees. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        ranking = self._ranking = bundle.manifest.ranking
        self._by_rank = ranking.own == "log_activation" and ranking.calibration is None
        self._trees = len(bundle.alone)
        self._tail = tail_arrays(bundle.tail)
        items, width = bundle.manifest.tree.items, 0 if bundle.tail is None else bundle.tail.width
        self._scratch = ThreadScratch(lambda handles: (np.zeros(width), np.full(items + handles, -1, np.int32)))

    def best(self, queries: QueryBatch, leaves: Leaves, m_B: Int64, live: tuple[LiveRows, LiveLists] | None) -> tuple[Int64, Float32]:
        """int64[B, M] and float32[B, M]: the best m items of each query, best first, and the logs of their mean scores.

        live  the live items, and the live leaves that were scored
        """
        shape = len(m_B), int(m_B[0]) if len(m_B) == 1 else int(m_B.max(initial=0))
        rows_BM, ranks_BM = np.empty(shape, np.int64), np.empty(shape, np.float32)
        (no_leaves_B,) = read_only(np.zeros(len(m_B) + 1, np.int64))
        live_rows, lists = live or (NO_LIVE_ROWS, LiveLists(no_leaves_B, NO_ROWS, NO_VALUES))
        logs_BTM: Array = leaves.ranks_BTM  # if scores are exponentials of ranks
        live_logs_X: Array = lists.ranks_X
        if not self._by_rank:
            is_there_BTM = np.arange(logs_BTM.shape[2]) < leaves.count_BT[:, :, None]  # the other entries are undefined
            logs_BTM = log_scores(self._ranking, np.where(is_there_BTM, logs_BTM, np.float32(-np.inf)))
            (live_logs_X,) = read_only(log_scores(self._ranking, live_logs_X))
        scored = read_only(leaves.rows_BTM, logs_BTM, leaves.count_BT)
        live_leaves = lists.begin_B, lists.number_X, live_logs_X
        with self._scratch.of(len(live_rows.item_R)) as (query_F, position_I):
            features, tail, out = queries.features.arrays, (self._tail, query_F), (rows_BM, ranks_BM)
            best_means(scored, live_leaves, self._trees, *read_only(m_B), features, tail, position_I, out, tuple(live_rows))
        return rows_BM, ranks_BM

    def best_with(self, queries: QueryBatch, leaves: Leaves, m_B: Int64, live: tuple[LiveRows, LiveLists] | None) -> tuple[Int64, Float32]:
        """The same for leaves that are already the merged means of shards: only live items are averaged here.

        No item is both trained and live, so the best of the two lists are the best of all items.
        """
        rows_BM, ranks_BM = leaves.rows_BTM[:, 0], leaves.ranks_BTM[:, 0]
        if live is None:
            return rows_BM, ranks_BM
        none_BTM, zero_BT = np.empty((len(m_B), 1, 0), np.float32), np.zeros((len(m_B), 1), np.int64)
        no_leaves = Leaves(none_BTM.astype(np.int64), none_BTM, none_BTM, zero_BT)
        live_rows_BM, live_ranks_BM = self.best(queries, no_leaves, m_B, live)
        rows_BX, ranks_BX = np.concatenate([rows_BM, live_rows_BM], axis=1), np.concatenate([ranks_BM, live_ranks_BM], axis=1)
        order_BM = np.lexsort((rows_BX, -ranks_BX), axis=1)[:, : int(m_B.max(initial=0))]
        return np.take_along_axis(rows_BX, order_BM, axis=1), np.take_along_axis(ranks_BX, order_BM, axis=1)


def most_leaves(trees: Sequence[Tree], beam_size: int) -> int:
    """The most leaves that a query's searches of all trees can score."""
    return sum(min(2 * beam_size * tree.max_children[-1], tree.leaf_count) for tree in trees)


def tail_arrays(tail: Tail | None) -> tuple[Any, ...]:
    """A tail as compiled code reads it: alpha, 1 if there is no tail; gamma, −1 for the product; row_begin, feature, value, square_I."""
    if tail is None:
        return 1.0, -1.0, NO_ROWS, NO_FEATURES, NO_VALUES, *read_only(np.empty(0))
    gamma = tail.info.gamma if tail.info.form == "gaussian" else -1.0
    return tail.info.alpha, gamma, *read_only(tail.row_begin, tail.feature, tail.value, tail.square_I)


@compiled()
def best_means(
    scored: tuple[Array, ...], live_leaves: tuple[Array, ...], trees: int, m_B: Array, features: tuple[Array, ...],
    tail: tuple[Any, Array], position_I: Array, out: tuple[Array, Array], live: tuple[Any, ...],
) -> None:  # fmt: skip
    """The best m of each query's items by log((Σ_t e^log_t) / trees) and the tail, rounded to float32; ties go to the lower item row.

    scored       items int64[B, T, M], the logs of their scores float32 or float64, taken as at most 0, and counts int64[B, T]; empty leaves
                 have an item below 0
    live_leaves  the fields of LiveLists, with logs of scores as ranks
    features     of the queries: indptr, indices, values
    tail         of `tail_arrays`, and scratch for `add_tail`
    position_I   int32[I + R]: an item's position among those of the current query; −1 before and after the call
    out          rows_BM, ranks_BM; every entry is written
    live         the fields of LiveRows

    Sums are relative to an item's largest log, its top, so scores too small for float64 keep their order. A mean is at most e^top and at
    least e^top / trees. So without a tail, an item whose top is below the m-th largest top − log trees is not among the best m; its
    exponentials and log, which take longest, are skipped. The best m are in a heap of (rank, −item) pairs, each in one integer; its root is
    the worst.
    """
    items_BTM, logs_BTM, count_BT = scored
    begin_B, number_X, live_logs_X = live_leaves
    rows_BM, ranks_BM = out
    max_leaves = 0
    for b in range(len(m_B)):
        max_leaves = max(max_leaves, count_BT[b].sum() + begin_B[b + 1] - begin_B[b])
    item_X, log_X = np.empty(max_leaves, np.int64), np.empty(max_leaves, np.float64)
    item_of, top_of, sum_of = np.empty(max_leaves, np.int64), np.empty(max_leaves, np.float64), np.empty(max_leaves, np.float64)
    rounded, scratch, heap = np.empty(max_leaves, np.float32), np.empty(max_leaves, np.int32), np.empty(rows_BM.shape[1], np.int64)
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
            i = position_I[item_X[x]]
            if i < 0:
                position_I[item_X[x]] = items
                item_of[items], top_of[items], sum_of[items] = item_X[x], log_X[x], 0.0
                items += 1
            elif log_X[x] > top_of[i]:
                top_of[i] = log_X[x]
        least = -np.inf
        if not has_tail and items > m_B[b]:
            for i in range(items):
                rounded[i] = top_of[i]
            chosen = best_positions(rounded, items, m_B[b], scratch, heap)
            least = np.inf
            for k in range(chosen):
                least = min(least, np.float64(rounded[heap[k]]))
            least -= log_trees + NEAR * (1 - least)  # keep items whose ranks float32 may round to the same value
        for x in range(total):
            i = position_I[item_X[x]]
            top = top_of[i]
            if top >= least:
                below = log_X[x] - top
                sum_of[i] += np.exp(below) if below < 0 else 1.0
        count = 0
        for i in range(items):
            position_I[item_of[i]] = -1
            if top_of[i] >= least:
                item_of[count], top_of[count] = item_of[i], top_of[i] + np.log(sum_of[i] / trees)
                count += 1
        items = count
        if has_tail:
            begin, end = indptr[b], indptr[b + 1]
            add_tail(top_of, item_of, items, indices[begin:end], values[begin:end], arrays, query_F, live)
        rows_BM[b], ranks_BM[b] = NO_ITEM, -np.inf
        size = 0
        for i in range(items):
            bits = np.float32(top_of[i]).view(np.int32)
            bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the ranks; −0, which equals 0, would be −1
            row = item_of[i]
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
def add_tail(
    ranks: Array, items: Array, count: int, features: Array, values: Array, tail: Any, query_F: Array, live: tuple[Any, ...]
) -> None:
    """Replace the first `count` ranks of some items by alpha · rank + (1 − alpha) · the tail's part.

    features, values  the query's
    tail, query_F     of `tail_arrays`; float64[F], zeros before and after the call
    live              the fields of LiveRows: items from I on are live
    """
    alpha, gamma, row_begin, feature, value, square_I = tail
    square = 0.0
    for j in range(len(features)):
        query_F[features[j]] = values[j]
        square += np.float64(values[j]) * np.float64(values[j])
    for x in range(count):
        item, product, own_square = items[x], 0.0, 0.0
        if item >= live[0]:
            _, _, leaves, begin_P, end_P, live_feature, live_value = live
            entry = entry_of(item - live[0], leaves)
            for e in range(begin_P[entry], end_P[entry]):
                product += query_F[live_feature[e]] * live_value[e]
                own_square += np.float64(live_value[e]) * np.float64(live_value[e])
        else:
            for e in range(row_begin[item], row_begin[item + 1]):
                product += query_F[feature[e]] * value[e]
            own_square = square_I[item]
        if gamma < 0:
            near = np.log(max(product, FLOOR))
        else:
            far = min(gamma / 2 * max(square + own_square - 2 * product, 0.0), FARTHEST)
            near = -far - np.log1p(np.exp(-far))
        ranks[x] = alpha * ranks[x] + (1 - alpha) * near
    for j in range(len(features)):
        query_F[features[j]] = 0


@compiled()
def _pushed(heap: Array, size: int, key: Any) -> int:
    """Put a key into a heap whose root is the smallest key; returns the heap's new size."""
    i = size
    while i > 0 and heap[(i - 1) // 2] > key:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = key
    return size + 1


@compiled()
def _sift_down(heap: Array, size: int, key: Any) -> None:
    """Replace the root of a heap of `size` keys by another key."""
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = key
