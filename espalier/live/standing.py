"""The mask of queries without a filter, kept up to date as items come and go: O(what has changed), and a copy of N bytes.

Legend: N nodes, I trained items, R handles, P parents.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.live.masks import open_parents, recompute
from espalier.live.overlay import LiveLeaves
from espalier.masks.eligibility import unrestricted_mask
from espalier.search import NodeMask
from espalier.tree import Tree

Int64 = NDArray[np.int64]
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


Bool = NDArray[np.bool_]


class Standing:
    """For the trees of one version. Nothing is kept as long as every node of the trained trees is eligible."""

    def __init__(self, trees: Sequence[Tree], touched: TouchedParents) -> None:
        self._trees = tuple(trees)
        self._unrestricted = [unrestricted_mask(tree) for tree in trees]
        self._eligible: list[Bool] | None = None
        self._touched, self._moment = touched, 0  # of `_eligible`

    def forget(self) -> None:
        """Build all of it anew."""
        self._eligible = None

    def mask(self, leaves: Sequence[LiveLeaves], gone_I: Bool, eligible_R: Bool, items: int) -> NodeMask | None:
        """The mask now; None where every node of the trained trees is eligible.

        gone_I      bool[I]: trained items whose own leaves do not count
        eligible_R  bool[R]: which live items count
        items       how many items are eligible
        """
        touched, self._moment = self._touched.since(self._moment), self._touched.now
        if not gone_I.any() and not self._opens(leaves, eligible_R):
            self._eligible = None
            return None
        before = self._eligible
        if before is None or touched is None:
            before = [np.zeros(tree.node_count, np.bool_) for tree in self._trees]
            touched = [np.array(tree.level(tree.height - 1), np.int64) for tree in self._trees]
        now = []
        for tree, eligible_N, touched_P, own in zip(self._trees, before, touched, leaves, strict=True):
            if len(touched_P):
                eligible_N = eligible_N.copy()
                children, _ = tree.children(touched_P)
                eligible_N[children] = np.append(~gone_I, False)[tree.leaf_item[children - tree.leaf_offset]]
                recompute(tree, eligible_N, touched_P, open_parents(own, eligible_R))
            now.append(eligible_N)
        self._eligible = now
        first, *others = (NodeMask(eligible_N, items, (), eligible_R) for eligible_N in now)
        return NodeMask(first.eligible_N, items, tuple(others), eligible_R)

    def _opens(self, leaves: Sequence[LiveLeaves], eligible_R: Bool) -> bool:
        """Whether a live leaf hangs under a node that has no trained item below."""
        return any(
            mask is not None and not mask.eligible_N[open_parents(own, eligible_R)].all()
            for mask, own in zip(self._unrestricted, leaves, strict=True)
        )
