"""The `reference` engine of one tree of a forest, as a forest with live items needs it: all leaves that it scored.

Legend: B queries, C leaves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from espalier.engines.forest import ScoredLeaves
from espalier.engines.reference import ReferenceEngine
from espalier.queries import QueryBatch
from espalier.search import SearchParams


class ReferenceTree(ReferenceEngine):
    """See the module."""

    def most_leaves(self, beam_size: int) -> int:
        return self.bundle.tree.leaf_count

    def scored_leaves(self, queries: QueryBatch, params: SearchParams) -> ScoredLeaves:
        """See `TreeEngine`."""
        tree = self.bundle.tree
        found = self.search(queries, replace(params, m_B=np.full(len(queries), tree.leaf_count)))
        leaves_BC = np.where(found.item_rows_BM >= 0, tree.leaf_of_item[found.item_rows_BM], -1)
        eligible_B = np.array([self.eligible_nodes(params, b).items for b in range(len(queries))], np.int64)
        frontier = found.frontiers[0] if found.frontiers else None
        return ScoredLeaves(leaves_BC, found.ranks_BM, found.count_B, eligible_B, found.trace, frontier)
