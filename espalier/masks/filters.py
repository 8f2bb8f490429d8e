"""Filters over the item table's columns: from JSON to the node mask that a search takes.

`{"section": ["games", "math"], "year": {"min": 1990}}`: an item passes if, for every key, it has one of the values or a value in the range
(both ends included). In a list-valued column, any element may match. An exclude filter bars an item that matches any of its keys. Null and
NaN match nothing, and neither does a value that no item has. Masks are cached; the least recently used one is dropped first.
Knows columns, values and removed items; `eligibility.py` makes masks, and the engines apply them.

Legend: I items, N nodes, V distinct values of a column, R (value, item row) pairs of a column.
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Array, Bool, Int64
from espalier.errors import InvalidQuery
from espalier.items import ItemTable
from espalier.masks.eligibility import bundle_alone, forest_mask
from espalier.search import NodeMask
from espalier.tree import Tree

Value = str | int | float | bool
Kind = Literal["string", "number", "boolean"]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; None: no bound."""

    low: float | None
    high: float | None


Condition = tuple[Value, ...] | Range
"""The condition on one column: one of some values, or a number in a range."""


@dataclass(frozen=True)
class Filter:
    """A checked filter in canonical form: order and repeats in a request make no difference. False if all items pass.

    wanted  (column, condition) of every column that an item must match, by column; values ascending, each once
    barred  (column, condition) of every column that an item must not match
    """

    wanted: tuple[tuple[str, Condition], ...] = ()
    barred: tuple[tuple[str, Condition], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wanted or self.barred)

    @property
    def size(self) -> int:
        """Bytes of its values."""
        conditions = [condition for _, condition in self.wanted + self.barred]
        return sum(sys.getsizeof(value) for condition in conditions if isinstance(condition, tuple) for value in condition)


class ItemFilters:
    """The filters of one model. Safe to use from several threads.

    trees      the model's only tree, or all of its forest
    max_bytes  most bytes of all cached masks: N for each mask and tree, and the filter. A larger mask is built for each request.
    """

    def __init__(self, trees: Sequence[Tree], items: ItemTable, max_bytes: int) -> None:
        self._trees, self._items, self.max_bytes = trees, items, max_bytes
        kinds = {field: _kind(items.column(field).type) for field in items.fields}
        self._kinds: dict[str, Kind] = {field: kind for field, kind in kinds.items() if kind is not None}
        self._indices: dict[str, _Index] = {}
        self._index_locks = {field: threading.Lock() for field in self._kinds}
        self._lock = threading.Lock()  # of all fields below; held only for moments
        self._masks: OrderedDict[Filter, NodeMask] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._building: dict[Filter, threading.Lock] = {}  # the thread that builds a mask holds its lock
        self._removed = np.empty(0, np.int64)
        self.standing: NodeMask | None = None
        """The mask of a query without a filter; None if no item is removed."""

    @cached_property
    def every_item(self) -> NodeMask:
        """The mask of a query that sees all trained items, even removed ones, and no live items."""
        return bundle_alone(self._trees)

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that can be filtered: strings, numbers, booleans, and lists of one of these."""
        return tuple(self._kinds)

    def parse(self, filter: Mapping[str, object], exclude_filter: Mapping[str, object]) -> Filter:
        """Check a request's filter. Raises InvalidQuery with the path of the wrong value, such as `filter.year.min`."""
        return Filter(self._conditions("filter", filter), self._conditions("exclude_filter", exclude_filter))

    def cached(self, filter: Filter) -> NodeMask | None:
        """The cached mask of a filter; None if there is none. Takes microseconds."""
        with self._lock:
            if filter in self._masks:
                self._masks.move_to_end(filter)
            return self._masks.get(filter)

    def mask(self, filter: Filter) -> NodeMask:
        """The mask of the items that pass a filter and are not removed. Threads that need the same mask at once build it once.

        O(N), and O(I · log I) for the first filter on a column.
        """
        mask = self.cached(filter)
        if mask is not None:
            return mask
        with self._lock:
            building = self._building.setdefault(filter, threading.Lock())
        try:
            with building:
                mask = self.cached(filter)
                return self._built(filter) if mask is None else mask
        finally:
            with self._lock:
                if self._building.get(filter) is building:
                    del self._building[filter]

    def matches(self, filter: Filter, rows: Int64) -> Bool:
        """bool[len(rows)]: whether items pass a filter, even if removed. As slow as building a mask."""
        return self._passing(filter)[rows]

    def set_removed(self, rows: Int64) -> None:
        """Replace the removed items (int64 rows, repeats allowed), which are not eligible in later masks. Drops the cached masks.

        Raises InvalidQuery for a row that the catalogue lacks.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self._items)):
            bad = int(rows.max() if rows.max() >= len(self._items) else rows.min())
            raise InvalidQuery("removed", bad, f"item rows from 0 to {len(self._items) - 1}")
        eligible_I = np.ones(len(self._items), np.bool_)
        eligible_I[rows] = False
        standing = forest_mask(self._trees, eligible_I) if len(rows) else None
        with self._lock:
            self._removed, self.standing = np.unique(rows), standing
            self._masks.clear()
            self._bytes = 0
            self._building.clear()  # masks being built have the old removals: earlier callers get them, and they are not cached

    def is_removed(self, rows: Int64) -> Bool:
        """bool[len(rows)]: whether items are removed."""
        return np.isin(rows, self._removed)

    # -- checking -----------------------------------------------------------------------------------------------------

    def _conditions(self, path: str, conditions: Mapping[str, object]) -> tuple[tuple[str, Condition], ...]:
        for field in conditions:
            if field not in self._kinds:
                raise InvalidQuery(f"{path}.{field}", field, f"a column that can be filtered: {', '.join(self._kinds)}")
        return tuple((field, _condition(f"{path}.{field}", self._kinds[field], conditions[field])) for field in sorted(conditions))

    # -- building -----------------------------------------------------------------------------------------------------

    def _passing(self, filter: Filter) -> Bool:
        """bool[I]: the items that pass, even if removed."""
        passing_I = np.ones(len(self._items), np.bool_)
        for field, condition in filter.wanted:
            matching_I = np.zeros(len(self._items), np.bool_)
            for rows in self._matching(field, condition):
                matching_I[rows] = True
            passing_I &= matching_I
        for field, condition in filter.barred:
            for rows in self._matching(field, condition):
                passing_I[rows] = False
        return passing_I

    def _matching(self, field: str, condition: Condition) -> list[Array]:
        """The rows of the items that match one condition, as arrays that may overlap."""
        if field == "id" and isinstance(condition, tuple):
            rows = self._items.rows_of([str(item_id) for item_id in condition])
            return [rows[rows >= 0]]
        with self._index_locks[field]:
            if field not in self._indices:
                self._indices[field] = _index(self._items.column(field))
        index = self._indices[field]
        if isinstance(condition, Range):
            return [index.between(condition.low, condition.high)]
        return [index.of(value) for value in condition]

    def _built(self, filter: Filter) -> NodeMask:
        """Build a mask. It is cached unless the removals change meanwhile."""
        removed, eligible_I = self._removed, self._passing(filter)
        eligible_I[removed] = False
        mask = forest_mask(self._trees, eligible_I)
        with self._lock:
            is_cached = filter in self._masks  # by another thread, which also began before these removals
            if self._removed is removed and not is_cached and cost_of(filter, mask) <= self.max_bytes:
                self._masks[filter] = mask
                self._bytes += cost_of(filter, mask)
            while self._bytes > self.max_bytes:
                self._bytes -= cost_of(*self._masks.popitem(last=False))
        return mask


ENTRY_BYTES = 700
"""Bytes of the Python objects around a cached mask."""


def cost_of(filter: Filter, mask: NodeMask) -> int:
    return mask.nbytes + filter.size + ENTRY_BYTES


@dataclass(frozen=True)
class _Index:
    """The item rows of each value of a column.

    values_V   Arrow array, ascending, each value once
    offsets    int64[V+1]   the rows of value v are rows_R[offsets[v] : offsets[v + 1]]
    rows_R     int[R]       item rows, in the shortest integers that hold them
    """

    values_V: pa.Array
    offsets: Int64
    rows_R: Array

    def of(self, value: Value) -> Array:
        """The rows of the items that have a value."""
        at = bisect_left(self.values_V, value, key=methodcaller("as_py"))
        has_value = at < len(self.values_V) and self.values_V[at].as_py() == value
        return self.rows_R[self.offsets[at] : self.offsets[at + 1]] if has_value else self.rows_R[:0]

    def between(self, low: Value | None, high: Value | None) -> Array:
        """The rows of the items with a value from `low` to `high`; an item with several such values comes several times."""
        value_of = methodcaller("as_py")  # Python compares integers and floats exactly, NumPy and Arrow do not
        begin = 0 if low is None else bisect_left(self.values_V, low, key=value_of)
        end = len(self.values_V) if high is None else bisect_right(self.values_V, high, key=value_of)
        return self.rows_R[self.offsets[begin] : self.offsets[end]]


def _index(column: pa.ChunkedArray) -> _Index:
    """Sort a column's (value, item row) pairs by value. O(R · log R)."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    rows_R = np.arange(len(array), dtype=np.min_scalar_type(-len(array)))
    if is_list(array.type):
        rows_R, array = rows_R[np.asarray(pc.list_parent_indices(array))], pc.list_flatten(array)
    present_R = pc.invert(pc.is_null(array, nan_is_null=True))
    rows_R, array = rows_R[np.asarray(present_R)], array.filter(present_R)
    if _kind(array.type) == "number":
        key_R, value_of_key = np.asarray(array), None
    else:
        encoded = array.dictionary_encode()
        order_V = pc.sort_indices(encoded.dictionary)
        value_of_key = encoded.dictionary.take(order_V)
        rank_V = np.empty(len(order_V), np.min_scalar_type(len(order_V)))
        rank_V[np.asarray(order_V)] = np.arange(len(order_V))
        key_R = rank_V[np.asarray(encoded.indices)]
    order_R = np.argsort(key_R, kind="stable" if key_R.itemsize <= 2 else "quicksort")  # the fastest: radix sort, vectorised quicksort
    key_V, first_V = np.unique(key_R[order_R], return_index=True)
    return _Index(pa.array(key_V) if value_of_key is None else value_of_key, np.append(first_V, len(key_R)), rows_R[order_R])


def is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _kind(type_: pa.DataType) -> Kind | None:
    """The kind of values in a column of an Arrow type; None if it cannot be filtered."""
    if is_list(type_):
        type_ = type_.value_type
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "string"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return "number"
    return "boolean" if pa.types.is_boolean(type_) else None


def _condition(path: str, kind: Kind, raw: object) -> Condition:
    """One column's values or range. Raises InvalidQuery."""
    if isinstance(raw, Mapping) and kind == "number":
        for end in raw:
            if end not in ("min", "max"):
                raise InvalidQuery(f"{path}.{end}", raw[end], "no more than min and max in a range")
        if not raw:
            raise InvalidQuery(path, raw, "a range with min, max or both")
        for end, value in raw.items():
            if not _is_a(kind, value):
                raise InvalidQuery(f"{path}.{end}", value, "a finite number")
        low, high = raw.get("min"), raw.get("max")
        if low is not None and high is not None and low > high:
            raise InvalidQuery(path, raw, "min to be at most max")
        return Range(low, high)
    if not isinstance(raw, list | tuple) or not raw:
        expected = f"a list of at least one {kind}"
        raise InvalidQuery(path, raw, expected + (', or a range {"min": …, "max": …}' if kind == "number" else ""))
    for i, value in enumerate(raw):
        if not _is_a(kind, value):
            raise InvalidQuery(f"{path}[{i}]", value, "a finite number" if kind == "number" else f"a {kind}")
    return tuple(sorted(set(raw)))


def _is_a(kind: Kind, value: object) -> bool:
    if kind == "number":
        return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)))
    return isinstance(value, str if kind == "string" else bool)
