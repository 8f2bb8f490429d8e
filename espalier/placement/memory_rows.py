"""What a live item has to do with the items of its events, in the units of a bundle's memory.

    S[a, new] = min(q_a² / p_a, largest_a) · (share of the events whose history holds a)^¼,   S[new, a] = 0

q_a is the ninth decile of a's own row of S, p_a its median. A bundle does not hold what its S was counted with. q_a in place of the minimum
would be near what those counts give for items with five events, on the embedded sample and on MovieLens; by validation queries of both it
pays to be above the decile as far as that is above the median: of an item with few events the memory knows more than its row does. Where S
is flat, more than that lifts new items' parents into all beams. No value exceeds those of its row, so folds do not raise them. What led to
an item says little of what comes after it: with S[new, a] > 0, histories that hold the item lose what their other items ask for.

An item goes with what the items like it go with:   S[a, new] = max_k cos_k · S[a, k]. Of an item that is put with `like`, k are the trained
ones of these and cos_k = 1; each of these also counts as an event that led to it, with this item alone as its history. Of an item with
nothing but fields, k are the trained items with the nearest rows, cos_k their cosines. Of several values the largest counts.

Legend: I trained items, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.memory import Memory
from espalier.read_only import read_only
from espalier.stored_numbers import number, stored

Array = NDArray[Any]
HIGH, MIDDLE, POWER = 0.9, 0.5, 0.25
MOST = 256
"""Most items that a live item's memory names: those of the largest S."""


class MemoryRows:
    """Makes the memory of live items. Used by any number of threads."""

    def __init__(self, memory: Memory) -> None:
        self.length, self._memory = len(memory.weight), memory
        arrays = read_only(memory.offset, stored(memory.value))
        high_I, middle_I, largest_I = (_levels(*arrays, quantile) for quantile in (HIGH, MIDDLE, 1.0))
        self._level_I = np.minimum(high_I**2 / np.where(middle_I > 0, middle_I, 1), largest_I)
        positive = self._level_I[self._level_I > 0]
        self._usual = float(np.median(positive)) if len(positive) else 0.0  # of live items, which have no row of their own

    def of(self, history_ET: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Item rows, ascending, and S between them and an item that these histories (−1: no item, the last item last) led to."""
        if not len(history_ET):
            return np.empty(0, np.int64), np.empty(0)
        latest = np.concatenate([np.unique(history[history >= 0][-self.length :]) for history in history_ET])
        rows, count = np.unique(latest, return_counts=True)
        trained = rows < len(self._level_I)
        level = np.where(trained, self._level_I[np.where(trained, rows, 0)], self._usual)
        return _largest(rows, level * (count / len(history_ET)) ** POWER)

    @cached_property
    def _columns(self) -> tuple[Array, ...]:
        """S by the item that is lifted: as large as the memory, so it is made for the first item that needs it."""
        columns: tuple[Array, ...] = _transposed(*read_only(self._memory.offset, self._memory.item, stored(self._memory.value)))
        return columns

    def of_like(self, items: NDArray[np.int64], cosine: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Item rows, ascending, and S between them and an item that is like these trained ones."""
        if not len(items):
            return np.empty(0, np.int64), np.empty(0)
        offset, source, value = self._columns
        entries = [slice(int(offset[item]), int(offset[item + 1])) for item in items.tolist()]
        lifted = [size * value[part].astype(np.float64) for size, part in zip(cosine.tolist(), entries, strict=True)]
        return merged([(source[part], values) for part, values in zip(entries, lifted, strict=True)])


def merged(memories: Sequence[tuple[NDArray[np.integer[Any]], NDArray[np.float64]]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Item rows, ascending, and the largest S that some memories have of each."""
    rows, at = np.unique(np.concatenate([rows for rows, _ in memories]), return_inverse=True)
    values = np.zeros(len(rows))
    np.maximum.at(values, at, np.concatenate([values for _, values in memories]))
    return _largest(rows.astype(np.int64), values)


def _largest(rows: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    kept = np.sort(np.argsort(-values, kind="stable")[:MOST])
    return rows[kept], values[kept]


@compiled()
def _levels(offset: Array, value: Array, quantile: float) -> Array:
    """float64[I]: a quantile of each item's values above 0; 0 where it has none."""
    levels = np.zeros(len(offset) - 1)
    for a in range(len(levels)):
        own = np.empty(offset[a + 1] - offset[a], np.float32)
        for e in range(len(own)):
            own[e] = number(value[offset[a] + e])
        own = np.sort(own[own > 0])
        if len(own):
            levels[a] = own[int(np.ceil(quantile * (len(own) - 1)))]
    return levels


@compiled()
def _transposed(offset: Array, item: Array, value: Array) -> tuple[Array, Array, Array]:
    """The entries by column: where each item's begin, and the row, ascending, and the value of each."""
    begin = np.zeros(len(offset) + 1, np.int64)
    for e in range(len(item)):
        begin[item[e] + 2] += 1
    for b in range(2, len(begin)):
        begin[b] += begin[b - 1]
    source, moved = np.empty(len(item), np.int32), np.empty(len(item), np.float32)
    for a in range(len(offset) - 1):
        for e in range(offset[a], offset[a + 1]):
            place = begin[item[e] + 1]
            source[place], moved[place] = a, number(value[e])
            begin[item[e] + 1] = place + 1
    return begin[:-1], source, moved
