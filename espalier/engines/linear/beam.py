"""The compiled beam search over linear node scorers: some queries, one after the other.

A node's features are looked up in the query if the node has fewer rows than the query has features, otherwise the query's features in
the node's table. A node whose logit or rank is not finite is no candidate: it would have no place in any order.

Legend: B queries, N nodes, F features, X excluded nodes, M results, H levels, C candidates, K beam.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from espalier.engines.linear.best_nodes import best_first, keep_best
from espalier.engines.linear.feature_tables import ENTRY_COUNTS, NO_ROW, FeatureTables, slot_of

Array = NDArray[Any]
Arrays = tuple[Array, ...]
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math without `nnan` and `ninf`: numbers that are not finite must be seen."""
LARGEST = np.finfo(np.float32).max


class Queries(NamedTuple):
    """indptr, indices, values: the features · beam_size_B, m_B: int64[B] · excluded_BX: int64[B, X], −1 as padding."""

    indptr: Array
    indices: Array
    values: Array
    beam_size_B: Array
    m_B: Array
    excluded_BX: Array


class Ranker(NamedTuple):
    """last: the level whose nodes are results · gamma: float32 · power: of the hinge, 0 for the sigmoid, −1 for logits."""

    last: int
    gamma: Any
    power: int


class Workspace(NamedTuple):
    """What one thread writes to.

    query_F         float32[F], 0 between queries: the values of the current query
    excluded_N      bool[N], False between queries: the nodes excluded from the current query
    kept, kept_ranks, candidates, ranks, heap   int64, float32, int64, float32, float32: of one level
    """

    query_F: Array
    excluded_N: Array
    kept: Array
    kept_ranks: Array
    candidates: Array
    ranks: Array
    heap: Array


class Results(NamedTuple):
    """nodes_BM int64, ranks_BM float32; the others are a trace of each level, int64 and float32, with no levels if there is none."""

    nodes_BM: Array
    ranks_BM: Array
    candidates_BHC: Array
    candidate_ranks_BHC: Array
    kept_BHK: Array
    kept_ranks_BHK: Array


@njit(cache=True, nogil=True)
def search_queries(
    positions: Array, queries: Arrays, tables: Arrays, eligible_N: Array, ranker: tuple[int, Any, int], work: Arrays, out: Arrays
) -> int:
    """Search the queries at `positions` among the eligible nodes (bool[N]; empty if all are).

    The tuples have the fields of Queries, FeatureTables, Ranker, Workspace and Results. They are plain ones, because numba takes twice as
    long to unpack named ones, 5 µs a call. Returns −1, or the position of a feature number out of range or of a value that is not finite,
    where the search stops.
    """
    return _search(positions, Queries(*queries), FeatureTables(*tables), eligible_N, Ranker(*ranker), Workspace(*work), Results(*out))


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def _search(
    positions: Array, queries: Queries, tables: FeatureTables, eligible_N: Array, ranker: Ranker, work: Workspace, out: Results
) -> int:
    for b in positions:
        begin, end = queries.indptr[b], queries.indptr[b + 1]
        for j in range(begin, end):  # before anything is written at a feature's place
            feature = queries.indices[j]
            if feature < 0 or feature >= len(work.query_F) or not abs(queries.values[j]) <= LARGEST:
                return j
        for j in range(begin, end):
            work.query_F[queries.indices[j]] = queries.values[j]
        _set_excluded(queries, b, work, True)
        count = _best_nodes(b, queries, tables, eligible_N, ranker, work, out)
        _set_excluded(queries, b, work, False)
        for j in range(begin, end):
            work.query_F[queries.indices[j]] = 0
        order = best_first(work.kept_ranks, count)
        for k in range(count):
            out.nodes_BM[b, k] = work.kept[order[k]]
            out.ranks_BM[b, k] = work.kept_ranks[order[k]]
        for k in range(count, out.nodes_BM.shape[1]):
            out.nodes_BM[b, k] = -1
            out.ranks_BM[b, k] = -np.inf
    return -1


@njit(cache=True, nogil=True, forceinline=True)
def _set_excluded(queries: Queries, b: int, work: Workspace, excluded: bool) -> None:
    for x in range(queries.excluded_BX.shape[1]):
        if queries.excluded_BX[b, x] >= 0:
            work.excluded_N[queries.excluded_BX[b, x]] = excluded


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def _best_nodes(b: int, queries: Queries, tables: FeatureTables, eligible_N: Array, ranker: Ranker, work: Workspace, out: Results) -> Any:
    """Leave a query's best nodes of the last level in `work`, in node order. Returns how many there are."""
    filtered = len(eligible_N) > 0 or queries.excluded_BX.shape[1] > 0
    count: Any = np.int64(1)  # a plain 1 would be another type, for which numba would compile again
    level_begin: Any = np.int64(0)
    level_end: Any = np.int64(1)
    work.kept[0] = 0
    work.kept_ranks[0] = 0
    for level in range(ranker.last):
        level_begin, level_end = tables.first_child[level_begin], tables.first_child[level_end]
        is_last = level + 1 == ranker.last
        # With γ = 0 the ranks of a level that fits in the beam change nothing.
        ranks_matter = ranker.gamma > 0 or is_last or level_end - level_begin > queries.beam_size_B[b]
        total: Any = np.int64(0)
        for k in range(count):
            p = work.kept[k]
            first, children = tables.first_child[p], tables.first_child[p + 1] - tables.first_child[p]
            _write_logits(b, queries, tables, p, work, total)
            not_finite = _write_ranks(work.ranks, total, total + children, ranker.gamma * work.kept_ranks[k], ranker.power)
            if not_finite > 0 and not ranks_matter:
                not_finite = 0
                for c in range(total, total + children):
                    if not abs(work.ranks[c]) <= LARGEST:
                        work.ranks[c] = 0
            if filtered or not_finite > 0:
                total = _add_eligible(first, children, eligible_N, work, total)
            else:
                for c in range(children):
                    work.candidates[total + c] = first + c
                total += children
        wanted = queries.m_B[b] if is_last else queries.beam_size_B[b]
        count = keep_best(work.candidates, work.ranks, total, wanted, work.kept, work.kept_ranks, work.heap)
        if out.kept_BHK.shape[1] > 0:
            _write_trace(b, level, total, count, work, out)
    return count


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def _write_logits(b: int, queries: Queries, tables: FeatureTables, p: Any, work: Workspace, total: Any) -> None:
    """Write the logits of node p's children to work.ranks, from position `total` on."""
    begin, end, ranks = queries.indptr[b], queries.indptr[b + 1], work.ranks
    first, children = tables.first_child[p], tables.first_child[p + 1] - tables.first_child[p]
    for c in range(children):
        ranks[total + c] = tables.bias[first + c]
    base = np.uint64(total)  # unsigned: numba tests every signed index for whether it counts from the end
    if tables.chunk_row[p + 1] - tables.chunk_row[p] < end - begin:
        for row in range(tables.chunk_row[p], tables.chunk_row[p + 1]):
            x = work.query_F[tables.row_feature[row]]
            if x != 0:
                for e in range(tables.row_entry[row], tables.row_entry[row + 1]):
                    ranks[base + np.uint64(tables.entry_child[np.uint64(e)])] += x * tables.entry_weight[np.uint64(e)]
        return
    start, size, is_direct = tables.table_from[p], tables.table_from[p + 1] - tables.table_from[p], tables.is_direct[p]
    for j in range(begin, end):
        feature, x = queries.indices[j], queries.values[j]
        if is_direct:
            location = tables.slot_location[np.uint64(start + feature)]
        else:
            slot = slot_of(feature, size)
            while tables.slot_location[start + slot] != NO_ROW and tables.slot_feature[start + slot] != feature:
                slot = (slot + 1) & (size - 1)
            location = tables.slot_location[start + slot]
        if location == NO_ROW:
            continue
        if location >= 0:
            first_entry = location // ENTRY_COUNTS
            for e in range(first_entry, first_entry + location % ENTRY_COUNTS):
                ranks[base + np.uint64(tables.entry_child[np.uint64(e)])] += x * tables.entry_weight[np.uint64(e)]
        else:
            dense = np.uint64(-1 - location)
            for c in range(np.uint64(children)):
                ranks[base + c] += x * tables.dense_weight[dense + c]


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def _write_ranks(ranks: Array, begin: Any, end: Any, above: Any, power: int) -> Any:
    """Turn logits into ranks: `above`, γ · the parent's rank, plus the log activation. Returns how many ranks are not finite."""
    one, zero, nan = np.float32(1), np.float32(0), np.float32(np.nan)
    # A logit is tested before min and max see it: they could make a finite number of NaN.
    if power > 0:
        for c in range(begin, end):
            finite = abs(ranks[c]) <= LARGEST
            short = max(one - ranks[c], zero)
            loss = short
            for _ in range(1, power):
                loss *= short
            ranks[c] = above - loss if finite else nan
    elif power == 0:
        for c in range(begin, end):
            finite = abs(ranks[c]) <= LARGEST
            own = min(ranks[c], zero) - np.log1p(np.exp(-abs(ranks[c])))
            ranks[c] = above + own if finite else nan
    else:
        for c in range(begin, end):
            ranks[c] += above
    not_finite: Any = np.int64(0)
    for c in range(begin, end):
        not_finite += not abs(ranks[c]) <= LARGEST
    return not_finite


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def _add_eligible(first: Any, children: Any, eligible_N: Array, work: Workspace, total: Any) -> Any:
    """Append those of the children that are eligible and have a finite rank to the candidates. Returns how many there are now."""
    to = total
    for c in range(children):
        rank = work.ranks[total + c]
        is_eligible = (len(eligible_N) == 0 or eligible_N[first + c]) and not work.excluded_N[first + c]
        if is_eligible and abs(rank) <= LARGEST:
            work.candidates[to], work.ranks[to] = first + c, rank
            to += 1
    return to


@njit(cache=True, nogil=True)
def _write_trace(b: int, level: int, total: int, count: int, work: Workspace, out: Results) -> None:
    for c in range(total):
        out.candidates_BHC[b, level, c], out.candidate_ranks_BHC[b, level, c] = work.candidates[c], work.ranks[c]
    for k in range(count):
        out.kept_BHK[b, level, k], out.kept_ranks_BHK[b, level, k] = work.kept[k], work.kept_ranks[k]
