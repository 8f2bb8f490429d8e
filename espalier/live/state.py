"""What operations on live items make of a version: applied one after the other by one thread, they give snapshots.

The state of a version depends on the operations and their stored placements alone, so all workers that have applied the same ones have the
same overlay. Knows operations that were placed. Does not know how a place is found (espalier.placement) or where operations are kept
(journal.py).

Legend: I trained items, R handles.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from espalier.bundle import Bundle
from espalier.errors import InvalidData
from espalier.live.items import LiveItem, LiveItems
from espalier.live.live_tree import LiveTree
from espalier.live.memory_entries import MemoryEntries
from espalier.live.overlay import Overlay
from espalier.live.rows import Placement
from espalier.live.sorted_arrays import SortedArrays
from espalier.live.standing import Standing, TouchedParents
from espalier.manifest import LinearScorer

MAX_HANDLES = 1 << 18
"""Ids that one open version may have seen live: a writer that has seen as many refuses new ones. It is no limit here, because
every process applies what was committed, however many ids it has seen itself. The version is opened anew before that."""
KEPT_FIELDS = 256
"""Items that keep their fields after they were deleted, the last ones, for requests that have found them already."""
SPARE_EXPIRIES = 1024
"""Times of expiry that operations have overtaken, and that may be kept beside as many as there are ids."""


@dataclass(frozen=True, eq=False)
class Change:
    """An operation and where it puts its item.

    kind        `put` or `delete`
    fields      the item's columns from now on; None: as they are
    placements  one for each tree; empty: its row stays as it is (of a trained item, as it was trained)
    valid_until when the item goes, seconds since 1970; of a delete: its time had passed
    at          seconds since 1970
    by          what placed it, for people
    """

    sequence: int
    id: str
    kind: Literal["put", "delete"]
    fields: Mapping[str, Any] | None = None
    placements: tuple[Placement, ...] = ()
    valid_until: float | None = None
    at: float = 0.0
    by: str = ""


class LiveState:
    """The live items of one version; see the module. Its `table` and `touched` may be read by other threads, all else by one.

    expired_until  the latest `valid_until` of items that are out because their time had passed
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.table = LiveItems(bundle.items)
        self.sequence = 0
        scorer = bundle.manifest.scorer
        width, features = (None, scorer.features) if isinstance(scorer, LinearScorer) else (scorer.node_dim, 0)
        trees = [alone.tree for alone in bundle.alone]
        has_tail = bundle.manifest.tail is not None
        self._trees = [LiveTree(tree, width, features, has_tail and place == 0) for place, tree in enumerate(trees)]
        self._items = bundle.manifest.tree.items
        self._memory = None if bundle.manifest.memory is None else MemoryEntries()
        self._gone_I = np.zeros(self._items, np.bool_)  # whether an item's own leaf does not count
        self._deleted, self._moved, self._kept = SortedArrays(), SortedArrays(1), SortedArrays(1)
        self._is_deleted: set[int] = set()  # trained rows that are deleted or expired
        self._is_moved: set[int] = set()  # trained rows that are live with another row
        self._leaf_R, self._removed_R = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
        self._removed: frozenset[str] = frozenset()
        self._removed_rows: frozenset[int] = frozenset()
        self._expiry: list[tuple[float, int]] = []
        self.expired_until = -math.inf
        self._dropped: deque[int] = deque()  # handles of deleted items that still have their fields
        self._overlay: Overlay | None = None
        self.touched = TouchedParents(len(trees))
        self._standing = Standing(trees, self.touched)

    @property
    def live_items(self) -> int:
        """Items that have a live leaf."""
        return len(self._trees[0])

    @property
    def numbers(self) -> int:
        """Numbers of the rows of all live leaves."""
        return sum(tree.numbers for tree in self._trees)

    @property
    def tombstones(self) -> int:
        """Trained items that are deleted or expired."""
        return len(self._is_deleted)

    # -- writing --------------------------------------------------------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply operations, in the order of their sequence numbers; those that were applied before change nothing.

        An item whose time had passed at an operation goes where the operation has its slot. Raises InvalidData where one does not fit the
        version; those before it have been applied, and nothing of it.
        """
        changes = list(changes)
        rows = self.bundle.items.rows_of([change.id for change in changes])
        for change, trained in zip(changes, rows.tolist(), strict=True):
            if change.sequence <= self.sequence:
                continue
            if change.kind == "put":
                self._put(change, trained)
            else:
                self._delete(change.id, trained, change.sequence)
                self.expired_until = max(self.expired_until, change.valid_until or -math.inf)
            self.sequence = change.sequence
            self._overlay = None

    def skip_to(self, sequence: int) -> None:
        """Count operations up to a sequence number as applied: the version was made of them, or they are nothing to it."""
        if sequence > self.sequence:
            self.sequence, self._overlay = sequence, None

    def set_removed(self, ids: Sequence[str]) -> None:
        """The ids of the standing list of removed items, instead of those before."""
        rows = self.bundle.items.rows_of(list(ids))
        rows_before, self._removed_rows = self._removed_rows, frozenset(rows[rows >= 0].tolist())
        ids_before, self._removed = self._removed, frozenset(ids)
        for item_id in ids_before ^ self._removed:
            entry = self.table.entry(item_id)
            if entry is not None:
                self._removed_R[entry.handle] = item_id in self._removed
                for place, tree in enumerate(self._trees):
                    self._touch_leaf(place, tree, entry.handle)
        for row in rows_before ^ self._removed_rows:
            self._touch_trained(row)
        self._standing.forget()
        self._overlay = None

    def expire(self, now: float) -> int:
        """Take out the items whose time has passed; how many there were."""
        expired = 0
        while self._expiry and self._expiry[0][0] <= now:
            _, handle = heapq.heappop(self._expiry)
            entry = self.table.entry_at(handle)
            if entry is not None and not entry.is_deleted and entry.valid_until is not None and entry.valid_until <= now:
                self._delete(entry.id, entry.item_row if entry.item_row < self._items else -1, entry.sequence)
                self.expired_until = max(self.expired_until, entry.valid_until)
                expired += 1
        if expired:
            self._overlay = None
        return expired

    def next_expiry(self) -> float:
        """When the next item may expire, seconds since 1970; infinite where none will."""
        return self._expiry[0][0] if self._expiry else math.inf

    def leaf_of(self, item_id: str, tree: int = 0) -> tuple[int, int] | None:
        """(parent, slot) of an item's live leaf, or of its trained one; None where it has neither."""
        return self.live_leaf_of(item_id, tree) or self.trained_leaf_of(item_id, tree)

    def live_leaf_of(self, item_id: str, tree: int = 0) -> tuple[int, int] | None:
        """(parent, slot) of an item's live leaf; None where it has none."""
        entry = self.table.entry(item_id)
        return None if entry is None else self._trees[tree].leaf(entry.handle)

    def trained_leaf_of(self, item_id: str, tree: int = 0) -> tuple[int, int] | None:
        """(parent, slot) of a trained item's own leaf; None of an id that was not trained."""
        row = self.bundle.items.row_of(item_id)
        return None if row < 0 else self._trees[tree].trained_leaf(row)

    def has_room(self, tree: int, parent: int, beside: Collection[int] = ()) -> bool:
        """Whether a parent can take one more live leaf. beside: slots that were promised to others."""
        return self._trees[tree].has_room(parent, beside)

    def near(self, tree: int, parent: int) -> Iterator[int]:
        """All parents of a tree, those near a node first, itself before all: where an item goes that finds its own places full."""
        return self._trees[tree].near(parent)

    def next_slot(self, tree: int, parent: int, beside: Collection[int] = ()) -> int:
        """The slot of the next live leaf of a parent: the first vacant trained leaf, or the first behind the children."""
        return self._trees[tree].next_slot(parent, beside)

    def _put(self, change: Change, trained: int) -> None:
        """trained: the row of a trained item, −1 of another."""
        before = self.table.entry(change.id)
        if trained < 0:
            self._vacate(change)
        self._check(change, trained, before)
        handle = self._handle(change.id, trained)
        fields = before.fields if change.fields is None and before is not None and not before.is_deleted else change.fields
        for placement in change.placements:
            tree = self._trees[placement.tree]
            parent, slot = (placement.parent, placement.slot) if trained < 0 else tree.trained_leaf(trained)
            self._touch_leaf(placement.tree, tree, handle)
            tree.put(handle, parent, slot, placement.row, own=trained >= 0)
            self._touch_leaf(placement.tree, tree, handle)
        if not change.placements:  # its fields may be others
            for place, tree in enumerate(self._trees):
                self._touch_leaf(place, tree, handle)
        self._leaf_R[handle] = self._trees[0].leaf(handle) is not None
        if change.placements and self._memory is not None:
            row = change.placements[0].row
            item = self._items + handle if trained < 0 else trained
            self._memory.put(handle, item, row.memory_to, row.memory_from, self.table.known_row)
        if trained >= 0:
            self._is_deleted.discard(trained)
            self._deleted.discard(trained)
            if self._leaf_R[handle]:
                self._is_moved.add(trained)
                self._moved.set(trained, handle)
                self._kept.discard(trained)
            elif fields is not None:
                self._kept.set(trained, handle)
            self._touch_trained(trained)
        self.table.write(
            LiveItem(
                id=change.id,
                handle=handle,
                item_row=trained if trained >= 0 else self._items + handle,
                fields=fields,
                sequence=change.sequence,
                since=change.at if before is None or before.is_deleted else before.since,
                by=change.by if change.placements or before is None else before.by,
                valid_until=change.valid_until,
            )
        )
        if change.valid_until is not None:
            self._expires(handle, change.valid_until)

    def _vacate(self, change: Change) -> None:
        """Take out the items whose slots an operation has because their time had passed when it was decided."""
        for placement in change.placements:
            holder = self._trees[placement.tree].holder(placement.parent, placement.slot)
            entry = None if holder is None else self.table.entry_at(holder)
            if entry is not None and entry.id != change.id and entry.valid_until is not None and entry.valid_until <= change.at:
                self._delete(entry.id, -1, entry.sequence)

    def _check(self, change: Change, trained: int, before: LiveItem | None) -> None:
        """Raise InvalidData where an operation does not fit, before anything has changed."""
        if change.placements and [placement.tree for placement in change.placements] != list(range(len(self._trees))):
            raise InvalidData("placements", f"{len(change.placements)}", f"{len(self._trees)}, one for each tree")
        handle = -1 if before is None else before.handle
        if not change.placements and trained < 0 and self._trees[0].leaf(handle) is None:
            raise InvalidData("placements", "none", f"one for each tree: {change.id!r} has no row yet")
        for placement in change.placements:
            self._trees[placement.tree].check(handle, placement, own=trained >= 0)

    def _delete(self, item_id: str, trained: int, sequence: int) -> None:
        entry = self.table.entry(item_id)
        if entry is None:
            if trained < 0:
                return
            entry = LiveItem(item_id, self._handle(item_id, trained), trained, None, sequence, 0.0)
        for place, tree in enumerate(self._trees):
            self._touch_leaf(place, tree, entry.handle)
            tree.drop(entry.handle)
        self._leaf_R[entry.handle] = False
        if self._memory is not None:
            self._memory.drop(entry.handle)
        if trained >= 0:
            self._is_deleted.add(trained)
            self._deleted.set(trained)
            self._is_moved.discard(trained)
            self._moved.discard(trained)
            self._kept.discard(trained)
            self._touch_trained(trained)
        self.table.write(replace(entry, sequence=sequence, is_deleted=True))
        self._dropped.append(entry.handle)
        if len(self._dropped) > KEPT_FIELDS:
            self._forget_fields(self._dropped.popleft())

    def _forget_fields(self, handle: int) -> None:
        """Drop the fields of an item that was deleted a while ago: the requests that found it have been answered."""
        entry = self.table.entry_at(handle)
        if entry is not None and entry.is_deleted and handle not in self._dropped:
            self.table.write(replace(entry, fields=None))

    def _expires(self, handle: int, valid_until: float) -> None:
        """Note when an item expires. What later operations have overtaken is dropped now and then."""
        heapq.heappush(self._expiry, (valid_until, handle))
        if len(self._expiry) > 2 * self.table.handles + SPARE_EXPIRIES:
            entries = [self.table.entry_at(handle) for handle in range(self.table.handles)]
            self._expiry = [(e.valid_until, e.handle) for e in entries if e is not None and e.valid_until is not None and not e.is_deleted]
            heapq.heapify(self._expiry)

    def _handle(self, item_id: str, trained: int) -> int:
        if self.table.entry(item_id) is not None:
            return self.table.handle_for(item_id)
        handle = self.table.handle_for(item_id)
        if self._memory is not None:
            self._memory.arrived(item_id, trained if trained >= 0 else self._items + handle)
        if handle >= len(self._leaf_R):
            self._leaf_R, self._removed_R = (np.append(array, np.zeros_like(array)) for array in (self._leaf_R, self._removed_R))
        self._leaf_R[handle], self._removed_R[handle] = False, item_id in self._removed
        return handle

    def _touch_leaf(self, place: int, tree: LiveTree, handle: int) -> None:
        leaf = tree.leaf(handle)
        if leaf is not None:
            self.touched.touch(place, leaf[0])

    def _touch_trained(self, row: int) -> None:
        self._gone_I[row] = row in self._is_deleted or row in self._is_moved or row in self._removed_rows
        for place, tree in enumerate(self._trees):
            self.touched.touch(place, tree.trained_leaf(row)[0])

    # -- snapshots ------------------------------------------------------------------------------------------------------

    def overlay(self) -> Overlay:
        """What is live now."""
        if self._overlay is None:
            self._overlay = self._snapshot()
        return self._overlay

    def _snapshot(self) -> Overlay:
        handles = self.table.handles
        (moved_W, handle_W), (kept_row, kept_handle) = self._moved.arrays_KX, self._kept.arrays_KX
        item_R = np.arange(self._items, self._items + handles)
        item_R[handle_W], item_R[kept_handle] = moved_W, kept_row
        leaf_R = self._leaf_R[:handles].copy()
        eligible_R = leaf_R & ~self._removed_R[:handles]
        leaves = tuple(tree.leaves() for tree in self._trees)
        eligible = self._items - int(np.count_nonzero(self._gone_I)) + int(np.count_nonzero(eligible_R))
        return Overlay(
            sequence=self.sequence,
            items=self._items,
            item_R=item_R,
            leaf_R=leaf_R,
            eligible_R=eligible_R,
            row_W=moved_W,
            handle_W=handle_W,
            hidden=np.union1d(self._deleted.arrays_KX[0], moved_W),
            changed=np.array([kept_handle, kept_row]),
            trees=leaves,
            standing=self._standing.mask(leaves, self._gone_I, eligible_R, eligible),
            eligible=eligible,
            memory=None if self._memory is None else self._memory.snapshot(),
            touched=self.touched.now,
        )
