"""`compiled-cpu`: bundles whose scorer is an inner product, searched by compiled loops over the node rows.

ONNX Runtime makes the query states (`encoder.py`), compiled loops search the tree with them (`beam.py`). Rows are read where the bundle
maps them, as float32 or float16, which is widened as it is read: exact, half the bytes, and shared by all processes that serve the bundle.

Legend: B queries, L levels, S state, N nodes, D node row, X excluded nodes, M results, H levels below the root.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.compiled.beam import search_queries
from espalier.engines.compiled.encoder import QueryEncoder
from espalier.engines.frontiers import frontier_of
from espalier.engines.given_states import check_queries
from espalier.engines.scorer_weights import scorer_weights
from espalier.engines.stored_numbers import stored
from espalier.errors import InvalidQuery, UnsupportedGraph
from espalier.masks.eligibility import EligibleNodes, eligible_nodes, unrestricted_mask
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.queries import QueryBatch, VectorKind, blank_queries
from espalier.read_only import read_only
from espalier.scores import finish
from espalier.search import Frontier, LevelTrace, MemoryLookup, SearchParams, SearchResult
from espalier.trace import from_start_level
from espalier.tree import Tree

Array = NDArray[Any]
BLOCK = 256
"""Queries whose states are held at a time."""
PER_THREAD = 8
"""Queries that are worth a thread of their own."""
CHECKED_ROWS = 1 << 16
"""Node rows that are checked at a time."""
ALL_NODES, NO_NODES = np.empty(0, np.bool_), np.empty((0, 0), np.int64)
TRACED = ((-1, np.int64), (-np.inf, np.float32), (-np.inf, np.float32))
"""Padding and dtype of a trace's nodes, ranks and keys."""
NO_TRACE = tuple(np.empty((0, 0, 0), dtype) for _, dtype in (*TRACED, *TRACED))
NO_FRONTIER = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
NO_MEMORY = np.float32(0), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)


class CompiledEngine:
    """See the module. Any number of threads may search.

    threads  that the queries of one call are shared among
    Raises UnsupportedGraph where the scorer is not an inner product.
    """

    name = "compiled-cpu"
    rounding = 1e-3

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        if scorer_weights(bundle).layers:
            raise UnsupportedGraph("its scorer is not an inner product")
        self.bundle = bundle
        self._tree = tree = bundle.tree
        rows_ND = np.require(bundle.node_rows_ND, requirements=["C", "A"]).view(np.ndarray)
        if rows_ND.dtype == np.float16 and not all(
            np.isfinite(rows_ND[begin : begin + CHECKED_ROWS]).all() for begin in range(0, len(rows_ND), CHECKED_ROWS)
        ):
            rows_ND = rows_ND.astype(np.float32)  # infinities and NaN are not widened by shifting bits
        self._encoder = QueryEncoder(bundle, rows_ND)
        (self._rows_ND,) = read_only(stored(rows_ND))
        self._arrays = read_only(tree.level_offset, tree.first_child, tree.leaf_item)
        self._unrestricted = unrestricted_mask(tree)
        ranking = bundle.manifest.ranking
        self._gamma, self._log_sigmoid = np.float32(ranking.gamma), ranking.own == "log_activation"
        self._memory_tree = None if bundle.memory is None else MemoryTree(bundle.memory, tree)
        self._key_weight = np.float32(0 if bundle.memory is None else bundle.memory.key_weight)
        self._state_dim = bundle.graph_scorer.state_dim
        self._room = lru_cache(maxsize=64)(partial(room, tree))
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "compiled-search") if threads > 1 else None

    def warm_up(self) -> None:
        """Search once, which loads the compiled search."""
        self.search(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def prepare(self, params: SearchParams) -> None:
        """Nothing to build: filters, exclusions and traces need no other code."""

    def close(self) -> None:
        """End its threads. The session and the rows go with the engine."""
        if self._pool is not None:
            self._pool.shutdown()

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        tree, batch, kind = self._tree, len(queries), self.bundle.manifest.query
        memory_tree = None if self._memory_tree is None else params.memory or self._memory_tree
        if queries.kind is not kind and queries.kind != kind:
            raise InvalidQuery("queries", queries.kind, str(kind))
        check_queries(self.bundle, queries, params, None if memory_tree is None else memory_tree.item_count)
        eligible = eligible_nodes(tree, params, batch, self._unrestricted)
        excluded_BX = NO_NODES
        if eligible.excluded is not None:
            excluded_BX = np.concatenate([eligible.excluded.inner_BX, eligible.excluded.leaves_BX], axis=1)
        m = int(params.m_B.max(initial=0))
        most, widest = self._room(int(params.beam_size_B.max(initial=1)), m)
        traced = NO_TRACE
        if params.trace:
            shapes = (batch, tree.height, most), (batch, tree.height, widest)
            traced = tuple(np.full(shape, fill, dtype) for shape in shapes for fill, dtype in TRACED)
        beams: tuple[Array, ...] = NO_FRONTIER
        if params.frontier:
            leaf_states_BS = np.empty((batch, self._state_dim), np.float32)
            shape = batch, min(tree.level_size(tree.height - 1), int(params.beam_size_B.max(initial=1)))
            beams = np.empty(shape, np.int64), np.empty(shape, np.float32)
        rows_BM, finite_B = np.empty((batch, m), np.int64), np.empty(batch, np.bool_)
        ranks_BM, keys_BM = np.empty((batch, m), np.float32), np.empty((batch, m), np.float32)
        out: tuple[Array, ...] = rows_BM, ranks_BM, keys_BM, finite_B, *traced, *beams
        knobs = *read_only(params.beam_size_B, params.m_B), self._gamma, self._log_sigmoid, most, widest, params.trace
        groups = [(members, *read_only(ALL_NODES if mask is None else mask.eligible_N)) for members, mask in eligible.groups]

        first_B = self._first_levels(params)

        def run(begin: int, end: int) -> None:
            part = slice(begin, end)
            given_BLS = params.states_BLS
            states = self._encoder.states(queries.array[part], first_B[part]) if given_BLS is None else given_BLS[part]
            if params.frontier:
                leaf_states_BS[part] = states[:, -1]
            memory = self._memory_lists(memory_tree, queries, eligible, begin, end)
            for members, eligible_N in groups:
                positions = members if end - begin == batch else members[(members >= begin) & (members < end)]
                search_queries(positions, begin, states, self._arrays, self._rows_ND, eligible_N, excluded_BX, memory, knobs, out)

        step = min(BLOCK, max(PER_THREAD, -(-batch // self._threads)))
        begins = range(0, batch, step)
        ends = [min(begin + step, batch) for begin in begins]
        for _ in map(run, begins, ends) if self._pool is None or len(ends) == 1 else self._pool.map(run, begins, ends):
            pass
        trace = from_start_level(tree, params.beam_size_B, _levels(traced)) if params.trace else None
        vectors_finite_B = finite_B if isinstance(kind, VectorKind) else None
        ranking, frontiers = self.bundle.manifest.ranking, tuple[Frontier, ...]()
        if params.frontier and (self._gamma > 0 or beams[0].shape[1] < tree.level_size(tree.height - 1)):
            frontiers = (Frontier(beams[0], beams[1], leaf_states_BS),)
        elif params.frontier:
            frontiers = (frontier_of(tree, ranking.gamma, params.beam_size_B, eligible, beams[0], beams[1], leaf_states_BS),)
        return finish(ranking, params.m_B, eligible.items_B, rows_BM, ranks_BM, trace, vectors_finite_B, keys_BM, frontiers)

    def encode(self, queries: QueryBatch, params: SearchParams) -> NDArray[np.float32]:
        """float32[B, L, S]: the states of the levels that a search with these parameters scores, L = H + 1 or 1."""
        return self._encoder.states(queries.array, self._first_levels(params))

    def leaf_states(self, queries: QueryBatch) -> NDArray[np.float32]:
        """float32[B, S]: the states on the leaf level alone, which is what a scan of all items takes."""
        return self._encoder.states(queries.array, [self._tree.height] * len(queries))[:, -1]

    def _memory_lists(
        self, memory_tree: MemoryLookup | None, queries: QueryBatch, eligible: EligibleNodes, begin: int, end: int
    ) -> tuple[Any, ...]:
        """What compiled code takes of the memory of some queries."""
        if memory_tree is None:
            return NO_MEMORY
        if len(queries) != end - begin:
            excluded = None if eligible.excluded is None else eligible.excluded.take(np.arange(begin, end))
            eligible = EligibleNodes(eligible.items_B[begin:end], eligible.mask_B[begin:end], excluded)
        lists: MemoryLists = memory_tree.lists(queries.array[begin:end], eligible)
        return self._key_weight, lists.offset_B, lists.nodes, lists.values

    def _first_levels(self, params: SearchParams) -> list[int]:
        """The first level that is scored for each query: with γ = 0 the ranks of levels that fit the beam change nothing."""
        if self._gamma > 0 or params.trace:
            return [1] * len(params.beam_size_B)
        return [self._tree.start_level(size) for size in params.beam_size_B.tolist()]


def room(tree: Tree, beam_size: int, m: int) -> tuple[int, int]:
    """The most candidates and the most kept nodes of a level, in a search with at most such a beam and m."""
    kept, most, widest = 1, 1, 1
    for level in range(tree.height):
        candidates = min(kept * tree.max_children[level], tree.level_size(level + 1))
        kept = min(candidates, beam_size if level + 1 < tree.height else m)
        most, widest = max(most, candidates), max(widest, kept)
    return most, widest


def _levels(traced: tuple[Array, ...]) -> tuple[LevelTrace, ...]:
    """Every level: for a trace all are scored."""
    candidates_BHC, ranks_BHC, keys_BHC, kept_BHK, kept_ranks_BHK, kept_keys_BHK = traced
    return tuple(
        LevelTrace(h + 1, kept_BHK[:, h], kept_ranks_BHK[:, h], candidates_BHC[:, h], ranks_BHC[:, h], kept_keys_BHK[:, h], keys_BHC[:, h])
        for h in range(kept_BHK.shape[1])
    )
