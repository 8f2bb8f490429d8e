"""The entries that live items add to a memory, as they come and go.

An entry may be given by both its ends, by the source's row (memory_to) and by the target's (memory_from): the larger one counts. Entries of
an id that was never there wait for it: what counts depends on which operations were applied, not on their order. Entries of items that are
gone stay, and count again when the item does.

Legend: S sources, P places of the pool, E entries, U changed pairs, N their sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.live.overlay import LiveMemory
from espalier.live.pools import SparseRowsPool
from espalier.live.rows import Entries
from espalier.live.sorted_arrays import SortedArrays

Pair = tuple[int, int]
Waiting = tuple[int, bool, float]
"""The item row that an entry is given by, whether that is its source, and its value."""
Array = NDArray[Any]
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
        self._places = SortedArrays(1)  # source → place of its entries
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
            pairs = sorted(self._changed)
            self._changed.clear()
            self._write(np.array(pairs, np.int64), np.array([self._value(source, target) for source, target in pairs], np.float32))
            if self._rows.entries > 2 * self._used + UNUSED:
                source_S, place_S = self._places.arrays_KX
                self._rows.keep(place_S)
                for place, source in enumerate(source_S.tolist()):
                    self._places.set(source, place)
        source_S, place_S = self._places.arrays_KX
        return LiveMemory(source_S, place_S, *self._rows.arrays)

    def _value(self, source: int, target: int) -> float:
        """S of a pair, 0 where nothing gives it one."""
        return max(self._values.get(source, {}).get(target, {}).values(), default=0.0)

    def _write(self, pair_U2: Int64, value_U: NDArray[np.float32]) -> None:
        """Write the sources of some pairs (ascending) anew, with the values that these have now."""
        source_N, count_N, target, value, replaced = _rewritten(pair_U2, value_U, *self._places.arrays_KX, *self._rows.arrays)
        self._used += len(target) - replaced
        for source in source_N[count_N == 0].tolist():
            self._places.discard(source)
        there_N = count_N > 0
        places = self._rows.extend(count_N[there_N], target, value)
        for source, place in zip(source_N[there_N].tolist(), places.tolist(), strict=True):
            self._places.set(source, place)


@compiled()
def _rewritten(
    pair_U2: Array, value_U: Array, source_S: Array, place_S: Array, begin_P: Array, end_P: Array, target_E: Array, value_E: Array
) -> tuple[Array, Array, Array, Array, int]:
    """The sources of changed pairs, how many entries each has now, these one behind the other, and how many there were before."""
    changed = len(pair_U2)
    replaced = 0
    for u in range(changed):
        if u == 0 or pair_U2[u, 0] != pair_U2[u - 1, 0]:
            begin, end = _old(pair_U2[u, 0], source_S, place_S, begin_P, end_P)
            replaced += end - begin
    most = changed + replaced
    source_N, count_N = np.empty(changed, np.int64), np.empty(changed, np.int64)
    target, value = np.empty(most, np.int32), np.empty(most, np.float32)
    u = sources = entries = 0
    while u < changed:
        source, first = pair_U2[u, 0], entries
        old, end = _old(source, source_S, place_S, begin_P, end_P)
        while old < end or (u < changed and pair_U2[u, 0] == source):
            is_new = u < changed and pair_U2[u, 0] == source and (old == end or pair_U2[u, 1] <= target_E[old])
            if is_new and old < end and pair_U2[u, 1] == target_E[old]:
                old += 1
            if not is_new or value_U[u] > 0:
                target[entries] = pair_U2[u, 1] if is_new else target_E[old]
                value[entries] = value_U[u] if is_new else value_E[old]
                entries += 1
            u, old = (u + 1, old) if is_new else (u, old + 1)
        source_N[sources], count_N[sources] = source, entries - first
        sources += 1
    return source_N[:sources], count_N[:sources], target[:entries], value[:entries], replaced


@compiled()
def _old(source: int, source_S: Array, place_S: Array, begin_P: Array, end_P: Array) -> tuple[int, int]:
    """Where the entries of a source begin and end; 0 and 0 where it has none."""
    at = np.searchsorted(source_S, source)
    if at < len(source_S) and source_S[at] == source:
        return begin_P[place_S[at]], end_P[place_S[at]]
    return 0, 0
