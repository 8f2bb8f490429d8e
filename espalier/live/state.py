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
from espalier.entry_lists import KEY, EntryLists, with_room
from espalier.errors import InvalidData
from espalier.live.fields import Columns
from espalier.live.items import LiveItem, LiveItems
from espalier.live.live_tree import LiveTree
from espalier.live.memory_entries import MemoryEntries
from espalier.live.operations import Operation
from espalier.live.overlay import CHANGED, DELETED, MOVED, Overlay
from espalier.live.rows import Placement
from espalier.live.standing import Standing, TouchedParents
from espalier.manifest import LinearScorer
from espalier.masks.eligibility import unrestricted_mask
from espalier.read_only import read_only
from espalier.search import NodeMask

MAX_HANDLES = 1 << 18
"""Ids that one open version may have seen live: a writer that has seen as many refuses new ones. It is no limit here, because
every process applies what was committed, however many ids it has seen itself. The version is opened anew before that."""
KEPT_FIELDS = 256
"""Items that keep their fields after they were deleted, the last ones, for requests that have found them already."""
ROOM = 256
"""Handles that there is room for at first."""
COLUMNS = 4
"""Of a trained item's change, from its key on: handle, the number of its next change, kind, item row."""
UNUSED = 1024
"""Such changes that `EntryLists.is_worn` spares."""
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

    @staticmethod
    def of(operation: Operation, placements: tuple[Placement, ...], columns: Columns, now: float, by: str = "") -> Change:
        """One whose time has passed is a delete: of the many ids of a journal that have expired none takes a handle."""
        number, item_id, body, at = operation.sequence, operation.id, operation.body, operation.at
        if operation.has_expired(now):
            return Change(number, item_id, "delete", valid_until=body.valid_until, at=at)
        fields = None if body.fields is None else columns.fitting(body.fields)
        return Change(number, item_id, operation.kind, fields, placements, body.valid_until, at, by)


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
        self._moment = 0  # changes that there were
        self._memory = None if bundle.manifest.memory is None else MemoryEntries(self._items + ROOM)
        self._handle_I = np.full(self._items, -1, np.int32)
        self._item_R, self._shown_R = np.zeros(ROOM, np.int64), np.ones(ROOM, np.bool_)
        (self._shown,) = read_only(self._shown_R)
        self._changes = EntryLists(COLUMNS, ROOM)  # of trained items
        self._change: dict[int, tuple[int, int]] = {}  # handle of a trained item → what it is now, and the entry that says so
        self._counts = [0, 0, 0]  # of each kind of change
        self._gone: set[int] = set()  # trained rows whose own leaves do not count, or that a standing list removes
        self._removed: frozenset[str] = frozenset()
        self._removed_rows: frozenset[int] = frozenset()
        self._removed_mask: NodeMask | None = None
        self._removed_live = 0  # live leaves of removed items
        self._empty = [unrestricted_mask(tree) for tree in trees]
        self._opened = 0  # live leaves under nodes that have no trained item below
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
        return self._counts[DELETED]

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

    def set_removed(self, ids: Sequence[str], mask: NodeMask | None) -> None:
        """The ids of the standing list of removed items, instead of those before. mask: of the trained items without them, None for all."""
        rows = self.bundle.items.rows_of(list(ids))
        rows_before, self._removed_rows = self._removed_rows, frozenset(rows[rows >= 0].tolist())
        ids_before, self._removed = self._removed, frozenset(ids)
        shown_R = self._shown_R.copy()  # snapshots have the one before
        for item_id in ids_before ^ self._removed:
            entry = self.table.entry(item_id)
            if entry is not None:
                self._tally(entry.handle, -1)
                shown_R[entry.handle] = item_id not in self._removed
        self._shown_R, (self._shown,) = shown_R, read_only(shown_R)
        for item_id in ids_before ^ self._removed:
            entry = self.table.entry(item_id)
            if entry is not None:
                self._tally(entry.handle, 1)
        self._removed_mask = mask
        for row in rows_before ^ self._removed_rows:
            self._note_gone(row)
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
        self._moment += 1
        handle = self._handle(change.id, trained)
        fields = before.fields if change.fields is None and before is not None and not before.is_deleted else change.fields
        self._tally(handle, -1)
        for placement in change.placements:
            tree = self._trees[placement.tree]
            parent, slot = (placement.parent, placement.slot) if trained < 0 else tree.trained_leaf(trained)
            tree.put(self._moment, handle, parent, slot, placement.row, own=trained >= 0)
        self._tally(handle, 1)
        if change.placements and self._memory is not None:
            row = change.placements[0].row
            item = self._items + handle if trained < 0 else trained
            self._memory.put(self._moment, handle, item, row.memory_to, row.memory_from, self.table.known_row)
        if trained >= 0:
            has_leaf = self._trees[0].leaf(handle) is not None
            self._change_trained(trained, handle, MOVED if has_leaf else None if fields is None else CHANGED)
        self.table.write(
            LiveItem(
                id=change.id,
                handle=handle,
                item_row=trained if trained >= 0 else self._items + handle,
                fields=fields,
                sequence=change.sequence,
                since=change.at if before is None or before.is_deleted else before.since,
                by=change.by if change.placements or before is None or before.is_deleted else before.by,
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
        if entry is None and trained < 0:
            return
        self._moment += 1
        if entry is None:
            entry = LiveItem(item_id, self._handle(item_id, trained), trained, None, sequence, 0.0)
        self._tally(entry.handle, -1)
        for tree in self._trees:
            tree.drop(self._moment, entry.handle)
        if self._memory is not None:
            self._memory.drop(self._moment, entry.handle)
        if trained >= 0:
            self._change_trained(trained, entry.handle, DELETED)
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
        handle, row = self.table.handle_for(item_id), trained
        if trained >= 0:
            self._handle_I[trained] = handle
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

    def _tally(self, handle: int, by: int) -> None:
        """Note the leaves of an item that is about to change (by −1), or that has changed (by 1)."""
        for place, (tree, every) in enumerate(zip(self._trees, self._empty, strict=True)):
            leaf = tree.leaf(handle)
            if leaf is not None:
                self.touched.touch(place, leaf[0])
                self._opened += by if every is not None and not every.eligible_N[leaf[0]] else 0
                self._removed_live += by if place == 0 and not self._shown_R[handle] else 0

    def _change_trained(self, row: int, handle: int, kind: int | None) -> None:
        """Note what a trained item is now: DELETED, MOVED, CHANGED, or as it was trained (None)."""
        before, entry = self._change.pop(handle, (None, 0))
        if before is not None:
            self._changes.close(entry, self._moment)
            self._counts[before] -= 1
        if kind is not None:
            self._change[handle] = kind, self._changes.add(self._moment, (handle, 0, kind, row))
            self._counts[kind] += 1
        if self._changes.is_worn(UNUSED):
            self._changes.drop_closed()
            open_EC = self._changes.rows_EC[1 : self._changes.used]
            self._change = {key: (self._change[key][0], entry) for entry, key in enumerate(open_EC[:, KEY].tolist(), start=1)}
        self._note_gone(row)
        for place, tree in enumerate(self._trees):
            self.touched.touch(place, tree.trained_leaf(row)[0])

    def _note_gone(self, row: int) -> None:
        kind, _ = self._change.get(int(self._handle_I[row]), (None, 0))
        if kind in (DELETED, MOVED) or row in self._removed_rows:
            self._gone.add(row)
        else:
            self._gone.discard(row)

    # -- snapshots ------------------------------------------------------------------------------------------------------

    def overlay(self) -> Overlay:
        """What is live now."""
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
                moved=self._counts[MOVED],
                eligible=self._items - len(self._gone) + self.live_items - self._removed_live,
                is_open=not self._gone and not self._opened,
                memory=None if self._memory is None else self._memory.snapshot(self._moment),
                touched=self.touched.now,
                mask_of=self._standing.mask,
            )
        return self._overlay
