"""The item table of a version with live items: trained items by their rows, live ones by I + handle.

An id that becomes live gets the next handle, and keeps it as long as the version is open. So item rows that a request has resolved stay
valid. Written by one thread (`state.py`), read by any: entries are added and replaced, never moved. Knows ids and fields. Does not know
leaves.

Legend: I trained items, R handles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.arrays import Int64
from espalier.items import ItemTable

NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class LiveItem:
    """The present state of an id that was put or deleted.

    item_row     I + handle, or the row of a trained item
    fields       its columns; None: a trained item has those of training
    sequence     of the id's last operation
    since        when it was put first, seconds since 1970
    by           the evidence that placed it, in words for people; may be empty
    is_deleted   whether no answer may hold it
    valid_until  seconds since 1970, or None
    """

    id: str
    handle: int
    item_row: int
    fields: Mapping[str, Any] | None
    sequence: int
    since: float
    by: str = ""
    is_deleted: bool = False
    valid_until: float | None = None


class LiveItems:
    """Ids, fields and rows of trained and live items; takes the role of an ItemTable in answers."""

    def __init__(self, trained: ItemTable) -> None:
        self.trained = trained
        self._base = len(trained)
        self._ids: list[str] = []
        self._entries: list[LiveItem | None] = []
        self._handle_of: dict[str, int] = {}
        self._row_of_live: dict[str, int] = {}  # ids that are no trained items and are live now
        self._fields_of_row: dict[int, Mapping[str, Any]] = {}  # of trained items whose fields were changed
        self.unread: set[int] = set()  # handles whose entries the filters have to read
        self.characters = 0  # total of the fields of all entries that are not deleted

    # -- readers, on any thread -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of item rows: I + R."""
        return self._base + len(self._ids)

    @property
    def fields(self) -> tuple[str, ...]:
        return self.trained.fields

    def rows_of(self, ids: Sequence[str]) -> Int64:
        """int64[len(ids)]: the item row of each id; −1 for one that is neither trained nor live now."""
        rows = self.trained.rows_of(ids)
        if self._row_of_live and (rows < 0).any():
            for i in np.flatnonzero(rows < 0).tolist():
                rows[i] = self._row_of_live.get(ids[i], -1)
        return rows

    def ids_of(self, rows: Int64) -> list[str]:
        live = self._live(rows)
        if not live:
            return self.trained.ids_of(rows)
        ids = self.trained.ids_of(np.where(rows < self._base, rows, 0))
        for i in live:
            ids[i] = self._ids[rows[i] - self._base]
        return ids

    def values(self, field: str, rows: Int64) -> list[Any]:
        """One column's Python values at item rows (int64); None for a live item without a value."""
        if field == "id":
            return self.ids_of(rows)
        live = self._live(rows)
        values = self.trained.values(field, np.where(rows < self._base, rows, 0) if live else rows)
        for i in live:
            entry = self._entries[rows[i] - self._base]
            values[i] = None if entry is None else (entry.fields or NO_FIELDS).get(field)
        if self._fields_of_row:
            for i, row in enumerate(rows.tolist()):
                changed = self._fields_of_row.get(row)
                if changed is not None:
                    values[i] = changed.get(field)
        return values

    def _live(self, rows: Int64) -> list[int]:
        """The positions of the rows of items that were not trained. In most answers there are none."""
        return [] if rows.max(initial=-1) < self._base else np.flatnonzero(rows >= self._base).tolist()

    def entry(self, item_id: str) -> LiveItem | None:
        """The present state of an id; None for an id that was never put or deleted."""
        handle = self._handle_of.get(item_id)
        return None if handle is None else self._entries[handle]

    def entry_at(self, handle: int) -> LiveItem | None:
        return self._entries[handle] if handle < len(self._entries) else None

    @property
    def handles(self) -> int:
        """R, the number of handles in use."""
        return len(self._ids)

    def known_row(self, item_id: str) -> int:
        """The item row of an id, even if the item is deleted now; −1 for an id that never was an item."""
        row = self.trained.row_of(item_id)
        if row < 0 and item_id in self._handle_of:
            row = self._base + self._handle_of[item_id]
        return row

    # -- the one writer -------------------------------------------------------------------------------------------------

    def handle_for(self, item_id: str) -> int:
        """The handle of an id; a new one if it has none."""
        handle = self._handle_of.get(item_id)
        if handle is None:
            handle = len(self._ids)
            self._entries.append(None)
            self._ids.append(item_id)
            self._handle_of[item_id] = handle
        return handle

    def write(self, entry: LiveItem) -> None:
        """Replace the present state of an id."""
        old = self._entries[entry.handle]
        self.characters += _characters(entry) - (0 if old is None else _characters(old))
        self._entries[entry.handle] = entry
        self.unread.add(entry.handle)
        if entry.item_row >= self._base:
            if entry.is_deleted:
                self._row_of_live.pop(entry.id, None)
            else:
                self._row_of_live[entry.id] = entry.item_row
        elif entry.fields is not None:
            self._fields_of_row[entry.item_row] = entry.fields
        else:
            self._fields_of_row.pop(entry.item_row, None)


def characters_of(fields: Mapping[str, Any] | None) -> int:
    """Approximate size of an item's fields in memory, in characters."""
    return 0 if fields is None else sum(len(name) + len(str(value)) for name, value in fields.items())


def _characters(entry: LiveItem) -> int:
    return 0 if entry.is_deleted else characters_of(entry.fields)
