"""`sparse-cpu`: bundles of linear node scorers, searched by compiled loops over their chunks.

Knows masks, exclusions and threads. How a level is scored and pruned is chunk_search's.

Legend: B queries, X excluded nodes, N nodes, M results, H levels below the root.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch, Trace
from espalier.errors import InvalidQuery
from espalier.masks.eligibility import every_item, excluded_nodes
from espalier.queries import QueryBatch, blank_queries
from espalier.scores import finish
from espalier.search import NO_ITEM, LevelTrace, SearchParams, SearchResult


class SparseCpuEngine:
    """See the module. `rounding` is what float32 sums in another order may make of a rank, for logits of a few units, as training makes."""

    name = "sparse-cpu"
    rounding = 1e-4

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self.bundle = bundle
        self._tree, self._ranking = bundle.tree, bundle.manifest.ranking
        self._search = ChunkSearch(self._tree, bundle.chunks, self._ranking, threads=threads)
        self._whole = None if self._tree.item_count == self._tree.leaf_count else every_item(self._tree)

    def warm_up(self) -> None:
        """Compile the search, where no earlier run has left it in the cache."""
        self.search(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def prepare(self, params: SearchParams) -> None:
        """Nothing to build: a trace needs no other code."""

    def close(self) -> None:
        """End its threads."""
        self._search.close()

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters are not the bundle's."""
        tree = self._tree
        kind = self.bundle.manifest.query
        if queries.kind is not kind and queries.kind != kind:
            raise InvalidQuery("queries", queries.kind, str(self.bundle.manifest.query))
        params.check(len(queries), tree.item_count, tree.node_count)
        excluded = None if params.exclude_BE is None else excluded_nodes(tree, params.exclude_BE, params.mask_B)
        eligible_B = np.full(len(queries), tree.item_count, np.int64)
        if params.mask_B is not None:
            eligible_B[:] = [tree.item_count if mask is None else mask.items for mask in params.mask_B]
        if excluded is not None:
            eligible_B -= excluded.count_B
        excluded_BX = None if excluded is None else np.concatenate([excluded.leaves_BX, excluded.inner_BX], axis=1)
        found = self._search.search(
            queries.features, BeamParams(params.beam_size_B, params.m_B, self._groups(params), excluded_BX), params.trace
        )
        rows_BM = np.where(found.leaves_BM >= 0, tree.leaf_item[np.maximum(found.leaves_BM - tree.leaf_offset, 0)], NO_ITEM)
        trace = None if found.trace is None else _levels(found.trace)
        return finish(self._ranking, params.m_B, eligible_B, rows_BM, found.ranks_BM, trace)

    def _groups(self, params: SearchParams) -> list[tuple[NDArray[np.int64], NDArray[np.bool_] | None]] | None:
        """The queries of each mask; a tree with empty leaves has one for queries without."""
        everything = None if self._whole is None else self._whole.eligible_N
        if params.mask_B is None:
            return None if everything is None else [(np.arange(len(params.m_B)), everything)]
        masks = dict.fromkeys(params.mask_B)
        queries = [np.flatnonzero([other is mask for other in params.mask_B]) for mask in masks]
        return [(rows, everything if mask is None else mask.eligible_N) for rows, mask in zip(queries, masks, strict=True)]


def _levels(trace: Trace) -> tuple[LevelTrace, ...]:
    """Every level: with γ > 0 all are scored."""
    return tuple(
        LevelTrace(h + 1, trace.kept_BHK[:, h], trace.kept_ranks_BHK[:, h], trace.candidates_BHC[:, h], trace.ranks_BHC[:, h])
        for h in range(trace.kept_BHK.shape[1])
    )
