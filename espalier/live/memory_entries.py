"""The entries that live items add to a memory, as they come and go.

An entry may be given by both its ends, by the source's row (memory_to) and by the target's (memory_from): the larger one counts. Entries of
ids that were never there are dropped; those of items that are gone stay, and count again when the item does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from espalier.live.overlay import BUCKETS, LiveMemory
from espalier.live.rows import Entries

Pair = tuple[int, int]


class MemoryEntries:
    """Written by one thread; `snapshot` copies what has changed since the last one."""

    def __init__(self) -> None:
        self._of_owner: dict[int, list[Pair]] = {}
        self._values: dict[int, dict[int, dict[int, float]]] = {}  # source → target → handle of the owner → value
        self._buckets: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(BUCKETS)]
        self._changed: set[int] = set()

    def put(self, handle: int, item: int, to: Entries, of: Entries, row_of: Callable[[str], int]) -> None:
        """The entries of an item, instead of those before. `row_of` gives item rows of ids, −1 for one that was never there."""
        self.drop(handle)
        pairs = [(item, row_of(other), value) for other, value in to]
        pairs += [(row_of(other), item, value) for other, value in of]
        owned = self._of_owner.setdefault(handle, [])
        for source, target, value in pairs:
            if source >= 0 and target >= 0 and value > 0:
                self._values.setdefault(source, {}).setdefault(target, {})[handle] = value
                owned.append((source, target))
                self._changed.add(source)

    def drop(self, handle: int) -> None:
        """Take an item's entries away."""
        for source, target in self._of_owner.pop(handle, ()):
            owners = self._values[source][target]
            owners.pop(handle, None)
            self._changed.add(source)
            if not owners:
                del self._values[source][target]
            if not self._values[source]:
                del self._values[source]

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
