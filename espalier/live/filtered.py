"""Filters over a catalogue with live items: whether each passes by the fields that it has now, and the masks that follow.

What a filter lets pass of the trained items is kept by `ItemFilters`. Here are kept, for the filters used last, which handles pass; after
an operation only the handle that it changed is looked at again. Knows fields and overlays. Does not know how filters are parsed.

Legend: R handles, C handles that are looked at, W rows.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.live.items import LiveItems
from espalier.live.masks import live_mask
from espalier.live.overlay import Overlay
from espalier.masks.filters import Condition, Filter, ItemFilters, Range, cost_of
from espalier.search import NodeMask
from espalier.tree import Tree

MOST_FILTERS = 64
"""Filters of which it is kept which handles pass, the last mask included, if they take no more than the trained items' masks may."""
LONGEST_LOG = 1 << 20
"""Changes after which all filters are looked at anew."""


@dataclass(frozen=True)
class _Kept:
    """What is known of a filter.

    passing_R  bool[R]: which handles pass
    looked     how many entries of the log it follows
    overlay    that `mask` was made of; an old one must not stay in memory for it
    bytes      that this takes
    """

    passing_R: NDArray[np.bool_]
    looked: int
    overlay: weakref.ref[Overlay]
    mask: NodeMask
    bytes: int


class LiveFilters:
    """The filters of one version with live items. One thread writes; any may ask for masks."""

    def __init__(self, trees: Sequence[Tree], trained: ItemFilters, table: LiveItems) -> None:
        self._trees, self._trained, self._table = trees, trained, table
        self._log: list[int] = []  # handles whose fields may have changed; replaced when it is long
        self._removed: frozenset[str] = frozenset()
        self._removed_handles = np.empty(0, np.int64)  # those of removed ids that were ever put or deleted
        self._kept: OrderedDict[Filter, _Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._lock = threading.Lock()  # guards _kept and _bytes, for moments only

    # -- the one writer -------------------------------------------------------------------------------------------------

    def touch(self, item_id: str) -> None:
        """The fields of an item were changed, or it is new."""
        entry = self._table.entry(item_id)
        if entry is None:
            return
        if item_id in self._removed and entry.handle not in self._removed_handles:
            self._removed_handles = np.append(self._removed_handles, entry.handle)
        if len(self._log) >= LONGEST_LOG:
            with self._lock:
                self._log = []
                self._forget_all()
        self._log.append(entry.handle)

    def set_removed(self, ids: Collection[str]) -> None:
        """The standing list of removed items, instead of the one before."""
        entries = [self._table.entry(item_id) for item_id in ids]
        handles = np.array([entry.handle for entry in entries if entry is not None], np.int64)
        with self._lock:
            self._removed, self._removed_handles = frozenset(ids), handles
            self._forget_all()

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
        """The mask of the items that pass a filter, and are not removed. O(N); the first time O(R) in Python."""
        with self._lock:
            before, log, removed, gone = self._kept.get(filter), self._log, self._removed, self._removed_handles
        passing_R, looked = self._passing(filter, before, log)
        eligible_R = passing_R.copy()
        eligible_R[gone[gone < len(eligible_R)]] = False
        made = live_mask(self._trees, overlay, self._trained.mask(filter), eligible_R)
        with self._lock:
            if removed is self._removed and log is self._log:
                self._forget(filter)
                kept = _Kept(passing_R, looked, weakref.ref(overlay), made, cost_of(filter, made) + passing_R.nbytes)
                self._kept[filter] = kept
                self._bytes += kept.bytes
                while len(self._kept) > MOST_FILTERS or self._bytes > self._trained.max_bytes:
                    self._forget(next(iter(self._kept)))
        return made

    def _forget(self, filter: Filter) -> None:
        """Drop what is kept of a filter, if anything is. Holds the lock."""
        before = self._kept.pop(filter, None)
        self._bytes -= 0 if before is None else before.bytes

    def _forget_all(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def matches(self, filter: Filter, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: whether the items at some rows pass a filter by the fields that they have now, removed or not."""
        passing_W = np.ones(len(rows), np.bool_)
        for field, condition in filter.wanted:
            passing_W &= [_meets(value, condition) for value in self._table.values(field, rows)]
        for field, condition in filter.barred:
            passing_W &= [not _meets(value, condition) for value in self._table.values(field, rows)]
        return passing_W

    def is_removed(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """bool[W]: whether ids are on the standing list."""
        return np.array([item_id in self._removed for item_id in ids], np.bool_)

    def _passing(self, filter: Filter, before: _Kept | None, log: list[int]) -> tuple[NDArray[np.bool_], int]:
        """bool[R] of the handles that there are now, and how far it follows the log."""
        looked = len(log)
        handles = self._table.handles
        passing_R = np.zeros(handles, np.bool_)
        if before is None:
            handle_C = np.arange(handles)
        else:
            passing_R[: len(before.passing_R)] = before.passing_R
            handle_C = np.unique(np.array(log[before.looked : looked], np.int64))
        entries = [(handle, self._table.entry_at(handle)) for handle in handle_C.tolist()]
        found = [(handle, entry.item_row) for handle, entry in entries if entry is not None]
        if found:
            at, rows = np.array(found, np.int64).T
            passing_R[at] = self.matches(filter, rows)
        return passing_R, looked


def _meets(value: Any, condition: Condition) -> bool:
    """Whether a column's value, or an element of it, meets a condition. Null and NaN meet none."""
    if isinstance(value, list):
        return any(_meets(element, condition) for element in value)
    if value is None or value != value:
        return False
    if isinstance(condition, Range):
        return (condition.low is None or value >= condition.low) and (condition.high is None or value <= condition.high)
    return value in condition
