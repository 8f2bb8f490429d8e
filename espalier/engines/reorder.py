"""Stacking orders the best candidates of a search anew (espalier.stacking).

Knows candidates and what becomes of them. Does not know how trees are searched, or where: over shards, the candidates are the best of all
of them.

Legend: B queries, M results.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.stacked_keys import Scratch, network_arrays, stack, table_arrays
from espalier.queries import QueryBatch
from espalier.scores import scores_of_ranks
from espalier.search import NO_ITEM, SearchResult
from espalier.stacking import Stacking
from espalier.thread_scratch import ThreadScratch

STRETCH = 20
"""By how much the network may stretch differences of ranks: logits of scores near 1 are steep."""


class Stacker:
    """Orders candidates anew. Any number of threads may call it. stacking: the bundle's."""

    def __init__(self, bundle: Bundle, stacking: Stacking) -> None:
        self._info, self._ranking, self._items = stacking.info, bundle.manifest.result_ranking, bundle.manifest.tree.items
        self._tables, self._network = table_arrays(stacking.tables), network_arrays(stacking)
        items, points = self._items, stacking.tables.points
        self._scratch = ThreadScratch(lambda handles: Scratch.of(items + handles, points))

    def wanted(self, m_B: NDArray[np.int64], items: int) -> NDArray[np.int64]:
        """int64[B]: the candidates that it takes for so many results, of so many items."""
        return np.maximum(m_B, min(self._info.candidates, items))

    def ordered(self, queries: QueryBatch, found: SearchResult, m_B: NDArray[np.int64]) -> SearchResult:
        """The best m of what the trees found, in the order of stacking.

        found  the best max(m, candidates) items, or all that there are, by the trees' keys; live items have rows from I on
        """
        rows_BM, keys_BM = np.full_like(found.item_rows_BM, NO_ITEM), np.full_like(found.ranks_BM, -np.inf)
        own, handles = queries.features, max(int(found.item_rows_BM.max(initial=0)) + 1 - self._items, 0)
        with self._scratch.of(handles) as scratch:
            stack(
                found.item_rows_BM,
                found.keys_BM,
                found.count_B,
                (own.indptr, own.indices, own.values),
                self._info.candidates,
                self._info.power,
                self._tables,
                self._network,
                scratch,
                (rows_BM, keys_BM),
            )
        width = int(m_B.max(initial=0))
        rows_BM, keys_BM = rows_BM[:, :width].copy(), keys_BM[:, :width].copy()
        count_B = np.minimum(found.count_B, m_B)
        beyond_BM = np.arange(width) >= count_B[:, None]
        rows_BM[beyond_BM], keys_BM[beyond_BM] = NO_ITEM, -np.inf
        return replace(
            found,
            item_rows_BM=rows_BM,
            scores_BM=scores_of_ranks(self._ranking, keys_BM),
            ranks_BM=keys_BM,
            keys_BM=keys_BM,
            count_B=count_B,
            complete_B=found.complete_B | (found.count_B >= m_B),
        )
