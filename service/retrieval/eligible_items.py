"""Which items a query with some filter may get, without the mask of nodes that a search takes.

So what people look at puts nothing into the cache of masks, which customers' filters fill. Knows views and filters. Does not know searches.

Legend: I trained items, W rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.masks.filters import Filter, ItemFilters
from espalier.tree import Tree
from service.live.views import LiveView, View
from service.retrieval.scans import Check

LIVE_ROWS = 1 << 12
"""Live items that are looked at between two checks of the deadline."""


@dataclass(frozen=True)
class EligibleItems:
    """trained_I: bool[I], items with the fields that they were trained with. later_W: int64, rows of items with fields of their own."""

    trained_I: NDArray[np.bool_]
    later_W: NDArray[np.int64]

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.trained_I)) + len(self.later_W)


def eligible_items(view: View, tree: Tree, filters: ItemFilters, filter: Filter, check: Check) -> EligibleItems:
    """O(I), and as slow as a mask where the filter is the first on a column. Raises DeadlinePassed.

    tree, filters  of the version; of a forest the first tree
    """
    live = view if isinstance(view, LiveView) else None
    standing = view.standing if live is None else live.overlay.standing
    items = len(tree.leaf_of_item)
    standing_I = np.ones(items, np.bool_) if standing is None else standing.eligible_N[tree.leaf_of_item]
    trained_I = standing_I.copy()
    if filter:
        trained_I &= filters.matches(filter, np.arange(items))
    check()
    if live is None:
        return EligibleItems(trained_I, np.empty(0, np.int64))
    overlay = live.overlay
    changed = overlay.changed[1]
    trained_I[changed] = False
    later_W = np.concatenate([overlay.item_R[overlay.eligible_R], changed[standing_I[changed]]])
    if filter:
        passing = [np.empty(0, np.int64)]
        for begin in range(0, len(later_W), LIVE_ROWS):
            rows = later_W[begin : begin + LIVE_ROWS]
            passing.append(rows[live.matches(filter, rows)])
            check()
        later_W = np.concatenate(passing)
    return EligibleItems(trained_I, later_W)
