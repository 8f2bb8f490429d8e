"""The beam search over linear node scorers on a CPU, compiled by numba.

For each kept node the features of the query are looked up among its chunk's rows, by whichever way pays: a table by feature where there
are few features or many rows, a hash table where not, and the other way round, rows looked up in the query, where a chunk has fewer rows
than the query has features. A row with weights for many of the children is kept a second time with all its places, the empty ones too,
so that it is added as vectors are.

Legend: P inner nodes, K beam, C candidates, F features, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.errors import InvalidQuery
from espalier.manifest import Ranking
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

Array = NDArray[Any]
POWERS = {"sigmoid": 0, "l1-hinge": 1, "l2-hinge": 2, "l3-hinge": 3, "l4-hinge": 4}
"""Activations as the search numbers them; −1 ranks by logits."""
L3_HINGE = Ranking(activation="l3-hinge", own="log_activation", gamma=1)
"""How XR-Linear ranks: by the product of exp(−max(0, 1 − v)³) along the path (PECOS §3.4)."""
PER_THREAD = 8
"""Queries that are worth a thread of their own."""
SPARSE_TABLE = 8
"""A table by feature may have so many places for each row of its chunk …"""
FULL = 0.25
"""The share of a row's places from which on it is kept with all of them."""
COUNTS, NO_ROW = 1 << 16, np.iinfo(np.int64).min
"""What tells where a row is: see `_fill`."""
SMALL_TABLES = 64 << 20
"""… or any number, as long as all tables together take no more bytes."""
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Not `nnan` and not `ninf`: a number that is none has to be seen."""
LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, eq=False)
class Wanted:
    """What each query of a search asks for.

    beam_size_B, m_B  int64[B], at least 1
    groups            queries (int64 positions) that may visit the same nodes, and bool[N] which, None for all; without it all may visit all
    shut_BX           int64[B, X]: nodes that each query must not visit besides, −1 as padding; None: no such nodes
    """

    beam_size_B: NDArray[np.int64]
    m_B: NDArray[np.int64]
    groups: Sequence[tuple[NDArray[np.int64], NDArray[np.bool_] | None]] | None = None
    shut_BX: NDArray[np.int64] | None = None

    @staticmethod
    def uniform(batch: int, beam_size: int, m: int) -> Wanted:
        """The same beam size and m for every query, all nodes open."""
        return Wanted(np.full(batch, beam_size, np.int64), np.full(batch, m, np.int64))


@dataclass(frozen=True, eq=False)
class Traced:
    """Every level of a search, from the root's children on, H levels: candidates and kept nodes, ascending, −1 and −inf as padding."""

    candidates_BHC: NDArray[np.int64]
    ranks_BHC: NDArray[np.float32]
    kept_BHK: NDArray[np.int64]
    kept_ranks_BHK: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Found:
    """leaves_BM int64[B, M], best first, −1 as padding; ranks_BM float32[B, M], −inf there."""

    leaves_BM: NDArray[np.int64]
    ranks_BM: NDArray[np.float32]
    trace: Traced | None = None


class ChunkSearch:
    """Searches one tree of linear scorers. One search at a time, which may use several threads.

    last     the level whose nodes are found; the leaves' by default, an inner one while the levels below are still being trained
    threads  that queries of one search are shared among
    """

    def __init__(self, tree: Tree, chunks: Chunks, ranking: Ranking = L3_HINGE, last: int | None = None, threads: int = 1) -> None:
        self._tree, self._chunks = tree, chunks
        self._gamma = np.float32(ranking.gamma)
        self._power = POWERS[ranking.activation] if ranking.own == "log_activation" else -1
        self._last = tree.height if last is None else last
        inner = tree.level(self._last).start
        rows = np.diff(chunks.chunk_row)[:inner]
        by_feature = rows * SPARSE_TABLE >= chunks.width
        if int(inner) * chunks.width * 8 <= SMALL_TABLES:
            by_feature[:] = True
        sizes = np.where(by_feature, chunks.width, 1 << np.ceil(np.log2(np.maximum(rows * 2, 2))).astype(np.int64))
        table_from = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        place = np.full(table_from[-1], NO_ROW, np.int64)
        key = np.full(table_from[-1] if not by_feature.all() else 1, -1, np.int32)
        children = np.diff(tree.first_child)[:inner]
        full_row = np.diff(chunks.row_entry)[: chunks.chunk_row[inner]] >= FULL * np.repeat(children, rows)
        full_rows = np.add.reduceat(np.append(full_row, False), chunks.chunk_row[:inner]) * (rows > 0)
        full_from = np.concatenate([[0], np.cumsum(full_rows * children)]).astype(np.int64)
        full = np.zeros(full_from[-1], np.float32)
        scorers = _frozen(
            tree.first_child, chunks.chunk_row, chunks.row_feature, chunks.row_entry, chunks.entry_child, chunks.entry_weight, chunks.bias,
            table_from, by_feature,
        )  # fmt: skip
        _fill(scorers, full_row, full_from, key, place, full)
        self._arrays = (*scorers, *_frozen(key, place, full))
        self._workspaces = [_Workspace(tree, chunks.width, self._last) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, "chunk-search") if threads > 1 else None

    def close(self) -> None:
        """End the threads. No search after it."""
        if self._pool is not None:
            self._pool.shutdown()

    def search(self, queries: SparseRows, wanted: Wanted, trace: bool = False) -> Found:
        """The best m nodes of the last level for each query, with a beam of nodes kept on the levels above.

        Raises InvalidQuery where a number is below 1, features are not those of the scorers, or a value is not finite.
        """
        chunks = self._chunks
        if len(queries) == 0:
            return Found(np.empty((0, 0), np.int64), np.empty((0, 0), np.float32))
        (beam_size, m), least = _extremes(wanted, np.max), _extremes(wanted, np.min)
        for name, value in zip(("beam_size", "m"), least, strict=True):
            if value < 1:
                raise InvalidQuery(name, value, "at least 1")
        if queries.width != chunks.width:
            raise InvalidQuery("features", f"rows of {queries.width} features", f"rows of {chunks.width}")
        for workspace in self._workspaces:
            workspace.make_room(beam_size, m)
        leaves_BM = np.empty((len(queries), m), np.int64)
        ranks_BM = np.empty((len(queries), m), np.float32)
        traced = NOT_TRACED
        if trace:
            kept, _, candidates, *_ = self._workspaces[0].buffers
            shape = len(queries), self._last
            traced = (
                np.full((*shape, len(candidates)), -1, np.int64), np.full((*shape, len(candidates)), -np.inf, np.float32),
                np.full((*shape, len(kept)), -1, np.int64), np.full((*shape, len(kept)), -np.inf, np.float32),
            )  # fmt: skip
        given = _frozen(
            queries.indptr, queries.indices, queries.values, wanted.beam_size_B, wanted.m_B,
            NONE if wanted.shut_BX is None else wanted.shut_BX,
        )  # fmt: skip

        def run(workspace: _Workspace, which: Array, eligible_N: Array) -> int:
            return _search(
                which, given, self._arrays, workspace.dense, workspace.shut, eligible_N, self._last, self._gamma, self._power,
                workspace.buffers, leaves_BM, ranks_BM, traced,
            )  # fmt: skip

        wrong = -1
        for which, mask in wanted.groups or [(np.arange(len(queries)), None)]:
            which, eligible_N = _frozen(which, ALL if mask is None else mask)
            if self._pool is None or len(which) < 2 * PER_THREAD:
                wrong = max(wrong, run(self._workspaces[0], which, eligible_N))
            else:
                shares = np.array_split(which, min(len(self._workspaces), len(which) // PER_THREAD))
                wrong = max(wrong, *self._pool.map(run, self._workspaces, _frozen(*shares), repeat(eligible_N)))
        if wrong >= 0:
            if not np.isfinite(queries.values[wrong]):
                raise InvalidQuery("features.values", float(queries.values[wrong]), "finite numbers")
            raise InvalidQuery("features.indices", int(queries.indices[wrong]), f"feature numbers from 0 to {chunks.width - 1}")
        return Found(leaves_BM, ranks_BM, Traced(*traced) if trace else None)


class _Workspace:
    """What one thread writes to while it searches.

    dense    float32[F], 0: the query
    shut     bool[N], False: the nodes that it must not visit
    buffers  kept nodes and ranks, candidates and ranks, a heap
    """

    def __init__(self, tree: Tree, width: int, last: int) -> None:
        self.dense, self.shut = np.zeros(width, np.float32), np.zeros(tree.node_count, np.bool_)
        self.buffers: tuple[Array, ...] = ()
        self._tree, self._last, self._room = tree, last, (0, 0)

    def make_room(self, beam_size: int, m: int) -> None:
        """Buffers for the largest beam and the most candidates that such a search can have."""
        if self._room == (beam_size, m):
            return
        kept, most, widest = 1, 1, 1
        for level in range(self._last):
            candidates = min(kept * self._tree.max_children[level], self._tree.level_size(level + 1))
            most = max(most, candidates)
            kept = min(candidates, beam_size if level + 1 < self._last else m)
            widest = max(widest, kept)
        self.buffers = (
            np.empty(widest, np.int64), np.empty(widest, np.float32), np.empty(most, np.int64), np.empty(most, np.float32),
            np.empty(widest, np.float32),
        )  # fmt: skip
        self._room = beam_size, m


def _extremes(wanted: Wanted, of: Callable[[Array], Any]) -> tuple[int, int]:
    """Of the beam sizes and of the m; one query, the usual case, is not worth a reduction."""
    if len(wanted.m_B) == 1:
        return int(wanted.beam_size_B[0]), int(wanted.m_B[0])
    return int(of(wanted.beam_size_B)), int(of(wanted.m_B))


def _frozen(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as contiguous ones that cannot be written to: what is mapped cannot either, and numba compiles for each kind anew."""
    frozen = []
    for array in arrays:
        view = np.ascontiguousarray(array).view(np.ndarray)
        view.flags.writeable = False
        frozen.append(view)
    return tuple(frozen)


ALL, NONE = np.empty(0, np.bool_), np.empty((0, 0), np.int64)
"""Of Wanted's, where there is none."""
NOT_TRACED = tuple(np.empty((0, 0, 0), dtype) for dtype in (np.int64, np.float32, np.int64, np.float32))


@njit(cache=True, nogil=True)
def _slot(feature: int, size: int) -> Any:
    """Where the search for a feature begins in a hash table of 2^n places (Fibonacci hashing)."""
    return np.int64((np.uint64(feature) * np.uint64(11400714819323198485)) >> np.uint64(32)) & (size - 1)


@njit(cache=True, nogil=True)
def _fill(scorers: tuple[Array, ...], full_row: Array, full_from: Array, key: Array, place: Array, full: Array) -> None:
    """Each chunk's table: where a feature's row begins among the entries, times COUNTS, and how many it has; −1 − where it begins in `full`
    for a full one; NO_ROW for no row.
    """
    first_child, chunk_row, row_feature, row_entry, entry_child, entry_weight, _, table_from, by_feature = scorers
    for p in range(len(by_feature)):
        start, size = table_from[p], table_from[p + 1] - table_from[p]
        children, number = first_child[p + 1] - first_child[p], 0
        for row in range(chunk_row[p], chunk_row[p + 1]):
            where = row_entry[row] * COUNTS + row_entry[row + 1] - row_entry[row]
            if full_row[row]:
                begin = full_from[p] + number * children
                for e in range(row_entry[row], row_entry[row + 1]):
                    full[begin + entry_child[e]] = entry_weight[e]
                where = -1 - begin
                number += 1
            slot = row_feature[row]
            if not by_feature[p]:
                slot = _slot(row_feature[row], size)
                while place[start + slot] != NO_ROW:
                    slot = (slot + 1) & (size - 1)
                key[start + slot] = row_feature[row]
            place[start + slot] = where


@njit(cache=True, nogil=True, fastmath=FAST)
def _search(
    which: Array, given: tuple[Array, ...], scorers: tuple[Array, ...], dense: Array, shut: Array, eligible_N: Array, last: int, gamma: Any,
    power: int, work: tuple[Array, ...], out: Array, out_ranks: Array, trace: tuple[Array, ...],
) -> int:  # fmt: skip
    """Some queries one after the other. Returns −1, or the place of an index that is no feature's or of a value that is not finite, where
    it stops.

    A node whose logit or rank is not finite is no candidate: it would have no place in any order.
    """
    indptr, indices, values, beam_size_B, m_B, shut_BX = given
    first_child, chunk_row, row_feature, row_entry, entry_child, entry_weight, bias, table_from, by_feature, key, place, full = scorers
    kept, kept_ranks, candidates, ranks, heap = work
    one, zero, none = np.float32(1), np.float32(0), np.float32(np.nan)
    for b in which:
        begin, end = indptr[b], indptr[b + 1]
        for j in range(begin, end):  # what is outside would be written outside
            if indices[j] < 0 or indices[j] >= len(dense) or not abs(values[j]) <= LARGEST:
                return j
        for j in range(begin, end):
            dense[indices[j]] = values[j]
        for s in range(shut_BX.shape[1]):
            if shut_BX[b, s] >= 0:
                shut[shut_BX[b, s]] = True
        choosy = len(eligible_N) > 0 or shut_BX.shape[1] > 0
        count: Any = np.int64(1)  # a plain 1 would be a type of its own, for which what it is given to is compiled once more
        kept[0] = 0
        kept_ranks[0] = 0
        level_begin: Any = np.int64(0)
        level_end: Any = np.int64(1)
        for level in range(last):
            level_begin, level_end = first_child[level_begin], first_child[level_end]
            # With γ = 0 nobody asks for the ranks of a level that the beam holds whole.
            counts = gamma > 0 or level + 1 == last or level_end - level_begin > beam_size_B[b]
            total: Any = np.int64(0)
            for k in range(count):
                p = kept[k]
                first, children = first_child[p], first_child[p + 1] - first_child[p]
                for c in range(children):
                    ranks[total + c] = bias[first + c]
                rows, at = chunk_row[p + 1] - chunk_row[p], chunk_row[p]
                base = np.uint64(total)  # unsigned: numba asks of every signed place whether it counts from the end
                if rows < end - begin:
                    for row in range(at, at + rows):
                        x = dense[row_feature[row]]
                        if x != 0:
                            for e in range(row_entry[row], row_entry[row + 1]):
                                ranks[base + np.uint64(entry_child[np.uint64(e)])] += x * entry_weight[np.uint64(e)]
                else:
                    start, size = table_from[p], table_from[p + 1] - table_from[p]
                    by_number = by_feature[p]
                    for j in range(begin, end):
                        if by_number:
                            row = place[np.uint64(start + indices[j])]
                        else:
                            slot = _slot(indices[j], size)
                            while place[start + slot] != NO_ROW and key[start + slot] != indices[j]:
                                slot = (slot + 1) & (size - 1)
                            row = place[start + slot]
                        if row == NO_ROW:
                            continue
                        x = values[j]
                        if row >= 0:
                            first_entry = row // COUNTS
                            for e in range(first_entry, first_entry + row % COUNTS):
                                ranks[base + np.uint64(entry_child[np.uint64(e)])] += x * entry_weight[np.uint64(e)]
                        else:
                            own = np.uint64(-1 - row)
                            for c in range(np.uint64(children)):
                                ranks[base + c] += x * full[own + c]
                above = gamma * kept_ranks[k]
                # Whether a logit is finite is asked first: min and max below could make a number of what is none.
                if power > 0:
                    for c in range(total, total + children):
                        finite = abs(ranks[c]) <= LARGEST
                        short = max(one - ranks[c], zero)
                        loss = short
                        for _ in range(1, power):
                            loss *= short
                        ranks[c] = above - loss if finite else none
                elif power == 0:
                    for c in range(total, total + children):
                        finite = abs(ranks[c]) <= LARGEST
                        own = min(ranks[c], zero) - np.log1p(np.exp(-abs(ranks[c])))
                        ranks[c] = above + own if finite else none
                else:
                    for c in range(total, total + children):
                        ranks[c] += above
                lost: Any = np.int64(0)
                for c in range(total, total + children):
                    lost += not abs(ranks[c]) <= LARGEST
                if lost > 0 and not counts:
                    lost = 0
                    for c in range(total, total + children):
                        if not abs(ranks[c]) <= LARGEST:
                            ranks[c] = 0
                if choosy or lost > 0:
                    to = total
                    for c in range(children):
                        rank = ranks[total + c]
                        is_eligible = (len(eligible_N) == 0 or eligible_N[first + c]) and not shut[first + c]
                        if is_eligible and abs(rank) <= LARGEST:
                            candidates[to], ranks[to] = first + c, rank
                            to += 1
                    total = to
                else:
                    for c in range(children):
                        candidates[total + c] = first + c
                    total += children
            wanted = beam_size_B[b] if level + 1 < last else m_B[b]
            count = _keep_best(candidates, ranks, total, wanted, kept, kept_ranks, heap)
            if trace[0].shape[1] > 0:
                for c in range(total):
                    trace[0][b, level, c], trace[1][b, level, c] = candidates[c], ranks[c]
                for k in range(count):
                    trace[2][b, level, k], trace[3][b, level, k] = kept[k], kept_ranks[k]
        for j in range(begin, end):
            dense[indices[j]] = 0
        for s in range(shut_BX.shape[1]):
            if shut_BX[b, s] >= 0:
                shut[shut_BX[b, s]] = False
        order = _best_first(kept_ranks, count)
        for k in range(count):
            out[b, k] = kept[order[k]]
            out_ranks[b, k] = kept_ranks[order[k]]
        for k in range(count, out.shape[1]):
            out[b, k] = -1
            out_ranks[b, k] = -np.inf
    return -1


@njit(cache=True, nogil=True)
def _keep_best(candidates: Array, ranks: Array, total: int, wanted: int, kept: Array, kept_ranks: Array, heap: Array) -> int:
    """The best `wanted` candidates, in their order; of equal ones the first. How many they are: never more than `wanted`.

    ranks  none of them NaN, for which no order holds
    """
    if total <= wanted:
        for c in range(total):
            kept[c] = candidates[c]
            kept_ranks[c] = ranks[c]
        return total
    for c in range(wanted):
        heap[c] = ranks[c]
    for root in range(wanted // 2 - 1, -1, -1):
        _sink(heap, wanted, root)
    for c in range(wanted, total):
        if ranks[c] > heap[0]:
            heap[0] = ranks[c]
            _sink(heap, wanted, np.int64(0))
    threshold = heap[0]
    ties = wanted
    for c in range(total):
        if ranks[c] > threshold:
            ties -= 1
    count = 0
    for c in range(total):
        if count == wanted:
            break
        if ranks[c] < threshold or (ranks[c] == threshold and ties == 0):
            continue
        if ranks[c] == threshold:
            ties -= 1
        kept[count] = candidates[c]
        kept_ranks[count] = ranks[c]
        count += 1
    return count


@njit(cache=True, nogil=True)
def _best_first(ranks: Array, count: int) -> Array:
    """The places of so many ranks, the best first; of equal ones the first first (merge sort). NumPy's takes a second to compile."""
    order, merged = np.empty(count, np.int64), np.empty(count, np.int64)
    for k in range(count):
        order[k] = k
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            i, j = begin, middle
            for k in range(begin, end):
                if j == end or (i < middle and ranks[order[i]] >= ranks[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order


@njit(cache=True, nogil=True)
def _sink(heap: Array, size: int, root: Any) -> None:
    """Let one entry of a min-heap down to where it belongs."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[root] <= heap[child]:
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child
