"""Append-only lists of entries with a lifetime. A snapshot is a moment; taking one copies nothing.

An entry is a row of integers: the moment from which it counts, the moment from which it no longer does, a key, and further columns. The
entries of a key form a list, in order of arrival. One thread writes, at moments that only rise. Any thread may read a snapshot, compiled
code without the GIL included, because nothing that a snapshot shows ever changes:

- An entry that counts in a snapshot was complete before the snapshot was handed over.
- An entry that is being written has no moment yet, or a later one than the snapshot. An entry that is closed meanwhile dies at a later one.
- Arrays that are full, or hold too many closed entries, are replaced. Holders of the old arrays read on in them.

Entry number 0 means no entry. Knows integers; does not know what they mean.

Legend: E entries, C columns, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Int64, read_only
from espalier.compiled_code import compiled

BORN, DIED, KEY, NEXT, OTHER_KEY, OTHER_NEXT = range(6)
"""Columns. NEXT: the next entry of the same key. OTHER_KEY and OTHER_NEXT: a second key and its next entry, in lists that have one."""
FOREVER = np.iinfo(np.int64).max
"""The moment at which an open entry dies, and at which an unwritten entry is born."""
FIRST = 256
"""Initial room, in entries."""
LARGEST_BLOCK = 64


class EntryArrays(NamedTuple):
    """A snapshot, for compiled code. All arrays are read-only.

    rows      int64[E, C]
    first     int64[L]: the first entry of each key, 0 for a key without entries; keys past the end have none
    length    int64[L]: an upper bound of the number of entries of each key
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

    columns  number of columns of a row from KEY on, a second key and its NEXT included
    keys     initial room, in keys
    others   initial room, in second keys; None: the lists have no second key
    block    least number of adjacent entries that a key reserves: larger blocks read faster and take more room
    used     one more than the largest entry number
    closed   number of closed entries
    """

    def __init__(self, columns: int, keys: int, others: int | None = None, block: int = 1) -> None:
        self._links = [(KEY, NEXT)] if others is None else [(KEY, NEXT), (OTHER_KEY, OTHER_NEXT)]
        self._block = block
        self.rows_EC = _unwritten(FIRST, KEY + columns)
        self.used, self.closed, self._in_order = 1, 0, 1
        self._first, self._last = ([np.zeros(size, np.int64) for size in (keys, others or 0)] for _ in range(2))
        self._length, self._reserved = np.zeros((2, keys), np.int64)  # entries of a key; rows reserved for it behind its last entry
        self._views: tuple[Array, ...] | None = None

    def add(self, moment: int, values: Sequence[int]) -> int:
        """Append an entry that counts from a moment on. Returns its number. values: its columns from KEY on, with 0 for NEXT columns."""
        for link, (key_column, _) in enumerate(self._links):
            self._make_room_for_key(link, values[key_column - KEY])
        entry = self._allocate(values[0])
        self.rows_EC[entry] = (moment, FOREVER, *values)
        for (key_column, next_column), first, last in zip(self._links, self._first, self._last, strict=False):
            key = values[key_column - KEY]
            if previous := int(last[key]):
                self.rows_EC[previous, next_column] = entry
            else:
                first[key] = entry
            last[key] = entry
        self._length[values[0]] += 1
        return entry

    def close(self, entry: int, moment: int) -> None:
        """End an entry at a moment: from then on it does not count."""
        self.rows_EC[entry, DIED] = moment
        self.closed += 1

    def is_worn(self, spare: int) -> bool:
        """Whether `drop_closed` pays: a quarter plus `spare` of the entries are closed, or half plus `spare` are not in order of key."""
        return self.closed > spare + self.used // 4 or self.used > 2 * (self._in_order + spare)

    def drop_closed(self) -> Int64:
        """Replace the arrays by new ones with only the open entries, in order of key. int64: the old number of each, 0 of entry 0."""
        old_numbers = np.flatnonzero(self.rows_EC[: self.used, DIED] == FOREVER)
        old_numbers = np.append(0, old_numbers[np.argsort(self.rows_EC[old_numbers, KEY], kind="stable")])
        rows_EC = _unwritten(max(FIRST, 2 * len(old_numbers)), self.rows_EC.shape[1])
        rows_EC[: len(old_numbers)] = self.rows_EC[old_numbers]
        self.rows_EC, self.used, self.closed, self._in_order = rows_EC, len(old_numbers), 0, len(old_numbers)
        self._length = np.bincount(rows_EC[1 : self.used, KEY], minlength=len(self._length))
        self._reserved = np.zeros_like(self._length)
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
        return old_numbers

    def snapshot(self, moment: int) -> EntryArrays:
        """The entries that count at a moment, which must not be before the last change."""
        if self._views is None:
            self._views = read_only(self.rows_EC, self._first[0], self._length, self._first[1])
        rows, first, length, by_other = self._views
        return EntryArrays(rows, first, length, by_other, moment)

    def _make_room_for_key(self, link: int, key: int) -> None:
        if key >= len(self._first[link]):
            self._first[link], self._last[link] = (with_room(array, key + 1) for array in (self._first[link], self._last[link]))
            if link == 0:
                self._length, self._reserved = (with_room(array, key + 1) for array in (self._length, self._reserved))
            self._views = None

    def _allocate(self, key: int) -> int:
        """The number of a key's next entry: behind its last one, or the first of a new block."""
        if self._reserved[key]:
            self._reserved[key] -= 1
            return int(self._last[0][key]) + 1
        size = min(max(self._block, int(self._length[key])), LARGEST_BLOCK) if self._block > 1 else 1
        entry, self.used = self.used, self.used + size
        if self.used > len(self.rows_EC):
            old_rows_EC, self.rows_EC = self.rows_EC, _unwritten(max(self.used, 2 * len(self.rows_EC)), self.rows_EC.shape[1])
            self.rows_EC[: len(old_rows_EC)] = old_rows_EC
            self._first = [first.copy() for first in self._first]  # so that no snapshot of the old rows is led past their end
            self._views = None
        self._reserved[key] = size - 1
        return entry


def _unwritten(rows: int, columns: int) -> Int64:
    rows_EC = np.zeros((rows, columns), np.int64)
    rows_EC[:, BORN] = FOREVER
    return rows_EC


def with_room(array: Array, size: int) -> Array:
    """The array, or a larger copy with room for `size` entries; the old array stays as it is for its other holders."""
    if size <= len(array):
        return array
    larger = np.zeros((max(size, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def open_entries(entries: EntryArrays) -> Int64:
    """int64, ascending: the entries that count."""
    numbers: Int64 = np.flatnonzero((entries.rows[:, BORN] <= entries.moment) & (entries.moment < entries.rows[:, DIED]))
    return numbers


@compiled()
def entries_under(keys_K: Array, entries: Any) -> tuple[Array, Array]:
    """int64[C] and int64[C]: the entries of some keys that count, and for each the position 0 … K − 1 of its key in `keys_K`."""
    rows, first, length, _, moment = entries
    most = 0
    for key in keys_K:
        if key < len(first):
            most += length[key]
    entry_C, of_C, count = np.empty(most, np.int64), np.empty(most, np.int64), 0
    for k in range(len(keys_K)):
        entry = first[keys_K[k]] if keys_K[k] < len(first) else np.int64(0)
        while entry > 0:
            if rows[entry, BORN] <= moment < rows[entry, DIED]:
                entry_C[count], of_C[count] = entry, k
                count += 1
            entry = rows[entry, NEXT]
    return entry_C[:count], of_C[:count]


@compiled()
def entry_of(other: int, entries: Any) -> Any:
    """The entry of a second key that counts, at most one; 0 for none."""
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
