"""Masks that are updated from one snapshot to the next, in O(changes) and a copy of N bytes.

A mask is made when the first query needs it, not when an item is put.

Legend: N nodes, P parents.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.live.masks import EarlierMask, live_mask
from espalier.live.overlay import Overlay
from espalier.search import NodeMask
from espalier.tree import Tree

LONGEST = 1 << 18
"""Most changes in the log. A full log is forgotten, and masks are rebuilt."""


class TouchedParents:
    """A log of the parents under which a leaf changed, in order, so that masks can be updated from one snapshot to a later one.

    A moment is the number of changes so far. Written by one thread, read by any.

    trees  number of trees of the version
    """

    def __init__(self, trees: int) -> None:
        self._trees = trees
        self._log = 0, array("q")  # number of forgotten changes; parent · trees + tree of each later one. Replaced as a whole

    def touch(self, tree: int, parent: int) -> None:
        """Log that a leaf under a parent, trained or live, has changed, or the fields of its item."""
        forgotten, log = self._log
        if len(log) >= LONGEST:
            forgotten, log = self._log = forgotten + len(log), array("q")
        log.append(parent * self._trees + tree)

    @property
    def now(self) -> int:
        """The present moment."""
        forgotten, log = self._log
        return forgotten + len(log)

    def since(self, moment: int) -> list[Int64] | None:
        """int64[P] of each tree, ascending, distinct: the parents that were touched after a moment; None if some were forgotten."""
        forgotten, log = self._log
        if moment < forgotten:
            return None
        touched = np.unique(np.array(log[moment - forgotten :], np.int64))
        return [touched[touched % self._trees == tree] // self._trees for tree in range(self._trees)]


@dataclass(frozen=True, eq=False)
class SnapshotMask:
    """The mask of one snapshot for one filter. The mask of a later snapshot is made from it.

    overlay  weak, so that masks do not keep old overlays in memory
    """

    mask: NodeMask
    overlay: weakref.ref[Overlay]
    removed: NodeMask | None
    shown_R: Bool
    touched: int

    @staticmethod
    def of(
        trees: Sequence[Tree],
        overlay: Overlay,
        trained: NodeMask | None,
        passing_R: Bool,
        touched: TouchedParents,
        last: SnapshotMask | None,
    ) -> SnapshotMask:
        """See `live_mask`. The last mask is updated, unless it was made with another list of removed items."""
        earlier = None
        if last is not None and last.removed is overlay.removed and last.shown_R is overlay.shown_R:
            parents = touched.since(min(last.touched, overlay.touched))  # includes changes after the overlay
            earlier = None if parents is None else EarlierMask(last.mask, parents)
        mask = live_mask(trees, overlay, trained, passing_R, earlier)
        return SnapshotMask(mask, weakref.ref(overlay), overlay.removed, overlay.shown_R, overlay.touched)


class Standing:
    """The masks of queries without a filter, for the snapshots of one version. Any thread may ask for one.

    Snapshots refer to it, so it must not refer to the version's state.
    """

    def __init__(self, trees: Sequence[Tree], touched: TouchedParents) -> None:
        self._trees, self._touched = tuple(trees), touched
        self._last: SnapshotMask | None = None
        self._lock = threading.Lock()

    def mask(self, overlay: Overlay) -> NodeMask:
        """The mask of a query without a filter."""
        with self._lock:
            self._last = SnapshotMask.of(self._trees, overlay, overlay.removed, overlay.shown_R, self._touched, self._last)
            return self._last.mask
