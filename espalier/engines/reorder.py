"""Stacking reorders the best candidates of a search (espalier.stacking).

Knows candidates. Does not know how or where trees are searched: with shards, the candidates are the best of all shards.

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
"""The network may make differences of ranks so many times larger: logits of scores near 1 are steep."""


class Stacker:
    """Reorders candidates. Any number of threads may call it. stacking: the bundle's."""

    def __init__(self, bundle: Bundle, stacking: Stacking) -> None:
        self._info, self._ranking, self._items = stacking.info, bundle.manifest.result_ranking, bundle.manifest.tree.items
        self._tables, self._network = table_arrays(stacking.tables), network_arrays(stacking)
        items, points = self._items, stacking.tables.points
        self._scratch = ThreadScratch(lambda handles: Scratch.of(items + handles, points))

    def candidate_counts(self, m_B: NDArray[np.int64], items: int) -> NDArray[np.int64]:
        """int64[B]: how many candidates a query needs to get m results from a catalogue of `items` items."""
        return np.maximum(m_B, min(self._info.candidates, items))

    def ordered(self, queries: QueryBatch, candidates: SearchResult, m_B: NDArray[np.int64]) -> SearchResult:
        """The best m candidates, in the order of stacking.

        candidates  the best max(m, stacking.candidates) items by the trees' keys, or all items if there are fewer; live items have rows
                    from I on
        """
        rows_BM, keys_BM = np.full_like(candidates.item_rows_BM, NO_ITEM), np.full_like(candidates.ranks_BM, -np.inf)
        features, handles = queries.features, max(int(candidates.item_rows_BM.max(initial=0)) + 1 - self._items, 0)
        with self._scratch.of(handles) as scratch:
            stack(
                candidates.item_rows_BM,
                candidates.keys_BM,
                candidates.count_B,
                (features.indptr, features.indices, features.values),
                self._info.candidates,
                self._info.power,
                self._tables,
                self._network,
                scratch,
                (rows_BM, keys_BM),
            )
        width = int(m_B.max(initial=0))
        rows_BM, keys_BM = rows_BM[:, :width].copy(), keys_BM[:, :width].copy()
        count_B = np.minimum(candidates.count_B, m_B)
        beyond_BM = np.arange(width) >= count_B[:, None]
        rows_BM[beyond_BM], keys_BM[beyond_BM] = NO_ITEM, -np.inf
        return replace(
            candidates,
            item_rows_BM=rows_BM,
            scores_BM=scores_of_ranks(self._ranking, keys_BM),
            ranks_BM=keys_BM,
            keys_BM=keys_BM,
            count_B=count_B,
            complete_B=candidates.complete_B | (candidates.count_B >= m_B),
        )
