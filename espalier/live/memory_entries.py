"""The entries that live items add to a memory, as they come and go.

An entry may be given by both its ends, by the source's row (memory_to) and by the target's (memory_from): the larger one counts. Entries of
an id that was never there wait for it: what counts depends on which operations were applied, not on their order. Entries of items that are
gone stay, and count again when the item does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from espalier.live.overlay import BUCKETS, LiveMemory
from espalier.live.rows import Entries

Pair = tuple[int, int]
Waiting = tuple[int, bool, float]
"""The item row that an entry is given by, whether that is its source, and its value."""


class MemoryEntries:
    """Written by one thread; `snapshot` copies what has changed since the last one."""

    def __init__(self) -> None:
        self._of_owner: dict[int, set[Pair]] = {}
        self._values: dict[int, dict[int, dict[int, float]]] = {}  # source → target → handle of the owner → value
        self._waiting: dict[str, dict[int, list[Waiting]]] = {}  # id that was never there → handle of the owner → entries
        self._waits_for: dict[int, set[str]] = {}
        self._buckets: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(BUCKETS)]
        self._changed: set[int] = set()

    def put(self, handle: int, item: int, to: Entries, of: Entries, row_of: Callable[[str], int]) -> None:
        """The entries of an item, instead of those before. `row_of` gives item rows of ids, −1 for one that was never there."""
        self.drop(handle)
        for is_source, entries in ((True, to), (False, of)):
            for other, value in entries:
                row = row_of(other)
                if row >= 0:
                    self._add(handle, (item, row) if is_source else (row, item), value)
                else:
                    self._waiting.setdefault(other, {}).setdefault(handle, []).append((item, is_source, value))
                    self._waits_for.setdefault(handle, set()).add(other)

    def arrived(self, item_id: str, row: int) -> None:
        """An id is there for the first time: the entries that waited for it count."""
        for handle, entries in self._waiting.pop(item_id, {}).items():
            self._waits_for[handle].discard(item_id)
            for item, is_source, value in entries:
                self._add(handle, (item, row) if is_source else (row, item), value)

    def drop(self, handle: int) -> None:
        """Take an item's entries away."""
        for item_id in self._waits_for.pop(handle, ()):
            owners = self._waiting[item_id]
            del owners[handle]
            if not owners:
                del self._waiting[item_id]
        for source, target in self._of_owner.pop(handle, ()):
            owners_of = self._values[source][target]
            del owners_of[handle]
            self._changed.add(source)
            if not owners_of:
                del self._values[source][target]
            if not self._values[source]:
                del self._values[source]

    def _add(self, handle: int, pair: Pair, value: float) -> None:
        if value > 0:
            source, target = pair
            owners = self._values.setdefault(source, {}).setdefault(target, {})
            owners[handle] = max(value, owners.get(handle, 0.0))
            self._of_owner.setdefault(handle, set()).add(pair)
            self._changed.add(source)

    def snapshot(self) -> LiveMemory:
        for number, sources in _by_bucket(self._changed):
            bucket = dict(self._buckets[number])
            for source in sources:
                targets = self._values.get(source)
                if targets is None:
                    bucket.pop(source, None)
                    continue
                rows = sorted(targets)
                values = np.array([max(targets[row].values()) for row in rows], np.float32)
                bucket[source] = np.array(rows, np.int64), values
            self._buckets[number] = bucket
        self._changed.clear()
        return LiveMemory(tuple(self._buckets))


def _by_bucket(sources: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for source in sources:
        found.setdefault(source % BUCKETS, []).append(source)
    return found.items()
