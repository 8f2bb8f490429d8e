"""The beam search over linear node scorers on a CPU, compiled by numba.

For each kept node the features of the query are looked up among its chunk's rows, by whichever way pays: a table by feature where there
are few features or many rows, a hash table where not, and the other way round, rows looked up in the query, where a chunk has fewer rows
than the query has features.

Legend: P inner nodes, K beam, C candidates, F features, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.errors import InvalidQuery
from espalier.sparse import SparseRows
from espalier.tree import Tree

Array = NDArray[Any]
Activation = Literal["l3-hinge", "sigmoid"]
SPARSE_TABLE = 8
"""A table by feature may have so many places for each row of its chunk …"""
SMALL_TABLES = 64 << 20
"""… or any number, as long as all tables together take no more bytes."""
FAST = {"reassoc", "contract", "arcp", "nsz"}


@dataclass(frozen=True, eq=False)
class Found:
    """leaves_BM int64[B, M], best first, −1 as padding; ranks_BM float32[B, M], −inf there."""

    leaves_BM: NDArray[np.int64]
    ranks_BM: NDArray[np.float32]


class ChunkSearch:
    """Searches one tree of linear scorers. Not for several threads at once: it has the workspace of one.

    last  the level whose nodes are found; the leaves' by default, an inner one while the levels below are still being trained
    """

    def __init__(self, tree: Tree, chunks: Chunks, activation: Activation = "l3-hinge", last: int | None = None) -> None:
        self._tree, self._chunks, self._activation = tree, chunks, activation
        self._last = tree.height if last is None else last
        inner = tree.level(self._last).start
        rows = np.diff(chunks.chunk_row)[:inner]
        by_feature = rows * SPARSE_TABLE >= chunks.width
        if int(inner) * chunks.width * 4 <= SMALL_TABLES:
            by_feature[:] = True
        sizes = np.where(by_feature, chunks.width, 1 << np.ceil(np.log2(np.maximum(rows * 2, 2))).astype(np.int64))
        self._table_from = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._by_feature = by_feature
        self._place = np.full(self._table_from[-1], -1, np.int32)
        self._key = np.full(self._table_from[-1] if not by_feature.all() else 1, -1, np.int32)
        _fill(chunks.chunk_row, chunks.row_feature, self._table_from, by_feature, self._key, self._place)
        self._dense = np.zeros(chunks.width, np.float32)
        self._work: tuple[int, ...] = ()

    def search(self, queries: SparseRows, beam_size: int, m: int) -> Found:
        """The best `m` nodes of the last level for each query, with `beam_size` nodes kept on the levels above.

        Raises InvalidQuery where a number is below 1, or features are not those of the scorers.
        """
        tree, chunks = self._tree, self._chunks
        for name, value in (("beam_size", beam_size), ("m", m)):
            if value < 1:
                raise InvalidQuery(name, value, "at least 1")
        if queries.width != chunks.width:
            raise InvalidQuery("features", f"rows of {queries.width} features", f"rows of {chunks.width}")
        self._make_room(beam_size, m)
        kept, kept_ranks, candidates, candidate_ranks, heap = self._buffers
        leaves = np.full((len(queries), m), -1, np.int64)
        ranks = np.full((len(queries), m), -np.inf, np.float32)
        wrong = _search(
            queries.indptr, queries.indices, queries.values, tree.first_child, chunks.chunk_row, chunks.row_feature, chunks.row_entry,
            chunks.entry_child, chunks.entry_weight, chunks.bias, self._table_from, self._by_feature, self._key, self._place, self._dense,
            beam_size, m, self._last, self._activation == "sigmoid", kept, kept_ranks, candidates,
            candidate_ranks, heap, leaves, ranks,
        )  # fmt: skip
        if wrong >= 0:
            raise InvalidQuery("features.indices", int(queries.indices[wrong]), f"feature numbers from 0 to {chunks.width - 1}")
        return Found(leaves, ranks)

    def _make_room(self, beam_size: int, m: int) -> None:
        """Buffers for the largest beam and the most candidates that such a search can have."""
        if self._work == (beam_size, m):
            return
        kept, most, widest = 1, 1, 1
        for level in range(self._last):
            candidates = min(kept * self._tree.max_children[level], self._tree.level_size(level + 1))
            most = max(most, candidates)
            kept = min(candidates, beam_size if level + 1 < self._last else m)
            widest = max(widest, kept)
        self._buffers: tuple[Any, ...] = (
            np.empty(widest, np.int64), np.empty(widest, np.float32), np.empty(most, np.int64), np.empty(most, np.float32),
            np.empty(widest, np.float32),
        )  # fmt: skip
        self._work = (beam_size, m)


@njit(cache=True, nogil=True)
def _slot(feature: int, size: int) -> Any:
    """Where the search for a feature begins in a hash table of 2^n places (Fibonacci hashing)."""
    return np.int64((np.uint64(feature) * np.uint64(11400714819323198485)) >> np.uint64(32)) & (size - 1)


@njit(cache=True, nogil=True)
def _fill(chunk_row: Array, row_feature: Array, table_from: Array, by_feature: Array, key: Array, place: Array) -> None:
    """Each chunk's table: the place of a feature's row, counted from the chunk's first, or −1."""
    for p in range(len(by_feature)):
        start, size = table_from[p], table_from[p + 1] - table_from[p]
        for row in range(chunk_row[p], chunk_row[p + 1]):
            feature = row_feature[row]
            if by_feature[p]:
                place[start + feature] = row - chunk_row[p]
            else:
                slot = _slot(feature, size)
                while place[start + slot] >= 0:
                    slot = (slot + 1) & (size - 1)
                key[start + slot] = feature
                place[start + slot] = row - chunk_row[p]


@njit(cache=True, nogil=True, fastmath=FAST)
def _search(
    indptr: Array, indices: Array, values: Array, first_child: Array, chunk_row: Array, row_feature: Array, row_entry: Array,
    entry_child: Array, entry_weight: Array, bias: Array, table_from: Array, by_feature: Array, key: Array, place: Array, dense: Array,
    beam_size: int, m: int, last: int, sigmoid: bool, kept: Array, kept_ranks: Array, candidates: Array, ranks: Array, heap: Array,
    out: Array, out_ranks: Array,
) -> int:  # fmt: skip
    """All queries one after the other. Returns −1, or the place of an index that is no feature's, before anything is searched."""
    for j in range(len(indices)):  # what is outside would be written outside
        if indices[j] < 0 or indices[j] >= len(dense):
            return j
    for b in range(len(indptr) - 1):
        begin, end = indptr[b], indptr[b + 1]
        for j in range(begin, end):
            dense[indices[j]] = values[j]
        count = 1
        kept[0] = 0
        kept_ranks[0] = 0
        for level in range(last):
            total = 0
            for k in range(count):
                p = kept[k]
                first, children = first_child[p], first_child[p + 1] - first_child[p]
                for c in range(children):
                    candidates[total + c] = first + c
                    ranks[total + c] = bias[first + c]
                rows, at = chunk_row[p + 1] - chunk_row[p], chunk_row[p]
                if rows < end - begin:
                    for row in range(at, at + rows):
                        x = dense[row_feature[row]]
                        if x != 0:
                            for e in range(row_entry[row], row_entry[row + 1]):
                                ranks[total + entry_child[e]] += x * entry_weight[e]
                else:
                    start, size = table_from[p], table_from[p + 1] - table_from[p]
                    for j in range(begin, end):
                        if by_feature[p]:
                            row = place[start + indices[j]]
                        else:
                            slot = _slot(indices[j], size)
                            while place[start + slot] >= 0 and key[start + slot] != indices[j]:
                                slot = (slot + 1) & (size - 1)
                            row = place[start + slot]
                        if row >= 0:
                            x = values[j]
                            for e in range(row_entry[at + row], row_entry[at + row + 1]):
                                ranks[total + entry_child[e]] += x * entry_weight[e]
                for c in range(total, total + children):
                    if sigmoid:
                        own = min(ranks[c], np.float32(0)) - np.log1p(np.exp(-abs(ranks[c])))
                    else:
                        short = max(np.float32(1) - ranks[c], np.float32(0))
                        own = -short * short * short
                    ranks[c] = kept_ranks[k] + own
                total += children
            wanted = beam_size if level + 1 < last else m
            count = _keep_best(candidates, ranks, total, wanted, kept, kept_ranks, heap)
        for j in range(begin, end):
            dense[indices[j]] = 0
        order = np.argsort(-kept_ranks[:count], kind="mergesort")  # stable: the lower node number wins a tie
        for k in range(count):
            out[b, k] = kept[order[k]]
            out_ranks[b, k] = kept_ranks[order[k]]
    return -1


@njit(cache=True, nogil=True)
def _keep_best(candidates: Array, ranks: Array, total: int, wanted: int, kept: Array, kept_ranks: Array, heap: Array) -> int:
    """The best `wanted` candidates, in their order; of equal ones the first. How many they are."""
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
            _sink(heap, wanted, 0)
    threshold = heap[0]
    ties = wanted
    for c in range(total):
        if ranks[c] > threshold:
            ties -= 1
    count = 0
    for c in range(total):
        if ranks[c] < threshold or (ranks[c] == threshold and ties == 0):
            continue
        if ranks[c] == threshold:
            ties -= 1
        kept[count] = candidates[c]
        kept_ranks[count] = ranks[c]
        count += 1
    return count


@njit(cache=True, nogil=True)
def _sink(heap: Array, size: int, root: int) -> None:
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
