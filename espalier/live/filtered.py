"""Filters over a catalogue with live items: which items pass by their present fields, and the node masks.

`ItemFilters` evaluates filters on trained items; a `FieldColumn` has one field of the live items. A mask is updated from one snapshot to
the next: only the leaves below parents that were touched in between are evaluated again. Knows fields and overlays. Does not know how
filters are parsed.

Legend: R handles, W rows.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.live.fields import FieldColumn
from espalier.live.items import NO_FIELDS, LiveItem, LiveItems
from espalier.live.masks import SnapshotMask, TouchedParents
from espalier.live.overlay import Overlay
from espalier.masks.filters import Condition, Filter, ItemFilters, cost_of
from espalier.search import NodeMask
from espalier.tree import Tree

MOST_FILTERS = 64
"""Most filters whose last mask is cached. All cached masks together take at most as many bytes as those of trained items may."""


class LiveFilters:
    """The filters of one version with live items. One thread writes; any may ask for masks."""

    def __init__(self, trees: Sequence[Tree], trained: ItemFilters, table: LiveItems, touched: TouchedParents) -> None:
        self.trained = trained
        self._trees, self._table, self._touched = trees, table, touched
        self._columns = {field: FieldColumn(table.trained.column(field).type) for field in trained.fields if field != "id"}
        self._columns_lock = threading.Lock()  # guards the columns
        self._last_masks: OrderedDict[Filter, SnapshotMask] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._lock = threading.Lock()  # guards all but the columns; held only briefly
        self.update()

    # -- the one writer -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Read the fields of the items that have changed."""
        while self._table.unread:
            entry = self._table.entry_at(self._table.unread.pop())
            if entry is not None:
                self._read(entry)

    def _read(self, entry: LiveItem) -> None:
        """Read an item's fields; those of training if it has no others. A deleted item has no others: it frees its memory."""
        row, fields, trained = np.array([entry.item_row]), None if entry.is_deleted else entry.fields, self._table.trained
        has_trained_fields = fields is None and entry.item_row < len(trained)
        with self._columns_lock:
            for field, column in self._columns.items():
                column.set(entry.handle, trained.values(field, row)[0] if has_trained_fields else (fields or NO_FIELDS).get(field))

    # -- readers --------------------------------------------------------------------------------------------------------

    def cached(self, filter: Filter, overlay: Overlay) -> NodeMask | None:
        """The mask, if it is cached. Takes microseconds."""
        if overlay.is_empty:
            return self.trained.cached(filter)
        with self._lock:
            last = self._last_masks.get(filter)
            if last is None or last.overlay() is not overlay:
                return None
            self._last_masks.move_to_end(filter)
            return last.mask

    def mask(self, filter: Filter, overlay: Overlay) -> NodeMask:
        """The mask of the items that pass a filter and are not removed.

        Takes a copy of N bytes, O(R), and O(changes since the filter's last mask), or O(live items) if there is no last mask.
        """
        if overlay.is_empty:
            return self.trained.mask(filter)
        with self._lock:
            last = self._last_masks.get(filter)
        passing_R = self._passing(filter)[: overlay.handles]
        passing_R &= overlay.shown_R[: len(passing_R)]
        made = SnapshotMask.of(self._trees, overlay, self.trained.mask(filter), passing_R, self._touched, last)
        made = replace(made, mask=replace(made.mask, at=partial(self._at, filter, made.overlay)))
        with self._lock:
            self._forget(filter)
            self._last_masks[filter] = made
            self._bytes += _cost_of(filter, made)
            while len(self._last_masks) > MOST_FILTERS or self._bytes > self.trained.max_bytes:
                self._forget(next(iter(self._last_masks)))
        return made.mask

    def _at(self, filter: Filter, mask_overlay: weakref.ref[Overlay], overlay: Overlay) -> NodeMask | None:
        """`NodeMask.at`: the mask of a filter for another snapshot; None for the snapshot of the mask itself."""
        return None if mask_overlay() is overlay else self.cached(filter, overlay) or self.mask(filter, overlay)

    def _forget(self, filter: Filter) -> None:
        """Drop the mask of a filter, if it is cached. Holds the lock."""
        last = self._last_masks.pop(filter, None)
        self._bytes -= 0 if last is None else _cost_of(filter, last)

    def matches(self, filter: Filter, rows: Int64) -> Bool:
        """bool[W]: whether the items at some rows pass a filter by their present fields, removed or not."""
        passing_R = self._passing(filter)
        entries = [self._table.entry(item_id) for item_id in self._table.ids_of(rows)]
        handle_W = np.array([-1 if entry is None else entry.handle for entry in entries], np.int64)
        handle_W[handle_W >= len(passing_R)] = -1
        passing_W = np.zeros(len(rows), np.bool_)
        passing_W[handle_W >= 0] = passing_R[handle_W[handle_W >= 0]]
        trained_W = (handle_W < 0) & (rows < len(self._table.trained))
        if trained_W.any():
            passing_W[trained_W] = self.trained.matches(filter, rows[trained_W])
        return passing_W

    def _passing(self, filter: Filter) -> Bool:
        """bool[R]: which of the present handles have items that pass. More handles may come meanwhile."""
        with self._columns_lock:
            passing_R = np.ones(self._table.handles, np.bool_)
            for field, condition in filter.wanted:
                meets_R = np.zeros(len(passing_R), np.bool_)
                meets_R[self._matching(field, condition, len(passing_R))] = True
                passing_R &= meets_R
            for field, condition in filter.barred:
                passing_R[self._matching(field, condition, len(passing_R))] = False
        return passing_R

    def _matching(self, field: str, condition: Condition, handles: int) -> Int64:
        """int64: the handles below `handles` whose items meet a condition. Holds the columns' lock."""
        if field == "id" and isinstance(condition, tuple):
            entries = [self._table.entry(str(item_id)) for item_id in condition]
            return np.array([entry.handle for entry in entries if entry is not None and entry.handle < handles], np.int64)
        matching = self._columns[field].matching(condition)
        return matching[matching < handles]


def _cost_of(filter: Filter, cached: SnapshotMask) -> int:
    live_R = cached.mask.live_R
    return cost_of(filter, cached.mask) + (0 if live_R is None else len(live_R))
