"""Parquet logs: one file, or a folder of many with partitions at any depth, as blocks of their columns.

Knows files, row groups and columns. Does not know what columns mean. A folder's files are read in the order of their paths' UTF-8 bytes.
Names that begin with `_` or `.` are skipped (`_SUCCESS`, checksums), as by other readers of such folders; all other files are Parquet. A
column that no file has may be in the path, as `day=2024-05-01` (Hive partitions).
"""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from espalier.errors import InvalidData
from espalier.logs.log_columns import Column, position_of
from espalier.logs.log_values import RowSource, table_row

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""A missing value in a path."""
MAGIC = b"PAR1"
"""The first bytes of a Parquet file."""
READ_BYTES = 1 << 20
"""Bytes of a column read at a time, whatever the size of its row group."""


def is_parquet(path: Path) -> bool:
    """Whether a table is Parquet: a folder, a name that ends in `.parquet` or `.parquet.gz`, or a file that begins and ends with MAGIC."""
    if path.is_dir() or path.name.endswith((".parquet", ".parquet.gz")):
        return True
    try:
        if path.suffix != ".gz":
            with path.open("rb") as file:
                begin = file.read(len(MAGIC))
                file.seek(max(path.stat().st_size - len(MAGIC), 0))
                return begin == file.read() == MAGIC
        with pa.input_stream(str(path), compression="gzip") as stream:
            return bool(stream.read(len(MAGIC)) == MAGIC)
    except OSError:  # the reader of the file raises the error
        return False


def files_of(path: Path) -> list[Path]:
    """The file itself, or a folder's files in order. Raises InvalidData for a folder without any."""
    if not path.is_dir():
        return [path]
    inside: list[Path] = []
    seen_folders: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(path, onerror=_refused, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen_folders:
            raise InvalidData("log", folder, "each folder once: a link leads to one that was read")
        seen_folders.add((status.st_dev, status.st_ino))
        below[:] = [name for name in below if not name.startswith(("_", "."))]
        inside += [Path(folder) / name for name in names if not name.startswith(("_", "."))]
    files = sorted(inside, key=lambda file: _bytes_of(file.relative_to(path)))
    if not files:
        raise InvalidData("log", str(path), "a folder with Parquet files")
    return files


def _refused(error: OSError) -> None:
    raise InvalidData("log", str(error.filename), f"a folder that can be read ({error.strerror})") from error


def first_rows(log: Path, scratch: Path, rows: int) -> pa.RecordBatch:
    """All columns of the first file that it has once, of some rows. Raises InvalidData if it is not Parquet."""
    file = files_of(log)[0]
    with opened(file, name_of(file, log), scratch) as parquet:
        names = _names(parquet.schema_arrow, file, log)
    with closing(_batches(file, log, {name: name for name in names if names.count(name) == 1}, scratch, rows)) as batches:
        return next(batches)[1]


def parquet_batches(path: Path, columns: Mapping[str, Column], scratch: Path, rows: int) -> Generator[tuple[RowSource, pa.RecordBatch]]:
    """The columns of each role, `rows` rows at a time, each block with its source. A file without rows gives an empty block.

    Raises InvalidData, naming the file, for one that is not Parquet, lacks a column, or has another type of values in a column than the
    first file. All files are checked before the first is read, so that an error in the last one does not come after an hour.
    """
    files = files_of(path)
    first: tuple[str, dict[str, tuple[Column, str]]] | None = None
    if len(files) > 1:
        for file in files:
            name = name_of(file, path)
            with opened(file, name, scratch) as parquet:
                stored = _stored_columns(parquet.schema_arrow, file, path, columns)
            if first is None:
                first = name, stored
            for role, (column, values) in stored.items():
                if (column, values) != first[1][role]:
                    expected = "column {!r} of {}, as in {}".format(*first[1][role], first[0])
                    raise InvalidData(f"{name}: column {role}", f"column {column!r} of {values}", expected)
    for file in files:
        yield from _batches(file, path, columns, scratch, rows)


def _batches(file: Path, log: Path, columns: Mapping[str, Column], scratch: Path, rows: int) -> Generator[tuple[RowSource, pa.RecordBatch]]:
    name = name_of(file, log)
    with opened(file, name, scratch) as parquet:
        stored = _stored_columns(parquet.schema_arrow, file, log, columns)
        partitions = _partitions(file, log)
        names = parquet.schema_arrow.names
        stored_names = [column for column, _ in stored.values() if column in names]

        def block(batch: pa.RecordBatch) -> pa.RecordBatch:
            arrays = [
                batch.column(column) if column in names else pa.repeat(pa.scalar(partitions[str(column)], pa.string()), len(batch))
                for column, _ in stored.values()
            ]
            # Arrow has no `take` for views.
            arrays = [array.cast(pa.string()) if array.type == pa.string_view() else array for array in arrays]
            return pa.RecordBatch.from_arrays(arrays, names=list(columns))

        if parquet.metadata.num_rows == 0:
            yield _source(name, columns, 0), block(pa.RecordBatch.from_pylist([], parquet.schema_arrow))
        first = 0
        for group in range(parquet.num_row_groups):
            try:
                for batch in parquet.iter_batches(rows, row_groups=[group], columns=stored_names):
                    yield _source(name, columns, first), block(batch)
                    first += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise InvalidData(f"{name}: row group {group + 1}", str(error), "readable pages") from error


def _source(name: str, columns: Mapping[str, Column], first: int) -> RowSource:
    return RowSource(name, columns, lambda row: table_row(first + row))


@contextmanager
def opened(file: Path, name: str, scratch: Path) -> Iterator[pa_parquet.ParquetFile]:
    """The opened file. Raises InvalidData if it is not Parquet."""
    source = file
    try:
        if file.suffix == ".gz":
            source = scratch / "unzipped.parquet"  # Parquet is read from its end, so a stream will not do.
            with gzip.open(file) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        opened = pa_parquet.ParquetFile(source, buffer_size=READ_BYTES)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        whole = "" if name == file.name else "; only folders of Parquet files are logs: write parts of text into one file, with one header"
        raise InvalidData(name, str(error), f"a Parquet file{whole}") from error
    with opened:
        yield opened


def _names(schema: pa.Schema, file: Path, log: Path) -> list[str]:
    return [*schema.names, *(name for name in _partitions(file, log) if name not in schema.names)]


def _stored_columns(schema: pa.Schema, file: Path, log: Path, columns: Mapping[str, Column]) -> dict[str, tuple[Column, str]]:
    """Role → name of its column, and the kind of the column's values. Raises InvalidData for a missing or ambiguous column."""
    names = _names(schema, file, log)
    stored: dict[str, tuple[Column, str]] = {}
    for role, column in columns.items():
        if isinstance(column, int) and column < len(schema.names):
            column = schema.names[column]
        position = position_of(names, str(column))
        if position is None:
            raise InvalidData(f"{name_of(file, log)}: column {role}", column, f"one of {names}, once")
        column = names[position]
        stored[role] = column, _kind(schema.field(column).type) if column in schema.names else "strings"
    return stored


def _kind(values: pa.DataType) -> str:
    """The kind of values that a type holds for a reader. Widths and units do not matter."""
    if pa.types.is_dictionary(values):
        return _kind(values.value_type)
    if pa.types.is_list(values) or pa.types.is_large_list(values) or pa.types.is_fixed_size_list(values):
        return f"lists of {_kind(values.value_type)}"
    if pa.types.is_timestamp(values):
        return "times without a zone" if values.tz is None else "times with a zone"
    kinds = {
        "strings": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "numbers": (pa.types.is_integer, pa.types.is_floating),
    }
    return next((kind for kind, tests in kinds.items() if any(test(values) for test in tests)), str(values))


def _partitions(file: Path, log: Path) -> dict[str, str | None]:
    if file == log:
        return {}
    pairs = (folder.partition("=") for folder in file.relative_to(log).parent.parts if "=" in folder)
    return {unquote(key): None if value == NULL_PARTITION else unquote(value) for key, _, value in pairs}


def name_of(file: Path, log: Path) -> str:
    """A file's name in messages: its path below the log's folder, with that folder's name."""
    return file.name if file == log else f"{log.absolute().name}/{file.relative_to(log).as_posix()}"


def _bytes_of(name: Path) -> bytes:
    return name.as_posix().encode("utf-8", "surrogateescape")
