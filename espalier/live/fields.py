"""Fields of a live item, as the item table's columns take them.

A field is given as JSON and kept as its column would keep it: a number of a float32 column is rounded, so that filters, features and a fold
see the same value. Knows columns and their types. Does not know items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from espalier.errors import InvalidInput
from espalier.items import ItemTable


class Columns:
    """The columns of an item table but `id`, which no field may name."""

    def __init__(self, items: ItemTable) -> None:
        self._types: dict[str, pa.DataType] = {field: items.column(field).type for field in items.fields if field != "id"}

    def typed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields as their columns keep them, those that are null left out. Raises InvalidInput, naming the field."""
        typed = {}
        for name, value in fields.items():
            kind = self._types.get(name)
            if kind is None:
                raise InvalidInput(f"fields.{name}", name, f"one of {', '.join(self._types) or 'no columns: the items have none'}")
            if value is not None:
                typed[name] = _typed(f"fields.{name}", value, kind)
        return typed

    def fitting(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The same of fields that were checked for another version: those that this one does not have, or has otherwise, are left out."""
        typed: dict[str, Any] = {}
        for name, value in fields.items():
            with suppress(InvalidInput):
                typed |= self.typed({name: value})
        return typed


def _typed(path: str, value: Any, kind: pa.DataType) -> Any:
    if not _fits(value, kind):
        raise InvalidInput(path, value, _wanted(kind))
    if isinstance(value, str) and (pt.is_string(kind) or pt.is_large_string(kind)):
        return value
    try:
        kept = pa.array([value], kind)[0].as_py()
        if not all(math.isfinite(entry) for entry in (kept if isinstance(kept, list) else [kept]) if isinstance(entry, float)):
            raise InvalidInput(path, value, f"{_wanted(kind)} (a number that it can hold)")
        return kept
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(path, value, f"{_wanted(kind)} ({error})") from error


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a JSON value is of a column's kind. Arrow alone would take true for a number, and a text for a list of letters."""
    if _is_list(kind):
        return isinstance(value, list | tuple) and all(entry is None or _fits(entry, kind.value_type) for entry in value)
    if pt.is_boolean(kind):
        return isinstance(value, bool)
    if pt.is_integer(kind):
        return isinstance(value, int) and not isinstance(value, bool)
    if pt.is_floating(kind):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) or not (pt.is_string(kind) or pt.is_large_string(kind))


def _wanted(kind: pa.DataType) -> str:
    return f"a list of {kind.value_type}" if _is_list(kind) else f"a value of the column's type, {kind}"


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))
