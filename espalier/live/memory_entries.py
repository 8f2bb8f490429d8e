"""The entries that live items add to a memory, as they come and go.

An entry may be given by both its ends, by the source's row (memory_to) and by the target's (memory_from): the larger one counts. Entries of
an id that was never there wait for it: what counts depends on which operations were applied, not on their order. Entries of items that are
gone stay, and count again when the item does.

Legend: S sources, U changed pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import LiveMemory
from espalier.live.pools import SparseRowsPool
from espalier.live.rows import Entries

Pair = tuple[int, int]
Waiting = tuple[int, bool, float]
"""The item row that an entry is given by, whether that is its source, and its value."""
Int64 = NDArray[np.int64]
UNUSED = 1 << 16
"""Entries of the pool that may be without use, beside as many as are used."""


class MemoryEntries:
    """Written by one thread; `snapshot` copies what has changed since the last one."""

    def __init__(self) -> None:
        self._of_owner: dict[int, set[Pair]] = {}
        self._values: dict[int, dict[int, dict[int, float]]] = {}  # source → target → handle of the owner → value
        self._waiting: dict[str, dict[int, list[Waiting]]] = {}  # id that was never there → handle of the owner → entries
        self._waits_for: dict[int, set[str]] = {}
        self._rows, self._used = SparseRowsPool(), 0  # entries of each source, as snapshots have them, and how many
        self._source_S, self._place_S = np.empty(0, np.int64), np.empty(0, np.int64)
        self._changed: set[Pair] = set()  # since the last snapshot

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
            self._changed.add((source, target))
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
            self._changed.add(pair)

    def snapshot(self) -> LiveMemory:
        if self._changed:
            pair_U = np.array(sorted(self._changed), np.int64)
            value_U = np.array([self._value(source, target) for source, target in pair_U.tolist()], np.float32)
            self._changed.clear()
            self._write(pair_U[:, 0], pair_U[:, 1], value_U)
            if self._rows.entries > 2 * self._used + UNUSED:
                self._rows.keep(self._place_S)
                self._place_S = np.arange(len(self._source_S))
        return LiveMemory(self._source_S, self._place_S, *self._rows.arrays)

    def _value(self, source: int, target: int) -> float:
        """S of a pair, 0 where nothing gives it one."""
        return max(self._values.get(source, {}).get(target, {}).values(), default=0.0)

    def _write(self, source_U: Int64, target_U: Int64, value_U: NDArray[np.float32]) -> None:
        """Write the sources of some pairs anew, with the values that these have now."""
        before, sources = LiveMemory(self._source_S, self._place_S, *self._rows.arrays), np.unique(source_U)
        is_old_S = np.isin(self._source_S, sources)
        old_source, old_target, old_value = before.entries(np.flatnonzero(is_old_S))
        source, target = np.concatenate([source_U, old_source]), np.concatenate([target_U, old_target])
        order = np.lexsort((target, source))  # stable: of two entries of a pair the new one comes first
        source, target, value = source[order], target[order], np.concatenate([value_U, old_value])[order]
        there = np.append(True, (np.diff(source) != 0) | (np.diff(target) != 0)) & (value > 0)
        sources, count = np.unique(source[there], return_counts=True)
        place = self._rows.extend(count, target[there].astype(np.int32), value[there])
        self._used += len(target[there]) - len(old_target)
        kept_source, kept_place = self._source_S[~is_old_S], self._place_S[~is_old_S]
        at = np.searchsorted(kept_source, sources)
        self._source_S, self._place_S = np.insert(kept_source, at, sources), np.insert(kept_place, at, place)
