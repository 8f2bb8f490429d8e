"""The entries that live items add to a memory, as they come and go.

Both ends may give a value to an entry: the source's row (memory_to) and the target's (memory_from). The larger value counts. Entries that
name an id that never was an item wait for it, so that the memory depends on the operations and not on their order. Entries of items that
are gone stay, and count again when the item does.

A pair of items has at most one open entry (espalier.entry_lists). When its value changes, the entry is closed and another is appended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from espalier.arrays import read_only
from espalier.entry_lists import FIRST, EntryLists, with_room
from espalier.live.overlay import LiveMemory
from espalier.live.rows import Entries
from espalier.memory import as_stored
from espalier.memory_sums import SOURCE, TARGET

Pair = tuple[int, int]
"""The item rows of a source and a target."""
Waiting = tuple[int, bool, float]
"""The item row of the end that gives the value, whether that end is the source, and the value."""
UNUSED = 1 << 12
"""`spare` of `EntryLists.is_worn`."""
BLOCK = 8
"""Least number of adjacent entries that a source reserves."""
COLUMNS = 3
"""Columns of an entry, from its key on: source, the number of the source's next entry, target."""


class MemoryEntries:
    """Written by one thread.

    sources  initial room, in item rows
    """

    def __init__(self, sources: int) -> None:
        self._values: dict[Pair, dict[int, float]] = {}  # pair → handle of the owner → value
        self._pairs: dict[int, set[Pair]] = {}  # handle of the owner → pairs
        self._waiting: dict[str, dict[int, list[Waiting]]] = {}  # id that never was an item → handle of the owner → entries
        self._waits_for: dict[int, set[str]] = {}
        self._entries, self._value_E = EntryLists(COLUMNS, sources, block=BLOCK), np.zeros(FIRST, np.float32)
        self._open: dict[Pair, int] = {}  # pair → its open entry

    def put(self, moment: int, handle: int, item: int, memory_to: Entries, memory_from: Entries, row_of: Callable[[str], int]) -> None:
        """Replace the entries of an item. `row_of` returns the item row of an id, −1 for an id that never was an item."""
        changed = self._withdraw(handle)
        for is_source, entries in ((True, memory_to), (False, memory_from)):
            for other, value in entries:
                row = row_of(other)
                if row >= 0:
                    self._give(handle, (item, row) if is_source else (row, item), value, changed)
                else:
                    self._waiting.setdefault(other, {}).setdefault(handle, []).append((item, is_source, value))
                    self._waits_for.setdefault(handle, set()).add(other)
        self._update_entries(moment, changed)

    def arrived(self, moment: int, item_id: str, row: int) -> None:
        """Let the entries count that waited for an id, which is an item for the first time."""
        changed: set[Pair] = set()
        for handle, entries in self._waiting.pop(item_id, {}).items():
            self._waits_for[handle].discard(item_id)
            for item, is_source, value in entries:
                self._give(handle, (item, row) if is_source else (row, item), value, changed)
        self._update_entries(moment, changed)

    def drop(self, moment: int, handle: int) -> None:
        """Take an item's entries away."""
        self._update_entries(moment, self._withdraw(handle))

    def snapshot(self, moment: int) -> LiveMemory:
        """The entries that count at a moment, which must not be before the last change."""
        return LiveMemory(self._entries.snapshot(moment), *read_only(self._value_E))

    def _withdraw(self, handle: int) -> set[Pair]:
        """Forget the values that an item gives. Returns their pairs."""
        for item_id in self._waits_for.pop(handle, ()):
            owners = self._waiting[item_id]
            del owners[handle]
            if not owners:
                del self._waiting[item_id]
        pairs = self._pairs.pop(handle, set())
        for pair in pairs:
            del self._values[pair][handle]
        return pairs

    def _give(self, handle: int, pair: Pair, value: float, changed: set[Pair]) -> None:
        value = as_stored(value)
        if value > 0:
            owners = self._values.setdefault(pair, {})
            owners[handle] = max(value, owners.get(handle, 0.0))
            self._pairs.setdefault(handle, set()).add(pair)
            changed.add(pair)

    def _update_entries(self, moment: int, changed: set[Pair]) -> None:
        """Close and append entries so that some pairs have their present values."""
        for pair in sorted(changed):
            owners, entry = self._values[pair], self._open.get(pair)
            value = np.float32(max(owners.values(), default=0.0))
            if entry is not None:
                if self._value_E[entry] == value:
                    continue
                self._entries.close(entry, moment)
            if owners:
                source, target = pair
                entry = self._open[pair] = self._entries.add(moment, (source, 0, target))
                self._value_E = with_room(self._value_E, len(self._entries.rows_EC))
                self._value_E[entry] = value
            else:
                del self._values[pair]
                self._open.pop(pair, None)
        if self._entries.is_worn(UNUSED):
            self._value_E = with_room(self._value_E[self._entries.drop_closed()], len(self._entries.rows_EC))
            pairs_E2 = self._entries.rows_EC[1 : self._entries.used, [SOURCE, TARGET]]
            self._open = {(source, target): entry for entry, (source, target) in enumerate(pairs_E2.tolist(), start=1)}
