"""A forest that is cut into shards: these give the means over all trees of the items that they hold, and live items get theirs here.

No item is both trained and live, so the best of both are the best of the whole. Knows what `LiveForestEngine` wants of a forest's engine.

Legend: B queries, M results, C live leaves under a query's beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from espalier.engines.forest import ForestEngine, LiveParts, ScoredLeaves

from espalier.bundle import Bundle
from espalier.queries import QueryBatch, blank_queries
from espalier.scores import finish
from espalier.search import NO_ITEM, Frontier, SearchParams, SearchResult
from service.router.engine import ShardedEngine
from service.router.merge import merged


class ShardedForest(ForestEngine):
    """See the module. Its trees have no engines here."""

    def __init__(self, bundle: Bundle, shards: ShardedEngine) -> None:
        super().__init__(bundle, ())
        self._shards = shards

    @property
    def name(self) -> str:
        return self._shards.name

    @property
    def rounding(self) -> float:
        return self._shards.rounding

    def warm_up(self) -> None:
        """One search, which loads the mean of live items."""
        self.search(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def prepare(self, params: SearchParams) -> None:
        """Shards prepare by themselves."""

    def close(self) -> None:
        self._shards.close()

    def search_trees(
        self, queries: QueryBatch, params: SearchParams, params_T: Sequence[SearchParams], live: LiveParts | None = None
    ) -> SearchResult:
        """See `ForestEngine`. What a query excludes in some tree it excludes in all: other trees have it in their masks."""
        masks_B = [tuple(None if own.mask_B is None else own.mask_B[b] for own in params_T) for b in range(len(queries))]
        excluded = {id(own.exclude_BE): own.exclude_BE for own in params_T if own.exclude_BE is not None}
        exclude_BE = np.concatenate(list(excluded.values()), axis=1) if excluded else None
        wants = any(own.frontier for own in params_T)
        found = self._shards.search_with(
            queries, replace(params, mask_B=None, exclude_BE=None, frozen_B=None, frontier=wants), masks_B, exclude_BE
        )
        if live is not None:
            means = self._live_means(queries, params, found.frontiers, live)
            trees = [alone.tree for alone in self.bundle.alone]
            both = merged([replace(found, trace=None, other_traces=(), frontiers=()), means], params.m_B, trees)
            found = replace(found, **{name: getattr(both, name) for name in ITEMS})
        return found if params.frontier else replace(found, frontiers=())

    def _live_means(self, queries: QueryBatch, params: SearchParams, frontiers: Sequence[Frontier], live: LiveParts) -> SearchResult:
        """The best live items under the beams of the shards, as a result."""
        batch = len(queries)
        none_BC = np.empty((batch, 0), np.int64)
        zero_B = np.zeros(batch, np.int64)
        leaves = [ScoredLeaves(none_BC, none_BC.astype(np.float32), zero_B, zero_B, None, frontier) for frontier in frontiers]
        shape = batch, int(params.m_B.max(initial=0))
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        self._write_means(queries, np.arange(batch), leaves, params.m_B, rows_BM, ranks_BM, live)
        return finish(self.result_ranking, params.m_B, zero_B, rows_BM, ranks_BM, None)


ITEMS = ("item_rows_BM", "scores_BM", "ranks_BM", "keys_BM", "count_B")
