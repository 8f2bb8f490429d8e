"""Lists of entries that are appended and closed, never moved. A snapshot is a moment and copies nothing.

An entry is a row of integers: the moment from which it counts, the moment from which it no longer counts, a key, and other columns. The
entries of a key are a list, in order of arrival. One thread writes, at moments that only rise. Any thread may read a snapshot, even
compiled code without the GIL, because nothing in a snapshot ever changes:

- an entry that counts in a snapshot was complete before the snapshot was made;
- an entry that is written later begins at a later moment, and an entry that is closed later ends at a later moment;
- arrays that are full, or have too many closed entries, are replaced. Readers of the old arrays continue with these.

Entry 0 means no entry. Knows integers; does not know their meaning.

Legend: E entries, C columns, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.read_only import read_only

Array = NDArray[Any]
Int64 = NDArray[np.int64]
BORN, DIED, KEY, NEXT, OTHER_KEY, OTHER_NEXT = range(6)
"""Columns. NEXT: the next entry of the same key. OTHER_KEY, OTHER_NEXT: a second key, if there is one, and the next entry of it."""
FOREVER = np.iinfo(np.int64).max
"""DIED of an open entry, and BORN of an entry that is not written yet."""
FIRST = 256
"""Initial room, in entries."""
LARGEST_BLOCK = 64


class EntryArrays(NamedTuple):
    """A snapshot, for compiled code. All arrays are read-only.

    rows      int64[E, C]
    first     int64[L]: the first entry of each key, 0 if it has none; keys past the end have none
    length    int64[L]: at least the number of entries of each key
    by_other  int64: the first entry of each second key, as in `first`
    moment    of the snapshot
    """

    rows: Int64
    first: Int64
    length: Int64
    by_other: Int64
    moment: int


_NO_ROWS, _NO_KEYS = read_only(np.empty((0, 0), np.int64), np.empty(0, np.int64))
NO_ENTRIES = EntryArrays(_NO_ROWS, _NO_KEYS, _NO_KEYS, _NO_KEYS, 0)


class EntryLists:
    """Written by one thread.

    columns  number of columns from KEY on, including a second key and its NEXT
    keys     initial room, in keys
    others   initial room, in second keys; None: there are no second keys
    block    least number of adjacent entries of a key: a larger block is faster to read, but takes more room for short lists
    used     one more than the largest entry
    closed   number of closed entries
    """

    def __init__(self, columns: int, keys: int, others: int | None = None, block: int = 1) -> None:
        self._links = [(KEY, NEXT)] if others is None else [(KEY, NEXT), (OTHER_KEY, OTHER_NEXT)]
        self._block = block
        self.rows_EC = _unwritten(FIRST, KEY + columns)
        self.used, self.closed, self._in_order = 1, 0, 1
        self._first, self._last = ([np.zeros(size, np.int64) for size in (keys, others or 0)] for _ in range(2))
        self._length, self._room = np.zeros((2, keys), np.int64)  # _room: free entries of a key's block behind its last entry
        self._views: tuple[Array, ...] | None = None

    def add(self, moment: int, values: Sequence[int]) -> int:
        """Append an entry that counts from a moment on. Returns its number. values: the columns from KEY on, 0 for NEXT and OTHER_NEXT."""
        for link, (key_column, _) in enumerate(self._links):
            self._make_room_for_key(link, values[key_column - KEY])
        entry = self._next_entry(values[0])
        self.rows_EC[entry] = (moment, FOREVER, *values)
        for (key_column, next_column), first, last in zip(self._links, self._first, self._last, strict=False):
            key = values[key_column - KEY]
            if before := int(last[key]):
                self.rows_EC[before, next_column] = entry
            else:
                first[key] = entry
            last[key] = entry
        self._length[values[0]] += 1
        return entry

    def close(self, entry: int, moment: int) -> None:
        """Close an entry: it does not count from a moment on."""
        self.rows_EC[entry, DIED] = moment
        self.closed += 1

    def is_worn(self, spare: int) -> bool:
        """Whether `drop_closed` pays: over a quarter plus `spare` are closed, or over half plus `spare` are not adjacent by key."""
        return self.closed > spare + self.used // 4 or self.used > 2 * (self._in_order + spare)

    def drop_closed(self) -> Int64:
        """Replace the arrays by new ones with only the open entries, key by key. Returns int64: the old number of each new entry."""
        kept_entries = np.flatnonzero(self.rows_EC[: self.used, DIED] == FOREVER)
        kept_entries = np.append(0, kept_entries[np.argsort(self.rows_EC[kept_entries, KEY], kind="stable")])
        rows_EC = _unwritten(max(FIRST, 2 * len(kept_entries)), self.rows_EC.shape[1])
        rows_EC[: len(kept_entries)] = self.rows_EC[kept_entries]
        self.rows_EC, self.used, self.closed, self._in_order = rows_EC, len(kept_entries), 0, len(kept_entries)
        self._length = np.bincount(rows_EC[1 : self.used, KEY], minlength=len(self._length))
        self._room = np.zeros_like(self._length)
        self._first = [np.zeros_like(first) for first in self._first]
        self._last = [np.zeros_like(last) for last in self._last]
        for first, last, (key_column, next_column) in zip(self._first, self._last, self._links, strict=False):
            order = 1 + np.argsort(rows_EC[1 : self.used, key_column], kind="stable")
            key = rows_EC[order, key_column]
            is_new = np.append(True, key[1:] != key[:-1])[: len(key)]
            is_last = np.append(is_new[1:], True)[: len(key)]
            first[key[is_new]], last[key[is_last]] = order[is_new], order[is_last]
            rows_EC[order, next_column] = np.where(is_last, 0, np.append(order[1:], 0)[: len(key)])
        self._views = None
        return kept_entries

    def snapshot(self, moment: int) -> EntryArrays:
        """The entries that count at a moment, not before the last change."""
        if self._views is None:
            self._views = read_only(self.rows_EC, self._first[0], self._length, self._first[1])
        rows, first, length, by_other = self._views
        return EntryArrays(rows, first, length, by_other, moment)

    def _make_room_for_key(self, link: int, key: int) -> None:
        if key >= len(self._first[link]):
            self._first[link], self._last[link] = (with_room(array, key + 1) for array in (self._first[link], self._last[link]))
            if link == 0:
                self._length, self._room = (with_room(array, key + 1) for array in (self._length, self._room))
            self._views = None

    def _next_entry(self, key: int) -> int:
        """The number for a key's next entry: behind its last entry, or first in a new block."""
        if self._room[key]:
            self._room[key] -= 1
            return int(self._last[0][key]) + 1
        size = min(max(self._block, int(self._length[key])), LARGEST_BLOCK) if self._block > 1 else 1
        entry, self.used = self.used, self.used + size
        if self.used > len(self.rows_EC):
            before_EC, self.rows_EC = self.rows_EC, _unwritten(max(self.used, 2 * len(self.rows_EC)), self.rows_EC.shape[1])
            self.rows_EC[: len(before_EC)] = before_EC
            self._first = [first.copy() for first in self._first]  # older snapshots must not get entries past the end of their rows
            self._views = None
        self._room[key] = size - 1
        return entry


def _unwritten(rows: int, columns: int) -> Int64:
    rows_EC = np.zeros((rows, columns), np.int64)
    rows_EC[:, BORN] = FOREVER
    return rows_EC


def with_room(array: Array, size: int) -> Array:
    """The array, or a larger copy with room for `size` entries. Holders of the old array see no change."""
    if size <= len(array):
        return array
    larger = np.zeros((max(size, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def open_entries(entries: EntryArrays) -> Int64:
    """int64, ascending: the entries that count."""
    opened: Int64 = np.flatnonzero((entries.rows[:, BORN] <= entries.moment) & (entries.moment < entries.rows[:, DIED]))
    return opened


@compiled()
def entries_under(keys_K: Array, entries: Any) -> tuple[Array, Array]:
    """int64[C] and int64[C]: the entries of some keys that count, and for each the position 0 … K − 1 of its key."""
    rows, first, length, _, moment = entries
    most = 0
    for key in keys_K:
        if key < len(first):
            most += length[key]
    entry_C, position_C, count = np.empty(most, np.int64), np.empty(most, np.int64), 0
    for k in range(len(keys_K)):
        entry = first[keys_K[k]] if keys_K[k] < len(first) else np.int64(0)
        while entry > 0:
            if rows[entry, BORN] <= moment < rows[entry, DIED]:
                entry_C[count], position_C[count] = entry, k
                count += 1
            entry = rows[entry, NEXT]
    return entry_C[:count], position_C[:count]


@compiled()
def entry_of(other: int, entries: Any) -> Any:
    """The entry of a second key that counts, at most one; 0 if there is none."""
    rows, _, _, by_other, moment = entries
    entry = by_other[other] if 0 <= other < len(by_other) else np.int64(0)
    while entry > 0:
        if rows[entry, BORN] <= moment < rows[entry, DIED]:
            return entry
        entry = rows[entry, OTHER_NEXT]
    return np.int64(0)


@compiled()
def entries_of(others_W: Array, entries: Any) -> Array:
    """int64[W]: `entry_of` of each."""
    entry_W = np.empty(len(others_W), np.int64)
    for w in range(len(others_W)):
        entry_W[w] = entry_of(others_W[w], entries)
    return entry_W
