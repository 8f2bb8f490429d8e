"""A snapshot of what is live in one version: leaves beside those of its trees, and trained items that are gone. Immutable.

A live leaf hangs under a node of the level above the leaves, its parent, at a slot: its position among the parent's children in a fold
(fold.py), a version with the overlay in it. Inner levels do not change, so a search of the trained tree finds the parents, and one more
pass scores the live leaves under them (engine.py). A trained item whose row was changed is live at the slot of its own leaf, which then
counts no more.

The answer of a bundle with an overlay is that of the fold, for every engine, filter, exclusion, beam and memory, and in forests
(tests/espalier/live/test_oracle.py). So vacant trained leaves are taken first, ties break by slot, and a live item in a history counts by
its own row on the leaf level and by its parent's path above.

Legend: I trained items, R handles, X live leaves, Y parents of live leaves, P places of a pool, S sources of a memory, D node row,
F features, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from espalier.search import NodeMask

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SparsePool:
    """Weights of live leaves of linear scorers: those at a place are weight[begin_P[place] : end_P[place]].

    Arrays are shared by snapshots; what a snapshot refers to never changes.

    tail_begin_P, tail_end_P, tail_feature, tail_value   likewise: the items' rows of the bundle's tail, in the first tree of a forest
    """

    begin_P: Int64
    end_P: Int64
    bias_P: NDArray[np.float32]
    feature: NDArray[np.int32]
    weight: NDArray[np.float32]
    tail_begin_P: Int64
    tail_end_P: Int64
    tail_feature: NDArray[np.int32]
    tail_value: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LiveLeaves:
    """The live leaves of one tree, ascending by (parent, slot).

    parent_X, slot_X, handle_X, place_X   int64[X]; the place is that of the leaf's row in the pool
    parent_Y   int64[Y]       their parents, ascending; begin_Y int64[Y + 1]: those of parent y are begin_Y[y] … begin_Y[y + 1] − 1
    rows_PD    float32[P, D]  node rows, of a model of graphs
    sparse     weights, of a linear one
    """

    parent_X: Int64
    slot_X: Int64
    handle_X: Int64
    place_X: Int64
    parent_Y: Int64
    begin_Y: Int64
    rows_PD: NDArray[np.float32] | None
    sparse: SparsePool | None

    def __len__(self) -> int:
        return len(self.parent_X)

    @cached_property
    def position_R(self) -> Int64:
        """int64: where each handle's leaf is, −1 where it has none; handles past the end have none."""
        position_R = np.full(int(self.handle_X.max(initial=-1)) + 1, -1, np.int64)
        position_R[self.handle_X] = np.arange(len(self.handle_X))
        return position_R

    def positions(self, handles: Int64) -> Int64:
        """int64: where the leaves of some handles are, −1 where one has none."""
        known = handles < len(self.position_R)
        return np.where(known, self.position_R[np.where(known, handles, 0)] if len(self.position_R) else -1, -1)

    def under(self, nodes_K: Int64) -> tuple[Int64, Int64]:
        """int64[C] and int64[C]: positions 0 … X − 1 of the live leaves under some nodes, and the place 0 … K − 1 of each one's parent."""
        if not len(self.parent_Y) or not len(nodes_K):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at_K = np.minimum(np.searchsorted(self.parent_Y, nodes_K), len(self.parent_Y) - 1)
        slot_K = np.flatnonzero(self.parent_Y[at_K] == nodes_K)
        first, count = self.begin_Y[at_K[slot_K]], self.begin_Y[at_K[slot_K] + 1] - self.begin_Y[at_K[slot_K]]
        of_C = np.repeat(np.arange(len(slot_K)), count)
        positions = np.arange(len(of_C)) - np.repeat(np.cumsum(count) - count, count) + first[of_C]
        return positions, slot_K[of_C]


@dataclass(frozen=True, eq=False)
class LiveMemory:
    """Entries of the memory that trained arrays do not have: S[source, target], where one of the two is live.

    source_S, place_S  int64[S]: item rows of sources, ascending, and where each one's entries are in the pool
    begin_P, end_P     int64[P]: those at a place are begin_P[place] … end_P[place] − 1
    target, value      int32 and float32: item rows, ascending for each source, and S; of items that are not live now, too
    """

    source_S: Int64
    place_S: Int64
    begin_P: Int64
    end_P: Int64
    target: NDArray[np.int32]
    value: NDArray[np.float32]

    def entries(self, sources: Int64) -> tuple[Int64, NDArray[np.int32], NDArray[np.float32]]:
        """The entries of some of the S sources: item rows of their sources, of their targets, and S."""
        begin, end = self.begin_P[self.place_S[sources]], self.end_P[self.place_S[sources]]
        count = end - begin
        at = np.arange(int(count.sum())) + np.repeat(begin - np.cumsum(count) + count, count)
        return np.repeat(self.source_S[sources], count), self.target[at], self.value[at]

    def of(self, source: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The entries of an item row."""
        at = np.searchsorted(self.source_S, source)
        own = self.entries(np.flatnonzero(self.source_S[at : at + 1] == source) + at)
        return own[1], own[2]

    @property
    def all(self) -> tuple[Int64, NDArray[np.int32], NDArray[np.float32]]:
        """All entries, by source and target."""
        return self.entries(np.arange(len(self.source_S)))


@dataclass(frozen=True, eq=False)
class Overlay:
    """See the module.

    sequence      of the last operation in it
    items         I
    item_R        int64[R]: the item row of each handle
    leaf_R        bool[R]: which handles have live leaves
    eligible_R    bool[R]: which of them a query without a filter may get: not expired, not removed by a standing list
    row_W, handle_W  int64[W]: trained item rows that are live, ascending, and their handles
    hidden        int64: trained item rows whose own leaves do not count, ascending: deleted, expired or live with another row
    changed       (handle, trained item row) of trained items whose fields were changed and whose own leaves count, int64[2, …]
    trees         of each tree
    standing      the mask of a query without a filter; None where every node of the trained trees is eligible
    eligible      items that a query without a filter may get
    memory        None where the bundle has none
    touched       the moment, as `TouchedParents` counts them
    """

    sequence: int
    items: int
    item_R: Int64
    leaf_R: NDArray[np.bool_]
    eligible_R: NDArray[np.bool_]
    row_W: Int64
    handle_W: Int64
    hidden: Int64
    changed: Int64
    trees: tuple[LiveLeaves, ...]
    standing: NodeMask | None
    eligible: int
    memory: LiveMemory | None = None
    touched: int = 0

    @property
    def handles(self) -> int:
        """R."""
        return len(self.item_R)

    @property
    def is_empty(self) -> bool:
        """Whether a search finds the same as without it, and no request can have an item row that the bundle does not have."""
        return self.handles == 0

    def handles_of(self, rows: Int64) -> Int64:
        """int64[len(rows)]: the handles of item rows that have live leaves' rows, −1 for rows of trained items as they were trained."""
        handles = np.where(rows >= self.items, rows - self.items, -1)
        if len(self.row_W):
            at = np.minimum(np.searchsorted(self.row_W, rows), len(self.row_W) - 1)
            handles = np.where(self.row_W[at] == rows, self.handle_W[at], handles)
        return handles
