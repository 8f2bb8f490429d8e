"""`compiled-cpu`: bundles whose scorer is an inner product or an MLP, searched by compiled loops over the node rows (`beam.py`).

Rows are float32, float16 or int8 in the bundle's mapped file. They are widened as they are read, which is exact, reads fewer bytes and
shares the memory among all processes that serve the bundle.

Legend: B queries, N nodes, D node row, X excluded nodes, M results, K beam, H levels below the root.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from espalier.arrays import Array, read_only
from espalier.bundle import Bundle
from espalier.engines.compiled.beam import search_queries
from espalier.engines.compiled.mlp import packed
from espalier.engines.scorer_weights import ScorerWeights, scorer_weights
from espalier.engines.stages import Leaves, TreeQuery, TreeSearch
from espalier.search import Frontier, LevelTrace
from espalier.stored_numbers import stored
from espalier.tree import Tree

PER_THREAD = 8
"""Fewest queries for which another thread pays."""
CHECKED_ROWS = 1 << 16
"""Node rows that are checked at a time."""
ALL_NODES, NO_NODES = np.empty(0, np.bool_), np.empty((0, 0), np.int64)
TRACED = ((-1, np.int64), (-np.inf, np.float32), (-np.inf, np.float32))
"""Padding and dtype of a trace's nodes, ranks and keys."""
NO_TRACE = tuple(np.empty((0, 0, 0), dtype) for _, dtype in (*TRACED, *TRACED))
NO_FRONTIER = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
NO_MEMORY: tuple[Any, ...] = np.float32(0), *read_only(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


class DenseSearch(TreeSearch):
    """See the module. Any number of threads may search.

    rows_ND      as a bundle stores them; they may be mapped
    gamma        γ of the ranks
    log_sigmoid  whether own is the log of a logit's sigmoid, not the logit
    key_weight   λ of a memory; 0: there is none
    threads      the queries of one call are split among them
    """

    name = "compiled-cpu"
    rounding = 1e-3

    def __init__(
        self, tree: Tree, rows_ND: Array, scorer: ScorerWeights, gamma: float, log_sigmoid: bool, key_weight: float = 0.0, threads: int = 1
    ) -> None:
        self._scorer, self._tree = packed(scorer), tree
        rows_ND = np.require(rows_ND, requirements=["C", "A"])
        if rows_ND.dtype == np.float16 and not all(
            np.isfinite(rows_ND[begin : begin + CHECKED_ROWS]).all() for begin in range(0, len(rows_ND), CHECKED_ROWS)
        ):
            rows_ND = rows_ND.astype(np.float32)  # infinities and NaN are not widened by shifting bits
        (self._rows_ND,) = read_only(stored(rows_ND))
        self._arrays = read_only(tree.level_offset, tree.first_child, tree.leaf_item)
        self._gamma, self._log_sigmoid, self._key_weight = np.float32(gamma), log_sigmoid, np.float32(key_weight)
        self._room = lru_cache(maxsize=64)(partial(room, tree))
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "compiled-search") if threads > 1 else None

    @classmethod
    def of(cls, bundle: Bundle, threads: int = 1) -> DenseSearch:
        """The search of a bundle. Raises UnsupportedGraph where its scorer has another form than these two."""
        ranking, key_weight = bundle.manifest.ranking, 0.0 if bundle.memory is None else bundle.memory.key_weight
        scorer, log_sigmoid = scorer_weights(bundle), ranking.own == "log_activation"
        return cls(bundle.tree, bundle.stored_rows, scorer, ranking.gamma, log_sigmoid, key_weight, threads)

    def close(self) -> None:
        """End its threads. The rows go with the engine."""
        if self._pool is not None:
            self._pool.shutdown()

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`."""
        tree, batch, (eligible,) = self._tree, len(query), query.eligible_T
        if query.states_BLS is None:
            raise ValueError("queries without states")
        excluded_BX = NO_NODES
        if eligible.excluded is not None:
            excluded_BX = np.concatenate([eligible.excluded.inner_BX, eligible.excluded.leaves_BX], axis=1)
        m, beam_size = (int(query.m_B[0]), int(query.beam_size_B[0])) if batch == 1 else _largest(query)
        max_candidates, max_kept = self._room(beam_size, m)
        traced: tuple[Array, ...] = NO_TRACE
        if query.trace:
            shapes = (batch, tree.height, max_candidates), (batch, tree.height, max_kept)
            traced = tuple(np.full(shape, fill, dtype) for shape in shapes for fill, dtype in TRACED)
        beams: tuple[Array, ...] = NO_FRONTIER
        if query.frontier:
            shape = batch, min(tree.level_size(tree.height - 1), beam_size)
            beams = np.empty(shape, np.int64), np.empty(shape, np.float32)
        rows_BM, count_B, finite_B = np.empty((batch, m), np.int64), np.empty(batch, np.int64), np.empty(batch, np.bool_)
        ranks_BM, keys_BM = np.empty((batch, m), np.float32), np.empty((batch, m), np.float32)
        out: tuple[Array, ...] = rows_BM, ranks_BM, keys_BM, count_B, finite_B, *traced, *beams
        knobs = *read_only(query.beam_size_B, query.m_B), self._gamma, self._log_sigmoid, max_candidates, max_kept, query.trace
        memory = NO_MEMORY
        if query.memory is not None:
            memory = self._key_weight, *read_only(query.memory.offset_B, query.memory.nodes, query.memory.values)
        groups = [(members, *read_only(ALL_NODES if mask is None else mask.eligible_N)) for members, mask in eligible.groups]
        states_BLS, excluded_BX = read_only(query.states_BLS, excluded_BX)

        def run(begin: int, end: int) -> None:
            for members, eligible_N in groups:
                positions = members if end - begin == batch else members[(members >= begin) & (members < end)]
                search_queries(
                    positions, states_BLS, self._arrays, self._rows_ND, self._scorer, eligible_N, excluded_BX, memory, knobs, out
                )

        step = batch if self._pool is None else max(PER_THREAD, -(-batch // self._threads))
        begins = range(0, batch, max(step, 1))
        ends = [min(begin + step, batch) for begin in begins]
        for _ in map(run, begins, ends) if self._pool is None else self._pool.map(run, begins, ends):
            pass
        traces, frontiers = (_levels(traced),) if query.trace else (), (Frontier(*beams),) if query.frontier else ()
        return Leaves(rows_BM[:, None], ranks_BM[:, None], keys_BM[:, None], count_B[:, None], finite_B, traces, frontiers)


def _largest(query: TreeQuery) -> tuple[int, int]:
    """The largest m and beam size."""
    return int(query.m_B.max(initial=0)), int(query.beam_size_B.max(initial=1))


def room(tree: Tree, beam_size: int, m: int) -> tuple[int, int]:
    """The most candidates and the most kept nodes of a level, in a search with at most such a beam and m."""
    beam, max_candidates, max_kept = 1, 1, 1
    for level in range(tree.height):
        candidates = min(beam * tree.max_children[level], tree.level_size(level + 1))
        beam = min(candidates, beam_size if level + 1 < tree.height else m)
        max_candidates, max_kept = max(max_candidates, candidates), max(max_kept, beam)
    return max_candidates, max_kept


def _levels(traced: tuple[Array, ...]) -> tuple[LevelTrace, ...]:
    """Every level: with a trace all levels are scored."""
    candidates_BHC, ranks_BHC, keys_BHC, kept_BHK, kept_ranks_BHK, kept_keys_BHK = traced
    return tuple(
        LevelTrace(h + 1, kept_BHK[:, h], kept_ranks_BHK[:, h], candidates_BHC[:, h], ranks_BHC[:, h], kept_keys_BHK[:, h], keys_BHC[:, h])
        for h in range(kept_BHK.shape[1])
    )
