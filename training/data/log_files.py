"""Log files: CSV-like text with any separator, lists with a user a line, and Parquet, each optionally gzipped, as checked columns.

Knows files, columns and values. Does not know users, catalogues or orders: see `interactions.py`.
"""

from __future__ import annotations

import gzip
import io
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from numpy.typing import NDArray

from espalier.errors import InvalidData
from training.specification.log_format import UNIT_SEPARATOR, Column, CsvFormat, EventFormat, ListsFormat

Stamps = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class LogBatch:
    """Some consecutive events: string arrays without nulls or empty ids; category null where there is none.

    vectors  the users are queries: their vectors
    """

    user: pa.Array
    item: pa.Array
    stamp: Stamps | None
    category: pa.Array | None
    vectors: BatchVectors | None = None

    def __len__(self) -> int:
        return len(self.user)


@dataclass(frozen=True)
class BatchVectors:
    """vectors_RF: float32[R, F], finite; row_of_event_E: int64[E], the row of each event's user."""

    vectors_RF: NDArray[np.float32]
    row_of_event_E: NDArray[np.int64]


def read_log(path: Path, log: EventFormat, scratch: Path, *, block_bytes: int) -> Iterator[LogBatch]:
    """The log's events in file order, a block at a time.

    scratch       a folder for the plain copy of a gzipped Parquet file
    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData, naming the file, the row (1 = the first event) and the column, for a missing file or column, a value that
    cannot be read, an empty id, or a line with too few or too many fields. Of lists it names the file and the line.
    """
    if not path.is_file():
        raise InvalidData("log", str(path), "a file that exists")
    if isinstance(log, ListsFormat):
        yield from _lists(path, log.separator, block_bytes)
        return
    if isinstance(log, CsvFormat):
        source = _text_columns(path, log, block_bytes)
    else:
        source = parquet_batches(path, log.columns, scratch, max(1, block_bytes // 32))
    rows = 0
    for batch in source:
        columns = dict(zip(log.columns, batch.columns, strict=True))
        place = Place(path.name, rows, log.columns)
        yield LogBatch(
            place.ids("user", columns["user"]),
            place.ids("item", columns["item"]),
            place.timestamps(columns["timestamp"], log.timestamp_type) if log.timestamp is not None else None,
            place.categories(columns["category"]) if log.category is not None else None,
        )
        rows += batch.num_rows


def _text_columns(path: Path, log: CsvFormat, block_bytes: int) -> Iterator[pa.RecordBatch]:
    names = [str(column) if log.by_name else f"f{column}" for column in log.columns.values()]
    one_byte = len(log.separator.encode()) == 1
    skipped_lines = int(log.header and not log.by_name)
    bad_rows: list[pa_csv.InvalidRow] = []

    def stop(row: pa_csv.InvalidRow) -> str:
        bad_rows.append(row)
        return "error"

    # One thread: only then does the parser know row numbers.
    read = pa_csv.ReadOptions(use_threads=False, block_size=block_bytes, autogenerate_column_names=not log.by_name, skip_rows=skipped_lines)
    parse = pa_csv.ParseOptions(
        delimiter=log.separator if one_byte else UNIT_SEPARATOR,
        quote_char='"' if log.quoted and one_byte else False,
        newlines_in_values=log.quoted and one_byte,
        invalid_row_handler=stop,
    )
    convert = pa_csv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    try:
        with _open_text(path, None if one_byte else log.separator) as file, pa_csv.open_csv(file, read, parse, convert) as reader:
            yield from reader
    except KeyError:
        first = _first_line(path, log.separator)
        have = first if log.by_name else list(range(len(first)))
        role, column = next((role, column) for role, column in log.columns.items() if column not in have)
        raise InvalidData(f"{path.name}: column {role}", column, f"one of {have}") from None
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        if bad_rows:
            row = bad_rows[0]
            number = row.number - int(log.header)
            text = row.text.replace(UNIT_SEPARATOR, log.separator)
            raise InvalidData(f"{path.name}: row {number}", text, f"{row.expected_columns} fields, not {row.actual_columns}") from None
        if "Empty CSV file" in str(error):
            return
        raise InvalidData(path.name, str(error), "readable text with one event a line") from error


def _lists(path: Path, separator: str, block_bytes: int) -> Iterator[LogBatch]:
    """The events of a file with one user a line. Blank lines are passed over, as in the other text formats.

    So are lines with nothing but a user: files of what is to be found have them. A file of nothing else is refused, for its separator is
    probably another one.
    """
    lines_before, events, alone = 0, 0, None
    for text in _whole_lines(path, block_bytes):
        lines = pa.array([_without_end(line, separator) for line in text.split("\n")], pa.string())
        number = np.flatnonzero(pc.not_equal(lines, "").to_numpy(zero_copy_only=False))
        fields = pc.split_pattern(lines.take(pa.array(number)), separator)
        length = pc.list_value_length(fields).to_numpy()
        values = pc.list_flatten(fields)
        empty = np.flatnonzero(pc.equal(values, "").to_numpy(zero_copy_only=False))
        bad = np.searchsorted(np.cumsum(length), empty, side="right")
        if len(bad):
            raise _not_a_list(path, separator, lines_before + int(number[bad.min()]), lines[int(number[bad.min()])].as_py())
        events += len(values) - len(length)
        if alone is None and len(number):
            alone = lines_before + int(number[0]), lines[int(number[0])].as_py()
        is_user = np.zeros(len(values), bool)
        is_user[np.cumsum(length) - length] = True
        users = values.filter(pa.array(is_user)).take(pa.array(np.repeat(np.arange(len(length)), length - 1)))
        yield LogBatch(users, values.filter(pa.array(~is_user)), None, None)
        lines_before += len(lines)
    if events == 0 and alone is not None:
        raise _not_a_list(path, separator, *alone)


def _without_end(line: str, separator: str) -> str:
    """Without a carriage return, and without blanks after the last id where blanks are between them."""
    line = line.removesuffix("\r")
    return line.rstrip(separator) if separator.isspace() else line


def _not_a_list(path: Path, separator: str, line: int, value: str) -> InvalidData:
    expected = f"an id of a user, then at least one of an item, with {separator!r} between ids, none of them empty"
    return InvalidData(f"{path.name}: line {line + 1}", value, expected)


def _whole_lines(path: Path, block_bytes: int) -> Iterator[str]:
    """The unzipped text in pieces of about `block_bytes`, cut at line ends, which are left out there."""
    lines_before = 0
    try:
        with _open_text(path, None) as file:
            while block := file.read(block_bytes):
                block += file.readline()
                text = block.removesuffix(b"\n").decode("utf-8-sig" if lines_before == 0 else "utf-8")
                yield text
                lines_before += text.count("\n") + 1
    except UnicodeDecodeError as error:
        line = lines_before + error.object.count(b"\n", 0, error.start) + 1
        raise InvalidData(f"{path.name}: line {line}", error.object[error.start : error.end], "UTF-8") from error
    except (OSError, EOFError) as error:
        raise InvalidData(path.name, str(error), "readable text with one user a line") from error


def parquet_batches(path: Path, columns: Mapping[str, Column], scratch: Path, rows: int) -> Generator[pa.RecordBatch]:
    """The columns of each role, so many rows at a time. Raises InvalidData for a file that is not Parquet or lacks a column."""
    source = path
    try:
        if path.suffix == ".gz":
            source = scratch / "unzipped.parquet"  # Parquet is read from its end, so a stream will not do.
            with gzip.open(path) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        with pa_parquet.ParquetFile(source) as file:
            have = file.schema_arrow.names
            names = []
            for role, column in columns.items():
                if (column not in have) if isinstance(column, str) else column >= len(have):
                    raise InvalidData(f"{path.name}: column {role}", column, f"one of {have}")
                names.append(column if isinstance(column, str) else have[column])
            for batch in file.iter_batches(rows, columns=names):
                yield batch.select(names)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise InvalidData(path.name, str(error), "a Parquet file") from error


def _open_text(path: Path, separator: str | None) -> io.BufferedReader:
    """The unzipped text; with `separator`, each occurrence replaced by UNIT_SEPARATOR."""
    stream = pa.input_stream(str(path), compression="gzip" if path.suffix == ".gz" else None)
    return io.BufferedReader(_Lines(stream, separator), 1 << 20)


def _first_line(path: Path, separator: str) -> list[str]:
    with io.TextIOWrapper(_open_text(path, None), encoding="utf-8-sig") as file:
        return [name.strip('"') for name in file.readline().rstrip("\r\n").split(separator)]


class _Lines(io.RawIOBase):
    """A stream of lines as the parser takes them: separators of several bytes replaced, the last line ended.

    Without the line end pyarrow takes a single line without a header for an empty file.
    """

    def __init__(self, stream: BinaryIO, separator: str | None) -> None:
        self._stream, self._separator = stream, separator
        self._lines, self._rest = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._lines:
            block = self._stream.read(1 << 20)
            if not block and not self._rest:
                return 0
            # Only whole lines are rewritten: a block may end in the middle of a separator, a line may not.
            whole, newline, self._rest = (self._rest + (block or b"\n")).rpartition(b"\n")
            self._lines = whole + newline
            if self._separator is not None:
                self._lines = self._lines.replace(self._separator.encode(), UNIT_SEPARATOR.encode())
        size = min(len(buffer), len(self._lines))
        buffer[:size] = self._lines[:size]
        self._lines = self._lines[size:]
        return size


@dataclass(frozen=True)
class Place:
    """Where a block of values comes from, to check them and to say which one is wrong."""

    file: str
    first_row: int
    columns: Mapping[str, Column]

    def wrong(self, role: str, row: int, value: object, expected: str) -> InvalidData:
        field = f"{self.file}: row {self.first_row + row + 1}, column {role}"
        return InvalidData(field, value, f"{expected} in column {self._column(role)}")

    def _column(self, role: str) -> str:
        return repr(self.columns[role])

    def strings(self, role: str, values: pa.Array) -> pa.Array:
        """A column of ids or names as strings; integers (Parquet) are written out."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if not any(fits(values.type) for fits in (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)):
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

    def timestamps(self, values: pa.Array, kind: Literal["integer", "float", "datetime"]) -> Stamps:
        """int64 (integers, or microseconds of a date and time) or float64."""
        parse, expected = {
            "integer": (_integers, "an integer"),
            "float": (_floats, "a finite number"),
            "datetime": (_microseconds, "an ISO 8601 date and time (all with a zone or all without)"),
        }[kind]
        stamps = parse(values)
        if stamps is not None:
            return stamps
        row = _first_where(lambda n: parse(values[:n]) is None, len(values)) - 1
        raise self.wrong("timestamp", row, values[row].as_py(), expected)


def _integers(values: pa.Array) -> Stamps | None:
    return _cast(values, pa.int64())


def _floats(values: pa.Array) -> Stamps | None:
    return _cast(values, pa.float64())


def _microseconds(values: pa.Array) -> Stamps | None:
    zones = (None, "UTC") if pa.types.is_string(values.type) else (getattr(values.type, "tz", None),)
    return next((stamps for zone in zones if (stamps := _cast(values, pa.timestamp("us", zone))) is not None), None)


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
