"""Log files as checked columns: CSV-like text with any separator and lists with a user a line, each optionally gzipped, and Parquet.

Knows files and columns. Does not know users, catalogues or orders: see `interactions.py`; Parquet is read by `parquet_logs.py`.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from espalier.errors import InvalidData
from training.data.log_values import Place, Stamps, Timestamps
from training.data.parquet_logs import parquet_batches
from training.specification.log_format import UNIT_SEPARATOR, CsvFormat, EventFormat, ListsFormat, LogFormat, ParquetFormat


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


def read_as(path: Path, log: LogFormat) -> LogFormat:
    """How a log is read: a folder, and a name that ends in `.parquet` or `.parquet.gz`, is Parquet where events are rows of a table.

    Raises InvalidData for a path that is not there, and for a folder where only a file can be read.
    """
    if not path.exists():
        raise InvalidData("log", str(path), "a file that exists, or a folder of Parquet files")
    if isinstance(log, CsvFormat) and (path.is_dir() or path.name.endswith((".parquet", ".parquet.gz"))):
        return ParquetFormat(**log.model_dump(include=set(ParquetFormat.model_fields) - {"format"}))
    if path.is_dir() and isinstance(log, ListsFormat):
        raise InvalidData("log", str(path), f"a file, since data.format.format is {log.format}; a folder holds Parquet files")
    return log


def read_log(path: Path, log: EventFormat, scratch: Path, *, block_bytes: int) -> Iterator[LogBatch]:
    """The log's events in file order, a block at a time.

    log           as `read_as` gives it
    scratch       a folder for the plain copy of a gzipped Parquet file
    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData, naming the file, the line and the column, for a missing column, a value that cannot be read, an empty id, a time
    with a zone where the first has none or without one where it has, or a line with too few or too many fields. Of Parquet it names the
    file, the row group and the row in it.
    """
    if isinstance(log, ListsFormat):
        yield from _lists(path, log.separator, block_bytes)
        return
    if isinstance(log, CsvFormat):
        source = _placed(path, log, block_bytes)
    else:
        source = parquet_batches(path, log.columns, scratch, max(1, block_bytes // 32))
    timestamps = Timestamps(log.timestamp_type)
    for place, batch in source:
        columns = dict(zip(log.columns, batch.columns, strict=True))
        yield LogBatch(
            place.ids("user", columns["user"]),
            place.ids("item", columns["item"]),
            timestamps.read(columns["timestamp"], place) if log.timestamp is not None else None,
            place.categories(columns["category"]) if log.category is not None else None,
        )


def _placed(path: Path, log: CsvFormat, block_bytes: int) -> Iterator[tuple[Place, pa.RecordBatch]]:
    rows = 0
    for batch in _text_columns(path, log, block_bytes):
        yield Place(path.name, rows, log.columns, line_of=lambda row: _line_of(path, log, row)), batch
        rows += batch.num_rows


def _line_of(path: Path, log: CsvFormat, row: int) -> int:
    """The line of an event, from 0."""
    return line_of(path, row + int(log.header), log.quoted and len(log.separator.encode()) == 1)


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
        with open_text(path, None if one_byte else log.separator) as file, pa_csv.open_csv(file, read, parse, convert) as reader:
            yield from reader
    except KeyError:
        first = _first_line(path, log.separator)
        have = first if log.by_name else list(range(len(first)))
        role, column = next((role, column) for role, column in log.columns.items() if column not in have)
        raise InvalidData(f"{path.name}: column {role}", column, f"one of {have}") from None
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        if bad_rows:
            _first_line(path, log.separator)  # of UTF-16 the parser sees other rows
            row = bad_rows[0]
            line = _line_of(path, log, row.number - 1 - int(log.header))
            text = row.text.replace(UNIT_SEPARATOR, log.separator)
            raise InvalidData(f"{path.name}: line {line}", text, f"{row.expected_columns} fields, not {row.actual_columns}") from None
        if "Empty CSV file" in str(error):
            return
        if "UTF8" in str(error):
            raise not_utf8(path) from None
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
        with open_text(path, None) as file:
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


def open_text(path: Path, separator: str | None) -> io.BufferedReader:
    """The unzipped text; with `separator`, each occurrence replaced by UNIT_SEPARATOR."""
    stream = pa.input_stream(str(path), compression="gzip" if path.suffix == ".gz" else None)
    return io.BufferedReader(_Lines(stream, separator), 1 << 20)


def _first_line(path: Path, separator: str) -> list[str]:
    """The names of a header. Raises InvalidData where the line is not UTF-8."""
    with open_text(path, None) as file:
        try:
            line = file.readline().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise not_utf8(path) from None
    return [name.strip('"') for name in line.rstrip("\r\n").split(separator)]


def not_utf8(path: Path) -> InvalidData:
    """Names the first line that is not UTF-8, of a file that has one."""
    with open_text(path, None) as file:
        line, text = next((line, text) for line, text in enumerate(file, 1) if not _is_utf8(text))
    return InvalidData(f"{path.name}: line {line}", text, "UTF-8")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


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


def line_of(file: Path, record: int, quoted: bool = True, empty: bool = False) -> int:
    """The line, from 1 as an editor shows it, on which a record begins; record 0 is the header, or the first event where there is none.

    Reads the file from its beginning, so only errors ask.

    quoted  whether fields may be in quotes, with line ends in them
    empty   whether an empty line after the header is a record, as polars has it
    """
    inside, records = False, 0
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for line, text in enumerate(lines, 1):
            if not inside and (text.strip(b"\r\n") or (empty and records)):
                if records == record:
                    return line
                records += 1
            inside ^= quoted and text.count(b'"') % 2 == 1
    return record + 1
