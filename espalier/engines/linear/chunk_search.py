"""The beam search over linear node scorers on a CPU: a tree or all trees of a forest, any number of queries and threads.

Checks what compiled code trusts, and splits queries among threads. The tables are in `feature_tables.py`, the compiled loops in `beam.py`.
The nodes of several trees are numbered tree after tree. Results have B · T rows: for each query, one row for each tree.

Legend: B queries, T trees, N nodes, X excluded nodes, M results, H levels, C candidates, K beam.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple, NoReturn

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int64, read_only
from espalier.chunks import Chunks, TreeChunks
from espalier.engines.linear.beam import search_queries
from espalier.engines.linear.feature_tables import FeatureTables
from espalier.errors import InvalidQuery
from espalier.manifest import Ranking
from espalier.search import Frontier
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

L3_HINGE = Ranking(activation="l3-hinge", own="log_activation", gamma=1)
"""How XR-Linear ranks: by the product of exp(−max(0, 1 − v)³) along the path (PECOS §3.4)."""
PER_THREAD = 8
"""Fewest queries for which another thread pays."""
ALL_NODES, NO_NODES = read_only(np.empty(0, np.bool_), np.empty((0, 0), np.int64))
NO_TRACE = tuple(np.empty((0, 0, 0), dtype) for dtype in (np.int64, np.float32, np.int64, np.float32))


def power_of(ranking: Ranking) -> int:
    """What a node adds to its rank, as compiled code and kernels read it: the power of a hinge, 0 for the sigmoid, −1 for the logit."""
    if ranking.own == "logit":
        return -1
    return 0 if ranking.activation == "sigmoid" else int(ranking.activation[1])


class BeamParams(NamedTuple):
    """How each query of a call is searched.

    beam_size_B, m_B  int64[B], at least 1. If m is 0 for all queries, every scored node of the last level is a result
    groups            (query positions int64, eligible-node mask bool[N]) pairs. A mask of None makes every node eligible. None leaves all
                      queries unrestricted
    excluded_BX       int64[B, X]: nodes that each query excludes in addition, −1 as padding; None: no such nodes
    """

    beam_size_B: Int64
    m_B: Int64
    groups: Sequence[tuple[Int64, Bool | None]] | None = None
    excluded_BX: Int64 | None = None

    @staticmethod
    def uniform(batch: int, beam_size: int, m: int) -> BeamParams:
        """The same beam size and m for every query, all nodes eligible."""
        return BeamParams(np.full(batch, beam_size, np.int64), np.full(batch, m, np.int64))


class ChunkResults(NamedTuple):
    """leaves_BM int64[B, M], best first, −1 as padding; ranks_BM float32[B, M], −inf for padding; count_B int64[B]: how many leaves a
    query has. Several trees have B · T rows.

    With an m of 0 leaves are in ascending order, and entries past a query's count are undefined.
    trace     of one query: the trace arrays of `search_queries`, from the root's children on
    frontier  the nodes whose children were scored
    """

    leaves_BM: Int64
    ranks_BM: Float32
    count_B: Int64
    trace: Sequence[Array] = ()
    frontier: Frontier | None = None


class ChunkSearch:
    """Searches trees of linear scorers. Searches of several threads wait for each other; each may use several threads itself.

    last     the level whose nodes are the results: the leaves by default, an inner level while those below are still being trained
    threads  the queries of one search are split among them
    """

    def __init__(self, tree: Tree, chunks: Chunks, ranking: Ranking = L3_HINGE, last: int | None = None, threads: int = 1) -> None:
        self._last = tree.height if last is None else last
        self.ranker = np.float32(ranking.gamma), power_of(ranking)
        self._lock = threading.Lock()
        self._open([tree], FeatureTables.of(tree, chunks, self._last), chunks.width, threads)
        self._pool = ThreadPoolExecutor(threads, "chunk-search") if threads > 1 else None

    @staticmethod
    def of_forest(trees: Sequence[TreeChunks], ranking: Ranking, threads: int) -> list[ChunkSearch]:
        """The searches of a forest: a joint one if all tables are by feature, which saves calls and checks; otherwise one for each tree."""
        searches = [ChunkSearch(tree, chunks, ranking, threads=threads) for tree, chunks in trees]
        if len(searches) == 1 or not all(search.tables.by_feature for search in searches):
            return searches
        first, *unused = searches
        for search in unused:
            search.close()
        tables = FeatureTables.joined([search.tables for search in searches], first.width)
        first._last = max(tree.height for tree, _ in trees)
        first._open([tree for tree, _ in trees], tables, first.width, threads)
        return [first]

    def _open(self, trees: Sequence[Tree], tables: FeatureTables, width: int, threads: int) -> None:
        self.trees, self.tables, self.width = tuple(trees), tables, width
        self._tables, (self._one_query,) = tuple(tables), read_only(np.arange(len(trees)))
        nodes = sum(tree.node_count for tree in trees)
        self._marks = [(np.zeros(width, np.float32), np.zeros(nodes, np.bool_)) for _ in range(threads)]
        self._workspaces: list[tuple[Array, ...]] = []
        self._room, self._sizes, self._max_results, self._frontier_width = (0, 0), (0, 0), 0, 0

    def close(self) -> None:
        """End the threads. No search after it."""
        if self._pool is not None:
            self._pool.shutdown()

    def search(self, queries: SparseRows, params: BeamParams, trace: bool = False, frontier: bool = False) -> ChunkResults:
        """The best m nodes of the last level for each query.

        A trace is of a single query, and holds the frontier as one of its levels.

        Raises InvalidQuery where a feature number is out of range, or a value is not finite.
        """
        if len(queries) == 0:
            return ChunkResults(np.empty((0, 0), np.int64), np.empty((0, 0), np.float32), np.empty(0, np.int64))
        largest = int(params.beam_size_B[0]), int(params.m_B[0])
        if len(queries) > 1:
            largest = int(params.beam_size_B.max()), int(params.m_B.max())
        if queries.width != self.width:
            refuse(queries, -1, self.width)
        excluded_BX = NO_NODES if params.excluded_BX is None else params.excluded_BX
        arrays = *queries.arrays, *read_only(params.beam_size_B, params.m_B, excluded_BX)
        with self._lock:
            if self._room != largest:
                self._make_room(*largest)
            out = self._results(len(queries) * len(self.trees), largest[1] or self._max_results, trace, frontier)
            if len(queries) == 1:
                eligible_N = ALL_NODES if params.groups is None else params.groups[0][1]
                masks = ALL_NODES if eligible_N is None else read_only(eligible_N)[0]
                wrong_entry = search_queries(self._one_query, arrays, self._tables, masks, self.ranker, self._workspaces[0], out)
            else:
                wrong_entry = self._search_groups(params.groups or [(np.arange(len(queries)), None)], arrays, out)
        if wrong_entry >= 0:
            refuse(queries, wrong_entry, self.width)
        leaves_BM, ranks_BM, count_B, *traced = out
        if frontier and not trace:
            return ChunkResults(leaves_BM, ranks_BM, count_B, frontier=Frontier(traced[2][:, 0], traced[3][:, 0]))
        return ChunkResults(leaves_BM, ranks_BM, count_B, traced if trace else ())

    def _search_groups(self, groups: Sequence[tuple[Int64, Bool | None]], arrays: tuple[Array, ...], out: tuple[Array, ...]) -> int:
        """Call `search_queries` for each mask, in several threads if that pays; returns as it does."""

        def run(work: tuple[Array, ...], positions: Array, eligible_N: Array) -> int:
            entry: int = search_queries(positions, arrays, self._tables, eligible_N, self.ranker, work, out)
            return entry

        wrong_entry = -1
        trees = len(self.trees)
        for group, mask in groups:
            rows = group if trees == 1 else (group * trees + np.arange(trees)[:, None]).ravel()  # a tree at a time, which caches better
            positions, eligible_N = read_only(rows, ALL_NODES if mask is None else mask)
            if self._pool is None or len(positions) < 2 * PER_THREAD:
                wrong_entry = max(wrong_entry, run(self._workspaces[0], positions, eligible_N))
            else:
                shares = np.array_split(positions, min(len(self._workspaces), len(positions) // PER_THREAD))
                wrong_entry = max(wrong_entry, *self._pool.map(run, self._workspaces, read_only(*shares), repeat(eligible_N)))
        return wrong_entry

    def _max_candidates(self, beam_size: int) -> list[int]:
        """The most candidates of each level in any tree. A lower tree counts on the levels below it as on its last one."""
        max_candidates = [0] * (self._last + 1)
        for tree in self.trees:
            candidates = [1]
            for level in range(min(self._last, tree.height)):
                beam = min(candidates[-1], beam_size)
                candidates.append(min(beam * tree.max_children[level], tree.level_size(level + 1)))
            candidates += candidates[-1:] * (self._last + 1 - len(candidates))
            max_candidates = [max(pair) for pair in zip(max_candidates, candidates, strict=True)]
        return max_candidates

    def _make_room(self, beam_size: int, m: int) -> None:
        """Allocate workspaces for the largest beam and the most candidates of a search with this beam size and m."""
        candidates = self._max_candidates(beam_size)
        most, widest = max(candidates), min(max(candidates), max(beam_size, m or candidates[-1]))
        sizes = (widest, np.int64), (widest, np.float32), (most, np.int64), (most, np.float32), (most, np.int32), (widest, np.int64)
        self._workspaces = [(*marks, *(np.empty(size, dtype) for size, dtype in sizes)) for marks in self._marks]
        self._room, self._sizes, self._max_results = (beam_size, m), (most, widest), candidates[-1]
        self._frontier_width = min(beam_size, max(candidates[:-1]))

    def _results(self, batch: int, m: int, trace: bool, frontier: bool) -> tuple[Array, ...]:
        """The arrays that a search writes, `out` of `search_queries`. Those of a trace have room for the most candidates on every level."""
        traced = NO_TRACE
        if frontier and not trace:
            shape = batch, 1, self._frontier_width
            traced = *NO_TRACE[:2], np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
        elif trace:
            traced = tuple(
                np.full((batch, self._last, size), padding, dtype)
                for size in self._sizes
                for padding, dtype in ((-1, np.int64), (-np.inf, np.float32))
            )
        return np.empty((batch, m), np.int64), np.empty((batch, m), np.float32), np.empty(batch, np.int64), *traced


def refuse(queries: SparseRows, entry: int, width: int) -> NoReturn:
    """Raise InvalidQuery for queries of another width than the scorers' (entry −1), or for the entry that `search_queries` returned."""
    if entry < 0:
        raise InvalidQuery("features", f"rows of {queries.width} features", f"rows of {width}")
    if not np.isfinite(queries.values[entry]):
        raise InvalidQuery("features.values", float(queries.values[entry]), "finite numbers")
    raise InvalidQuery("features.indices", int(queries.indices[entry]), f"feature numbers from 0 to {width - 1}")
