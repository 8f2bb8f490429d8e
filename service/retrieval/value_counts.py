"""The number of items with each value of a column, counted block by block, up to a limit of distinct values.

An item that has a value several times counts once. Null, NaN and infinity do not count as values. Knows Arrow arrays. Does not know which
items are counted.

Legend: V distinct values, R (item, value) pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Bool, Int64
from espalier.masks.filters import is_list

MERGED_VALUES = 1 << 13
"""Counts of blocks are merged when they have more values than this, and more than the merged counts."""


class ValueCounts(NamedTuple):
    """values: Arrow array, distinct. items_V: int64[V], number of items with each. items_with_value: number of items with any value."""

    values: pa.Array
    items_V: Int64
    items_with_value: int


class Present(NamedTuple):
    """The values of a block of items. item_R: int64[R], the item's position in the block, ascending. values: Arrow array of R values."""

    item_R: Int64
    values: pa.Array


class Tally:
    """The sum of counts. max_values: most distinct values; if there are more, none is kept and `overflowed` is set."""

    def __init__(self, kind: pa.DataType, max_values: int) -> None:
        self._values, self._items_V = pa.array([], value_type(kind)), np.empty(0, np.int64)
        self._unmerged: list[ValueCounts] = []
        self._max_values = max_values
        self.items_with_value = 0
        self.overflowed = False

    def add(self, counts: ValueCounts) -> None:
        """Count more items. O(values), amortised."""
        self.items_with_value += counts.items_with_value
        if self.overflowed:
            return
        self._unmerged.append(counts)
        if sum(len(counts.values) for counts in self._unmerged) > max(MERGED_VALUES, len(self._values)):
            self._merge()

    def total(self) -> tuple[pa.Array, Int64]:
        """(values, number of items with each): most items first, ties by value. Empty if there were too many values."""
        self._merge()
        table = pa.table({"value": self._values, "items": self._items_V})
        order = pc.sort_indices(table, [("items", "descending"), ("value", "ascending")])
        return self._values.take(order), self._items_V[np.asarray(order)]

    def _merge(self) -> None:
        if not self._unmerged:
            return
        values = pa.concat_arrays([self._values, *(counts.values for counts in self._unmerged)])
        items = np.concatenate([self._items_V, *(counts.items_V for counts in self._unmerged)])
        self._unmerged = []
        merged = pa.table({"value": values, "items": items}).group_by("value", use_threads=False).aggregate([("items", "sum")])
        self.overflowed = len(merged) > self._max_values
        if self.overflowed:
            merged = merged.slice(0, 0)
        self._values = merged.column("value").combine_chunks()
        self._items_V = np.asarray(merged.column("items_sum"), np.int64)


def count_values(array: pa.Array) -> ValueCounts:
    """Count the items of one block of a column (strings, numbers, booleans, or lists of one of these)."""
    item_R, values = present_values(array)
    encoded = values.dictionary_encode()
    code_R, distinct = np.asarray(encoded.indices, np.int64), len(encoded.dictionary)
    items_with_value = len(item_R)
    if is_list(array.type) and distinct:
        pair_R = np.sort(item_R * distinct + code_R)
        code_R = pair_R[differs_from_previous(pair_R)] % distinct
        items_with_value = int(np.count_nonzero(differs_from_previous(item_R)))
    return ValueCounts(encoded.dictionary, np.bincount(code_R, minlength=distinct), items_with_value)


def present_values(array: pa.Array) -> Present:
    """The values of a block that count, with the position of the item of each."""
    item_R = np.arange(len(array))
    if is_list(array.type):
        item_R, array = np.asarray(pc.list_parent_indices(array), np.int64), pc.list_flatten(array)
    if array.type != value_type(array.type):
        array = array.cast(value_type(array.type))
    is_float = pa.types.is_floating(array.type)
    is_value_R = pc.fill_null(pc.is_finite(array), False) if is_float else pc.is_valid(array)
    values = array.filter(is_value_R)
    return Present(item_R[np.asarray(is_value_R)], pc.add(values, pa.scalar(0.0, values.type)) if is_float else values)  # −0 becomes 0


def differs_from_previous(number_R: Int64) -> Bool:
    """bool[R]: whether each number differs from the one before; the first does."""
    return np.append(True, number_R[1:] != number_R[:-1])[: len(number_R)]


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column. Half precision becomes float32, because not all Arrow functions take float16."""
    kind = kind.value_type if is_list(kind) else kind
    return pa.float32() if pa.types.is_float16(kind) else kind


def is_number(kind: pa.DataType) -> bool:
    inner_type: Any = value_type(kind)
    return bool(pa.types.is_integer(inner_type) or pa.types.is_floating(inner_type))
