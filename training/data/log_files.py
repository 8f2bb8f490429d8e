"""Log files as checked columns: CSV-like text with any separator and lists with a user a line, each optionally gzipped, and Parquet.

Knows events. Does not know users, catalogues or orders: see `interactions.py`. Tables are read by `text_files.py` and `parquet_logs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Int64
from espalier.errors import InvalidData
from espalier.logs.log_events import LogBatch, events_of
from espalier.logs.log_values import BadRows, Timestamps, as_text, unreadable_rows
from espalier.logs.parquet_logs import is_parquet, parquet_batches
from espalier.logs.text_files import TextTableFile, open_text, text_batches, without_end

from ..specification.log_format import CsvFormat, EventFormat, ListsFormat, LogFormat, ParquetFormat


def read_as(path: Path, log: LogFormat) -> LogFormat:
    """The format with which a log is read: a table that `is_parquet` recognises is read as Parquet.

    Raises InvalidData for a missing path, and for a folder if the format only allows a file.
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

    log           as `read_as` returns it
    scratch       a folder for the unzipped copy of a gzipped Parquet file
    bad_rows      refuses or counts unreadable rows
    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData for a missing column. If `bad_rows` refuses them, also for an unreadable value, an empty id, a time whose zone does
    not fit the first time's, and a line with too few or too many fields. The error names the file, the line and the column; of Parquet the
    file and the row.
    """
    if isinstance(log, ListsFormat):
        yield from _lists(path, log, bad_rows, block_bytes)
        return
    if isinstance(log, CsvFormat):
        batches = text_batches(log.file(path, log.header), log.columns, bad_rows, block_bytes)
        timestamps = Timestamps(log.timestamp_type, log.decimal, log.time_format)
    else:
        batches = parquet_batches(path, log.columns, scratch, max(1, block_bytes // 32))
        timestamps = Timestamps(log.timestamp_type, time_format=log.time_format)
    for source, batch in batches:
        yield events_of(source, batch, timestamps, bad_rows)


def _lists(path: Path, log: ListsFormat, bad_rows: BadRows, block_bytes: int) -> Iterator[LogBatch]:
    """The events of a file with one user a line. Blank lines are skipped, as in the other text formats.

    Lines with only a user are skipped, too: test files have them. A file with only such lines is refused, since its separator is probably
    another one.
    """
    expected = f"an id of a user, then at least one of an item, with {log.separator!r} between ids, none of them empty"
    table = TextTableFile(path, log.separator, False, log.encoding, quote_mark="")
    lines_before, events, lone_line = 0, 0, None
    for block in _whole_lines(table, block_bytes):
        all_lines = [without_end(line.removesuffix(b"\r"), log.separator.encode()) for line in block.split(b"\n")]
        number = np.array([number for number, line in enumerate(all_lines, lines_before + 1) if line], np.int64)
        raw = pa.array([line for line in all_lines if line], pa.binary())
        lines_before += len(all_lines)
        wrong_rows = unreadable_rows(raw, lambda part: as_text(part) is not None, bad_rows.most)
        bad_rows.add(f"not {log.encoding}", wrong_rows, partial(_wrong_line, path, number, raw, table.encoding_expected()))
        number, lines = np.delete(number, wrong_rows), as_text(_without(raw, wrong_rows))
        ids = pc.split_pattern(lines, log.separator)
        empty = np.flatnonzero(pc.equal(pc.list_flatten(ids), "").to_numpy(zero_copy_only=False))
        wrong_rows = np.unique(np.searchsorted(np.cumsum(_lengths(ids)), empty, side="right"))
        bad_rows.add("no id", wrong_rows, partial(_wrong_line, path, number, lines, expected))
        number, lines, ids = np.delete(number, wrong_rows), _without(lines, wrong_rows), _without(ids, wrong_rows)
        bad_rows.rows_read += len(ids)
        if lone_line is None and len(ids):
            lone_line = _wrong_line(path, number, lines, expected, 0)
        length, values = _lengths(ids), pc.list_flatten(ids)
        events += len(values) - len(length)
        is_user = np.zeros(len(values), bool)
        is_user[np.cumsum(length) - length] = True
        users = values.filter(pa.array(is_user)).take(pa.array(np.repeat(np.arange(len(length)), length - 1)))
        yield LogBatch(users, values.filter(pa.array(~is_user)))
    if events == 0 and lone_line is not None:
        raise lone_line


def _lengths(lists: pa.Array) -> Int64:
    return np.asarray(pc.list_value_length(lists), np.int64)


def _without(values: pa.Array, rows: Int64) -> pa.Array:
    return values.take(pa.array(np.delete(np.arange(len(values)), rows))) if len(rows) else values


def _wrong_line(path: Path, number: Int64, lines: pa.Array, expected: str, row: int) -> InvalidData:
    return InvalidData(f"{path.name}: line {number[row]}", lines[row].as_py(), expected)


def _whole_lines(table: TextTableFile, block_bytes: int) -> Iterator[bytes]:
    """The unzipped text in pieces of about `block_bytes`, cut at line ends. A piece does not include its last line end."""
    with open_text(table, None) as file:
        while block := file.read(block_bytes):
            yield (block + file.readline()).removesuffix(b"\n")
