"""Lists of entries that are appended and closed, never moved: a snapshot is a moment, and copies nothing.

An entry is a row of integers: the moment from which it counts, the one from which it no longer does, a key, and what else it holds. The
entries of a key are a list, in order of arrival. One thread writes, at moments that only rise. Any thread may read a snapshot, compiled
code without the GIL included, because nothing that it sees ever changes:

- an entry that counts in a snapshot was complete before the snapshot was handed over;
- one that is being written has no moment yet, or a later one than the snapshot, and so has one that is closed meanwhile;
- arrays that are full, or hold too many closed entries, are replaced. Who holds the old ones reads on in them.

Entry 0 is none. Knows integers; does not know what they mean.

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
"""Columns. NEXT: the entry of the same key that came after; OTHER_KEY and OTHER_NEXT: the same of a second key, where there is one."""
FOREVER = np.iinfo(np.int64).max
"""The moment at which an open entry dies, and at which one is born that is not written yet."""
FIRST = 256
"""Entries that there is room for at first."""
LARGEST_BLOCK = 64


class EntryArrays(NamedTuple):
    """A snapshot, for compiled code. All arrays are read-only.

    rows      int64[E, C]
    first     int64[L]: the first entry of each key, 0 where it has none; keys past the end have none
    length    int64[L]: at least as many as a key has
    by_other  int64: the first entry of each second key, likewise
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

    columns  those of a row from KEY on, a second key and its NEXT included
    keys     how many keys there is room for at first
    others   likewise of second keys; None: there are none
    block    entries of a key that are kept side by side, at least: long lists are read faster, short ones take more room
    used     one more than the largest entry
    closed   entries that are closed
    """

    def __init__(self, columns: int, keys: int, others: int | None = None, block: int = 1) -> None:
        self._links = [(KEY, NEXT)] if others is None else [(KEY, NEXT), (OTHER_KEY, OTHER_NEXT)]
        self._block = block
        self.rows_EC = _unwritten(FIRST, KEY + columns)
        self.used, self.closed, self._in_order = 1, 0, 1
        self._first, self._last = ([np.zeros(size, np.int64) for size in (keys, others or 0)] for _ in range(2))
        self._length, self._room = np.zeros((2, keys), np.int64)  # and places behind a key's last entry that are its own
        self._views: tuple[Array, ...] | None = None

    def add(self, moment: int, values: Sequence[int]) -> int:
        """Append an entry that counts from a moment on; its number. values: its columns from KEY on, 0 for those of NEXT."""
        for link, (key_column, _) in enumerate(self._links):
            self._make_room_for_key(link, values[key_column - KEY])
        entry = self._place(values[0])
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
        """Let an entry count no more from a moment on."""
        self.rows_EC[entry, DIED] = moment
        self.closed += 1

    def is_worn(self, spare: int) -> bool:
        """Whether `drop_closed` pays: a quarter and `spare` more are closed, or half and `spare` more are not side by side by key."""
        return self.closed > spare + self.used // 4 or self.used > 2 * (self._in_order + spare)

    def drop_closed(self) -> Int64:
        """Replace the arrays by new ones of the entries that are open, key by key. int64: the number that each had, 0 for none first."""
        kept = np.flatnonzero(self.rows_EC[: self.used, DIED] == FOREVER)
        kept = np.append(0, kept[np.argsort(self.rows_EC[kept, KEY], kind="stable")])
        rows_EC = _unwritten(max(FIRST, 2 * len(kept)), self.rows_EC.shape[1])
        rows_EC[: len(kept)] = self.rows_EC[kept]
        self.rows_EC, self.used, self.closed, self._in_order = rows_EC, len(kept), 0, len(kept)
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
        return kept

    def snapshot(self, moment: int) -> EntryArrays:
        """What counts at a moment, which is that of the last change or a later one."""
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

    def _place(self, key: int) -> int:
        """The number of a key's next entry: behind its last one, or the first of a new block."""
        if self._room[key]:
            self._room[key] -= 1
            return int(self._last[0][key]) + 1
        size = min(max(self._block, int(self._length[key])), LARGEST_BLOCK) if self._block > 1 else 1
        entry, self.used = self.used, self.used + size
        if self.used > len(self.rows_EC):
            before_EC, self.rows_EC = self.rows_EC, _unwritten(max(self.used, 2 * len(self.rows_EC)), self.rows_EC.shape[1])
            self.rows_EC[: len(before_EC)] = before_EC
            self._first = [first.copy() for first in self._first]  # a snapshot of the rows before must not be led past their end
            self._views = None
        self._room[key] = size - 1
        return entry


def _unwritten(rows: int, columns: int) -> Int64:
    rows_EC = np.zeros((rows, columns), np.int64)
    rows_EC[:, BORN] = FOREVER
    return rows_EC


def with_room(array: Array, size: int) -> Array:
    """The array, or a larger copy with room for `size` entries: who holds the array keeps what it had."""
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
    """int64[C] and int64[C]: the entries that count of some keys, and the place 0 … K − 1 of each one's key."""
    rows, first, length, _, moment = entries
    most = 0
    for key in keys_K:
        if key < len(first):
            most += length[key]
    entry_C, of_C, found = np.empty(most, np.int64), np.empty(most, np.int64), 0
    for k in range(len(keys_K)):
        entry = first[keys_K[k]] if keys_K[k] < len(first) else np.int64(0)
        while entry > 0:
            if rows[entry, BORN] <= moment < rows[entry, DIED]:
                entry_C[found], of_C[found] = entry, k
                found += 1
            entry = rows[entry, NEXT]
    return entry_C[:found], of_C[:found]


@compiled()
def entry_of(other: int, entries: Any) -> Any:
    """The entry of a second key that counts, of which there is one at most; 0 where there is none."""
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
