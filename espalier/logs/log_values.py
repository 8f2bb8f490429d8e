"""Checks the values of a log's columns: ids, categories and timestamps. Rows with wrong values are refused, or left out and counted.

Knows columns of values. Does not know files.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.arrays import Float64, Int64
from espalier.errors import InvalidData
from espalier.logs.log_columns import LAST_MICROSECOND, Column
from espalier.wording import configured

log = logging.getLogger(__name__)

Stamps = Int64 | Float64
BadRowsPolicy = Literal["refuse", "skip"]
TimestampType = Literal["integer", "float", "datetime", "seconds", "milliseconds", "microseconds", "nanoseconds"]
DATED: tuple[TimestampType, ...] = ("datetime", "seconds", "milliseconds", "microseconds", "nanoseconds")
"""The types whose timestamps are points in time: dates of `data.split` can be compared with them."""

MICROSECONDS = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}
"""Microseconds of a unit, for timestamp types that count from 1970."""
FALLBACK_TYPES: dict[TimestampType, tuple[TimestampType, ...]] = {"integer": ("datetime", "float"), "float": ("datetime",)}
"""Type → types that an error suggests if a value does not fit it; for other types those in DATED."""
NOT_ISO = ((r"(\.[0-9]{6})[0-9]+", r"\1"), (" ?(?:UTC|GMT|Z)$", "Z"), (" ([+-][0-9:]+)$", r"\1"))
"""Pattern of more digits of a second than six, or of a zone that a blank or a name sets apart → how pyarrow reads it."""
FIRST_MOMENT = np.datetime64("1000-01-01", "us")
"""Earlier times come from years written with two digits."""
WITHOUT_DAY = {"%d": "%M", "%e": "%M", "%D": "%m/%M/%y", "%F": "%Y-%m-%M"}
"""Directive of `strptime` with a day → one that reads the same text with the day as a minute. The date is then the first of the month."""
LEAVE_OUT = "leave such rows out (pandas: dropna, polars: drop_nulls)"
HALF_A_MONTH, HALF_A_DAY = np.timedelta64(14, "D"), np.timedelta64(12, "h")
ZONE_ROWS = 100
"""First values of a block that are searched for the zone of the log's dates and times."""


class BadRows:
    """Unreadable rows: the first one raises an error, or all are left out and counted by reason."""

    def __init__(self, policy: BadRowsPolicy, section: str) -> None:
        """section: dotted name of the section with the key `bad_rows`. The reader adds the rows that it reads to `rows_read`."""
        self.counts: Counter[str] = Counter()
        self.rows_read = 0
        self._policy, self._section = policy, section

    @property
    def most(self) -> int | None:
        """The most unreadable rows to look for in a block; None: all."""
        return 1 if self._policy == "refuse" else None

    def add(self, reason: str, rows: Int64, problem: Callable[[int], InvalidData]) -> None:
        """Count ascending rows with one problem, and log the first of each reason. Raises InvalidData if the policy is to refuse."""
        if not len(rows):
            return
        if self._policy == "refuse":
            error = problem(int(rows[0]))
            remedy = configured(f'{self._section}.bad_rows = "skip" leaves such rows out', f"or {LEAVE_OUT}")
            raise InvalidData(error.field, error.value, f"{error.expected}; {remedy}")
        if reason not in self.counts:
            log.warning("left out: %s", problem(int(rows[0])))
        self.counts[reason] += len(rows)

    def finish(self) -> None:
        """After the last row, log how many were left out. Raises InvalidData if more were left out than read."""
        left_out, by_reason = self.counts.total(), ", ".join(f"{reason}: {count:,}" for reason, count in self.counts.items())
        if left_out > self.rows_read:
            counts_text = f"{left_out:,} of {left_out + self.rows_read:,} rows left out ({by_reason})"
            remedy = configured("; the other keys do not fit the file", f": name other columns, or {LEAVE_OUT}")
            raise InvalidData(configured(f"{self._section}.bad_rows", "data"), counts_text, f"at most half{remedy}")
        if left_out:
            log.warning("rows left out: %d (%s); rows read: %d", left_out, by_reason, self.rows_read)


@dataclass(frozen=True)
class RowSource:
    """The file and position of a block's rows. It checks values and says where a wrong one is.

    columns   role → column of the file
    position  row of the block, from 0 → its line or row, in words
    """

    file: str
    columns: Mapping[str, Column]
    position: Callable[[int], str]

    def problem(self, role: str, row: int, value: object, expected: str) -> InvalidData:
        return InvalidData(f"{self.file}: {self.position(row)}, column {role}", value, f"{expected} in column {self.columns[role]!r}")

    def without(
        self, batch: pa.RecordBatch, role: str, rows: Int64, bad_rows: BadRows, reason: str, expected: str
    ) -> tuple[RowSource, pa.RecordBatch]:
        """The source and the block without the rows whose value in a column is wrong; `bad_rows` refuses or counts these."""
        values = batch.column(role)
        bad_rows.add(reason, rows, lambda row: self.problem(role, row, values[row].as_py(), expected))
        if not len(rows):
            return self, batch
        kept_rows = np.delete(np.arange(len(batch)), rows)
        return RowSource(self.file, self.columns, lambda row: self.position(int(kept_rows[row]))), batch.take(pa.array(kept_rows))

    def strings(self, role: str, values: pa.Array) -> pa.Array:
        """A column of ids or names as strings; whole numbers (Parquet) are written as integers, and NaN is null."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_floating(values.type):  # pandas turns integers into floats if some are missing
            numbers = values.to_numpy(zero_copy_only=False)  # NaN for null
            bits = np.finfo(numbers.dtype).nmant + 1
            wrong_numbers = numbers[(np.abs(numbers) >= 2.0**bits) | ((numbers != np.rint(numbers)) & ~np.isnan(numbers))]
            if len(wrong_numbers):
                expected = f"strings, or whole numbers below 2^{bits}, in column {self.columns[role]!r}: convert the column"
                raise InvalidData(f"{self.file}: column {role}", f"{values.type} {wrong_numbers[0]}", expected)
            values = pa.array(numbers, from_pandas=True).cast(pa.int64())
        if not (is_text_type(values.type) or pa.types.is_integer(values.type)):
            raise InvalidData(f"{self.file}: column {role}", str(values.type), f"strings or integers in column {self.columns[role]!r}")
        return values.cast(pa.string())

    def categories(self, values: pa.Array) -> pa.Array:
        names = self.strings("category", values)
        return pc.if_else(pc.equal(names, ""), pa.scalar(None, pa.string()), names)


def table_row(row: int) -> str:
    """A row of Parquet or of a data frame in words. It has no line, and their libraries count from 0."""
    return f"row {row} (from 0)"


def warn_of_float_ids(file: str, column: Column, ids: pa.Array) -> None:
    """Log a warning if all ids are texts such as "12.0": pandas writes integers so if some values of the column are missing."""
    if len(ids) and pc.all(pc.match_substring_regex(ids, r"^-?[0-9]+\.0$")).as_py():
        example = ids[0].as_py()
        message = "WARNING: %s: all ids in column %r end in .0. %r is another id than %r: if they were integers, write them as such"
        log.warning(message, file, column, example, example[:-2])


def empty_rows(ids: pa.Array) -> Int64:
    return np.flatnonzero(pc.equal(pc.coalesce(ids, pa.scalar("")), "").to_numpy(zero_copy_only=False))


def present(values: pa.Array) -> pa.Array:
    """The values without nulls, NaN and empty texts."""
    values = values.drop_null()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_floating(values.type):
        return values.filter(pc.invert(pc.is_nan(values)))
    if is_text_type(values.type):
        values = values.cast(pa.string())
        return values.filter(pc.not_equal(values, ""))
    return values


def as_text(values: pa.Array) -> pa.Array | None:
    """Bytes as strings; None if some are not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return None


class Timestamps:
    """Reads the timestamps of a log block by block. Texts of dates and times must have a zone if the log's first has one, else none.

    decimal      the character before the fraction of a number in a text
    time_format  `strptime` format of texts of dates and times; None: ISO 8601
    """

    def __init__(self, kind: TimestampType, decimal: str = ".", time_format: str | None = None) -> None:
        self._kind, self._decimal, self._time_format = kind, decimal, time_format
        self._format_without_day = re.sub("%.", lambda directive: WITHOUT_DAY.get(directive[0], directive[0]), time_format or "")
        self._of_first: tuple[str | None, str] | None = None  # the zone of the log's first text for pyarrow, and in words

    def unreadable(self, values: pa.Array, most: int | None) -> Int64:
        """The first `most` unreadable rows; None: all."""
        values = self._prepared(values)
        if self._time_format is not None and is_text_type(values.type):
            return np.flatnonzero(np.isnat(self._moments(values)))[:most]
        self._find_zone(values)
        return unreadable_rows(values, lambda part: self._cast(part) is not None, most)

    def read(self, values: pa.Array) -> Stamps:
        """Readable values as int64 (integers, or microseconds of points in time) or float64."""
        stamps = self._cast(self._prepared(values))
        if stamps is None:
            raise ValueError("timestamps that cannot be read")
        return stamps

    def expected(self, value: pa.Array) -> str:
        """The expected form of an unreadable value, with the option that would read it."""
        if self._time_format is not None:
            return f"a date and time written {self._time_format}"
        if self._kind == "datetime":
            zone = "" if self._of_first is None else f" {self._of_first[1]}, as the log's first,"
            return f"an ISO 8601 date and time{zone}"
        expected = {"integer": "an integer", "float": "a finite number"}.get(self._kind, f"{self._kind} since 1970, before the year 2255")
        fallback_types = FALLBACK_TYPES.get(self._kind, DATED)
        for fallback in fallback_types:
            if not len(Timestamps(fallback, self._decimal).unreadable(value, 1)):
                purpose = " for dates and times as ISO 8601" if fallback == "datetime" else ""
                other_type = f', or data.format.timestamp_type = "{fallback}"{purpose},'
                return f"{expected}{configured(other_type, ' as in the first rows')}"
        return expected

    def _prepared(self, values: pa.Array) -> pa.Array:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        is_number = self._decimal != "." and self._kind != "datetime" and is_text_type(values.type)
        return pc.replace_substring(values, self._decimal, ".") if is_number else values

    def _cast(self, values: pa.Array) -> Stamps | None:
        """The values as numbers, or None when one of them is missing, unreadable or not finite."""
        if self._time_format is not None and is_text_type(values.type):
            moments = self._moments(values)
            return None if np.isnat(moments).any() else moments.astype(np.int64)
        if self._kind == "datetime":
            zone = getattr(values.type, "tz", None) if self._of_first is None else self._of_first[0]
            return _iso(values, zone)
        if self._kind == "integer":
            return _numbers(values, pa.int64())
        numbers = _numbers(values, pa.float64())
        if self._kind == "float" or numbers is None:
            return numbers
        moments = np.rint(numbers * MICROSECONDS[self._kind])
        return moments.astype(np.int64) if (np.abs(moments) < LAST_MICROSECOND).all() else None

    def _moments(self, values: pa.Array) -> NDArray[np.datetime64]:
        """datetime64[us] of texts in the time format; NaT for unreadable ones."""
        texts, formats = values.cast(pa.string()), (self._time_format, self._format_without_day)
        moments, firsts = (pc.strptime(texts, form, "us", error_is_null=True).to_numpy(zero_copy_only=False) for form in formats)
        months = (firsts + HALF_A_MONTH).astype("datetime64[M]")  # a first with a zone may be in the month before
        lengths = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
        is_in_month = moments - firsts < lengths - HALF_A_DAY  # strptime reads 31 February as 2 or 3 March
        return np.where(is_in_month & (moments >= FIRST_MOMENT), moments, np.datetime64("NaT"))  # %Y reads years of two digits, too

    def _find_zone(self, values: pa.Array) -> None:
        if self._kind != "datetime" or self._time_format is not None or self._of_first is not None or not is_text_type(values.type):
            return
        for row in range(min(len(values), ZONE_ROWS)):
            for zone in ((None, "without a zone"), ("UTC", "with a zone")):
                if _iso(values[row : row + 1], zone[0]) is not None:
                    self._of_first = zone
                    return


def is_text_type(values: pa.DataType) -> bool:
    return any(fits(values) for fits in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _iso(values: pa.Array, zone: str | None) -> Stamps | None:
    """As `_numbers`, microseconds of dates and times as ISO 8601 or NOT_ISO has them."""
    moments = _numbers(values, pa.timestamp("us", zone))
    if moments is None and is_text_type(values.type):
        texts = values.cast(pa.string())
        for pattern, iso in NOT_ISO:
            texts = pc.replace_substring_regex(texts, pattern, iso)
        moments = _numbers(texts, pa.timestamp("us", zone))
    return moments


def _numbers(values: pa.Array, to: pa.DataType) -> Stamps | None:
    """The values as numbers, or None when one of them is missing, unreadable or not finite."""
    rounds = pa.types.is_integer(values.type) and pa.types.is_floating(to)  # as texts do: nanoseconds have more digits than floats
    rounds |= pa.types.is_timestamp(to) and pa.types.is_timestamp(values.type) and values.type.unit == "ns"
    try:
        cast = values.cast(to, safe=not rounds)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if pa.types.is_timestamp(to):
        cast = cast.cast(pa.int64())
    if cast.null_count:
        return None
    stamps: Stamps = cast.to_numpy(zero_copy_only=False)
    return stamps if np.isfinite(stamps).all() else None


def unreadable_rows(values: pa.Array, can_read: Callable[[pa.Array], bool], most: int | None) -> Int64:
    """The first `most` unreadable rows, or all for None. Blocks are halved, so that few unreadable rows take few calls."""
    rows: list[int] = []
    spans = [(0, len(values))]
    while spans and (most is None or len(rows) < most):
        begin, end = spans.pop()
        if can_read(values[begin:end]):
            continue
        if end - begin == 1:
            rows.append(begin)
            continue
        middle = (begin + end) // 2
        spans += [(middle, end), (begin, middle)]
    return np.array(rows, np.int64)
