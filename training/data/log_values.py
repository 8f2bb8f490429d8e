"""The values of a log's columns, checked: ids, categories and timestamps, with errors that say where a wrong one is.

Knows columns of values. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.errors import InvalidData
from training.specification.log_format import Column

Stamps = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """Where a block of values comes from, to check them and to say which one is wrong.

    first_row  rows before the block, in the file or in its row group
    group      number of the row group (1 = the first), of Parquet
    line_of    the line of a row (0 = the first), of text
    """

    file: str
    first_row: int
    columns: Mapping[str, Column]
    group: int | None = None
    line_of: Callable[[int], int] | None = None

    def wrong(self, role: str, row: int, value: object, expected: str) -> InvalidData:
        group, row = "" if self.group is None else f"row group {self.group}, ", self.first_row + row
        where = f"row {row + 1}" if self.line_of is None else f"line {self.line_of(row)}"
        return InvalidData(f"{self.file}: {group}{where}, column {role}", value, f"{expected} in column {self._column(role)}")

    def _column(self, role: str) -> str:
        return repr(self.columns[role])

    def strings(self, role: str, values: pa.Array) -> pa.Array:
        """A column of ids or names as strings; integers (Parquet) are written out."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        fits = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_integer)
        if not any(fit(values.type) for fit in fits):
            raise InvalidData(f"{self.file}: column {role}", str(values.type), f"strings or integers in column {self._column(role)}")
        return values.cast(pa.string())

    def ids(self, role: str, values: pa.Array) -> pa.Array:
        ids = self.strings(role, values)
        missing = np.flatnonzero(pc.equal(pc.coalesce(ids, pa.scalar("")), "").to_numpy(zero_copy_only=False))
        if len(missing):
            row = int(missing[0])
            raise self.wrong(role, row, ids[row].as_py(), "an id")
        return ids

    def categories(self, values: pa.Array) -> pa.Array:
        names = self.strings("category", values)
        return pc.if_else(pc.equal(names, ""), pa.scalar(None, pa.string()), names)


class Timestamps:
    """The timestamps of a log, read block by block. Dates and times in texts have a zone if the log's first one has, and else none."""

    def __init__(self, kind: Literal["integer", "float", "datetime"]) -> None:
        self._kind = kind
        self._of_first: tuple[str | None, str] | None = None  # the zone that the log's first text is read with, and what all have

    def read(self, values: pa.Array, place: Place) -> Stamps:
        """int64 (integers, or microseconds of a date and time) or float64. Raises InvalidData."""
        if self._kind == "integer":
            to, expected = pa.int64(), "an integer"
        elif self._kind == "float":
            to, expected = pa.float64(), "a finite number"
        else:
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            to, expected = self._date_and_time(values)
        stamps = _cast(values, to)
        if stamps is not None:
            return stamps
        row = _first_where(lambda n: _cast(values[:n], to) is None, len(values)) - 1
        if self._kind != "datetime" and Timestamps("datetime").can_read(values[row : row + 1]):
            expected = f'{expected}, or data.format.timestamp_type = "datetime" for dates and times as ISO 8601,'
        raise place.wrong("timestamp", row, values[row].as_py(), expected)

    def can_read(self, values: pa.Array) -> bool:
        """Whether values of a log's column are dates and times."""
        return _cast(values, self._date_and_time(values)[0]) is not None

    def _date_and_time(self, values: pa.Array) -> tuple[pa.DataType, str]:
        """The type that dates and times are read as, and what is expected of each."""
        expected = "an ISO 8601 date and time"
        if not any(fits(values.type) for fits in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
            return pa.timestamp("us", getattr(values.type, "tz", None)), expected
        if self._of_first is None and len(values):
            zones = ((None, "without a zone"), ("UTC", "with a zone"))
            self._of_first = next((zone for zone in zones if _cast(values[:1], pa.timestamp("us", zone[0])) is not None), None)
        if self._of_first is None:
            return pa.timestamp("us"), expected
        zone, words = self._of_first
        return pa.timestamp("us", zone), f"{expected} {words}, as the log's first,"


def _cast(values: pa.Array, to: pa.DataType) -> Stamps | None:
    """The values as numbers, or None when one of them is missing, unreadable or not finite."""
    try:
        cast = values.cast(to)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if pa.types.is_timestamp(to):
        cast = cast.cast(pa.int64())
    if cast.null_count:
        return None
    stamps: Stamps = cast.to_numpy(zero_copy_only=False)
    return stamps if np.isfinite(stamps).all() else None


def _first_where(holds: Callable[[int], bool], last: int) -> int:
    """The smallest n in 1 … last for which a condition holds that stays true once true; it holds for `last`."""
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
