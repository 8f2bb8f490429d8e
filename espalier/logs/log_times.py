"""Recognises the times of a log by their values: their type, and the format of dates that are not as ISO 8601 has them.

Knows columns of values. Does not know files.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from espalier.arrays import Int64
from espalier.logs.log_columns import EPOCHS, MOST_BAD, Column
from espalier.logs.log_values import Timestamps, TimestampType, is_text_type

DATES = (
    *(("%d.%m.%Y",), ("%d.%m.%y",), ("%d/%m/%Y", "%m/%d/%Y"), ("%d/%m/%y", "%m/%d/%y")),
    *(("%d-%m-%Y", "%m-%d-%Y"), ("%Y/%m/%d",)),
)
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
"""Formats of dates, in each order of day and month, and of times, other than ISO 8601. With dots, the day comes first everywhere."""


def time_type(values: pa.Array, decimal: str) -> TimestampType | None:
    """The data.format.timestamp_type of values; None if too many of them are not times."""
    if any(is_other(values.type) for is_other in (pa.types.is_boolean, pa.types.is_duration, pa.types.is_time)):
        return None
    if pa.types.is_temporal(values.type):
        return "datetime"
    most_unreadable = int(MOST_BAD * len(values))
    kinds: tuple[TimestampType, ...] = ("integer", "float", "datetime")
    for kind in kinds:
        timestamps = Timestamps(kind, decimal)
        unreadable = timestamps.unreadable(values, most_unreadable + 1)
        if len(unreadable) <= most_unreadable:
            stamps = timestamps.read(values.take(pa.array(np.delete(np.arange(len(values)), unreadable))))
            known_stamps = stamps[stamps != 0]  # some logs write 0 for an unknown time
            if kind == "datetime" or not len(known_stamps):
                return kind
            is_inside = {unit: (least <= known_stamps) & (known_stamps < last) for unit, (least, last) in EPOCHS.items()}
            return next((unit for unit in EPOCHS if is_inside[unit].mean() >= 1 - MOST_BAD), kind)
    return "datetime" if formats(values) else None


def formats(values: pa.Array) -> dict[str, Int64]:
    """The formats that fit texts of dates and times other than ISO 8601, and the rows that no other format fits.

    Two formats fit if day and month could be swapped: in all rows, or in some rows while others contradict each other.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not is_text_type(values.type):
        return {}
    most = int(MOST_BAD * len(values))
    if len(Timestamps("datetime").unreadable(values, most + 1)) <= most:  # ISO 8601
        return {}
    for orders in ([day + time for day in days] for days in DATES for time in TIMES):
        fits = np.ones((len(orders), len(values)), np.bool_)
        for order, form in enumerate(orders):
            fits[order, Timestamps("datetime", time_format=form).unreadable(values, None)] = False
        if np.count_nonzero(~fits.any(axis=0)) <= most:
            only_rows = {form: np.flatnonzero(fits[order] & (fits.sum(axis=0) == 1)) for order, form in enumerate(orders)}
            return {form: rows for form, rows in only_rows.items() if len(rows)} or only_rows
    return {}


def looks_dated(column: Column, kind: TimestampType | None) -> bool:
    """Whether a column's values alone show that it has times. Numbers count only if no line names the columns."""
    return kind == "datetime" or (isinstance(column, int) and kind in EPOCHS)


def two_kinds(values: pa.Array, decimal: str) -> tuple[object, str] | None:
    """The first time of each kind, and what is expected, if a column has times of two kinds; else None."""
    pairs: dict[TimestampType, str] = {"float": "as numbers or all as dates", "datetime": "with a zone or all without one"}
    for kind, words in pairs.items():
        others = Timestamps(kind, decimal).unreadable(values, None)
        if 0 < len(others) < len(values) and time_type(values.take(pa.array(others)), decimal) == "datetime":
            first = next(row for row in range(len(values)) if row not in others)
            return [values[first].as_py(), values[int(others[0])].as_py()], f"times all {words}: convert the others"
    return None


def first_without_time(values: pa.Array, decimal: str) -> object:
    """The first value that is not a time of the same format as the first value; the first value itself if it is no time."""
    kind = time_type(values[:1], decimal)
    time_format = next(iter(formats(values[:1])), None)
    wrong_rows = [0] if kind is None else Timestamps(kind, decimal, time_format).unreadable(values, 1).tolist()
    return values[wrong_rows[0]].as_py()
