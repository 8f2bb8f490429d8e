"""Log files as checked columns: CSV-like text with any separator and lists with a user a line, each optionally gzipped, and Parquet.

Knows events. Does not know users, catalogues or orders: see `interactions.py`. Tables are read by `text_files.py` and `parquet_logs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import AnyStr

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.errors import InvalidData

from ..data.log_values import BadRows, Place, Problem, Stamps, Timestamps, as_text, empty_rows, unreadable_rows
from ..data.parquet_logs import is_parquet, parquet_batches
from ..data.text_files import TextTableFile, encoding_expected, open_text, text_batches
from ..specification.log_format import CsvFormat, EventFormat, ListsFormat, LogFormat, ParquetFormat


@dataclass(frozen=True)
class LogBatch:
    """Some consecutive events: string arrays without nulls or empty ids; category null where there is none.

    vectors_RF      where users are queries: float32[R, F], finite
    row_of_event_E  int64[E], in these vectors: the row of each event's user
    """

    user: pa.Array
    item: pa.Array
    stamp: Stamps | None = None
    category: pa.Array | None = None
    vectors_RF: NDArray[np.float32] | None = None
    row_of_event_E: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.user)


def read_as(path: Path, log: LogFormat) -> LogFormat:
    """How a log is read: what `is_parquet` says is Parquet where events are rows of a table.

    Raises InvalidData for a path that is not there, and for a folder where only a file can be read.
    """
    if not path.exists():
        raise InvalidData("log", str(path), "a file that exists, or a folder of Parquet files")
    if isinstance(log, CsvFormat) and is_parquet(path):
        return ParquetFormat(**log.model_dump(include=set(ParquetFormat.model_fields) - {"format"}))
    if path.is_dir() and isinstance(log, ListsFormat):
        raise InvalidData("log", str(path), f"a file, since data.format.format is {log.format}; a folder holds Parquet files")
    return log


def read_log(path: Path, log: EventFormat, scratch: Path, bad_rows: BadRows, *, block_bytes: int) -> Iterator[LogBatch]:
    """The log's events in file order, a block at a time.

    log           as `read_as` gives it
    scratch       a folder for the plain copy of a gzipped Parquet file
    bad_rows      what happens to rows that cannot be read
    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData, naming the file, the line and the column, for a missing column, and where `bad_rows` refuses them for a value that
    cannot be read, an empty id, a time with a zone where the first has none or without one where it has, or a line with too few or too
    many fields. Of Parquet it names the file, the row group and the row in it.
    """
    if isinstance(log, ListsFormat):
        yield from _lists(path, log, bad_rows, block_bytes)
        return
    if isinstance(log, CsvFormat):
        source = text_batches(TextTableFile.of(path, log, log.header), log.columns, bad_rows, block_bytes)
        timestamps = Timestamps(log.timestamp_type, log.decimal, log.time_format)
    else:
        source = parquet_batches(path, log.columns, scratch, max(1, block_bytes // 32))
        timestamps = Timestamps(log.timestamp_type, written=log.time_format)
    for place, batch in source:
        events = _events(place, batch, timestamps, bad_rows)
        bad_rows.kept += len(events)
        yield events


def _events(place: Place, batch: pa.RecordBatch, timestamps: Timestamps, bad_rows: BadRows) -> LogBatch:
    """The rows of a block whose ids and times can be read."""
    roles = batch.schema.names
    for role in ("user", "item"):
        ids = place.strings(role, batch.column(role))
        wrong = empty_rows(ids)
        bad_rows.add(f"no {role}", wrong, partial(_no_id, place, role, ids))
        place, batch = place.without(batch, wrong)
    if "timestamp" in roles:
        values = batch.column("timestamp")
        wrong = timestamps.unreadable(values, bad_rows.most)
        bad_rows.add("unreadable timestamp", wrong, partial(_no_time, place, timestamps, values))
        place, batch = place.without(batch, wrong)
    return LogBatch(
        place.strings("user", batch.column("user")),
        place.strings("item", batch.column("item")),
        timestamps.read(batch.column("timestamp")) if "timestamp" in roles else None,
        place.categories(batch.column("category")) if "category" in roles else None,
    )


def _no_id(place: Place, role: str, ids: pa.Array, row: int) -> Problem:
    return place.wrong(role, row, ids[row].as_py(), "an id")


def _no_time(place: Place, timestamps: Timestamps, values: pa.Array, row: int) -> Problem:
    return place.wrong("timestamp", row, values[row].as_py(), timestamps.expected(values[row : row + 1]))


def _lists(path: Path, log: ListsFormat, bad_rows: BadRows, block_bytes: int) -> Iterator[LogBatch]:
    """The events of a file with one user a line. Blank lines are passed over, as in the other text formats.

    So are lines with nothing but a user: files of what is to be found have them. A file of nothing else is refused, for its separator is
    probably another one.
    """
    expected = f"an id of a user, then at least one of an item, with {log.separator!r} between ids, none of them empty"
    lines_before, events, alone = 0, 0, None
    for block in _whole_lines(path, log, block_bytes):
        every = [without_end(line.removesuffix(b"\r"), log.separator.encode()) for line in block.split(b"\n")]
        number = np.array([number for number, line in enumerate(every, lines_before + 1) if line], np.int64)
        raw = pa.array([line for line in every if line], pa.binary())
        lines_before += len(every)
        wrong = unreadable_rows(raw, lambda part: as_text(part) is not None, bad_rows.most)
        bad_rows.add(f"not {log.encoding}", wrong, partial(_wrong_line, path, number, raw, encoding_expected(log)))
        number, lines = np.delete(number, wrong), as_text(_without(raw, wrong))
        ids = pc.split_pattern(lines, log.separator)
        empty = np.flatnonzero(pc.equal(pc.list_flatten(ids), "").to_numpy(zero_copy_only=False))
        wrong = np.unique(np.searchsorted(np.cumsum(_lengths(ids)), empty, side="right"))
        bad_rows.add("no id", wrong, partial(_wrong_line, path, number, lines, expected))
        number, lines, ids = np.delete(number, wrong), _without(lines, wrong), _without(ids, wrong)
        bad_rows.kept += len(ids)
        if alone is None and len(ids):
            alone = _wrong_line(path, number, lines, expected, 0)
        length, values = _lengths(ids), pc.list_flatten(ids)
        events += len(values) - len(length)
        is_user = np.zeros(len(values), bool)
        is_user[np.cumsum(length) - length] = True
        users = values.filter(pa.array(is_user)).take(pa.array(np.repeat(np.arange(len(length)), length - 1)))
        yield LogBatch(users, values.filter(pa.array(~is_user)))
    if events == 0 and alone is not None:
        raise InvalidData(*alone)


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists), np.int64)


def _without(values: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    return values.take(pa.array(np.delete(np.arange(len(values)), rows))) if len(rows) else values


def without_end(line: AnyStr, separator: AnyStr) -> AnyStr:
    """Without blanks after the last id where blanks are between them."""
    while separator.isspace() and line.endswith(separator):
        line = line.removesuffix(separator)
    return line


def _wrong_line(path: Path, number: NDArray[np.int64], lines: pa.Array, expected: str, row: int) -> Problem:
    return Problem(f"{path.name}: line {number[row]}", lines[row].as_py(), expected)


def _whole_lines(path: Path, log: ListsFormat, block_bytes: int) -> Iterator[bytes]:
    """The unzipped text in pieces of about `block_bytes`, cut at line ends, which are left out there."""
    with open_text(path, log, None) as file:
        while block := file.read(block_bytes):
            yield (block + file.readline()).removesuffix(b"\n")
