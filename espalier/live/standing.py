"""Masks that are brought forward from one snapshot to another: O(what has changed), and a copy of N bytes.

Made when the first query needs them, not when an item is put.

Legend: N nodes, P parents.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.live.masks import live_mask
from espalier.live.overlay import Overlay
from espalier.search import NodeMask
from espalier.tree import Tree

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
LONGEST = 1 << 18
"""Changes that are kept; then all are forgotten, and masks are built anew."""


class TouchedParents:
    """Which parents had a leaf under them changed, in order: what was made for one snapshot can be brought forward to a later one.

    A moment is how many changes there had been. Written by one thread, read by any.

    trees  how many the version has
    """

    def __init__(self, trees: int) -> None:
        self._trees = trees
        self._kept = 0, array("q")  # how many were forgotten, and parent · trees + tree of the later ones; replaced as a whole

    def touch(self, tree: int, parent: int) -> None:
        """A leaf under a parent, trained or live, has changed, or the fields of its item."""
        forgotten, log = self._kept
        if len(log) >= LONGEST:
            forgotten, log = self._kept = forgotten + len(log), array("q")
        log.append(parent * self._trees + tree)

    @property
    def now(self) -> int:
        """The moment."""
        forgotten, log = self._kept
        return forgotten + len(log)

    def since(self, moment: int) -> list[Int64] | None:
        """int64[P] of each tree, ascending, each once: the parents that were touched after a moment; None where that was forgotten."""
        forgotten, log = self._kept
        if moment < forgotten:
            return None
        touched = np.unique(np.array(log[moment - forgotten :], np.int64))
        return [touched[touched % self._trees == tree] // self._trees for tree in range(self._trees)]


@dataclass(frozen=True, eq=False)
class SnapshotMask:
    """The mask of one snapshot for one filter, from which that of a later one is made.

    overlay  weak: an old one must not stay in memory for its masks
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
        """See `live_mask`. The last mask is brought forward, unless it was made by another list of removed items."""
        since = None
        if last is not None and last.removed is overlay.removed and last.shown_R is overlay.shown_R:
            parents = touched.since(min(last.touched, overlay.touched))  # also by what came after the overlay
            since = None if parents is None else (last.mask, parents)
        mask = live_mask(trees, overlay, trained, passing_R, since)
        return SnapshotMask(mask, weakref.ref(overlay), overlay.removed, overlay.shown_R, overlay.touched)


class Standing:
    """The masks of queries without a filter, of one version's snapshots. Any thread may ask for one.

    Snapshots refer to it, so it does not refer to what makes them.
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
