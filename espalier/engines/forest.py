"""Forests: each tree is searched by an engine of its own, and an item's score is the mean over the trees of its score in each.

A tree that did not score an item counts as 0. All leaves that a tree's beam scored take part, before any cut to m, so the answer to m = 5
begins the answer to m = 50. The result's rank is the log of the mean score; ties go to the lower item row. A bundle's tail enters the
ranks (espalier.tail).

Legend: B queries, C leaves that a tree scored, X scored (item, tree) pairs of a query, I items, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_positions
from espalier.engines.tail_ranks import TailArrays, add_tail
from espalier.errors import BundleCorrupt
from espalier.frontier import joined
from espalier.queries import QueryBatch, blank_queries
from espalier.read_only import read_only
from espalier.scores import finish, log_scores
from espalier.search import NO_ITEM, Engine, Frontier, LevelTrace, SearchParams, SearchResult
from espalier.tail import Tail
from espalier.thread_scratch import ThreadScratch

Array = NDArray[Any]
NEAR = 1e-6
"""More than the relative difference of two float32 numbers that are beside each other."""
BLOCK = 1 << 20
"""Scored leaves that are held at a time, unless one query has more."""
NOTHING_LIVE = np.iinfo(np.int64).max, *read_only(*(np.empty(0, dtype) for dtype in (np.int64, np.int64, np.int64, np.int32, np.float32)))
"""`live` of `best_means` where no item is."""


@dataclass(frozen=True, eq=False)
class ScoredLeaves:
    """Every leaf that a tree's search scored, in no particular order.

    leaves_BC   int64[B, C]     node numbers, −1 where a place is empty; places from count_B on are not looked at
    ranks_BC    float32[B, C]
    count_B     int64[B]
    eligible_B  int64[B]        how many items are eligible
    trace, frontier  where they were asked for
    """

    leaves_BC: NDArray[np.int64]
    ranks_BC: NDArray[np.float32]
    count_B: NDArray[np.int64]
    eligible_B: NDArray[np.int64]
    trace: tuple[LevelTrace, ...] | None
    frontier: Frontier | None = None


class TreeEngine(Engine, Protocol):
    """An engine that can give all that it scored."""

    def most_leaves(self, beam_size: int) -> int:
        """The most leaves that the search of a query can score."""
        ...

    def scored_leaves(self, queries: QueryBatch, params: SearchParams) -> ScoredLeaves:
        """All leaves that the queries' beams lead to; `params.m_B` changes nothing."""
        ...


class LiveParts(Protocol):
    """What joins the leaves of a forest's trees; see `espalier.engines.live.forest`.

    An item that is live has the number I + its handle here, in all trees, so that its row of the tail is found.

    arrays   of `best_means`
    handles  R, those in use
    """

    @property
    def arrays(self) -> tuple[Any, ...]: ...

    @property
    def handles(self) -> int: ...

    def of_tree(
        self, place: int, queries: QueryBatch, members: NDArray[np.int64], found: ScoredLeaves
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Live leaves that a tree scored for some queries of the call: int64[B + 1] where each one's begin, their items' numbers, ranks."""
        ...


class ForestEngine:
    """Searches a bundle of several trees; see the module. Its name and rounding are those of its trees' engines.

    engines  one for each of `bundle.alone`
    """

    def __init__(self, bundle: Bundle, engines: Sequence[TreeEngine]) -> None:
        self.bundle, self._engines = bundle, tuple(engines)
        trees = [alone.tree for alone in bundle.alone]
        self._leaf_items, self._leaf_offsets = [tree.leaf_item for tree in trees], [tree.leaf_offset for tree in trees]
        ranking, self.result_ranking = bundle.manifest.ranking, bundle.manifest.result_ranking
        self.by_rank = ranking.own == "log_activation" and ranking.calibration is None
        self.items = bundle.manifest.tree.items
        self.means_scratch = ThreadScratch(partial(_means_scratch, bundle.tail, tuple(TailArrays.of(bundle.tail)), self.items))

    @property
    def name(self) -> str:
        return self._engines[0].name

    @property
    def rounding(self) -> float:
        return self._engines[0].rounding

    def warm_up(self) -> None:
        """Build what each tree's search needs, and load the mean."""
        for engine in self._engines:
            engine.warm_up()
        self.search(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def prepare(self, params: SearchParams) -> None:
        for place, engine in enumerate(self._engines):
            engine.prepare(params.of_tree(place))

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters are not the bundle's."""
        params.check(len(queries), self.items)
        return self.search_trees(queries, params, [params.of_tree(place) for place in range(len(self._leaf_items))])

    def search_trees(
        self, queries: QueryBatch, params: SearchParams, params_T: Sequence[SearchParams], live: LiveParts | None = None
    ) -> SearchResult:
        """The search with parameters of each tree, which have been checked, and with what is live."""
        shape = len(queries), int(params.m_B[0]) if len(queries) == 1 else int(params.m_B.max(initial=0))
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        eligible_B = np.zeros(len(queries), np.int64)
        block = len(queries)
        if block > 1 and not params.trace:
            most = sum(engine.most_leaves(int(params.beam_size_B.max())) for engine in self._engines)
            block = max(1, BLOCK // most)
        traces: list[tuple[LevelTrace, ...]] = []
        frontiers: list[list[tuple[NDArray[np.int64], Frontier]]] = [[] for _ in self._engines]
        for begin in range(0, len(queries), max(block, 1)):
            part = slice(begin, begin + block)
            own, own_T, members = queries, params_T, np.arange(len(queries))[part]
            if block < len(queries):
                own, own_T = queries.take(members), [knobs.take(members) for knobs in params_T]
            leaves = [engine.scored_leaves(own, knobs) for engine, knobs in zip(self._engines, own_T, strict=True)]
            self._write_means(own, members, leaves, params.m_B[part], rows_BM[part], ranks_BM[part], live)
            eligible_B[part] = leaves[0].eligible_B
            traces = [tree.trace for tree in leaves if tree.trace is not None]
            for parts, tree in zip(frontiers, leaves, strict=True):
                if tree.frontier is not None:
                    parts.append((members, tree.frontier))
        result = finish(self.result_ranking, params.m_B, eligible_B, rows_BM, ranks_BM, None)
        if params.frontier:
            result = replace(result, frontiers=tuple(joined(parts, len(queries)) for parts in frontiers))
        return replace(result, trace=traces[0], other_traces=tuple(traces[1:])) if traces else result

    def _write_means(
        self,
        queries: QueryBatch,
        members: NDArray[np.int64],
        leaves: Sequence[ScoredLeaves],
        m_B: NDArray[np.int64],
        rows_BM: NDArray[np.int64],
        ranks_BM: NDArray[np.float32],
        live: LiveParts | None,
    ) -> None:
        """Write the best items of each query and the logs of their mean scores. members: which queries of the call these are."""
        beside = [] if live is None else [live.of_tree(place, queries, members, tree) for place, tree in enumerate(leaves)]
        most = sum(int(tree.count_B.max(initial=0)) for tree in leaves)
        most += sum(int(np.diff(begin_B).max(initial=0)) for begin_B, *_ in beside)
        shape = len(m_B), most
        items_BX, ranks_BX, count_B = np.empty(shape, np.int32), np.empty(shape, np.float32), np.zeros(len(m_B), np.int64)
        for leaf_item, leaf_offset, found in zip(self._leaf_items, self._leaf_offsets, leaves, strict=True):
            _append(found.leaves_BC, found.ranks_BC, found.count_B, leaf_item, leaf_offset, items_BX, ranks_BX, count_B)
        for begin_B, items_C, ranks_C in beside:
            _append_live(begin_B, items_C, ranks_C, items_BX, ranks_BX, count_B)
        logs_BX: Array = ranks_BX  # of scores that are exponentials of ranks
        if not self.by_rank:
            for b, count in enumerate(count_B.tolist()):  # places past the count are not initialised
                ranks_BX[b, count:] = -np.inf
            logs_BX = log_scores(self.bundle.manifest.ranking, ranks_BX)
        handles, arrays = (0, NOTHING_LIVE) if live is None else (live.handles, live.arrays)
        features = queries.features.arrays
        with self.means_scratch.of(handles) as (tail, place_I):
            best_means(items_BX, logs_BX, count_B, len(leaves), m_B, features, tail, place_I, rows_BM, ranks_BM, arrays)


def _means_scratch(tail: Tail | None, arrays: tuple[Any, ...], items: int, handles: int) -> tuple[tuple[Any, Array], Array]:
    """`tail` and `place_I` of `best_means`, for so many trained items and handles of live ones. arrays: the fields of TailArrays."""
    return (arrays, np.zeros(0 if tail is None else tail.width)), np.full(items + handles, -1, np.int32)


def refuse_forest(bundle: Bundle) -> None:
    """Raise BundleCorrupt where an engine of one tree is given several, of which it would search the first alone, or a stacking."""
    if bundle.manifest.trees:
        raise BundleCorrupt(f"{bundle.path}: a forest of {1 + len(bundle.manifest.trees)} trees, expected one of `Bundle.alone`")
    if bundle.manifest.stacking is not None:
        raise BundleCorrupt(f"{bundle.path}: a bundle with stacking, expected `Bundle.unstacked`")


@compiled()
def _append(
    leaves_BC: Array, ranks_BC: Array, found_B: Array, leaf_item: Array, leaf_offset: int, items_BX: Array, ranks_BX: Array, count_B: Array
) -> None:
    """Put the items of a tree's leaves behind those of the trees before it."""
    for b in range(len(count_B)):
        at = count_B[b]
        for c in range(found_B[b]):
            if leaves_BC[b, c] >= 0:
                items_BX[b, at], ranks_BX[b, at] = leaf_item[leaves_BC[b, c] - leaf_offset], ranks_BC[b, c]
                at += 1
        count_B[b] = at


@compiled()
def _append_live(begin_B: Array, items_C: Array, ranks_C: Array, items_BX: Array, ranks_BX: Array, count_B: Array) -> None:
    """Put the live leaves of a tree behind all others."""
    for b in range(len(count_B)):
        at = count_B[b]
        for c in range(begin_B[b], begin_B[b + 1]):
            items_BX[b, at], ranks_BX[b, at] = items_C[c], ranks_C[c]
            at += 1
        count_B[b] = at


@compiled()
def best_means(
    items_BX: Array,
    logs_BX: Array,
    count_B: Array,
    trees: int,
    m_B: Array,
    features: tuple[Array, ...],
    tail: tuple[Any, Array],
    place_I: Array,
    rows_BM: Array,
    ranks_BM: Array,
    live: tuple[Any, ...],
) -> None:
    """The best m of each query's items by log((Σ_t e^log_t) / trees) and the tail, rounded to float32; ties go to the lower item row.

    logs_BX   float32 or float64, taken as 0 where they are above
    features  of the queries: indptr, indices, values
    tail      the fields of TailArrays, and scratch for `add_tail`
    place_I   int32[I] of −1, before and after: where an item is among those of the current query
    live      I; int64[R]: item rows of the items from I on; and what `add_tail` takes of them

    Sums are relative to an item's largest log, its top, so that scores too small for float64 keep their order. A mean is at most e^top and
    at least e^top / trees: without a tail, an item whose top is below the m-th largest top − log trees is not among the best m, and
    exponentials and logs, which take longest, are left out. The best m are a heap of (rank, −item) pairs, each in one integer; its root is
    the worst.
    """
    width = items_BX.shape[1]
    item_of, top_of, sum_of = np.empty(width, np.int64), np.empty(width, np.float64), np.empty(width, np.float64)
    rounded, scratch, heap = np.empty(width, np.float32), np.empty(width, np.int32), np.empty(rows_BM.shape[1], np.int64)
    indptr, indices, values = features
    arrays, query_F = tail
    has_tail = arrays[0] < 1
    log_trees = np.log(np.float64(trees))
    for b in range(len(count_B)):
        items = 0
        for x in range(count_B[b]):
            item, log = items_BX[b, x], min(np.float64(logs_BX[b, x]), 0.0)
            place = place_I[item]
            if place < 0:
                place_I[item] = items
                item_of[items], top_of[items], sum_of[items] = item, log, 0.0
                items += 1
            elif log > top_of[place]:
                top_of[place] = log
        least = -np.inf
        if not has_tail and items > m_B[b]:
            for place in range(items):
                rounded[place] = top_of[place]
            chosen = best_positions(rounded, items, m_B[b], scratch, heap)
            least = np.inf
            for k in range(chosen):
                least = min(least, np.float64(rounded[heap[k]]))
            least -= log_trees + NEAR * (1 - least)  # what float32 could make equal must stay
        for x in range(count_B[b]):
            place = place_I[items_BX[b, x]]
            top = top_of[place]
            if top >= least:
                below = min(np.float64(logs_BX[b, x]), 0.0) - top
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
