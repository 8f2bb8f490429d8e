"""Parquet logs: one file, or a folder of many with partitions at any depth, as blocks of their columns.

Knows files, row groups and columns. Does not know what columns mean. A folder's files are read in the order of their paths' UTF-8 bytes.
Names that begin with `_` or `.` are passed over, as by everything else that reads such folders (`_SUCCESS`, checksums); all other files
are Parquet. A column that is in no file may be in the path, as `day=2024-05-01` (Hive's partitions).
"""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from espalier.errors import InvalidData

from ..data.log_values import Place, position_of
from ..specification.log_format import Column

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""What stands in a path for a missing value."""
MAGIC = b"PAR1"
"""The first bytes of a Parquet file."""
READ_BYTES = 1 << 20
"""Of a column that are read at a time, however large its row group is."""


def is_parquet(path: Path) -> bool:
    """Whether a table is Parquet: a folder, a name that ends in `.parquet` or `.parquet.gz`, or what such a file begins and ends with."""
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
    except OSError:  # its reader says why
        return False


def files_of(path: Path) -> list[Path]:
    """The file itself, or a folder's files in order. Raises InvalidData for a folder without any."""
    if not path.is_dir():
        return [path]
    inside: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(path, onerror=_refused, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            raise InvalidData("log", folder, "each folder once: a link leads to one that was read")
        seen.add((status.st_dev, status.st_ino))
        below[:] = [name for name in below if not name.startswith(("_", "."))]
        inside += [Path(folder) / name for name in names if not name.startswith(("_", "."))]
    kept = sorted(inside, key=lambda file: _bytes_of(file.relative_to(path)))
    if not kept:
        raise InvalidData("log", str(path), "a folder with Parquet files")
    return kept


def _refused(error: OSError) -> None:
    raise InvalidData("log", str(error.filename), f"a folder that can be read ({error.strerror})") from error


def parquet_batches(path: Path, columns: Mapping[str, Column], scratch: Path, rows: int) -> Generator[tuple[Place, pa.RecordBatch]]:
    """The columns of each role, so many rows at a time, each with its place.

    Raises InvalidData, naming the file, for one that is not Parquet, lacks a column, or has another type of values in one than the first
    file has. All files are checked before the first is read: the last one is not found to be wrong after an hour.
    """
    files = files_of(path)
    first: tuple[str, dict[str, tuple[Column, str]]] | None = None
    if len(files) > 1:
        for file in files:
            name = _name(file, path)
            with opened(file, name, scratch) as parquet:
                found = _found(parquet.schema_arrow, file, path, columns)
            if first is None:
                first = name, found
            for role, (column, values) in found.items():
                if (column, values) != first[1][role]:
                    expected = "column {!r} of {}, as in {}".format(*first[1][role], first[0])
                    raise InvalidData(f"{name}: column {role}", f"column {column!r} of {values}", expected)
    for file in files:
        yield from _batches(file, path, columns, scratch, rows)


def _batches(file: Path, log: Path, columns: Mapping[str, Column], scratch: Path, rows: int) -> Generator[tuple[Place, pa.RecordBatch]]:
    name = _name(file, log)
    with opened(file, name, scratch) as parquet:
        found = _found(parquet.schema_arrow, file, log, columns)
        of_path = _partitions(file, log)
        have = parquet.schema_arrow.names
        stored = [column for column, _ in found.values() if column in have]
        for group in range(parquet.num_row_groups):
            first = 0
            try:
                for batch in parquet.iter_batches(rows, row_groups=[group], columns=stored):
                    arrays = [
                        batch.column(column) if column in have else pa.repeat(pa.scalar(of_path[str(column)], pa.string()), len(batch))
                        for column, _ in found.values()
                    ]
                    yield _place(name, columns, group, first), pa.RecordBatch.from_arrays(arrays, names=list(columns))
                    first += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise InvalidData(f"{name}: row group {group + 1}", str(error), "readable pages") from error


def _place(name: str, columns: Mapping[str, Column], group: int, first: int) -> Place:
    return Place(name, columns, lambda row: f"row group {group + 1}, row {first + row + 1}")


@contextmanager
def opened(file: Path, name: str, scratch: Path) -> Iterator[pa_parquet.ParquetFile]:
    """Raises InvalidData for a file that is not Parquet."""
    source = file
    try:
        if file.suffix == ".gz":
            source = scratch / "unzipped.parquet"  # Parquet is read from its end, so a stream will not do.
            with gzip.open(file) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        opened = pa_parquet.ParquetFile(source, buffer_size=READ_BYTES)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        raise InvalidData(name, str(error), "a Parquet file") from error
    with opened:
        yield opened


def _found(schema: pa.Schema, file: Path, log: Path, columns: Mapping[str, Column]) -> dict[str, tuple[Column, str]]:
    """The name and the kind of values of each role's column. Raises InvalidData for one that is not there, or there twice."""
    of_path, found = _partitions(file, log), {}
    have = [*schema.names, *(name for name in of_path if name not in schema.names)]
    for role, column in columns.items():
        if isinstance(column, int) and column < len(schema.names):
            column = schema.names[column]
        position = position_of(have, str(column))
        if position is None:
            raise InvalidData(f"{_name(file, log)}: column {role}", column, f"one of {have}, once")
        column = have[position]
        found[role] = column, _kind(schema.field(column).type) if column in schema.names else "strings"
    return found


def _kind(values: pa.DataType) -> str:
    """What values of a type are to a reader: widths and units do not matter, what is read out does."""
    if pa.types.is_dictionary(values):
        return _kind(values.value_type)
    if pa.types.is_list(values) or pa.types.is_large_list(values) or pa.types.is_fixed_size_list(values):
        return f"lists of {_kind(values.value_type)}"
    if pa.types.is_timestamp(values):
        return "times without a zone" if values.tz is None else "times with a zone"
    kinds = {
        "strings": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "integers": (pa.types.is_integer,),
        "fractions": (pa.types.is_floating,),
    }
    return next((kind for kind, tests in kinds.items() if any(test(values) for test in tests)), str(values))


def _partitions(file: Path, log: Path) -> dict[str, str | None]:
    if file == log:
        return {}
    pairs = (folder.partition("=") for folder in file.relative_to(log).parent.parts if "=" in folder)
    return {unquote(key): None if value == NULL_PARTITION else unquote(value) for key, _, value in pairs}


def _name(file: Path, log: Path) -> str:
    """What messages call a file: its path below the log's folder, with that folder's name."""
    return file.name if file == log else f"{log.absolute().name}/{file.relative_to(log).as_posix()}"


def _bytes_of(name: Path) -> bytes:
    return name.as_posix().encode("utf-8", "surrogateescape")
