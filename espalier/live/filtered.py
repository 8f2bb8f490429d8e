"""Filters over a catalogue with live items: whether each passes by the fields that it has now, and the masks that follow.

What a filter lets pass of the trained items is kept by `ItemFilters`, the fields of live items by `FieldColumn`. A mask is brought forward
from one snapshot to another: only what is below parents that were touched between the two is looked at again. Knows fields and overlays.
Does not know how filters are parsed.

Legend: R handles, W rows.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from espalier.live.fields import FieldColumn
from espalier.live.items import NO_FIELDS, LiveItem, LiveItems
from espalier.live.masks import live_mask
from espalier.live.overlay import Overlay
from espalier.live.standing import TouchedParents
from espalier.masks.filters import Condition, Filter, ItemFilters, cost_of
from espalier.search import NodeMask
from espalier.tree import Tree

MOST_FILTERS = 64
"""Filters whose last mask is kept, if all take no more than the trained items' masks may."""


@dataclass(frozen=True)
class _Kept:
    """The last mask of a filter.

    overlay  that it was made of; an old one must not stay in memory for it
    touched  the moment of that overlay
    bytes    that this takes
    """

    mask: NodeMask
    overlay: weakref.ref[Overlay]
    touched: int
    bytes: int


class LiveFilters:
    """The filters of one version with live items. One thread writes; any may ask for masks."""

    def __init__(self, trees: Sequence[Tree], trained: ItemFilters, table: LiveItems, touched: TouchedParents) -> None:
        self._trees, self._trained, self._table, self._touched = trees, trained, table, touched
        self._columns = {field: FieldColumn(table.trained.column(field).type) for field in trained.fields if field != "id"}
        self._reading = threading.Lock()  # guards the columns
        self._removed: frozenset[str] = frozenset()
        self._removed_handles = np.empty(0, np.int64)  # those of removed ids that were ever put or deleted
        self._kept: OrderedDict[Filter, _Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._lock = threading.Lock()  # guards all but the columns, for moments only
        for handle in range(table.handles):
            if (entry := table.entry_at(handle)) is not None:
                self._read(entry)

    # -- the one writer -------------------------------------------------------------------------------------------------

    def touch(self, item_id: str) -> None:
        """The fields of an item were changed, or it is new."""
        entry = self._table.entry(item_id)
        if entry is None:
            return
        if item_id in self._removed and entry.handle not in self._removed_handles:
            self._removed_handles = np.append(self._removed_handles, entry.handle)
        self._read(entry)

    def _read(self, entry: LiveItem) -> None:
        """Note an item's fields, those of training where it was given none."""
        row, fields = np.array([entry.item_row]), entry.fields
        is_trained = fields is None and entry.item_row < len(self._table.trained)
        with self._reading:
            for field, column in self._columns.items():
                column.set(entry.handle, self._table.values(field, row)[0] if is_trained else (fields or NO_FIELDS).get(field))

    def set_removed(self, ids: Collection[str]) -> None:
        """The standing list of removed items, instead of the one before."""
        entries = [self._table.entry(item_id) for item_id in ids]
        handles = np.array([entry.handle for entry in entries if entry is not None], np.int64)
        with self._lock:
            self._removed, self._removed_handles = frozenset(ids), handles
            self._kept.clear()
            self._bytes = 0

    # -- readers --------------------------------------------------------------------------------------------------------

    def cached(self, filter: Filter, overlay: Overlay) -> NodeMask | None:
        """The mask, if it is there. Takes microseconds."""
        with self._lock:
            kept = self._kept.get(filter)
            if kept is None or kept.overlay() is not overlay:
                return None
            self._kept.move_to_end(filter)
            return kept.mask

    def mask(self, filter: Filter, overlay: Overlay) -> NodeMask:
        """The mask of the items that pass a filter, and are not removed.

        A copy of N bytes and O(R), and what was touched since the filter's last mask; where there is none, all live items.
        """
        with self._lock:
            before, removed, gone = self._kept.get(filter), self._removed, self._removed_handles
        eligible_R = self._passing(filter)
        eligible_R[gone[gone < len(eligible_R)]] = False
        touched = (
            None if before is None else self._touched.since(min(before.touched, overlay.touched))
        )  # also by what came after the overlay
        since = None if before is None or touched is None else (before.mask, touched)
        own = weakref.ref(overlay)
        made = live_mask(self._trees, overlay, self._trained.mask(filter), eligible_R, since)
        made = replace(made, at=partial(self._at, filter, own))
        with self._lock:
            if removed is self._removed:
                self._forget(filter)
                kept = _Kept(made, own, overlay.touched, cost_of(filter, made) + overlay.handles)
                self._kept[filter] = kept
                self._bytes += kept.bytes
                while len(self._kept) > MOST_FILTERS or self._bytes > self._trained.max_bytes:
                    self._forget(next(iter(self._kept)))
        return made

    def _at(self, filter: Filter, own: weakref.ref[Overlay], overlay: Overlay) -> NodeMask | None:
        """The mask of a filter for another snapshot than its own, None for that one: `NodeMask.at`."""
        return None if own() is overlay else self.cached(filter, overlay) or self.mask(filter, overlay)

    def _forget(self, filter: Filter) -> None:
        """Drop what is kept of a filter, if anything is. Holds the lock."""
        before = self._kept.pop(filter, None)
        self._bytes -= 0 if before is None else before.bytes

    def matches(self, filter: Filter, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: whether the items at some rows pass a filter by the fields that they have now, removed or not."""
        passing_R = self._passing(filter)
        entries = [self._table.entry(item_id) for item_id in self._table.ids_of(rows)]
        handle_W = np.array([-1 if entry is None else entry.handle for entry in entries], np.int64)
        handle_W[handle_W >= len(passing_R)] = -1
        passing_W = np.zeros(len(rows), np.bool_)
        passing_W[handle_W >= 0] = passing_R[handle_W[handle_W >= 0]]
        trained_W = (handle_W < 0) & (rows < len(self._table.trained))
        if trained_W.any():
            passing_W[trained_W] = self._trained.matches(filter, rows[trained_W])
        return passing_W

    def is_removed(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """bool[W]: whether ids are on the standing list."""
        return np.array([item_id in self._removed for item_id in ids], np.bool_)

    def _passing(self, filter: Filter) -> NDArray[np.bool_]:
        """bool[R]: which of the handles that there are now have items that pass; others may come meanwhile."""
        with self._reading:
            passing_R = np.ones(self._table.handles, np.bool_)
            for field, condition in filter.wanted:
                meets_R = np.zeros(len(passing_R), np.bool_)
                meets_R[self._matching(field, condition, len(passing_R))] = True
                passing_R &= meets_R
            for field, condition in filter.barred:
                passing_R[self._matching(field, condition, len(passing_R))] = False
        return passing_R

    def _matching(self, field: str, condition: Condition, handles: int) -> NDArray[np.int64]:
        """int64: those of the first handles whose items meet a condition. Holds the columns' lock."""
        if field == "id" and isinstance(condition, tuple):
            entries = [self._table.entry(str(item_id)) for item_id in condition]
            return np.array([entry.handle for entry in entries if entry is not None and entry.handle < handles], np.int64)
        found = self._columns[field].matching(condition)
        return found[found < handles]
