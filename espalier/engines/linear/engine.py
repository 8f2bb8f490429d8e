"""`sparse-cpu`: bundles of linear node scorers, searched by compiled loops over their chunks.

Knows masks, exclusions, traces and frontiers. Does not know how a level is scored and pruned: see `chunk_search.py`.

Legend: B queries, X excluded nodes, N nodes, M results, K beam, H levels below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.forest import ForestEngine, ScoredLeaves, refuse_forest
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch, Found, TracedLevel
from espalier.engines.linear.joint_search import EVERY_LEAF, JointSearch
from espalier.errors import InvalidQuery
from espalier.frontier import without_unscored
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.queries import QueryBatch, blank_queries
from espalier.scores import finish
from espalier.search import NO_ITEM, Engine, Frontier, LevelTrace, SearchParams, SearchResult
from espalier.trace import from_start_level


def open_sparse_cpu(bundle: Bundle, threads: int = 1) -> Engine:
    """The engine of a bundle of one tree, or of a forest."""
    engines = [SparseCpuEngine(alone, threads) for alone in bundle.alone]
    return engines[0] if len(engines) == 1 else SparseForestEngine(bundle, engines)


class SparseForestEngine(ForestEngine):
    """A forest whose single queries without filters, exclusions and traces are searched in one call, see `joint_search`.

    joint  None where they are not
    """

    def __init__(self, bundle: Bundle, engines: Sequence[SparseCpuEngine]) -> None:
        super().__init__(bundle, engines)
        searches = [engine.chunk_search for engine in engines]
        is_plain = self.by_rank and all(search.tables.by_feature for search in searches)
        unrestricted = all(engine.unrestricted is None for engine in engines)
        self.joint: JointSearch | None = None
        if is_plain and unrestricted:
            self.joint = JointSearch([alone.tree for alone in bundle.alone], searches)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        if self.joint is None or len(queries) != 1 or params.trace or params.frontier or params.mask_B or params.exclude_BE is not None:
            return super().search(queries, params)
        check_kind(queries, self.bundle)
        params.check(1, self.items)
        shape = 1, int(params.m_B[0])
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        with self.means_scratch.of() as scratch:
            self.joint.search(queries.features, params.beam_size_B, params.m_B, *scratch, (rows_BM, ranks_BM))
        return finish(self.result_ranking, params.m_B, np.full(1, self.items), rows_BM, ranks_BM, None)


def check_kind(queries: QueryBatch, bundle: Bundle) -> None:
    """Raise InvalidQuery for queries of another kind than the bundle's."""
    kind = bundle.manifest.query
    if queries.kind is not kind and queries.kind != kind:
        raise InvalidQuery("queries", queries.kind, str(kind))


class SparseCpuEngine:
    """See the module; of one tree. `rounding` bounds the difference of ranks whose float32 sums have another order, for logits of a
    few units.
    """

    name = "sparse-cpu"
    rounding = 1e-4

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        refuse_forest(bundle)
        self.bundle = bundle
        self._tree, self._ranking = bundle.tree, bundle.manifest.ranking
        self.chunk_search = ChunkSearch(self._tree, bundle.chunks, self._ranking, threads=threads)
        self.unrestricted = unrestricted_mask(self._tree)

    def warm_up(self) -> None:
        """Search once, which loads the compiled search."""
        self.search(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def prepare(self, params: SearchParams) -> None:
        """Nothing to build: a trace needs no other code."""

    def close(self) -> None:
        """End its threads."""
        self.chunk_search.close()

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters are not the bundle's."""
        tree = self._tree
        found, eligible_B = self._found(queries, params, params.m_B)
        places_BM = found.leaves_BM - tree.leaf_offset
        if len(places_BM) != 1 or found.count_B[0] < places_BM.shape[1]:
            rows_BM = np.where(places_BM >= 0, tree.leaf_item[np.maximum(places_BM, 0)], NO_ITEM)
        else:
            rows_BM = tree.leaf_item.take(places_BM)
        result = finish(self._ranking, params.m_B, eligible_B, rows_BM, found.ranks_BM, self._trace(found, params))
        frontier = self._frontier(found, params)
        return result if frontier is None else replace(result, frontiers=(frontier,))

    def most_leaves(self, beam_size: int) -> int:
        return self.chunk_search.most_results(beam_size)

    def scored_leaves(self, queries: QueryBatch, params: SearchParams) -> ScoredLeaves:
        every_B = EVERY_LEAF if len(queries) == 1 else np.zeros(len(queries), np.int64)
        found, eligible_B = self._found(queries, params, every_B)
        frontier = self._frontier(found, params)
        return ScoredLeaves(found.leaves_BM, found.ranks_BM, found.count_B, eligible_B, self._trace(found, params), frontier)

    def _found(self, queries: QueryBatch, params: SearchParams, m_B: NDArray[np.int64]) -> tuple[Found, NDArray[np.int64]]:
        """The leaves of the queries and how many items are eligible; m_B as in `BeamParams`."""
        check_kind(queries, self.bundle)
        eligible = eligible_nodes(self._tree, params, len(queries), self.unrestricted)
        if eligible.excluded is None and params.mask_B is None and self.unrestricted is None:
            beams = BeamParams(params.beam_size_B, m_B)
            return self.chunk_search.search(queries.features, beams, params.trace, params.frontier), eligible.items_B
        excluded = eligible.excluded
        excluded_BX = None if excluded is None else np.concatenate([excluded.leaves_BX, excluded.inner_BX], axis=1)
        groups = None
        if any(mask is not None for mask in eligible.mask_B):
            groups = [(members, None if mask is None else mask.eligible_N) for members, mask in eligible.groups]
        beams = BeamParams(params.beam_size_B, m_B, groups, excluded_BX)
        return self.chunk_search.search(queries.features, beams, params.trace, params.frontier), eligible.items_B

    def _trace(self, found: Found, params: SearchParams) -> tuple[LevelTrace, ...] | None:
        return None if found.trace is None else from_start_level(self._tree, params.beam_size_B, _levels(found.trace))

    def _frontier(self, found: Found, params: SearchParams) -> Frontier | None:
        frontier = found.frontier
        if params.frontier and found.trace is not None:
            frontier = _above_leaves(found.trace)
        return None if frontier is None else without_unscored(self._tree, self._ranking.gamma, params.beam_size_B, frontier)


def _above_leaves(trace: tuple[TracedLevel, ...]) -> Frontier:
    """The frontier of a trace of every level but the root's."""
    if len(trace) > 1:
        return Frontier(trace[-2].kept_BK, trace[-2].kept_ranks_BK)
    root_B1 = np.zeros((len(trace[0].kept_BK), 1), np.int64)
    return Frontier(root_B1, root_B1.astype(np.float32))


def _levels(trace: tuple[TracedLevel, ...]) -> tuple[LevelTrace, ...]:
    """Every level: with γ > 0 all are scored."""
    return tuple(
        LevelTrace(h, level.kept_BK, level.kept_ranks_BK, level.candidates_BC, level.ranks_BC, level.kept_ranks_BK, level.ranks_BC)
        for h, level in enumerate(trace, start=1)
    )
