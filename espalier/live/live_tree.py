"""The live leaves of one tree as they come and go, with their rows, and the slots and the room of their parents.

Rows are in pools, arrays that only grow: rows that a snapshot refers to stay as they are while later rows come. A leaf's entry number
(espalier.entry_lists) is the index of its row; entry 0 has no row. A pool is rewritten when its entries are.

Legend: P entries, X live leaves or some entries, D node row.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

import numpy as np

from espalier.arrays import Float32, Float64, Int32, Int64, read_only
from espalier.entry_lists import FIRST, EntryLists, with_room
from espalier.errors import InvalidData
from espalier.live.overlay import HANDLE, LiveLeaves, SparsePool
from espalier.live.rows import LiveRow, Placement
from espalier.stored_arrays import spans
from espalier.tree import EMPTY_LEAF, Tree

LEAST_ROOM, ROOM = 16, 4
"""A parent has room for ROOM times the mean number of children as live leaves, and at least LEAST_ROOM: similar new items stay near."""
SLOTS = 1 << 62
"""Slots of a parent, which are int64."""
LATE = 1 << 20
"""More than any parent's children and live leaves."""
UNUSED, UNUSED_NUMBERS = 1024, 1 << 20
"""`spare` of `EntryLists.is_worn`, and unused numbers that the pool may hold, in addition to twice those of live leaves."""
COLUMNS = 5
"""Columns of an entry, from its key on: parent, handle and slot, each key followed by the number of its next entry."""


def late_slot(sequence: int) -> int:
    """A slot that no other operation has, for an operation that is placed after later ones, whose slots are not all known."""
    return LATE + sequence


class LiveTree:
    """Written by one thread.

    width     D, None for linear scorers
    features  F of linear scorers
    has_tail  whether rows may have a row of the bundle's tail
    numbers   count of the numbers in the rows of all live leaves
    """

    def __init__(self, tree: Tree, width: int | None, features: int = 0, has_tail: bool = False) -> None:
        self.tree, self._width, self._features, self._has_tail = tree, width, features, has_tail
        self._pool: DensePool | WeightPool = WeightPool() if width is None else DensePool(width)
        self._entries = EntryLists(COLUMNS, tree.leaf_offset, 0)  # an entry's number is its index in the pool
        self._leaf: dict[int, tuple[int, int]] = {}  # handle → (parent, slot)
        self._entry: dict[int, int] = {}  # handle → entry
        self._numbers: dict[int, int] = {}  # handle → count of numbers in its row
        self.numbers = 0
        self._handle_at: dict[int, dict[int, int]] = {}  # parent → slot → handle, of live leaves that replace no trained one
        self._parents = tree.level(tree.height - 1)
        self._room = max(LEAST_ROOM, math.ceil(ROOM * tree.leaf_count / len(self._parents)))

    def __len__(self) -> int:
        return len(self._leaf)

    def leaf(self, handle: int) -> tuple[int, int] | None:
        """(parent, slot) of a handle's live leaf; None for a handle without one."""
        return self._leaf.get(handle)

    def trained_leaf(self, row: int) -> tuple[int, int]:
        """(parent, slot) of an item's trained leaf."""
        leaf = int(self.tree.leaf_of_item[row])
        parent = int(self.tree.parent[leaf])
        return parent, leaf - int(self.tree.first_child[parent])

    @property
    def room(self) -> int:
        """The most live leaves that replace no trained one."""
        return len(self._parents) * self._room

    def is_parent(self, node: int) -> bool:
        """Whether leaves may hang under a node."""
        return node in self._parents

    def has_room(self, parent: int, promised: Collection[int] = ()) -> bool:
        return len(self._handle_at.get(parent, {}).keys() | promised) < self._room

    def holder(self, parent: int, slot: int) -> int | None:
        """The handle of the live leaf at a slot; None if there is none, or if it replaces its item's trained leaf."""
        return self._handle_at.get(parent, {}).get(slot)

    def near(self, parent: int) -> Iterator[int]:
        """All parents, a node first: those below its nearest ancestor come before others, and among them the nearest node numbers."""
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

    def next_slot(self, parent: int, promised: Collection[int] = ()) -> int:
        """The slot of the first vacant trained leaf that no live leaf replaces, or the first free slot behind the children."""
        occupied = self._handle_at.get(parent, {}).keys() | promised
        for slot in np.flatnonzero(self._trained_items(parent) == EMPTY_LEAF).tolist():
            if slot not in occupied:
                return int(slot)
        slot = self._child_count(parent)
        while slot in occupied:
            slot += 1
        return slot

    def check(self, handle: int, placement: Placement, trained_row: int) -> None:
        """Raise InvalidData if a placement does not fit. trained_row: the item row of a trained item, −1 for another."""
        row, parent, slot = placement.row, placement.parent, placement.slot
        features = 0 if self._width is not None else len(row.feature)
        if row.dense != (self._width is not None) or len(row.values) != (features if self._width is None else self._width):
            expected = "weights of features" if self._width is None else f"a node row of {self._width} numbers"
            raise InvalidData("placements.row", f"{len(row.values)} numbers", f"{expected}, as the model has")
        for name, feature in (("feature", row.feature), ("tail_feature", row.tail_feature)):
            if len(feature) and feature[-1] >= self._features:
                raise InvalidData(f"placements.row.{name}", int(feature[-1]), f"feature numbers below {self._features}")
        if len(row.tail_feature) and not self._has_tail:
            raise InvalidData("placements.row.tail_feature", f"{len(row.tail_feature)} features", "none here: the model has no tail")
        if self._replaces_trained_leaf(placement, trained_row):
            return
        if not self.is_parent(parent) or not 0 <= slot < SLOTS:
            first, last = self._parents[0], self._parents[-1]
            raise InvalidData("placements.parent", f"node {parent}, slot {slot}", f"a node from {first} to {last}")
        if self.leaf(handle) != (parent, slot):
            is_trained_leaf = slot < self._child_count(parent) and self._trained_items(parent)[slot] != EMPTY_LEAF
            if is_trained_leaf or slot in self._handle_at.get(parent, ()):
                raise InvalidData("placements.slot", slot, f"a free slot under node {parent}")

    def _replaces_trained_leaf(self, placement: Placement, trained_row: int) -> bool:
        """Whether a live leaf hangs at the slot of its item's trained leaf. In models of graphs all those of trained items do."""
        return trained_row >= 0 and (self._width is not None or self.trained_leaf(trained_row) == (placement.parent, placement.slot))

    def put(self, moment: int, handle: int, placement: Placement, trained_row: int) -> None:
        """Hang a checked leaf at its slot. It replaces the handle's former live leaf. trained_row: as for `check`."""
        is_in_place = self._replaces_trained_leaf(placement, trained_row)
        parent, slot = self.trained_leaf(trained_row) if is_in_place else (placement.parent, placement.slot)
        row = placement.row
        self.drop(moment, handle)
        self._pool.add(row)
        self._leaf[handle] = parent, slot
        self._entry[handle] = self._entries.add(moment, (parent, 0, handle, 0, slot))
        self._numbers[handle] = row.numbers
        self.numbers += row.numbers
        if not is_in_place:
            self._handle_at.setdefault(parent, {})[slot] = handle
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
        handles = self._handle_at.get(parent, {})
        handles.pop(slot, None)
        if not handles:
            self._handle_at.pop(parent, None)

    def leaves(self, moment: int) -> LiveLeaves:
        """The leaves of a moment, which must not be before the last change."""
        dense = self._pool.rows_PD if isinstance(self._pool, DensePool) else None
        sparse = self._pool.sparse if isinstance(self._pool, WeightPool) else None
        counts = self._pool.count_P if isinstance(self._pool, DensePool) else None
        return LiveLeaves(self._entries.snapshot(moment), len(self._leaf), dense, sparse, counts)

    def _child_count(self, parent: int) -> int:
        return int(self.tree.first_child[parent + 1] - self.tree.first_child[parent])

    def _trained_items(self, parent: int) -> np.ndarray:
        """int64: the item rows of a parent's trained leaves."""
        first, after = self.tree.first_child[parent : parent + 2] - self.tree.leaf_offset
        return self.tree.leaf_item[first:after]


# -- pools ---------------------------------------------------------------------------------------------------------------------


class DensePool:
    """Node rows, float32[P, width], and counts of events, float64[P]. size: P."""

    def __init__(self, width: int) -> None:
        self._rows_PD, self._count_P = np.zeros((FIRST, width), np.float32), np.zeros(FIRST)
        self.size = 1

    def add(self, row: LiveRow) -> None:
        self._rows_PD, self._count_P = (with_room(array, self.size + 1) for array in (self._rows_PD, self._count_P))
        self._rows_PD[self.size], self._count_P[self.size] = row.values, row.count
        self.size += 1

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        room = max(FIRST, 2 * len(entry_X))
        self._rows_PD, self._count_P = (with_room(array[entry_X], room) for array in (self._rows_PD, self._count_P))
        self.size = len(entry_X)

    @property
    def numbers(self) -> int:
        """Count of the numbers of all entries, used or not."""
        return self.size * self._rows_PD.shape[1]

    @property
    def rows_PD(self) -> Float32:
        """Read-only."""
        return read_only(self._rows_PD[: self.size])[0]

    @property
    def count_P(self) -> Float64:
        """Read-only."""
        return read_only(self._count_P[: self.size])[0]


class SparseRowsPool:
    """Sparse rows: an entry has the features and values at begin_P … end_P − 1. size: P; weights: features of all entries."""

    def __init__(self) -> None:
        self._begin_P, self._end_P = np.zeros(FIRST, np.int64), np.zeros(FIRST, np.int64)
        self._feature, self._value = np.zeros(FIRST, np.int32), np.zeros(FIRST, np.float32)
        self.size, self.weights = 1, 0

    def add(self, feature: Int32, value: Float32) -> None:
        entry, end = self.size, self.weights + len(feature)
        self._begin_P, self._end_P = (with_room(array, entry + 1) for array in (self._begin_P, self._end_P))
        self._feature, self._value = (with_room(array, end) for array in (self._feature, self._value))
        self._begin_P[entry], self._end_P[entry] = self.weights, end
        self._feature[self.weights : end], self._value[self.weights : end] = feature, value
        self.weights, self.size = end, entry + 1

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        count_X = self._end_P[entry_X] - self._begin_P[entry_X]
        end_X, weight = np.cumsum(count_X), spans(self._begin_P[entry_X], self._end_P[entry_X])
        room, self.size, self.weights = max(FIRST, 2 * len(entry_X)), len(entry_X), len(weight)
        self._begin_P, self._end_P = (with_room(array, room) for array in (end_X - count_X, end_X))
        self._feature, self._value = (with_room(array[weight], max(FIRST, 2 * len(weight))) for array in (self._feature, self._value))

    @property
    def arrays(self) -> tuple[Int64, Int64, Int32, Float32]:
        """begin_P, end_P, features and values."""
        entries, weights = slice(self.size), slice(self.weights)
        return self._begin_P[entries], self._end_P[entries], self._feature[weights], self._value[weights]


class WeightPool:
    """Weights of linear scorers, and the rows of a tail. size: P."""

    def __init__(self) -> None:
        self._weights, self._tails = SparseRowsPool(), SparseRowsPool()
        self._bias_P = np.zeros(FIRST, np.float32)

    @property
    def size(self) -> int:
        return self._weights.size

    @property
    def numbers(self) -> int:
        """Count of the numbers of all entries, used or not."""
        return self._weights.weights + self._tails.weights

    def add(self, row: LiveRow) -> None:
        entry = self.size
        self._bias_P = with_room(self._bias_P, entry + 1)
        self._bias_P[entry] = row.bias
        self._weights.add(row.feature, row.values)
        self._tails.add(row.tail_feature, row.tail_value)

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        self._bias_P = with_room(self._bias_P[entry_X], max(FIRST, 2 * len(entry_X)))
        self._weights.keep(entry_X)
        self._tails.keep(entry_X)

    @property
    def sparse(self) -> SparsePool:
        """Read-only arrays."""
        begin_P, end_P, feature, weight = self._weights.arrays
        return SparsePool(*read_only(begin_P, end_P, self._bias_P[: self.size], feature, weight, *self._tails.arrays))
