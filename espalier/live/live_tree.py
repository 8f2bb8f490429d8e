"""The live leaves of one tree as they come and go, and which slots and how much room their parents have.

Legend: X live leaves, D node row.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

import numpy as np

from espalier.entry_lists import EntryLists
from espalier.errors import InvalidData
from espalier.live.overlay import HANDLE, LiveLeaves
from espalier.live.pools import DensePool, WeightPool
from espalier.live.rows import LiveRow, Placement
from espalier.tree import EMPTY_LEAF, Tree

LEAST_ROOM, ROOM = 16, 4
"""A parent takes ROOM times the mean number of children as live leaves, and at least LEAST_ROOM: similar new items stay together."""
SLOTS = 1 << 62
"""Slots of a parent, which are int64."""
LATE = 1 << 20
"""More than any parent's children and live leaves."""
UNUSED, UNUSED_NUMBERS = 1024, 1 << 20
"""Entries that `EntryLists.is_worn` spares, and numbers of rows without use, beside as many as live leaves have."""
COLUMNS = 5
"""Of an entry, from its key on: parent, handle and slot, each key with the number of the next entry behind it."""


def late_slot(sequence: int) -> int:
    """The slot of an operation that is placed after later ones were, when nobody knows all slots that they have: no other has it."""
    return LATE + sequence


class LiveTree:
    """Written by one thread.

    width     D, None for linear scorers
    features  F of linear scorers
    has_tail  whether rows may have a part of the bundle's tail
    numbers   of the rows of all live leaves
    """

    def __init__(self, tree: Tree, width: int | None, features: int = 0, has_tail: bool = False) -> None:
        self.tree, self._width, self._features, self._has_tail = tree, width, features, has_tail
        self._pool: DensePool | WeightPool = WeightPool() if width is None else DensePool(width)
        self._entries = EntryLists(COLUMNS, tree.leaf_offset, 0)  # the row of an entry is at its number in the pool
        self._leaf: dict[int, tuple[int, int]] = {}  # handle → (parent, slot)
        self._entry: dict[int, int] = {}  # handle → entry
        self._numbers: dict[int, int] = {}  # by handle
        self.numbers = 0
        self._taken: dict[int, dict[int, int]] = {}  # parent → slot → handle, of live leaves that are not a trained item's own
        self._parents = tree.level(tree.height - 1)
        self._room = max(LEAST_ROOM, math.ceil(ROOM * tree.leaf_count / len(self._parents)))

    def __len__(self) -> int:
        return len(self._leaf)

    def leaf(self, handle: int) -> tuple[int, int] | None:
        """(parent, slot) of a handle's live leaf; None where it has none."""
        return self._leaf.get(handle)

    def trained_leaf(self, row: int) -> tuple[int, int]:
        """(parent, slot) of a trained item's own leaf."""
        leaf = int(self.tree.leaf_of_item[row])
        parent = int(self.tree.parent[leaf])
        return parent, leaf - int(self.tree.first_child[parent])

    def has_room(self, parent: int, beside: Collection[int] = ()) -> bool:
        return len(self._taken.get(parent, {}).keys() | beside) < self._room

    def holder(self, parent: int, slot: int) -> int | None:
        """The handle of the live leaf at a slot; None where there is none, or a trained item's own."""
        return self._taken.get(parent, {}).get(slot)

    def near(self, parent: int) -> Iterator[int]:
        """All parents, from a node on: those below its nearest ancestors first, then by how far their numbers are."""
        yield parent
        node, within = parent, range(parent, parent + 1)
        for above in range(self.tree.height - 2, -1, -1):
            node = int(self.tree.parent[node])
            first, after = node, node + 1
            for _ in range(self.tree.height - 1 - above):
                first, after = int(self.tree.first_child[first]), int(self.tree.first_child[after])
            sides = range(within.start - 1, first - 1, -1), range(within.stop, after)
            yield from heapq.merge(*sides, key=lambda other: abs(other - parent))
            within = range(first, after)

    def next_slot(self, parent: int, beside: Collection[int] = ()) -> int:
        """The first vacant trained leaf that no live leaf has taken, or the first free slot behind the children."""
        taken = self._taken.get(parent, {}).keys() | beside
        for slot in np.flatnonzero(self._held(parent) == EMPTY_LEAF).tolist():
            if slot not in taken:
                return int(slot)
        slot = self._children(parent)
        while slot in taken:
            slot += 1
        return slot

    def check(self, handle: int, placement: Placement, own: bool) -> None:
        """Raise InvalidData where a placement does not fit. own: it is a trained item's, whose slot is its own."""
        row, parent, slot = placement.row, placement.parent, placement.slot
        features = 0 if self._width is not None else len(row.feature)
        if row.dense != (self._width is not None) or len(row.values) != (features if self._width is None else self._width):
            wanted = "weights of features" if self._width is None else f"a node row of {self._width} numbers"
            raise InvalidData("placements.row", f"{len(row.values)} numbers", f"{wanted}, as the model has")
        for name, feature in (("feature", row.feature), ("tail_feature", row.tail_feature)):
            if len(feature) and feature[-1] >= self._features:
                raise InvalidData(f"placements.row.{name}", int(feature[-1]), f"feature numbers below {self._features}")
        if len(row.tail_feature) and not self._has_tail:
            raise InvalidData("placements.row.tail_feature", f"{len(row.tail_feature)} features", "none here: the model has no tail")
        if own:
            return
        if parent not in self._parents or not 0 <= slot < SLOTS:
            first, last = self._parents[0], self._parents[-1]
            raise InvalidData("placements.parent", f"node {parent}, slot {slot}", f"a node from {first} to {last}")
        if self.leaf(handle) != (parent, slot):
            trained = slot < self._children(parent) and self._held(parent)[slot] != EMPTY_LEAF
            if trained or slot in self._taken.get(parent, ()):
                raise InvalidData("placements.slot", slot, f"a free slot under node {parent}")

    def put(self, moment: int, handle: int, parent: int, slot: int, row: LiveRow, own: bool) -> None:
        """Hang a checked leaf at a slot, instead of the one that the handle had."""
        self.drop(moment, handle)
        self._pool.add(row)
        self._leaf[handle] = parent, slot
        self._entry[handle] = self._entries.add(moment, (parent, 0, handle, 0, slot))
        self._numbers[handle] = row.numbers
        self.numbers += row.numbers
        if not own:
            self._taken.setdefault(parent, {})[slot] = handle
        if self._entries.is_worn(UNUSED) or self._pool.numbers > 2 * self.numbers + UNUSED_NUMBERS:
            self._pool.keep(self._entries.drop_closed())
            handle_E = self._entries.rows_EC[1 : self._entries.used, HANDLE].tolist()
            self._entry = {handle: entry for entry, handle in enumerate(handle_E, start=1)}

    def drop(self, moment: int, handle: int) -> None:
        """Take a handle's leaf away, if it has one."""
        if handle not in self._leaf:
            return
        parent, slot = self._leaf.pop(handle)
        self._entries.close(self._entry.pop(handle), moment)
        self.numbers -= self._numbers.pop(handle)
        taken = self._taken.get(parent, {})
        taken.pop(slot, None)
        if not taken:
            self._taken.pop(parent, None)

    def leaves(self, moment: int) -> LiveLeaves:
        """Those of a moment, that of the last change or a later one."""
        dense = self._pool.rows_PD if isinstance(self._pool, DensePool) else None
        sparse = self._pool.sparse if isinstance(self._pool, WeightPool) else None
        counts = self._pool.count_P if isinstance(self._pool, DensePool) else None
        return LiveLeaves(self._entries.snapshot(moment), len(self._leaf), dense, sparse, counts)

    def _children(self, parent: int) -> int:
        return int(self.tree.first_child[parent + 1] - self.tree.first_child[parent])

    def _held(self, parent: int) -> np.ndarray:
        """int64: the item rows of a parent's trained leaves."""
        first, after = self.tree.first_child[parent : parent + 2] - self.tree.leaf_offset
        return self.tree.leaf_item[first:after]
