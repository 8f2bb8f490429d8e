"""How many items have each value of a column: counts of blocks of items, and their sum, which has a bound.

An item that has a value several times counts once. Null, NaN and infinity are no values. Knows Arrow arrays. Does not know which items are
counted.

Legend: V distinct values, R (item, value) pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MERGED_VALUES = 1 << 13
"""Counted values that may wait to be merged, if they are more than those that are merged."""


class ValueCounts(NamedTuple):
    """values: Arrow array, each once. items_V: int64[V], how many items have each. having: items that have any."""

    values: pa.Array
    items_V: NDArray[np.int64]
    having: int


class Present(NamedTuple):
    """The values of some items. item_R: int64[R], the place of the item, ascending; values: Arrow array of R values."""

    item_R: NDArray[np.int64]
    values: pa.Array


class Tally:
    """The sum of counts. most: distinct values that are kept; where there are more, none is."""

    def __init__(self, kind: pa.DataType, most: int) -> None:
        self._values, self._items_V = pa.array([], value_type(kind)), np.empty(0, np.int64)
        self._waiting: list[ValueCounts] = []
        self._most = most
        self.having = 0
        self.overflowed = False

    def add(self, counts: ValueCounts) -> None:
        """Count more items. O(values), amortised."""
        self.having += counts.having
        if self.overflowed:
            return
        self._waiting.append(counts)
        if sum(len(one.values) for one in self._waiting) > max(MERGED_VALUES, len(self._values)):
            self._merge()

    def total(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """(values, how many items have each), most items first, then the lower value; nothing where there are too many values."""
        self._merge()
        table = pa.table({"value": self._values, "items": self._items_V})
        order = pc.sort_indices(table, [("items", "descending"), ("value", "ascending")])
        return self._values.take(order), self._items_V[np.asarray(order)]

    def _merge(self) -> None:
        if not self._waiting:
            return
        values = pa.concat_arrays([self._values, *(one.values for one in self._waiting)])
        items = np.concatenate([self._items_V, *(one.items_V for one in self._waiting)])
        self._waiting = []
        merged = pa.table({"value": values, "items": items}).group_by("value", use_threads=False).aggregate([("items", "sum")])
        self.overflowed = len(merged) > self._most
        if self.overflowed:
            merged = merged.slice(0, 0)
        self._values = merged.column("value").combine_chunks()
        self._items_V = np.asarray(merged.column("items_sum"), np.int64)


def count_values(array: pa.Array) -> ValueCounts:
    """Count the items of a part of a column (strings, numbers, booleans, or lists of one of these)."""
    item_R, values = present_values(array)
    encoded = values.dictionary_encode()
    code_R, distinct = np.asarray(encoded.indices, np.int64), len(encoded.dictionary)
    having = len(item_R)
    if is_list(array.type) and distinct:
        pair_R = np.sort(item_R * distinct + code_R)
        code_R = pair_R[first_of_each(pair_R)] % distinct
        having = int(np.count_nonzero(first_of_each(item_R)))
    return ValueCounts(encoded.dictionary, np.bincount(code_R, minlength=distinct), having)


def present_values(array: pa.Array) -> Present:
    """The values that count, and whose they are."""
    item_R = np.arange(len(array))
    if is_list(array.type):
        item_R, array = np.asarray(pc.list_parent_indices(array), np.int64), pc.list_flatten(array)
    if array.type != value_type(array.type):
        array = array.cast(value_type(array.type))
    is_float = pa.types.is_floating(array.type)
    counts_R = pc.fill_null(pc.is_finite(array), False) if is_float else pc.is_valid(array)
    values = array.filter(counts_R)
    return Present(item_R[np.asarray(counts_R)], pc.add(values, pa.scalar(0.0, values.type)) if is_float else values)  # −0 becomes 0


def first_of_each(number_R: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[R]: whether ascending numbers differ from the one before."""
    return np.append(True, number_R[1:] != number_R[:-1])[: len(number_R)]


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column; half precision as float32, which more functions take."""
    kind = kind.value_type if is_list(kind) else kind
    return pa.float32() if pa.types.is_float16(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    own: Any = value_type(kind)
    return bool(pa.types.is_integer(own) or pa.types.is_floating(own))
