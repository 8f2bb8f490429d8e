"""The entries that live items add to a memory, as they come and go.

An entry may be given by both its ends, by the source's row (memory_to) and by the target's (memory_from): the larger one counts. Entries of
an id that was never there wait for it: what counts depends on which operations were applied, not on their order. Entries of items that are
gone stay, and count again when the item does.

A pair of items has one open entry at most (espalier.entry_lists): where its value changes, that one is closed and another appended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from espalier.entry_lists import FIRST, EntryLists, with_room
from espalier.live.overlay import LiveMemory
from espalier.live.rows import Entries
from espalier.memory import as_stored
from espalier.memory_sums import SOURCE, TARGET
from espalier.read_only import read_only

Pair = tuple[int, int]
"""The item rows of a source and a target."""
Waiting = tuple[int, bool, float]
"""The item row that an entry is given by, whether that is its source, and its value."""
UNUSED = 1 << 12
"""Entries that `EntryLists.is_worn` spares."""
BLOCK = 8
"""Entries of a source that are side by side, at least."""
COLUMNS = 3
"""Of an entry, from its key on: source, the number of the source's next entry, target."""


class MemoryEntries:
    """Written by one thread.

    sources  item rows that there is room for at first
    """

    def __init__(self, sources: int) -> None:
        self._given: dict[Pair, dict[int, float]] = {}  # handle of the owner → value
        self._of_owner: dict[int, set[Pair]] = {}
        self._waiting: dict[str, dict[int, list[Waiting]]] = {}  # id that was never there → handle of the owner → entries
        self._waits_for: dict[int, set[str]] = {}
        self._entries, self._value_E = EntryLists(COLUMNS, sources, block=BLOCK), np.zeros(FIRST, np.float32)
        self._open: dict[Pair, int] = {}  # pair → its open entry

    def put(self, moment: int, handle: int, item: int, to: Entries, of: Entries, row_of: Callable[[str], int]) -> None:
        """The entries of an item, instead of those before. `row_of` gives item rows of ids, −1 for one that was never there."""
        changed = self._taken_away(handle)
        for is_source, entries in ((True, to), (False, of)):
            for other, value in entries:
                row = row_of(other)
                if row >= 0:
                    self._give(handle, (item, row) if is_source else (row, item), value, changed)
                else:
                    self._waiting.setdefault(other, {}).setdefault(handle, []).append((item, is_source, value))
                    self._waits_for.setdefault(handle, set()).add(other)
        self._settle(moment, changed)

    def arrived(self, moment: int, item_id: str, row: int) -> None:
        """An id is there for the first time: the entries that waited for it count."""
        changed: set[Pair] = set()
        for handle, entries in self._waiting.pop(item_id, {}).items():
            self._waits_for[handle].discard(item_id)
            for item, is_source, value in entries:
                self._give(handle, (item, row) if is_source else (row, item), value, changed)
        self._settle(moment, changed)

    def drop(self, moment: int, handle: int) -> None:
        """Take an item's entries away."""
        self._settle(moment, self._taken_away(handle))

    def snapshot(self, moment: int) -> LiveMemory:
        """What counts at a moment, that of the last change or a later one."""
        return LiveMemory(self._entries.snapshot(moment), *read_only(self._value_E))

    def _taken_away(self, handle: int) -> set[Pair]:
        """Forget what an item gives; the pairs that it gave a value."""
        for item_id in self._waits_for.pop(handle, ()):
            owners = self._waiting[item_id]
            del owners[handle]
            if not owners:
                del self._waiting[item_id]
        pairs = self._of_owner.pop(handle, set())
        for pair in pairs:
            del self._given[pair][handle]
        return pairs

    def _give(self, handle: int, pair: Pair, value: float, changed: set[Pair]) -> None:
        value = as_stored(value)
        if value > 0:
            owners = self._given.setdefault(pair, {})
            owners[handle] = max(value, owners.get(handle, 0.0))
            self._of_owner.setdefault(handle, set()).add(pair)
            changed.add(pair)

    def _settle(self, moment: int, changed: set[Pair]) -> None:
        """Let the entries of some pairs have the values that are given now."""
        for pair in sorted(changed):
            given, entry = self._given[pair], self._open.get(pair)
            value = np.float32(max(given.values(), default=0.0))
            if entry is not None:
                if self._value_E[entry] == value:
                    continue
                self._entries.close(entry, moment)
            if given:
                source, target = pair
                entry = self._open[pair] = self._entries.add(moment, (source, 0, target))
                self._value_E = with_room(self._value_E, len(self._entries.rows_EC))
                self._value_E[entry] = value
            else:
                del self._given[pair]
                self._open.pop(pair, None)
        if self._entries.is_worn(UNUSED):
            self._value_E = with_room(self._value_E[self._entries.drop_closed()], len(self._entries.rows_EC))
            pairs_E2 = self._entries.rows_EC[1 : self._entries.used, [SOURCE, TARGET]]
            self._open = {(source, target): entry for entry, (source, target) in enumerate(pairs_E2.tolist(), start=1)}
