"""Fields of live items: typed as the item table's columns, and stored by column, as arrays, for filters.

A field comes as JSON and is stored as its column would store it: a number of a float32 column is rounded, so that filters, features and a
fold see the same value. Conditions of filters are evaluated on whole columns. Knows columns, values and conditions. Does not know filters
as a whole, nor which items are live.

Legend: V values of a column, those of a list one by one, R handles, M handles that match, repeats included.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from espalier.arrays import Array
from espalier.errors import InvalidInput
from espalier.items import ItemTable
from espalier.masks.filters import Condition, Range, Value, is_list

UNUSED = 1024
"""Unused values that a column may hold, in addition to as many as it uses."""
GONE = -1
"""The handle of an unused value."""


class Columns:
    """The columns of an item table but `id`, which no field may name."""

    def __init__(self, items: ItemTable) -> None:
        self._types: dict[str, pa.DataType] = {field: items.column(field).type for field in items.fields if field != "id"}

    def typed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields as their columns store them, without those that are null. Raises InvalidInput with the field's name."""
        typed = {}
        for name, value in fields.items():
            kind = self._types.get(name)
            if kind is None:
                raise InvalidInput(f"fields.{name}", name, f"one of {', '.join(self._types) or 'no columns: the items have none'}")
            if value is not None:
                typed[name] = _typed(f"fields.{name}", value, kind)
        return typed

    def fitting(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As `typed`, of fields that were checked for another version: fields that do not fit this version are left out."""
        typed: dict[str, Any] = {}
        for name, value in fields.items():
            with suppress(InvalidInput):
                typed |= self.typed({name: value})
        return typed


def _typed(path: str, value: Any, kind: pa.DataType) -> Any:
    if not _fits(value, kind):
        raise InvalidInput(path, value, _expected(kind))
    if isinstance(value, str) and (pt.is_string(kind) or pt.is_large_string(kind)):
        return value
    try:
        typed = pa.array([value], kind)[0].as_py()
        if not all(math.isfinite(entry) for entry in (typed if isinstance(typed, list) else [typed]) if isinstance(entry, float)):
            raise InvalidInput(path, value, f"{_expected(kind)} (a number that it can hold)")
        return typed
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(path, value, f"{_expected(kind)} ({error})") from error


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a JSON value is of a column's kind. Arrow would accept true as a number, and a text as a list of letters."""
    if is_list(kind):
        return isinstance(value, list | tuple) and all(entry is None or _fits(entry, kind.value_type) for entry in value)
    if pt.is_boolean(kind):
        return isinstance(value, bool)
    if pt.is_integer(kind):
        return isinstance(value, int) and not isinstance(value, bool)
    if pt.is_floating(kind):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) or not (pt.is_string(kind) or pt.is_large_string(kind))


def _expected(kind: pa.DataType) -> str:
    return f"a list of {kind.value_type}s" if is_list(kind) else f"a value of the column's type, {kind}"


class FieldColumn:
    """One column. For one thread at a time.

    Integers are stored exactly, other numbers as float64, texts and booleans as codes. Null and NaN are not stored: they meet no condition.
    """

    def __init__(self, kind: pa.DataType) -> None:
        kind = kind.value_type if is_list(kind) else kind
        self._is_integer, self._is_number = pt.is_integer(kind), pt.is_integer(kind) or pt.is_floating(kind)
        self._value_V: Array = np.empty(0, kind.to_pandas_dtype() if self._is_integer else np.float64 if self._is_number else np.int64)
        self._handle_V = np.empty(0, np.int64)
        self._used = 0
        self._span_of: dict[int, tuple[int, int]] = {}  # handle → (begin, end) of its values
        self._code_of: dict[Value, int] = {}  # of texts and booleans

    def set(self, handle: int, value: Any) -> None:
        """Replace an item's values: by a value, a list of values, or None."""
        begin, end = self._span_of.pop(handle, (0, 0))
        self._handle_V[begin:end] = GONE
        values = [entry for entry in (value if isinstance(value, list) else [value]) if entry is not None and entry == entry]
        if not values:
            return
        begin, end = self._used, self._used + len(values)
        if end > len(self._value_V):
            self._make_room(len(values))
            begin, end = self._used, self._used + len(values)
        self._value_V[begin:end] = values if self._is_number else [self._code_of.setdefault(text, len(self._code_of)) for text in values]
        self._handle_V[begin:end] = handle
        self._span_of[handle], self._used = (begin, end), end

    def matching(self, condition: Condition) -> Array:
        """int64[M]: the handles of the items with a value that meets a condition."""
        value_V = self._value_V[: self._used]
        if isinstance(condition, Range):
            low, high = self._bounds(condition)
            meets_V = (value_V >= low) & (value_V <= high) if low <= high else np.zeros(len(value_V), np.bool_)
        else:
            meets_V = np.isin(value_V, np.array(self._stored_values(condition), value_V.dtype))
        handle_V = self._handle_V[: self._used]
        handle_M: Array = handle_V[meets_V & (handle_V != GONE)]
        return handle_M

    def _stored_values(self, values: Sequence[Value]) -> list[Any]:
        """The values that the column can hold, as it stores them."""
        if not self._is_number:
            return [self._code_of[value] for value in values if value in self._code_of]
        bounds = [(value, *self._bounds(Range(value, value))) for value in values if not isinstance(value, str)]
        return [low for value, low, high in bounds if low == high == value]

    def _bounds(self, range_: Range) -> tuple[Any, Any]:
        """The least and the largest number of the column's type in a range, exactly. If there is none, the first is larger."""
        low, high = range_.low, range_.high
        if self._is_integer:
            least, largest = (int(bound) for bound in (np.iinfo(self._value_V.dtype).min, np.iinfo(self._value_V.dtype).max))
            low = least if low is None else max(math.ceil(low), least)
            high = largest if high is None else min(math.floor(high), largest)
            return (low, high) if low <= high else (1, 0)
        return (-math.inf if low is None else -_at_most(-low)), (math.inf if high is None else _at_most(high))

    def _make_room(self, more: int) -> None:
        """Drop unused values and codes; then double the room."""
        used_V = np.flatnonzero(self._handle_V[: self._used] != GONE)
        value_V, handle_V = self._value_V[used_V], self._handle_V[used_V]
        if not self._is_number:
            used_codes, value_V = np.unique(value_V, return_inverse=True)
            texts = list(self._code_of)
            self._code_of = {texts[old]: new for new, old in enumerate(used_codes.tolist())}
        size = 2 * (len(used_V) + more) + UNUSED
        self._value_V, self._handle_V = np.zeros(size, self._value_V.dtype), np.full(size, GONE, np.int64)
        self._used = len(used_V)
        self._value_V[: self._used], self._handle_V[: self._used] = value_V, handle_V
        first_V = np.flatnonzero(np.diff(handle_V, prepend=GONE))
        bounds = pairwise([*first_V.tolist(), self._used])
        self._span_of = {int(handle_V[begin]): (begin, end) for begin, end in bounds}


def _at_most(number: float) -> float:
    """The largest float that is not above a number, which may be an integer of any size."""
    try:
        nearest = float(number)
    except OverflowError:
        return sys.float_info.max if number > 0 else -math.inf
    return math.nextafter(nearest, -math.inf) if nearest > number else nearest
