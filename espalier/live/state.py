"""The state of a version with live items: one thread applies operations in order, and takes snapshots.

The state of a version depends on the operations and their stored placements alone, so all workers that have applied the same ones have the
same overlay. Knows operations with placements. Does not know how placements are chosen (espalier.placement) or where operations are stored
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

from espalier.arrays import read_only
from espalier.bundle import Bundle
from espalier.entry_lists import KEY, EntryLists, with_room
from espalier.errors import InvalidData
from espalier.live.fields import Columns
from espalier.live.items import LiveItem, LiveItems
from espalier.live.live_tree import LiveTree
from espalier.live.masks import Standing, TouchedParents
from espalier.live.memory_entries import MemoryEntries
from espalier.live.operations import Operation
from espalier.live.overlay import CHANGED, DELETED, MOVED, Overlay
from espalier.live.rows import Placement
from espalier.manifest import LinearScorer
from espalier.masks.eligibility import unrestricted_mask
from espalier.search import NodeMask

MAX_HANDLES = 1 << 18
"""Ids that one open version may have seen live. A writer whose version has seen as many refuses new ids. It is no limit in this file,
because every process applies all committed operations. The version is opened anew before it is reached."""
KEPT_FIELDS = 256
"""The last so many deleted items keep their fields, for requests that have found them already."""
ROOM = 256
"""Initial room, in handles."""
COLUMNS = 4
"""Columns of a trained item's change, from its key on: handle, the number of its next change, kind, item row."""
UNUSED = 1024
"""`spare` of `EntryLists.is_worn` for these changes."""
SPARE_EXPIRIES = 1024
"""Outdated expiry times that may be held, in addition to twice the number of ids."""


@dataclass(frozen=True, eq=False)
class Change:
    """An operation and the item's placements.

    kind        `put` or `delete`
    fields      the item's columns from now on; None: unchanged
    placements  one for each tree; empty: the leaves stay as they are (of a trained item, as they were trained)
    valid_until when the item expires, seconds since 1970; a delete has it if the item's time had passed
    at          seconds since 1970
    by          the evidence that placed the item, for people
    """

    sequence: int
    id: str
    kind: Literal["put", "delete"]
    fields: Mapping[str, Any] | None = None
    placements: tuple[Placement, ...] = ()
    valid_until: float | None = None
    at: float = 0.0
    by: str = ""

    @staticmethod
    def of(operation: Operation, placements: tuple[Placement, ...], columns: Columns, now: float, by: str = "") -> Change:
        """The change of an operation. A put whose time has passed becomes a delete, so that ids that expired long ago take no handles."""
        sequence, item_id, body, at = operation.sequence, operation.id, operation.body, operation.at
        if operation.has_expired(now):
            return Change(sequence, item_id, "delete", valid_until=body.valid_until, at=at)
        fields = None if body.fields is None else columns.fitting(body.fields)
        return Change(sequence, item_id, operation.kind, fields, placements, body.valid_until, at, by)


class LiveState:
    """The live items of one version; see the module. Any thread may read `table` and `touched`; only one thread uses the rest.

    expired_until  the latest `valid_until` of the items that were taken out because their time had passed
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.table = LiveItems(bundle.items)
        self.sequence = 0
        scorer = bundle.manifest.scorer
        width, features = (None, scorer.features) if isinstance(scorer, LinearScorer) else (scorer.node_dim, 0)
        trees = [single.tree for single in bundle.alone]
        has_tail = bundle.manifest.tail is not None
        self._trees = [LiveTree(tree, width, features, has_tail and t == 0) for t, tree in enumerate(trees)]
        self._items = bundle.manifest.tree.items
        self._moment = 0  # number of changes so far
        self._memory = None if bundle.manifest.memory is None else MemoryEntries(self._items + ROOM)
        self._handle_I = np.full(self._items, -1, np.int32)
        self._item_R, self._shown_R = np.zeros(ROOM, np.int64), np.ones(ROOM, np.bool_)
        (self._shown,) = read_only(self._shown_R)
        self._changes = EntryLists(COLUMNS, ROOM)  # of trained items
        self._change_of: dict[int, tuple[int, int]] = {}  # handle of a trained item → kind of its change, and entry in `_changes`
        self._change_counts = [0, 0, 0]  # of each kind
        self._ineligible_rows: set[int] = set()  # trained rows whose trained leaves do not count, or that a standing list removes
        self._removed: frozenset[str] = frozenset()
        self._removed_rows: frozenset[int] = frozenset()
        self._removed_mask: NodeMask | None = None
        self._removed_live = 0  # live leaves of removed items
        self._trained_masks = [unrestricted_mask(tree) for tree in trees]  # nodes with a trained item below; None: all
        self._leaves_below_empty = 0  # live leaves under nodes that have no trained item below
        self._expiry: list[tuple[float, int]] = []
        self.expired_until = -math.inf
        self._deleted_handles: deque[int] = deque()  # of deleted items that still have their fields
        self._overlay: Overlay | None = None
        self.touched = TouchedParents(len(trees))
        self._standing = Standing(trees, self.touched)

    @property
    def live_items(self) -> int:
        """Number of items with a live leaf."""
        return len(self._trees[0])

    @property
    def numbers(self) -> int:
        """Count of the numbers in the rows of all live leaves."""
        return sum(tree.numbers for tree in self._trees)

    @property
    def tombstones(self) -> int:
        """Number of trained items that are deleted or expired."""
        return self._change_counts[DELETED]

    # -- writing --------------------------------------------------------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply operations, in the order of their sequence numbers. Operations that were applied before are skipped.

        An item whose time had passed at an operation is taken out if the operation has its slot. Raises InvalidData for an operation that
        does not fit the version: the operations before it have been applied, and nothing of it.
        """
        changes = list(changes)
        rows = self.bundle.items.rows_of([change.id for change in changes])
        for change, trained_row in zip(changes, rows.tolist(), strict=True):
            if change.sequence <= self.sequence:
                continue
            self._apply(change, trained_row)
            self.sequence = change.sequence

    def expire_held(self, operations: Sequence[Operation], now: float) -> None:
        """Have items of the bundle expire. operations: the last ones of items that expire, which the bundle holds.

        A bundle stores no expiries. Rows and fields stay as they are in it.
        """
        rows = self.bundle.items.rows_of([operation.id for operation in operations])
        for operation, row in zip(operations, rows.tolist(), strict=True):
            if row >= 0 and operation.body.valid_until is not None:
                kind: Literal["put", "delete"] = "delete" if operation.has_expired(now) else "put"
                until, at = operation.body.valid_until, operation.at
                self._apply(Change(operation.sequence, operation.id, kind, valid_until=until, at=at), row)

    def _apply(self, change: Change, trained_row: int) -> None:
        if change.kind == "put":
            self._put(change, trained_row)
        else:
            self._delete(change.id, trained_row, change.sequence)
            self.expired_until = max(self.expired_until, change.valid_until or -math.inf)
        self._overlay = None

    def skip_to(self, sequence: int) -> None:
        """Count operations up to a sequence number as applied: the version was made with them, or they do not concern it."""
        if sequence > self.sequence:
            self.sequence, self._overlay = sequence, None

    def set_removed(self, ids: Sequence[str], mask: NodeMask | None) -> None:
        """Replace the standing list of removed items. mask: the trained items that are not on it; None for all."""
        rows = self.bundle.items.rows_of(list(ids))
        old_rows, self._removed_rows = self._removed_rows, frozenset(rows[rows >= 0].tolist())
        old_ids, self._removed = self._removed, frozenset(ids)
        shown_R = self._shown_R.copy()  # snapshots hold the old array
        for item_id in old_ids ^ self._removed:
            entry = self.table.entry(item_id)
            if entry is not None:
                self._tally(entry.handle, -1)
                shown_R[entry.handle] = item_id not in self._removed
        self._shown_R, (self._shown,) = shown_R, read_only(shown_R)
        for item_id in old_ids ^ self._removed:
            entry = self.table.entry(item_id)
            if entry is not None:
                self._tally(entry.handle, 1)
        self._removed_mask = mask
        for row in old_rows ^ self._removed_rows:
            self._note_ineligible(row)
        self._overlay = None

    def expire(self, now: float) -> int:
        """Take out the items whose time has passed. Returns their number."""
        expired = 0
        while self._expiry and self._expiry[0][0] <= now:
            _, handle = heapq.heappop(self._expiry)
            entry = self.table.entry_at(handle)
            if entry is not None and not entry.is_deleted and entry.valid_until is not None and entry.valid_until <= now:
                self._delete(entry.id, self._trained_row(entry), entry.sequence)
                self.expired_until = max(self.expired_until, entry.valid_until)
                expired += 1
        if expired:
            self._overlay = None
        return expired

    def next_expiry(self) -> float:
        """When the next item may expire, seconds since 1970; infinite if none will."""
        return self._expiry[0][0] if self._expiry else math.inf

    def live_leaf_of(self, item_id: str, tree: int = 0) -> tuple[int, int] | None:
        """(parent, slot) of an item's live leaf; None for an item without one."""
        entry = self.table.entry(item_id)
        return None if entry is None else self._trees[tree].leaf(entry.handle)

    def trained_leaf_of(self, item_id: str, tree: int = 0) -> tuple[int, int] | None:
        """(parent, slot) of an item's trained leaf; None for an id that was not trained."""
        row = self.bundle.items.row_of(item_id)
        return None if row < 0 else self._trees[tree].trained_leaf(row)

    @property
    def room(self) -> int:
        """The most live items that the trees have room for, besides trained ones."""
        return min(tree.room for tree in self._trees)

    def has_room(self, tree: int, parent: int, promised: Collection[int] = ()) -> bool:
        """Whether a parent can take one more live leaf. promised: slots that other items are about to take."""
        return self._trees[tree].has_room(parent, promised)

    def has_parents(self, placements: Sequence[Placement]) -> bool:
        """Whether there is one placement for each tree, under a node that leaves may have."""
        return self._has_trees(placements) and all(self._trees[place.tree].is_parent(place.parent) for place in placements)

    def _has_trees(self, placements: Sequence[Placement]) -> bool:
        return [placement.tree for placement in placements] == list(range(len(self._trees)))

    def near(self, tree: int, parent: int) -> Iterator[int]:
        """All parents of a tree, nearest to a node first, the node itself before all. For items whose candidate parents are full."""
        return self._trees[tree].near(parent)

    def next_slot(self, tree: int, parent: int, promised: Collection[int] = ()) -> int:
        """The slot of the next live leaf of a parent: the first vacant trained leaf, or the first behind the children."""
        return self._trees[tree].next_slot(parent, promised)

    def _put(self, change: Change, trained_row: int) -> None:
        """trained_row: the item row of a trained item, −1 for another."""
        old = self.table.entry(change.id)
        if change.placements and not self._has_trees(change.placements):
            raise InvalidData("placements", f"{len(change.placements)}", f"{len(self._trees)}, one for each tree")
        self._vacate(change)
        self._check(change, trained_row, old)
        self._moment += 1
        handle = self._handle(change.id, trained_row)
        fields = old.fields if change.fields is None and old is not None and not old.is_deleted else change.fields
        self._tally(handle, -1)
        for placement in change.placements:
            self._trees[placement.tree].put(self._moment, handle, placement, trained_row)
        keeps_leaves = trained_row < 0 and not change.placements and old is not None and not old.is_deleted
        if not (change.placements or keeps_leaves):
            self._drop_leaves(handle)
        self._tally(handle, 1)
        item_row = trained_row if trained_row >= 0 else self._items + handle
        if change.placements and self._memory is not None:
            row = change.placements[0].row
            self._memory.put(self._moment, handle, item_row, row.memory_to, row.memory_from, self.table.known_row)
        if trained_row >= 0:
            has_leaf = self._trees[0].leaf(handle) is not None
            self._change_trained(trained_row, handle, MOVED if has_leaf else None if fields is None else CHANGED)
        self.table.write(
            LiveItem(
                id=change.id,
                handle=handle,
                item_row=item_row,
                fields=fields,
                sequence=change.sequence,
                since=change.at if old is None or old.is_deleted else old.since,
                by=old.by if old is not None and keeps_leaves else change.by,
                valid_until=change.valid_until,
            )
        )
        if change.valid_until is not None:
            self._note_expiry(handle, change.valid_until)

    def _vacate(self, change: Change) -> None:
        """Take out the items in an operation's slots whose time had passed when the operation was decided."""
        for placement in change.placements:
            holder = self._trees[placement.tree].holder(placement.parent, placement.slot)
            entry = None if holder is None else self.table.entry_at(holder)
            if entry is not None and entry.id != change.id and entry.valid_until is not None and entry.valid_until <= change.at:
                self._delete(entry.id, self._trained_row(entry), entry.sequence)

    def _trained_row(self, entry: LiveItem) -> int:
        """The item row of a trained item, −1 for another."""
        return entry.item_row if entry.item_row < self._items else -1

    def _check(self, change: Change, trained_row: int, old: LiveItem | None) -> None:
        """Raise InvalidData if an operation does not fit, before anything has changed."""
        handle = -1 if old is None else old.handle
        if not change.placements and trained_row < 0 and self._trees[0].leaf(handle) is None:
            raise InvalidData("placements", "none", f"one for each tree: {change.id!r} has no row yet")
        for placement in change.placements:
            self._trees[placement.tree].check(handle, placement, trained_row)

    def _delete(self, item_id: str, trained_row: int, sequence: int) -> None:
        entry = self.table.entry(item_id)
        if entry is None and trained_row < 0:
            return
        self._moment += 1
        if entry is None:
            entry = LiveItem(item_id, self._handle(item_id, trained_row), trained_row, None, sequence, 0.0)
        self._tally(entry.handle, -1)
        self._drop_leaves(entry.handle)
        if trained_row >= 0:
            self._change_trained(trained_row, entry.handle, DELETED)
        self.table.write(replace(entry, sequence=sequence, is_deleted=True))
        self._deleted_handles.append(entry.handle)
        if len(self._deleted_handles) > KEPT_FIELDS:
            self._forget_fields(self._deleted_handles.popleft())

    def _drop_leaves(self, handle: int) -> None:
        """Take away the live leaves of an item and its entries of the memory."""
        for tree in self._trees:
            tree.drop(self._moment, handle)
        if self._memory is not None:
            self._memory.drop(self._moment, handle)

    def _forget_fields(self, handle: int) -> None:
        """Drop the fields of an item that was deleted a while ago: the requests that found it have been answered."""
        entry = self.table.entry_at(handle)
        if entry is not None and entry.is_deleted and handle not in self._deleted_handles:
            self.table.write(replace(entry, fields=None))

    def _note_expiry(self, handle: int, valid_until: float) -> None:
        """Note when an item expires. Times that later operations have replaced are dropped now and then."""
        heapq.heappush(self._expiry, (valid_until, handle))
        if len(self._expiry) > 2 * self.table.handles + SPARE_EXPIRIES:
            entries = [self.table.entry_at(handle) for handle in range(self.table.handles)]
            self._expiry = [(e.valid_until, e.handle) for e in entries if e is not None and e.valid_until is not None and not e.is_deleted]
            heapq.heapify(self._expiry)

    def _handle(self, item_id: str, trained_row: int) -> int:
        if self.table.entry(item_id) is not None:
            return self.table.handle_for(item_id)
        handle, row = self.table.handle_for(item_id), trained_row
        if trained_row >= 0:
            self._handle_I[trained_row] = handle
        else:
            row = self._items + handle
        if self._memory is not None:
            self._memory.arrived(self._moment, item_id, row)
        self._item_R = with_room(self._item_R, handle + 1)
        if handle == len(self._shown_R):
            self._shown_R = np.append(self._shown_R, np.ones_like(self._shown_R))
            (self._shown,) = read_only(self._shown_R)
        self._item_R[handle], self._shown_R[handle] = row, item_id not in self._removed
        return handle

    def _tally(self, handle: int, step: int) -> None:
        """Count the leaves of an item. step: −1 before the item changes, 1 after."""
        for t, (tree, trained_mask) in enumerate(zip(self._trees, self._trained_masks, strict=True)):
            leaf = tree.leaf(handle)
            if leaf is not None:
                self.touched.touch(t, leaf[0])
                self._leaves_below_empty += step if trained_mask is not None and not trained_mask.eligible_N[leaf[0]] else 0
                self._removed_live += step if t == 0 and not self._shown_R[handle] else 0

    def _change_trained(self, row: int, handle: int, kind: int | None) -> None:
        """Note the change of a trained item: DELETED, MOVED, CHANGED, or None for an item as it was trained."""
        old_kind, entry = self._change_of.pop(handle, (None, 0))
        if old_kind is not None:
            self._changes.close(entry, self._moment)
            self._change_counts[old_kind] -= 1
        if kind is not None:
            self._change_of[handle] = kind, self._changes.add(self._moment, (handle, 0, kind, row))
            self._change_counts[kind] += 1
        if self._changes.is_worn(UNUSED):
            self._changes.drop_closed()
            open_EC = self._changes.rows_EC[1 : self._changes.used]
            self._change_of = {key: (self._change_of[key][0], entry) for entry, key in enumerate(open_EC[:, KEY].tolist(), start=1)}
        self._note_ineligible(row)
        for t, tree in enumerate(self._trees):
            self.touched.touch(t, tree.trained_leaf(row)[0])

    def _note_ineligible(self, row: int) -> None:
        kind, _ = self._change_of.get(int(self._handle_I[row]), (None, 0))
        if kind in (DELETED, MOVED) or row in self._removed_rows:
            self._ineligible_rows.add(row)
        else:
            self._ineligible_rows.discard(row)

    # -- snapshots ------------------------------------------------------------------------------------------------------

    def overlay(self) -> Overlay:
        """A snapshot of the live items as they are now."""
        if self._overlay is None:
            handles = self.table.handles
            item_R, handle_I = read_only(self._item_R[:handles], self._handle_I)
            self._overlay = Overlay(
                sequence=self.sequence,
                items=self._items,
                handles=handles,
                item_R=item_R,
                handle_I=handle_I,
                shown_R=self._shown,
                removed=self._removed_mask,
                trees=tuple(tree.leaves(self._moment) for tree in self._trees),
                trained=self._changes.snapshot(self._moment),
                moved=self._change_counts[MOVED],
                eligible=self._items - len(self._ineligible_rows) + self.live_items - self._removed_live,
                is_open=not self._ineligible_rows and not self._leaves_below_empty,
                memory=None if self._memory is None else self._memory.snapshot(self._moment),
                touched=self.touched.now,
                mask_of=self._standing.mask,
            )
        return self._overlay
