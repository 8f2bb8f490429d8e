"""A snapshot of what is live in one version: live leaves beside those of its trees, and the trained items that are gone.

It copies nothing: it holds a moment, counts, and the arrays to which the version's one writer goes on appending (espalier.entry_lists).
What a snapshot shows never changes. Properties that most searches do not need are computed on first use.

A live leaf hangs under a node of the level above the leaves, its parent, at a slot: its position among the parent's children in a fold
(fold.py), a version with the overlay in it. Inner levels do not change, so a search of the trained tree finds the parents, and one more
pass scores the live leaves under them (engines/overflow.py). A trained item whose row was changed is live at the slot of its own leaf, or
in linear models elsewhere; its own leaf then counts no more.

The answer of a bundle with an overlay is that of the fold, for every engine, filter, exclusion, beam and memory, and in forests
(tests/espalier/live/test_oracle.py). So vacant trained leaves are taken first, ties break by slot, and a live item in a history counts by
its own row on the leaf level and by its parent's path above.

Legend: I trained items, R handles, X live leaves, E entries, P entries of leaves, C live leaves under given nodes, W item rows, D node row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.arrays import Bool, Float32, Float64, Int32, Int64, read_only
from espalier.entry_lists import KEY, NEXT, OTHER_KEY, OTHER_NEXT, EntryArrays, entries_of, entries_under, open_entries
from espalier.memory_sums import SOURCE, TARGET
from espalier.search import NodeMask

PARENT, HANDLE, SLOT = KEY, OTHER_KEY, OTHER_NEXT + 1
"""Columns of a live leaf's entry."""
KIND, ITEM = NEXT + 1, NEXT + 2
"""Columns of a change of a trained item, whose key is its handle."""
DELETED, MOVED, CHANGED = range(3)
"""Kinds of such changes: deleted or expired; live with another row; other fields, while the trained leaf still counts."""


@dataclass(frozen=True, eq=False)
class SparsePool:
    """Weights of live leaves of linear scorers: an entry has weight[begin_P[entry] : end_P[entry]].

    Snapshots share the arrays. Values that a snapshot refers to never change.

    tail_begin_P, tail_end_P, tail_feature, tail_value   likewise: the items' rows in the bundle's tail, in the first tree of a forest
    """

    begin_P: Int64
    end_P: Int64
    bias_P: Float32
    feature: Int32
    weight: Float32
    tail_begin_P: Int64
    tail_end_P: Int64
    tail_feature: Int32
    tail_value: Float32


@dataclass(frozen=True, eq=False)
class LiveLeaves:
    """The live leaves of one tree.

    entries  by parent and by handle; a leaf's entry number is its index in the arrays below
    size     number of leaves
    rows_PD  float32[P, D]: node rows, of a model of graphs
    sparse   weights, of a linear one
    count_P  float64[P]: assumed number of events of their items, of a model of graphs
    """

    entries: EntryArrays
    size: int
    rows_PD: Float32 | None
    sparse: SparsePool | None
    count_P: Float64 | None = None

    def __len__(self) -> int:
        return self.size

    def of_handles(self, handles: Int64) -> Int64:
        """int64: the entries of the leaves of some handles, 0 for a handle without a leaf."""
        entry_W: Int64 = entries_of(*read_only(handles), self.entries)
        return entry_W

    def under(self, nodes_K: Int64) -> tuple[Int64, Int64]:
        """int64[C] and int64[C]: the entries of the leaves under some nodes, and for each the position 0 … K − 1 of its parent."""
        entry_C, of_C = entries_under(*read_only(nodes_K), self.entries)
        return entry_C, of_C

    def column(self, column: int, entries: Int64) -> Int64:
        """One column (PARENT, HANDLE, SLOT) of some entries."""
        values: Int64 = self.entries.rows[entries, column]
        return values

    @cached_property
    def open(self) -> Int64:
        """int64[X]: the entries of all leaves, in order of arrival."""
        return open_entries(self.entries)

    @cached_property
    def entry_X(self) -> Int64:
        """int64[X]: the entries of all leaves, by (parent, slot), as a fold has them."""
        return self.open[np.lexsort((self.column(SLOT, self.open), self.column(PARENT, self.open)))]

    @cached_property
    def parent_X(self) -> Int64:
        """int64[X]: their parents."""
        return self.column(PARENT, self.entry_X)

    @cached_property
    def slot_X(self) -> Int64:
        """int64[X]: their slots."""
        return self.column(SLOT, self.entry_X)

    @cached_property
    def handle_X(self) -> Int64:
        """int64[X]: the handles of their items."""
        return self.column(HANDLE, self.entry_X)


@dataclass(frozen=True, eq=False)
class LiveMemory:
    """Entries of the memory that trained arrays lack: S[source, target], where the source or the target is live.

    entries  by source, an item row; also entries of items that are not live now
    value    float32[E]: S, above 0
    """

    entries: EntryArrays
    value: Float32

    def of(self, source: int) -> tuple[Int64, Float32]:
        """The targets and values of an item row, by target."""
        entry_C, _ = entries_under(*read_only(np.array([source])), self.entries)
        target_C = self.entries.rows[entry_C, TARGET]
        order = np.argsort(target_C)
        return target_C[order], self.value[entry_C[order]]

    @property
    def all(self) -> tuple[Int64, Int64, Float32]:
        """Sources, targets and values of all entries, by source and target."""
        entry_E = open_entries(self.entries)
        source_E, target_E = self.entries.rows[entry_E, SOURCE], self.entries.rows[entry_E, TARGET]
        order = np.lexsort((target_E, source_E))
        return source_E[order], target_E[order], self.value[entry_E[order]]


@dataclass(frozen=True, eq=False)
class Overlay:
    """See the module.

    sequence   of the last operation in it
    items      I
    handles    R
    item_R     int64[R]: the item row of each handle
    handle_I   int32[I]: the handle of a trained item that was put or deleted, −1 of another; handles from R on came later
    shown_R    bool, at least R: handles that no standing list removes
    removed    the mask of the trained items that no standing list removes; None: it removes none
    trees      of each tree
    trained    changes of trained items, see KIND
    moved      number of trained items that are live with another row
    eligible   number of items that a query without a filter may get
    is_open    whether every node of the trained trees is eligible to a query without a filter
    memory     None where the bundle has none
    touched    the moment of the snapshot, as `TouchedParents` counts changes
    mask_of    makes `standing`
    """

    sequence: int
    items: int
    handles: int
    item_R: Int64
    handle_I: Int32
    shown_R: Bool
    removed: NodeMask | None
    trees: tuple[LiveLeaves, ...]
    trained: EntryArrays
    moved: int
    eligible: int
    is_open: bool
    memory: LiveMemory | None
    touched: int
    mask_of: Callable[[Overlay], NodeMask]

    @property
    def is_empty(self) -> bool:
        """Whether searches answer as without the overlay, and no request can hold an item row that the bundle lacks."""
        return self.handles == 0

    @property
    def is_as_trained(self) -> bool:
        """Whether a query without a filter may get exactly the items of the bundle: all changes were undone."""
        return self.is_open and not len(self.trees[0])

    def handles_of(self, rows: Int64) -> Int64:
        """int64[len(rows)]: the handle of each item row; −1 for a trained item whose trained leaf is its leaf."""
        handles, is_trained = rows - self.items, rows < self.items
        trained_handles = np.where(rows[is_trained] >= 0, self.handle_I[rows[is_trained]], -1).astype(np.int64)
        trained_handles[self.trees[0].of_handles(trained_handles) == 0] = -1
        handles[is_trained] = trained_handles
        return handles

    def live_leaf(self, row: int, tree: int) -> int:
        """The entry of an item's live leaf in a tree; 0 for an item without one."""
        return int(self.trees[tree].of_handles(self.handles_of(np.array([row])))[0])

    @cached_property
    def standing(self) -> NodeMask | None:
        """The mask of a query without a filter; None where every node of the trained trees is eligible."""
        return None if self.is_open else self.mask_of(self)

    @cached_property
    def leaf_R(self) -> Bool:
        """bool[R]: which handles have live leaves."""
        leaf_R = np.zeros(self.handles, np.bool_)
        leaf_R[self.trees[0].column(HANDLE, self.trees[0].open)] = True
        return leaf_R

    @cached_property
    def eligible_R(self) -> Bool:
        """bool[R]: which handles with live leaves a query without a filter may get: those that no standing list removes."""
        return self.leaf_R & self.shown_R[: self.handles]

    @cached_property
    def hidden(self) -> Int64:
        """int64, ascending: trained item rows whose trained leaves do not count: deleted, expired or live with another row."""
        return np.sort(np.concatenate([self._changes(DELETED)[1], self.row_W]))

    @property
    def row_W(self) -> Int64:
        """int64[W], ascending: trained item rows that are live with another row."""
        moved: Int64 = self._changes(MOVED)[1]
        return moved

    @cached_property
    def changed(self) -> Int64:
        """int64[2, …], ascending by item row: (handle, trained item row) of trained items with other fields whose trained leaves count."""
        return self._changes(CHANGED)

    def _changes(self, kind: int) -> Int64:
        """int64[2, …]: handles and item rows of trained items with one kind of change, ascending by item row."""
        entry_E = open_entries(self.trained)
        rows_EC = self.trained.rows[entry_E[self.trained.rows[entry_E, KIND] == kind]]
        changes: Int64 = rows_EC[np.argsort(rows_EC[:, ITEM])][:, [KEY, ITEM]].T
        return changes
