"""All trees of a forest in one compiled call, for a single query without filters: calls and checks by tree took longer than its search.

The trees' tables lie one after the other (`FeatureTables.joined`), so that nothing is held twice. Trees whose tables are by node are
searched one by one.

Legend: T trees, N nodes, C leaves that a tree scored, X scored (item, tree) pairs, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.forest import NOTHING_LIVE, best_means
from espalier.engines.linear.beam import search_queries
from espalier.engines.linear.chunk_search import ALL_NODES, NO_NODES, NO_TRACE, ChunkSearch, refuse
from espalier.engines.linear.feature_tables import FeatureTables
from espalier.read_only import read_only
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

Array = NDArray[Any]
(EVERY_LEAF,) = read_only(np.zeros(1, np.int64))
"""The m of one query that wants all leaves that are scored."""


class JointSearch:
    """Searches all trees; one search at a time."""

    def __init__(self, trees: Sequence[Tree], searches: Sequence[ChunkSearch]) -> None:
        self._searches, self.width = searches, searches[0].width
        together, alone = FeatureTables.joined([search.tables for search in searches], self.width)
        for search, tables in zip(searches, alone, strict=True):
            search.tables = tables
        self._tables = tuple(together)
        nodes = [np.concatenate([np.full(tree.leaf_offset, -1, np.int64), tree.leaf_item]) for tree in trees]
        (self._item_N, self._positions_T) = read_only(np.concatenate(nodes).astype(np.int32), np.arange(len(trees)))
        self._marks = np.zeros(self.width, np.float32), np.zeros(len(self._item_N), np.bool_)
        self._beam_size, self._most, self._frontier_width = 0, 0, 0
        self._work: tuple[Array, ...] = ()

    def search(
        self, query: SparseRows, beam_size_B: Array, m_B: Array, tail: tuple[Any, Array], place_I: Array, out: tuple[Array, Array]
    ) -> None:
        """Write the best items of one query, and their ranks. Raises InvalidQuery as `ChunkSearch.search`.

        tail, place_I  of `best_means` · out  rows_BM and ranks_BM
        """
        arguments = self.arguments(query, beam_size_B)
        wrong = _search(*arguments, ALL_NODES, m_B, tail, place_I, *out, NOTHING_LIVE)
        if wrong >= 0:
            refuse(query, wrong, self.width)

    def arguments(self, query: SparseRows, beam_size_B: Array, frontier: bool = False) -> tuple[Any, ...]:
        """What `_search` takes first: all but masks and what becomes of the leaves. frontier: with room for the beams above them."""
        if query.width != self.width:
            refuse(query, -1, self.width)
        if self._beam_size != beam_size_B[0]:
            self._make_room(int(beam_size_B[0]))
        shape, traced = (len(self._searches), self._most), NO_TRACE
        if frontier:
            beams = len(self._searches), 1, self._frontier_width
            traced = *NO_TRACE[:2], np.full(beams, -1, np.int64), np.full(beams, -np.inf, np.float32)
        found = np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape[0], np.int64), *traced
        queries = *query.arrays, *read_only(beam_size_B, EVERY_LEAF, NO_NODES)
        return self._positions_T, queries, self._tables, self._searches[0].ranker, self._work, found, self._item_N

    def _make_room(self, beam_size: int) -> None:
        """Workspaces for the largest tree."""
        each = [search.room(beam_size, 0) for search in self._searches]
        self._work = (*self._marks, *(max(arrays, key=len) for arrays in zip(*each, strict=True)))
        self._beam_size, self._most = beam_size, max(search.most_results(beam_size) for search in self._searches)
        self._frontier_width = max(search.frontier_width(beam_size) for search in self._searches)


@compiled()
def _search(
    positions_T: Array, queries: tuple[Array, ...], tables: tuple[Array, ...], ranker: tuple[Any, int], work: tuple[Array, ...],
    found: tuple[Array, ...], item_N: Array, eligible_N: Array, m_B: Array, tail: tuple[Any, Array], place_I: Array, rows_BM: Array,
    ranks_BM: Array, live: tuple[Any, ...],
) -> int:  # fmt: skip
    """`search_queries` of one query in every tree, then `best_means`; what the first returns."""
    wrong: int = search_queries(positions_T, queries, tables, eligible_N, ranker, work, found)
    if wrong >= 0:
        return wrong
    items_BX, logs_BX, count_B = scored_items(found, item_N, 0)
    best_means(items_BX, logs_BX, count_B, len(positions_T), m_B, queries[:3], tail, place_I, rows_BM, ranks_BM, live)
    return -1


@compiled()
def scored_items(found: tuple[Array, ...], item_N: Array, more: int) -> tuple[Array, Array, Array]:
    """Items, logs of scores and how many, as `best_means` takes them, of one query in every tree, with room for some more."""
    nodes_TC, ranks_TC, count_T = found[0], found[1], found[2]
    count_B = np.zeros(1, np.int64)
    count_B[0] = count_T.sum()
    items_BX, logs_BX = np.empty((1, count_B[0] + more), np.int32), np.empty((1, count_B[0] + more), np.float32)
    at = 0
    for t in range(len(count_T)):
        for c in range(count_T[t]):
            items_BX[0, at], logs_BX[0, at] = item_N[nodes_TC[t, c]], ranks_TC[t, c]
            at += 1
    return items_BX, logs_BX, count_B
