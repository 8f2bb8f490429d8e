"""Which parents had a leaf under them changed, in order: what was made for one snapshot can be brought forward to a later one.

A moment is how many changes there had been. Written by one thread, read by any. Knows numbers of trees and nodes. Does not know leaves.

Legend: P parents.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
LONGEST = 1 << 18
"""Changes that are kept; then all are forgotten, and masks are built anew."""


class TouchedParents:
    """trees: how many the version has."""

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
