"""The memory entries of a live item, as training would have counted them from the item's events (`MemoryFormula`).

    M[a, new] = n / e · Σ over e events of (length + 1)^−user · Σ over the last `window` positions that hold a of decay^(positions behind)
    M[new, a] = back · M[a, new]

n is the number of events that the item has had; e of them are at hand (`popularity.py`). The items that came after it are not known. Where
training added a regression to the counts, entries count 1 + its weight times: with less, new items of the sample were found less often.

A live item also gets the entries of similar items:   S[a, new] = max_k cos_k · S[a, k]. For an item that is put with `like`, k are the
trained items of `like` and cos_k = 1; each of them also counts as an event whose history is this item alone. For an item with nothing but
fields, k are the trained items with the nearest rows and cos_k their cosines. Of several values the largest counts.

Legend: I trained items, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from espalier.arrays import Array, Float64, Int64, read_only
from espalier.compiled_code import compiled
from espalier.memory import LARGEST_VALUE, Memory
from espalier.memory_lists import INDEX_BITS, LAST_INDEX
from espalier.memory_sums import in_order
from espalier.placement.popularity import Popularity
from espalier.stored_numbers import number, stored

Entries = tuple[Int64, Float64]
"""Item rows, ascending, and S with them."""
NONE: Entries = np.empty(0, np.int64), np.empty(0)
MOST = 256
"""Most entries of a live item's memory in either direction. The entries with the largest S stay."""


class MemoryRows:
    """Makes the memory of live items. Used by any number of threads."""

    def __init__(self, memory: Memory, popularity: Popularity) -> None:
        self._memory, self._popularity = memory, popularity

    def of(self, history_ET: Int64, count: float) -> tuple[Entries, Entries]:
        """S[a, new] and S[new, a] of an item that these histories (oldest item first, −1: no item) led to.

        count  events that the item has had
        """
        formula = self._memory.formula
        if formula is None or not len(history_ET):
            return NONE, NONE
        (histories,) = read_only(history_ET)
        rows, met_A = _met(histories, formula.window, formula.user, formula.decay)
        met_A *= count / len(history_ET)
        damped_A, damped = self._popularity.counts_of(rows) + formula.shrink, max(count, 1.0) + formula.shrink
        scale = (1 + formula.slim) / formula.unit
        with np.errstate(over="ignore"):  # `_largest` bounds them
            lifting_A = scale * (met_A / (damped_A**formula.row * damped**formula.column)) ** formula.power
            lifted_A = scale * (formula.back * met_A / (damped**formula.row * damped_A**formula.column)) ** formula.power
        return _largest(rows, lifting_A), _largest(rows, lifted_A)

    @cached_property
    def _columns(self) -> tuple[Array, ...]:
        """S by target. As large as the memory, so it is made for the first item that needs it."""
        columns: tuple[Array, ...] = _transposed(*read_only(self._memory.offset, self._memory.item, stored(self._memory.value)))
        return columns

    def of_like(self, items: Int64, cosine: Float64) -> Entries:
        """S[a, new] of an item that resembles these trained items with these cosines."""
        if not len(items):
            return NONE
        offset, source, value = self._columns
        columns = [slice(int(offset[item]), int(offset[item + 1])) for item in items.tolist()]
        lifted = [size * value[column].astype(np.float64) for size, column in zip(cosine.tolist(), columns, strict=True)]
        return merged([(source[column].astype(np.int64), values) for column, values in zip(columns, lifted, strict=True)])


def merged(memories: Sequence[Entries]) -> Entries:
    """Item rows, ascending, and the largest S of each in some memories. A memory has each item at most once."""
    memories = [memory for memory in memories if len(memory[0])]
    if len(memories) < 2:
        return memories[0] if memories else NONE
    rows, at = np.unique(np.concatenate([rows for rows, _ in memories]), return_inverse=True)
    values = np.zeros(len(rows))
    np.maximum.at(values, at, np.concatenate([values for _, values in memories]))
    return _largest(rows, values)


def _largest(rows: Int64, values: Float64) -> Entries:
    values = np.minimum(values, LARGEST_VALUE)
    if len(rows) > MOST:
        largest = np.sort(np.argsort(-values, kind="stable")[:MOST])
        rows, values = rows[largest], values[largest]
    if values.all():
        return rows, values
    return rows[values > 0], values[values > 0]


@compiled()
def _met(history_ET: Array, window: int, user: float, decay: float) -> tuple[Array, Array]:
    """int64[A], ascending, and float64[A]: the items of some histories, and their summed weights in the last `window` positions."""
    total = 0
    for e in range(len(history_ET)):
        for t in range(history_ET.shape[1]):
            total += int(history_ET[e, t] >= 0)
    numbers, weights = np.empty(total, np.int64), np.empty(total)
    count, highest = 0, 0
    for e in range(len(history_ET)):
        length = 0
        for t in range(history_ET.shape[1]):
            length += int(history_ET[e, t] >= 0)
        weight, behind = (length + 1.0) ** -user, 0
        for t in range(history_ET.shape[1] - 1, -1, -1):
            row = history_ET[e, t]
            if row >= 0 and behind < window:
                numbers[count], weights[count] = (row << INDEX_BITS) + count, weight * decay**behind
                highest = max(highest, row)
                count += 1
                behind += 1
    ordered = in_order(numbers[:count], highest << INDEX_BITS, INDEX_BITS)
    rows, met_A, last = np.empty(count, np.int64), np.zeros(count), -1
    for number_in_order in ordered:
        row = number_in_order >> INDEX_BITS
        if last < 0 or rows[last] != row:
            last += 1
            rows[last] = row
        met_A[last] += weights[number_in_order & LAST_INDEX]
    return rows[: last + 1], met_A[: last + 1]


@compiled()
def _transposed(offset: Array, item: Array, value: Array) -> tuple[Array, Array, Array]:
    """The entries by column: each item's first entry, and of each entry its row, ascending, and its value."""
    begin = np.zeros(len(offset) + 1, np.int64)
    for e in range(len(item)):
        begin[item[e] + 2] += 1
    for b in range(2, len(begin)):
        begin[b] += begin[b - 1]
    source, column_value = np.empty(len(item), np.int32), np.empty(len(item), np.float32)
    for a in range(len(offset) - 1):
        for e in range(offset[a], offset[a + 1]):
            at = begin[item[e] + 1]
            source[at], column_value[at] = a, number(value[e])
            begin[item[e] + 1] = at + 1
    return begin[:-1], source, column_value
