"""A memory with the entries of live items: rows of live items, columns of live items in trained rows, and entries of changed items.

An inner node's mem is the largest of the eligible leaves below it, live ones included. The sums are those of `memory_sums.py`. Knows no
ranks.

Legend: B queries, T history, R handles, W trained items that are live.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import Overlay
from espalier.masks.eligibility import EligibleNodes
from espalier.memory_lists import NO_ENTRIES, MemoryLists, MemoryTree
from espalier.read_only import read_only
from espalier.search import NodeMask

Array = NDArray[Any]


class LiveMemoryTree:
    """A memory on its tree with an overlay: what `MemoryTree` is without one. Used by any number of threads."""

    def __init__(self, trained: MemoryTree, overlay: Overlay) -> None:
        self._trained, self._overlay, leaves, live = trained, overlay, overlay.trees[0], overlay.memory
        self._live = NO_ENTRIES
        if live is not None:
            self._live = read_only(live.source_S, live.place_S, live.begin_P, live.end_P, live.target, live.value)
        parent_R = np.full(overlay.handles, -1, np.int64)
        parent_R[leaves.handle_X] = leaves.parent_X
        self._leaves = read_only(parent_R, overlay.eligible_R, overlay.row_W, overlay.handle_W)

    @property
    def item_count(self) -> int:
        """I + R."""
        return self._overlay.items + self._overlay.handles

    def lists(self, history_BT: Array, eligible: EligibleNodes) -> MemoryLists:
        """The nodes with memory, as those of `MemoryTree`; live leaves are no nodes.

        Queries without a mask, or with one that does not say which live items pass, may get all that need no filter.
        """
        return self._trained.lists_with(history_BT, eligible, self._live, self._leaves_of)

    def _leaves_of(self, mask: NodeMask | None) -> tuple[Array, ...]:
        """The live leaves, those that queries of a mask may get eligible."""
        if mask is None or mask.live_R is None:
            return self._leaves
        parent_R, _, row_W, handle_W = self._leaves
        return parent_R, *read_only(mask.live_R), row_W, handle_W

    @contextmanager
    def arrays(self) -> Iterator[tuple[Any, ...]]:
        """trained, live and sum_R, as `of_live_leaves` of `memory_sums.py` takes them on this thread."""
        with self._trained.sums.of(self._overlay.handles) as (_, sum_R):
            yield self._trained.trained, self._live, sum_R
